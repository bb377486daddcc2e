//! A tuner that measures the calls of a layer.

use crate::{
    CallKind, PredictedTime, RowBucket, StoredChoice, Times, Tuner, TunerDecision, TunerKey,
};
use moesaic_engine::{EngineError, Layer, PassTime, ProcessGroup, StrategyTuner, TunedCall};
use moesaic_plan::{Strategy, most_rows};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The rows of every rank for every expert in a call, before a capacity drops any.
pub type Loads = Vec<Vec<u64>>;

/// A predictor: returns the predicted times of strategies for a key and the loads of a step;
/// empty where it predicts nothing.
pub type Predict = Box<dyn FnMut(&TunerKey, &Loads) -> Vec<PredictedTime> + Send>;

/// The tuner of a rank's layer, with which ranks choose together how to run each training step and
/// each evaluation. Every rank gives its layer one ([`Layer::set_tuner`]).
///
/// Every trial is a real step. Before it, ranks exchange three numbers: their token counts, and
/// the times of the previous step's passes. Calls on device memory are timed on the device: only
/// the next step waits for the end of this one. Evaluations have choices of their own. As for
/// training steps there is one for each power of two of tokens, because few tokens need another
/// strategy than many. For calls that need no choice, take the tuner from the layer: it keeps the
/// last choice and exchanges nothing beforehand.
///
/// Where strategies are predicted, for a key that is new or whose times have drifted, each rank
/// routes its tokens once more, and the ranks exchange their rows.
pub struct LayerTuner {
    state: Mutex<State>,
}

/// No more than its name: a call of another thread may hold its lock.
impl fmt::Debug for LayerTuner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LayerTuner").finish_non_exhaustive()
    }
}

struct State {
    tuner: Tuner,
    machine: String,
    /// The identity of the layer, known from the first call on.
    layer: Option<String>,
    predict: Predict,
    /// The choices so far, each once; their indexes are the layer's numbers of them.
    chosen: Vec<Chosen>,
    /// Steps whose times ranks have not exchanged yet.
    pending: Vec<Step>,
}

/// The choice for a call.
#[derive(Clone, PartialEq)]
struct Chosen {
    key: TunerKey,
    strategy: Strategy,
}

/// A step and the times of its passes on this rank.
struct Step {
    choice: usize,
    /// The forward pass, and the backward pass if there is one.
    passes: Vec<PassTime>,
}

impl Step {
    /// Returns the end of each pass, counted from the start of the step.
    fn ends(&self) -> Result<[f64; 2], EngineError> {
        let of = |pass: usize| self.passes.get(pass).map_or(Ok(0.0), PassTime::seconds);
        let times = Times {
            forward: of(0)?,
            backward: of(1)?,
        };
        Ok(times.ends())
    }
}

impl LayerTuner {
    /// Returns a tuner that decides by `tuner`. `machine` names the ranks' devices and libraries,
    /// so that choices of one machine are not used on another. All ranks pass the same.
    pub fn new(tuner: Tuner, machine: &str, predict: Predict) -> Arc<LayerTuner> {
        let state = State {
            tuner,
            machine: machine.to_string(),
            layer: None,
            predict,
            chosen: Vec::new(),
            pending: Vec::new(),
        };
        Arc::new(LayerTuner {
            state: Mutex::new(state),
        })
    }

    /// Returns the trials and decisions so far. The tuner learns about a step when the next one
    /// begins.
    pub fn events(&self) -> Vec<TunerDecision> {
        self.state().tuner.events().to_vec()
    }

    /// Returns the kept choices, for [`write`](crate::write()).
    pub fn records(&self) -> Vec<StoredChoice> {
        self.state().tuner.records()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl StrategyTuner for LayerTuner {
    fn choose(&self, layer: &Layer, call: &TunedCall<'_>) -> Result<usize, EngineError> {
        let state = &mut *self.state();
        let most = state.agree(layer, call.tokens)?;
        let key = state.key(layer, call, most)?;
        let loads = if state.tuner.asks(&key) {
            layer.tokens_per_expert(call.input)?
        } else {
            Loads::new()
        };
        let predict = &mut state.predict;
        let strategy = state.tuner.choose(&key, || predict(&key, &loads));
        // Setting a strategy makes ranks compare it, which is an additional exchange, so it is
        // skipped where nothing changes.
        if strategy != layer.strategy() {
            layer.set_strategy(strategy)?;
        }
        Ok(state.number(Chosen { key, strategy }))
    }

    fn took(&self, choice: usize, passes: Vec<PassTime>) {
        self.state().pending.push(Step { choice, passes });
    }
}

impl State {
    /// Returns the most tokens of any rank. The tuner learns when the last rank ended the
    /// previous steps.
    fn agree(&mut self, layer: &Layer, tokens: usize) -> Result<usize, EngineError> {
        let mut own = vec![tokens as f64];
        for step in &self.pending {
            own.extend(step.ends()?);
        }
        let what = "tokens of a step, and times of those before it";
        let largest = layer.ranks()?.max_f64(&own, ProcessGroup::World, what)?;
        for (step, last) in self.pending.drain(..).zip(largest[1..].as_chunks::<2>().0) {
            let Chosen { key, strategy } = &self.chosen[step.choice];
            self.tuner.observe(key, *strategy, Times::of_last(*last));
        }
        Ok(largest[0] as usize)
    }

    fn key(
        &mut self,
        layer: &Layer,
        call: &TunedCall<'_>,
        most: usize,
    ) -> Result<TunerKey, EngineError> {
        let name = match &self.layer {
            Some(name) => name.clone(),
            None => self.layer.insert(layer.identity()?).clone(),
        };
        let calls = match call.rng_key {
            Some(_) => CallKind::Training,
            None => CallKind::Evaluation,
        };
        let spec = layer.spec();
        let factor = call.capacity_factor;
        let factor = factor.unwrap_or(spec.capacity.factor_of(calls.train()));
        let capacity = most_rows(spec, factor, most as u64);
        Ok(TunerKey {
            machine: self.machine.clone(),
            layer: name,
            calls,
            rows: RowBucket::of(most, capacity),
        })
    }

    /// Returns the number of a choice.
    fn number(&mut self, chosen: Chosen) -> usize {
        let known = self.chosen.iter().position(|known| *known == chosen);
        known.unwrap_or_else(|| {
            self.chosen.push(chosen);
            self.chosen.len() - 1
        })
    }
}
