//! Quantised experts: random codes, and the numbers that codes stand for.

use crate::{Random, Tensor, Weights, round_to};
use moesaic_kernel::DType;
use moesaic_spec::{ExpertFormat, LayerSpec, TensorSpec, canonical_tensors};

/// Returns the layer and the weights that a layer with quantised experts stands for: every
/// `value(code) * scale - offset` in f64. Others come back as they are.
pub fn numbers(spec: &LayerSpec, weights: &Weights) -> (LayerSpec, Weights) {
    let mut plain = spec.clone();
    let Some(format) = plain.precision.experts.take() else {
        return (plain, weights.clone());
    };
    let mut numbers = weights.clone();
    for tensor in canonical_tensors(&plain) {
        let Some(prefix) = matrix(&tensor) else {
            continue;
        };
        let part = |end: &str| weights.0.get(&format!("{prefix}.{end}"));
        let decoded = decoded(format, &tensor.shape, &part);
        numbers.0.remove(&format!("{prefix}.scale"));
        numbers.0.remove(&format!("{prefix}.offset"));
        numbers.0.insert(tensor.name.clone(), decoded);
    }
    (plain, numbers)
}

/// The name of a matrix of routed experts without its end: `experts.up`.
fn matrix(tensor: &TensorSpec) -> Option<&str> {
    let name = tensor.name.strip_suffix(".weight")?;
    (name.starts_with("experts.") && tensor.shape.len() == 3).then_some(name)
}

fn decoded<'w>(
    format: ExpertFormat,
    shape: &[usize],
    part: &dyn Fn(&str) -> Option<&'w Tensor>,
) -> Tensor {
    let of = |name: &str| part(name).unwrap_or_else(|| panic!("codes have a {name}"));
    let (codes, scales) = (of("weight"), of("scale"));
    let offsets = format.offset.then(|| of("offset"));
    let [experts, rows, columns] = [shape[0], shape[1], shape[2]];
    let (bits, words) = (format.code.bits(), format.row_words(columns));
    let [down, across] = format.scale_shape([rows, columns]);
    let width = format.block_columns(columns);
    let mut data = Vec::with_capacity(experts * rows * columns);
    for line in 0..experts * rows {
        let (expert, row) = (line / rows, line % rows);
        let block = (expert * down + row / format.block[0]) * across;
        for column in 0..columns {
            let word = codes.data[line * words + column * bits / 32] as i64 as u32;
            let code = word >> (column * bits % 32) & ((1 << bits) - 1);
            let at = block + column / width;
            let value = f64::from(format.code.value(code as u8)) * scales.data[at];
            data.push(value - offsets.map_or(0.0, |offsets| offsets.data[at]));
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
    let format = spec.precision.experts?;
    let (prefix, end) = tensor.name.rsplit_once('.')?;
    if !prefix.starts_with("experts.") || tensor.shape.len() != 3 {
        return None;
    }
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
    let data = match end {
        "weight" => (0..count).map(|_| word(format, random)).collect(),
        // Powers of two in bf16, as E8M0 has them; half of them twice as large.
        "scale" if format.scale == DType::Bf16 => (0..count)
            .map(|_| 2f64.powi(size.log2().round() as i32 + i32::from(random.signed() > 0.0)))
            .collect(),
        "scale" => (0..count)
            .map(|_| round_to(format.scale, size * (1.0 + 0.5 * random.signed())))
            .collect(),
        "offset" => (0..count)
            .map(|_| round_to(DType::F32, 8.0 * size * (1.0 + 0.3 * random.signed())))
            .collect(),
        _ => return None,
    };
    Some(Tensor {
        shape: tensor.shape.clone(),
        data,
    })
}

/// A word of codes as a whole number, of which none is NaN.
fn word(format: ExpertFormat, random: &mut Random) -> f64 {
    let bits = format.code.bits();
    let mut word = 0u32;
    for at in (0..32).step_by(bits) {
        let code = (random.bits() & ((1 << bits) - 1)) as u8;
        let finite = format.code.value(code).is_finite();
        word |= u32::from(if finite { code } else { 0 }) << at;
    }
    f64::from(word as i32)
}
