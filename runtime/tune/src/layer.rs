//! A layer that times its own steps.

use crate::{Calls, Key, Prediction, Record, Rows, Times, Tuner};
use moesaic_engine::{
    EngineError, Input, MeshLayer, MeshSaved, Output, ProcessGroup, RngKey, Timestamp,
};
use moesaic_plan::{Strategy, most_rows};
use moesaic_tensor::Tensor;
use std::sync::Arc;
use std::time::Instant;

/// The rows of every rank for every expert in a call, before a capacity drops any.
pub type Loads = Vec<Vec<u64>>;

/// A predictor: returns the predicted times of strategies for a key and the loads of a step;
/// empty where it predicts nothing.
pub type Predict = Box<dyn FnMut(&Key, &Loads) -> Vec<Prediction> + Send>;

/// A rank's part of a layer whose ranks choose together how to run each training step and each
/// evaluation.
///
/// Every trial is a real step. Before it, ranks exchange three numbers: their token counts, and
/// the times of the previous step's passes. Evaluations have choices of their own. As for
/// training steps there is one for each power of two of tokens, because few tokens need another
/// strategy than many. For a call that needs no choice, use [`AdaptiveLayer::layer`]: it keeps
/// the last choice and exchanges nothing beforehand.
///
/// Where strategies are predicted, for a key that is new or whose times have drifted, each rank
/// routes its tokens once more, and the ranks exchange their rows.
pub struct AdaptiveLayer {
    pub(crate) layer: MeshLayer,
    tuner: Tuner,
    machine: String,
    name: String,
    predict: Predict,
    /// Steps whose times ranks have not exchanged yet.
    pending: Vec<Step>,
}

/// A step and the times of its passes on this rank.
struct Step {
    chosen: Chosen,
    /// The forward pass, and the backward pass if there is one.
    passes: Vec<Pass>,
}

/// The choice for a call.
#[derive(Clone)]
pub(crate) struct Chosen {
    key: Key,
    strategy: Strategy,
}

/// The time of a pass.
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
    /// Returns the end of each pass, counted from the start of the step.
    fn ends(&self) -> Result<[f64; 2], EngineError> {
        let of = |pass: usize| self.passes.get(pass).map_or(Ok(0.0), Pass::seconds);
        let times = Times {
            forward: of(0)?,
            backward: of(1)?,
        };
        Ok(times.ends())
    }
}

/// The saved state of a forward pass of an [`AdaptiveLayer`], for backward.
pub struct AdaptiveSaved {
    pub(crate) saved: MeshSaved,
    pub(crate) chosen: Chosen,
    pub(crate) forward: Pass,
}

impl AdaptiveSaved {
    /// Returns the strategy of this step.
    pub fn strategy(&self) -> Strategy {
        self.chosen.strategy
    }
}

impl AdaptiveLayer {
    /// Returns a layer with a tuner. `machine` names the ranks' devices and libraries, so that
    /// choices of one machine are not used on another. All ranks pass the same.
    pub fn new(layer: MeshLayer, tuner: Tuner, machine: &str, predict: Predict) -> AdaptiveLayer {
        AdaptiveLayer {
            tuner,
            machine: machine.to_string(),
            name: layer.identity(),
            layer,
            predict,
            pending: Vec::new(),
        }
    }

    /// Returns the layer, for calls that need no choice.
    pub fn layer(&self) -> &MeshLayer {
        &self.layer
    }

    /// Returns the tuner. It learns about a step when the next one begins.
    pub fn tuner(&self) -> &Tuner {
        &self.tuner
    }

    /// Returns the kept choices, for [`write`](crate::write()).
    pub fn records(&self) -> Vec<Record> {
        self.tuner.records()
    }

    /// Returns the layer in its current state.
    pub fn into_layer(self) -> MeshLayer {
        self.layer
    }

    /// Runs [`MeshLayer::forward_train`] with the strategy that the tuner chooses.
    ///
    /// # Errors
    /// As [`MeshLayer::forward_train`].
    pub fn forward_train(
        &mut self,
        input: &Input<'_>,
        names: &[&str],
        rng_key: RngKey,
    ) -> Result<(Output, AdaptiveSaved), EngineError> {
        let asked = (Calls::Training, input.tokens, input.capacity_factor);
        let chosen = self.choose(asked, |layer| layer.tokens_per_expert(input, rng_key))?;
        let started = Instant::now();
        let (output, saved) = self.layer.forward_train(input, names, rng_key)?;
        let saved = AdaptiveSaved {
            saved,
            chosen,
            forward: since(started),
        };
        Ok((output, saved))
    }

    /// Runs [`MeshLayer::backward`] for a forward pass of this layer.
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

    /// Runs [`MeshLayer::forward`] with the strategy that the tuner chooses for evaluations.
    ///
    /// # Errors
    /// As [`MeshLayer::forward`].
    pub fn forward(&mut self, input: &Input<'_>) -> Result<Output, EngineError> {
        self.forward_with(input, &["y"])
    }

    /// Runs [`MeshLayer::forward_with`] with the strategy that the tuner chooses for evaluations.
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

    /// Chooses the strategy of a call with `tokens` tokens and sets it. `loads` is called where
    /// strategies are predicted.
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
        // Setting a strategy makes ranks compare it, which is an additional exchange, so it is
        // skipped where nothing changes.
        if strategy != self.layer.strategy() {
            self.layer.set_strategy(strategy)?;
        }
        Ok(Chosen { key, strategy })
    }

    /// Records the times of a step's passes; ranks exchange them when the next step begins.
    pub(crate) fn took(&mut self, chosen: Chosen, passes: impl Into<Vec<Pass>>) {
        let passes = passes.into();
        self.pending.push(Step { chosen, passes });
    }

    /// Returns the most tokens of any rank. The tuner learns when the last rank ended the
    /// previous steps.
    fn agree(&mut self, tokens: usize) -> Result<usize, EngineError> {
        let mut own = vec![tokens as f64];
        for step in &self.pending {
            own.extend(step.ends()?);
        }
        let ranks = self.layer.ranks();
        let what = "tokens of a step, and times of those before it";
        let largest = ranks.max_f64(&own, ProcessGroup::World, what)?;
        for (step, last) in self.pending.drain(..).zip(largest[1..].as_chunks::<2>().0) {
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

/// Returns the time of a pass that ends now.
fn since(started: Instant) -> Pass {
    Pass::Seconds(started.elapsed().as_secs_f64())
}
