//! The options of a layer, and how an engine makes one.

use super::form::{Form, Layer, StrategyTuner};
use crate::engine::Engine;
use crate::error::EngineError;
use crate::mesh::Mesh;
use crate::numbers::Numbers;
use crate::place::check_names;
use moesaic_plan::{Strategy, Training};
use moesaic_spec::LayerSpec;
use moesaic_tensor::WeightSource;
use std::sync::Arc;

/// The options of a layer.
#[derive(Clone, Debug, Default)]
pub struct LayerOptions<'m> {
    /// The memory that backward may use; `None` makes a layer for inference.
    pub training: Option<Training>,
    /// The ranks that share the layer. All of them make it, and all pass the same options.
    pub mesh: Option<&'m Mesh>,
    /// Whether the weights are this rank's part alone, as [`Mesh::part`] returns it, instead of
    /// the whole layer's.
    pub part: bool,
    /// The first strategy of the ranks; see [`Layer::set_strategy`].
    pub strategy: Option<Strategy>,
    /// The tuner that chooses the strategy of each call; see [`Layer::set_tuner`].
    pub tuner: Option<Arc<dyn StrategyTuner>>,
}

impl<'m> LayerOptions<'m> {
    /// Refuses options of ranks, for a layer of one process.
    pub(crate) fn check_one(&self) -> Result<(), EngineError> {
        let of_ranks = [
            (self.part, "a part of the weights"),
            (self.strategy.is_some(), "a strategy"),
            (self.tuner.is_some(), "a tuner of strategies"),
        ];
        match of_ranks.iter().find(|(given, _)| *given) {
            Some(&(_, asked)) => Err(EngineError::NotOverRanks { asked }),
            None => Ok(()),
        }
    }

    /// Options of a layer over ranks.
    pub fn over(mesh: &'m Mesh) -> LayerOptions<'m> {
        LayerOptions {
            mesh: Some(mesh),
            ..LayerOptions::default()
        }
    }

    /// Returns these options, for a layer that can run backward.
    #[must_use]
    pub fn training(self, training: impl Into<Option<Training>>) -> LayerOptions<'m> {
        LayerOptions {
            training: training.into(),
            ..self
        }
    }
}

impl Engine {
    /// Makes a layer for inference of one process. `moesaic::Engine` documents this and what follows.
    pub fn layer(
        &self,
        spec: &LayerSpec,
        weights: &dyn WeightSource,
    ) -> Result<Layer, EngineError> {
        self.layer_with(spec, weights, LayerOptions::default())
    }

    /// Makes a layer of one process that can run backward.
    pub fn training_layer(
        &self,
        spec: &LayerSpec,
        weights: &dyn WeightSource,
        training: Training,
    ) -> Result<Layer, EngineError> {
        self.layer_with(spec, weights, LayerOptions::default().training(training))
    }

    /// Makes a layer with options: for training, over ranks, with a strategy.
    pub fn layer_with(
        &self,
        spec: &LayerSpec,
        weights: &dyn WeightSource,
        options: LayerOptions<'_>,
    ) -> Result<Layer, EngineError> {
        check_names(spec, weights)?;
        let LayerOptions { training, mesh, .. } = options;
        let mut layer = match mesh {
            Some(mesh) if options.part => {
                let layer = self.rank_layer_of_part(mesh, spec, weights, training)?;
                Layer::over_ranks(layer)
            }
            Some(mesh) => Layer::over_ranks(self.rank_layer(mesh, spec, weights, training)?),
            None => {
                options.check_one()?;
                let weights = Numbers::new(spec, self.target(), weights);
                Layer::of_one(self.device_layer(&self.texts(spec, training)?, &weights)?)
            }
        };
        // After the layer is there, because ranks compare strategies by a call of its mesh, and
        // before the tuner, whose first choice is compared with the present one.
        if let Some(strategy) = options.strategy {
            layer.set_strategy(strategy)?;
        }
        if options.tuner.is_some() {
            layer.set_tuner(options.tuner)?;
        }
        Ok(layer)
    }

    /// Makes a layer whose routed experts are those of `bank`, in the same memory.
    pub fn layer_over_experts_of(
        &self,
        bank: &Layer,
        spec: &LayerSpec,
        weights: &dyn WeightSource,
    ) -> Result<Layer, EngineError> {
        check_names(spec, weights)?;
        match &bank.form {
            Form::One(bank) => {
                let texts = self.texts(spec, bank.plan().training)?;
                let weights = Numbers::new(spec, self.target(), weights);
                let layer = self.device_layer_over(&texts, &weights, bank)?;
                Ok(Layer::of_one(layer))
            }
            Form::Ranks(bank) => Ok(Layer::over_ranks(
                self.rank_layer_over(bank, spec, weights)?,
            )),
        }
    }

    /// Makes a training layer without weights: each call names the address of every one.
    pub fn layer_without_weights(
        &self,
        spec: &LayerSpec,
        training: Training,
    ) -> Result<Layer, EngineError> {
        let layer = self.borrowing_layer(&self.texts(spec, Some(training))?)?;
        Ok(Layer::of_one(layer))
    }
}
