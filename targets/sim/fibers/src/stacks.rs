//! The stacks of fibers.

use std::io;
use std::ptr::NonNull;

const PAGE: usize = 4096;
/// Bytes of a stack. The compiler refuses frames of more than a quarter of it.
const STACK: usize = 1 << 16;
/// An inaccessible page, then a stack.
const SLOT: usize = STACK + PAGE;

/// Stacks that end at an inaccessible page; the system provides pages on first
/// use.
pub(crate) struct Stacks {
    start: NonNull<u8>,
    count: usize,
}

// SAFETY: it owns its mapping; whoever has it may use and unmap it.
unsafe impl Send for Stacks {}

impl Stacks {
    /// Allocates `count` stacks.
    pub(crate) fn new(count: usize) -> io::Result<Stacks> {
        let (access, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
        );
        let bytes = count.max(1) * SLOT;
        // SAFETY: a new mapping at an address of the system's choice.
        let map = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, flags, -1, 0) };
        if map == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(map.cast::<u8>()).ok_or_else(io::Error::last_os_error)?;
        for i in 0..count {
            // SAFETY: the first page of a slot of the mapping. Where the
            // system has no more mappings to give, the page stays usable.
            unsafe { libc::mprotect(start.as_ptr().add(i * SLOT).cast(), PAGE, libc::PROT_NONE) };
        }
        Ok(Stacks { start, count })
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Returns the end of stack `i`, a multiple of 16. The ends lie at
    /// different distances from a page, because otherwise all stacks would
    /// share a few cache lines.
    pub(crate) fn top(&self, i: usize) -> *mut u8 {
        debug_assert!(i < self.count);
        let offset = (i % 61) * 64;
        // SAFETY: within slot i of the mapping.
        unsafe { self.start.as_ptr().add((i + 1) * SLOT - offset) }
    }

    /// Returns the stack that an address lies in.
    pub(crate) fn owner(&self, address: usize) -> Option<usize> {
        let offset = address.checked_sub(self.start.as_ptr() as usize)?;
        (offset < self.count * SLOT).then_some(offset / SLOT)
    }
}

impl Drop for Stacks {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length, unmapped only here.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.count.max(1) * SLOT) };
    }
}
