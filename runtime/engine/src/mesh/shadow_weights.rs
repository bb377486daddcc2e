//! Weights of shadows that stay for backward, and the memory that they come from.

use crate::error::EngineError;
use crate::memory::Buffers;
use moesaic_plan::{LayerPlan, TensorId};
use moesaic_target::Device;
use std::sync::{Arc, Mutex};

/// Weights of shadows that live from a training forward pass until its saved state is dropped.
/// Their memory then serves the next such pass.
pub(super) struct ShadowWeights {
    pub buffers: Buffers,
    idle: Arc<IdleWeights>,
}

/// Memory for weights of shadows that no call uses now.
pub(super) type IdleWeights = Mutex<Vec<Buffers>>;

impl ShadowWeights {
    /// Takes memory that no call uses, or allocates some.
    pub fn take(
        of: &LayerPlan,
        idle: &Arc<IdleWeights>,
        device: &dyn Device,
    ) -> Result<ShadowWeights, EngineError> {
        // All shadow weights of a plan have the same sizes, so any free set will do.
        let free = idle.lock().ok().and_then(|mut idle| idle.pop());
        let buffers = match free {
            Some(buffers) => buffers,
            None => memory_of_weights(of, device)?,
        };
        let idle = Arc::clone(idle);
        Ok(ShadowWeights { buffers, idle })
    }
}

impl Drop for ShadowWeights {
    fn drop(&mut self) {
        if let Ok(mut idle) = self.idle.lock() {
            idle.push(std::mem::take(&mut self.buffers));
        }
    }
}

fn memory_of_weights(of: &LayerPlan, device: &dyn Device) -> Result<Buffers, EngineError> {
    let mut buffers = Buffers::default();
    let tensors = (0..of.tensors.len()).map(TensorId);
    for id in tensors.filter(|id| of.is_multiplied(*id)) {
        buffers.push(id, device.alloc(of[id].bytes(0) as usize)?);
    }
    Ok(buffers)
}
