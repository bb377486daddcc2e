//! Counter-based random numbers of training.
//!
//! A number depends on (seed, step, layer, purpose, token, index) alone, so every backend, any
//! number of threads and any split of the batch over ranks draw the same.
//! `templates/prelude/random.h.tera` is this file in C. Both use integers only, because
//! floating-point rounding may differ between compilers.

use crate::weights::splitmix64;

/// The position of a call in a training run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Draw {
    /// The seed of the run.
    pub seed: u64,
    /// The optimizer step, or any other number that changes from call to call.
    pub step: u64,
    /// The index of the layer in the model.
    pub layer: u32,
    /// The index of the call's first token in the global batch.
    pub first_token: u64,
}

/// The purpose of a number. Each purpose has its own stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Factors of the router's input; index: channel.
    Jitter = 1,
    /// Dropped channels of the router's input; index: channel.
    Dropout = 2,
    /// Noise on logits; index: expert.
    Noise = 3,
    /// The decision to keep a second expert; index: slot.
    Second = 4,
    /// The random order of placement, with 64-bit numbers.
    Place = 5,
}

/// The numbers of one purpose in one call.
#[derive(Clone, Copy, Debug)]
pub struct Stream {
    key: [u32; 2],
    first_token: u64,
}

impl Stream {
    /// Makes the stream. Its key is the first half of a Philox block of (step, layer, purpose)
    /// under the seed.
    pub fn new(draw: Draw, purpose: Purpose) -> Stream {
        let [step_low, step_high] = halves(draw.step);
        let counter = [step_low, step_high, draw.layer, purpose as u32];
        let [a, b, _, _] = philox(counter, halves(draw.seed));
        Stream {
            key: [a, b],
            first_token: draw.first_token,
        }
    }

    /// Returns a number for slot `k` of token `t` that is unique in its call: splitmix64 of both
    /// and the stream's key.
    pub fn long_word(&self, t: usize, k: usize) -> u64 {
        let [low, high] = self.key.map(u64::from);
        let token = self.first_token.wrapping_add(t as u64);
        splitmix64((high << 32 | low) ^ (k as u64) << 32 ^ token)
    }

    /// Returns 32 random bits for token `t` of the call: word `index % 4` of block `index / 4`.
    pub fn word(&self, t: usize, index: usize) -> u32 {
        let [low, high] = halves(self.first_token.wrapping_add(t as u64));
        philox([low, high, (index / 4) as u32, 0], self.key)[index % 4]
    }
}

fn halves(value: u64) -> [u32; 2] {
    [value as u32, (value >> 32) as u32]
}

/// Computes Philox4x32-10 (Salmon et al., SC 2011).
pub fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    let product = |a: u32, b: u32| {
        let whole = u64::from(a) * u64::from(b);
        [whole as u32, (whole >> 32) as u32]
    };
    for _ in 0..10 {
        let [low, high] = product(0xd251_1f53, counter[0]);
        let [low2, high2] = product(0xcd9e_8d57, counter[2]);
        counter = [
            high2 ^ counter[1] ^ key[0],
            low2,
            high ^ counter[3] ^ key[1],
            low,
        ];
        key[0] = key[0].wrapping_add(0x9e37_79b9);
        key[1] = key[1].wrapping_add(0xbb67_ae85);
    }
    counter
}

/// Returns a uniform number in (0, 1): an odd multiple of 2⁻²⁴.
pub fn uniform(word: u32) -> f32 {
    (2 * (word >> 9) + 1) as f32 / 16_777_216.0
}

/// Returns `1 + amount · u` with u uniform in (-1, 1), rounded once; `amount` is below 1.
pub fn jitter(word: u32, amount: f32) -> f32 {
    let amount = (f64::from(amount) * 4_294_967_296.0 + 0.5) as i64;
    let odd = 2 * i64::from(word >> 8) + 1 - (1 << 24);
    ((1i64 << 56) + amount * odd) as f32 / (1i64 << 56) as f32
}

/// Returns true with `probability`, which is rounded to 2⁻³².
pub fn below(word: u32, probability: f32) -> bool {
    u64::from(word) < (f64::from(probability) * 4_294_967_296.0 + 0.5) as u64
}

