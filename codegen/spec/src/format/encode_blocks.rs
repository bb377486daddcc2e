//! Encoders of GGUF's blocks: round to nearest, without a search for better scales.
//!
//! Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 and MXFP4 give the bytes of ggml's reference quantizers and of
//! gguf-py. Their rules for a group of elements are:
//!
//! - symmetric codes (Q4_0, Q5_0): the element of the largest magnitude becomes the most negative
//!   code (-8, -16), so the scale carries its sign;
//! - Q8_0: the largest magnitude becomes 127;
//! - codes with an offset (Q4_1, Q5_1): the least element becomes code 0, the largest the last one;
//! - codes of these are nearest at the f32 scale, which is rounded to f16 only to be stored; halves
//!   are rounded up, those of Q8_0 away from zero;
//! - MXFP4: 2 to the exponent of the largest magnitude, less 2; ties take the smaller magnitude.
//!
//! ggml searches for scales of the other types. Here they begin as its search does: Q6_K and IQ4_NL
//! are symmetric (-32, -127), Q4_K and Q5_K have offsets, and their least element is zero at most.
//! K-quants then round the scales of groups to integers, at the scale that makes the largest one
//! 63, or -128 in Q6_K. Codes are those nearest to the elements at the scales as stored.

use super::code::{self, NONLINEAR, SmallFloat};
use super::encode::Extent;

/// Encodes the elements of one block. `None` if an f16 cannot hold a scale.
pub(super) type Pack = fn(&[f32], &mut [u8]) -> Option<()>;

/// Returns the element of the largest magnitude.
fn extreme(values: &[f32]) -> f32 {
    let larger = |most: f32, value: &f32| {
        if value.abs() > most.abs() {
            *value
        } else {
            most
        }
    };
    values.iter().fold(0.0, larger)
}

/// Writes the nearest f16 at a byte offset.
fn put_nearest(block: &mut [u8], at: usize, value: f32) -> Option<()> {
    put_bits(block, at, value.into(), 0).map(|_| ())
}

/// Writes the nearest f16 at a byte offset, and returns it. A number that would become zero is the
/// least one of its sign.
fn put_half(block: &mut [u8], at: usize, value: f64) -> Option<f32> {
    put_bits(block, at, value, u32::from(value != 0.0))
}

/// Writes the nearest f16 whose bits are at least these.
fn put_bits(block: &mut [u8], at: usize, value: f64, least: u32) -> Option<f32> {
    let float: SmallFloat = code::F16;
    if value.abs() > float.largest {
        return None;
    }
    let sign = u32::from(value.is_sign_negative()) << 15;
    let bits = float.nearest(value.abs()).max(least) | sign;
    block[at..at + 2].copy_from_slice(&(bits as u16).to_le_bytes());
    Some(code::f16(bits as u16))
}

/// Returns the nearest whole number of steps from `offset`, from `least` to `most`.
fn steps(value: f32, scale: f32, offset: f32, least: i32, most: i32) -> i32 {
    if scale == 0.0 {
        return 0;
    }
    let steps = (f64::from(value) - f64::from(offset)) / f64::from(scale);
    // Whole numbers bound the steps, so that rounding comes second.
    code::whole(steps.clamp(least.into(), most.into())) as i32
}

/// Packs 32 codes of 4 bits into 16 bytes: the first half goes to the low nibbles.
fn put_halves(bytes: &mut [u8], code: impl Fn(usize) -> u8) {
    for (at, byte) in bytes[..16].iter_mut().enumerate() {
        *byte = (code(at) & 15) | (code(at + 16) << 4);
    }
}

/// Packs the fifth bits of 32 codes.
fn put_fifth(bytes: &mut [u8], code: impl Fn(usize) -> u8) {
    for at in 0..32 {
        bytes[at / 8] |= (code(at) >> 4 & 1) << (at % 8);
    }
}

/// Returns the factor that takes elements to codes, as ggml computes it.
fn inverse(scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { 1.0 / scale }
}

/// Writes the scale of a symmetric group whose most negative code is `-half`, and returns its
/// codes, `half` added.
fn symmetric(values: &[f32], block: &mut [u8], half: u8) -> Option<[u8; 32]> {
    let half = f32::from(half);
    let scale = extreme(values) / -half;
    put_nearest(block, 0, scale)?;
    let inverse = inverse(scale);
    // The cast truncates.
    let code = |at: usize| values[at] * inverse + (half + 0.5);
    Some(std::array::from_fn(|at| {
        code(at).clamp(0.0, 2.0 * half - 1.0) as u8
    }))
}

