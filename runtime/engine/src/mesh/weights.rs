//! Weights and gradients of a rank's part of a layer, both parts under one set of names.

use super::layer::MeshLayer;
use super::ranks::{ProcessGroup, Ranks};
use crate::error::EngineError;
use crate::layer::Layer;
use moesaic_spec::canonical_tensors;
use moesaic_tensor::{Tensor, Tensors, WeightSource};

impl MeshLayer {
    /// The ranks of this layer, to exchange what lies in host memory.
    pub fn ranks(&self) -> Ranks {
        Ranks::new(self.mesh(), &self.replicated().device)
    }

    /// This rank's part of the weights of the whole layer: what is not of experts, its own
    /// experts, and its shards of shared ones. Only that is read.
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

    /// Gradients of the weights that this rank moves, by the weights' names, as the last
    /// backward passes or [`MeshLayer::reduce_gradients`] left them.
    ///
    /// # Errors
    /// [`EngineError::NotTraining`].
    pub fn gradients(&self) -> Result<Tensors<'static>, EngineError> {
        let mut all = self.replicated().gradients()?;
        all.retain(|name, _| self.mesh().among(name) == ProcessGroup::World);
        all.extend(self.own().gradients()?);
        if let Some(shared) = self.shared() {
            all.extend(shared.gradients()?);
        }
        all.retain(|name, _| self.mesh().holds(name));
        Ok(all)
    }

    /// Replaces this rank's part of a weight, when no call is in flight.
    ///
    /// # Errors
    /// As [`Layer::set_weight`].
    pub fn set_weight(&self, name: &str, tensor: &Tensor<'_>) -> Result<(), EngineError> {
        self.side_of(name).set_weight(name, tensor)
    }

    /// The side whose weight it is.
    pub fn side_of(&self, name: &str) -> &Layer {
        match self.mesh().among(name) {
            ProcessGroup::ExpertDp => self.own(),
            ProcessGroup::EpDp => self.shared().unwrap_or(self.replicated()),
            _ => self.replicated(),
        }
    }
}
