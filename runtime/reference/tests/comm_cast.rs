//! Rows between nodes: E4M3 against a table from another implementation, and each format's error
//! against its published error.

use moesaic_kernel::DType;
use moesaic_reference::{CommDtype, Random, of_e4m3, pack_row, to_e4m3, unpack_row};

/// Returns the value of every code.
fn table() -> Vec<f64> {
    let lines = include_str!("e4m3.txt").lines();
    let numbers = lines.filter(|line| !line.starts_with('#'));
    let numbers = numbers.flat_map(str::split_whitespace);
    numbers.map(|number| number.parse().unwrap()).collect()
}

#[test]
fn e4m3_is_that_of_the_table() {
    let table = table();
    assert_eq!(table.len(), 256);
    for (code, &value) in (0..=255u8).zip(&table) {
        let read = f64::from(of_e4m3(code));
        assert!(read == value || (read.is_nan() && value.is_nan()), "{code}");
        assert_eq!(
            read.is_sign_negative(),
            value.is_sign_negative() && !value.is_nan()
        );
        if !value.is_nan() {
            assert_eq!(to_e4m3(value as f32), code, "{value}");
        }
    }
}

#[test]
fn e4m3_rounds_to_the_nearest_of_the_table() {
    let table = table();
    let nearest = |value: f64| {
        let distance = |code: usize| (table[code] - value).abs();
        // Of two equally near codes, the even one.
        (0..127usize)
            .min_by(|&a, &b| {
                let near = distance(a).total_cmp(&distance(b));
                near.then((a % 2).cmp(&(b % 2)))
            })
            .unwrap() as u8
    };
    let mut random = Random::new(5);
    let between = (0..126).map(|code| (table[code] + table[code + 1]) / 2.0);
    let mut values: Vec<f64> = between.collect();
    values.extend((0..2000).map(|_| (random.signed() * 448.0).abs()));
    values.extend((0..2000).map(|_| (random.signed() / 32.0).abs()));
    for value in values {
        let value = value as f32;
        for near in [value.next_down().max(0.0), value, value.next_up()] {
            let code = to_e4m3(near);
            assert_eq!(code, nearest(f64::from(near)), "{near}");
            assert_eq!(to_e4m3(-near), code | 0x80);
        }
    }
    for (value, code) in [
        (464.0, 0x7e),
        (1e30, 0x7e),
        (f32::INFINITY, 0x7f),
        (f32::NAN, 0x7f),
    ] {
        assert_eq!(to_e4m3(value), code, "{value}");
    }
}

/// Returns normally distributed numbers, by Box and Muller.
fn gaussian(count: usize) -> Vec<f32> {
    let mut random = Random::new(17);
    let normal = |random: &mut Random| {
        let (a, b) = (random.signed().abs().max(1e-9), random.signed());
        ((-2.0 * a.ln()).sqrt() * (std::f64::consts::PI * b).cos()) as f32
    };
    (0..count).map(|_| normal(&mut random)).collect()
}

const ROWS: usize = 256;
const WIDTH: usize = 2048;

/// Returns the relative L2 errors of all values and of the worst row, and the number of values too
/// large.
fn errors(comm_dtype: CommDtype, values: &[f32]) -> (f64, f64, u64) {
    let (mut all, mut of_all, mut worst, mut over) = (0.0, 0.0, 0.0f64, 0);
    for row in values.chunks(WIDTH) {
        let (bytes, saturated) = pack_row(comm_dtype, row);
        let back = unpack_row(comm_dtype, &bytes, WIDTH, DType::F32);
        let square = |v: f32| f64::from(v) * f64::from(v);
        let error: f64 = row.iter().zip(&back).map(|(a, b)| square(a - b)).sum();
        let size: f64 = row.iter().map(|v| square(*v)).sum();
        worst = worst.max((error / size).sqrt());
        (all, of_all, over) = (all + error, of_all + size, over + saturated);
    }
    ((all / of_all).sqrt(), worst, over)
}

/// Compares with published errors, which have two digits and were measured over 1024 x 2048 values.
fn near(error: f64, published: f64) -> bool {
    (error / published - 1.0).abs() < 0.06
}

#[test]
fn errors_are_the_published_ones() {
    let plain = gaussian(ROWS * WIDTH);
    let outliers: Vec<f32> = plain
        .iter()
        .enumerate()
        .map(|(i, v)| if i % 1000 == 7 { v * 50.0 } else { *v })
        .collect();
    let scaled: Vec<f32> = plain
        .iter()
        .enumerate()
        .map(|(i, v)| v * 10f32.powf(-6.0 + 9.0 * (i / WIDTH) as f32 / (ROWS - 1) as f32))
        .collect();
    let cases = [
        (CommDtype::F16, [2.1e-4, 2.1e-4, 2.1e-4]),
        (CommDtype::Bf16, [1.7e-3, 1.7e-3, 1.7e-3]),
        (CommDtype::Fp8, [2.6e-2, 1.4e-2, 2.6e-2]),
        // Not published: a script in Python's floats gave these.
        (CommDtype::Mxfp8, [2.93e-2, 3.79e-2, 3.05e-2]),
    ];
    for (comm_dtype, published) in cases {
        for (values, published) in [&plain, &outliers, &scaled].into_iter().zip(published) {
            let (error, worst, over) = errors(comm_dtype, values);
            println!(
                "{comm_dtype:?}: {error:.2e}, worst row {worst:.2e}, published {published:.1e}"
            );
            assert!(
                near(error, published),
                "{comm_dtype:?}: {error:e}, not {published:e}"
            );
            assert_eq!(over, 0);
        }
    }
    // Small rows vanish in f16 and in no other format.
    let worst = |comm_dtype| errors(comm_dtype, &scaled).1;
    assert!(
        worst(CommDtype::F16) > 1e-2
            && worst(CommDtype::Bf16) < 1.9e-3
            && worst(CommDtype::Fp8) < 2.9e-2
    );
}

