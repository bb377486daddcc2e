//! The generator against published answers, and its deviates against their distributions.

use moesaic_reference::rng::*;

#[test]
fn philox_gives_the_published_answers() {
    let cases = [
        (
            [0; 4],
            [0; 2],
            [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8],
        ),
        (
            [u32::MAX; 4],
            [u32::MAX; 2],
            [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd],
        ),
        (
            [0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344],
            [0xa4093822, 0x299f31d0],
            [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1],
        ),
    ];
    for (counter, key, answer) in cases {
        assert_eq!(philox(counter, key), answer);
    }
}

/// Returns 2²⁰ words spread over all of u32, with both ends.
fn words() -> impl Iterator<Item = u32> {
    let edges = (0..32).flat_map(|k| [1u32 << k, !(1u32 << k), u32::MAX >> k]);
    (0..1u32 << 20).map(|i| i << 12 | 0x7ff).chain(edges)
}

/// Returns the normal distribution function, by the reference's error function.
fn normal(z: f64) -> f64 {
    0.5 * (1.0 + moesaic_reference::erf(z / 2f64.sqrt()))
}

#[test]
fn gaussians_invert_the_normal_distribution() {
    for word in words() {
        let u = f64::from(word | 1) / 4_294_967_296.0;
        let z = f64::from(gaussian(word)) / 67_108_864.0;
        // Compare on the side of the smaller tail, where `normal` keeps its digits.
        let tail = u.min(1.0 - u);
        let density = (-z * z / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
        let error = (normal(-z.abs()) - tail).abs() / density;
        assert!(
            error < 1e-6 || z.abs() > 5.0,
            "{word:#x}: {z} is {error:e} off"
        );
        assert!(
            z == 0.0 || z.abs() < 1e-7 || (z > 0.0) == (u > 0.5),
            "{word:#x}: {z}"
        );
        assert!(z.abs() < 6.24);
    }
}

#[test]
fn gumbels_invert_their_distribution() {
    for word in words() {
        let v = f64::from(word | 1) / 4_294_967_296.0;
        let expected = -(-(-v).ln_1p()).ln();
        let found = f64::from(gumbel(word)) / 67_108_864.0;
        assert!(
            (found - expected).abs() < 2e-7,
            "{word:#x}: {found}, {expected}"
        );
    }
}

#[test]
fn moments_of_a_stream_are_right() {
    let stream = Stream::new(
        Draw {
            seed: 5,
            step: 3,
            layer: 2,
            first_token: 7,
        },
        Purpose::Noise,
    );
    let count = 1 << 18;
    let (mut sum, mut squares, mut gumbels) = (0.0, 0.0, 0.0);
    for i in 0..count {
        let word = stream.word(i / 64, i % 64);
        let z = f64::from(scaled(gaussian(word), 1.0));
        (sum, squares) = (sum + z, squares + z * z);
        gumbels += f64::from(scaled(gumbel(word), 1.0));
    }
    let n = count as f64;
    assert!((sum / n).abs() < 0.01, "mean {}", sum / n);
    assert!((squares / n - 1.0).abs() < 0.02, "variance {}", squares / n);
    assert!(
        (gumbels / n - 0.5772).abs() < 0.02,
        "mean of gumbels {}",
        gumbels / n
    );
}

/// A split batch draws the same numbers as the whole.
#[test]
fn tokens_have_global_numbers() {
    let draw = Draw {
        seed: 1 << 40,
        step: 9,
        layer: 0,
        first_token: 0,
    };
    let whole = Stream::new(draw, Purpose::Jitter);
    let part = Stream::new(
        Draw {
            first_token: 13,
            ..draw
        },
        Purpose::Jitter,
    );
    let other = Stream::new(Draw { seed: 0, ..draw }, Purpose::Jitter);
    let next = Stream::new(Draw { step: 10, ..draw }, Purpose::Jitter);
    let purpose = Stream::new(draw, Purpose::Dropout);
    for (t, index) in [(0, 0), (3, 5), (40, 1000)] {
        assert_eq!(part.word(t, index), whole.word(t + 13, index));
        for another in [other, next, purpose] {
            assert_ne!(another.word(t, index), whole.word(t, index));
        }
    }
}

#[test]
fn products_are_rounded_once() {
    for (count, factor) in [
        (1, 1.0),
        (-3, 0.125),
        (123_456_789, 0.3),
        (-400_000_001, 7e-6),
        (9, 3e30),
    ] {
        let exact = f64::from(count) / 67_108_864.0 * f64::from(factor);
        assert_eq!(scaled(count, factor), exact as f32);
    }
    for word in [0, 1, 0x8000_0000, 0xffff_ffff, 0x1234_5678] {
        let u = (f64::from(word >> 8) * 2.0 + 1.0) / 16_777_216.0 - 1.0;
        assert_eq!(jitter(word, 0.25), (1.0 + 0.25 * u) as f32);
        assert!(uniform(word) > 0.0 && uniform(word) < 1.0);
    }
    assert!(below(0x7fff_ffff, 0.5) && !below(0x8000_0000, 0.5));
    assert!(!below(0, 0.0) && below(u32::MAX, 1.0));
}
