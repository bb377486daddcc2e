//! Uploads. The caller's bytes are the caller's again when the call returns,
//! and no driver promises to have read them by then: CUDA says so of its
//! synchronous copies alone, HIP of none. A synchronous copy is no way out,
//! since it goes to the default stream, which ours do not wait for: it could
//! overtake launches that still use the buffer.
//!
//! * A small upload, such as the input of a call, is copied to pinned memory of
//!   its stream, and the driver reads that. The host goes on at once, ahead of
//!   what is still in the stream.
//! * A large one, such as weights, is read where it lies and waited for: the
//!   copy takes longer than the wait, and one more copy by a single thread
//!   would be slower than the bus.
//!
//! Neither can be part of a graph, which would read the memory again at each of
//! its launches: uploads are refused while one is captured.

use super::Vendor;
use super::event::Mark;
use super::lane::Lane;
use super::memory::Pinned;
use crate::{DeviceError, Ptr};
use std::mem::ManuallyDrop;

/// The largest upload that is small: 32 tokens of 4096 bf16. Beyond it, waiting
/// for an idle stream costs less than the copy.
const PIECE: usize = 256 << 10;

/// Small uploads of a stream that may be waiting to be read.
const PIECES: usize = 4;

/// An event without time, which costs less.
const WITHOUT_TIME: u32 = 2;

/// Pinned memory in pieces, which uploads take in turn.
pub(super) struct Staging<V: Vendor> {
    memory: ManuallyDrop<Pinned<V>>,
    /// The end of each piece's last upload.
    read: [Option<Mark<V>>; PIECES],
    next: usize,
}

pub(super) fn upload<V: Vendor>(lane: &Lane<V>, bytes: &[u8], to: Ptr) -> Result<(), DeviceError> {
    if bytes.len() <= PIECE {
        let mut staging = lane.staging();
        if staging.is_none() {
            *staging = Staging::new(lane);
        }
        // Where nothing can be pinned, small ones are waited for, too.
        if let Some(staging) = &mut *staging {
            return staging.upload(lane, bytes, to);
        }
    }
    // SAFETY: `bytes` are borrowed until the driver has read them, below.
    unsafe { start(lane, bytes.as_ptr(), bytes.len(), to) }?;
    lane.synchronize("upload")
}

/// # Safety
/// The memory at `from` and at `to` stays until the stream has come there.
unsafe fn start<V: Vendor>(
    lane: &Lane<V>,
    from: *const u8,
    length: usize,
    to: Ptr,
) -> Result<(), DeviceError> {
    // SAFETY: the caller's promise; the stream is live.
    lane.gpu.call("upload", |f| unsafe {
        (f.upload)(to.0, from.cast(), length, lane.stream)
    })
}

impl<V: Vendor> Staging<V> {
    fn new(lane: &Lane<V>) -> Option<Staging<V>> {
        let memory = Pinned::new(&lane.gpu, PIECE * PIECES, "pinned memory for uploads").ok()?;
        Some(Staging {
            memory: ManuallyDrop::new(memory),
            read: [const { None }; PIECES],
            next: 0,
        })
    }

    fn upload(&mut self, lane: &Lane<V>, bytes: &[u8], to: Ptr) -> Result<(), DeviceError> {
        let number = self.next;
        if let Some(read) = &self.read[number] {
            read.wait("upload")?;
        }
        // SAFETY: `bytes` fit into the piece, and nobody reads it: its last
        // upload has ended. It stays until this one has ended, too.
        unsafe {
            let piece = self.memory.start().add(number * PIECE);
            piece.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            start(lane, piece, bytes.len(), to)?;
        }
        self.next = (number + 1) % PIECES;
        let recorded = match &self.read[number] {
            Some(read) => read.record(lane),
            None => Mark::recorded(lane, WITHOUT_TIME).map(|read| self.read[number] = Some(read)),
        };
        recorded.or_else(|_| lane.synchronize("upload"))
    }
}

impl<V: Vendor> Drop for Staging<V> {
    fn drop(&mut self) {
        let ended = |read: &Mark<V>| read.wait("end of a stream").is_ok();
        if self.read.iter().flatten().all(ended) {
            // SAFETY: dropped here alone. Otherwise it is never freed: it may
            // still be read.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
        }
    }
}
