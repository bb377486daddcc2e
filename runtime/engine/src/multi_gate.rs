//! One set of experts behind several routers, as in MMoE (Ma et al. 2018).

use crate::shared::Shared;
use crate::{Counters, Engine, EngineError, HostTensor, Input, Layer, Output, Saved, Weights};
use moesaic_plan::Training;
use moesaic_spec::LayerSpec;

/// Layers that differ in their routers and share experts: the same memory
/// holds weights and gradients of experts for all. With `top_k` as large as the
/// number of experts it is the published MMoE.
pub struct MultiGate {
    layers: Vec<Layer>,
}

impl Engine {
    /// Makes one layer per element of `routers`, the weights whose names begin
    /// with `router.`; all others are in `weights`, once for all layers. With
    /// `training` the layers can run backward.
    ///
    /// # Errors
    /// As [`Engine::layer`].
    pub fn multi_gate(
        &self,
        spec: &LayerSpec,
        weights: &Weights<'_>,
        routers: &[Weights<'_>],
        training: Option<Training>,
    ) -> Result<MultiGate, EngineError> {
        let tilings = self.tilings(spec, training)?;
        let plan = tilings.first();
        let device = &**self.device();
        let modules = &self.modules(&tilings)?[0];
        let shared = Shared::new(plan, modules, device, weights, |name| !is_own(name))?;
        let layers = routers.iter().map(|router| {
            let layer = self.layer_with(tilings.clone(), router, shared.weights())?;
            if training.is_some() {
                layer.share_gradients(shared.gradients())?;
            }
            Ok(layer)
        });
        let layers = layers.collect::<Result<Vec<Layer>, EngineError>>()?;
        Ok(MultiGate { layers })
    }
}

impl MultiGate {
    /// The layers, one per router. A layer's own `router.` weights and gradients
    /// are its own; those of experts are every layer's.
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// Runs every layer on the same tokens.
    ///
    /// # Errors
    /// As [`Layer::forward_with`].
    pub fn forward(&self, input: &Input<'_>, names: &[&str]) -> Result<Vec<Output>, EngineError> {
        let each = self.layers.iter();
        each.map(|layer| layer.forward_with(input, names)).collect()
    }

    /// As [`MultiGate::forward`], keeping what backward needs.
    ///
    /// # Errors
    /// As [`Layer::forward_train`].
    pub fn forward_train(
        &self,
        input: &Input<'_>,
        names: &[&str],
        counters: Counters,
    ) -> Result<Vec<(Output, Saved)>, EngineError> {
        let each = self.layers.iter();
        each.map(|layer| layer.forward_train(input, names, counters))
            .collect()
    }

    /// Runs every layer backward, in order, each from its own `dy`. Gradients of
    /// experts are the sum over the layers, those of a router its own. Each
    /// layer's `dx` is its part: the gradient of tokens that all read is their
    /// sum.
    ///
    /// # Errors
    /// As [`Layer::backward`].
    ///
    /// # Panics
    /// When there is not one saved state and one `dy` per layer.
    pub fn backward(
        &self,
        saved: &[Saved],
        dy: &[HostTensor<'_>],
        accumulate: bool,
    ) -> Result<Vec<Output>, EngineError> {
        let counts = [saved.len(), dy.len()];
        assert_eq!(counts, [self.layers.len(); 2], "saved states and dy");
        let calls = self.layers.iter().zip(saved).zip(dy).enumerate();
        calls
            .map(|(index, ((layer, saved), dy))| {
                // The first overwrites what all share, the others add to it.
                if index > 0 && !accumulate {
                    layer.zero_gradients_of(is_own)?;
                }
                layer.backward(saved, dy, accumulate || index > 0)
            })
            .collect()
    }
}

/// Whether a tensor is one router's.
fn is_own(name: &str) -> bool {
    name.trim_start_matches("grad.").starts_with("router.")
}
