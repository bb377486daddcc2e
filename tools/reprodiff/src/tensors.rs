//! Weights and tokens of a layer, as safetensors files.

use crate::Failed;
use half::{bf16, f16};
use moesaic_kernel::DType;
use moesaic_spec::testing::SampleRng;
use moesaic_spec::{LayerSpec, LossKind, RouterKind, canonical_tensors};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensorError};
use std::path::Path;

/// A tensor of a file that is to be written.
struct Tensor {
    name: String,
    dtype: DType,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

/// Bytes of the layer's weights.
pub fn weight_bytes(spec: &LayerSpec) -> usize {
    let tensors = canonical_tensors(spec).into_iter();
    tensors
        .map(|t| t.dtype.size() * t.shape.iter().product::<usize>())
        .sum()
}

/// Writes random weights, scaled by their fan-in.
pub fn write_weights(spec: &LayerSpec, seed: u64, path: &Path) -> Result<(), Failed> {
    let rng = &mut SampleRng::new(seed);
    let tensors = canonical_tensors(spec).into_iter().map(|tensor| {
        let elements = tensor.shape.iter().product();
        let fan_in = tensor.shape.last().copied().unwrap_or(1).max(1);
        let bytes = match tensor.dtype {
            DType::I32 => ints((0..elements).map(|_| below(rng, spec.routed_experts()))),
            dtype => floats(rng, dtype, elements, (3.0 / fan_in as f64).sqrt()),
        };
        Tensor {
            name: tensor.name,
            dtype: tensor.dtype,
            shape: tensor.shape,
            bytes,
        }
    });
    write(tensors.collect(), path)
}

/// Writes random tokens, a gradient of the output, and whatever else the
/// router and the losses take.
pub fn write_input(spec: &LayerSpec, tokens: usize, seed: u64, path: &Path) -> Result<(), Failed> {
    let rng = &mut SampleRng::new(!seed);
    let (router, top_k) = (&spec.router, spec.shape.top_k);
    let mut list = Vec::new();
    let mut push = |name: &str, dtype, shape: &[usize], bytes| {
        list.push(Tensor {
            name: name.to_string(),
            dtype,
            shape: shape.to_vec(),
            bytes,
        });
    };
    for (name, width) in [("x", spec.shape.model_dim), ("dy", spec.output_dim())] {
        let dtype = spec.precision.activations;
        let bytes = floats(rng, dtype, tokens * width, 1.7);
        push(name, dtype, &[tokens, width], bytes);
    }
    if router.kind == RouterKind::Table {
        let rows = router.table_rows.unwrap_or(1);
        let ids = ints((0..tokens).map(|_| below(rng, rows)));
        push("token_ids", DType::I32, &[tokens], ids);
    }
    if router.kind == RouterKind::External {
        let (shape, experts) = ([tokens, top_k], spec.routed_experts());
        let ids = ints((0..tokens * top_k).map(|slot| (slot % experts) as i32));
        push("topk_ids", DType::I32, &shape, ids);
        let weights = floats(rng, DType::F32, tokens * top_k, 1.0);
        push("topk_weights", DType::F32, &shape, weights);
    }
    if router.token_mask {
        let mask = ints((0..tokens).map(|t| i32::from(t % 5 != 3)));
        push("token_mask", DType::I32, &[tokens], mask);
    }
    if router.active_k {
        let active = ints([rng.between(1, top_k) as i32].into_iter());
        push("active_k", DType::I32, &[1], active);
    }
    if losses(spec, LossKind::Sequence) {
        let ids = ints((0..tokens).map(|t| (t * 4 / tokens) as i32));
        push("sequence_ids", DType::I32, &[tokens], ids);
    }
    if losses(spec, LossKind::Global) {
        let experts = spec.routed_experts();
        let counts = longs((0..experts).map(|e| (tokens * top_k + e) / experts));
        push("global_counts", DType::I64, &[experts], counts);
        let group = longs([tokens].into_iter());
        push("global_tokens", DType::I64, &[1], group);
    }
    write(list, path)
}

fn losses(spec: &LayerSpec, kind: LossKind) -> bool {
    spec.losses.iter().any(|loss| loss.kind == kind)
}

fn below(rng: &mut SampleRng, end: usize) -> i32 {
    rng.between(0, end.max(1) - 1) as i32
}

fn ints(values: impl Iterator<Item = i32>) -> Vec<u8> {
    values.flat_map(i32::to_le_bytes).collect()
}

fn longs(values: impl Iterator<Item = usize>) -> Vec<u8> {
    values
        .flat_map(|value| (value as i64).to_le_bytes())
        .collect()
}

/// Uniform values in `(-scale, scale)`.
fn floats(rng: &mut SampleRng, dtype: DType, elements: usize, scale: f64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(elements * dtype.size());
    for _ in 0..elements {
        let value = rng.real(-scale, scale) as f32;
        match dtype {
            DType::F16 => bytes.extend(f16::from_f32(value).to_le_bytes()),
            DType::Bf16 => bytes.extend(bf16::from_f32(value).to_le_bytes()),
            _ => bytes.extend(value.to_le_bytes()),
        }
    }
    bytes
}

fn write(tensors: Vec<Tensor>, path: &Path) -> Result<(), Failed> {
    let views: Result<Vec<_>, _> = tensors.iter().map(view).collect();
    views
        .and_then(|views| safetensors::serialize_to_file(views, None, path))
        .map_err(|error| Failed::Tensors(path.to_path_buf(), error))
}

fn view(tensor: &Tensor) -> Result<(&str, TensorView<'_>), SafeTensorError> {
    let dtype = match tensor.dtype {
        DType::F32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::Bf16 => Dtype::BF16,
        DType::I32 => Dtype::I32,
        DType::I64 => Dtype::I64,
    };
    let view = TensorView::new(dtype, tensor.shape.clone(), &tensor.bytes)?;
    Ok((&tensor.name, view))
}
