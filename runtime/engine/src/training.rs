//! Forward with what backward needs kept, and backward.

use crate::call::{BackwardArgs, CallArgs, Input, Output, RawCall, RngKey, StepTime, shape_for};
use crate::device_layer::{DeviceLayer, untimed};
use crate::error::EngineError;
use crate::launch::Scalars;
use crate::memory::{Buffers, Kept, Workspaces};
use crate::pass::Pass;
use crate::place::zeroed;
use moesaic_plan::{TensorId, TensorPlan, TensorRole};
use moesaic_target::{Buffer, Ptr};
use moesaic_tensor::{Tensor, Tensors};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// The state that one forward pass keeps for backward: inputs, the routing record and, as the plan
/// says, the pre-activations. Dropping one gives its memory to the next call, or, if a graph
/// captured the call, to that graph alone.
pub(crate) struct DeviceSaved {
    tokens: usize,
    /// The scalars of the call, because backward may route again.
    scalars: Scalars,
    pub(crate) kept: Kept,
    /// A graph has its addresses, and may be launched at any time.
    captured: AtomicBool,
    idle: Arc<Mutex<Vec<Kept>>>,
}

impl DeviceSaved {
    /// Tokens of the call.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    pub(crate) fn scalars(&self) -> Scalars {
        self.scalars
    }

    /// Returns a handle to the buffer of a kept tensor, for a caller that keeps it longer.
    pub(crate) fn handle(&self, tensor: TensorId) -> Option<&Arc<Buffer>> {
        self.kept.workspace.buffers.handle(tensor)
    }

    /// Returns the buffer of a tensor that is kept.
    pub(crate) fn get(&self, tensor: TensorId) -> Option<&Buffer> {
        self.kept.workspace.get(tensor)
    }
}

impl Drop for DeviceSaved {
    fn drop(&mut self) {
        if *self.captured.get_mut() {
            return;
        }
        let kept = std::mem::take(&mut self.kept);
        if let Ok(mut idle) = self.idle.lock() {
            idle.push(kept);
        }
    }
}

impl DeviceLayer {
    /// Runs the layer forward as in training and keeps what backward needs.
    pub(crate) fn train(
        &self,
        args: &CallArgs<'_>,
        rng_key: RngKey,
    ) -> Result<(Output, DeviceSaved), EngineError> {
        match args {
            CallArgs::Host(input, names) => self.train_host(input, names, rng_key),
            CallArgs::Raw(call) => Ok((Output::default(), self.train_raw(call, rng_key)?)),
        }
    }

    fn train_host(
        &self,
        input: &Input<'_>,
        names: &[&str],
        rng_key: RngKey,
    ) -> Result<(Output, DeviceSaved), EngineError> {
        let mut workspaces = self.lock_workspaces();
        self.check_training()?;
        let factor = input.capacity_factor;
        let scalars = self.scalars(Pass::Train, rng_key, input.tokens, factor)?;
        self.check_outputs(Pass::Train, names)?;
        self.reserve_training(&mut workspaces.every, input.tokens)?;
        let mut saved = self.saved(input.tokens, scalars)?;
        let every = &workspaces.every;
        let find = |tensor| saved.get(tensor).or_else(|| every.get(tensor));
        self.stage(Pass::Train, input, names, find)?;
        saved.kept.workspace.stage(input.tokens);
        workspaces.every.stage(input.tokens);
        self.lay_saved(&mut workspaces, &saved);
        let bound = self.bound(Pass::Train);
        self.run(bound, &scalars, &workspaces.addresses, None)?;
        let every = &workspaces.every;
        let find = |tensor| saved.get(tensor).or_else(|| every.get(tensor));
        let output = self.read(names, input.tokens, find)?;
        Ok((output, saved))
    }

