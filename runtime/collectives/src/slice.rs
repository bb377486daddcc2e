//! Parts of device buffers.

use crate::CollectiveError;
use moesaic_target::Buffer;
use std::fmt;
use std::sync::Arc;

/// The type of the elements that are exchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Element {
    /// IEEE binary32.
    F32 = 1,
    /// The upper half of a binary32; sums are f32, rounded once.
    Bf16 = 2,
    /// IEEE binary16; sums are f32, rounded once.
    F16 = 3,
    /// Two's complement, 32 bits; sums wrap around.
    I32 = 4,
    /// Two's complement, 64 bits; sums wrap around.
    I64 = 5,
    /// A byte, or a part of something that is only moved; sums wrap around.
    U8 = 6,
}

impl Element {
    /// Every type.
    pub const ALL: [Element; 6] = [
        Element::F32,
        Element::Bf16,
        Element::F16,
        Element::I32,
        Element::I64,
        Element::U8,
    ];

    /// Bytes per element.
    pub const fn size(self) -> usize {
        match self {
            Element::U8 => 1,
            Element::Bf16 | Element::F16 => 2,
            Element::F32 | Element::I32 => 4,
            Element::I64 => 8,
        }
    }

    /// The lower-case name: `bf16`.
    pub const fn name(self) -> &'static str {
        match self {
            Element::F32 => "f32",
            Element::Bf16 => "bf16",
            Element::F16 => "f16",
            Element::I32 => "i32",
            Element::I64 => "i64",
            Element::U8 => "u8",
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<Element> {
        Element::ALL.into_iter().find(|e| *e as u8 == code)
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Elements in a row in a device buffer. It keeps the buffer alive, so that an
/// operation whose handle is dropped does no harm.
#[derive(Clone, Debug)]
pub struct Slice {
    buffer: Arc<Buffer>,
    element: Element,
    first: usize,
    elements: usize,
}

impl Slice {
    /// `elements` elements from element `first` on.
    ///
    /// # Errors
    /// [`CollectiveError::Invalid`] when the buffer is smaller.
    pub fn new(
        buffer: &Arc<Buffer>,
        element: Element,
        first: usize,
        elements: usize,
    ) -> Result<Slice, CollectiveError> {
        let end = first
            .checked_add(elements)
            .map(|n| n.checked_mul(element.size()));
        if end.flatten().is_none_or(|end| end > buffer.bytes()) {
            return Err(CollectiveError::Invalid {
                operation: "slice".to_string(),
                reason: format!(
                    "{elements} {element} from element {first} do not fit in a buffer of {} bytes",
                    buffer.bytes()
                ),
            });
        }
        Ok(Slice {
            buffer: Arc::clone(buffer),
            element,
            first,
            elements,
        })
    }

    /// The whole buffer, as many elements as fit.
    pub fn whole(buffer: &Arc<Buffer>, element: Element) -> Slice {
        Slice {
            buffer: Arc::clone(buffer),
            element,
            first: 0,
            elements: buffer.bytes() / element.size(),
        }
    }

    /// The buffer.
    pub fn buffer(&self) -> &Arc<Buffer> {
        &self.buffer
    }

    /// The type of its elements.
    pub fn element(&self) -> Element {
        self.element
    }

    /// How many elements.
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// How many bytes.
    pub fn bytes(&self) -> usize {
        self.elements * self.element.size()
    }

    /// The first byte within the buffer.
    pub fn offset(&self) -> usize {
        self.first * self.element.size()
    }

    /// Its address in device memory.
    pub(crate) fn address(&self) -> u64 {
        self.buffer.ptr().0 + self.offset() as u64
    }

    /// So many of its first bytes, which are whole elements and not more than it has.
    pub(crate) fn head(&self, bytes: usize) -> Slice {
        Slice {
            elements: bytes / self.element.size(),
            ..self.clone()
        }
    }

    /// So many bytes from a byte on, where they are within it.
    pub(crate) fn part(&self, offset: usize, bytes: usize) -> Option<Slice> {
        let end = offset.checked_add(bytes)?;
        (end <= self.bytes()).then(|| Slice {
            buffer: Arc::clone(&self.buffer),
            element: Element::U8,
            first: self.offset() + offset,
            elements: bytes,
        })
    }

    pub(crate) fn overlaps(&self, other: &Slice) -> bool {
        let (a, b) = (self.address(), other.address());
        let apart = a + self.bytes() as u64 <= b || b + other.bytes() as u64 <= a;
        !apart && self.bytes() > 0 && other.bytes() > 0
    }
}
