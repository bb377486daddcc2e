//! Biases of an expert's projections.

use serde::de::{Error, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;

/// The projections of an expert that have biases: `true`, `false`, `"up"` or `"down"` in a spec.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Biases {
    /// None; `false`.
    #[default]
    None,
    /// The projections before the activation: up, and gate where there is one.
    Up,
    /// The expert's output.
    Down,
    /// Every projection; `true`.
    All,
}

/// The accepted spellings besides `true` and `false`.
pub(crate) const BIASES: &[&str] = &["none", "up", "down", "all"];

impl Biases {
    /// Returns true if up, and gate where there is one, have biases.
    pub fn up(self) -> bool {
        matches!(self, Biases::Up | Biases::All)
    }

    /// Returns true if the output projection has one.
    pub fn down(self) -> bool {
        matches!(self, Biases::Down | Biases::All)
    }

    fn named(word: &str) -> Option<Biases> {
        Some(match word {
            "none" => Biases::None,
            "up" => Biases::Up,
            "down" => Biases::Down,
            "all" => Biases::All,
            _ => return None,
        })
    }
}

impl From<bool> for Biases {
    fn from(all: bool) -> Biases {
        if all { Biases::All } else { Biases::None }
    }
}

impl Serialize for Biases {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Biases::None => to.serialize_bool(false),
            Biases::Up => to.serialize_str("up"),
            Biases::Down => to.serialize_str("down"),
            Biases::All => to.serialize_bool(true),
        }
    }
}

impl<'de> Deserialize<'de> for Biases {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Biases, D::Error> {
        from.deserialize_any(Spelling)
    }
}

struct Spelling;

impl Visitor<'_> for Spelling {
    type Value = Biases;

    fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("true, false, \"up\" or \"down\"")
    }

    fn visit_bool<E: Error>(self, all: bool) -> Result<Biases, E> {
        Ok(all.into())
    }

    fn visit_str<E: Error>(self, word: &str) -> Result<Biases, E> {
        Biases::named(word).ok_or_else(|| E::unknown_variant(word, BIASES))
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<Biases, E> {
        Err(E::invalid_type(Unexpected::Signed(number), &self))
    }
}
