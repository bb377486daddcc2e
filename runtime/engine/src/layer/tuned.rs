//! Calls whose strategy a tuner chooses, and their times.

use super::form::{Layer, PassTime, StrategyTuner, TunedCall};
use super::saved::{Saved, Timed};
use crate::call::{BackwardArgs, CallArgs, CallInput, RngKey};
use crate::error::EngineError;
use crate::mesh::Timestamp;
use std::sync::Arc;
use std::time::Instant;

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
    /// The start of a call that waits.
    Host(Instant),
    /// The start of a call on device memory.
    Device(Timestamp),
}

impl Layer {
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

    /// Starts the clock of a call: the device's for a call on device memory, which does not wait
    /// for its launches.
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
