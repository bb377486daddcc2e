//! Buffers: aligned host memory.

use moesaic_target::{DeviceError, FreeMemory};
use std::alloc::Layout;
use std::ptr::NonNull;

const ALIGN: usize = 64;

/// Smallest size that is aligned to huge pages and asks for them, because
/// strided reads of expert weights miss a TLB of small pages.
const HUGE: usize = 2 << 20;

/// Largest ordinary page of any CPU of Linux.
#[cfg(target_os = "linux")]
const LARGEST_PAGE: usize = 64 << 10;

/// Memory that is freed on drop.
pub(crate) struct Memory {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: a Memory owns its allocation and never touches it again before it
// frees it; any thread may free.
unsafe impl Send for Memory {}
// SAFETY: as above: no method of a shared Memory touches the contents.
unsafe impl Sync for Memory {}

impl Memory {
    /// Allocates at least `bytes` bytes with undefined contents, rounded up to
    /// whole vectors. Zero bytes get one vector, so that the address is always
    /// real.
    pub(crate) fn new(bytes: usize) -> Result<Memory, DeviceError> {
        let too_much = || DeviceError::OutOfMemory {
            asked: bytes,
            free: FreeMemory::Unknown,
        };
        let align = if bytes >= HUGE { HUGE } else { ALIGN };
        let size = bytes
            .max(1)
            .checked_next_multiple_of(ALIGN)
            .ok_or_else(too_much)?;
        let layout = Layout::from_size_align(size, align).map_err(|_| too_much())?;
        // SAFETY: the size is not zero.
        let start = unsafe { std::alloc::alloc(layout) };
        let start = NonNull::new(start).ok_or_else(too_much)?;
        let memory = Memory { start, layout };
        memory.advise();
        Ok(memory)
    }

    pub(crate) fn address(&self) -> u64 {
        self.start.as_ptr() as u64
    }

    /// Fills the memory with 0xFF: NaN as any float type, -1 as any integer.
    pub(crate) fn poison(&self) {
        // SAFETY: the allocation is this long, and nobody else has it yet.
        unsafe { self.start.as_ptr().write_bytes(0xFF, self.layout.size()) };
    }

    /// Returns pages to the system where there are several NUMA nodes. Pages
    /// that an allocator kept lie on the node of their last writer; once
    /// returned, the next writer decides.
    #[cfg(target_os = "linux")]
    fn advise(&self) {
        if self.layout.align() < HUGE {
            return;
        }
        let advise = |unit, advice| {
            let whole = self.layout.size() / unit * unit;
            // SAFETY: the range lies within the allocation, whose contents are not
            // defined yet; a refusal changes nothing.
            unsafe { libc::madvise(self.start.as_ptr().cast(), whole, advice) };
        };
        if crate::host_nodes().count() > 1 {
            advise(LARGEST_PAGE, libc::MADV_DONTNEED);
        }
        advise(HUGE, libc::MADV_HUGEPAGE);
    }

    #[cfg(not(target_os = "linux"))]
    fn advise(&self) {}
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, freed only here.
        unsafe { std::alloc::dealloc(self.start.as_ptr(), self.layout) };
    }
}
