//! Checkpoints whose number of experts changes: one layer's weights by canonical name, with the
//! optimizer state beside them.
//!
//! | function | from → to | exact |
//! |---|---|---|
//! | [`add_experts`] | E experts → E + n, the layer computes the same | yes, while the new ones are quiet |
//! | [`split_experts`], [`merge_experts`] | one layer of E experts ↔ layers of its parts, router rows included | to the byte |
//! | [`shard_experts`], [`unshard_experts`] | one layer ↔ the parts of a mesh's ranks | to the byte
//! |
//!
//! Elements are moved as bytes: no type changes and nothing is rounded.

mod add;
mod slices;
mod split;

pub use add::{Grown, Growth, add_experts, wake_experts};
pub use split::{merge_experts, split_experts};
pub use split::{shard_experts, shard_placed, unshard_experts, unshard_placed};

use crate::{STATE_PREFIX, TrainError};
use moesaic_spec::{LayerSpec, canonical_tensors};
use moesaic_tensor::Tensors;
use std::collections::BTreeMap;

/// The dimensions of a layer's tensors that count experts.
struct Layout {
    /// The number of experts with weights. In router tensors, those without weights come after
    /// them.
    experts: usize,
    tensors: BTreeMap<String, Shape>,
}

struct Shape {
    shape: Vec<usize>,
    /// The dimension that counts experts.
    axis: Option<usize>,
}

impl Layout {
    /// Derives the layout of a valid spec: the dimension that counts experts is the one that grows
    /// when the spec has one expert more.
    fn new(spec: &LayerSpec) -> Layout {
        let mut larger = spec.clone();
        larger.shape.experts += 1;
        let pairs = canonical_tensors(spec)
            .into_iter()
            .zip(canonical_tensors(&larger));
        let tensors = pairs.map(|(small, large)| {
            let mut sizes = small.shape.iter().zip(&large.shape);
            let axis = sizes.position(|(a, b)| a != b);
            let shape = small.shape;
            (small.name, Shape { shape, axis })
        });
        Layout {
            experts: spec.shape.experts,
            tensors: tensors.collect(),
        }
    }

    /// Returns the shape of a checkpoint's tensor, or `None` for state that belongs to no weight.
    fn shape(&self, name: &str) -> Option<&Shape> {
        self.tensors.get(weight_of(name)?)
    }

    /// Returns the dimension of a tensor that counts experts.
    fn axis(&self, name: &str) -> Option<usize> {
        self.shape(name)?.axis
    }

    /// Refuses tensors that are not the layer's.
    fn check(&self, tensors: &Tensors<'_>) -> Result<(), TrainError> {
        for (name, tensor) in tensors {
            if weight_of(name).is_none() {
                continue;
            }
            let expected = self
                .shape(name)
                .ok_or_else(|| TrainError::tensor(name, "is no tensor of this layer"))?;
            if tensor.shape != expected.shape {
                let (own, wanted) = (&tensor.shape, &expected.shape);
                let problem = format!("has shape {own:?}, the spec says {wanted:?}");
                return Err(TrainError::tensor(name, problem));
            }
        }
        Ok(())
    }

    /// Refuses weights that lack a tensor of the layer.
    fn complete(&self, tensors: &Tensors<'_>) -> Result<(), TrainError> {
        match self
            .tensors
            .keys()
            .find(|name| !tensors.contains_key(*name))
        {
            None => Ok(()),
            Some(name) => Err(TrainError::tensor(name, "is missing")),
        }
    }
}

/// Returns the weight that a tensor is or belongs to: `up` for `optimizer.first.up`.
pub(crate) fn weight_of(name: &str) -> Option<&str> {
    match name.strip_prefix(STATE_PREFIX) {
        None => Some(name),
        Some(state) => state.split_once('.').map(|(_, weight)| weight),
    }
}

fn check_spec(spec: &LayerSpec) -> Result<(), TrainError> {
    spec.validate().map_err(|problems| {
        let lines: Vec<String> = problems.iter().map(ToString::to_string).collect();
        TrainError::NotPreserved(lines.join("; "))
    })
}
