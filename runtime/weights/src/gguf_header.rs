//! Headers of GGUF files: metadata and the place of each tensor, all checked against the bytes that
//! exist.

use crate::Damage;
use moesaic_kernel::DType;
use moesaic_spec::format::Blocks;
use moesaic_spec::gguf::{GgufValue, NUMBERS, number_id};
use std::collections::BTreeMap;
use std::ops::Range;

/// The element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A supported type.
    Numbers(DType),
    /// Blocks of codes.
    Blocks(&'static Blocks),
    /// An unsupported type, by ggml's number.
    Unread(u32),
}

impl Kind {
    /// Returns the type with ggml's number.
    pub fn of(id: u32) -> Kind {
        let mut numbers = NUMBERS.into_iter();
        let number = numbers.find(|dtype| number_id(*dtype) == id);
        let kind = number.map(Kind::Numbers);
        let kind = kind.or_else(|| Blocks::of(id).map(Kind::Blocks));
        kind.unwrap_or(Kind::Unread(id))
    }
}

/// A header.
#[derive(Debug)]
pub(crate) struct Header {
    pub values: BTreeMap<String, GgufValue>,
    pub infos: Vec<Info>,
}

impl Header {
    /// Refuses a file that says it is another one than the shard with index `at` of `count` files.
    pub(crate) fn check_shard(&self, at: usize, count: usize) -> Result<(), Damage> {
        let said = |key| match self.values.get(key) {
            Some(GgufValue::Int(number)) => usize::try_from(*number).ok(),
            _ => None,
        };
        match (said("split.count"), said("split.no")) {
            // A renamed part would otherwise look like a whole model with most tensors missing.
            (Some(said), _) if said > 1 && said != count => {
                Err(Damage::OneOfShards { count: said })
            }
            (_, Some(said)) if said != at => Err(Damage::OtherShard {
                by_name: at + 1,
                by_key: said.saturating_add(1),
            }),
            _ => Ok(()),
        }
    }
}

/// The shape and place of a tensor.
#[derive(Debug)]
pub(crate) struct Info {
    pub name: String,
    /// The sizes, outermost first.
    pub shape: Vec<usize>,
    pub kind: Kind,
    /// The byte range in the file; empty if the type is unsupported.
    pub bytes: Range<usize>,
}

/// A tensor as the header lists it.
struct Entry {
    name: String,
    shape: Vec<usize>,
    kind: Kind,
    offset: u64,
}

/// The most dimensions of a tensor.
pub(crate) const MOST_DIMENSIONS: u32 = 4;

/// The default alignment.
const ALIGNMENT: u64 = 32;

/// Returns the damage of a header that contradicts itself or the format.
fn header(problem: impl Into<String>) -> Damage {
    Damage::Header(problem.into())
}

/// Reads a header.
pub(crate) fn read_header(file: &[u8]) -> Result<Header, Damage> {
    let mut from = Reader { file, at: 0 };
    if from.take(4)? != b"GGUF" {
        return Err(header("it does not begin as GGUF files do"));
    }
    match from.u32()? {
        2 | 3 => {}
        // A swapped version number is the only sign of a big-endian file.
        other if (2..=3).contains(&other.swap_bytes()) => {
            return Err(Damage::BigEndian);
        }
        other => return Err(Damage::Version(other)),
    }
    // These counts are not trusted: nothing is allocated by them, and reading stops at the end of
    // the file.
    let (tensors, keys) = (from.u64()?, from.u64()?);
    let mut values = BTreeMap::new();
    for _ in 0..keys {
        let key = from.text()?;
        let kind = from.u32()?;
        let value = from.value(kind)?;
        // Which of the two was meant is unknowable.
        if values.contains_key(&key) {
            return Err(header(format!("its header has `{key}` twice")));
        }
        values.insert(key, value);
    }
    let mut entries = Vec::new();
    for _ in 0..tensors {
        entries.push(from.entry()?);
    }
    let alignment = match values.get("general.alignment") {
        None => ALIGNMENT,
        Some(GgufValue::Int(size)) if *size > 0 && size.count_ones() == 1 => *size as u64,
        Some(other) => {
            let problem = format!("general.alignment is {other}, no power of two");
            return Err(header(problem));
        }
    };
    let data = (from.at as u64)
        .checked_next_multiple_of(alignment)
        .ok_or_else(|| header("its header has no end"))?;
    let length = file.len() as u64;
    let infos = entries
        .into_iter()
        .map(|entry| place(entry, data, alignment, length));
    let infos = infos.collect::<Result<Vec<_>, _>>()?;
    check_apart(&infos)?;
    Ok(Header { values, infos })
}

/// Refuses tensors that share bytes, because at least one of them is not what its name says.
fn check_apart(infos: &[Info]) -> Result<(), Damage> {
    let mut by_place: Vec<&Info> = infos.iter().filter(|info| !info.bytes.is_empty()).collect();
    by_place.sort_by_key(|info| info.bytes.start);
    let shared = by_place
        .windows(2)
        .find(|pair| pair[1].bytes.start < pair[0].bytes.end);
    match shared {
        None => Ok(()),
        Some(pair) => Err(header(format!(
            "tensors `{}` and `{}` share bytes",
            pair[0].name, pair[1].name
        ))),
    }
}

