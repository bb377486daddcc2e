//! A layer of one process or of a mesh, behind one set of calls.

use super::calls::MeshSaved;
use super::groups::Mesh;
use super::layer::MeshLayer;
use crate::call::{Input, Output, RawBackward, RawCall, RngKey};
use crate::engine::Engine;
use crate::error::EngineError;
use crate::layer::Layer;
use crate::trace::Recorder;
use crate::training::Saved;
use moesaic_plan::{LayerPlan, Strategy, Training};
use moesaic_spec::LayerSpec;
use moesaic_tensor::{Tensor, Tensors, WeightSource};
use std::sync::Arc;

/// A layer of one process, or one rank's part of a layer over ranks. Write code that serves both
/// against this type. On a mesh all ranks make every call, in the same order, each with its own
/// tokens; see [`MeshLayer`].
pub enum AnyLayer {
    /// A layer of one process.
    One(Box<Layer>),
    /// One rank's part of a layer over ranks.
    Mesh(Box<MeshLayer>),
}

/// The state that a forward pass of an [`AnyLayer`] keeps for backward.
pub enum AnySaved {
    /// The state of a layer of one process.
    One(Saved),
    /// The state of one rank.
    Mesh(Box<MeshSaved>),
}

impl AnySaved {
    /// Returns the tokens of the call; on a mesh those of this rank.
    pub fn tokens(&self) -> usize {
        match self {
            AnySaved::One(saved) => saved.tokens(),
            AnySaved::Mesh(saved) => saved.tokens(),
        }
    }
}

impl From<Layer> for AnyLayer {
    fn from(layer: Layer) -> AnyLayer {
        AnyLayer::One(Box::new(layer))
    }
}

impl From<MeshLayer> for AnyLayer {
    fn from(layer: MeshLayer) -> AnyLayer {
        AnyLayer::Mesh(Box::new(layer))
    }
}

impl Engine {
    /// Makes a layer, or this rank's part of it if there is a mesh; with `training` it can run
    /// backward. `weights` are those of the whole layer.
    ///
    /// # Errors
    /// As [`Engine::layer`] and [`Engine::mesh_layer`].
    pub fn any_layer(
        &self,
        mesh: Option<&Mesh>,
        spec: &LayerSpec,
        weights: &dyn WeightSource,
        training: Option<Training>,
    ) -> Result<AnyLayer, EngineError> {
        Ok(match (mesh, training) {
            (Some(mesh), _) => self.mesh_layer(mesh, spec, weights, training)?.into(),
            (None, Some(training)) => self.training_layer(spec, weights, training)?.into(),
            (None, None) => self.layer(spec, weights)?.into(),
        })
    }
}

impl AnyLayer {
    /// Returns the layer, if it is of one process. `asked` names the purpose in the error.
    ///
    /// # Errors
    /// [`EngineError::OverRanks`].
    pub fn one(&self, asked: &'static str) -> Result<&Layer, EngineError> {
        match self {
            AnyLayer::One(layer) => Ok(layer),
            AnyLayer::Mesh(_) => Err(EngineError::OverRanks { asked }),
        }
    }

    /// Returns the rank's part, if the layer is over ranks. `asked` names the purpose in the error.
    ///
    /// # Errors
    /// [`EngineError::NotOverRanks`].
    pub fn over_ranks(&self, asked: &'static str) -> Result<&MeshLayer, EngineError> {
        match self {
            AnyLayer::One(_) => Err(EngineError::NotOverRanks { asked }),
            AnyLayer::Mesh(layer) => Ok(layer),
        }
    }

    /// Returns the mesh, if there is one.
    pub fn mesh(&self) -> Option<&Mesh> {
        match self {
            AnyLayer::One(_) => None,
            AnyLayer::Mesh(layer) => Some(layer.mesh()),
        }
    }

    /// Returns the spec of the whole layer.
    pub fn spec(&self) -> &LayerSpec {
        &self.plan().spec
    }

    /// Returns the plan with the inputs and outputs of a call: on a mesh the dispatch part's.
    pub fn plan(&self) -> &LayerPlan {
        match self {
            AnyLayer::One(layer) => layer.plan(),
            AnyLayer::Mesh(layer) => &layer.plan().tokens,
        }
    }

    /// Returns the layer that holds a weight and its gradient: on a mesh this rank's experts, its
    /// shards of shared experts, or the part that every rank has.
    pub fn weight_layer(&self, name: &str) -> &Layer {
        match self {
            AnyLayer::One(layer) => layer,
            AnyLayer::Mesh(layer) => layer.weight_layer(name),
        }
    }

    /// Sets the recorder of every launch, and on a mesh of every exchange; `None` removes it. See
    /// [`Layer::record`].
    pub fn record(&mut self, recorder: Option<Arc<dyn Recorder>>) {
        match self {
            AnyLayer::One(layer) => layer.record(recorder),
            AnyLayer::Mesh(layer) => layer.record(recorder),
        }
    }

