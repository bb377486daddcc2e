//! An allocator that counts, so that memory and work have bounds that do not
//! depend on the machine.

use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The system's allocator with counters.
pub struct Counted;

/// Largest allocation. No honest input of the suite asks for more. The
/// allocator refuses the request, which ends the process, rather than trying
/// it.
const LARGEST: usize = 1 << 30;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
static TOTAL: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is handed on to the system's allocator as it came; the
// counters are beside the memory.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() > LARGEST {
            return null_mut();
        }
        note(layout.size());
        // SAFETY: the caller keeps the rules of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if layout.size() > LARGEST {
            return null_mut();
        }
        note(layout.size());
        // SAFETY: the caller keeps the rules of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller keeps the rules of `dealloc`.
        unsafe { System.dealloc(memory, layout) }
    }
}

fn note(size: usize) {
    let live = LIVE.fetch_add(size, Relaxed) + size;
    PEAK.fetch_max(live, Relaxed);
    TOTAL.fetch_add(size, Relaxed);
}

/// The allocations since a moment.
pub struct Since {
    live: usize,
    total: usize,
}

impl Since {
    /// Starts counting.
    pub fn now() -> Since {
        let live = LIVE.load(Relaxed);
        PEAK.store(live, Relaxed);
        Since {
            live,
            total: TOTAL.load(Relaxed),
        }
    }

    /// Returns the most bytes that were held at once, above those at the start.
    pub fn peak(&self) -> usize {
        PEAK.load(Relaxed).saturating_sub(self.live)
    }

    /// Returns the bytes of all allocations, the measure of work: a loop over
    /// an input allocates for its messages, lists and copies.
    pub fn total(&self) -> usize {
        TOTAL.load(Relaxed).wrapping_sub(self.total)
    }
}
