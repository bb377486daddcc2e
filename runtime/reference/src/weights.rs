//! Weight tensors by canonical name.

use crate::math::round_to;
use moesaic_spec::{LayerSpec, canonical_tensors};
use std::collections::BTreeMap;

/// A dense tensor, row major.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    /// Values; integers of a table are whole numbers.
    pub data: Vec<f64>,
}

impl Tensor {
    /// Returns the elements at index `index` of the first dimension.
    pub fn outer(&self, index: usize) -> &[f64] {
        let size: usize = self.shape[1..].iter().product();
        &self.data[index * size..(index + 1) * size]
    }
}

/// Weight tensors by canonical name.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Weights(pub BTreeMap<String, Tensor>);

impl From<&moesaic_tensor::Tensor<'_>> for Tensor {
    fn from(stored: &moesaic_tensor::Tensor<'_>) -> Tensor {
        Tensor {
            shape: stored.shape.clone(),
            data: stored.to_f64(),
        }
    }
}

impl From<&moesaic_tensor::Tensors<'_>> for Weights {
    fn from(stored: &moesaic_tensor::Tensors<'_>) -> Weights {
        let each = stored.iter();
        Weights(
            each.map(|(name, tensor)| (name.clone(), tensor.into()))
                .collect(),
        )
    }
}

impl Weights {
    /// Returns the tensor of that name. Panics if it is missing.
    pub fn get(&self, name: &str) -> &Tensor {
        self.0
            .get(name)
            .unwrap_or_else(|| panic!("the reference needs tensor `{name}`"))
    }

    /// Returns the weights as they are after storage in the spec's types.
    pub fn rounded(&self, spec: &LayerSpec) -> Weights {
        let mut rounded = self.clone();
        for tensor in canonical_tensors(spec) {
            if let Some(found) = rounded.0.get_mut(&tensor.name) {
                found
                    .data
                    .iter_mut()
                    .for_each(|v| *v = round_to(tensor.dtype, *v));
            }
        }
        rounded
    }
}

/// A small deterministic generator for test data (splitmix64).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Starts the stream of a seed.
    pub fn new(seed: u64) -> Random {
        Random(seed ^ 0x6d6f_6573_6169_6321)
    }

    /// Returns 64 random bits.
    pub fn bits(&mut self) -> u64 {
        let value = splitmix64(self.0);
        self.0 = self.0.wrapping_add(GOLDEN);
        value
    }

    /// Returns a uniform number in `(-1, 1)`, a multiple of 2⁻²³ and so exact in f32.
    pub fn signed(&mut self) -> f64 {
        ((self.bits() >> 40) as f64 + 0.5) / f64::from(1 << 23) - 1.0
    }

    /// Returns `count` values of [`Random::signed`].
    pub fn vec(&mut self, count: usize) -> Vec<f64> {
        (0..count).map(|_| self.signed()).collect()
    }
}

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Returns the splitmix64 output of state `x`.
pub(crate) fn splitmix64(x: u64) -> u64 {
    let mut z = x.wrapping_add(GOLDEN);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
