//! Scratch memory that belongs to a thread and outlives launches.

use crate::memory::Memory;
use moesaic_target::DeviceError;
use std::cell::{OnceCell, RefCell};
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes at the start that every call finds zero.
const HEADER: usize = 64;

/// The memory from which workers take their chunks, so that none of them
/// allocates in a run that it joins late. A caller whose run needs more than
/// any before puts a chunk for each worker here. Untouched memory has no node
/// yet, so a worker's chunk still lies where the worker runs.
#[derive(Default)]
pub(crate) struct Supply {
    /// Bytes of a chunk; grows only.
    bytes: AtomicUsize,
    /// Chunks of that size that no worker has needed yet.
    ready: Mutex<Vec<Memory>>,
}

impl Supply {
    /// Ensures that each of `workers` threads finds `bytes` bytes.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`]; existing chunks are kept.
    pub(crate) fn provide(&self, workers: usize, bytes: usize) -> Result<(), DeviceError> {
        if bytes <= self.bytes.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut ready = self.ready.lock().unwrap_or_else(PoisonError::into_inner);
        if bytes > self.bytes.load(Ordering::Acquire) {
            let pieces = (0..workers).map(|_| Memory::new(bytes.max(HEADER)));
            *ready = pieces.collect::<Result<_, _>>()?;
            self.bytes.store(bytes, Ordering::Release);
        }
        Ok(())
    }

    /// Takes a chunk of at least `bytes` bytes, if one is left; returns its
    /// size too.
    fn take(&self, bytes: usize) -> Option<(usize, Memory)> {
        let mut ready = self.ready.lock().unwrap_or_else(PoisonError::into_inner);
        let size = self.bytes.load(Ordering::Acquire);
        let piece = if size >= bytes { ready.pop() } else { None };
        piece.map(|memory| (size, memory))
    }
}

thread_local! {
    static OWN: RefCell<Option<(usize, Memory)>> = const { RefCell::new(None) };
    static SUPPLY: OnceCell<Arc<Supply>> = const { OnceCell::new() };
}

/// Makes this thread take its memory from `supply` while that lasts.
pub(crate) fn live_on(supply: Arc<Supply>) {
    let _a_thread_is_of_one_team = SUPPLY.with(|own| own.set(supply));
}

/// Calls `work` with the address of `bytes` bytes of this thread's own memory:
/// zeros in the first line, anything behind it. Nothing is allocated once a
/// thread has had as much. `work` must not call this function again.
///
/// # Errors
/// [`DeviceError::OutOfMemory`]; `work` was not called then.
pub(crate) fn with(bytes: usize, work: impl FnOnce(*mut c_void)) -> Result<(), DeviceError> {
    if bytes == 0 {
        work(std::ptr::null_mut());
        return Ok(());
    }
    OWN.with_borrow_mut(|own| {
        if own.as_ref().is_none_or(|(have, _)| *have < bytes) {
            *own = None; // the old one may be what leaves no room
            *own = Some(piece(bytes)?);
        }
        if let Some((_, memory)) = own {
            let start = memory.address() as *mut c_void;
            // SAFETY: the memory is this thread's and has at least a header.
            unsafe { start.cast::<u8>().write_bytes(0, HEADER) };
            work(start);
        }
        Ok(())
    })
}

/// Allocates at least `bytes` bytes; returns their number too.
fn piece(bytes: usize) -> Result<(usize, Memory), DeviceError> {
    let supplied = SUPPLY.with(|supply| supply.get().and_then(|supply| supply.take(bytes)));
    match supplied {
        Some(piece) => Ok(piece),
        None => Ok((bytes, Memory::new(bytes.max(HEADER))?)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_finds_zeros_at_the_start_and_its_own_bytes_behind() {
        for bytes in [0, 1, 64, 4096, 100, 5 << 20] {
            let mut calls = 0;
            let done = with(bytes, |start| {
                calls += 1;
                assert_eq!(start.is_null(), bytes == 0);
                if bytes >= HEADER {
                    // SAFETY: so many bytes are this call's.
                    let memory =
                        unsafe { std::slice::from_raw_parts_mut(start.cast::<u8>(), bytes) };
                    assert_eq!(memory[..HEADER], [0; HEADER]);
                    memory.fill(0xFF);
                }
            });
            assert!(done.is_ok() && calls == 1);
        }
    }

    #[test]
    fn a_supply_has_a_piece_for_each_worker_and_grows() {
        let supply = Supply::default();
        assert!(supply.take(1).is_none());
        for (asked, size) in [(100, 100), (5000, 5000), (64, 5000)] {
            supply.provide(2, asked).unwrap();
            assert_eq!(supply.bytes.load(Ordering::Relaxed), size);
            assert_eq!(supply.ready.lock().unwrap().len(), 2);
        }
        assert!(supply.take(5001).is_none());
        for left in [Some(5000), Some(5000), None] {
            assert_eq!(supply.take(4000).map(|(size, _)| size), left);
        }
        supply.provide(2, 5000).unwrap();
        assert!(supply.take(1).is_none(), "each worker has had its own");
        assert!(supply.provide(1, usize::MAX).is_err());
        supply.provide(1, 6000).unwrap();
        assert!(supply.take(6000).is_some());
    }

    #[test]
    fn a_worker_lives_on_its_supply() {
        let supply = Arc::new(Supply::default());
        supply.provide(1, 4096).unwrap();
        let own = Arc::clone(&supply);
        let worker = std::thread::spawn(move || {
            live_on(own);
            for bytes in [100, 4096, 8192] {
                with(bytes, |start| assert!(!start.is_null())).unwrap();
            }
        });
        worker.join().unwrap();
        assert!(supply.ready.lock().unwrap().is_empty());
    }
}