    fn train_raw(&self, call: &RawCall<'_>, rng_key: RngKey) -> Result<DeviceSaved, EngineError> {
        let workspaces = &mut *self.lock_workspaces();
        self.check_training()?;
        let scalars = self.scalars(Pass::Train, rng_key, call.tokens, call.capacity_factor)?;
        let inputs = self.inputs(Pass::Train);
        self.find_given(call.tokens, call.tensors, inputs, &mut workspaces.given)?;
        self.reserve_training(&mut workspaces.every, call.tokens)?;
        let mut saved = self.saved(call.tokens, scalars)?;
        // The workspace's list is overwritten by the next raw call, and backward needs the
        // addresses of this one.
        saved.kept.given.extend_from_slice(&workspaces.given);
        self.lay_saved(workspaces, &saved);
        let bound = self.bound(Pass::Train);
        self.run(bound, &scalars, &workspaces.addresses, None)?;
        Ok(saved)
    }

    /// Runs the layer backward. Gradients of weights stay in the layer's memory; they are
    /// overwritten, or with `accumulate` added to.
    pub(crate) fn back(
        &self,
        saved: &DeviceSaved,
        args: &BackwardArgs<'_>,
        accumulate: bool,
    ) -> Result<Output, EngineError> {
        match args {
            BackwardArgs::Host(dy) => self.back_host(saved, dy, accumulate),
            BackwardArgs::Raw(tensors) => {
                self.back_raw(saved, tensors, accumulate)?;
                Ok(Output::default())
            }
        }
    }

    fn back_host(
        &self,
        saved: &DeviceSaved,
        dy: &Tensor<'_>,
        accumulate: bool,
    ) -> Result<Output, EngineError> {
        let workspaces = &mut *self.lock_workspaces();
        self.check_saved(saved)?;
        self.check_dy(saved.tokens, dy)?;
        self.reserve_every(&mut workspaces.every, saved.tokens)?;
        self.gradient_buffers()?;
        let staged = self.dy().and_then(|dy| workspaces.every.get(dy));
        self.device
            .upload(&dy.data, staged.expect("reserved above"), 0)?;
        let scalars = saved.scalars.accumulating(accumulate);
        self.lay_saved(workspaces, saved);
        self.run(&self.backward, &scalars, &workspaces.addresses, None)?;
        let names = self.input_gradients();
        let every = &workspaces.every;
        self.read(&names, saved.tokens, |tensor| every.get(tensor))
    }

    fn back_raw(
        &self,
        saved: &DeviceSaved,
        tensors: &[(&str, Ptr)],
        accumulate: bool,
    ) -> Result<(), EngineError> {
        let workspaces = &mut *self.lock_workspaces();
        self.check_saved(saved)?;
        let dy = self.dy();
        let given = &mut workspaces.given;
        self.find_given(saved.tokens, tensors, dy.as_slice(), given)?;
        self.reserve_every(&mut workspaces.every, saved.tokens)?;
        self.gradient_buffers()?;
        let scalars = saved.scalars.accumulating(accumulate);
        self.lay_saved(workspaces, saved);
        let Workspaces {
            addresses, given, ..
        } = workspaces;
        addresses.give(given);
        self.run(&self.backward, &scalars, addresses, None)
    }

    /// Sets the addresses of a training call, forward and backward.
    pub(crate) fn lay_saved(&self, workspaces: &mut Workspaces, saved: &DeviceSaved) {
        let Workspaces {
            every,
            addresses,
            weights,
            ..
        } = workspaces;
        saved.captured.fetch_or(self.captured(), Ordering::Relaxed);
        self.lay(addresses, [every, &saved.kept.workspace]);
        addresses.give(&saved.kept.given);
        addresses.give(weights);
    }

    fn dy(&self) -> Option<TensorId> {
        self.id("dy")
    }

