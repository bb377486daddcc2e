//! An independent quantizer: matrices as codes with scales, next to their decoded values as bf16.
//!
//! It picks codes among all of a format, whose values come from the format's definition.

use half::bf16;
use moesaic_spec::testing::SampleRng;
use moesaic_weights::Checkpoint;
use safetensors::tensor::{Dtype, TensorView};
use std::collections::BTreeMap;
use std::path::Path;

/// Tensors of a file under construction, of any element type.
#[derive(Clone, Default)]
pub struct Tensors(pub BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>);

impl Tensors {
    pub fn put(&mut self, name: &str, dtype: Dtype, shape: &[usize], bytes: Vec<u8>) {
        self.0
            .insert(name.to_string(), (dtype, shape.to_vec(), bytes));
    }

    pub fn bf16(&mut self, name: &str, shape: &[usize], values: &[f32]) {
        let bytes = values.iter().map(|v| bf16::from_f32(*v).to_le_bytes());
        self.put(name, Dtype::BF16, shape, bytes.flatten().collect());
    }

    pub fn f32(&mut self, name: &str, shape: &[usize], values: &[f32]) {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes());
        self.put(name, Dtype::F32, shape, bytes.collect());
    }

    /// Adds random bf16 numbers to both files.
    pub fn kept(&mut self, twin: &mut Tensors, name: &str, shape: &[usize], rng: &mut SampleRng) {
        let values = random(rng, shape);
        self.bf16(name, shape, &values);
        twin.bf16(name, shape, &values);
    }

    pub fn write(&self, path: &Path) -> Checkpoint {
        let views = self.0.iter().map(|(name, (dtype, shape, bytes))| {
            let view = TensorView::new(*dtype, shape.clone(), bytes);
            (name, view.unwrap_or_else(|e| panic!("{name}: {e}")))
        });
        safetensors::serialize_to_file(views, None, path).unwrap();
        Checkpoint::open(path).unwrap()
    }
}

pub fn random(rng: &mut SampleRng, shape: &[usize]) -> Vec<f32> {
    let size = 2f64.powi(rng.between(0, 8) as i32 - 6);
    let count = shape.iter().product();
    (0..count).map(|_| rng.real(-size, size) as f32).collect()
}

/// Returns the value of a code with a sign bit, exponent and mantissa bits, and a bias.
fn number(code: u32, mantissa: u32, exponent: u32, bias: i32) -> f64 {
    let bits = code >> mantissa & ((1 << exponent) - 1);
    let fraction = f64::from(code & ((1 << mantissa) - 1)) / f64::from(1 << mantissa);
    let size = match bits {
        0 => fraction * 2f64.powi(1 - bias),
        _ => (1.0 + fraction) * 2f64.powi(bits as i32 - bias),
    };
    if code >> (mantissa + exponent) == 1 {
        -size
    } else {
        size
    }
}

pub fn e4m3(code: u8) -> f32 {
    number(code.into(), 3, 4, 7) as f32
}

pub fn e2m1(code: u8) -> f32 {
    number(code.into(), 1, 2, 1) as f32
}

fn nearest(value: f32, codes: &[u8], number: fn(u8) -> f32) -> u8 {
    let off = |code: &u8| (number(*code) - value).abs();
    let best = codes.iter().min_by(|a, b| off(a).total_cmp(&off(b)));
    *best.expect("codes")
}

/// The blocks that share a scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum By {
    Block([usize; 2]),
    Row,
    Matrix,
}

/// The type of scales.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum In {
    F32,
    Bf16,
    E8m0,
    /// E8M0 stored as untyped bytes.
    Bytes,
}

impl In {
    /// Returns a scale of at least `least` that the type can hold, and its bytes.
    fn rounded(self, least: f32) -> (f32, Vec<u8>) {
        match self {
            In::F32 => (least, least.to_le_bytes().to_vec()),
            In::Bf16 => {
                let scale = bf16::from_f32(least);
                (scale.to_f32(), scale.to_le_bytes().to_vec())
            }
            In::E8m0 | In::Bytes => {
                let exponent = least.max(f32::MIN_POSITIVE).log2().ceil() as i32;
                (2f32.powi(exponent), vec![(exponent + 127) as u8])
            }
        }
    }

