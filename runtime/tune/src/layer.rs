//! A layer that measures its own steps.

use crate::{Key, Prediction, Record, Rows, Times, Tuner};
use moesaic_engine::{Among, Counters, EngineError, Input, MeshLayer, MeshSaved, Output};
use moesaic_plan::Strategy;
use moesaic_tensor::Tensor;
use std::time::Instant;

/// What strategies are predicted to take for a key; nothing, where nothing is predicted.
pub type Predict = Box<dyn FnMut(&Key) -> Vec<Prediction> + Send>;

/// A rank's part of a layer whose ranks choose together how they carry out each step.
///
/// Each training step is a real one, whatever is tried with it. Ranks tell each other how
/// many tokens they have before it, and what its passes took after it: two exchanges of
/// two numbers.
pub struct AdaptiveLayer {
    layer: MeshLayer,
    tuner: Tuner,
    machine: String,
    name: String,
    predict: Predict,
}

/// What a forward pass of an [`AdaptiveLayer`] left for backward.
pub struct AdaptiveSaved {
    saved: MeshSaved,
    key: Key,
    strategy: Strategy,
    forward: f64,
}

impl AdaptiveSaved {
    /// How this step is carried out.
    pub fn strategy(&self) -> Strategy {
        self.strategy
    }
}

impl AdaptiveLayer {
    /// A layer with a tuner. `machine` says what devices and libraries ranks have, so that
    /// choices of one machine are not taken on another. All ranks give the same.
    pub fn new(layer: MeshLayer, tuner: Tuner, machine: &str, predict: Predict) -> AdaptiveLayer {
        let plan = layer.plan();
        let name = format!("{} on {:?}", plan.tokens.spec.name, plan.mesh);
        AdaptiveLayer {
            layer,
            tuner,
            machine: machine.to_string(),
            name,
            predict,
        }
    }

    /// The layer, for all that is no step of training.
    pub fn layer(&self) -> &MeshLayer {
        &self.layer
    }

    /// What was decided so far.
    pub fn tuner(&self) -> &Tuner {
        &self.tuner
    }

    /// What is kept, for [`write`](crate::write()).
    pub fn records(&self) -> Vec<Record> {
        self.tuner.records()
    }

    /// The layer again, as it is now.
    pub fn into_layer(self) -> MeshLayer {
        self.layer
    }

    /// As [`MeshLayer::forward_train`], with the strategy that the tuner chooses.
    ///
    /// # Errors
    /// As [`MeshLayer::forward_train`].
    pub fn forward_train(
        &mut self,
        input: &Input<'_>,
        names: &[&str],
        counters: Counters,
    ) -> Result<(Output, AdaptiveSaved), EngineError> {
        let [tokens, _] = self.largest([input.tokens as f64, 0.0], "tokens of a step")?;
        let key = self.key(tokens as usize);
        let strategy = self.tuner.choose(&key, || (self.predict)(&key));
        self.layer.set_strategy(strategy)?;
        let started = Instant::now();
        let (output, saved) = self.layer.forward_train(input, names, counters)?;
        let saved = AdaptiveSaved {
            saved,
            key,
            strategy,
            forward: started.elapsed().as_secs_f64(),
        };
        Ok((output, saved))
    }

    /// As [`MeshLayer::backward`], of a forward pass of this layer; ranks then agree on what
    /// the step took.
    ///
    /// # Errors
    /// As [`MeshLayer::backward`].
    pub fn backward(
        &mut self,
        saved: &AdaptiveSaved,
        dy: &Tensor<'_>,
        accumulate: bool,
    ) -> Result<Output, EngineError> {
        let started = Instant::now();
        let output = self.layer.backward(&saved.saved, dy, accumulate)?;
        let own = [saved.forward, started.elapsed().as_secs_f64()];
        let [forward, backward] = self.largest(own, "what a step took")?;
        let times = Times { forward, backward };
        self.tuner.observe(&saved.key, saved.strategy, times);
        Ok(output)
    }

    fn key(&self, most: usize) -> Key {
        Key {
            machine: self.machine.clone(),
            layer: self.name.clone(),
            rows: Rows::of_tokens(most),
        }
    }

    /// The largest of all ranks, of each number.
    fn largest(&self, own: [f64; 2], what: &str) -> Result<[f64; 2], EngineError> {
        let largest = self.layer.ranks().max_f64(&own, Among::World, what)?;
        Ok([largest[0], largest[1]])
    }
}
