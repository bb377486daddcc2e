//! Weights and inputs, and the files that peers read them from.

use crate::Result;
use crate::shapes::Shape;
use moesaic::half::bf16;
use moesaic::reference::Random;
use moesaic::spec::{TensorSpec, canonical_tensors};
use moesaic::{DType, LayerSpec, Tensor, Tensors};
use rayon::prelude::*;
use safetensors::tensor::TensorView;
use std::fs;
use std::path::{Path, PathBuf};

/// Length of a row of the router: the size of the logits of experts that a
/// token does not lean to.
const ROUTER_NORM: f32 = 0.15;

/// Logit of a chosen expert, before noise: 20 times that. Small, so that what
/// bf16 makes of it changes weights by little.
const LEAN: f32 = 3.0;

/// A folder for the files of one layer; gone with this value.
pub struct Folder(tempfile::TempDir);

impl Folder {
    pub fn new() -> Result<Folder> {
        Ok(Folder(tempfile::tempdir()?))
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// A file for a peer's answer.
    pub fn answer(&self) -> PathBuf {
        self.path().join("answer.safetensors")
    }

    /// Writes a call's tensors.
    pub fn input(&self, call: &Call, dtype: DType, shape: &Shape) -> Result<PathBuf> {
        let path = self.path().join("input.safetensors");
        let sizes = [call.tokens, shape.model_dim];
        let view = |bytes| TensorView::new(stored(dtype), sizes.to_vec(), bytes);
        let tensors = [("x", view(&call.x)?), ("dy", view(&call.dy)?)];
        safetensors::serialize_to_file(tensors, None, &path)?;
        Ok(path)
    }
}

/// One call: `x` and the gradient `dy` of its output, both `[T, d]`.
pub struct Call {
    pub tokens: usize,
    pub x: Vec<u8>,
    pub dy: Vec<u8>,
}

impl Call {
    /// Noise of size one that leans towards the experts in `ids [T, K]`, so
    /// that any router that reads it chooses these.
    pub fn new(
        shape: &Shape,
        dtype: DType,
        tokens: usize,
        ids: &[i32],
        router: &[Vec<f32>],
    ) -> Call {
        let (d, k) = (shape.model_dim, shape.top_k);
        let mut x = noise(tokens * d, 3f32.sqrt(), 1 << 40);
        let lean = LEAN / (ROUTER_NORM * ROUTER_NORM);
        x.par_chunks_mut(d)
            .zip(ids.par_chunks(k))
            .for_each(|(row, ids)| {
                for &id in ids {
                    let direction = &router[id as usize];
                    row.iter_mut()
                        .zip(direction)
                        .for_each(|(x, w)| *x += lean * w);
                }
            });
        Call {
            tokens,
            x: bytes_of(&x, dtype),
            dy: bytes_of(&noise(tokens * d, 1.0, 1 << 41), dtype),
        }
    }
}

/// A call of noise of size one, wherever it leads.
pub fn noise_call(model_dim: usize, dtype: DType, tokens: usize) -> Call {
    let rows = |seed| bytes_of(&noise(tokens * model_dim, 1.0, seed), dtype);
    Call {
        tokens,
        x: rows(1 << 42),
        dy: rows(1 << 43),
    }
}

/// The canonical tensors of the layer, scaled so that outputs are of the order
/// of one; all values are ones that `dtype` has.
pub fn weights(spec: &LayerSpec, dtype: DType) -> Tensors<'static> {
    let tensors = canonical_tensors(spec).into_iter().zip(0..);
    tensors
        .map(|(tensor, seed): (TensorSpec, u64)| {
            let values = noise(tensor.shape.iter().product(), scale(&tensor), seed << 32);
            let rounded = || values.iter().map(|v| bf16::from_f32(*v).to_f32()).collect();
            let values: Vec<f32> = match (tensor.dtype, dtype) {
                (DType::F32, DType::Bf16) => rounded(),
                _ => values,
            };
            let made = Tensor {
                data: bytes_of(&values, tensor.dtype).into(),
                dtype: tensor.dtype,
                shape: tensor.shape,
            };
            (tensor.name, made)
        })
        .collect()
}

fn scale(tensor: &TensorSpec) -> f32 {
    let fan_in = *tensor.shape.last().unwrap_or(&1) as f32;
    match tensor.name.as_str() {
        "router.weight" => ROUTER_NORM * (3.0 / fan_in).sqrt(),
        "router.select_bias" => 0.01,
        name if name.ends_with("bias") => 0.1,
        _ => (3.0 / fan_in).sqrt(),
    }
}