    /// Sets the strategy of calls from now on: [`MeshLayer::set_strategy`].
    ///
    /// # Errors
    /// As [`MeshLayer::set_strategy`]; [`EngineError::NotOverRanks`] for a layer of one process,
    /// which has no strategy. [`AnyLayer::mesh`] tells the two apart.
    pub fn set_strategy(&mut self, strategy: Strategy) -> Result<(), EngineError> {
        match self {
            AnyLayer::One(_) => Err(EngineError::NotOverRanks {
                asked: "a strategy",
            }),
            AnyLayer::Mesh(layer) => layer.set_strategy(strategy),
        }
    }

    /// Evaluates the layer and reads back `y`.
    ///
    /// # Errors
    /// As [`AnyLayer::forward_with`].
    pub fn forward(&self, input: &Input<'_>) -> Result<Output, EngineError> {
        self.forward_with(input, &["y"])
    }

    /// Evaluates the layer and reads back the named outputs.
    ///
    /// # Errors
    /// As [`Layer::forward_with`] and [`MeshLayer::forward_with`].
    pub fn forward_with(&self, input: &Input<'_>, names: &[&str]) -> Result<Output, EngineError> {
        match self {
            AnyLayer::One(layer) => layer.forward_with(input, names),
            AnyLayer::Mesh(layer) => layer.forward_with(input, names),
        }
    }

    /// Routes tokens as [`AnyLayer::forward_with`] does, and stops there.
    ///
    /// # Errors
    /// As [`Layer::route`] and [`MeshLayer::route`].
    pub fn route(&self, input: &Input<'_>, names: &[&str]) -> Result<Output, EngineError> {
        match self {
            AnyLayer::One(layer) => layer.route(input, names),
            AnyLayer::Mesh(layer) => layer.route(input, names),
        }
    }

    /// Routes tokens as [`AnyLayer::forward_train`] does with the same rng_key, and stops there.
    ///
    /// # Errors
    /// As [`Layer::route_train`] and [`MeshLayer::route_train`].
    pub fn route_train(
        &self,
        input: &Input<'_>,
        names: &[&str],
        rng_key: RngKey,
    ) -> Result<Output, EngineError> {
        match self {
            AnyLayer::One(layer) => layer.route_train(input, names, rng_key),
            AnyLayer::Mesh(layer) => layer.route_train(input, names, rng_key),
        }
    }

    /// Runs a training forward pass, reads back the named outputs, and keeps the state that
    /// backward needs. On a mesh `rng_key.first_token` is that of the first rank.
    ///
    /// # Errors
    /// As [`Layer::forward_train`] and [`MeshLayer::forward_train`].
    pub fn forward_train(
        &self,
        input: &Input<'_>,
        names: &[&str],
        rng_key: RngKey,
    ) -> Result<(Output, AnySaved), EngineError> {
        match self {
            AnyLayer::One(layer) => {
                let (output, saved) = layer.forward_train(input, names, rng_key)?;
                Ok((output, AnySaved::One(saved)))
            }
            AnyLayer::Mesh(layer) => {
                let (output, saved) = layer.forward_train(input, names, rng_key)?;
                Ok((output, AnySaved::Mesh(Box::new(saved))))
            }
        }
    }

    /// Runs the layer backward from `dy`; gradients of weights stay with the layer. On a
    /// mesh they are this rank's until [`AnyLayer::reduce_gradients`].
    ///
    /// # Errors
    /// As [`Layer::backward`] and [`MeshLayer::backward`].
    pub fn backward(
        &self,
        saved: &AnySaved,
        dy: &Tensor<'_>,
        accumulate: bool,
    ) -> Result<Output, EngineError> {
        match (self, saved) {
            (AnyLayer::One(layer), AnySaved::One(saved)) => layer.backward(saved, dy, accumulate),
            (AnyLayer::Mesh(layer), AnySaved::Mesh(saved)) => layer.backward(saved, dy, accumulate),
            _ => Err(EngineError::ForeignSaved),
        }
    }

    /// As [`AnyLayer::forward_with`], on device memory that the caller owns, in stream order.
    /// Without ranks nothing is waited for.
    ///
    /// # Safety
    /// As [`Layer::forward_raw`] and [`MeshLayer::forward_raw`].
    ///
    /// # Errors
    /// As [`Layer::forward_raw`] and [`MeshLayer::forward_raw`].
    pub unsafe fn forward_raw(&self, call: &RawCall<'_>) -> Result<(), EngineError> {
        // SAFETY: the caller makes the same guarantees.
        unsafe {
            match self {
                AnyLayer::One(layer) => layer.forward_raw(call),
                AnyLayer::Mesh(layer) => layer.forward_raw(call),
            }
        }
    }

