//! The passes of a rank's part of a layer.

use super::bound_plan::BoundPlan;
use super::call_state::{
    CallCounts, CallParts, CallRequests, CallTransfers, CallWeights, CallerTensors,
};
use super::cast_kernels::counted;
use super::comm_cast::{CastCall, Packing};
use super::layer::{Choice, RankLayer};
use super::mesh_call::MeshCall;
use super::passes::{Passes, Segment};
use super::plan_part::PartCall;
use super::routing::Routing;
use super::rows::Rows;
use super::settings::Settings;
use super::shadow_weights::ShadowWeights;
use super::tp_peers::TpPeers;
use crate::call::{BackwardArgs, CallArgs, Output, RawCall, RngKey};
use crate::error::EngineError;
use crate::host::TokenCount;
use crate::into::{check_output, raw_into};
use crate::pass::Pass;
use crate::training::DeviceSaved;
use moesaic_collectives::Call;
use moesaic_plan::{Both, CommDtype, LayerPlan, PlanForm, SATURATED, Strategy, TensorRole};
use moesaic_target::Ptr;
use moesaic_tensor::{Element, Tensor};
use std::borrow::Cow;
use std::sync::Arc;

/// The state that a forward pass of a [`RankLayer`] keeps for backward on one rank.
pub(crate) struct RankSaved {
    strategy: Strategy,
    /// Backward uses forward's plan and passes, whatever strategy is set by then.
    form: PlanForm,
    passes: Arc<Passes>,
    tokens: DeviceSaved,
    experts: DeviceSaved,
    rows: Rows,
    /// The decision of routing the tokens of all ranks together.
    routing: Option<Arc<Routing>>,
    /// The shadow part, where experts may have shadows.
    shadows: Option<DeviceSaved>,
    /// Weights of shadows, where they stay for backward.
    shadow_weights: Option<ShadowWeights>,
    /// The shared-expert part, where shared experts are sharded.
    shared: Option<(DeviceSaved, TpPeers)>,
}

impl RankSaved {
    /// Returns the strategy of the call.
    pub fn strategy(&self) -> Strategy {
        self.strategy
    }

    /// Returns the tokens of this rank in the call.
    pub fn tokens(&self) -> usize {
        self.tokens.tokens()
    }

    /// Returns the number of rows that this rank's experts got.
    pub fn rows(&self) -> usize {
        self.rows.arriving()
    }

    /// Returns the experts that had shadows in the call, ordered by owner.
    pub fn shadowed(&self) -> &[usize] {
        &self.rows.own.shadowed
    }
}

impl RankLayer {
    /// Runs a pass that keeps nothing, for this rank's tokens.
    pub(crate) fn call(
        &self,
        pass: Pass,
        args: &CallArgs<'_>,
        rng_key: RngKey,
    ) -> Result<Output, EngineError> {
        let choice = self.choice();
        let run = match pass {
            Pass::Evaluate => self.evaluate(&choice, args)?,
            _ => self.decide(&choice, pass, args, rng_key)?,
        };
        run.results(args)
    }

    /// Evaluates the layer for this rank's tokens and writes `y` into a slice of the caller.
    pub(crate) fn forward_into<E: Element>(
        &self,
        args: &CallArgs<'_>,
        y: &mut [E],
    ) -> Result<(), EngineError> {
        let layer = &self.tokens;
        let id = layer.id("y").expect("every layer has y");
        if matches!(args, CallArgs::Raw(_)) {
            return Err(raw_into());
        }
        // Before the first exchange: a rank that fails alone must not leave the others in it.
        check_output(&layer.plan()[id], E::DTYPE, y.len(), args.tokens())?;
        let choice = self.choice();
        let run = self.evaluate(&choice, args)?;
        let bytes = bytemuck::cast_slice_mut(y);
        Ok(layer
            .device
            .download(run.parts.tokens.buffer(id), 0, bytes)?)
    }

