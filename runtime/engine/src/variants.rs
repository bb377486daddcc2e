//! Variants of a layer: the same layer in several tilings over the same memory, for a tuner to
//! compare.

use crate::device_layer::check_spec;
use crate::engine::Engine;
use crate::error::EngineError;
use crate::layer::Layer;
use crate::shared::{Shared, same_memory};
use crate::texts::Texts;
use crate::tuned::Untuned;
use moesaic_plan::{Training, Tuning, plan};
use moesaic_spec::LayerSpec;
use moesaic_tensor::WeightSource;
use std::fmt;

/// One layer in any number of tilings. Weights and their gradients are in memory once.
pub struct Variants<'a> {
    engine: Engine,
    untuned: Untuned,
    weights: &'a dyn WeightSource,
    shared: Shared,
    training: bool,
}

impl fmt::Debug for Variants<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Variants")
            .field("engine", &self.engine)
            .finish_non_exhaustive()
    }
}

impl Engine {
    /// Makes the memory that all tilings of a layer use.
    ///
    /// # Errors
    /// As [`Engine::layer`].
    pub fn variants<'a>(
        &self,
        spec: &LayerSpec,
        weights: &'a dyn WeightSource,
        training: Option<Training>,
    ) -> Result<Variants<'a>, EngineError> {
        check_spec(spec)?;
        let plan = plan(spec, self.target(), &self.plan_options(training))?;
        let untuned = Untuned::new(plan);
        let plan = &untuned.plan;
        let modules = &self.modules(&Texts::of(plan.clone().into())?)?[0];
        let shared = Shared::new(plan, modules, &**self.device(), weights, |_| true)?;
        Ok(Variants {
            engine: self.clone(),
            untuned,
            weights,
            shared,
            training: training.is_some(),
        })
    }
}

impl Variants<'_> {
    /// Returns the layer as it is without a tuning.
    pub fn untuned(&self) -> &Untuned {
        &self.untuned
    }

    /// Returns the layer with these sizes.
    ///
    /// # Errors
    /// As [`Engine::layer`].
    pub fn layer(&self, tuning: &Tuning) -> Result<Layer, EngineError> {
        let plan = self.untuned.with(tuning)?;
        // A tuning that changed the layout of packed weights would read the shared memory wrongly.
        debug_assert!(same_memory(&plan, &self.untuned.plan), "{tuning:?}");
        let shared = self.shared.weights();
        let texts = Texts::of(plan.into())?;
        let layer = self
            .engine
            .device_layer_sharing(&texts, self.weights, shared)?;
        if self.training {
            layer.share_gradients(self.shared.gradients())?;
        }
        // The tilings write the same gradients, so two of them must not run at the same time.
        Ok(Layer::of_one(layer.taking_turns(&self.shared.turn)))
    }
}
