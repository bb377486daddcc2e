//! Weights and gradients of a layer, all parts of a rank under one set of names.

use super::form::{Form, Layer};
use crate::device_layer::DeviceLayer;
use crate::error::EngineError;
use crate::mesh::part_of;
use crate::router::is_of_router;
use moesaic_plan::{Parallel, RankCoords};
use moesaic_spec::canonical_tensors;
use moesaic_target::Ptr;
use moesaic_tensor::{Tensor, Tensors, WeightSource};

impl Layer {
    /// Returns the part that holds a weight and its gradient.
    fn part(&self, name: &str) -> &DeviceLayer {
        match &self.form {
            Form::One(layer) => layer,
            Form::Ranks(layer) => layer.weight_layer(name),
        }
    }

    /// Returns all parts that hold weights.
    fn parts(&self) -> Vec<&DeviceLayer> {
        match &self.form {
            Form::One(layer) => vec![layer],
            Form::Ranks(layer) => layer.parts().collect(),
        }
    }

    /// Replaces a weight, over ranks this rank's part of it, when no call of any [`Layer::handle`]
    /// is in flight. Earlier launches see the old values. Nothing is compared with other ranks:
    /// [`Layer::check_weights`] does.
    ///
    /// # Errors
    /// [`EngineError::Weight`] for an unknown name, dtype or shape.
    pub fn set_weight(&self, name: &str, tensor: &Tensor<'_>) -> Result<(), EngineError> {
        self.part(name).set_weight(name, tensor)
    }

    /// Compares the weights that several ranks hold, byte by byte as digests, as they are now:
    /// router, projections, shared experts, and the experts of `dp` groups and of replicas. Making a
    /// layer compares what every rank holds; call this after [`Layer::set_weight`], or now and then
    /// in training, when no call is in flight. All ranks call it; it reads all weights from the
    /// device once. Does nothing without ranks.
    ///
    /// # Errors
    /// [`EngineError::DifferentWeights`] on all ranks, naming weights and ranks;
    /// [`EngineError::Collective`], [`EngineError::Device`].
    pub fn check_weights(&self) -> Result<(), EngineError> {
        match &self.form {
            Form::One(_) => Ok(()),
            Form::Ranks(layer) => layer.check_weights(),
        }
    }

    /// Returns the address of a weight on the device, for an optimizer that runs there. `None` if
    /// the layer only has it packed, which a training layer never does.
    pub fn weight_ptr(&self, name: &str) -> Option<Ptr> {
        self.part(name).weight_ptr(name)
    }