#[test]
fn what_no_format_has_is_as_documented() {
    let row = [
        f32::INFINITY,
        -65_504.0,
        65_519.0,
        65_520.0,
        -1e30,
        -f32::NAN,
        -0.0,
    ];
    let (bytes, over) = pack_row(CommDtype::F16, &row);
    assert_eq!((bytes.len(), over), (16, 2));
    let back = unpack_row(CommDtype::F16, &bytes, row.len(), DType::F32);
    assert_eq!(
        back[..5],
        [f32::INFINITY, -65_504.0, 65_504.0, 65_504.0, -65_504.0]
    );
    assert_eq!(back[5].to_bits(), 0x7fc0_0000);
    assert_eq!(back[6].to_bits(), (-0.0f32).to_bits());
    assert_eq!(bytes[14..], [0, 0]);

    let row = [f32::MAX, f32::NEG_INFINITY];
    let (bytes, over) = pack_row(CommDtype::Bf16, &row);
    assert_eq!((&bytes[..4], over), (&[0x7f, 0x7f, 0x80, 0xff][..], 0));

    let row = [f32::INFINITY, 2.0, f32::NAN, -1.0, 0.0];
    let (bytes, _) = pack_row(CommDtype::Fp8, &row);
    assert_eq!(bytes[..8], [0x7f, 0x7e, 0x7f, 0xf6, 0, 0, 0, 0]);
    assert_eq!(bytes[8..12], (2.0f32 / 448.0).to_le_bytes());
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        let back = unpack_row(CommDtype::Fp8, &bytes, row.len(), dtype);
        assert!(back[0].is_nan() && back[2].is_nan());
        assert_eq!(back[3..], [-1.0, 0.0]);
    }
    // The largest values stay finite on the way back.
    for (value, dtype) in [(f32::MAX, DType::F32), (65_504.0, DType::F16)] {
        for comm_dtype in [CommDtype::Bf16, CommDtype::Fp8] {
            let back = unpack_row(comm_dtype, &pack_row(comm_dtype, &[value]).0, 1, dtype);
            assert!(
                back[0].is_finite() && back[0] > value * 0.99,
                "{comm_dtype:?}: {}",
                back[0]
            );
        }
    }
    // A scale of MXFP8 is a power of two: -3 has the binade of 256, and 1.99 would be 509.4, which
    // saturates. Spans of 32 have their own scales; that of zeros is the least, and an infinity
    // counts for none.
    let mut row = [0.0f32; 65];
    (row[0], row[1], row[2]) = (-3.0, 1.5, 2f32.powi(-20));
    (row[32], row[33], row[34]) = (1.99, f32::INFINITY, -f32::NAN);
    let (bytes, over) = pack_row(CommDtype::Mxfp8, &row);
    assert_eq!((bytes.len(), over), (80, 0));
    assert_eq!(bytes[..3], [0xfc, 0x74, 0x00]);
    assert_eq!(bytes[32..35], [0x7e, 0x7f, 0x7f]);
    assert_eq!(bytes[64..72], [0, 0, 0, 0, 127 - 7, 127 - 8, 0, 0]);
    let back = unpack_row(CommDtype::Mxfp8, &bytes, row.len(), DType::F32);
    assert_eq!((back[..3].to_vec(), back[32]), (vec![-3.0, 1.5, 0.0], 1.75));
    assert!(back[33].is_nan() && back[34].is_nan() && back[64] == 0.0);
    for value in [f32::MAX, -2e-39, 1e-38] {
        let (bytes, _) = pack_row(CommDtype::Mxfp8, &[value]);
        let back = unpack_row(CommDtype::Mxfp8, &bytes, 1, DType::F32)[0];
        assert!((back / value - 1.0).abs() <= 0.125, "{value:e}: {back:e}");
    }
    // A span of zeros, and one of subnormal numbers.
    for row in [[0.0, -0.0], [1e-44, -1e-40]] {
        let back = unpack_row(
            CommDtype::Fp8,
            &pack_row(CommDtype::Fp8, &row).0,
            2,
            DType::F32,
        );
        assert!(
            back[0].abs() <= 2f32.powi(-126) && back[1] <= 0.0,
            "{back:?}"
        );
    }
}
