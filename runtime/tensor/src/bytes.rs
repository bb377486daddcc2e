//! Bytes of tensors: owned, borrowed or mapped.

use crate::Map;
use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

/// Bytes that are owned, borrowed, or mapped from a file. Owned bytes are aligned for any element
/// type; the others may lie anywhere.
#[derive(Clone)]
pub struct Bytes<'a>(Held<'a>);

#[derive(Clone)]
enum Held<'a> {
    Owned { words: Vec<u64>, length: usize },
    Borrowed(&'a [u8]),
    Mapped(Arc<Map>, Range<usize>),
}

impl<'a> Bytes<'a> {
    /// Returns `length` zeros.
    pub fn zeros(length: usize) -> Bytes<'static> {
        let words = vec![0; length.div_ceil(size_of::<u64>())];
        Bytes(Held::Owned { words, length })
    }

    /// Returns `length` zeros, or `None` where there is no memory for them.
    pub fn try_zeros(length: usize) -> Option<Bytes<'static>> {
        let (mut words, count) = (Vec::new(), length.div_ceil(size_of::<u64>()));
        words.try_reserve_exact(count).ok()?;
        words.resize(count, 0);
        Some(Bytes(Held::Owned { words, length }))
    }

    /// Copies `bytes`.
    pub fn copied(bytes: &[u8]) -> Bytes<'static> {
        let mut owned = Bytes::zeros(bytes.len());
        owned.to_mut().copy_from_slice(bytes);
        owned
    }

    /// Returns a part of a mapped file.
    ///
    /// # Panics
    /// If the file is shorter than `range`.
    #[doc(hidden)]
    pub fn mapped(map: &Arc<Map>, range: Range<usize>) -> Bytes<'static> {
        assert!(range.start <= range.end && range.end <= map.len());
        Bytes(Held::Mapped(Arc::clone(map), range))
    }

    /// Borrows the same bytes, without a copy.
    pub fn lend(&self) -> Bytes<'_> {
        match &self.0 {
            Held::Mapped(map, range) => Bytes::mapped(map, range.clone()),
            _ => Bytes::from(&**self),
        }
    }

    /// Borrows a part of the bytes without a copy. `None` if there are fewer bytes.
    pub fn part(&self, part: Range<usize>) -> Option<Bytes<'_>> {
        self.get(part.clone())?;
        Some(match &self.0 {
            Held::Mapped(map, range) => {
                Bytes::mapped(map, range.start + part.start..range.start + part.end)
            }
            _ => Bytes::from(&self[part]),
        })
    }

    /// Returns the bytes for writing. Bytes that are not owned are copied first.
    pub fn to_mut(&mut self) -> &mut [u8] {
        if !matches!(self.0, Held::Owned { .. }) {
            self.0 = Bytes::copied(self).0;
        }
        match &mut self.0 {
            Held::Owned { words, length } => &mut bytemuck::cast_slice_mut(words)[..*length],
            // Unreachable: the bytes were made owned above.
            Held::Borrowed(_) | Held::Mapped(..) => &mut [],
        }
    }

    /// Returns bytes that borrow nothing: borrowed bytes are copied, mapped ones stay mapped.
    pub fn into_static(self) -> Bytes<'static> {
        match self.0 {
            Held::Owned { words, length } => Bytes(Held::Owned { words, length }),
            Held::Mapped(map, range) => Bytes(Held::Mapped(map, range)),
            Held::Borrowed(bytes) => Bytes::copied(bytes),
        }
    }

    /// Returns true if the bytes are in a mapped file.
    pub fn is_mapped(&self) -> bool {
        matches!(self.0, Held::Mapped(..))
    }

    /// Hints that the bytes will not be read soon, so the memory of mapped ones is freed. A later
    /// access reads them from the file again.
    pub fn release(&self) {
        if let Held::Mapped(map, range) = &self.0 {
            map.release(range);
        }
    }
}

impl Deref for Bytes<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.0 {
            Held::Owned { words, length } => &bytemuck::cast_slice(words)[..*length],
            Held::Borrowed(bytes) => bytes,
            Held::Mapped(map, range) => &map[range.clone()],
        }
    }
}

impl Default for Bytes<'_> {
    fn default() -> Self {
        Bytes::zeros(0)
    }
}

impl<'a> From<&'a [u8]> for Bytes<'a> {
    fn from(bytes: &'a [u8]) -> Bytes<'a> {
        Bytes(Held::Borrowed(bytes))
    }
}

impl From<Vec<u8>> for Bytes<'static> {
    /// Copies the vector, because its bytes may not be aligned for elements.
    fn from(bytes: Vec<u8>) -> Bytes<'static> {
        Bytes::copied(&bytes)
    }
}

impl PartialEq for Bytes<'_> {
    fn eq(&self, other: &Bytes<'_>) -> bool {
        **self == **other
    }
}

impl Eq for Bytes<'_> {}

impl fmt::Debug for Bytes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = match &self.0 {
            Held::Owned { .. } => "owned",
            Held::Borrowed(_) => "borrowed",
            Held::Mapped(..) => "mapped",
        };
        let first = &self[..self.len().min(16)];
        write!(f, "{} bytes, {how}, from {first:?} on", self.len())
    }
}
