//! The strategy of a layer over ranks: set by the caller, or by a tuner for each call.

use super::{Layer, Saved};
use crate::call::{BackwardArgs, CallArgs, CallInput, RngKey};
use crate::error::EngineError;
use crate::mesh::{Ranks, Timestamp};
use moesaic_plan::{ShadowModel, Strategy};
use std::sync::Arc;
use std::time::Instant;

/// A tuner of strategies: it sets the strategy of each call before the call runs, and learns its
/// time afterwards. The ranks of a layer have one each, and these must decide alike.
/// `moesaic::tune::Adaptive` is one.
pub trait StrategyTuner: Send + Sync {
    /// Sets the strategy of a call by [`Layer::set_strategy`]. Returns a number of the tuner's own
    /// by which [`StrategyTuner::took`] names the choice.
    ///
    /// # Errors
    /// Those of the layer's calls.
    fn choose(&self, layer: &Layer, call: &TunedCall<'_>) -> Result<usize, EngineError>;

    /// Takes the times of a choice's passes: forward, and backward if there was one.
    fn took(&self, choice: usize, passes: Vec<PassTime>);
}

/// A call whose strategy a tuner chooses.
#[derive(Clone, Copy, Debug)]
pub struct TunedCall<'c> {
    /// Tokens of this rank.
    pub tokens: usize,
    /// The capacity factor of this call instead of the spec's.
    pub capacity_factor: Option<f64>,
    /// The RNG key of a training call; `None` for an evaluation.
    pub rng_key: Option<RngKey>,
    /// The arguments, for [`Layer::tokens_per_expert`].
    pub input: CallInput<'c>,
}

/// The time of a pass.
#[derive(Clone)]
pub enum PassTime {
    /// Seconds, of a call that waits.
    Seconds(f64),
    /// From one moment to the other, of a call that does not.
    Between(Arc<[Timestamp; 2]>),
}

impl PassTime {
    /// Returns the seconds; waits for the end of the pass.
    ///
    /// # Errors
    /// [`EngineError::Device`], also when a launch of the pass has failed.
    pub fn seconds(&self) -> Result<f64, EngineError> {
        match self {
            PassTime::Seconds(seconds) => Ok(*seconds),
            PassTime::Between(moments) => moments[1].seconds_since(&moments[0]),
        }
    }
}

/// A tuned pass that has begun.
pub(super) struct Begun {
    /// The tuner that chose. The layer may have another one by the time the pass ends, which does
    /// not know the number of this choice.
    tuner: Arc<dyn StrategyTuner>,
    choice: usize,
    earlier: Option<PassTime>,
    start: Start,
}

/// The beginning of a pass.
enum Start {
    /// Of a call that waits.
    Host(Instant),
    /// Of a call on device memory.
    Device(Timestamp),
}

/// A tuner's choice and the time of its forward pass.
pub(super) struct Timed {
    tuner: Arc<dyn StrategyTuner>,
    choice: usize,
    forward: PassTime,
}

impl Layer {
    /// Returns the strategy of calls from now on; the default without ranks.
    pub fn strategy(&self) -> Strategy {
        let layer = self.of_rank("a strategy");
        layer.map(|layer| layer.strategy()).unwrap_or_default()
    }

    /// Sets the strategy of calls from now on; a backward pass uses its forward pass's. All ranks
    /// call it with the same strategy. The first use of an adaptive parallelism degree makes its
    /// kernels and its process groups, which all layers of the mesh share; both are kept. Calls of
    /// other threads are waited for.
    ///
    /// # Errors
    /// [`EngineError::NotOverRanks`]; [`EngineError::Plan`] for a strategy that the mesh, its nodes
    /// or the layer's packed weights do not allow (see [`Mesh::for_any_r`](crate::Mesh::for_any_r));
    /// [`EngineError::Collective`], also when ranks choose differently; otherwise as
    /// [`Engine::layer`](crate::Engine::layer), also for the cast kernels.
    pub fn set_strategy(&self, strategy: Strategy) -> Result<(), EngineError> {
        self.of_rank("a strategy")?.set_strategy(strategy)
    }

    /// Checks a strategy against mesh, nodes and placement. The check exchanges nothing and makes
    /// nothing, so it does not notice packed weights.
    ///
    /// # Errors
    /// [`EngineError::NotOverRanks`], [`EngineError::Plan`], as [`Layer::set_strategy`].
    pub fn check_strategy(&self, strategy: Strategy) -> Result<(), EngineError> {
        self.of_rank("a strategy")?.check_strategy(strategy)
    }

    /// Sets the tuner that chooses the strategy of each training step and each evaluation; `None`
    /// keeps the present strategy. All ranks set one.
    ///
    /// # Errors
    /// [`EngineError::NotOverRanks`].
    pub fn set_tuner(&mut self, tuner: Option<Arc<dyn StrategyTuner>>) -> Result<(), EngineError> {
        self.of_rank("a tuner of strategies")?;
        self.tuner = tuner;
        Ok(())
    }