    fn evaluate<'l>(
        &'l self,
        choice: &'l Choice,
        given: &CallArgs<'_>,
    ) -> Result<MeshCall<'l>, EngineError> {
        let bound = self.bound(choice);
        // Before the call takes the groups: global routing exchanges the router's inputs by itself
        // and would wait for its own lock.
        let routing = self.global_routing(Pass::Evaluate, given, RngKey::default())?;
        let mut run = self.begin(choice, bound, choice.strategy.comm_dtype)?;
        run.counts.routing = routing;
        let evaluation = &bound.passes.evaluation;
        run.begin(Pass::Evaluate, evaluation, given, RngKey::default())?;
        run.take_gathered_workspace(false)?;
        run.run(evaluation, |part, rows| {
            let layer = part.layer;
            part.pass(layer.scalars(Pass::Evaluate, RngKey::default(), rows, None)?)
        })?;
        Ok(run)
    }

    /// Returns the rows that each rank's tokens have for each expert with weights, the same on all
    /// ranks, before a capacity drops any: as a training pass with this key would route them, or
    /// without one an evaluation. Writes nothing to the caller's memory. Experts without weights
    /// are left out, because their rows stay where they are.
    pub(crate) fn tokens_per_expert(
        &self,
        args: &CallArgs<'_>,
        rng_key: Option<RngKey>,
    ) -> Result<Vec<Vec<u64>>, EngineError> {
        let pass = match rng_key {
            Some(_) => Pass::RouteTrain,
            None => Pass::Route,
        };
        let tensors = inputs_of(self.tokens.plan(), args);
        let args = match args {
            CallArgs::Host(input, _) => CallArgs::Host(Cow::Borrowed(input), &["counts"]),
            CallArgs::Raw(call) => CallArgs::Raw(RawCall {
                tensors: &tensors,
                ..*call
            }),
        };
        // The choice is held for this routing alone: the tuner that asked for the counts sets a
        // strategy next, and would wait for its own lock.
        let choice = self.choice();
        let run = self.decide(&choice, pass, &args, rng_key.unwrap_or_default())?;
        let output = run.read(&["counts"])?;
        drop(run); // its groups are needed
        self.gather_counts(&output)
    }

    /// Gathers every rank's `counts`; `output` has this rank's.
    fn gather_counts(&self, output: &Output) -> Result<Vec<Vec<u64>>, EngineError> {
        let counts = output.get("counts").and_then(Tensor::to_vec::<i64>);
        let own = counts.unwrap_or_default().into_iter();
        // Identity and zero experts come last in `counts`. They have no weights, so their rows
        // stay.
        let travel = own.take(self.tokens.spec().shape.experts);
        let rows: Vec<u64> = travel.map(|rows| rows as u64).collect();
        let call = Call::new("rows for experts");
        Ok(self.mesh.groups().world.gather_numbers(&rows, &call)?)
    }

    fn decide<'l>(
        &'l self,
        choice: &'l Choice,
        pass: Pass,
        given: &CallArgs<'_>,
        rng_key: RngKey,
    ) -> Result<MeshCall<'l>, EngineError> {
        if pass.trains() {
            self.tokens.check_training()?;
        }
        let bound = self.bound(choice);
        let segments = &bound.routing[usize::from(pass.trains())];
        let routing = self.global_routing(pass, given, rng_key)?;
        // Routing moves no rows, so it needs no cast kernels.
        let mut run = self.begin(choice, bound, Both::same(CommDtype::Unchanged))?;
        run.counts.routing = routing;
        run.begin(pass, segments, given, rng_key)?;
        run.run(segments, |_, _| Ok(()))?;
        Ok(run)
    }

    /// Runs the layer forward as in training and keeps what backward needs. `rng_key.first_token`
    /// is the number of the first token of the whole mesh; that of this rank follows from it.
    pub(crate) fn train(
        &self,
        args: &CallArgs<'_>,
        rng_key: RngKey,
    ) -> Result<(Output, RankSaved), EngineError> {
        let choice = self.choice();
        let run = self.train_call(&choice, args, rng_key)?;
        let output = run.results(args)?;
        Ok((output, self.saved(&choice, run)))
    }

    fn train_call<'l>(
        &'l self,
        choice: &'l Choice,
        given: &CallArgs<'_>,
        rng_key: RngKey,
    ) -> Result<MeshCall<'l>, EngineError> {
        self.tokens.check_training()?;
        let bound = self.bound(choice);
        let routing = self.global_routing(Pass::Train, given, rng_key)?;
        let mut run = self.begin(choice, bound, choice.strategy.comm_dtype)?;
        run.counts.routing = routing;
        run.weights.idle_weights = Some(&bound.idle_weights);
        let forward = &bound.passes.forward;
        run.begin(Pass::Train, forward, given, rng_key)?;
        run.take_gathered_workspace(false)?;
        run.run(forward, |part, rows| {
            let layer = part.layer;
            part.train(layer.scalars(Pass::Train, RngKey::default(), rows, None)?)
        })?;
        Ok(run)
    }

    /// Returns the state that a training pass keeps.
    fn saved(&self, choice: &Choice, run: MeshCall<'_>) -> RankSaved {
        let MeshCall {
            parts,
            counts,
            weights,
            ..
        } = run;
        let CallParts {
            tokens,
            experts,
            shadows,
            shared,
            ..
        } = parts;
        let CallCounts {
            rows,
            routing,
            tp_peers,
            ..
        } = counts;
        let shadow_weights = weights.shadow_weights;
        let (tokens, experts) = (tokens.into_saved(), experts.into_saved());
        let kept = tokens.zip(experts).zip(rows);
        let ((tokens, experts), rows) = kept.expect("a pass that trains keeps all of it");
        let bound = self.bound(choice);
        RankSaved {
            strategy: choice.strategy,
            form: bound.form,
            passes: Arc::clone(&bound.passes),
            tokens,
            experts,
            rows,
            routing,
            shadows: shadows.and_then(PartCall::into_saved),
            shadow_weights,
            shared: shared.and_then(PartCall::into_saved).zip(tp_peers),
        }
    }

    /// Runs the layer backward from this rank's `dy`. Returns `dx` and `grad.topk_weights` of its
    /// tokens and leaves gradients of weights in the parts. Gradients of experts are complete up to
    /// other `dp` groups; those of [`RankLayer::shared`] cover the tokens of its TP peers; those of
    /// [`RankLayer::replicated`] cover this rank's tokens alone. [`RankLayer::reduce_gradients`]
    /// sums all of them.
    pub(crate) fn back(
        &self,
        saved: &RankSaved,
        args: &BackwardArgs<'_>,
        accumulate: bool,
    ) -> Result<Output, EngineError> {
        let choice = self.choice();
        let run = self.back_call(&choice, saved, args, accumulate)?;
        if matches!(args, BackwardArgs::Raw(_)) {
            run.copy_results()?;
            return Ok(Output::default());
        }
        let mut names = self.tokens.input_gradients();
        if run
            .transfers
            .cast
            .as_ref()
            .is_some_and(CastCall::counts_backward)
        {
            // Only a cast to f16 can saturate: bf16 has the range of f32, and rows of fp8 have
            // scales.
            names.push(SATURATED);
        }
        run.read(&names)
    }

    fn back_call<'l>(
        &'l self,
        choice: &'l Choice,
        saved: &'l RankSaved,
        dy: &BackwardArgs<'_>,
        accumulate: bool,
    ) -> Result<MeshCall<'l>, EngineError> {
        let bound = choice
            .bound_plans
            .get(&saved.form)
            .ok_or(EngineError::ForeignSaved)?;
        let comm_dtype = saved.strategy.comm_dtype;
        let packing = choice.packing(bound, comm_dtype);
        if packing.is_none() && comm_dtype != Both::same(CommDtype::Unchanged) {
            return Err(EngineError::ForeignSaved);
        }
        let mut run = self.begin(choice, bound, comm_dtype)?;
        run.counts.own = Arc::clone(&saved.rows.own);
        run.counts.routing = saved.routing.clone();
        run.begin_back(saved, dy, accumulate)?;
        // Backward moves the same rows as forward, so it needs no count exchange.
        run.counts.rows = Some(saved.rows.clone());
        run.run(&saved.passes.backward, |_, _| Ok(()))?;
        Ok(run)
    }

    /// Begins a call with a dtype of rows between nodes.
    fn begin<'l>(
        &'l self,
        choice: &'l Choice,
        bound: &'l BoundPlan,
        comm_dtype: Both<CommDtype>,
    ) -> Result<MeshCall<'l>, EngineError> {
        let parts = bound.parts(self.held());
        let groups = self.mesh.groups();
        let cast = choice.packing(bound, comm_dtype).map(Packing::begin);
        Ok(MeshCall {
            mesh: &self.mesh,
            plan: &bound.plan,
            label: &self.label,
            groups,
            parts: CallParts {
                tokens: PartCall::new(parts.tokens),
                experts: PartCall::new(parts.experts),
                owned: &self.experts,
                shadows: parts.shadows.map(PartCall::new),
                shared: parts.shared.map(PartCall::new),
            },
            counts: CallCounts::default(),
            weights: CallWeights {
                model: &choice.shadow_model,
                idle_weights: None,
                shadow_weights: None,
            },
            requests: CallRequests {
                in_flight: Vec::new(),
                recorder: self.recorder.as_deref(),
            },
            transfers: CallTransfers {
                row_schedule: choice.row_schedule,
                cast: cast.transpose()?,
                exchanged: &bound.exchanged,
                caller: CallerTensors::default(),
            },
        })
    }
}