/// The rows of the router.
pub fn router_rows(weights: &Tensors<'_>) -> Vec<Vec<f32>> {
    let router = &weights["router.weight"];
    let values = router.to_f32();
    values
        .chunks(router.shape[1])
        .map(<[f32]>::to_vec)
        .collect()
}

/// Writes `layer.json` and `weights.safetensors`: canonical names, but gate
/// and up of an expert in one tensor, gate rows first, and all in `dtype`.
pub fn write_layer(folder: &Path, shape: &Shape, dtype: DType, weights: &Tensors<'_>) -> Result {
    fs::write(folder.join("layer.json"), shape.json(dtype).to_string())?;
    let files: Vec<(String, Tensor<'static>)> = weights
        .iter()
        .filter(|(name, _)| !name.contains(".up.") || !shape.gated())
        .map(|(name, tensor)| {
            if name.contains(".gate.") {
                fused(name, tensor, weights)
            } else {
                (name.clone(), in_type(tensor, dtype))
            }
        })
        .collect();
    let views: std::result::Result<Vec<_>, _> = files
        .iter()
        .map(|(name, t)| {
            let view = TensorView::new(stored(t.dtype), t.shape.clone(), &t.data);
            view.map(|view| (name.as_str(), view))
        })
        .collect();
    safetensors::serialize_to_file(views?, None, &folder.join("weights.safetensors"))?;
    Ok(())
}

/// Gate and up of every expert, one after the other.
fn fused(name: &str, gate: &Tensor<'_>, weights: &Tensors<'_>) -> (String, Tensor<'static>) {
    let up = &weights[&name.replace(".gate.", ".up.")];
    let stacked = name.starts_with("experts.");
    let experts = if stacked { gate.shape[0] } else { 1 };
    let part = gate.data.len() / experts;
    let mut bytes = Vec::with_capacity(2 * gate.data.len());
    for (gate, up) in gate.data.chunks(part).zip(up.data.chunks(part)) {
        bytes.extend_from_slice(gate);
        bytes.extend_from_slice(up);
    }
    let mut shape = gate.shape.clone();
    shape[usize::from(stacked)] *= 2;
    let fused = Tensor {
        dtype: gate.dtype,
        shape,
        data: bytes.into(),
    };
    (name.replace(".gate.", ".gate_up."), fused)
}

fn in_type(tensor: &Tensor<'_>, dtype: DType) -> Tensor<'static> {
    if tensor.dtype == dtype {
        tensor.clone().into_static()
    } else {
        Tensor {
            dtype,
            shape: tensor.shape.clone(),
            data: bytes_of(&tensor.to_f32(), dtype).into(),
        }
    }
}

/// Uniform in `(-scale, scale)`, on all cores.
fn noise(count: usize, scale: f32, seed: u64) -> Vec<f32> {
    let mut values = vec![0.0; count];
    let chunks = values.par_chunks_mut(1 << 16).enumerate();
    chunks.for_each(|(at, chunk)| {
        let mut random = Random::new((seed + at as u64).wrapping_mul(0x9e37_79b9));
        chunk.fill_with(|| random.signed() as f32 * scale);
    });
    values
}

/// The values in memory of this type.
pub fn bytes_of(values: &[f32], dtype: DType) -> Vec<u8> {
    let mut bytes = vec![0; values.len() * dtype.size()];
    let chunks = bytes.par_chunks_mut(dtype.size() << 16);
    chunks
        .zip(values.par_chunks(1 << 16))
        .for_each(|(bytes, values)| {
            for (bytes, value) in bytes.chunks_exact_mut(dtype.size()).zip(values) {
                match dtype {
                    DType::Bf16 => bytes.copy_from_slice(&bf16::from_f32(*value).to_le_bytes()),
                    _ => bytes.copy_from_slice(&value.to_le_bytes()),
                }
            }
        });
    bytes
}

/// The values of memory of this type, f32 or bf16.
pub fn floats(bytes: &[u8], dtype: DType) -> Vec<f32> {
    let value = |b: &[u8]| match dtype {
        DType::Bf16 => bf16::from_le_bytes([b[0], b[1]]).to_f32(),
        _ => f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
    };
    bytes.chunks_exact(dtype.size()).map(value).collect()
}

fn stored(dtype: DType) -> safetensors::Dtype {
    match dtype {
        DType::Bf16 => safetensors::Dtype::BF16,
        _ => safetensors::Dtype::F32,
    }
}