/// Returns the place of the tensor in a file of `length` bytes whose tensors begin at `data`.
fn place(entry: Entry, data: u64, alignment: u64, length: u64) -> Result<Info, Damage> {
    let Entry {
        name,
        shape,
        kind,
        offset,
    } = entry;
    let elements = shape
        .iter()
        .try_fold(1u64, |count, size| count.checked_mul(*size as u64));
    let wrong = |problem: String| header(format!("tensor `{name}` {problem}"));
    let elements =
        elements.ok_or_else(|| wrong(format!("has shape {shape:?}, more than there can be")))?;
    let row = shape.last().copied().unwrap_or(1);
    let size = match kind {
        Kind::Numbers(dtype) => elements.checked_mul(dtype.size() as u64),
        Kind::Blocks(blocks) if row % blocks.elements != 0 => {
            return Err(wrong(format!(
                "has rows of {row} elements, which are no whole blocks of {} ({} elements)",
                blocks.name, blocks.elements
            )));
        }
        Kind::Blocks(blocks) => {
            (elements / blocks.elements as u64).checked_mul(blocks.bytes as u64)
        }
        // Its size is unknown, and reading such a tensor is an error anyway.
        Kind::Unread(_) => Some(0),
    };
    // The format demands alignment, and decoders rely on it.
    if offset % alignment != 0 {
        return Err(wrong(format!("is at {offset}, no multiple of {alignment}")));
    }
    let start = data.checked_add(offset);
    let end = start
        .zip(size)
        .and_then(|(start, size)| start.checked_add(size));
    match start.zip(end) {
        Some((start, end)) if end <= length => Ok(Info {
            name,
            shape,
            kind,
            // Both lie within the file, which is mapped, so they fit a usize.
            bytes: start as usize..end as usize,
        }),
        _ => Err(Damage::CutShort(format!(
            "tensor `{name}` ends behind the file's {length} bytes"
        ))),
    }
}

/// A cursor that reads values from the bytes of a file.
struct Reader<'a> {
    file: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, count: u64) -> Result<&'a [u8], Damage> {
        let left = &self.file[self.at..];
        match usize::try_from(count)
            .ok()
            .and_then(|count| left.get(..count))
        {
            Some(bytes) => {
                self.at += bytes.len();
                Ok(bytes)
            }
            None => Err(Damage::CutShort(format!(
                "its header asks for {count} bytes where {} are left",
                left.len()
            ))),
        }
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], Damage> {
        let mut bytes = [0; N];
        bytes.copy_from_slice(self.take(N as u64)?);
        Ok(bytes)
    }

    fn u32(&mut self) -> Result<u32, Damage> {
        Ok(u32::from_le_bytes(self.bytes()?))
    }

    fn u64(&mut self) -> Result<u64, Damage> {
        Ok(u64::from_le_bytes(self.bytes()?))
    }

    fn text(&mut self) -> Result<String, Damage> {
        let count = self.u64()?;
        Ok(String::from_utf8_lossy(self.take(count)?).into_owned())
    }

    fn value(&mut self, kind: u32) -> Result<GgufValue, Damage> {
        Ok(match kind {
            0 => GgufValue::Int(i64::from(u8::from_le_bytes(self.bytes()?))),
            1 => GgufValue::Int(i64::from(i8::from_le_bytes(self.bytes()?))),
            2 => GgufValue::Int(i64::from(u16::from_le_bytes(self.bytes()?))),
            3 => GgufValue::Int(i64::from(i16::from_le_bytes(self.bytes()?))),
            4 => GgufValue::Int(i64::from(self.u32()?)),
            5 => GgufValue::Int(i64::from(i32::from_le_bytes(self.bytes()?))),
            6 => GgufValue::Float(f64::from(f32::from_le_bytes(self.bytes()?))),
            7 => GgufValue::Bool(self.bytes::<1>()? != [0]),
            8 => GgufValue::Text(self.text()?),
            9 => self.list()?,
            10 => match self.u64()? {
                value if value <= i64::MAX as u64 => GgufValue::Int(value as i64),
                // A value has no unsigned 64-bit integer. Keys that moesaic reads are small.
                value => GgufValue::Float(value as f64),
            },
            11 => GgufValue::Int(i64::from_le_bytes(self.bytes()?)),
            12 => GgufValue::Float(f64::from_le_bytes(self.bytes()?)),
            other => {
                let problem = format!("its header has a value of type {other}, which is none");
                return Err(header(problem));
            }
        })
    }

    /// Skips a list and keeps its length, since vocabularies are long and no layer needs one.
    fn list(&mut self) -> Result<GgufValue, Damage> {
        let (kind, count) = (self.u32()?, self.u64()?);
        let size = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            10..=12 => 8,
            8 => {
                // Strings have lengths of their own, so skip them one by one.
                for _ in 0..count {
                    let length = self.u64()?;
                    self.take(length)?;
                }
                return Ok(GgufValue::List(count));
            }
            other => {
                let problem = format!("its header has a list of type {other}, which is none");
                return Err(header(problem));
            }
        };
        let bytes = count
            .checked_mul(size)
            .ok_or_else(|| header("its header has an endless list"))?;
        self.take(bytes)?;
        Ok(GgufValue::List(count))
    }

    fn entry(&mut self) -> Result<Entry, Damage> {
        let name = self.text()?;
        let dimensions = self.u32()?;
        if dimensions > MOST_DIMENSIONS {
            return Err(header(format!(
                "tensor `{name}` has {dimensions} dimensions, more than {MOST_DIMENSIONS}"
            )));
        }
        let mut shape = Vec::new();
        for _ in 0..dimensions {
            let size = usize::try_from(self.u64()?);
            let size = size.map_err(|_| header(format!("tensor `{name}` is larger than memory")));
            shape.push(size?);
        }
        // The file lists the innermost size first.
        shape.reverse();
        Ok(Entry {
            name,
            shape,
            kind: Kind::of(self.u32()?),
            offset: self.u64()?,
        })
    }
}
