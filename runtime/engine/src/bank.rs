//! Layers over the experts of another layer.

use crate::device_layer::DeviceLayer;
use crate::engine::Engine;
use crate::error::EngineError;
use crate::reason::WeightReason;
use crate::texts::Texts;
use moesaic_plan::{LayerPlan, TensorId, TensorPlan, TensorRole};
use moesaic_target::Buffer;
use moesaic_tensor::WeightSource;
use std::collections::HashMap;
use std::sync::Arc;

impl Engine {
    /// Makes the layer of these plans over the experts of `bank`, which trains if the layer does.
    pub(crate) fn device_layer_over(
        &self,
        texts: &Texts,
        weights: &dyn WeightSource,
        bank: &DeviceLayer,
    ) -> Result<DeviceLayer, EngineError> {
        if !Arc::ptr_eq(&bank.device, self.device()) {
            return Err(EngineError::weight("experts", WeightReason::OtherDevice));
        }
        let plan = texts.tilings.first();
        let trains = plan.training.is_some();
        let layer = self.device_layer_sharing(texts, weights, shared(bank, plan)?)?;
        if !trains {
            return Ok(layer.beside(bank));
        }
        layer.share_gradients(gradients(bank)?)?;
        // Both passes of either write the experts' gradients, so their calls take turns.
        Ok(layer.taking_turns(bank.turn()))
    }
}

/// Returns the memory of the experts of `bank` by the names of the tensors of `plan`.
fn shared(
    bank: &DeviceLayer,
    plan: &LayerPlan,
) -> Result<HashMap<String, Arc<Buffer>>, EngineError> {
    let own = bank.plan();
    let mut shared = HashMap::new();
    for (at, tensor) in plan.tensors.iter().enumerate() {
        let summed = tensor.role == TensorRole::WeightGradient;
        let held = summed || matches!(tensor.role, TensorRole::Weight | TensorRole::Packed);
        if !held || !of_experts(&tensor.name) {
            continue;
        }
        let other = || EngineError::weight(&tensor.name, WeightReason::NotInBank);
        // Compared where they were packed and freed, too: panels are padded, so those of other
        // widths may be as large. Panels of other tiles have the same numbers in another order.
        let alike = |id: &TensorId| {
            same(&own[*id], tensor) && packed_by(own, &tensor.name) == packed_by(plan, &tensor.name)
        };
        let id = bank.id(&tensor.name).filter(alike).ok_or_else(other)?;
        // `gradients` hands those out, because a bank may have none yet.
        if !summed && !plan.packs_away(TensorId(at)) {
            let buffer = bank.weights.handle(id).ok_or_else(other)?;
            shared.insert(tensor.name.clone(), Arc::clone(buffer));
        }
    }
    Ok(shared)
}

/// Returns the gradients of the experts of `bank`, which it allocates if no pass has.
fn gradients(bank: &DeviceLayer) -> Result<HashMap<String, Arc<Buffer>>, EngineError> {
    let held = bank.share_gradients(HashMap::new())?;
    let plan = bank.plan();
    let tensors = plan.tensors.iter().enumerate();
    let of_bank = tensors.filter(|(_, tensor)| of_experts(&tensor.name));
    let buffers = of_bank.filter_map(|(at, tensor)| {
        let buffer = held.handle(TensorId(at))?;
        Some((tensor.name.clone(), Arc::clone(buffer)))
    });
    Ok(buffers.collect())
}

fn of_experts(name: &str) -> bool {
    name.trim_start_matches("grad.").starts_with("experts.")
}

fn same(a: &TensorPlan, b: &TensorPlan) -> bool {
    (a.dtype, &a.shape, a.role) == (b.dtype, &b.shape, b.role)
}

/// Returns the tiling of the product whose packed matrices the tensor holds.
fn packed_by(plan: &LayerPlan, name: &str) -> Option<String> {
    let step = plan.prepare.iter().find(|step| {
        let tensors = step.tensors.iter();
        tensors.skip(1).any(|&id| plan[id].name == name)
    })?;
    let kernel = &plan.kernels[step.entry.kernel];
    kernel.op.gemm().map(|config| format!("{config:?}"))
}
