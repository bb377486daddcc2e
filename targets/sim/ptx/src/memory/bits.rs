//! Sets of bytes, one bit for each.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Calls `f` with each word index and the mask of the bits of
/// `start..start + count` that lie in it.
#[inline(always)]
pub fn words(start: usize, count: usize, mut f: impl FnMut(usize, u64)) {
    let (mut at, end) = (start, start + count);
    while at < end {
        let (word, bit) = (at / 64, at % 64);
        let take = (64 - bit).min(end - at);
        let mask = (u64::MAX >> (64 - take)) << bit;
        f(word, mask);
        at += take;
    }
}

/// A set that several threads fill at the same time.
pub struct SharedBits(Box<[AtomicU64]>);

impl SharedBits {
    pub fn new(count: usize) -> SharedBits {
        SharedBits((0..count.div_ceil(64)).map(|_| AtomicU64::new(0)).collect())
    }

    #[inline(always)]
    pub fn set(&self, start: usize, count: usize) {
        words(start, count, |word, mask| {
            // The load first: most bits are set already, and a read keeps the
            // cache line shared between the host's cores.
            if self.0[word].load(Relaxed) & mask != mask {
                self.0[word].fetch_or(mask, Relaxed);
            }
        });
    }

    /// Adds the bits of a whole word.
    pub fn set_word(&self, word: usize, mask: u64) {
        if mask != 0 {
            self.0[word].fetch_or(mask, Relaxed);
        }
    }

    #[inline(always)]
    pub fn word(&self, word: usize) -> u64 {
        self.0.get(word).map_or(0, |word| word.load(Relaxed))
    }

    #[inline(always)]
    pub fn all(&self, start: usize, count: usize) -> bool {
        let mut all = true;
        words(start, count, |word, mask| {
            all &= self.0[word].load(Relaxed) & mask == mask;
        });
        all
    }
}
