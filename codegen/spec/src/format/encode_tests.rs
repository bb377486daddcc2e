//! Encoders checked by the decoders: every code is the best one at its scale.

use super::*;
use crate::testing::SampleRng;

/// The published formats, and settings of them that checkpoints have.
fn formats() -> Vec<Format> {
    let group = |format: Format, size: usize| Format {
        block: ScaleBlock::Tile([1, size]),
        ..format
    };
    let bits = |format: Format, bits: u8| Format {
        element: CodeType::Uint(bits),
        ..format
    };
    let mut all = FORMATS.to_vec();
    all.extend([
        group(INT4, 64),
        group(INT4, 128),
        bits(INT4, 3),
        bits(INT4, 5),
        bits(INT4, 6),
        bits(INT4, 7),
        bits(INT4, 8),
        bits(GPTQ, 8),
    ]);
    all.extend([bits(GPTQ, 2), group(GPTQ, 32), group(AWQ, 64)]);
    all.push(Format {
        element: CodeType::E5m2,
        ..FP8_BLOCK
    });
    all
}

/// Elements whose magnitude differs from run to run, with outliers, zeros and tiny ones.
fn elements(rng: &mut SampleRng, count: usize, most: f64) -> Vec<f32> {
    let mut values = Vec::with_capacity(count);
    while values.len() < count {
        let size = most * 10f64.powf(rng.real(-12.0, 0.0));
        for _ in 0..rng.between(1, 200).min(count - values.len()) {
            values.push(match rng.between(0, 40) {
                0 => 0.0,
                1 => -0.0,
                2 => (size * 20.0).min(most) as f32,
                3 => f32::from_bits(rng.between(0, 1 << 20) as u32),
                _ => rng.real(-size, size) as f32,
            });
        }
    }
    values
}

/// Returns the values of all codes.
fn table(element: CodeType) -> Vec<f32> {
    match element {
        CodeType::E4m3 => code::E4M3.to_vec(),
        CodeType::E5m2 => code::E5M2.to_vec(),
        CodeType::E2m3 => code::E2M3.to_vec(),
        CodeType::E2m1 => code::E2M1.to_vec(),
        CodeType::Int8 => (-128..128).map(|v| v as f32).collect(),
        CodeType::Uint(bits) => (0..1 << bits).map(|v| v as f32).collect(),
    }
}

fn decoded(matrices: &Matrices<'_>, count: usize) -> Vec<f32> {
    let (mut values, mut first) = (vec![0f32; count], 0);
    while first < count {
        first += matrices.run(first, &mut values[first..]);
    }
    values
}

/// Checks that no other code of a block would be nearer to an element than the one it has.
fn check_nearest(format: &Format, size: [usize; 2], values: &[f32], options: EncodeOptions) {
    let encoded = format.encode(values, size, options).unwrap();
    let found = decoded(&format.decoder(&encoded, size), values.len());
    let (block, grid) = (layout::block(format, size), layout::grid(format, size));
    let codes: Vec<f32> = table(format.element)
        .into_iter()
        .filter(|v| v.is_finite())
        .collect();
    let extent = |row: usize, column: usize| {
        let first = column / block[1] * block[1];
        let columns = first..(first + block[1]).min(size[1]);
        columns.map(move |column| row * size[1] + column)
    };
    for (at, (value, found)) in values.iter().zip(&found).enumerate() {
        let (row, column) = (at / size[1], at % size[1]);
        let place = [row / block[0], column / block[1]];
        let scale = layout::scale_index(format, grid, place);
        let scale = format.scale.read(&encoded.scales, scale);
        let scale = match (format.second, encoded.second) {
            (Some(Second::Times), Some(second)) => scale * second,
            (Some(Second::Divided), Some(second)) => scale / second,
            _ => scale,
        };
        assert!(scale > 0.0, "{}: scale {scale}", format.name);
        // The zero point comes from an element that is stored as one: the least of the block is
        // the lowest code. Symmetric integers have theirs in the middle.
        let zero = match format.element {
            CodeType::Uint(_) if options.zero_points => {
                let least = extent(row, column).fold(0f32, |least, at| least.min(values[at]));
                (-least / scale).round_ties_even()
            }
            CodeType::Uint(bits) => f32::from(1u16 << (bits - 1)),
            _ => 0.0,
        };
        let off = |code: &f32| ((code - zero) * scale - value).abs();
        let best = codes.iter().map(off).fold(f32::INFINITY, f32::min);
        let (own, slack) = (
            (found - value).abs(),
            value.abs() * 1e-5 + f32::MIN_POSITIVE,
        );
        assert!(
            own <= best + slack,
            "{}: {value} at {row}, {column} became {found}, {best} is the least error",
            format.name
        );
    }
}

