//! The calls of a layer: forward, backward, routing.

use super::form::{Form, Layer};
use super::saved::{Kept, Saved};
use crate::call::{CallArgs, CallInput, Given, Input, Output, OutputGradient, RngKey};
use crate::error::EngineError;
use crate::into::raw_into;
use crate::pass::Pass;
use moesaic_tensor::Element;
use std::borrow::Cow;

impl Layer {
    /// Evaluates the layer and returns the outputs that the call reads back, `y` if it does not say
    /// ([`CallInput::reading`]). Nothing is drawn and nothing kept, also where the layer trains: it
    /// then gives what a layer for inference gives, to the bit. See [`Layer::forward_train`] for the
    /// other call.
    ///
    /// With a [`RawCall`](crate::RawCall) kernels read and write memory of yours, in stream order
    /// and without waiting. Over ranks the host waits for exchanges, and not for the launches after
    /// them.
    ///
    /// # Errors
    /// [`EngineError::Input`] when a tensor is missing or has the wrong shape or dtype, or an input
    /// has no address; [`EngineError::Misaligned`] when kernels cannot use one;
    /// [`EngineError::Capacity`]; [`EngineError::NoOutput`] for an unknown name,
    /// [`EngineError::TrainingOutput`] for one that only training has, such as a loss;
    /// [`EngineError::Device`] when memory runs out or a launch fails;
    /// [`EngineError::Collective`].
    pub fn forward<'i>(&self, input: impl Into<CallInput<'i>>) -> Result<Output, EngineError> {
        let input = input.into();
        let args = input.args(self.plan())?;
        // Before the pass takes a lock: a tuner routes tokens and sets strategies by calls of this
        // same layer.
        let tuned = self.choose(input, &args, None)?;
        let output = self.pass(Pass::Evaluate, &args, RngKey::default())?;
        self.finish(tuned)?;
        Ok(output)
    }

    /// Returns the tensors of a call and the names of the outputs to read back, for code that runs
    /// before the layer, such as a gate of yours.
    ///
    /// # Errors
    /// [`EngineError::Input`] for a [`RawCall`](crate::RawCall), and for a slice of another length
    /// or type than rows of the layer.
    pub fn in_host_memory<'i>(
        &self,
        call: CallInput<'i>,
    ) -> Result<(Cow<'i, Input<'i>>, &'i [&'i str]), EngineError> {
        call.args(self.plan())?.in_host_memory()
    }

    /// Evaluates the layer and writes `y [T, output_dim]` into a slice of yours. `input` is `x
    /// [T, model_dim]` as a slice, or an [`Input`](crate::Input) where the layer reads more than
    /// `x`.
    ///
    /// On a CPU kernels read `x` and write `y` where they are. Once a call was as large, a call
    /// with a slice allocates nothing, so it is the call for decoding. Over ranks `y` is copied.
    ///
    /// # Errors
    /// [`EngineError::Output`] when `y` has another length or type; otherwise as
    /// [`Layer::forward`].
    pub fn forward_into<'i, E: Element>(
        &self,
        input: impl Into<CallInput<'i>>,
        y: &mut [E],
    ) -> Result<(), EngineError> {
        let input = input.into();
        // The layer of one process takes the slice as it is: an `Input` around it would allocate a
        // name and a shape in each call.
        let layer = match &self.form {
            Form::One(layer) => return layer.forward_into(input.given, y),
            Form::Ranks(layer) => layer,
        };
        if matches!(input.given, Given::Raw(_)) {
            return Err(raw_into());
        }
        let args = input.reading(&["y"]).args(self.plan())?;
        let tuned = self.choose(input, &args, None)?;
        layer.forward_into(&args, y)?;
        self.finish(tuned)
    }

    /// Routes tokens as [`Layer::forward`] does, and stops there: `topk_ids`, `topk_weights`,
    /// `counts`, `locations`, `offsets`, and with a capacity `capacity` and `overflow`.
    ///
    /// With [`CallInput::in_training`] it routes as [`Layer::forward_train`] does with the same key.
    /// Use that for the counts that a loss of kind `global` takes over ranks and micro-batches.
    ///
    /// # Errors
    /// As [`Layer::forward`], in training as [`Layer::forward_train`].
    pub fn route<'i>(&self, input: impl Into<CallInput<'i>>) -> Result<Output, EngineError> {
        let input = input.into();
        let args = input.args(self.plan())?;
        match input.rng_key {
            Some(rng_key) => self.pass(Pass::RouteTrain, &args, rng_key),
            None => self.pass(Pass::Route, &args, RngKey::default()),
        }
    }

    /// Runs the layer forward as in training, returns the outputs that the call reads back, and
    /// keeps what backward needs. Random numbers depend on `rng_key` alone; over ranks
    /// `rng_key.first_token` is that of the first rank.
    ///
    /// With a [`RawCall`](crate::RawCall) inputs stay where they are.
    ///
    /// # Errors
    /// [`EngineError::NotTraining`]; otherwise as [`Layer::forward`].
    pub fn forward_train<'i>(
        &self,
        input: impl Into<CallInput<'i>>,
        rng_key: RngKey,
    ) -> Result<(Output, Saved), EngineError> {
        let input = input.into();
        let args = input.args(self.plan())?;
        let tuned = self.choose(input, &args, Some(rng_key))?;
        let (output, kept) = match &self.form {
            Form::One(layer) => {
                let (output, saved) = layer.train(&args, rng_key)?;
                (output, Kept::One(saved))
            }
            Form::Ranks(layer) => {
                let (output, saved) = layer.train(&args, rng_key)?;
                (output, Kept::Ranks(Box::new(saved)))
            }
        };
        let timed = tuned.map(|tuned| self.timed(tuned)).transpose()?;
        Ok((output, Saved { kept, timed }))
    }

    /// Runs the layer backward from `dy [T, output_dim]`, in the layer's activation dtype. Returns
    /// `dx [T, model_dim]` and `grad.topk_weights [T, K]`. The gradients of weights stay with
    /// the layer: they are overwritten, or with `accumulate` added to. Over ranks they are this
    /// rank's until [`Layer::reduce_gradients`].
    ///
    /// # Errors
    /// [`EngineError::Input`] when `dy` has another shape or dtype, or no address, and over ranks
    /// for the address of a weight's gradient; [`EngineError::Misaligned`];
    /// [`EngineError::ForeignSaved`]; [`EngineError::Device`]; [`EngineError::Collective`].
    pub fn backward<'d>(
        &self,
        saved: &Saved,
        dy: impl Into<OutputGradient<'d>>,
        accumulate: bool,
    ) -> Result<Output, EngineError> {
        let OutputGradient(args) = dy.into();
        let tuned = self.continued(saved, &args)?;
        let output = match (&self.form, &saved.kept) {
            (Form::One(layer), Kept::One(saved)) => layer.back(saved, &args, accumulate)?,
            (Form::Ranks(layer), Kept::Ranks(saved)) => layer.back(saved, &args, accumulate)?,
            _ => return Err(EngineError::ForeignSaved),
        };
        self.finish(tuned)?;
        Ok(output)
    }

    /// Runs a pass that keeps nothing.
    fn pass(
        &self,
        pass: Pass,
        args: &CallArgs<'_>,
        rng_key: RngKey,
    ) -> Result<Output, EngineError> {
        match &self.form {
            Form::One(layer) => layer.call(pass, args, rng_key),
            Form::Ranks(layer) => layer.call(pass, args, rng_key),
        }
    }
}