    /// Returns the gradient of a weight by its own name, such as `router.weight`, as the last
    /// backward passes left it: of the weight's shape, f32 or `precision.expert_gradients`.
    ///
    /// # Errors
    /// [`EngineError::NoOutput`] for a name without gradient, [`EngineError::Frozen`] for codes of
    /// experts; [`EngineError::NotTraining`].
    pub fn gradient(&self, name: &str) -> Result<Tensor<'static>, EngineError> {
        self.check_training()?;
        let full = format!("grad.{name}");
        let buffers = self.gradient_buffers()?;
        let id = self.id(&full);
        let found = id.and_then(|id| Some((&self.plan()[id], buffers.get(id)?)));
        let names = || {
            let names = buffers.iter().map(|(id, _)| &*self.plan()[id].name);
            names.collect::<Vec<_>>().join(", ")
        };
        let (tensor, buffer) = found.ok_or_else(|| {
            if self.is_frozen(name) {
                let name = name.to_string();
                return EngineError::Frozen { name };
            }
            let known = names();
            EngineError::NoOutput { name: full, known }
        })?;
        let mut host = Tensor::zeros(tensor.dtype, &shape_for(tensor, 0));
        let _turn = self.lock_workspaces();
        self.device.download(buffer, 0, host.data.to_mut())?;
        Ok(host)
    }

    /// Returns whether a name is that of a part of quantized experts: in other layers their matrices
    /// have gradients.
    fn is_frozen(&self, name: &str) -> bool {
        let Some((matrix, end)) = name.rsplit_once('.') else {
            return false;
        };
        let weight = format!("{matrix}.weight");
        let trained = self.id(&format!("grad.{weight}")).is_some();
        matrix.starts_with("experts.") && end != "bias" && self.id(&weight).is_some() && !trained
    }

    /// Returns the gradients of all weights, by the weights' names.
    ///
    /// # Errors
    /// As [`DeviceLayer::gradient`].
    pub fn gradients(&self) -> Result<Tensors<'static>, EngineError> {
        self.check_training()?;
        let names = self.tensors(TensorRole::WeightGradient);
        let names = names.filter_map(|tensor| tensor.name.strip_prefix("grad."));
        names
            .map(|name| Ok((name.to_string(), self.gradient(name)?)))
            .collect()
    }

    /// Returns the address of a weight's gradient on the device, for an optimizer that runs there.
    /// `None` for a name without gradient.
    ///
    /// # Errors
    /// As [`DeviceLayer::gradient`].
    pub fn gradient_ptr(&self, name: &str) -> Result<Option<Ptr>, EngineError> {
        self.check_training()?;
        let buffers = self.gradient_buffers()?;
        let id = self.id(&format!("grad.{name}"));
        Ok(id.and_then(|id| buffers.get(id)).map(Buffer::ptr))
    }

    /// Sets the gradients of all weights to zero.
    ///
    /// # Errors
    /// As [`DeviceLayer::gradient`].
    pub fn zero_gradients(&self) -> Result<(), EngineError> {
        self.check_training()?;
        self.zero_gradients_of(|_| true)
    }

    /// Sets gradients to zero whose name, such as `grad.router.weight`, is `wanted`.
    pub(crate) fn zero_gradients_of(&self, wanted: fn(&str) -> bool) -> Result<(), EngineError> {
        let buffers = self.gradient_buffers()?.iter();
        let _turn = self.lock_workspaces();
        for (_, buffer) in buffers.filter(|(id, _)| wanted(&self.plan()[*id].name)) {
            self.device.upload(&vec![0; buffer.bytes()], buffer, 0)?;
        }
        Ok(())
    }

    /// Returns the names of the tensors that backward returns.
    pub(crate) fn input_gradients(&self) -> Vec<&str> {
        let tensors = self.tensors(TensorRole::InputGradient);
        tensors.map(|tensor| tensor.name.as_str()).collect()
    }

    /// Returns the bytes that a forward pass of `tokens` tokens keeps for backward.
    pub fn saved_bytes(&self, tokens: usize) -> u64 {
        let saved = self.saved.iter();
        saved.map(|&id| self.tilings.bytes(id, tokens as u64)).sum()
    }

    pub(crate) fn tensors(&self, role: TensorRole) -> impl Iterator<Item = &TensorPlan> {
        let tensors = self.plan().tensors.iter();
        tensors.filter(move |tensor| tensor.role == role)
    }

    /// Runs the steps of both passes again on what the last call kept, the
    /// first `tokens` of it, and times each.
    pub(crate) fn time_training(&self, tokens: usize) -> Result<Vec<StepTime>, EngineError> {
        let workspaces = &mut *self.lock_workspaces();
        let scalars = self.scalars(Pass::Train, RngKey::default(), tokens, None)?;
        let mut idle = self.idle.lock().unwrap_or_else(|p| p.into_inner());
        let staged = |kept: &Kept| kept.workspace.has_staged(tokens);
        let last = idle.iter().position(staged);
        let kept = last.filter(|_| workspaces.every.has_staged(tokens));
        let kept = kept.map(|at| idle.swap_remove(at));
        drop(idle);
        let kept = kept.ok_or_else(|| untimed(tokens, "forward_train"))?;
        let saved = self.saved_in(kept, tokens, scalars);
        self.gradient_buffers()?;
        let mut times = Vec::new();
        self.lay_saved(workspaces, &saved);
        for steps in [self.bound(Pass::Train), &self.backward] {
            self.run(steps, &scalars, &workspaces.addresses, Some(&mut times))?;
        }
        Ok(times)
    }

    /// Returns memory for the tensors that a call keeps: that of a finished call, or new.
    pub(crate) fn saved(
        &self,
        tokens: usize,
        scalars: Scalars,
    ) -> Result<DeviceSaved, EngineError> {
        let mut idle = self.idle.lock().unwrap_or_else(|p| p.into_inner());
        let holds = |kept: &Kept| kept.workspace.holds(tokens as u64);
        let fits = idle.iter().position(holds);
        let reused = match fits {
            Some(at) => Some(idle.swap_remove(at)),
            // Growing a set that is too small frees it first; a new one would leave the small sets
            // of earlier calls allocated for good.
            None => idle.pop(),
        };
        drop(idle);
        let mut kept = reused.unwrap_or_default();
        let (workspace, tensors) = (&mut kept.workspace, self.saved.iter().copied());
        workspace.reserve(tensors, &self.tilings, &*self.device, tokens as u64)?;
        Ok(self.saved_in(kept, tokens, scalars))
    }

    fn saved_in(&self, mut kept: Kept, tokens: usize, scalars: Scalars) -> DeviceSaved {
        kept.given.clear();
        DeviceSaved {
            tokens,
            scalars,
            kept,
            captured: AtomicBool::new(false),
            idle: self.idle.clone(),
        }
    }

    /// Returns the gradients of weights, zero before the first backward.
    pub(crate) fn gradient_buffers(&self) -> Result<&Buffers, EngineError> {
        match self.gradients.get() {
            Some(buffers) => Ok(buffers),
            None => self.share_gradients(HashMap::new()),
        }
    }

    /// Makes the gradients of weights that are not in `shared`, unless there
    /// are some already.
    pub(crate) fn share_gradients(
        &self,
        mut shared: HashMap<String, Arc<Buffer>>,
    ) -> Result<&Buffers, EngineError> {
        let mut buffers = Buffers::default();
        for tensor in self.tensors(TensorRole::WeightGradient) {
            let buffer = match shared.remove(&tensor.name) {
                Some(buffer) => buffer,
                None => zeroed(tensor, &*self.device)?.into(),
            };
            buffers.push(self.id(&tensor.name).expect("it is the plan's"), buffer);
        }
        // `get_or_try_init` is unstable, and allocation can fail. Two threads may both allocate
        // here; the buffers of the second are dropped.
        Ok(self.gradients.get_or_init(|| buffers))
    }

    pub(crate) fn check_training(&self) -> Result<(), EngineError> {
        match self.plan().training {
            Some(_) => Ok(()),
            None => Err(EngineError::NotTraining),
        }
    }

    pub(crate) fn check_saved(&self, saved: &DeviceSaved) -> Result<(), EngineError> {
        self.check_training()?;
        // Every layer has its own idle list, so it identifies the layer that made the state, and
        // its memory cannot end in the list of another.
        if Arc::ptr_eq(&saved.idle, &self.idle) {
            Ok(())
        } else {
            Err(EngineError::ForeignSaved)
        }
    }

    pub(crate) fn check_dy(&self, tokens: usize, dy: &Tensor<'_>) -> Result<(), EngineError> {
        let plan = self.plan().tensor("dy").expect("training plans have dy");
        if tokens == 0 && dy.data.is_empty() {
            return Ok(());
        }
        dy.check(plan.dtype, &shape_for(plan, tokens))
            .map_err(|differs| EngineError::input("dy", differs))
    }
}
