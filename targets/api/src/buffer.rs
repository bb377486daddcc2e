//! Memory of devices, pinned host memory, and copies between buffers.

use crate::{DeviceError, DriverReason, Ptr};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Device memory that is freed when its last owner drops it.
pub struct Buffer {
    ptr: Ptr,
    bytes: usize,
    _owner: Box<dyn Send + Sync>,
}

impl Buffer {
    /// Wraps an allocation: `owner` frees it on drop.
    pub fn new(ptr: Ptr, bytes: usize, owner: Box<dyn Send + Sync>) -> Buffer {
        Buffer {
            ptr,
            bytes,
            _owner: owner,
        }
    }

    /// Returns the address of its first byte.
    pub fn ptr(&self) -> Ptr {
        self.ptr
    }

    /// Returns its size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the address at `offset`, if `length` bytes fit there. `operation`, such as `upload`,
    /// is for the error.
    ///
    /// # Errors
    /// [`DeviceError::Driver`] with the sizes.
    pub fn range(&self, operation: &str, offset: usize, length: usize) -> Result<Ptr, DeviceError> {
        let end = offset.checked_add(length);
        if end.is_some_and(|end| end <= self.bytes) {
            return Ok(Ptr(self.ptr.0 + offset as u64));
        }
        Err(DeviceError::Driver {
            operation: format!("{operation} of {length} bytes at byte {offset}"),
            reason: DriverReason::OutOfRange { bytes: self.bytes },
        })
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({:#x}, {} bytes)", self.ptr.0, self.bytes)
    }
}

/// A copy of rows of bytes from one buffer to another.
#[derive(Clone, Copy, Debug)]
pub struct RowCopy<'a> {
    /// The source.
    pub from: &'a Buffer,
    /// The first byte in `from`.
    pub from_offset: usize,
    /// The distance between row starts in `from` in bytes, at least a row.
    pub from_stride: usize,
    /// The destination.
    pub to: &'a Buffer,
    /// The first byte in `to`.
    pub to_offset: usize,
    /// The distance between row starts in `to` in bytes, at least a row.
    pub to_stride: usize,
    /// The number of rows.
    pub rows: usize,
    /// The size of a row in bytes.
    pub row_bytes: usize,
}

/// The bytes of a buffer from the start of the first row to the end of the last.
#[derive(Clone, Copy, Debug)]
pub struct RowSpan {
    /// The address of the first byte.
    pub start: Ptr,
    /// The length in bytes.
    pub bytes: usize,
}

impl RowCopy<'_> {
    /// Returns the source and destination spans, or `None` if there are no bytes.
    ///
    /// # Errors
    /// [`DeviceError::Driver`] if rows do not fit or overlap each other.
    pub fn check(&self) -> Result<Option<[RowSpan; 2]>, DeviceError> {
        if self.rows == 0 || self.row_bytes == 0 {
            return Ok(None);
        }
        let failed = |reason| DeviceError::Driver {
            operation: format!("a copy of {} rows", self.rows),
            reason,
        };
        if self.from_stride.min(self.to_stride) < self.row_bytes {
            return Err(failed(DriverReason::Overlap));
        }
        let span = |buffer: &Buffer, offset: usize, stride: usize| {
            let before = stride.checked_mul(self.rows - 1);
            let bytes = before.and_then(|before| before.checked_add(self.row_bytes));
            let bytes = bytes.ok_or_else(|| failed(DriverReason::TooManyRows))?;
            let start = buffer.range("a copy of rows", offset, bytes)?;
            Ok(RowSpan { start, bytes })
        };
        let from = span(self.from, self.from_offset, self.from_stride)?;
        let to = span(self.to, self.to_offset, self.to_stride)?;
        Ok(Some([from, to]))
    }
}

/// A copy from one buffer to another.
#[derive(Clone, Copy, Debug)]
pub struct DeviceCopy<'a> {
    /// The source.
    pub from: &'a Buffer,
    /// The first byte in `from`.
    pub from_offset: usize,
    /// The destination.
    pub to: &'a Buffer,
    /// The first byte in `to`.
    pub to_offset: usize,
    /// The number of bytes.
    pub bytes: usize,
}

/// Pinned host memory, which a GPU can access directly.
pub struct HostBuffer {
    start: NonNull<u8>,
    bytes: usize,
    _owner: Box<dyn Send + Sync>,
}

// SAFETY: it owns the memory, and shares it only by Rust's rules.
unsafe impl Send for HostBuffer {}
// SAFETY: as above.
unsafe impl Sync for HostBuffer {}

impl HostBuffer {
    /// Wraps an allocation, which `owner` frees on drop.
    ///
    /// # Safety
    /// The `bytes` bytes from `start` must be initialized, and must belong to nobody else until
    /// `owner` is dropped.
    pub unsafe fn new(start: NonNull<u8>, bytes: usize, owner: Box<dyn Send + Sync>) -> HostBuffer {
        HostBuffer {
            start,
            bytes,
            _owner: owner,
        }
    }
}

impl Deref for HostBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the promise of `new`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }
}

impl DerefMut for HostBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: the promise of `new`; `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }
}

impl std::fmt::Debug for HostBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HostBuffer({} bytes)", self.bytes)
    }
}