    /// As [`AnyLayer::route`], on device memory that the caller owns.
    ///
    /// # Safety
    /// As [`AnyLayer::forward_raw`].
    ///
    /// # Errors
    /// As [`AnyLayer::forward_raw`].
    pub unsafe fn route_raw(&self, call: &RawCall<'_>) -> Result<(), EngineError> {
        // SAFETY: the caller makes the same guarantees.
        unsafe {
            match self {
                AnyLayer::One(layer) => layer.route_raw(call),
                AnyLayer::Mesh(layer) => layer.route_raw(call),
            }
        }
    }

    /// As [`AnyLayer::route_train`], on device memory that the caller owns.
    ///
    /// # Safety
    /// As [`AnyLayer::forward_raw`].
    ///
    /// # Errors
    /// As [`Layer::route_train_raw`] and [`MeshLayer::route_train_raw`].
    pub unsafe fn route_train_raw(
        &self,
        call: &RawCall<'_>,
        rng_key: RngKey,
    ) -> Result<(), EngineError> {
        // SAFETY: the caller makes the same guarantees.
        unsafe {
            match self {
                AnyLayer::One(layer) => layer.route_train_raw(call, rng_key),
                AnyLayer::Mesh(layer) => layer.route_train_raw(call, rng_key),
            }
        }
    }

    /// As [`AnyLayer::forward_train`], on device memory that the caller owns.
    ///
    /// # Safety
    /// As [`Layer::forward_train_raw`] and [`MeshLayer::forward_train_raw`].
    ///
    /// # Errors
    /// As [`Layer::forward_train_raw`] and [`MeshLayer::forward_train_raw`].
    pub unsafe fn forward_train_raw(
        &self,
        call: &RawCall<'_>,
        rng_key: RngKey,
    ) -> Result<AnySaved, EngineError> {
        // SAFETY: the caller makes the same guarantees.
        unsafe {
            Ok(match self {
                AnyLayer::One(layer) => AnySaved::One(layer.forward_train_raw(call, rng_key)?),
                AnyLayer::Mesh(layer) => {
                    AnySaved::Mesh(layer.forward_train_raw(call, rng_key)?.into())
                }
            })
        }
    }

    /// As [`AnyLayer::backward`], on device memory that the caller owns.
    ///
    /// # Safety
    /// As [`Layer::backward_raw`] and [`MeshLayer::backward_raw`].
    ///
    /// # Errors
    /// As [`Layer::backward_raw`] and [`MeshLayer::backward_raw`].
    pub unsafe fn backward_raw(
        &self,
        saved: &AnySaved,
        call: &RawBackward<'_>,
    ) -> Result<(), EngineError> {
        // SAFETY: the caller makes the same guarantees.
        unsafe {
            match (self, saved) {
                (AnyLayer::One(layer), AnySaved::One(saved)) => layer.backward_raw(saved, call),
                (AnyLayer::Mesh(layer), AnySaved::Mesh(saved)) => layer.backward_raw(saved, call),
                _ => Err(EngineError::ForeignSaved),
            }
        }
    }

    /// Sums gradients over the ranks that hold the same weights; does nothing without ranks. Call
    /// it after any number of backward passes that accumulate.
    ///
    /// # Errors
    /// As [`MeshLayer::reduce_gradients`].
    pub fn reduce_gradients(&self) -> Result<(), EngineError> {
        match self {
            AnyLayer::One(layer) => layer.check_training(),
            AnyLayer::Mesh(layer) => layer.reduce_gradients(),
        }
    }

    /// As [`AnyLayer::reduce_gradients`], divided by the number of ranks.
    ///
    /// # Errors
    /// As [`MeshLayer::average_gradients`].
    pub fn average_gradients(&self) -> Result<(), EngineError> {
        match self {
            AnyLayer::One(layer) => layer.check_training(),
            AnyLayer::Mesh(layer) => layer.average_gradients(),
        }
    }

    /// Returns the gradient of a weight: on a mesh this rank's part of it, and zeros where another
    /// rank updates the weight.
    ///
    /// # Errors
    /// As [`Layer::gradient`].
    pub fn gradient(&self, name: &str) -> Result<Tensor<'static>, EngineError> {
        let gradient = self.weight_layer(name).gradient(name)?;
        // Shards add their last biases to one sum, so an optimizer must leave all but the first
        // shard's at zero.
        Ok(if self.mesh().is_none_or(|mesh| mesh.holds(name)) {
            gradient
        } else {
            Tensor::zeros(gradient.dtype, &gradient.shape)
        })
    }

    /// Returns the gradients of all weights that this rank updates, by the weights' names.
    ///
    /// # Errors
    /// As [`Layer::gradients`].
    pub fn gradients(&self) -> Result<Tensors<'static>, EngineError> {
        match self {
            AnyLayer::One(layer) => layer.gradients(),
            AnyLayer::Mesh(layer) => layer.gradients(),
        }
    }

    /// Replaces a weight, on a mesh this rank's part of it, when no call is in flight.
    ///
    /// # Errors
    /// As [`Layer::set_weight`].
    pub fn set_weight(&self, name: &str, tensor: &Tensor<'_>) -> Result<(), EngineError> {
        self.weight_layer(name).set_weight(name, tensor)
    }
}