    fn dtype(self) -> Dtype {
        match self {
            In::F32 => Dtype::F32,
            In::Bf16 => Dtype::BF16,
            In::E8m0 => Dtype::F8_E8M0,
            In::Bytes => Dtype::U8,
        }
    }
}

/// A quantized matrix.
pub struct Matrix {
    pub codes: Vec<u8>,
    pub scales: Vec<u8>,
    pub grid: [usize; 2],
    /// The decoded values, row major.
    pub values: Vec<f32>,
}

/// Quantizes a matrix with a scale per block, so that its largest number becomes the code `most`.
fn quantize(
    values: &[f32],
    [rows, columns]: [usize; 2],
    block: [usize; 2],
    (codes, number, most): (&[u8], fn(u8) -> f32, f32),
    scales: In,
) -> Matrix {
    let grid = [rows.div_ceil(block[0]), columns.div_ceil(block[1])];
    let mut made = Matrix {
        codes: vec![0; rows * columns],
        scales: Vec::new(),
        grid,
        values: vec![0.0; rows * columns],
    };
    for down in 0..grid[0] {
        for across in 0..grid[1] {
            let rows = down * block[0]..rows.min((down + 1) * block[0]);
            let row = |r: usize| {
                across * block[1] + r * columns..columns.min((across + 1) * block[1]) + r * columns
            };
            let places: Vec<usize> = rows.flat_map(row).collect();
            let largest = places.iter().fold(0f32, |m, i| m.max(values[*i].abs()));
            let (scale, bytes) = scales.rounded(largest / most);
            made.scales.extend(bytes);
            for i in places {
                made.codes[i] = nearest(values[i] / scale, codes, number);
                made.values[i] = number(made.codes[i]) * scale;
            }
        }
    }
    made
}

/// Quantizes to FP8 E4M3.
pub fn fp8(values: &[f32], size: [usize; 2], by: By, scales: In) -> Matrix {
    let codes: Vec<u8> = (0..=255).filter(|code| code & 0x7f != 0x7f).collect();
    let block = match by {
        By::Block(block) => block,
        By::Row => [1, size[1]],
        By::Matrix => size,
    };
    quantize(values, size, block, (&codes, e4m3, 448.0), scales)
}

/// Quantizes to FP4 E2M1 in groups of 32, two codes per byte.
pub fn fp4(values: &[f32], size: [usize; 2], scales: In) -> Matrix {
    let codes: Vec<u8> = (0..16).collect();
    let mut made = quantize(values, size, [1, 32], (&codes, e2m1, 6.0), scales);
    let pairs = made.codes.chunks(2);
    made.codes = pairs.map(|pair| pair[0] | pair[1] << 4).collect();
    made
}

impl Tensors {
    /// Adds a matrix as codes here and as bf16 in the twin.
    pub fn fp8(&mut self, twin: &mut Tensors, name: &str, size: [usize; 2], how: &Fp8) {
        let values = random(&mut SampleRng::new(how.seed ^ name.len() as u64), &size);
        let made = fp8(&values, size, how.by, how.scales);
        let shape = match (how.by, how.bare) {
            (By::Row, true) => vec![size[0]],
            (By::Matrix, true) => vec![],
            _ => made.grid.to_vec(),
        };
        self.put(name, Dtype::F8_E4M3, &size, made.codes);
        self.put(&(how.called)(name), how.scales.dtype(), &shape, made.scales);
        twin.bf16(name, &size, &made.values);
    }
}

/// Options of FP8 quantization.
#[derive(Clone, Copy)]
pub struct Fp8 {
    pub by: By,
    pub scales: In,
    /// Whether the shapes of scales omit ones.
    pub bare: bool,
    /// Returns the name of a matrix's scales.
    pub called: fn(&str) -> String,
    pub seed: u64,
}
