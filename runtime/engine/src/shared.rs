//! Memory that several layers have in common.

use crate::error::EngineError;
use crate::launch::Modules;
use crate::place::{placed, zeroed};
use crate::turns::Turns;
use moesaic_plan::{LayerPlan, TensorPlan, TensorRole};
use moesaic_target::{Buffer, Device};
use moesaic_tensor::WeightSource;
use std::collections::HashMap;
use std::sync::Arc;

/// Weights and gradients of layers that use the same.
pub(crate) struct Shared {
    weights: HashMap<String, Arc<Buffer>>,
    gradients: HashMap<String, Arc<Buffer>>,
    /// The locks by which layers on this memory take turns.
    pub turn: Arc<Turns>,
}

impl Shared {
    /// Allocates the tensors of a plan whose names are `common`.
    pub fn new(
        plan: &LayerPlan,
        modules: &Modules,
        device: &dyn Device,
        weights: &dyn WeightSource,
        common: fn(&str) -> bool,
    ) -> Result<Shared, EngineError> {
        let placed = placed(plan, modules, device, weights, common)?;
        let summed = |tensor: &&TensorPlan| {
            tensor.role == TensorRole::WeightGradient && common(&tensor.name)
        };
        let mut gradients = HashMap::new();
        for tensor in plan.tensors.iter().filter(summed) {
            let buffer = Arc::new(zeroed(tensor, device)?);
            gradients.insert(tensor.name.clone(), buffer);
        }
        let weights = placed.into_iter();
        let weights = weights.map(|(id, buffer)| (plan[id].name.clone(), buffer));
        Ok(Shared {
            weights: weights.collect(),
            gradients,
            turn: Arc::default(),
        })
    }

    pub fn weights(&self) -> HashMap<String, Arc<Buffer>> {
        self.weights.clone()
    }

    pub fn gradients(&self) -> HashMap<String, Arc<Buffer>> {
        self.gradients.clone()
    }
}

/// Returns whether two plans have the same weight layout.
pub(crate) fn same_memory(a: &LayerPlan, b: &LayerPlan) -> bool {
    let held = |plan: &LayerPlan| {
        let mut tensors = plan.tensors.clone();
        tensors.retain(|t| {
            matches!(
                t.role,
                TensorRole::Weight | TensorRole::Packed | TensorRole::WeightGradient
            )
        });
        tensors
    };
    held(a) == held(b)
}
