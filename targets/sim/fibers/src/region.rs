//! The tensors of a launch and the threads that touched them.

use crate::fault::{Access, AccessKind, Earlier, Fault, Problem};
use crate::memory::{Allocation, GRAIN};
use crate::stamp::Stamp;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// An allocation that a launch may touch.
pub(crate) struct Region {
    pub(crate) start: usize,
    pub(crate) bytes: usize,
    /// Whether a written parameter points into it. Readers of other regions are
    /// not recorded.
    pub(crate) writable: bool,
    pub(crate) allocation: Arc<Allocation>,
}

impl Region {
    pub(crate) fn new(allocation: Arc<Allocation>) -> Region {
        Region {
            start: allocation.start(),
            bytes: allocation.bytes(),
            writable: false,
            allocation,
        }
    }

    /// Returns the last writer of the byte.
    pub(crate) fn writer(&self, byte: usize) -> Stamp {
        load(&self.allocation.stamps()[byte / GRAIN][0])
    }

    #[inline]
    pub(crate) fn holds(&self, address: usize) -> bool {
        address.wrapping_sub(self.start) < self.bytes
    }

    /// Returns a fault if an access that starts in the region ends outside.
    #[inline]
    pub(crate) fn bounds(&self, access: Access) -> Option<Fault> {
        let end = access.address - self.start + access.bytes;
        (end > self.bytes).then_some(Fault::Memory(access, Problem::Outside))
    }

    /// Checks and records an access that starts in the region.
    #[inline]
    pub(crate) fn touch(&self, access: Access, now: Stamp, shift: u32) -> Option<Fault> {
        let outside = self.bounds(access);
        if outside.is_some() {
            return outside;
        }
        let first = access.address - self.start;
        let grains = first / GRAIN..(first + access.bytes).div_ceil(GRAIN);
        if access.kind == AccessKind::Write {
            if !self.writable {
                return Some(Fault::Memory(access, Problem::ReadOnly));
            }
            let known = &self.allocation.known()[grains.clone()];
            known.iter().for_each(|mark| mark.store(1, Relaxed));
        } else {
            let known = &self.allocation.known()[grains.clone()];
            if known.iter().any(|mark| mark.load(Relaxed) == 0) {
                return Some(Fault::Memory(access, Problem::Unwritten));
            }
        }
        if self.writable {
            self.order(access, grains, now, shift)
        } else {
            None
        }
    }

    fn order(
        &self,
        access: Access,
        grains: std::ops::Range<usize>,
        now: Stamp,
        shift: u32,
    ) -> Option<Fault> {
        for pair in &self.allocation.stamps()[grains] {
            // Blocks on other cores may change a stamp between the two steps;
            // that misses a conflict at worst, and invents none.
            let [writer, readers] = pair.each_ref().map(load);
            let conflict = match access.kind {
                AccessKind::Read => (!writer.before(now, shift)).then_some((writer, true)),
                _ if !writer.before(now, shift) => Some((writer, true)),
                _ => (!readers.before(now, shift)).then_some((readers, false)),
            };
            if let Some((stamp, wrote)) = conflict {
                let from = None;
                return Some(Fault::Conflict(access, Earlier { stamp, wrote, from }));
            }
            match access.kind {
                AccessKind::Read => pair[1].store(readers.and(now, shift).bits(), Relaxed),
                _ => pair[0].store(now.bits(), Relaxed),
            }
        }
        None
    }
}

#[inline]
fn load(stamp: &AtomicU64) -> Stamp {
    Stamp::from_bits(stamp.load(Relaxed))
}
