//! Decoders compared with other implementations and with values worked out by hand.

use super::*;

/// Hashes of 16 blocks of random bytes as gguf-py 0.19.0 dequantizes them: FNV-1a over the bits of
/// each f32, with all NaNs hashed alike.
const BY_GGUF: [(&str, u64); 13] = [
    ("Q4_0", 0x7e4577da9f960f25),
    ("Q4_1", 0x92b4d9234e8da818),
    ("Q5_0", 0x7bcf18239b874325),
    ("Q5_1", 0x488b6fec0564d4c0),
    ("Q8_0", 0x2e7c03f104073325),
    ("Q2_K", 0xdd344d403a5a333f),
    ("Q3_K", 0x3df8d12932db5425),
    ("Q4_K", 0x545da9cb75e94089),
    ("Q5_K", 0xac45aa03ea5a3f29),
    ("Q6_K", 0x2e84210e88d28069),
    ("IQ4_NL", 0x84f9dd58c983f825),
    ("IQ4_XS", 0xe740ca067e698c43),
    ("MXFP4", 0x5b3c46cf56054b25),
];

/// Returns the high bytes of Knuth's generator, started at a seed.
fn random(seed: u64, count: usize) -> Vec<u8> {
    let mut state = seed;
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    (0..count).map(|_| next()).collect()
}

#[test]
fn blocks_are_what_gguf_makes_of_them() {
    assert_eq!(BLOCKS.len(), BY_GGUF.len());
    for (blocks, (name, wanted)) in BLOCKS.iter().zip(BY_GGUF) {
        assert_eq!(blocks.name, name);
        let mut hash = 0xcbf2_9ce4_8422_2325u64;
        let bytes = random(u64::from(blocks.id), 16 * blocks.bytes);
        for block in bytes.chunks_exact(blocks.bytes) {
            let mut values = [0f32; LARGEST];
            blocks.decode(block, &mut values);
            for value in &values[..blocks.elements] {
                let bits = if value.is_nan() {
                    0x7fc0_0000
                } else {
                    value.to_bits()
                };
                hash = (hash ^ u64::from(bits)).wrapping_mul(0x0100_0000_01b3);
            }
        }
        assert_eq!(hash, wanted, "{name}: {hash:#x}");
    }
}

/// A matrix of integers with one scale for each `group` columns of a row.
struct Made {
    size: [usize; 2],
    group: usize,
    bits: usize,
    /// Row by row.
    codes: Vec<u8>,
    /// `[rows, groups]`.
    zeros: Vec<u8>,
}

impl Made {
    fn new(size: [usize; 2], group: usize, bits: usize) -> Made {
        let mask = ((1usize << bits) - 1) as u8;
        let of = |seed, count| random(seed, count).iter().map(|b| b & mask).collect();
        Made {
            size,
            group,
            bits,
            codes: of(1, size[0] * size[1]),
            zeros: of(2, size[0] * size[1].div_ceil(group)),
        }
    }

    fn code(&self, row: usize, column: usize) -> u32 {
        u32::from(self.codes[row * self.size[1] + column])
    }

    fn zero(&self, row: usize, group: usize) -> u32 {
        u32::from(self.zeros[row * self.size[1].div_ceil(self.group) + group])
    }

    /// Packs integers into 32-bit words, the first in the lowest bits.
    fn stream(&self, values: impl Iterator<Item = u32>) -> Vec<u32> {
        let (mut words, mut at) = (vec![0u32], 0);
        for value in values {
            for bit in 0..self.bits {
                if at / 32 == words.len() {
                    words.push(0);
                }
                words[at / 32] |= ((value >> bit) & 1) << (at % 32);
                at += 1;
            }
        }
        words
    }

    /// Checks that the format decodes to this matrix, with scales that count up from one.
    fn check(&self, format: Format, codes: &[u32], zeros: Option<&[u32]>, groups: Option<&[u8]>) {
        let [rows, columns] = self.size;
        let across = columns.div_ceil(self.group);
        let bytes =
            |words: &[u32]| -> Vec<u8> { words.iter().flat_map(|w| w.to_le_bytes()).collect() };
        let (codes, packed) = (bytes(codes), zeros.map(bytes));
        let scales: Vec<u8> = (0..rows * across)
            .flat_map(|at| (1.0 + at as f32).to_le_bytes())
            .collect();
        let turned = !matches!(format.packing, CodeOrder::Rows { .. });
        let matrices = Matrices {
            format,
            size: self.size,
            codes: &codes,
            scales: Scales {
                kind: ScaleType::F32,
                bytes: &scales,
                block: [1, self.group],
                grid: Some([rows, across]),
                second: Vec::new(),
            },
            zeros: packed.as_deref().map(|bytes| Zeros { bytes }),
            groups,
        };
        let (mut values, mut first) = (vec![0f32; 64], 0);
        while first < rows * columns {
            let count = matrices.run(first, &mut values);
            assert!(count > 0);
            for (at, value) in values[..count].iter().enumerate() {
                let (row, column) = ((first + at) / columns, (first + at) % columns);
                let group = match groups {
                    None => column / self.group,
                    Some(groups) => usize::from(groups[column * 4]),
                };
                let scale = 1 + if turned {
                    group * rows + row
                } else {
                    row * across + group
                };
                let zero = match zeros {
                    None => 1 << (self.bits - 1),
                    Some(_) => self.zero(row, group) as i32,
                };
                let wanted = (self.code(row, column) as i32 - zero) as f32 * scale as f32;
                assert_eq!(*value, wanted, "{}: {row}, {column}", format.name);
            }
            first += count;
        }
    }
}

