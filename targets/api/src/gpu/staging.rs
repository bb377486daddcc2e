//! Uploads. The caller may change its bytes as soon as the call returns, but no driver promises to
//! have read them by then: CUDA promises it for synchronous copies only, HIP for none. A
//! synchronous copy does not help, because it goes to the default stream, which our streams do not
//! wait for, so it could overtake launches that still use the buffer.
//!
//! * A small upload, such as the input of a call, is copied to the stream's pinned memory, from
//!   where the driver reads it. The host continues at once.
//! * A large upload, such as weights, is read in place and waited for. The copy takes longer than
//!   the wait, and an extra copy by one thread would be slower than the bus.
//!
//! Neither can be part of a graph, which would read the memory again at each launch, so uploads are
//! refused during a capture.

use super::Vendor;
use super::event::Mark;
use super::lane::Lane;
use super::memory::Pinned;
use crate::{DeviceError, Ptr};
use std::mem::ManuallyDrop;

/// The largest small upload: 32 tokens of 4096 bf16. Above it, waiting for an idle stream costs
/// less than the copy.
const PIECE: usize = 256 << 10;

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

pub(super) fn upload<V: Vendor>(lane: &Lane<V>, bytes: &[u8], to: Ptr) -> Result<(), DeviceError> {
    if bytes.len() <= PIECE {
        let mut staging = lane.staging();
        if staging.is_none() {
            *staging = Staging::new(lane);
        }
        // Without pinned memory, small uploads are waited for too.
        if let Some(staging) = &mut *staging {
            return staging.upload(lane, bytes, to);
        }
    }
    // SAFETY: `bytes` are borrowed until the driver has read them, below.
    unsafe { start(lane, bytes.as_ptr(), bytes.len(), to) }?;
    lane.synchronize("upload")
}

/// # Safety
/// Starts a copy. The memory at `from` and at `to` must stay until the stream has passed it.
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
        // SAFETY: `bytes` fit into the piece, whose last upload has ended, so nobody reads it. It
        // stays until this upload has ended too.
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
            // SAFETY: dropped only here. If the wait fails it is never freed, because it may still
            // be read.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
        }
    }
}
