//! Reductions in rank order: the same bytes whatever arrives first.

use crate::{CommElement, Reduction};
use half::{bf16, f16};

/// Folds consecutive rows of `row_bytes` bytes into the first of them.
pub(crate) fn fold(element: CommElement, reduction: Reduction, rows: &mut [u8], row_bytes: usize) {
    if row_bytes == 0 {
        return;
    }
    let (first, rest) = rows.split_at_mut(row_bytes);
    match element {
        CommElement::F32 => whole::<f32, 4>(reduction, first, rest),
        CommElement::I32 => whole::<i32, 4>(reduction, first, rest),
        CommElement::I64 => whole::<i64, 8>(reduction, first, rest),
        CommElement::U8 => whole::<u8, 1>(reduction, first, rest),
        CommElement::Bf16 => halves(reduction, first, rest, bf16::to_f32, bf16::from_f32),
        CommElement::F16 => halves(reduction, first, rest, f16::to_f32, f16::from_f32),
    }
}

/// A number of `N` bytes that is reduced in its own type.
trait Number<const N: usize>: Copy {
    fn read(bytes: [u8; N]) -> Self;
    fn write(self) -> [u8; N];
    fn join(self, other: Self, reduction: Reduction) -> Self;
}

macro_rules! number {
    ($type:ty, $bytes:literal, $sum:expr) => {
        impl Number<$bytes> for $type {
            fn read(bytes: [u8; $bytes]) -> Self {
                <$type>::from_ne_bytes(bytes)
            }

            fn write(self) -> [u8; $bytes] {
                self.to_ne_bytes()
            }

            fn join(self, other: Self, reduction: Reduction) -> Self {
                let sum: fn($type, $type) -> $type = $sum;
                match reduction {
                    Reduction::Sum => sum(self, other),
                    Reduction::Max => later(self, other, self < other),
                    Reduction::Min => later(self, other, self > other),
                }
            }
        }
    };
}

number!(f32, 4, |a, b| a + b);
number!(i32, 4, i32::wrapping_add);
number!(i64, 8, i64::wrapping_add);
number!(u8, 1, u8::wrapping_add);

/// Returns `other` if it wins or is the first NaN; a NaN that was there already stays.
#[allow(clippy::eq_op)]
fn later<T: Copy + PartialEq>(this: T, other: T, wins: bool) -> T {
    // The only portable NaN test for a generic type: NaN differs from itself.
    if wins || (other != other && this == this) {
        other
    } else {
        this
    }
}

fn whole<T: Number<N>, const N: usize>(reduction: Reduction, first: &mut [u8], rest: &[u8]) {
    for row in rest.chunks_exact(first.len()) {
        let (sums, _) = first.as_chunks_mut::<N>();
        for (sum, value) in sums.iter_mut().zip(row.as_chunks::<N>().0) {
            *sum = T::read(*sum).join(T::read(*value), reduction).write();
        }
    }
}

/// Reduces 16-bit floats in f32, one block on the stack at a time.
fn halves<T>(
    reduction: Reduction,
    first: &mut [u8],
    rest: &[u8],
    widen: fn(T) -> f32,
    narrow: fn(f32) -> T,
) where
    T: Copy + HalfBits,
{
    const BLOCK: usize = 512;
    let row_bytes = first.len();
    let mut sums = [0f32; BLOCK];
    for start in (0..row_bytes).step_by(2 * BLOCK) {
        let end = (start + 2 * BLOCK).min(row_bytes);
        let count = (end - start) / 2;
        let read = |bytes: &[u8; 2]| widen(T::from_bits(u16::from_ne_bytes(*bytes)));
        for (sum, value) in sums.iter_mut().zip(first[start..end].as_chunks::<2>().0) {
            *sum = read(value);
        }
        for row in rest.chunks_exact(row_bytes) {
            for (sum, value) in sums[..count]
                .iter_mut()
                .zip(row[start..end].as_chunks::<2>().0)
            {
                *sum = sum.join(read(value), reduction);
            }
        }
        for (out, sum) in first[start..end]
            .as_chunks_mut::<2>()
            .0
            .iter_mut()
            .zip(&sums)
        {
            *out = narrow(*sum).to_bits().to_ne_bytes();
        }
    }
}

trait HalfBits {
    fn from_bits(bits: u16) -> Self;
    fn to_bits(self) -> u16;
}

impl HalfBits for bf16 {
    fn from_bits(bits: u16) -> bf16 {
        bf16::from_bits(bits)
    }

    fn to_bits(self) -> u16 {
        self.to_bits()
    }
}

impl HalfBits for f16 {
    fn from_bits(bits: u16) -> f16 {
        f16::from_bits(bits)
    }

    fn to_bits(self) -> u16 {
        self.to_bits()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn f32s(rows: &[[f32; 2]], reduction: Reduction) -> Vec<f32> {
        let mut bytes: Vec<u8> = rows
            .iter()
            .flatten()
            .flat_map(|v| v.to_ne_bytes())
            .collect();
        fold(CommElement::F32, reduction, &mut bytes, 8);
        let (values, _) = bytes[..8].as_chunks::<4>();
        values.iter().map(|v| f32::from_ne_bytes(*v)).collect()
    }

    #[test]
    fn sums_are_in_the_order_of_the_ranks() {
        let rows = [[1e8, 1.0], [-1e8, 2.0], [1.0, 3.0]];
        assert_eq!(f32s(&rows, Reduction::Sum), [1.0, 6.0]);
        let swapped = [rows[0], rows[2], rows[1]];
        assert_eq!(f32s(&swapped, Reduction::Sum)[0], 0.0);
    }

    #[test]
    fn largest_and_smallest_keep_nan() {
        let rows = [[1.0, 5.0], [f32::NAN, 7.0], [3.0, 6.0]];
        let max = f32s(&rows, Reduction::Max);
        assert!(max[0].is_nan() && max[1] == 7.0, "{max:?}");
        let min = f32s(&rows, Reduction::Min);
        assert!(min[0].is_nan() && min[1] == 5.0, "{min:?}");
    }

    #[test]
    fn halves_are_summed_in_f32_and_rounded_once() {
        // 256 + 1 rounds to 256 in bf16; in f32 the ones add up first.
        let ranks = [256.0f32, 1.0, 1.0, 1.0, 1.0];
        let mut rows = Vec::new();
        for value in ranks {
            // More than a block of values, so that the second block is met, too.
            for _ in 0..700 {
                rows.extend(bf16::from_f32(value).to_bits().to_ne_bytes());
            }
        }
        fold(CommElement::Bf16, Reduction::Sum, &mut rows, 1400);
        let (values, _) = rows[..1400].as_chunks::<2>();
        for value in values {
            assert_eq!(bf16::from_bits(u16::from_ne_bytes(*value)).to_f32(), 260.0);
        }
    }

    #[test]
    fn integers_wrap() {
        let mut bytes = [200u8, 100];
        fold(CommElement::U8, Reduction::Sum, &mut bytes, 1);
        assert_eq!(bytes[0], 44);
        let mut wide: Vec<u8> = [i64::MAX, 1].iter().flat_map(|v| v.to_ne_bytes()).collect();
        fold(CommElement::I64, Reduction::Sum, &mut wide, 8);
        assert_eq!(wide[..8], i64::MIN.to_ne_bytes());
    }
}
