//! Quantized experts: random codes, and the numbers that codes stand for.

use crate::{Random, Tensor, Weights, round_to};
use moesaic_kernel::DType;
use moesaic_spec::format::ScaleType;
use moesaic_spec::{LayerSpec, OffsetType, TensorSpec, WeightFormat, canonical_tensors};

/// Returns the layer and the weights that a layer with quantized experts stands for: every
/// `value(code) * scale`, less its offset, in f64. Others come back as they are.
///
/// A layer that quantizes activations keeps the formats of its weights, which say where the groups
/// of activations lie.
pub fn numbers(spec: &LayerSpec, weights: &Weights) -> (LayerSpec, Weights) {
    let plain = match spec.precision.expert_activations {
        Some(_) => spec.clone(),
        None => spec.dequantized(),
    };
    let mut numbers = weights.clone();
    for tensor in canonical_tensors(&spec.dequantized()) {
        let Some((prefix, format)) = matrix(&tensor.name, spec) else {
            continue;
        };
        if !tensor.name.ends_with(".weight") {
            continue;
        }
        let part = |end: &str| weights.0.get(&format!("{prefix}.{end}"));
        let decoded = decoded(format, &tensor.shape, &part);
        for part in format.tensors([tensor.shape[1], tensor.shape[2]]) {
            numbers.0.remove(&format!("{prefix}.{}", part.end));
        }
        numbers.0.insert(tensor.name.clone(), decoded);
    }
    (plain, numbers)
}

/// Returns the matrix of quantized experts to which a tensor belongs, and its format.
fn matrix<'n>(tensor: &'n str, spec: &LayerSpec) -> Option<(&'n str, WeightFormat)> {
    let (prefix, _) = tensor.rsplit_once('.')?;
    Some((prefix, spec.precision.format_of(tensor)?))
}

/// Byte `at` of words that have four each, the first in the lowest bits.
fn byte(words: &Tensor, row: usize, row_words: usize, at: usize) -> u8 {
    let word = words.data[row * row_words + at / 4] as i64 as u32;
    (word >> (at % 4 * 8)) as u8
}

fn decoded<'w>(
    format: WeightFormat,
    shape: &[usize],
    part: &dyn Fn(&str) -> Option<&'w Tensor>,
) -> Tensor {
    let of = |name: &str| part(name).unwrap_or_else(|| panic!("codes have a {name}"));
    let [experts, rows, columns] = [shape[0], shape[1], shape[2]];
    let size = [rows, columns];
    let bits = format.code.bits();
    let codes = of("weight");
    let [down, across] = format.scale_shape(size);
    let width = format.block_columns(columns);
    // The second scale of a row and a column.
    let second = |name: &str, line: usize, column: usize| match format.second_shape(size) {
        None => 1.0,
        Some([_, seconds]) => {
            let at = column / format.second.filter(|n| *n > 0).unwrap_or(usize::MAX);
            of(name).data[line * seconds + at]
        }
    };
    let bytes = across.div_ceil(4);
    let mut data = Vec::with_capacity(experts * rows * columns);
    for line in 0..experts * rows {
        let (expert, row) = (line / rows, line % rows);
        let block_row = expert * down + row / format.block[0];
        for column in 0..columns {
            let at = column / width;
            let held = byte(codes, line, format.row_words(columns), column * bits / 8);
            let code = if bits == 4 {
                held >> (column % 2 * 4) & 15
            } else {
                held
            };
            let scale = match format.scale.dtype() {
                Some(_) => of("scale").data[block_row * across + at],
                None => f64::from(
                    format
                        .scale
                        .read(&[byte(of("scale"), block_row, bytes, at)], 0),
                ),
            };
            let scale = scale * second("scale_2", line, column);
            let signed = || f64::from(byte(of("offset"), block_row, bytes, at) as i8);
            let offset = match format.offset {
                None => 0.0,
                Some(OffsetType::F16) => of("offset").data[block_row * across + at],
                Some(OffsetType::Int8) => signed() * second("offset_2", line, column),
                Some(OffsetType::Zero) => signed() * scale,
            };
            data.push(f64::from(format.code.value(code)) * scale - offset);
        }
    }
    Tensor {
        shape: shape.to_vec(),
        data,
    }
}

