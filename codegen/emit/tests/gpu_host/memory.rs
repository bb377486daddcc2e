//! Memory that ends at a page nobody may touch.

use moesaic_target::Ptr;

/// An allocation that ends, up to alignment, where an unreadable page begins.
pub struct GuardedMemory {
    map: *mut libc::c_void,
    length: usize,
    start: usize,
    bytes: usize,
}

// SAFETY: it owns its mapping, and any thread may unmap it.
unsafe impl Send for GuardedMemory {}
// SAFETY: no method of a shared one touches the contents.
unsafe impl Sync for GuardedMemory {}

const PAGE: usize = 4096;
const ALIGN: usize = 16;
const POISON: u8 = 0xFF;

impl GuardedMemory {
    pub fn new(bytes: usize) -> GuardedMemory {
        let body = bytes.next_multiple_of(PAGE) + PAGE;
        let (length, access) = (body + PAGE, libc::PROT_READ | libc::PROT_WRITE);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping at an address of the system's choice.
        let map = unsafe { libc::mmap(std::ptr::null_mut(), length, access, flags, -1, 0) };
        assert_ne!(map, libc::MAP_FAILED, "out of memory for {bytes} bytes");
        // SAFETY: both ranges lie within the mapping; `body` is whole pages.
        unsafe {
            map.cast::<u8>().write_bytes(POISON, body);
            assert_eq!(libc::mprotect(map.byte_add(body), PAGE, libc::PROT_NONE), 0);
        }
        let start = body - bytes.next_multiple_of(ALIGN);
        GuardedMemory {
            map,
            length,
            start,
            bytes,
        }
    }

    pub fn ptr(&self) -> Ptr {
        Ptr(self.map as u64 + self.start as u64)
    }
}

impl Drop for GuardedMemory {
    fn drop(&mut self) {
        let body = self.length - PAGE;
        // SAFETY: the readable part of the mapping, which is still there.
        let all = unsafe { std::slice::from_raw_parts(self.map.cast::<u8>(), body) };
        let outside = all[..self.start]
            .iter()
            .chain(&all[self.start + self.bytes..]);
        let intact = outside.clone().all(|&byte| byte == POISON);
        // SAFETY: mapped in `new` with this length, unmapped only here.
        unsafe { libc::munmap(self.map, self.length) };
        if !std::thread::panicking() {
            assert!(
                intact,
                "a kernel wrote beside a tensor of {} bytes",
                self.bytes
            );
        }
    }
}
