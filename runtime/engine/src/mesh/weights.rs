//! Weights and gradients of one rank's part of a layer, all parts under one set of names.

use super::layer::RankLayer;
use super::process_group::ProcessGroup;
use super::ranks::Ranks;
use crate::device_layer::DeviceLayer;
use crate::error::EngineError;
use moesaic_spec::canonical_tensors;
use moesaic_tensor::{Tensors, WeightSource};

impl RankLayer {
    /// Returns a handle to exchange host memory between the ranks of this layer.
    pub fn ranks(&self) -> Ranks {
        Ranks::new(self.mesh(), &self.replicated().device)
    }

    /// Returns this rank's part of a whole layer's weights: what every rank holds, its own experts,
    /// and its shards of shared ones. Only these are read.
    ///
    /// # Errors
    /// As [`part_of`](crate::part_of).
    pub fn weights_of(&self, whole: &dyn WeightSource) -> Result<Tensors<'static>, EngineError> {
        let tensors = canonical_tensors(self.replicated().spec());
        let each = tensors.into_iter();
        each.map(|tensor| {
            let part = self.mesh().part(whole, &tensor.name)?;
            Ok((tensor.name, part))
        })
        .collect()
    }

    /// Returns the gradients of the weights that this rank updates, by the weights' names, as the
    /// last backward passes or [`RankLayer::reduce_gradients`] left them.
    ///
    /// # Errors
    /// [`EngineError::NotTraining`].
    pub fn gradients(&self) -> Result<Tensors<'static>, EngineError> {
        let mut all = self.replicated().gradients()?;
        all.retain(|name, _| self.mesh().process_group(name) == ProcessGroup::World);
        all.extend(self.own().gradients()?);
        if let Some(shared) = self.shared() {
            all.extend(shared.gradients()?);
        }
        all.retain(|name, _| self.mesh().holds(name));
        Ok(all)
    }

    /// Returns the part that holds a weight.
    pub fn weight_layer(&self, name: &str) -> &DeviceLayer {
        match self.mesh().process_group(name) {
            ProcessGroup::ExpertDp => self.own(),
            ProcessGroup::EpDp => self.shared().unwrap_or(self.replicated()),
            _ => self.replicated(),
        }
    }
}