#[test]
fn codes_are_the_nearest_at_their_scale() {
    for format in formats() {
        let mut rng = SampleRng::new(format.name.len() as u64);
        for round in 0..6 {
            let size = [rng.between(1, 3) * 16, rng.between(1, 3) * 128];
            let most = match format.scale {
                ScaleType::F16 => 9e4,
                _ => 1e30,
            };
            let values = elements(&mut rng, size[0] * size[1], most);
            let zero_points = round % 2 == 1 && format.zero != Zero::None;
            let options = EncodeOptions {
                zero_points,
                second: None,
            };
            check_nearest(&format, size, &values, options);
        }
    }
}

/// Tiles of several rows may be cut off at the edges, groups of columns may not.
#[test]
fn sizes_are_refused_or_cut_off() {
    let ones = vec![1f32; 300 * 300];
    let encode = |format: Format, size: [usize; 2]| {
        format.encode(&ones[..size[0] * size[1]], size, EncodeOptions::default())
    };
    for size in [[1, 1], [129, 257], [7, 300]] {
        let encoded = encode(FP8_BLOCK, size).unwrap();
        let found = decoded(&FP8_BLOCK.decoder(&encoded, size), size[0] * size[1]);
        assert!(found.iter().all(|v| *v == 1.0));
        assert!(encode(FP8, size).is_ok() && encode(INT8, size).is_ok());
    }
    for (format, size, multiple) in [
        (MXFP4, [2, 48], 32),
        (MXFP8, [2, 31], 32),
        (MXFP6, [2, 36], 32),
        (NVFP4, [2, 24], 16),
        (INT4, [2, 40], 32),
        (GPTQ, [8, 64], 128),
    ] {
        let wanted = EncodeError::Columns {
            format: format.name,
            columns: size[1],
            multiple,
        };
        assert_eq!(encode(format, size), Err(wanted), "{}", format.name);
    }
    let wanted = EncodeError::Rows {
        format: "awq",
        rows: 12,
        multiple: 8,
    };
    assert_eq!(encode(AWQ, [12, 128]), Err(wanted));
    let wanted = EncodeError::Rows {
        format: NVFP4_TURNED.name,
        rows: 24,
        multiple: 16,
    };
    assert_eq!(encode(NVFP4_TURNED, [24, 128]), Err(wanted));
}

#[test]
fn what_no_code_stands_for_is_refused() {
    let size = [16, 128];
    for format in formats() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = vec![1f32; 2048];
            values[130] = bad;
            let error = format
                .encode(&values, size, EncodeOptions::default())
                .unwrap_err();
            let said = error.to_string();
            assert!(said.starts_with("row 1, column 2 is "), "{said}");
        }
        // With zero points, all of the range is on one side of zero.
        for (value, zero_points) in [(f32::MAX, false), (f32::MAX, true), (f32::MIN, true)] {
            let options = EncodeOptions {
                zero_points,
                second: None,
            };
            match format.encode(&[value; 2048], size, options) {
                Ok(encoded) => {
                    let found = decoded(&format.decoder(&encoded, size), 2048);
                    assert!(found.iter().all(|v| v.is_finite()), "{}", format.name);
                }
                Err(error) => assert!(matches!(error, EncodeError::TooLarge { .. })),
            }
        }
    }
    for blocks in BLOCKS.iter().filter(|blocks| blocks.can_encode()) {
        let mut values = vec![1f32; 512];
        values[300] = f32::NAN;
        assert!(blocks.encode(&values, 256).is_err(), "{}", blocks.name);
        values[300] = f32::MAX;
        match blocks.encode(&values, 256) {
            Ok(bytes) => assert_eq!((blocks.name, bytes.len()), ("MXFP4", 512 / 32 * 17)),
            Err(error) => assert!(matches!(error, EncodeError::TooLarge { .. })),
        }
        let odd = blocks.encode(&values[..500], 250);
        assert!(
            matches!(odd, Err(EncodeError::Columns { .. })),
            "{}",
            blocks.name
        );
    }
}

