//! Element ranges of device buffers.

use crate::{CollectiveError, CommElement, InvalidReason};
use moesaic_target::Buffer;
use std::sync::Arc;

/// A contiguous range of elements of a device buffer. It keeps the buffer alive, so dropping an
/// operation's handle is safe.
#[derive(Clone, Debug)]
pub struct Slice {
    buffer: Arc<Buffer>,
    element: CommElement,
    first: usize,
    elements: usize,
}

impl Slice {
    /// Returns `elements` elements from element `first` on.
    ///
    /// # Errors
    /// [`CollectiveError::Invalid`] when the buffer is smaller.
    pub fn new(
        buffer: &Arc<Buffer>,
        element: CommElement,
        first: usize,
        elements: usize,
    ) -> Result<Slice, CollectiveError> {
        let end = first
            .checked_add(elements)
            .map(|n| n.checked_mul(element.size()));
        if end.flatten().is_none_or(|end| end > buffer.bytes()) {
            return Err(CollectiveError::Invalid {
                operation: "slice".to_string(),
                reason: InvalidReason::Slice {
                    first,
                    elements,
                    element,
                    bytes: buffer.bytes(),
                },
            });
        }
        Ok(Slice {
            buffer: Arc::clone(buffer),
            element,
            first,
            elements,
        })
    }

    /// Returns the whole buffer: as many elements as fit.
    pub fn whole(buffer: &Arc<Buffer>, element: CommElement) -> Slice {
        Slice {
            buffer: Arc::clone(buffer),
            element,
            first: 0,
            elements: buffer.bytes() / element.size(),
        }
    }

    /// Returns the buffer.
    pub fn buffer(&self) -> &Arc<Buffer> {
        &self.buffer
    }

    /// Returns the type of the elements.
    pub fn element(&self) -> CommElement {
        self.element
    }

    /// Returns the number of elements.
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// Returns the number of bytes.
    pub fn bytes(&self) -> usize {
        self.elements * self.element.size()
    }

    /// Returns the offset of the first byte in the buffer.
    pub fn offset(&self) -> usize {
        self.first * self.element.size()
    }

    /// Returns the address in device memory.
    pub(crate) fn address(&self) -> u64 {
        self.buffer.ptr().0 + self.offset() as u64
    }

    /// Returns the first `bytes` bytes: whole elements, and no more than the slice has.
    pub(crate) fn head(&self, bytes: usize) -> Slice {
        Slice {
            elements: bytes / self.element.size(),
            ..self.clone()
        }
    }

    /// Returns `bytes` bytes from byte `offset` on; `None` if they are not inside the slice.
    pub(crate) fn part(&self, offset: usize, bytes: usize) -> Option<Slice> {
        let end = offset.checked_add(bytes)?;
        (end <= self.bytes()).then(|| Slice {
            buffer: Arc::clone(&self.buffer),
            element: CommElement::U8,
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
