//! Numbers of all kinds into the encoders of quantized formats.

use super::{Surface, promise};
use moesaic_spec::format::{BLOCKS, Blocks, EncodeError, EncodeOptions, LARGEST};
use moesaic_spec::hf::{SCHEMES, Scheme};
use moesaic_spec::testing::SampleRng;

/// Rows and columns that fit some formats and not others.
const SIZES: [u8; 8] = [0, 1, 2, 3, 4, 8, 16, 33];

/// Numbers at the edges of types.
const EDGES: [f32; 12] = [
    0.0,
    -0.0,
    f32::MAX,
    f32::MIN,
    f32::MIN_POSITIVE,
    1e-45,
    -1e-45,
    65504.0,
    448.0,
    6.0,
    f32::NAN,
    f32::NEG_INFINITY,
];

/// The number of a format, rows, columns in units of 8, choices, then f32 elements, which repeat.
pub struct Encode;

impl Surface for Encode {
    fn name(&self) -> &'static str {
        "encode"
    }

    fn share(&self) -> u64 {
        40
    }

    fn input(&mut self, rng: &mut SampleRng) -> Vec<u8> {
        let format = rng.between(0, SCHEMES.len() + BLOCKS.len()) as u8;
        let sizes = [rng.pick(&SIZES), rng.pick(&SIZES)];
        let mut input = vec![format, sizes[0], sizes[1], rng.bits() as u8];
        let size = rng.pick(&[1e-44, 1e-20, 1e-3, 1.0, 1e4, 1e20, 1e38]);
        let odd = rng.pick(&[3, 30, 1000]);
        for _ in 0..rng.between(0, 80) {
            let value = match (rng.one_in(odd), rng.one_in(2)) {
                (true, true) => rng.pick(&EDGES),
                (true, false) => f32::from_bits(rng.bits() as u32),
                _ => rng.real(-size, size) as f32,
            };
            input.extend(value.to_le_bytes());
        }
        input
    }

    fn check(&mut self, input: &[u8]) -> Result<bool, String> {
        let byte = |at: usize| input.get(at).copied().unwrap_or_default();
        let size = [usize::from(byte(1)), usize::from(byte(2)) * 8];
        let values = input.get(4..).unwrap_or_default().chunks_exact(4);
        let values: Vec<f32> = values
            .map(|value| f32::from_le_bytes([value[0], value[1], value[2], value[3]]))
            .collect();
        let values: Vec<f32> = match values.len() {
            0 => vec![0.0; size[0] * size[1]],
            _ => values.into_iter().cycle().take(size[0] * size[1]).collect(),
        };
        let (format, choices) = (usize::from(byte(0)), byte(3));
        let decoded = if let Some(scheme) = SCHEMES.get(format) {
            in_scheme(*scheme, &values, size, choices)
        } else {
            match BLOCKS.get(format - SCHEMES.len()) {
                Some(blocks) if blocks.can_encode() => in_blocks(blocks, &values, size[1])?,
                _ => return Ok(false),
            }
        };
        match decoded {
            Ok(decoded) => near(&values, &decoded).map(|()| true),
            Err(error) => promise(!error.to_string().is_empty(), || {
                "it says nothing".to_string()
            })
            .map(|()| false),
        }
    }
}

/// Encodes a matrix in the format of a scheme, and decodes it.
fn in_scheme(
    scheme: Scheme,
    values: &[f32],
    size: [usize; 2],
    choices: u8,
) -> Result<Vec<f32>, EncodeError> {
    let group = scheme.groups.get(usize::from(choices >> 1 & 3)).copied();
    let grouped = scheme.with_group(group);
    let format = grouped.unwrap_or(scheme).stored.format;
    let options = EncodeOptions {
        zero_points: choices & 1 == 1,
        second: None,
    };
    let encoded = format.encode(values, size, options)?;
    let decoder = format.decoder(&encoded, size);
    let (mut decoded, mut run) = (Vec::new(), [0f32; 64]);
    while decoded.len() < values.len() {
        let count = decoder.run(decoded.len(), &mut run);
        decoded.extend(&run[..count]);
    }
    Ok(decoded)
}

/// Encodes rows in blocks, and decodes them. The outer error is a broken promise.
fn in_blocks(
    blocks: &'static Blocks,
    values: &[f32],
    columns: usize,
) -> Result<Result<Vec<f32>, EncodeError>, String> {
    let encoded = match blocks.encode(values, columns) {
        Ok(encoded) => encoded,
        Err(error) => return Ok(Err(error)),
    };
    let whole = encoded.len() * blocks.elements == values.len() * blocks.bytes;
    promise(whole, || {
        format!("{} bytes for {} numbers", encoded.len(), values.len())
    })?;
    let (mut decoded, mut block) = (Vec::new(), [0f32; LARGEST]);
    for bytes in encoded.chunks_exact(blocks.bytes) {
        blocks.decode(bytes, &mut block);
        decoded.extend(&block[..blocks.elements]);
    }
    Ok(Ok(decoded))
}

/// Codes are finite and no worse than zeros, as far as the least scales go.
fn near(values: &[f32], decoded: &[f32]) -> Result<(), String> {
    promise(values.len() == decoded.len(), || {
        format!("{} numbers became {}", values.len(), decoded.len())
    })?;
    let most = values
        .iter()
        .fold(0f32, |most, value| most.max(value.abs()));
    for (value, found) in values.iter().zip(decoded) {
        let off = (f64::from(*value) - f64::from(*found)).abs();
        promise(off <= f64::from(most) * 1.001 + 1e-3, || {
            format!("{value:e} became {found:e}, where the largest is {most:e}")
        })?;
    }
    Ok(())
}