#[test]
fn integers_in_rows() {
    // Widths that are no power of two straddle words, zero points of 16 rows, too.
    let powers = [(4, [16, 40]), (8, [8, 24]), (2, [16, 48]), (1, [32, 40])];
    let others = [3, 5, 6, 7].map(|bits| (bits, [16, 40]));
    for (bits, size) in powers.into_iter().chain(others) {
        let made = Made::new(size, 8, bits);
        let format = Format {
            element: CodeType::Uint(bits as u8),
            ..INT4
        };
        let row = |r| {
            made.stream(
                (0..size[1])
                    .map(move |c| (r, c))
                    .map(|(r, c)| made.code(r, c)),
            )
        };
        let codes: Vec<u32> = (0..size[0]).flat_map(row).collect();
        made.check(format, &codes, None, None);
        // Zero points of a group are packed along the rows: words [rows, groups].
        let across = size[1] / 8;
        let columns: Vec<Vec<u32>> = (0..across)
            .map(|g| made.stream((0..size[0]).map(|r| made.zero(r, g))))
            .collect();
        let words = columns[0].len();
        let zeros: Vec<u32> = (0..words)
            .flat_map(|w| columns.iter().map(move |column| column[w]))
            .collect();
        made.check(format, &codes, Some(&zeros), None);
    }
}

/// 3-bit codes straddle words, and groups may come in any order.
#[test]
fn gptq_in_columns() {
    for bits in [2, 3, 4, 8] {
        let size = [32, 64];
        let made = Made::new(size, 16, bits);
        let each: Vec<Vec<u32>> = (0..size[0])
            .map(|r| made.stream((0..size[1]).map(|c| made.code(r, c))))
            .collect();
        let codes: Vec<u32> = (0..each[0].len())
            .flat_map(|w| each.iter().map(move |row| row[w]))
            .collect();
        let mask = (1u32 << bits) - 1;
        let zeros = |less: u32| -> Vec<u32> {
            let group = |g| {
                let row = (0..size[0]).map(|r| made.zero(r, g).wrapping_sub(less) & mask);
                made.stream(row)
            };
            (0..size[1] / 16).flat_map(group).collect()
        };
        let groups: Vec<u8> = (0..size[1])
            .flat_map(|column| ((column * 7 % 4) as u32).to_le_bytes())
            .collect();
        let of = |format: Format| Format {
            element: CodeType::Uint(bits as u8),
            ..format
        };
        made.check(of(GPTQ), &codes, Some(&zeros(1)), None);
        made.check(of(GPTQ), &codes, Some(&zeros(1)), Some(&groups));
        made.check(of(GPTQ_V2), &codes, Some(&zeros(0)), None);
    }
}

#[test]
fn awq_is_interleaved() {
    let size = [16, 24];
    let made = Made::new(size, 8, 4);
    // AutoAWQ's order of rows inside a word, four bits each.
    let order = [0, 2, 4, 6, 1, 3, 5, 7];
    let word = |value: &dyn Fn(usize) -> u32| -> u32 {
        (0..8).map(|at| value(order[at]) << (at * 4)).sum()
    };
    let mut codes = Vec::new();
    for column in 0..size[1] {
        codes.extend((0..2).map(|w| word(&|at| made.code(w * 8 + at, column))));
    }
    let mut zeros = Vec::new();
    for group in 0..size[1] / 8 {
        zeros.extend((0..2).map(|w| word(&|at| made.zero(w * 8 + at, group))));
    }
    made.check(AWQ, &codes, Some(&zeros), None);
}