impl<'l> MeshCall<'l> {
    /// Uploads the inputs of this rank's tokens.
    fn begin(
        &mut self,
        pass: Pass,
        segments: &[Segment],
        given: &CallArgs<'_>,
        rng_key: RngKey,
    ) -> Result<(), EngineError> {
        let (layer, tokens) = (self.parts.tokens.layer, given.tokens());
        match given {
            CallArgs::Host(_, names) => layer.check_outputs(pass, &of_layer(names))?,
            CallArgs::Raw(call) => {
                let ports = [TensorRole::Input, TensorRole::Output];
                self.take(tokens, call.tensors, layer.inputs(pass), ports)?;
            }
        }
        let settings = Settings {
            trains: pass.trains(),
            rng_key,
            capacity_factor: given.capacity_factor(),
        };
        // Names of outputs and the caller's addresses are checked before this first exchange: a
        // rank that fails alone must not leave the others waiting in it.
        let step_counts = self.step_counts(segments, tokens, &settings)?;
        let most = step_counts.map_or(tokens, |step_counts| step_counts.most);
        let before = step_counts.map_or(0, |step_counts| step_counts.before) as u64;
        let rng_key = RngKey {
            // Random numbers depend on a token's index in the whole batch, so every rank draws what
            // one process would draw for its tokens.
            first_token: rng_key.first_token + before,
            ..rng_key
        };
        let factor = given.capacity_factor();
        let scalars =
            layer.scalars_among(pass, rng_key, TokenCount { own: tokens, most }, factor)?;
        match pass {
            Pass::Train => self.parts.tokens.train(scalars)?,
            _ => self.parts.tokens.pass(scalars)?,
        }
        match given {
            CallArgs::Host(input, names) => {
                let buffer = |tensor| Some(&**self.parts.tokens.buffer(tensor));
                layer.stage(pass, input, &of_layer(names), buffer)
            }
            CallArgs::Raw(_) => self.copy_inputs(),
        }
    }

