//! One allocation.

use super::bits::SharedBits;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering::Relaxed};

/// The content of unwritten memory: NaN as a float of any width, -1 as an
/// integer.
const POISON: u64 = u64::MAX;

/// An allocation of device memory. Several host threads run blocks that read
/// and write it, so every access is a relaxed atomic one: a kernel with a race
/// gets some value, as on hardware, and the simulator itself stays free of
/// undefined behaviour.
pub struct Allocation {
    /// The device address of the first byte.
    pub base: u64,
    pub bytes: usize,
    data: Box<[AtomicU64]>,
    /// Bytes that uploads and finished launches have written.
    pub valid: SharedBits,
}

impl Allocation {
    pub fn new(base: u64, bytes: usize) -> Allocation {
        Allocation {
            base,
            bytes,
            data: (0..bytes.div_ceil(8))
                .map(|_| AtomicU64::new(POISON))
                .collect(),
            valid: SharedBits::new(bytes),
        }
    }

    /// Returns true if `count` bytes from `address` on are inside.
    #[inline(always)]
    pub fn holds(&self, address: u64, count: usize) -> bool {
        let offset = address.wrapping_sub(self.base);
        offset < self.bytes as u64 && count as u64 <= self.bytes as u64 - offset
    }

    fn start(&self) -> *mut u8 {
        self.data.as_ptr().cast_mut().cast()
    }

    /// Reads 1, 2, 4 or 8 bytes at a multiple of their number.
    #[inline(always)]
    pub fn read(&self, offset: usize, count: usize) -> u64 {
        assert!(offset + count <= self.bytes && offset.is_multiple_of(count));
        // SAFETY: inside the data by the assertion, aligned since the data is
        // aligned to 8; only atomics touch it while it is shared.
        unsafe {
            let at = self.start().add(offset);
            match count {
                1 => u64::from(AtomicU8::from_ptr(at).load(Relaxed)),
                2 => u64::from(AtomicU16::from_ptr(at.cast()).load(Relaxed)),
                4 => u64::from(AtomicU32::from_ptr(at.cast()).load(Relaxed)),
                _ => AtomicU64::from_ptr(at.cast()).load(Relaxed),
            }
        }
    }

    /// Writes 1, 2, 4 or 8 bytes at a multiple of their number.
    #[inline(always)]
    pub fn write(&self, offset: usize, count: usize, value: u64) {
        assert!(offset + count <= self.bytes && offset.is_multiple_of(count));
        // SAFETY: as in `read`.
        unsafe {
            let at = self.start().add(offset);
            match count {
                1 => AtomicU8::from_ptr(at).store(value as u8, Relaxed),
                2 => AtomicU16::from_ptr(at.cast()).store(value as u16, Relaxed),
                4 => AtomicU32::from_ptr(at.cast()).store(value as u32, Relaxed),
                _ => AtomicU64::from_ptr(at.cast()).store(value, Relaxed),
            }
        }
    }

    /// Replaces 2, 4 or 8 bytes by a function of them and returns the old
    /// value.
    pub fn update(&self, offset: usize, count: usize, f: impl Fn(u64) -> u64) -> u64 {
        assert!(offset + count <= self.bytes && offset.is_multiple_of(count));
        // SAFETY: as in `read`.
        unsafe {
            let at = self.start().add(offset);
            match count {
                2 => {
                    let cell = AtomicU16::from_ptr(at.cast());
                    let f = |old: u16| Some(f(u64::from(old)) as u16);
                    u64::from(cell.fetch_update(Relaxed, Relaxed, f).unwrap_or(0))
                }
                4 => {
                    let cell = AtomicU32::from_ptr(at.cast());
                    let f = |old: u32| Some(f(u64::from(old)) as u32);
                    u64::from(cell.fetch_update(Relaxed, Relaxed, f).unwrap_or(0))
                }
                _ => {
                    let cell = AtomicU64::from_ptr(at.cast());
                    cell.fetch_update(Relaxed, Relaxed, |old| Some(f(old)))
                        .unwrap_or(0)
                }
            }
        }
    }

    /// Copies bytes out, in the largest aligned chunks.
    pub fn copy_out(&self, offset: usize, to: &mut [u8]) {
        let mut done = 0;
        while done < to.len() {
            let count = piece(offset + done, to.len() - done);
            let value = self.read(offset + done, count).to_le_bytes();
            to[done..done + count].copy_from_slice(&value[..count]);
            done += count;
        }
    }

    /// Copies bytes in, in the largest aligned chunks, without marking them as
    /// valid.
    pub fn copy_in(&self, offset: usize, from: &[u8]) {
        let mut done = 0;
        while done < from.len() {
            let count = piece(offset + done, from.len() - done);
            let mut value = [0; 8];
            value[..count].copy_from_slice(&from[done..done + count]);
            self.write(offset + done, count, u64::from_le_bytes(value));
            done += count;
        }
    }
}

/// Returns the largest power of two up to 8 that fits at an offset.
fn piece(offset: usize, left: usize) -> usize {
    [8, 4, 2]
        .into_iter()
        .find(|count| offset.is_multiple_of(*count) && left >= *count)
        .unwrap_or(1)
}
