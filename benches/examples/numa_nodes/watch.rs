//! Records which node reads each part of a memory range first.
//!
//! The parts are made unreadable. When a thread reads one, the system calls a signal handler on it,
//! which records the thread's node and makes the part readable again.

use crate::pages::{Node, Range, node_here};
use std::io;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

/// The size of a part: a huge page, so that watching does not split one.
pub const PART: usize = 2 << 20;

/// The most parts that can be watched: 16 GB.
const MOST: usize = 8192;

const NOBODY: Node = -1;

// The state that the handler reads; only one range is watched at a time.
static START: AtomicUsize = AtomicUsize::new(0);
static END: AtomicUsize = AtomicUsize::new(0);
static READERS: [AtomicI32; MOST] = [const { AtomicI32::new(NOBODY) }; MOST];

/// Calls `work`, and returns the node that first read each whole part of the range, or none for a
/// part that nobody read.
pub fn readers<E: From<io::Error>>(
    range: Range,
    work: impl FnOnce() -> Result<(), E>,
) -> Result<Vec<Option<Node>>, E> {
    let parts = (range.bytes / PART).min(MOST);
    for reader in &READERS[..parts] {
        reader.store(NOBODY, Ordering::SeqCst);
    }
    let watch = Watch::new(range.start, parts)?;
    let done = work();
    drop(watch);
    done?;
    let readers = READERS[..parts].iter();
    let readers = readers.map(|reader| reader.load(Ordering::SeqCst));
    Ok(readers
        .map(|node| (node != NOBODY).then_some(node))
        .collect())
}

/// A guard during whose life reads of the range are recorded.
struct Watch {
    before: libc::sigaction,
}

impl Watch {
    fn new(start: usize, parts: usize) -> io::Result<Watch> {
        END.store(start + parts * PART, Ordering::SeqCst);
        START.store(start, Ordering::SeqCst);
        // SAFETY: all-zero bytes are a valid sigaction.
        let [mut before, mut ours]: [libc::sigaction; 2] = unsafe { std::mem::zeroed() };
        ours.sa_sigaction = note as *const () as usize;
        ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: the handler has the signature that SA_SIGINFO requires, and calls only
        // async-signal-safe functions.
        if unsafe { libc::sigaction(libc::SIGSEGV, &raw const ours, &raw mut before) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let watch = Watch { before };
        if allow(start, parts * PART, libc::PROT_NONE) {
            Ok(watch)
        } else {
            Err(io::Error::last_os_error())
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let start = START.load(Ordering::SeqCst);
        let bytes = END.load(Ordering::SeqCst) - start;
        allow(start, bytes, libc::PROT_READ | libc::PROT_WRITE);
        // SAFETY: restores the earlier handler.
        unsafe { libc::sigaction(libc::SIGSEGV, &raw const self.before, std::ptr::null_mut()) };
    }
}

fn allow(start: usize, bytes: usize, what: libc::c_int) -> bool {
    // SAFETY: the range is whole pages of a buffer that its layer keeps. A forbidden read leads to
    // the handler, which allows it.
    unsafe { libc::mprotect(start as *mut libc::c_void, bytes, what) == 0 }
}

/// Handles the signal, on the thread that read a forbidden part.
extern "C" fn note(_: libc::c_int, info: *const libc::siginfo_t, _: *const libc::c_void) {
    // SAFETY: the system passes a valid pointer.
    let address = unsafe { (*info).si_addr() } as usize;
    let start = START.load(Ordering::SeqCst);
    let ours = (start..END.load(Ordering::SeqCst)).contains(&address);
    let part = address.wrapping_sub(start) / PART;
    let allowed = ours && {
        let node = node_here().unwrap_or(NOBODY);
        let order = Ordering::SeqCst;
        let _another_was_first = READERS[part].compare_exchange(NOBODY, node, order, order);
        let both = libc::PROT_READ | libc::PROT_WRITE;
        allow(start + part * PART, PART, both)
    };
    if !allowed {
        // An access outside of the range is a bug of the program, so restore the default: the same
        // read then ends the process. SAFETY: the default is no handler.
        unsafe { libc::signal(libc::SIGSEGV, libc::SIG_DFL) };
    }
}
