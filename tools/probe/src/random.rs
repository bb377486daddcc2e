//! Random data that is the same on every run.

/// A small random generator.
pub struct Random(u64);

impl Random {
    /// Returns the generator of a seed.
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// Returns 32 random bits.
    pub fn bits(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 32) as u32
    }

    /// Returns a number from `low` to `high`, both included.
    pub fn range(&mut self, low: i64, high: i64) -> i64 {
        low + i64::from(self.bits()) % (high - low + 1)
    }

    /// Returns `count` words of random bits.
    pub fn words(&mut self, count: usize) -> Vec<u32> {
        (0..count).map(|_| self.bits()).collect()
    }

    /// Returns one element of the list.
    pub fn pick<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.bits() as usize % list.len()]
    }

    /// Returns the numbers below `count` in random order.
    pub fn permutation(&mut self, count: u32) -> Vec<u32> {
        let mut list: Vec<u32> = (0..count).collect();
        for last in (1..list.len()).rev() {
            list.swap(last, self.bits() as usize % (last + 1));
        }
        list
    }
}