pub(super) fn q4_0(values: &[f32], block: &mut [u8]) -> Option<()> {
    let codes = symmetric(values, block, 8)?;
    put_halves(&mut block[2..], |at| codes[at]);
    Some(())
}

pub(super) fn q5_0(values: &[f32], block: &mut [u8]) -> Option<()> {
    let codes = symmetric(values, block, 16)?;
    put_fifth(&mut block[2..], |at| codes[at]);
    put_halves(&mut block[6..], |at| codes[at]);
    Some(())
}

/// Writes the scale and offset of a block whose codes go up to `most`, and returns its codes.
fn offset(values: &[f32], block: &mut [u8], most: u8) -> Option<[u8; 32]> {
    let least = values.iter().copied().fold(f32::INFINITY, f32::min);
    let largest = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let most = f32::from(most);
    let scale = (largest - least) / most;
    put_nearest(block, 0, scale)?;
    put_nearest(block, 2, least)?;
    let inverse = inverse(scale);
    let code = |at: usize| (values[at] - least) * inverse + 0.5;
    Some(std::array::from_fn(|at| code(at).clamp(0.0, most) as u8))
}

pub(super) fn q4_1(values: &[f32], block: &mut [u8]) -> Option<()> {
    let codes = offset(values, block, 15)?;
    put_halves(&mut block[4..], |at| codes[at]);
    Some(())
}

pub(super) fn q5_1(values: &[f32], block: &mut [u8]) -> Option<()> {
    let codes = offset(values, block, 31)?;
    put_fifth(&mut block[4..], |at| codes[at]);
    put_halves(&mut block[8..], |at| codes[at]);
    Some(())
}

pub(super) fn q8_0(values: &[f32], block: &mut [u8]) -> Option<()> {
    let scale = extreme(values).abs() / 127.0;
    put_nearest(block, 0, scale)?;
    let inverse = inverse(scale);
    for (value, byte) in values.iter().zip(&mut block[2..]) {
        // `round` is a call on CPUs that are not known to have SSE4.1. The sum is exact in f64.
        let number = f64::from(value * inverse);
        *byte = (number + 0.5f64.copysign(number)) as i8 as u8;
    }
    Some(())
}

/// Writes the scales and offsets of Q4_K and Q5_K, and returns the codes.
fn k_offset(values: &[f32], block: &mut [u8], most: i32) -> Option<[u8; 256]> {
    let groups: [Extent; 8] = std::array::from_fn(|at| {
        let own = &values[at * 32..(at + 1) * 32];
        Extent {
            least: own.iter().copied().fold(0.0, f32::min),
            largest: own.iter().copied().fold(f32::NEG_INFINITY, f32::max),
        }
    });
    let scales = groups.map(|g| (f64::from(g.largest) - f64::from(g.least)) / f64::from(most));
    let offsets = groups.map(|g| -f64::from(g.least));
    let largest = |of: &[f64; 8]| of.iter().fold(0f64, |most, v| most.max(*v));
    let d = put_half(block, 0, largest(&scales) / 63.0)?;
    let least = put_half(block, 2, largest(&offsets) / 63.0)?;
    let six_bits = |of: f64, scale: f32| steps(of as f32, scale, 0.0, 0, 63) as u8;
    let scales = scales.map(|scale| six_bits(scale, d));
    let offsets = offsets.map(|offset| six_bits(offset, least));
    put_six_bits(&mut block[4..16], &scales, &offsets);
    Some(std::array::from_fn(|at| {
        let scale = d * f32::from(scales[at / 32]);
        let offset = -(least * f32::from(offsets[at / 32]));
        steps(values[at], scale, offset, 0, most) as u8
    }))
}

/// Packs eight scales and eight offsets of 6 bits each into 12 bytes: those of the last four groups
/// have their high two bits in the bytes of the first four.
fn put_six_bits(packed: &mut [u8], scales: &[u8; 8], offsets: &[u8; 8]) {
    for group in 0..4 {
        packed[group] = scales[group] | (scales[group + 4] >> 4 << 6);
        packed[group + 4] = offsets[group] | (offsets[group + 4] >> 4 << 6);
        packed[group + 8] = (scales[group + 4] & 15) | (offsets[group + 4] << 4);
    }
}

