//! Passes that keep nothing: check the input, launch, read back.

use crate::call::{CallArgs, Input, Output, RawCall, RngKey, StepTime};
use crate::device_layer::{DeviceLayer, untimed};
use crate::error::EngineError;
use crate::memory::Workspaces;
use crate::pass::Pass;

impl DeviceLayer {
    /// Runs a pass that keeps nothing. Only training passes draw; an evaluation gives what a layer
    /// for inference gives, to the bit.
    pub(crate) fn call(
        &self,
        pass: Pass,
        args: &CallArgs<'_>,
        rng_key: RngKey,
    ) -> Result<Output, EngineError> {
        if pass.trains() {
            self.check_training()?;
        }
        match args {
            CallArgs::Host(input, names) => self.pass(pass, input, names, rng_key),
            CallArgs::Raw(call) => {
                self.pass_raw(pass, call, rng_key)?;
                Ok(Output::default())
            }
        }
    }

    /// Runs a pass that keeps nothing.
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

    /// Runs a pass that keeps nothing, on the caller's memory, in stream order and without waiting.
    fn pass_raw(&self, pass: Pass, call: &RawCall<'_>, rng_key: RngKey) -> Result<(), EngineError> {
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

    /// Runs the steps of the last call again on its first `tokens` tokens, and times each: an
    /// evaluation's, or for a layer that trains those of both passes. Make that call first.
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
