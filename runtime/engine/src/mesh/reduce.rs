//! Gradients of weights over the ranks that have the same.

use super::layer::MeshLayer;
use super::ranks::Among;
use super::replicas::OnDevice;
use crate::error::EngineError;
use crate::layer::Layer;
use moesaic_collectives::{Call, Collectives, Element, Reduction, Slice};
use moesaic_plan::TensorId;

impl MeshLayer {
    /// Adds up the gradients of weights over the ranks that have the same weights: those
    /// of experts over the groups that hold all experts, and over the groups of ranks with
    /// replicas of an expert ([`Placement`](moesaic_plan::Placement)), those of slices of shared experts
    /// over the slices of the same number, all others over all ranks. They are then those of
    /// one process that had the tokens of all ranks, and the same bytes on every rank that
    /// has them. After any number of backward passes that add.
    ///
    /// A loss that is the mean over each rank's own tokens wants them divided by the
    /// number of ranks afterwards, those of experts too.
    ///
    /// # Errors
    /// [`EngineError::NotTraining`], [`EngineError::Collective`].
    pub fn reduce_gradients(&self) -> Result<(), EngineError> {
        self.replicated().check_training()?;
        let mut groups = self.mesh().groups();
        sum(self.replicated(), &mut *groups.world)?;
        sum(self.own(), &mut *groups.replicas)?;
        if let Some(shared) = self.shared() {
            sum(shared, groups.among(Among::SameSlice))?;
        }
        drop(groups);
        self.sum_replicas()
    }

    /// Of experts that several groups of ranks have, by way of the host.
    fn sum_replicas(&self) -> Result<(), EngineError> {
        let (own, experts) = (
            self.own(),
            self.plan().placement().count(self.mesh().place().ep),
        );
        let buffers = own.gradient_buffers()?;
        let _turn = own.lock_workspaces();
        let bytes = |tensor: TensorId| 4 * own.plan()[tensor].elements(0) as usize / experts;
        let each = buffers.iter();
        let mut slots = OnDevice {
            device: &*own.device,
            parts: each
                .map(|(tensor, buffer)| (buffer, bytes(tensor)))
                .collect(),
        };
        let what = format!("gradients of replicas of {}", own.spec().name);
        self.ranks().sum_slots(&mut slots, &what)
    }
}

fn sum(layer: &Layer, group: &mut dyn Collectives) -> Result<(), EngineError> {
    if group.size() == 1 {
        return Ok(());
    }
    let buffers = layer.gradient_buffers()?;
    let _turn = layer.lock_workspaces();
    let mut handles = Vec::new();
    for (tensor, _) in buffers.iter() {
        let plan = &layer.plan()[tensor];
        let buffer = buffers.handle(tensor).expect("it was just listed");
        let data = Slice::new(buffer, Element::F32, 0, plan.elements(0) as usize)?;
        let call = Call::new(&plan.name);
        handles.push(group.all_reduce(&data, &data, Reduction::Sum, &call)?);
    }
    for handle in handles {
        handle.wait()?;
    }
    Ok(())
}