/// A second scale is applied to the first, and the product is rounded before the code's.
#[test]
fn nvfp4_has_two_scales() {
    let [scale, second] = [0x31u8, 0x52]; // 0.5625 and 20 in E4M3
    let [scale, second] = [scale, second].map(|bits| code::E4M3[usize::from(bits)]);
    let times = [scale * 0.3, second * 0.3];
    let divided = [scale / 0.3, second / 0.3];
    for (format, [wanted, next]) in [(NVFP4, times), (NVFP4_DIVIDED, divided)] {
        let matrices = Matrices {
            format,
            size: [1, 32],
            codes: &[0x72; 16],
            scales: Scales {
                kind: ScaleType::E4m3,
                bytes: &[0x31, 0x52],
                block: [1, 16],
                grid: Some([1, 2]),
                second: vec![0.3],
            },
            zeros: None,
            groups: None,
        };
        let mut values = [0f32; 32];
        assert_eq!(matrices.run(0, &mut values), 16);
        assert_eq!(values[..2], [wanted, 6.0 * wanted]);
        assert_eq!(matrices.run(17, &mut values), 15);
        assert_eq!(values[0], 6.0 * next);
    }
}

/// Codes of two rows share a byte, and a scale belongs to a column of 16 rows.
#[test]
fn stacks_by_rows_are_turned() {
    let (size, mut rng) = ([32, 5], crate::testing::SampleRng::new(3));
    let values: Vec<f32> = (0..160).map(|_| rng.real(-9.0, 9.0) as f32).collect();
    let turned: Vec<f32> = (0..160).map(|at| values[at % 32 * 5 + at / 32]).collect();
    let options = EncodeOptions::default();
    let encoded = NVFP4_TURNED.encode(&values, size, options).unwrap();
    let plain = NVFP4.encode(&turned, [5, 32], options).unwrap();
    assert_eq!(encoded.second, plain.second);
    for (row, column) in (0..32).flat_map(|row| (0..5).map(move |column| (row, column))) {
        let scale = encoded.scales[row / 16 * 5 + column];
        assert_eq!(scale, plain.scales[column * 2 + row / 16]);
        let shift = row % 2 * 4;
        let code = encoded.codes[row / 2 * 5 + column] >> shift & 15;
        assert_eq!(code, plain.codes[column * 16 + row / 2] >> shift & 15);
        let [mut found, mut wanted] = [[0f32]; 2];
        let decoder = NVFP4_TURNED.decoder(&encoded, size);
        decoder.run(row * 5 + column, &mut found);
        NVFP4
            .decoder(&plain, [5, 32])
            .run(column * 32 + row, &mut wanted);
        assert_eq!(found, wanted, "{row}, {column}");
    }
}

/// A reader that takes these bytes alone has every code of the elements that it asked for.
#[test]
fn bytes_of_some_elements_are_enough() {
    let (size, mut rng) = ([128, 128], crate::testing::SampleRng::new(5));
    let values: Vec<f32> = (0..128 * 128).map(|_| rng.real(-9.0, 9.0) as f32).collect();
    for format in FORMATS {
        let encoded = format
            .encode(&values, size, EncodeOptions::default())
            .unwrap();
        let stacked = [&encoded.codes[..], &encoded.codes].concat();
        let mut whole = format.decoder(&encoded, size);
        whole.codes = &stacked;
        for first in [0, 128, 128 * 127, 128 * 128, 128 * 129, 128 * 255] {
            let bytes = whole.bytes(&(first..first + 128));
            let mut spoilt: Vec<u8> = stacked.iter().map(|byte| !byte).collect();
            spoilt[bytes.clone()].copy_from_slice(&stacked[bytes]);
            let [mut found, mut wanted] = [[0u8; 128]; 2];
            whole.codes(first, &mut wanted);
            let some = Matrices {
                codes: &spoilt,
                ..whole.clone()
            };
            some.codes(first, &mut found);
            assert_eq!(found, wanted, "{}: {first}", format.name);
        }
    }
}

/// A canonical code is as far from its zero point as the published one.
#[test]
fn codes_and_zero_points_move_together() {
    for bits in 5..=8 {
        let format = Format {
            element: CodeType::Uint(bits),
            ..GPTQ
        };
        let codes = PublishedCodes {
            format,
            block: [1, 128],
            scale: ScaleType::F16,
            zeros: true,
            in_order: true,
        };
        for code in 0..=u8::MAX >> (8 - bits) {
            let canonical = codes.canonical(code) as i8;
            let zero = 3 + codes.zero_shift();
            let (found, wanted) = (i32::from(canonical) - zero, i32::from(code) - 3);
            assert_eq!(found, wanted, "{code} of {bits} bits");
        }
    }
}

#[test]
fn published_formats_have_names_of_their_own() {
    for (at, format) in FORMATS.iter().enumerate() {
        let rest = &FORMATS[at + 1..];
        assert!(rest.iter().all(|other| other.name != format.name));
    }
}
