//! Passes that keep nothing: check the input, launch, read back.

use crate::call::{Input, Output, RawCall, RngKey, StepTime};
use crate::error::EngineError;
use crate::layer::{Layer, untimed};
use crate::memory::Workspaces;
use crate::pass::Pass;

impl Layer {
    /// Evaluates the layer and reads back `y`.
    ///
    /// # Errors
    /// As [`Layer::forward_with`].
    pub fn forward(&self, input: &Input<'_>) -> Result<Output, EngineError> {
        self.forward_with(input, &["y"])
    }

    /// Evaluates the layer and reads back the named outputs. Nothing is drawn
    /// and nothing kept, also where the layer trains: it then gives what a layer
    /// for inference gives, to the bit. See [`Layer::forward_train`] for the
    /// other call.
    ///
    /// # Errors
    /// [`EngineError::Input`] when a tensor is missing or has the wrong shape
    /// or dtype; [`EngineError::Capacity`]; [`EngineError::NoOutput`] for an
    /// unknown name, [`EngineError::TrainingOutput`] for one that only training
    /// has, such as a loss; [`EngineError::Device`] when memory runs out or a
    /// launch fails.
    pub fn forward_with(&self, input: &Input<'_>, names: &[&str]) -> Result<Output, EngineError> {
        self.pass(Pass::Evaluate, input, names, RngKey::default())
    }

    /// Routes tokens as [`Layer::forward_with`] does, and stops there: `topk_ids`, `topk_weights`,
    /// `counts`, `locations`, `offsets`, and with a capacity `capacity` and `overflow`.
    ///
    /// # Errors
    /// As [`Layer::forward_with`].
    pub fn route(&self, input: &Input<'_>, names: &[&str]) -> Result<Output, EngineError> {
        self.pass(Pass::Route, input, names, RngKey::default())
    }

    /// A pass that keeps nothing.
    pub(crate) fn pass(
        &self,
        pass: Pass,
        input: &Input<'_>,
        names: &[&str],
        rng_key: RngKey,
    ) -> Result<Output, EngineError> {
        let mut workspaces = self.lock_workspaces();
        let scalars = self.scalars(pass, rng_key, input.tokens, input.capacity_factor)?;
        self.check_outputs(pass, names)?;
        self.reserve(&mut workspaces, input.tokens)?;
        self.stage(pass, input, names, |tensor| workspaces.get(tensor))?;
        // `time_steps` repeats the last call on its inputs. It times a training layer by what a
        // training call left, so an evaluation of that does not count.
        if pass == Pass::Evaluate && self.plan().training.is_none() {
            workspaces.every.stage(input.tokens);
        }
        self.lay_passing(&mut workspaces);
        self.run(self.bound(pass), &scalars, &workspaces.addresses, None)?;
        self.read(names, input.tokens, |tensor| workspaces.get(tensor))
    }

    /// As [`Layer::forward_with`], on device memory that the caller owns, in
    /// stream order and without waiting.
    ///
    /// # Safety
    /// Every address must be valid on the layer's device for the tensor's
    /// size at `call.tokens` tokens until the stream has passed the call, and
    /// ids of experts or tokens in inputs must be in range.
    ///
    /// # Errors
    /// [`EngineError::Input`] when an input has no address,
    /// [`EngineError::Misaligned`] when kernels cannot use one; otherwise as
    /// [`Layer::forward`].
    pub unsafe fn forward_raw(&self, call: &RawCall<'_>) -> Result<(), EngineError> {
        // SAFETY: the caller makes the same guarantees.
        unsafe { self.pass_raw(Pass::Evaluate, call, RngKey::default()) }
    }

    /// As [`Layer::route`], on device memory that the caller owns, in stream
    /// order and without waiting. Results go where `call` says.
    ///
    /// # Safety
    /// As [`Layer::forward_raw`].
    ///
    /// # Errors
    /// As [`Layer::forward_raw`].
    pub unsafe fn route_raw(&self, call: &RawCall<'_>) -> Result<(), EngineError> {
        // SAFETY: the caller makes the same guarantees.
        unsafe { self.pass_raw(Pass::Route, call, RngKey::default()) }
    }

    /// A pass that keeps nothing, on the caller's memory.
    ///
    /// # Safety
    /// As [`Layer::forward_raw`].
    pub(crate) unsafe fn pass_raw(
        &self,
        pass: Pass,
        call: &RawCall<'_>,
        rng_key: RngKey,
    ) -> Result<(), EngineError> {
        let mut workspaces = self.lock_workspaces();
        let scalars = self.scalars(pass, rng_key, call.tokens, call.capacity_factor)?;
        let given = &mut workspaces.given;
        // Addresses are checked before `reserve`, which may free the memory of a smaller call: a
        // refused call leaves the layer as it was.
        self.find_given(call.tokens, call.tensors, self.inputs(pass), given)?;
        self.reserve(&mut workspaces, call.tokens)?;
        self.lay_passing(&mut workspaces);
        let Workspaces {
            addresses, given, ..
        } = &mut *workspaces;
        // After the layer's own memory, so that a tensor that the caller names replaces it.
        addresses.give(given);
        self.run(self.bound(pass), &scalars, addresses, None)
    }

    /// Sets the addresses of a call that keeps nothing.
    pub(crate) fn lay_passing(&self, workspaces: &mut Workspaces) {
        let Workspaces {
            every,
            passing,
            addresses,
            weights,
            ..
        } = workspaces;
        self.lay(addresses, [every, passing]);
        addresses.give(weights);
    }

    /// Runs the steps again on the inputs of the last call, the first `tokens`
    /// of them, and times each: those of an evaluation, or where the layer
    /// trains of a call that did, backward too. For `bench` and the quickstart.
    ///
    /// # Errors
    /// When no call was that large, or a launch fails.
    pub fn time_steps(&self, tokens: usize) -> Result<Vec<StepTime>, EngineError> {
        if self.plan().training.is_some() {
            return self.time_training(tokens);
        }
        let mut workspaces = self.lock_workspaces();
        if !workspaces.every.has_staged(tokens) {
            return Err(untimed(tokens, "forward"));
        }
        let (pass, mut times) = (Pass::Evaluate, Vec::new());
        let scalars = self.scalars(pass, RngKey::default(), tokens, None)?;
        self.lay_passing(&mut workspaces);
        let addresses = &workspaces.addresses;
        self.run(self.bound(pass), &scalars, addresses, Some(&mut times))?;
        Ok(times)
    }
}
