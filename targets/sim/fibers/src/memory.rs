//! Device memory that records the writes, and their threads.

use moesaic_target::{DeviceError, FreeMemory, Ptr};
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes that are watched together: the smallest element.
pub(crate) const GRAIN: usize = 2;
/// Bytes between allocations, so that a near miss hits nobody's memory.
const APART: usize = 1 << 16;
/// Content of fresh memory: NaN as any float, -1 as any integer.
pub(crate) const POISON: u8 = 0xff;

/// Zeroed pages, which the system provides on first touch.
struct Pages {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it owns its mapping, which any thread may use and unmap.
unsafe impl Send for Pages {}
// SAFETY: a shared one gives only an address.
unsafe impl Sync for Pages {}

impl Pages {
    fn new(bytes: usize) -> Option<Pages> {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the system's choice.
        let map = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, flags, -1, 0) };
        let start = NonNull::new(map.cast::<u8>()).filter(|_| map != libc::MAP_FAILED)?;
        Some(Pages { start, bytes })
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length, unmapped only here.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

/// An allocation: its bytes, a mark for each written grain, and the last writer
/// and readers of each grain.
pub(crate) struct Allocation {
    data: Pages,
    known: Pages,
    stamps: Pages,
    bytes: usize,
}

impl Allocation {
    fn new(bytes: usize) -> Option<Allocation> {
        let grains = bytes.div_ceil(GRAIN).max(1);
        let allocation = Allocation {
            data: Pages::new(bytes.checked_add(2 * APART)?)?,
            known: Pages::new(grains)?,
            stamps: Pages::new(grains.checked_mul(16)?)?,
            bytes,
        };
        // SAFETY: the mapping has this many bytes behind the first gap.
        unsafe { (allocation.start() as *mut u8).write_bytes(POISON, bytes) };
        Some(allocation)
    }

    pub(crate) fn start(&self) -> usize {
        self.data.start.as_ptr() as usize + APART
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns one mark per grain: not 0 once the grain was written.
    pub(crate) fn known(&self) -> &[AtomicU8] {
        let grains = self.bytes.div_ceil(GRAIN);
        // SAFETY: the mapping has this many bytes, which are only touched
        // through these atomics.
        unsafe { std::slice::from_raw_parts(self.known.start.as_ptr().cast(), grains) }
    }

    /// Returns the last writer and the last readers of each grain.
    pub(crate) fn stamps(&self) -> &[[AtomicU64; 2]] {
        let grains = self.bytes.div_ceil(GRAIN);
        // SAFETY: as above; a mapping starts at a page.
        unsafe { std::slice::from_raw_parts(self.stamps.start.as_ptr().cast(), grains) }
    }

    /// Marks `count` bytes from `from` on as written by the host.
    pub(crate) fn mark_written(&self, from: usize, count: usize) {
        let grains = from / GRAIN..(from + count).div_ceil(GRAIN);
        let known = &self.known()[grains];
        known.iter().for_each(|mark| mark.store(1, Relaxed));
    }

    /// Resets every stamp to "never".
    pub(crate) fn forget(&self) {
        let (start, bytes) = (self.stamps.start.as_ptr().cast(), self.stamps.bytes);
        // SAFETY: all of a private mapping without a file, which then reads
        // as zeros; no launch uses it now.
        unsafe { libc::madvise(start, bytes, libc::MADV_DONTNEED) };
    }
}

/// The live allocations of a device, by address.
#[derive(Default)]
pub(crate) struct Memory {
    live: Mutex<BTreeMap<usize, Arc<Allocation>>>,
}

/// Removes its allocation from the list when the last owner drops it.
pub(crate) struct Owner {
    memory: Arc<Memory>,
    start: usize,
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.memory.lock().remove(&self.start);
    }
}

impl Memory {
    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<usize, Arc<Allocation>>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a new allocation and its owner.
    pub(crate) fn alloc(self: &Arc<Self>, bytes: usize) -> Result<(Ptr, Owner), DeviceError> {
        let allocation = Allocation::new(bytes).ok_or_else(|| DeviceError::OutOfMemory {
            asked: bytes,
            free: FreeMemory::Unknown,
        })?;
        let start = allocation.start();
        self.lock().insert(start, Arc::new(allocation));
        let memory = Arc::clone(self);
        Ok((Ptr(start as u64), Owner { memory, start }))
    }

    /// Returns the allocation that an address points into, or to the end of.
    pub(crate) fn find(&self, address: usize) -> Option<Arc<Allocation>> {
        let live = self.lock();
        // The end counts as inside, because an argument may point to an empty
        // tensor at the end of its buffer.
        let (_, allocation) = live.range(..=address).next_back()?;
        let inside = address - allocation.start() <= allocation.bytes();
        inside.then(|| Arc::clone(allocation))
    }

    /// Forgets the accesses to all allocations.
    pub(crate) fn forget(&self) {
        self.lock()
            .values()
            .for_each(|allocation| allocation.forget());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_found_while_they_live() {
        let memory = Arc::new(Memory::default());
        let (first, owner) = memory.alloc(100).unwrap();
        let (second, _other) = memory.alloc(0).unwrap();
        let start = |at: u64| memory.find(at as usize).map(|a| a.start() as u64);
        assert_eq!(start(first.0), Some(first.0));
        assert_eq!(start(first.0 + 100), Some(first.0));
        assert_eq!(start(first.0 + 101), None);
        assert_eq!(start(second.0), Some(second.0));
        drop(owner);
        assert_eq!(start(first.0), None);
    }

    #[test]
    fn fresh_memory_is_poison_and_unknown() {
        let memory = Arc::new(Memory::default());
        let (ptr, _owner) = memory.alloc(7).unwrap();
        let allocation = memory.find(ptr.0 as usize).unwrap();
        // SAFETY: seven bytes were allocated.
        let bytes = unsafe { std::slice::from_raw_parts(ptr.0 as *const u8, 7) };
        assert_eq!(bytes, [POISON; 7]);
        allocation.mark_written(2, 3);
        let known: Vec<u8> = allocation.known().iter().map(|k| k.load(Relaxed)).collect();
        assert_eq!(known, [0, 1, 1, 0]);
    }

    #[test]
    fn too_much_is_an_error() {
        let error = Arc::new(Memory::default()).alloc(usize::MAX).err().unwrap();
        assert!(matches!(error, DeviceError::OutOfMemory { .. }), "{error}");
    }
}
