//! The passes of a rank's part of a layer.

use super::bound_plan::{BoundPlan, PlanKey};
use super::comm_cast::{CastCall, Packing, counted};
use super::layer::MeshLayer;
use super::mesh_call::MeshCall;
use super::passes::{Passes, Segment};
use super::plan_part::PartCall;
use super::raw::CallerTensors;
use super::routing::Routing;
use super::rows::Rows;
use super::settings::Settings;
use super::shadows::ShadowWeights;
use super::tp_peers::TpPeers;
use crate::call::{Input, Output, RawCall, RngKey};
use crate::error::EngineError;
use crate::host::TokenCount;
use crate::pass::Pass;
use crate::training::Saved;
use moesaic_collectives::Call;
use moesaic_plan::{Both, CommDtype, Role, SATURATED};
use moesaic_target::Ptr;
use moesaic_tensor::Tensor;
use std::sync::Arc;

/// The state that a forward pass of a [`MeshLayer`] keeps for backward on one rank.
pub struct MeshSaved {
    /// The dtype of rows between nodes.
    comm_dtype: Both<CommDtype>,
    /// Backward uses forward's plan and passes, whatever strategy is set by then.
    form: PlanKey,
    passes: Arc<Passes>,
    tokens: Saved,
    experts: Saved,
    rows: Rows,
    /// The decision of routing the tokens of all ranks together.
    routing: Option<Arc<Routing>>,
    /// The shadow part, where experts may have shadows.
    shadows: Option<Saved>,
    /// Weights of shadows, where they stay for backward.
    shadow_weights: Option<ShadowWeights>,
    /// The shared-expert part, where shared experts are sharded.
    shared: Option<(Saved, TpPeers)>,
}

impl MeshSaved {
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

/// The arguments of a forward call and where its results go.
pub(super) enum CallArgs<'c> {
    /// Inputs in host memory, and the names of the outputs to read back.
    Host(&'c Input<'c>, &'c [&'c str]),
    /// Device memory that the caller guarantees.
    Raw(&'c RawCall<'c>),
}

impl CallArgs<'_> {
    fn tokens(&self) -> usize {
        match self {
            CallArgs::Host(input, _) => input.tokens,
            CallArgs::Raw(call) => call.tokens,
        }
    }

    fn capacity_factor(&self) -> Option<f64> {
        match self {
            CallArgs::Host(input, _) => input.capacity_factor,
            CallArgs::Raw(call) => call.capacity_factor,
        }
    }
}

/// The arguments of a backward call.
pub(super) enum BackwardArgs<'c> {
    Host(&'c Tensor<'c>),
    /// The addresses of `dy` and of results, which the caller guarantees.
    Raw(&'c [(&'c str, Ptr)]),
}

impl MeshLayer {
    /// Evaluates the layer for this rank's tokens and reads back the named outputs.
    ///
    /// # Errors
    /// As [`Layer::forward_with`](crate::Layer::forward_with); [`EngineError::Collective`].
    pub fn forward_with(&self, input: &Input<'_>, names: &[&str]) -> Result<Output, EngineError> {
        self.evaluate(&CallArgs::Host(input, names))?.read(names)
    }