/// Returns `count · 2⁻²⁶ · factor`, rounded once. The factor is positive.
pub fn scaled(count: i32, factor: f32) -> f32 {
    let bits = factor.to_bits();
    let mantissa = i64::from(bits & 0x7f_ffff | 0x80_0000);
    let exponent = (bits >> 23) as i32 - 150 - 26;
    let half = exponent >> 1;
    (i64::from(count) * mantissa) as f32 * power_of_two(half) * power_of_two(exponent - half)
}

fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

/// ln 2 in units of 2⁻⁵⁷.
const LN_2: i64 = 99_893_036_290_645_747;

/// Evaluates a polynomial by Horner's rule: coefficients from the highest power down, `t` in units
/// of 2⁻³⁰.
fn polynomial<const N: usize>(coefficients: [i64; N], t: i64) -> i64 {
    let [first, rest @ ..] = &coefficients[..] else {
        return 0;
    };
    rest.iter().fold(*first, |sum, c| ((sum * t) >> 30) + c)
}

/// Returns ln(x) of x > 0 in units of 2⁻²⁶, with an error of at most 2 of them.
fn logarithm(x: u64) -> i64 {
    let zeros = x.leading_zeros();
    let fraction = ((x << zeros) >> 33 & 0x3fff_ffff) as i64;
    let of_fraction = polynomial(
        [
            3932303, -6601276, 8787156, -15397579, 28297009, -53052878, 106048026, -238608392,
            715827885, 435364840,
        ],
        fraction - (1 << 29),
    );
    ((i64::from(63 - zeros) * LN_2) >> 31) + (of_fraction >> 4)
}

/// Returns a normal deviate in units of 2⁻²⁶: the inverse of the normal distribution at
/// `u = (word | 1) / 2³²`, within 3e-7. It is a function of `w = -ln(4 u (1 - u))`, as in Giles'
/// approximation of the inverse error function; the polynomials are our own fits.
pub fn gaussian(word: u32) -> i32 {
    let odd = i64::from(word | 1);
    let whole = 1i64 << 32;
    let w = ((62 * LN_2) >> 31) - logarithm((odd * (whole - odd)) as u64);
    let w = w.max(0);
    if w < 5 << 26 {
        let slope = polynomial(
            [
                562417, 2128561, -5371990, -1702799, 21216532, -30461331, -25373207, 374524065,
                569972619,
            ],
            (w - (5 << 25)) << 2,
        );
        return ((slope * (2 * odd - whole)) >> 34) as i32;
    }
    let size = if w < 10 << 26 {
        polynomial(
            [
                -92474, 203526, -382317, 951122, -2672049, 8594366, -34867505, 276765439, 976112291,
            ],
            (w - (15 << 25)) << 2,
        )
    } else {
        polynomial(
            [
                39932, -94723, 185745, -482928, 1333463, -3862312, 12448154, -49674404, 389296680,
                1433538098,
            ],
            (w - (31 << 25)) << 1,
        )
    };
    let size = (size >> 2) as i32;
    if word >> 31 == 1 { size } else { -size }
}

/// Returns a Gumbel deviate -ln(-ln(1 - v)) at v = (word | 1) / 2³² in units of 2⁻²⁶, within 1e-7;
/// from -3.1 to 22.2.
pub fn gumbel(word: u32) -> i32 {
    let odd = i64::from(word | 1);
    let whole = (32 * LN_2) >> 31;
    if word >> 31 == 0 {
        // -ln(v) - ln(-ln(1 - v) / v), which keeps the digits of a small v.
        let ratio = polynomial(
            [
                389551315, 350798426, 278062384, 275850843, 299313865, 375187489, 681553262,
                150747971,
            ],
            (odd >> 2) - (1 << 28),
        );
        return (whole - logarithm(odd as u64) - (ratio >> 4)) as i32;
    }
    let exponential = whole - logarithm(((1i64 << 32) - odd) as u64);
    (((26 * LN_2) >> 31) - logarithm(exponential as u64)) as i32
}
