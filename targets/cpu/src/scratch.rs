//! Memory of a thread's own that outlives launches: what kernels keep near.

use crate::memory::Memory;
use moesaic_target::DeviceError;
use std::cell::RefCell;
use std::ffi::c_void;

/// Bytes at the start that every call finds zero.
const HEADER: usize = 64;

thread_local! {
    static OWN: RefCell<Option<(usize, Memory)>> = const { RefCell::new(None) };
}

/// Calls `work` with the address of `bytes` bytes of this thread's own: zeros in
/// the first line, anything behind it. Nothing is allocated once a thread has
/// had as much. `work` must not call this again.
///
/// # Errors
/// [`DeviceError::OutOfMemory`]; nothing was called then.
pub(crate) fn with(bytes: usize, work: impl FnOnce(*mut c_void)) -> Result<(), DeviceError> {
    if bytes == 0 {
        work(std::ptr::null_mut());
        return Ok(());
    }
    OWN.with_borrow_mut(|own| {
        if own.as_ref().is_none_or(|(have, _)| *have < bytes) {
            *own = None; // the old one may be what leaves no room
            *own = Some((bytes, Memory::new(bytes.max(HEADER))?));
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
}
