//! Reads the keys of a type off its `Deserialize`, by recording each request and answering it with
//! an acceptable value.

use super::{DTYPES, Key, Kind, REQUIRED, Section, join};
use serde::Deserialize;
use serde::de::value::Error;
use serde::de::{DeserializeSeed, Deserializer, IntoDeserializer, MapAccess, SeqAccess, Visitor};

/// Returns the table that a type reads. A type that requests anything no spec key can be has none.
pub(super) fn section<T: for<'de> Deserialize<'de>>() -> Section {
    let mut kind = None;
    let read = T::deserialize(Probe {
        path: "",
        kind: &mut kind,
    });
    match (read, kind) {
        (Ok(_), Some(Kind::Table(section))) => section,
        (read, kind) => unreachable!("no table: {kind:?}, {:?}", read.err()),
    }
}

/// The recorder behind one requested value.
struct Probe<'k> {
    path: &'k str,
    kind: &'k mut Option<Kind>,
}

impl Probe<'_> {
    fn is(&mut self, kind: Kind) {
        *self.kind = Some(kind);
    }
}

/// The kind recorded for a method, and the answer to it.
macro_rules! scalars {
    ($($ask:ident: $kind:ident, $answer:ident($value:expr);)*) => {$(
        fn $ask<V: Visitor<'de>>(mut self, visitor: V) -> Result<V::Value, Error> {
            self.is(Kind::$kind);
            visitor.$answer($value)
        }
    )*};
}

impl<'de> Deserializer<'de> for Probe<'_> {
    type Error = Error;

    scalars! {
        deserialize_bool: Flag, visit_bool(false);
        deserialize_u8: Count, visit_u64(1);
        deserialize_u16: Count, visit_u64(1);
        deserialize_u32: Count, visit_u64(1);
        deserialize_u64: Count, visit_u64(1);
        deserialize_f32: Number, visit_f64(1.0);
        deserialize_f64: Number, visit_f64(1.0);
        deserialize_str: Text, visit_str("x");
        deserialize_string: Text, visit_str("x");
        // A flag or a word is accepted by exactly one type.
        deserialize_any: Biases, visit_bool(false);
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        mut self,
        name: &'static str,
        words: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.is(match (name, words) {
            ("DType", _) => Kind::Choice(DTYPES),
            ("Select", _) => Kind::Select,
            ("WeightFormat", _) => Kind::Format(words),
            ("Activation", [plain @ .., "expr"]) => Kind::Activation(plain),
            _ => Kind::Choice(words),
        });
        visitor.visit_enum(words[0].into_deserializer())
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        let mut kind = None;
        let item = Item(Some(Probe {
            path: self.path,
            kind: &mut kind,
        }));
        let list = visitor.visit_seq(item)?;
        if let Some(Kind::Table(section)) = kind {
            *self.kind = Some(Kind::List(section));
        }
        Ok(list)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        mut self,
        _: &'static str,
        names: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        let mut keys = Vec::new();
        let value = visitor.visit_map(Fields {
            path: self.path,
            left: names,
            keys: &mut keys,
        })?;
        self.is(Kind::Table(Section { keys }));
        Ok(value)
    }

    serde::forward_to_deserialize_any! {
        i8 i16 i32 i64 i128 u128 char bytes byte_buf unit unit_struct tuple tuple_struct map
        identifier ignored_any
    }
}

/// A list of one item.
struct Item<'k>(Option<Probe<'k>>);

impl<'de> SeqAccess<'de> for Item<'_> {
    type Error = Error;

    fn next_element_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> Result<Option<S::Value>, Error> {
        let item = self.0.take().map(|probe| seed.deserialize(probe));
        item.transpose()
    }
}

/// The fields of a struct, all present.
struct Fields<'k> {
    path: &'k str,
    left: &'static [&'static str],
    keys: &'k mut Vec<Key>,
}

impl<'de> MapAccess<'de> for Fields<'_> {
    type Error = Error;

    fn next_key_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> Result<Option<S::Value>, Error> {
        let name = self.left.first();
        let key = name.map(|name| seed.deserialize((*name).into_deserializer()));
        key.transpose()
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, Error> {
        let (name, left) = self.left.split_first().expect("a key was asked for before");
        self.left = left;
        let (path, mut kind) = (join(self.path, name), None);
        let value = seed.deserialize(Probe {
            path: &path,
            kind: &mut kind,
        })?;
        let required = REQUIRED.iter().find(|(known, _)| *known == path);
        self.keys.push(Key {
            name,
            kind: kind.expect("a value was asked for"),
            required: required.map(|(_, example)| *example),
        });
        Ok(value)
    }
}