/// Values worked out by hand: the scale rules of OCP MX, NVFP4 and integers.
#[test]
fn scales_follow_the_written_rules() {
    let row = |first: f32, columns: usize| {
        let mut row = vec![0f32; columns];
        row[0] = first;
        row
    };
    let of = |format: Format, values: &[f32]| {
        let size = [1, values.len()];
        format
            .encode(values, size, EncodeOptions::default())
            .unwrap()
    };
    // floor(log2 7.9) = 2, less 2 of E2M1's 6: 2^0, and 7.9 saturates at 6.
    let encoded = of(MXFP4, &row(7.9, 32));
    assert_eq!((encoded.scales[0], encoded.codes[0]), (127, 7));
    // floor(log2 1) = 0, less 8 of E4M3's 448.
    let encoded = of(MXFP8, &row(1.0, 32));
    assert_eq!((encoded.scales[0], encoded.codes[0]), (119, 0x78));
    // The largest block has the largest E4M3 as its scale.
    let encoded = of(NVFP4_DIVIDED, &row(-3.0, 16));
    assert_eq!(encoded.second, Some(448.0 * 6.0 / 3.0));
    assert_eq!((encoded.scales[0], encoded.codes[0]), (0x7e, 0x0f));
    // 15 / 7.5 is 2 in bf16; 15 becomes 7.5 steps, of which there are 7 at most.
    let encoded = of(INT4, &row(15.0, 32));
    assert_eq!(
        (&encoded.scales[..], encoded.codes[0]),
        (&[0x00, 0x40][..], 0x8f)
    );
    // A block of zeros has scale 1.
    assert_eq!(of(MXFP4, &row(0.0, 32)).scales, [127]);
    assert_eq!(of(FP8, &row(0.0, 4)).scales, 1f32.to_le_bytes());
}

/// The step between two neighbouring values of a block, at most.
fn largest_step(parts: &BlockScales, group: usize, blocks: &Blocks) -> f32 {
    let widest = match blocks.name {
        "IQ4_NL" => 24.0,
        "MXFP4" => 4.0,
        _ => 1.0,
    };
    (parts.scales[group] * parts.scale_2 * widest).abs()
}

#[test]
fn blocks_are_within_half_a_step() {
    for blocks in BLOCKS.iter().filter(|blocks| blocks.can_encode()) {
        let mut rng = SampleRng::new(u64::from(blocks.id));
        for _ in 0..200 {
            let values = elements(&mut rng, blocks.elements, 1e3);
            let bytes = blocks.encode(&values, blocks.elements).unwrap();
            let (mut found, parts) = (vec![0f32; blocks.elements], blocks.scales(&bytes));
            blocks.decode(&bytes, &mut found);
            let most = values.iter().fold(0f32, |most, v| most.max(v.abs()));
            // Scales of smaller blocks are subnormal f16, which have few bits.
            if most < 0.1 {
                continue;
            }
            for (at, (value, found)) in values.iter().zip(&found).enumerate() {
                let step = largest_step(&parts, at / blocks.group, blocks);
                // Codes are not symmetric, so the largest of the other sign is one step further;
                // scales and offsets of groups are rounded to 6 or 8 bits of the block's.
                let slack = match blocks.name {
                    "Q8_0" | "Q4_1" | "Q5_1" => 0.5 * step + most * 2e-3,
                    "Q4_K" | "Q5_K" => 0.5 * step + most * 0.06,
                    "Q6_K" => 1.0 * step + most * 0.01,
                    _ => 1.0 * step + most * 2e-3,
                };
                let off = (found - value).abs();
                assert!(
                    off <= slack,
                    "{}: {value} became {found}, a step is {step}",
                    blocks.name
                );
            }
        }
    }
}

/// A block that a decoder gives is encoded to numbers that are those again.
#[test]
fn decoded_blocks_encode_to_themselves() {
    for blocks in BLOCKS.iter().filter(|blocks| blocks.can_encode()) {
        let mut rng = SampleRng::new(7 + u64::from(blocks.id));
        for _ in 0..50 {
            let values = elements(&mut rng, blocks.elements, 1.0);
            let again = |values: &[f32]| {
                let bytes = blocks.encode(values, blocks.elements).unwrap();
                let mut found = vec![0f32; blocks.elements];
                blocks.decode(&bytes, &mut found);
                found
            };
            let once = again(&values);
            let twice = again(&once);
            let most = once.iter().fold(0f32, |most, v| most.max(v.abs()));
            for (once, twice) in once.iter().zip(&twice) {
                let slack = if blocks.elements == 256 { 0.06 } else { 2e-3 };
                assert!(
                    (once - twice).abs() <= most * slack + 1e-6,
                    "{}",
                    blocks.name
                );
            }
        }
    }
}