    pub(super) fn evaluate(&self, given: &CallArgs<'_>) -> Result<MeshCall<'_>, EngineError> {
        let bound = self.bound();
        // Before the call takes the groups: global routing exchanges the router's inputs by itself
        // and would wait for its own lock.
        let routing = self.global_routing(Pass::Evaluate, given, RngKey::default())?;
        let mut run = self.call(bound, self.strategy.comm_dtype)?;
        run.routing = routing;
        let evaluation = &bound.passes.evaluation;
        run.begin(Pass::Evaluate, evaluation, given, RngKey::default())?;
        run.take_gathered_workspace(false)?;
        run.run(evaluation, |part, rows| {
            let layer = part.layer;
            part.pass(layer.scalars(Pass::Evaluate, RngKey::default(), rows, None)?)
        })?;
        Ok(run)
    }

    /// Evaluates the layer for this rank's tokens and reads back `y`.
    ///
    /// # Errors
    /// As [`MeshLayer::forward_with`].
    pub fn forward(&self, input: &Input<'_>) -> Result<Output, EngineError> {
        self.forward_with(input, &["y"])
    }

    /// Routes this rank's tokens as [`MeshLayer::forward_with`] does, and stops there.
    ///
    /// # Errors
    /// As [`Layer::route`](crate::Layer::route); [`EngineError::Collective`].
    pub fn route(&self, input: &Input<'_>, names: &[&str]) -> Result<Output, EngineError> {
        let given = CallArgs::Host(input, names);
        self.decide(Pass::Route, &given, RngKey::default())?
            .read(names)
    }

    /// Routes this rank's tokens as [`MeshLayer::forward_train`] does with the same rng_key, and
    /// stops there.
    ///
    /// # Errors
    /// As [`Layer::route_train`](crate::Layer::route_train); [`EngineError::Collective`].
    pub fn route_train(
        &self,
        input: &Input<'_>,
        names: &[&str],
        rng_key: RngKey,
    ) -> Result<Output, EngineError> {
        self.tokens.check_training()?;
        let given = CallArgs::Host(input, names);
        self.decide(Pass::RouteTrain, &given, rng_key)?.read(names)
    }

    /// Returns the rows that each rank's tokens have for each expert with weights, the same on all
    /// ranks, as [`MeshLayer::forward_train`] would route them and before a capacity drops any.
    /// Experts without weights are left out, because their rows stay where they are.
    ///
    /// # Errors
    /// As [`MeshLayer::route_train`].
    pub fn tokens_per_expert(
        &self,
        input: &Input<'_>,
        rng_key: RngKey,
    ) -> Result<Vec<Vec<u64>>, EngineError> {
        self.gather_counts(&self.route_train(input, &["counts"], rng_key)?)
    }

    /// Returns the same as [`MeshLayer::tokens_per_expert`], as [`MeshLayer::forward`] would route
    /// the tokens.
    ///
    /// # Errors
    /// As [`MeshLayer::route`].
    pub fn evaluation_tokens_per_expert(
        &self,
        input: &Input<'_>,
    ) -> Result<Vec<Vec<u64>>, EngineError> {
        self.gather_counts(&self.route(input, &["counts"])?)
    }

    /// Gathers every rank's `counts`; `output` has this rank's.
    pub(super) fn gather_counts(&self, output: &Output) -> Result<Vec<Vec<u64>>, EngineError> {
        let counts = output.get("counts").and_then(Tensor::to_vec::<i64>);
        let own = counts.unwrap_or_default().into_iter();
        // Identity and zero experts come last in `counts`. They have no weights, so their rows
        // stay.
        let travel = own.take(self.tokens.spec().shape.experts);
        let rows: Vec<u64> = travel.map(|rows| rows as u64).collect();
        let call = Call::new("rows for experts");
        Ok(self.mesh.groups().world.gather_numbers(&rows, &call)?)
    }

    pub(super) fn decide(
        &self,
        pass: Pass,
        given: &CallArgs<'_>,
        rng_key: RngKey,
    ) -> Result<MeshCall<'_>, EngineError> {
        let bound = self.bound();
        let segments = &bound.routing[usize::from(pass.trains())];
        let routing = self.global_routing(pass, given, rng_key)?;
        // Routing moves no rows, so it needs no cast kernels.
        let mut run = self.call(bound, Both::same(CommDtype::Unchanged))?;
        run.routing = routing;
        run.begin(pass, segments, given, rng_key)?;
        run.run(segments, |_, _| Ok(()))?;
        Ok(run)
    }

    /// Runs the layer forward as in training, reads back the named outputs, and keeps what
    /// backward needs. `rng_key.first_token` is the number of the first token of the
    /// whole mesh; that of this rank follows from it.
    ///
    /// # Errors
    /// As [`Layer::forward_train`](crate::Layer::forward_train); [`EngineError::Collective`].
    pub fn forward_train(
        &self,
        input: &Input<'_>,
        names: &[&str],
        rng_key: RngKey,
    ) -> Result<(Output, MeshSaved), EngineError> {
        let run = self.train(&CallArgs::Host(input, names), rng_key)?;
        let output = run.read(names)?;
        Ok((output, self.saved(run)))
    }

    pub(super) fn train(
        &self,
        given: &CallArgs<'_>,
        rng_key: RngKey,
    ) -> Result<MeshCall<'_>, EngineError> {
        self.tokens.check_training()?;
        let bound = self.bound();
        let routing = self.global_routing(Pass::Train, given, rng_key)?;
        let mut run = self.call(bound, self.strategy.comm_dtype)?;
        run.routing = routing;
        run.idle_weights = Some(&bound.idle_weights);
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
    pub(super) fn saved(&self, run: MeshCall<'_>) -> MeshSaved {
        let MeshCall {
            tokens,
            experts,
            shadows,
            shadow_weights,
            shared,
            rows,
            routing,
            tp_peers,
            ..
        } = run;
        let (tokens, experts) = (tokens.into_saved(), experts.into_saved());
        let kept = tokens.zip(experts).zip(rows);
        let ((tokens, experts), rows) = kept.expect("a pass that trains keeps all of it");
        let bound = self.bound();
        MeshSaved {
            comm_dtype: self.strategy.comm_dtype,
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
    /// other `dp` groups; those of [`MeshLayer::shared`] cover the tokens of its TP peers; those of
    /// [`MeshLayer::replicated`] cover this rank's tokens alone. [`MeshLayer::reduce_gradients`]
    /// sums all of them.
    ///
    /// # Errors
    /// As [`Layer::backward`](crate::Layer::backward); [`EngineError::Collective`].
    pub fn backward(
        &self,
        saved: &MeshSaved,
        dy: &Tensor<'_>,
        accumulate: bool,
    ) -> Result<Output, EngineError> {
        let run = self.back(saved, &BackwardArgs::Host(dy), accumulate)?;
        let mut names = self.tokens.input_gradients();
        if run.cast.as_ref().is_some_and(CastCall::counts_backward) {
            // Only a cast to f16 can saturate: bf16 has the range of f32, and rows of fp8 have
            // scales.
            names.push(SATURATED);
        }
        run.read(&names)
    }

    pub(super) fn back<'l>(
        &'l self,
        saved: &'l MeshSaved,
        dy: &BackwardArgs<'_>,
        accumulate: bool,
    ) -> Result<MeshCall<'l>, EngineError> {
        let bound = self
            .bound_plans
            .get(&saved.form)
            .ok_or(EngineError::ForeignSaved)?;
        let packing = self.packing(bound, saved.comm_dtype);
        if packing.is_none() && saved.comm_dtype != Both::same(CommDtype::Unchanged) {
            return Err(EngineError::ForeignSaved);
        }
        let mut run = self.call(bound, saved.comm_dtype)?;
        run.own = Arc::clone(&saved.rows.own);
        run.routing = saved.routing.clone();
        run.begin_back(saved, dy, accumulate)?;
        // Backward moves the same rows as forward, so it needs no count exchange.
        run.rows = Some(saved.rows.clone());
        run.run(&saved.passes.backward, |_, _| Ok(()))?;
        Ok(run)
    }

