//! MessagePack, as far as AMDGPU metadata uses it.
//!
//! A reader of one page replaces a crate and its three dependencies: the
//! library promises a small dependency tree, and the format is frozen.

/// A decoded value. Floats, binaries and extensions do not occur.
#[derive(Debug, PartialEq)]
pub enum MsgpackValue {
    Nil,
    Bool(bool),
    /// A number. Negative ones do not occur; they read as `None` elsewhere.
    Number(u64),
    Text(String),
    List(Vec<MsgpackValue>),
    Map(Vec<(MsgpackValue, MsgpackValue)>),
}

/// Largest depth of nested lists and maps; metadata has four levels.
const DEEPEST: usize = 16;

impl MsgpackValue {
    /// Reads one value from the front of `bytes`; returns `None` when they are
    /// no value or end too early.
    pub fn read(bytes: &[u8]) -> Option<MsgpackValue> {
        Reader { rest: bytes }.value(DEEPEST)
    }

    pub fn as_map(&self) -> Option<&[(MsgpackValue, MsgpackValue)]> {
        match self {
            MsgpackValue::Map(pairs) => Some(pairs),
            _ => None,
        }
    }

    pub fn as_array(&self) -> Option<&[MsgpackValue]> {
        match self {
            MsgpackValue::List(values) => Some(values),
            _ => None,
        }
    }

    pub fn as_str(&self) -> Option<&str> {
        match self {
            MsgpackValue::Text(text) => Some(text),
            _ => None,
        }
    }

    pub fn as_u64(&self) -> Option<u64> {
        match self {
            MsgpackValue::Number(number) => Some(*number),
            _ => None,
        }
    }
}

struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn value(&mut self, depth: usize) -> Option<MsgpackValue> {
        let depth = depth.checked_sub(1)?;
        Some(match self.byte()? {
            small @ 0x00..=0x7f => MsgpackValue::Number(small.into()),
            tag @ 0x80..=0x8f => self.map((tag & 0x0f).into(), depth)?,
            tag @ 0x90..=0x9f => self.list((tag & 0x0f).into(), depth)?,
            tag @ 0xa0..=0xbf => self.text((tag & 0x1f).into())?,
            0xc0 => MsgpackValue::Nil,
            tag @ (0xc2 | 0xc3) => MsgpackValue::Bool(tag == 0xc3),
            tag @ 0xcc..=0xcf => MsgpackValue::Number(self.number(1 << (tag - 0xcc))?),
            tag @ 0xd9..=0xdb => {
                let length = self.number(1 << (tag - 0xd9))?;
                self.text(length)?
            }
            tag @ (0xdc | 0xdd) => {
                let length = self.number(2 << (tag - 0xdc))?;
                self.list(length, depth)?
            }
            tag @ (0xde | 0xdf) => {
                let length = self.number(2 << (tag - 0xde))?;
                self.map(length, depth)?
            }
            _ => return None,
        })
    }

    fn bytes(&mut self, count: u64) -> Option<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(usize::try_from(count).ok()?)?;
        self.rest = rest;
        Some(taken)
    }

    fn byte(&mut self) -> Option<u8> {
        Some(self.bytes(1)?[0])
    }

    /// Reads a big-endian number of the given bytes.
    fn number(&mut self, bytes: u64) -> Option<u64> {
        Some(
            self.bytes(bytes)?
                .iter()
                .fold(0, |sum, byte| sum << 8 | u64::from(*byte)),
        )
    }

    fn text(&mut self, length: u64) -> Option<MsgpackValue> {
        Some(MsgpackValue::Text(
            String::from_utf8(self.bytes(length)?.to_vec()).ok()?,
        ))
    }

    // Lengths are not trusted, so lists grow as their elements are read.
    fn list(&mut self, length: u64, depth: usize) -> Option<MsgpackValue> {
        let mut values = Vec::new();
        for _ in 0..length {
            values.push(self.value(depth)?);
        }
        Some(MsgpackValue::List(values))
    }

    fn map(&mut self, length: u64, depth: usize) -> Option<MsgpackValue> {
        let mut pairs = Vec::new();
        for _ in 0..length {
            pairs.push((self.value(depth)?, self.value(depth)?));
        }
        Some(MsgpackValue::Map(pairs))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> MsgpackValue {
        MsgpackValue::Text(text.to_string())
    }

    #[test]
    fn reads_what_metadata_is_made_of() {
        let bytes =
            b"\x82\xa1a\x93\x01\xcd\x01\x00\xce\x00\x01\x00\x00\xd9\x01b\xdc\x00\x02\xc3\xc0";
        let list = MsgpackValue::List(vec![
            MsgpackValue::Number(1),
            MsgpackValue::Number(256),
            MsgpackValue::Number(65536),
        ]);
        let flags = MsgpackValue::List(vec![MsgpackValue::Bool(true), MsgpackValue::Nil]);
        let expected = MsgpackValue::Map(vec![(text("a"), list), (text("b"), flags)]);
        assert_eq!(MsgpackValue::read(bytes), Some(expected));
    }

    #[test]
    fn short_deep_and_foreign_bytes_are_nothing() {
        let whole = b"\x82\xa1a\x01\xa1b\xcd\x01\x00";
        assert!((0..whole.len()).all(|end| MsgpackValue::read(&whole[..end]).is_none()));
        assert_eq!(MsgpackValue::read(&[0x91; 64]), None);
        assert_eq!(MsgpackValue::read(b"\xdd\xff\xff\xff\xff"), None);
        assert_eq!(MsgpackValue::read(b"\xca\x00\x00\x00\x00"), None);
        assert_eq!(MsgpackValue::read(b"\xa1\xff"), None);
    }
}
