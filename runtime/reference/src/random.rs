//! Random weights of a layer.

use crate::stored;
use crate::weights::{Random, Tensor, Weights};
use moesaic_kernel::DType;
use moesaic_spec::{LayerSpec, TensorSpec, canonical_tensors};

impl Weights {
    /// Returns random values for every tensor of the layer: uniform, and scaled so that outputs are
    /// of the order of one. Biases are not small.
    pub fn random(spec: &LayerSpec, seed: u64) -> Weights {
        let mut random = Random::new(seed);
        let list = canonical_tensors(spec);
        Weights(
            list.iter()
                .map(|t| (t.name.clone(), random_tensor(t, spec, &mut random)))
                .collect(),
        )
    }
}

fn random_tensor(tensor: &TensorSpec, spec: &LayerSpec, random: &mut Random) -> Tensor {
    if let Some(part) = stored::random(tensor, spec, random) {
        return part;
    }
    let shape = tensor.shape.clone();
    if tensor.dtype == DType::I32 {
        return Tensor {
            data: random_table(&shape, spec.routed_experts(), random),
            shape,
        };
    }
    let count = shape.iter().product();
    let fan_in = if shape.len() > 1 {
        shape[shape.len() - 1]
    } else {
        1
    };
    let scale = (3.0 / fan_in.max(1) as f64).sqrt();
    let data: Vec<f64> = (0..count).map(|_| scale * random.signed()).collect();
    let data = if tensor.name == "router.load" {
        shares(&data)
    } else {
        data
    };
    Tensor { shape, data }
}

/// Returns shares of assignments: none is negative, and they sum to one.
fn shares(values: &[f64]) -> Vec<f64> {
    let sum: f64 = values.iter().map(|v| v.abs()).sum();
    values.iter().map(|v| v.abs() / sum).collect()
}

/// Returns rows of distinct experts, in random order.
fn random_table(shape: &[usize], experts: usize, random: &mut Random) -> Vec<f64> {
    let row = |random: &mut Random| {
        let mut ids: Vec<(u64, usize)> = (0..experts).map(|e| (random.bits(), e)).collect();
        ids.sort_unstable();
        ids.into_iter()
            .take(shape[1])
            .map(|(_, e)| e as f64)
            .collect::<Vec<f64>>()
    };
    (0..shape[0]).flat_map(|_| row(random)).collect()
}