    /// Begins a call with a dtype of rows between nodes.
    fn call<'l>(
        &'l self,
        bound: &'l BoundPlan,
        comm_dtype: Both<CommDtype>,
    ) -> Result<MeshCall<'l>, EngineError> {
        let parts = bound.parts(self.held());
        let groups = self.mesh.groups();
        let cast = self.packing(bound, comm_dtype).map(Packing::begin);
        Ok(MeshCall {
            cast: cast.transpose()?,
            mesh: &self.mesh,
            plan: &bound.plan,
            label: &bound.plan.tokens.spec.name,
            row_schedule: self.row_schedule,
            groups,
            tokens: PartCall::new(parts.tokens),
            experts: PartCall::new(parts.experts),
            owned: &self.experts,
            shadows: parts.shadows.map(PartCall::new),
            model: &self.shadow_model,
            idle_weights: None,
            shadow_weights: None,
            shared: parts.shared.map(PartCall::new),
            routing: None,
            own: Arc::default(),
            rows: None,
            tp_peers: None,
            exchanged: &bound.exchanged,
            caller: CallerTensors::default(),
            in_flight: Vec::new(),
            recorder: self.recorder.as_deref(),
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
        let (layer, tokens) = (self.tokens.layer, given.tokens());
        match given {
            CallArgs::Host(_, names) => layer.check_outputs(pass, &of_layer(names))?,
            CallArgs::Raw(call) => {
                let ports = [Role::Input, Role::Output];
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
            Pass::Train => self.tokens.train(scalars)?,
            _ => self.tokens.pass(scalars)?,
        }
        match given {
            CallArgs::Host(input, names) => {
                let buffer = |tensor| Some(&**self.tokens.buffer(tensor));
                layer.stage(pass, input, &of_layer(names), buffer)
            }
            CallArgs::Raw(_) => self.copy_inputs(),
        }
    }

    /// Reserves memory on all parts for a backward pass and uploads `dy`.
    fn begin_back(
        &mut self,
        saved: &'l MeshSaved,
        dy: &BackwardArgs<'_>,
        accumulate: bool,
    ) -> Result<(), EngineError> {
        let (layer, tokens) = (self.tokens.layer, saved.tokens());
        layer.check_saved(&saved.tokens)?;
        if let BackwardArgs::Raw(tensors) = dy {
            let (inputs, ports) = (layer.id("dy"), [Role::OutputGradient, Role::InputGradient]);
            self.take(tokens, tensors, inputs.as_slice(), ports)?;
        }
        self.take_gathered_workspace(true)?;
        // Before `back` of each part, which lays out the addresses of what was taken here.
        self.reserve_shadows_backward(saved.shadow_weights.as_ref())?;
        self.tokens.back(&saved.tokens, accumulate)?;
        self.experts.back(&saved.experts, accumulate)?;
        if let (Some(part), Some(kept)) = (&mut self.shadows, &saved.shadows) {
            part.back(kept, accumulate)?;
        }
        self.begin_gradients(accumulate)?;
        self.begin_shadow_gradients(accumulate)?;
        if let (Some(part), Some((kept, tp_peers))) = (&mut self.shared, &saved.shared) {
            part.back(kept, accumulate)?;
            self.tp_peers = Some(tp_peers.clone());
        }
        match dy {
            BackwardArgs::Host(dy) => {
                layer.check_dy(tokens, dy)?;
                let staged = self.tokens.named("dy").expect("training plans have dy");
                Ok(layer.device.upload(&dy.data, staged, 0)?)
            }
            BackwardArgs::Raw(_) => self.copy_inputs(),
        }
    }

    pub(super) fn read(&self, names: &[&str]) -> Result<Output, EngineError> {
        let tokens = self.tokens.scalars().tokens();
        let buffer = |tensor| Some(&**self.tokens.buffer(tensor));
        let own = of_layer(names);
        let mut output = self.tokens.layer.read(&own, tokens, buffer)?;
        if own.len() < names.len() {
            let saturated = match &self.cast {
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