    /// Reserves memory on all parts for a backward pass and uploads `dy`.
    fn begin_back(
        &mut self,
        saved: &'l RankSaved,
        dy: &BackwardArgs<'_>,
        accumulate: bool,
    ) -> Result<(), EngineError> {
        let (layer, tokens) = (self.parts.tokens.layer, saved.tokens());
        layer.check_saved(&saved.tokens)?;
        if let BackwardArgs::Raw(tensors) = dy {
            let (inputs, ports) = (
                layer.id("dy"),
                [TensorRole::OutputGradient, TensorRole::InputGradient],
            );
            self.take(tokens, tensors, inputs.as_slice(), ports)?;
        }
        self.take_gathered_workspace(true)?;
        // Before `back` of each part, which lays out the addresses of what was taken here.
        self.reserve_shadows_backward(saved.shadow_weights.as_ref())?;
        self.parts.tokens.back(&saved.tokens, accumulate)?;
        self.parts.experts.back(&saved.experts, accumulate)?;
        if let (Some(part), Some(kept)) = (&mut self.parts.shadows, &saved.shadows) {
            part.back(kept, accumulate)?;
        }
        self.begin_gradients(accumulate)?;
        self.begin_shadow_gradients(accumulate)?;
        if let (Some(part), Some((kept, tp_peers))) = (&mut self.parts.shared, &saved.shared) {
            part.back(kept, accumulate)?;
            self.counts.tp_peers = Some(tp_peers.clone());
        }
        match dy {
            BackwardArgs::Host(dy) => {
                layer.check_dy(tokens, dy)?;
                let staged = self
                    .parts
                    .tokens
                    .named("dy")
                    .expect("training plans have dy");
                Ok(layer.device.upload(&dy.data, staged, 0)?)
            }
            BackwardArgs::Raw(_) => self.copy_inputs(),
        }
    }

    /// Returns what the caller asked for: tensors in host memory, or none where they are in the
    /// caller's.
    fn results(&self, args: &CallArgs<'_>) -> Result<Output, EngineError> {
        match args {
            CallArgs::Host(_, names) => self.read(names),
            CallArgs::Raw(_) => {
                self.copy_results()?;
                Ok(Output::default())
            }
        }
    }

    fn read(&self, names: &[&str]) -> Result<Output, EngineError> {
        let tokens = self.parts.tokens.scalars().tokens();
        let buffer = |tensor| Some(&**self.parts.tokens.buffer(tensor));
        let own = of_layer(names);
        let mut output = self.parts.tokens.layer.read(&own, tokens, buffer)?;
        if own.len() < names.len() {
            let saturated = match &self.transfers.cast {
                Some(cast) => cast.saturated()?,
                None => counted(0),
            };
            output.tensors.insert(SATURATED.to_string(), saturated);
        }
        Ok(output)
    }
}

/// Returns the names that are tensors of the layer. [`SATURATED`] is the one output that belongs to
/// ranks.
fn of_layer<'n>(names: &[&'n str]) -> Vec<&'n str> {
    let names = names.iter().copied();
    names.filter(|name| *name != SATURATED).collect()
}

/// Returns the addresses of inputs alone, if the arguments are addresses. The caller's own call
/// with the same tensors follows and has to find its memory untouched.
fn inputs_of<'c>(plan: &LayerPlan, args: &CallArgs<'c>) -> Vec<(&'c str, Ptr)> {
    let CallArgs::Raw(call) = args else {
        return Vec::new();
    };
    let is_input = |(name, _): &&(&str, Ptr)| {
        let tensor = plan.tensor(name);
        tensor.is_some_and(|tensor| tensor.role == TensorRole::Input)
    };
    call.tensors.iter().filter(is_input).copied().collect()
}
