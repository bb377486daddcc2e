//! A layer that measures its own steps.

use crate::{Calls, Key, Prediction, Record, Rows, Times, Tuner};
use moesaic_engine::{
    Counters, EngineError, Input, MeshLayer, MeshSaved, Output, ProcessGroup, Timestamp,
};
use moesaic_plan::{Strategy, most_rows};
use moesaic_tensor::Tensor;
use std::sync::Arc;
use std::time::Instant;

/// Rows of every rank for every expert in a call, before a capacity drops any.
pub type Loads = Vec<Vec<u64>>;

/// What strategies are predicted to take for a key in a step with such loads; nothing, where
/// nothing is predicted.
pub type Predict = Box<dyn FnMut(&Key, &Loads) -> Vec<Prediction> + Send>;

/// A rank's part of a layer whose ranks choose together how they carry out each step, and each
/// evaluation.
///
/// Each of them is a real one, whatever is tried with it. Before it ranks tell each
/// other how many tokens they have, and what the passes of the step before took: one exchange
/// of three numbers. Evaluations have choices of their own, and, as steps of training, one for
/// each power of two of tokens: few tokens at a time have another one than many. A call that
/// needs no choice is one of [`AdaptiveLayer::layer`]: it has what was chosen last, and no
/// exchange before it.
///
/// Where strategies are predicted, for a key that is new or whose steps have
/// come to take another time, each rank all-to-all algorithms its tokens once more, and all tell each other
/// their rows.
pub struct AdaptiveLayer {
    pub(crate) layer: MeshLayer,
    tuner: Tuner,
    machine: String,
    name: String,
    predict: Predict,
    /// Steps of which ranks have not yet told each other what they took.
    untold: Vec<Step>,
}

/// A step, and what its passes took this rank.
struct Step {
    chosen: Chosen,
    /// The forward pass, and the backward pass if there is one.
    passes: Vec<Pass>,
}

/// What was chosen for a call.
#[derive(Clone)]
pub(crate) struct Chosen {
    key: Key,
    strategy: Strategy,
}

/// What a pass took.
#[derive(Clone)]
pub(crate) enum Pass {
    /// Seconds, of a call that waits.
    Seconds(f64),
    /// From one moment to the other, of a call that does not.
    Between(Arc<[Timestamp; 2]>),
}

impl Pass {
    fn seconds(&self) -> Result<f64, EngineError> {
        match self {
            Pass::Seconds(seconds) => Ok(*seconds),
            Pass::Between(moments) => moments[1].seconds_since(&moments[0]),
        }
    }
}

impl Step {
    /// When each pass ended, since the step began.
    fn ends(&self) -> Result<[f64; 2], EngineError> {
        let of = |pass: usize| self.passes.get(pass).map_or(Ok(0.0), Pass::seconds);
        let times = Times {
            forward: of(0)?,
            backward: of(1)?,
        };
        Ok(times.ends())
    }
}

/// What a forward pass of an [`AdaptiveLayer`] left for backward.
pub struct AdaptiveSaved {
    pub(crate) saved: MeshSaved,
    pub(crate) chosen: Chosen,
    pub(crate) forward: Pass,
}

impl AdaptiveSaved {
    /// How this step is carried out.
    pub fn strategy(&self) -> Strategy {
        self.chosen.strategy
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

    /// The layer, for all that needs no choice.
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
        let asked = (Calls::Training, input.tokens, input.capacity_factor);
        let chosen = self.choose(asked, |layer| layer.tokens_per_expert(input, counters))?;
        let started = Instant::now();
        let (output, saved) = self.layer.forward_train(input, names, counters)?;
        let saved = AdaptiveSaved {
            saved,
            chosen,
            forward: since(started),
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
        let passes = [saved.forward.clone(), since(started)];
        self.took(saved.chosen.clone(), passes);
        Ok(output)
    }

    /// As [`MeshLayer::forward`], with the strategy that the tuner chooses for evaluations.
    ///
    /// # Errors
    /// As [`MeshLayer::forward`].
    pub fn forward(&mut self, input: &Input<'_>) -> Result<Output, EngineError> {
        self.forward_with(input, &["y"])
    }

    /// As [`MeshLayer::forward_with`], with the strategy that the tuner chooses for evaluations.
    ///
    /// # Errors
    /// As [`MeshLayer::forward_with`].
    pub fn forward_with(
        &mut self,
        input: &Input<'_>,
        names: &[&str],
    ) -> Result<Output, EngineError> {
        let asked = (Calls::Evaluation, input.tokens, input.capacity_factor);
        let chosen = self.choose(asked, |layer| layer.evaluation_tokens_per_expert(input))?;
        let started = Instant::now();
        let output = self.layer.forward_with(input, names)?;
        self.took(chosen, [since(started)]);
        Ok(output)
    }

    /// Chooses how a call with so many tokens is carried out, and has the layer do it so. `loads`
    /// are asked for where strategies are predicted.
    pub(crate) fn choose(
        &mut self,
        (calls, tokens, factor): (Calls, usize, Option<f64>),
        loads: impl FnOnce(&MeshLayer) -> Result<Loads, EngineError>,
    ) -> Result<Chosen, EngineError> {
        let most = self.agree(tokens)?;
        let key = self.key(calls, most, factor);
        let loads = if self.tuner.asks(&key) {
            loads(&self.layer)?
        } else {
            Loads::new()
        };
        let strategy = self.tuner.choose(&key, || (self.predict)(&key, &loads));
        // Ranks that choose tell each other: an exchange more.
        if strategy != self.layer.strategy() {
            self.layer.set_strategy(strategy)?;
        }
        Ok(Chosen { key, strategy })
    }

    /// Notes what the passes of a step took; ranks tell each other when the next one begins.
    pub(crate) fn took(&mut self, chosen: Chosen, passes: impl Into<Vec<Pass>>) {
        let passes = passes.into();
        self.untold.push(Step { chosen, passes });
    }

    /// The most tokens of any rank. The tuner learns when the last of all ended the last steps.
    fn agree(&mut self, tokens: usize) -> Result<usize, EngineError> {
        let mut own = vec![tokens as f64];
        for step in &self.untold {
            own.extend(step.ends()?);
        }
        let ranks = self.layer.ranks();
        let what = "tokens of a step, and what those before it took";
        let largest = ranks.max_f64(&own, ProcessGroup::World, what)?;
        for (step, last) in self.untold.drain(..).zip(largest[1..].as_chunks::<2>().0) {
            let times = Times::of_last(*last);
            let Chosen { key, strategy } = step.chosen;
            self.tuner.observe(&key, strategy, times);
        }
        Ok(largest[0] as usize)
    }

    fn key(&self, calls: Calls, most: usize, factor: Option<f64>) -> Key {
        let spec = &self.layer.plan().tokens.spec;
        let factor = factor.unwrap_or(spec.capacity.factor_of(calls.train()));
        let capacity = most_rows(spec, factor, most as u64);
        Key {
            machine: self.machine.clone(),
            layer: self.name.clone(),
            calls,
            rows: Rows::of(most, capacity),
        }
    }
}

/// What a pass took that has ended now.
fn since(started: Instant) -> Pass {
    Pass::Seconds(started.elapsed().as_secs_f64())
}
