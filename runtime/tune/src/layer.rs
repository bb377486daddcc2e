//! A layer that measures its own steps.

use crate::{Key, Prediction, Record, Rows, Times, Tuner};
use moesaic_engine::{Among, Counters, EngineError, Input, MeshLayer, MeshSaved, Output};
use moesaic_plan::{Strategy, most_rows};
use moesaic_tensor::Tensor;
use std::time::Instant;

/// Rows of every rank for every expert in a call, before a capacity drops any.
pub type Loads = Vec<Vec<u64>>;

/// What strategies are predicted to take for a key in a step with such loads; nothing, where
/// nothing is predicted.
pub type Predict = Box<dyn FnMut(&Key, &Loads) -> Vec<Prediction> + Send>;

/// A rank's part of a layer whose ranks choose together how they carry out each step.
///
/// Each training step is a real one, whatever is tried with it. Before it ranks tell each
/// other how many tokens they have, and what the passes of the step before took: one exchange
/// of three numbers. Where strategies are predicted, for a key that is new or whose steps have
/// come to take another time, each rank routes its tokens once more, and all tell each other
/// their rows.
pub struct AdaptiveLayer {
    layer: MeshLayer,
    tuner: Tuner,
    machine: String,
    name: String,
    predict: Predict,
    /// Steps of which ranks have not yet told each other what they took.
    untold: Vec<Step>,
}

/// A step, and what its passes took this rank.
struct Step {
    key: Key,
    strategy: Strategy,
    own: Times,
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
        AdaptiveLayer {
            tuner,
            machine: machine.to_string(),
            name: layer.identity(),
            layer,
            predict,
            untold: Vec::new(),
        }
    }

    /// The layer, for all that is no step of training.
    pub fn layer(&self) -> &MeshLayer {
        &self.layer
    }

    /// What was decided so far. It is told of a step when the next one begins.
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
        let tokens = self.agree(input.tokens)?;
        let key = self.key(tokens, input.capacity_factor);
        let loads = if self.tuner.asks(&key) {
            self.layer.loads(input, counters)?
        } else {
            Loads::new()
        };
        let strategy = self.tuner.choose(&key, || (self.predict)(&key, &loads));
        // Ranks that choose tell each other: an exchange more.
        if strategy != self.layer.strategy() {
            self.layer.set_strategy(strategy)?;
        }
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

    /// As [`MeshLayer::backward`], of a forward pass of this layer.
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
        self.untold.push(Step {
            key: saved.key.clone(),
            strategy: saved.strategy,
            own: Times {
                forward: saved.forward,
                backward: started.elapsed().as_secs_f64(),
            },
        });
        Ok(output)
    }

    /// The most tokens of any rank. The tuner learns when the last of all ended the last steps.
    fn agree(&mut self, tokens: usize) -> Result<usize, EngineError> {
        let mut own = vec![tokens as f64];
        own.extend(self.untold.iter().flat_map(|step| step.own.ends()));
        let ranks = self.layer.ranks();
        let what = "tokens of a step, and what those before it took";
        let largest = ranks.max_f64(&own, Among::World, what)?;
        for (step, last) in self.untold.drain(..).zip(largest[1..].as_chunks::<2>().0) {
            let times = Times::of_last(*last);
            self.tuner.observe(&step.key, step.strategy, times);
        }
        Ok(largest[0] as usize)
    }

    fn key(&self, most: usize, factor: Option<f64>) -> Key {
        let spec = &self.layer.plan().tokens.spec;
        let factor = factor.unwrap_or(spec.capacity.factor_of(true));
        let capacity = most_rows(spec, factor, most as u64);
        Key {
            machine: self.machine.clone(),
            layer: self.name.clone(),
            rows: Rows::of(most, capacity),
        }
    }
}