    /// Sets the model that chooses shadows from the next call on ([`Strategy::shadows`]); the
    /// default is [`ShadowModel::of`] the layer. All ranks call it with the same model.
    ///
    /// # Errors
    /// [`EngineError::NotOverRanks`]; [`EngineError::Collective`], also when models differ.
    pub fn set_shadow_model(&self, model: ShadowModel) -> Result<(), EngineError> {
        self.of_rank("a model of shadows")?.set_shadow_model(model)
    }

    /// Returns the model that chooses shadows.
    pub fn shadow_model(&self) -> ShadowModel {
        match self.of_rank("a model of shadows") {
            Ok(layer) => layer.shadow_model(),
            Err(_) => ShadowModel::of(self.spec()),
        }
    }

    /// Returns a text that identifies layers whose steps may take different times: name, number of
    /// ranks, and a hash of spec, training, mesh, placement and ranks on each node. It is the same
    /// on all ranks, even if their targets differ.
    ///
    /// # Errors
    /// [`EngineError::NotOverRanks`].
    pub fn identity(&self) -> Result<String, EngineError> {
        Ok(self.of_rank("an identity among ranks")?.identity())
    }

    /// Returns a handle to exchange host memory between the ranks of this layer.
    ///
    /// # Errors
    /// [`EngineError::NotOverRanks`].
    pub fn ranks(&self) -> Result<Ranks, EngineError> {
        Ok(self.of_rank("an exchange")?.ranks())
    }

    /// Returns the rows that each rank's tokens have for each expert with weights, the same on all
    /// ranks and before a capacity drops any: as [`Layer::forward`] would route the tokens, or with
    /// [`CallInput::in_training`] as [`Layer::forward_train`] would. Experts without weights are
    /// left out, because their rows stay where they are. Writes nothing to memory of yours.
    ///
    /// # Errors
    /// As [`Layer::route`]; [`EngineError::NotOverRanks`].
    pub fn tokens_per_expert<'i>(
        &self,
        input: impl Into<CallInput<'i>>,
    ) -> Result<Vec<Vec<u64>>, EngineError> {
        let input = input.into();
        let layer = self.of_rank("counts of all ranks")?;
        layer.tokens_per_expert(&input.args(self.plan())?, input.rng_key)
    }

    /// Lets the tuner choose the strategy of a call, if there is one.
    pub(super) fn choose(
        &self,
        input: CallInput<'_>,
        args: &CallArgs<'_>,
        rng_key: Option<RngKey>,
    ) -> Result<Option<Begun>, EngineError> {
        let Some(tuner) = &self.tuner else {
            return Ok(None);
        };
        let call = TunedCall {
            tokens: args.tokens(),
            capacity_factor: args.capacity_factor(),
            rng_key,
            // A caller may have left a key of an earlier `route` in the arguments; the pass that
            // is about to run decides whether tokens are counted as in training.
            input: CallInput { rng_key, ..input },
        };
        let choice = tuner.choose(self, &call)?;
        Ok(Some(Begun {
            tuner: Arc::clone(tuner),
            choice,
            earlier: None,
            start: self.start(matches!(args, CallArgs::Raw(_)))?,
        }))
    }

    /// Begins the backward pass of a tuned forward pass.
    pub(super) fn continued(
        &self,
        saved: &Saved,
        args: &BackwardArgs<'_>,
    ) -> Result<Option<Begun>, EngineError> {
        let Some(timed) = &saved.timed else {
            return Ok(None);
        };
        Ok(Some(Begun {
            tuner: Arc::clone(&timed.tuner),
            choice: timed.choice,
            earlier: Some(timed.forward.clone()),
            start: self.start(matches!(args, BackwardArgs::Raw(_)))?,
        }))
    }

    /// A call on device memory does not wait for its launches, so the device has to tell its time.
    fn start(&self, on_device: bool) -> Result<Start, EngineError> {
        Ok(if on_device {
            Start::Device(self.timestamp()?)
        } else {
            Start::Host(Instant::now())
        })
    }

    /// Ends a tuned forward pass whose backward pass follows.
    pub(super) fn timed(&self, begun: Begun) -> Result<Timed, EngineError> {
        Ok(Timed {
            forward: self.since(begun.start)?,
            tuner: begun.tuner,
            choice: begun.choice,
        })
    }

    /// Ends a tuned call.
    pub(super) fn finish(&self, begun: Option<Begun>) -> Result<(), EngineError> {
        let Some(begun) = begun else {
            return Ok(());
        };
        let last = self.since(begun.start)?;
        let passes = begun.earlier.into_iter().chain([last]);
        begun.tuner.took(begun.choice, passes.collect());
        Ok(())
    }

    fn since(&self, start: Start) -> Result<PassTime, EngineError> {
        Ok(match start {
            Start::Host(start) => PassTime::Seconds(start.elapsed().as_secs_f64()),
            Start::Device(start) => PassTime::Between(Arc::new([start, self.timestamp()?])),
        })
    }
}
