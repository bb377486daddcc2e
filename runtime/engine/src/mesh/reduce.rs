//! Reduction of weight gradients over the ranks that hold the same weights.

use super::groups::Mesh;
use super::layer::{RankLayer, Reduces};
use super::process_group::ProcessGroup;
use super::replicas::{OnDevice, SlotPart};
use super::transfers::element;
use crate::device_layer::DeviceLayer;
use crate::error::EngineError;
use crate::router::is_of_router;
use moesaic_collectives::{Call, Collectives, Reduction, Slice};
use moesaic_plan::TensorId;
use moesaic_tensor::Tensor;

impl RankLayer {
    /// Sums gradients over the ranks that hold the same weights. Gradients of experts are summed
    /// over `dp` groups and over groups with replicas of an expert
    /// ([`Placement`](moesaic_plan::Placement)), those of sharded shared experts over the shards of
    /// the same index, all others over all ranks. The sums equal the gradients of one process that
    /// has the tokens of all ranks, and are the same bytes on every rank that holds them. Gradients
    /// of 16 bits are summed in f32, and rounded once for each group. Call it after any number of
    /// backward passes that accumulate.
    ///
    /// Use it where the loss is a sum over tokens, as with `dy` of a mean over all ranks' tokens,
    /// and auxiliary losses have [`TokenScope::World`](moesaic_plan::TokenScope). If the loss is a
    /// mean over each rank's own tokens, use [`RankLayer::average_gradients`].
    ///
    /// # Errors
    /// [`EngineError::NotTraining`], [`EngineError::Collective`].
    pub fn reduce_gradients(&self) -> Result<(), EngineError> {
        self.replicated().check_training()?;
        let mut groups = self.mesh().groups();
        if self.reduces == Reduces::Router {
            return sum(self.replicated(), &mut *groups.world, is_of_router);
        }
        sum(self.replicated(), &mut *groups.world, EVERY)?;
        if self.reduces == Reduces::All {
            sum(self.own(), &mut *groups.expert_dp, EVERY)?;
        }
        if let Some(shared) = self.shared() {
            sum(shared, groups.process_group(ProcessGroup::EpDp), EVERY)?;
        }
        // `sum_replicas` exchanges through the mesh's groups by itself and would wait for this
        // lock.
        drop(groups);
        if self.reduces == Reduces::All {
            self.sum_replicas()?;
        }
        Ok(())
    }

    /// As [`RankLayer::reduce_gradients`], then divides all sums by the number of ranks, those of
    /// experts too: the gradients of the mean of all ranks' losses, as in data-parallel training.
    /// Use it where losses are means over a rank's own tokens, auxiliary ones of
    /// [`TokenScope::Rank`](moesaic_plan::TokenScope) included. Losses of
    /// [`TokenScope::World`](moesaic_plan::TokenScope) and the `global` loss are divided by the
    /// number of ranks, too. The division runs on the host.
    ///
    /// # Errors
    /// As [`RankLayer::reduce_gradients`].
    pub fn average_gradients(&self) -> Result<(), EngineError> {
        self.reduce_gradients()?;
        let ranks = self.mesh().parallel().ranks() as f32;
        if self.reduces == Reduces::Router {
            return divide(self.replicated(), ranks, is_of_router);
        }
        let own =
            |part: &&DeviceLayer| self.reduces == Reduces::All || !std::ptr::eq(*part, self.own());
        let mut parts = self.parts().filter(own);
        parts.try_for_each(|part| divide(part, ranks, EVERY))
    }

    /// Sums gradients of experts that several groups hold, through host memory.
    fn sum_replicas(&self) -> Result<(), EngineError> {
        let own = self.own();
        let choice = self.choice();
        let placement = self.bound(&choice).plan.placement();
        let experts = placement.count(self.mesh().place().ep);
        let buffers = own.gradient_buffers()?;
        let _turn = own.lock_workspaces();
        let part = |(tensor, buffer): (TensorId, _)| {
            let tensor = &own.plan()[tensor];
            let row = tensor.bytes(0) as usize / experts;
            let dtype = tensor.dtype;
            SlotPart { buffer, row, dtype }
        };
        let mut slots = OnDevice {
            device: &*own.device,
            parts: buffers.iter().map(part).collect(),
        };
        let what = format!("gradients of replicas of {}", self.label);
        self.ranks().sum_slots(&mut slots, &what)
    }
}

/// Sums the gradients of a layer that every rank holds.
pub(crate) fn sum_gradients(layer: &DeviceLayer, mesh: &Mesh) -> Result<(), EngineError> {
    sum(layer, &mut *mesh.groups().world, EVERY)
}

/// Chooses gradients by their names.
type Wanted = fn(&str) -> bool;

const EVERY: Wanted = |_| true;

fn sum(
    layer: &DeviceLayer,
    group: &mut dyn Collectives,
    wanted: Wanted,
) -> Result<(), EngineError> {
    if group.size() == 1 {
        return Ok(());
    }
    let buffers = layer.gradient_buffers()?;
    let _turn = layer.lock_workspaces();
    let mut handles = Vec::new();
    for (tensor, _) in buffers.iter() {
        let plan = &layer.plan()[tensor];
        if !wanted(&plan.name) {
            continue;
        }
        let buffer = buffers.handle(tensor).expect("it was just listed");
        let data = Slice::new(buffer, element(plan.dtype), 0, plan.elements(0) as usize)?;
        let call = Call::new(&plan.name);
        handles.push(group.all_reduce(&data, &data, Reduction::Sum, &call)?);
    }
    // All sums are queued before the first wait, so their messages overlap.
    for handle in handles {
        handle.wait()?;
    }
    Ok(())
}

fn divide(layer: &DeviceLayer, by: f32, wanted: Wanted) -> Result<(), EngineError> {
    let buffers = layer.gradient_buffers()?;
    let _turn = layer.lock_workspaces();
    let wanted = |tensor: TensorId| wanted(&layer.plan()[tensor].name);
    for (tensor, buffer) in buffers.iter().filter(|(tensor, _)| wanted(*tensor)) {
        let tensor = &layer.plan()[tensor];
        let mut host = Tensor::zeros(tensor.dtype, &[tensor.elements(0) as usize]);
        layer.device.download(buffer, 0, host.data.to_mut())?;
        let mut values = host.to_f32();
        values.iter_mut().for_each(|value| *value /= by);
        let divided = Tensor::rounded(tensor.dtype, &host.shape, &values);
        layer.device.upload(&divided.data, buffer, 0)?;
    }
    Ok(())
}