/// A random part of a matrix of codes, if the tensor is one: any codes but NaN, and scales that
/// make outputs of the order of one.
pub(crate) fn random(tensor: &TensorSpec, spec: &LayerSpec, random: &mut Random) -> Option<Tensor> {
    let (prefix, format) = matrix(&tensor.name, spec)?;
    let count = tensor.shape.iter().product();
    let values = (0..1u32 << format.code.bits()).map(|code| format.code.value(code as u8));
    let finite: Vec<f64> = values.filter(|v| v.is_finite()).map(f64::from).collect();
    let squares: f64 = finite.iter().map(|v| v * v).sum();
    let width = if prefix.ends_with("down") {
        spec.shape.hidden_dim
    } else {
        spec.expert_input_dim()
    };
    let size = 1.0 / (squares / finite.len() as f64 * width as f64).sqrt();
    let (_, end) = tensor.name.rsplit_once('.')?;
    if end == "weight" {
        return Some(Tensor {
            shape: tensor.shape.clone(),
            data: (0..count).map(|_| word(format, random)).collect(),
        });
    }
    let mut signed = || random.signed();
    let data = match (end, format.scale) {
        // A power of two, or the next one.
        ("scale", ScaleType::E8m0) => {
            let power = 127 + size.log2().round() as i32;
            let mut byte = || (power + i32::from(signed() > 0.0)) as u8;
            words(count, &mut byte)
        }
        // From one to two.
        ("scale", ScaleType::E4m3) => words(count, &mut || 0x38 | (4.0 + 4.0 * signed()) as u8 & 7),
        ("scale", ScaleType::Int8) => words(count, &mut || (24.0 + 8.0 * signed()) as i8 as u8),
        ("scale", scale) => {
            let dtype = scale.dtype()?;
            let mut scale = || round_to(dtype, size * (1.0 + 0.5 * signed()));
            (0..count).map(|_| scale()).collect()
        }
        ("scale_2", scale) => {
            // The scales are bytes of this order.
            let usual = if scale == ScaleType::Int8 { 24.0 } else { 1.5 };
            let mut scale = || round_to(DType::F32, size / usual * (1.0 + 0.5 * signed()));
            (0..count).map(|_| scale()).collect()
        }
        ("offset", _) if format.offset == Some(OffsetType::F16) => {
            let mut offset = || round_to(DType::F16, 8.0 * size * (1.0 + 0.3 * signed()));
            (0..count).map(|_| offset()).collect()
        }
        ("offset", _) => words(count, &mut || (8.0 + 4.0 * signed()) as i8 as u8),
        ("offset_2", _) => {
            let mut scale = || round_to(DType::F32, size * (1.0 + 0.3 * signed()));
            (0..count).map(|_| scale()).collect()
        }
        _ => return None,
    };
    Some(Tensor {
        shape: tensor.shape.clone(),
        data,
    })
}

/// Words of four bytes each, as whole numbers.
fn words(count: usize, byte: &mut dyn FnMut() -> u8) -> Vec<f64> {
    let mut word = || i32::from_le_bytes([byte(), byte(), byte(), byte()]);
    (0..count).map(|_| f64::from(word())).collect()
}

/// A word of codes as a whole number, of which none is NaN.
fn word(format: WeightFormat, random: &mut Random) -> f64 {
    let bits = format.code.bits();
    let mut word = 0u32;
    for at in (0..32).step_by(bits) {
        let code = (random.bits() & ((1 << bits) - 1)) as u8;
        let finite = format.code.value(code).is_finite();
        word |= u32::from(if finite { code } else { 0 }) << at;
    }
    f64::from(word as i32)
}
