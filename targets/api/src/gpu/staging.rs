//! Pinned memory from which the driver reads small uploads.

use super::mark::Mark;
use super::pinned::Pinned;
use super::shared::Gpu;
use super::{StreamHandle, Vendor};
use crate::{DeviceError, Ptr};
use std::mem::ManuallyDrop;
use std::sync::Arc;

/// The largest small upload: 32 tokens of 4096 bf16. Above it, waiting for an idle stream costs
/// less than the copy.
pub(super) const PIECE: usize = 256 << 10;

/// The number of small uploads of a stream that may be unread.
const PIECES: usize = 4;

/// The flag of an event without timing, which costs less.
const WITHOUT_TIME: u32 = 2;

/// Pinned memory in pieces, which uploads use in turn.
pub(super) struct Staging<V: Vendor> {
    memory: ManuallyDrop<Pinned<V>>,
    /// The end of each piece's last upload.
    read: [Option<Mark<V>>; PIECES],
    next: usize,
}

/// # Safety
/// Starts a copy. The memory at `from` and at `to` must stay until the stream has passed it.
pub(super) unsafe fn start<V: Vendor>(
    gpu: &Gpu<V>,
    stream: StreamHandle,
    from: *const u8,
    length: usize,
    to: Ptr,
) -> Result<(), DeviceError> {
    // SAFETY: the caller's promise; the stream is live.
    gpu.call("upload", |f| unsafe {
        (f.upload)(to.0, from.cast(), length, stream)
    })
}

impl<V: Vendor> Staging<V> {
    /// Returns nothing where the driver has no pinned memory left.
    pub fn new(gpu: &Arc<Gpu<V>>) -> Option<Staging<V>> {
        let memory = Pinned::new(gpu, PIECE * PIECES, "pinned memory for uploads").ok()?;
        Some(Staging {
            memory: ManuallyDrop::new(memory),
            read: [const { None }; PIECES],
            next: 0,
        })
    }

    /// Starts a small upload from the next piece, and returns the number of the piece.
    pub fn upload(
        &mut self,
        stream: StreamHandle,
        bytes: &[u8],
        to: Ptr,
    ) -> Result<usize, DeviceError> {
        let number = self.next;
        if let Some(read) = &self.read[number] {
            read.wait("upload")?;
        }
        // SAFETY: `bytes` fit into the piece, whose last upload has ended, so nobody reads it. It
        // stays until this upload has ended too.
        unsafe {
            let piece = self.memory.start().as_ptr().add(number * PIECE);
            piece.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            start(self.memory.gpu(), stream, piece, bytes.len(), to)?;
        }
        self.next = (number + 1) % PIECES;
        Ok(number)
    }

    /// Marks the end of the upload from a piece, which the next one from there waits for.
    pub fn mark(&mut self, piece: usize, stream: StreamHandle) -> Result<(), DeviceError> {
        match &self.read[piece] {
            Some(read) => read.record(stream),
            None => {
                let read = Mark::recorded(self.memory.gpu(), stream, WITHOUT_TIME)?;
                self.read[piece] = Some(read);
                Ok(())
            }
        }
    }
}

impl<V: Vendor> Drop for Staging<V> {
    fn drop(&mut self) {
        let ended = |read: &Mark<V>| read.wait("end of a stream").is_ok();
        if self.read.iter().flatten().all(ended) {
            // SAFETY: dropped only here. If the wait fails it is never freed, because it may still
            // be read.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
        }
    }
}
