//! Random data for tests.

use crate::float::{bf16_from_f32, f16_from_f32};
use crate::mma::MmaElement;

/// A small generator, the same numbers for the same seed.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 32) as u32
    }

    /// From `low` to `high`, both possible.
    pub fn range(&mut self, low: i64, high: i64) -> i64 {
        low + i64::from(self.next()) % (high - low + 1)
    }

    /// Whole numbers that every format and every sum here holds exactly.
    pub fn matrix(&mut self, elements: usize, low: i64, high: i64) -> Vec<f32> {
        (0..elements)
            .map(|_| self.range(low, high) as f32)
            .collect()
    }
}

/// The bits of a whole number as an element.
pub fn pack(element: MmaElement, value: f32) -> u32 {
    match element {
        MmaElement::F16 => u32::from(f16_from_f32(value)),
        MmaElement::Bf16 => u32::from(bf16_from_f32(value)),
        MmaElement::Tf32 => value.to_bits(),
        MmaElement::S8 => u32::from((value as i8).cast_unsigned()),
        MmaElement::U8 => u32::from(value as u8),
    }
}

/// `a[m, k] * b[k, n] + c[m, n]` as plain loops.
pub fn naive(a: &[f32], b: &[f32], c: &[f32], [m, n, k]: [usize; 3]) -> Vec<f32> {
    let mut d = c.to_vec();
    for row in 0..m {
        for column in 0..n {
            for depth in 0..k {
                d[row * n + column] += a[row * k + depth] * b[depth * n + column];
            }
        }
    }
    d
}

/// Returns true if the places are every pair below the extents, each `times`
/// times.
pub fn covers(
    places: impl Iterator<Item = (usize, usize)>,
    [rows, columns]: [usize; 2],
    times: usize,
) -> bool {
    let mut seen = vec![0; rows * columns];
    for (row, column) in places {
        if row >= rows || column >= columns {
            return false;
        }
        seen[row * columns + column] += 1;
    }
    seen.iter().all(|count| *count == times)
}