    /// Returns what this layer holds of a whole layer's weights: over ranks what every rank holds,
    /// its own experts, and its shards of shared ones. Only these are read.
    ///
    /// # Errors
    /// Those of the source, by the name of the weight.
    pub fn weights_of(&self, whole: &dyn WeightSource) -> Result<Tensors<'static>, EngineError> {
        match &self.form {
            Form::Ranks(layer) => layer.weights_of(whole),
            Form::One(layer) => {
                let tensors = canonical_tensors(layer.spec()).into_iter();
                // The only rank of a mesh of one has the whole.
                let (mesh, place) = (
                    Parallel::default(),
                    RankCoords {
                        dp: 0,
                        ep: 0,
                        tp: 0,
                    },
                );
                let read = |name: String| Ok((name.clone(), part_of(mesh, place, whole, &name)?));
                tensors.map(|tensor| read(tensor.name)).collect()
            }
        }
    }

    /// Returns the gradient of a weight by its own name, such as `router.weight`, as the last
    /// backward passes left it: f32, of the weight's shape. Over ranks it is this rank's part, and
    /// zeros where another rank updates the weight.
    ///
    /// # Errors
    /// [`EngineError::NoOutput`] for a name without gradient, [`EngineError::Frozen`] for codes of
    /// experts; [`EngineError::NotTraining`].
    pub fn gradient(&self, name: &str) -> Result<Tensor<'static>, EngineError> {
        let gradient = self.part(name).gradient(name)?;
        // Shards add their last biases to one sum, so an optimizer must leave all but the first
        // shard's at zero.
        Ok(if self.mesh().is_none_or(|mesh| mesh.holds(name)) {
            gradient
        } else {
            Tensor::zeros(gradient.dtype, &gradient.shape)
        })
    }

    /// Returns the gradients of all weights that this rank updates, by the weights' names, as the
    /// last backward passes or [`Layer::reduce_gradients`] left them.
    ///
    /// # Errors
    /// As [`Layer::gradient`].
    pub fn gradients(&self) -> Result<Tensors<'static>, EngineError> {
        match &self.form {
            Form::One(layer) => layer.gradients(),
            Form::Ranks(layer) => layer.gradients(),
        }
    }

    /// Returns the address of a weight's gradient on the device, for an optimizer that runs there.
    /// `None` for a name without gradient.
    ///
    /// # Errors
    /// As [`Layer::gradient`].
    pub fn gradient_ptr(&self, name: &str) -> Result<Option<Ptr>, EngineError> {
        self.part(name).gradient_ptr(name)
    }

    /// Sets the gradients of all weights to zero.
    ///
    /// # Errors
    /// As [`Layer::gradient`].
    pub fn zero_gradients(&self) -> Result<(), EngineError> {
        let parts = self.parts();
        parts.into_iter().try_for_each(DeviceLayer::zero_gradients)
    }

    /// Sums gradients over the ranks that hold the same weights; does nothing without ranks.
    /// Gradients of experts are summed over `dp` groups and over groups with replicas of an expert
    /// ([`Placement`](moesaic_plan::Placement)), those of sharded shared experts over the shards of
    /// the same index, all others over all ranks. The sums equal the gradients of one process that
    /// has the tokens of all ranks, and are the same bytes on every rank that holds them. Call it
    /// after any number of backward passes that accumulate.
    ///
    /// Use it where the loss is a sum over tokens, as with `dy` of a mean over all ranks' tokens,
    /// and auxiliary losses have [`TokenScope::World`](moesaic_plan::TokenScope). If the loss is a
    /// mean over each rank's own tokens, use [`Layer::average_gradients`].
    ///
    /// # Errors
    /// [`EngineError::NotTraining`], [`EngineError::Collective`].
    pub fn reduce_gradients(&self) -> Result<(), EngineError> {
        match &self.form {
            Form::One(layer) => layer.check_training(),
            Form::Ranks(layer) => layer.reduce_gradients(),
        }
    }

    /// As [`Layer::reduce_gradients`], then divides all sums by the number of ranks, those of
    /// experts too: the gradients of the mean of all ranks' losses, as in data-parallel training.
    /// Use it where losses are means over a rank's own tokens, auxiliary ones of
    /// [`TokenScope::Rank`](moesaic_plan::TokenScope) included. Losses of
    /// [`TokenScope::World`](moesaic_plan::TokenScope) and the `global` loss are divided by the
    /// number of ranks, too. The division runs on the host.
    ///
    /// # Errors
    /// As [`Layer::reduce_gradients`].
    pub fn average_gradients(&self) -> Result<(), EngineError> {
        match &self.form {
            Form::One(layer) => layer.check_training(),
            Form::Ranks(layer) => layer.average_gradients(),
        }
    }

    /// Sets the gradients of the router to zero.
    pub(crate) fn zero_router_gradients(&self) -> Result<(), EngineError> {
        self.dispatch().zero_gradients_of(is_of_router)
    }

    /// Returns the bytes that a forward pass of `tokens` tokens keeps for backward; over ranks
    /// those of the dispatch part, because the rows of experts follow from routing.
    pub fn saved_bytes(&self, tokens: usize) -> u64 {
        self.dispatch().saved_bytes(tokens)
    }

    /// Makes this handle's calls read weights in memory of yours instead of the layer's, until the
    /// next `read_weights_at`; with no weights, calls read the layer's own again. For another
    /// library's parameters, which change between calls without a copy.
    ///
    /// # Safety
    /// Each address must be valid on the layer's device for the weight's size, and unchanged during
    /// each call, as long as calls read it.
    ///
    /// # Errors
    /// [`EngineError::Weight`] for a name that is no weight, or one that kernels do not read as it
    /// is: packed ones, and `router.table`, whose ids are checked when they are copied;
    /// [`EngineError::OverRanks`].
    #[doc(hidden)]
    pub unsafe fn read_weights_at(&self, weights: &[(&str, Ptr)]) -> Result<(), EngineError> {
        let layer = self.one("weights in memory of the caller")?;
        // SAFETY: the caller makes the same guarantees.
        unsafe { layer.read_weights_at(weights) }
    }

    /// Returns true if kernels read this weight as it is, so that [`Layer::read_weights_at`] can
    /// have it.
    #[doc(hidden)]
    pub fn reads_weight(&self, name: &str) -> bool {
        self.part(name).reads_weight(name)
    }
}