/// Packs 4-bit codes: each run of 32 bytes holds one group in its low nibbles and the next in its
/// high ones.
fn put_groups_of_halves(bytes: &mut [u8], codes: &[u8; 256]) {
    for (at, byte) in bytes[..128].iter_mut().enumerate() {
        let first = at / 32 * 64 + at % 32;
        *byte = (codes[first] & 15) | (codes[first + 32] << 4);
    }
}

pub(super) fn q4_k(values: &[f32], block: &mut [u8]) -> Option<()> {
    let codes = k_offset(values, block, 15)?;
    put_groups_of_halves(&mut block[16..], &codes);
    Some(())
}

pub(super) fn q5_k(values: &[f32], block: &mut [u8]) -> Option<()> {
    let codes = k_offset(values, block, 31)?;
    put_groups_of_halves(&mut block[48..], &codes);
    for (at, code) in codes.iter().enumerate() {
        block[16 + at % 32] |= (code >> 4) << (at / 32);
    }
    Some(())
}

pub(super) fn q6_k(values: &[f32], block: &mut [u8]) -> Option<()> {
    let groups: [f32; 16] = std::array::from_fn(|at| {
        let own = &values[at * 16..(at + 1) * 16];
        extreme(own) / -32.0
    });
    let d = put_half(block, 208, f64::from(extreme(&groups)) / -128.0)?;
    let scales = groups.map(|scale| steps(scale, d, 0.0, -128, 127) as i8);
    for (byte, scale) in block[192..208].iter_mut().zip(scales) {
        *byte = scale as u8;
    }
    for (at, value) in values.iter().enumerate() {
        let scale = d * f32::from(scales[at / 16]);
        let code = (steps(*value, scale, 0.0, -32, 31) + 32) as u8;
        let (run, row, column) = (at / 128, at / 32 % 4, at % 32);
        block[run * 64 + row % 2 * 32 + column] |= (code & 15) << (row / 2 * 4);
        block[128 + run * 32 + column] |= (code >> 4) << (row * 2);
    }
    Some(())
}

pub(super) fn iq4_nl(values: &[f32], block: &mut [u8]) -> Option<()> {
    let scale = put_half(block, 0, f64::from(extreme(values)) / -127.0)?;
    let wanted = |value: f32| if scale == 0.0 { 0.0 } else { value / scale };
    let wanted: [f32; 32] = std::array::from_fn(|at| wanted(values[at]));
    let middles = NONLINEAR
        .windows(2)
        .map(|pair| (f32::from(pair[0]) + f32::from(pair[1])) / 2.0);
    let codes = above(&wanted, middles);
    put_halves(&mut block[2..], |at| codes[at]);
    Some(())
}

/// Returns how many of the limits each number exceeds: its code, if limits are the middles between
/// neighbouring codes, and ties take the lower one.
fn above(numbers: &[f32; 32], limits: impl Iterator<Item = f32>) -> [u8; 32] {
    let mut codes = [0; 32];
    for limit in limits {
        for (code, number) in codes.iter_mut().zip(numbers) {
            *code += u8::from(*number > limit);
        }
    }
    codes
}

/// The middles between neighbouring magnitudes of E2M1, in halves.
const MIDDLES: [f32; 7] = [0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0];

pub(super) fn mxfp4(values: &[f32], block: &mut [u8]) -> Option<()> {
    let magnitude = f64::from(extreme(values).abs());
    block[0] = match magnitude {
        0.0 => 0,
        _ => (code::exponent(magnitude) - 2 + 127).clamp(0, 254) as u8,
    };
    let half = code::e8m0(block[0]) / 2.0;
    let sizes: [f32; 32] = std::array::from_fn(|at| values[at].abs());
    let codes = above(&sizes, MIDDLES.into_iter().map(|middle| half * middle));
    // A number that becomes zero loses its sign.
    let signed = |at: usize| codes[at] | u8::from(values[at] < 0.0 && codes[at] > 0) << 3;
    put_halves(&mut block[1..], signed);
    Some(())
}
