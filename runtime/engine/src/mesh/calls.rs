//! The passes of a rank's part of a layer.

use super::comm_cast::{CastCall, Packing, counted};
use super::layer::MeshLayer;
use super::passes::{Passes, Segment};
use super::plan_part::PartCall;
use super::raw::Beside;
use super::routing::Routing;
use super::rows::Rows;
use super::run::Run;
use super::settings::Settings;
use super::shadows::ShadowWeights;
use super::tp_peers::TpPeers;
use super::view::{Form, View};
use crate::call::{Input, Output, RawCall, RngKey};
use crate::error::EngineError;
use crate::pass::Pass;
use crate::training::Saved;
use moesaic_collectives::Call;
use moesaic_plan::{Both, CommDtype, Role, SATURATED};
use moesaic_target::Ptr;
use moesaic_tensor::Tensor;
use std::sync::Arc;

/// What a forward pass of a [`MeshLayer`] left for backward on one rank.
pub struct MeshSaved {
    /// What rows are group nodes.
    comm_dtype: Both<CommDtype>,
    /// Backward goes as forward did.
    form: Form,
    passes: Arc<Passes>,
    tokens: Saved,
    experts: Saved,
    rows: Rows,
    /// What routing the tokens of all ranks had decided.
    routing: Option<Arc<Routing>>,
    /// Where experts may have shadows.
    shadows: Option<Saved>,
    /// Their weights, where they stay.
    shadow_weights: Option<ShadowWeights>,
    /// Where shared experts are sliced.
    shared: Option<(Saved, TpPeers)>,
}

impl MeshSaved {
    /// Tokens of the call, of this rank.
    pub fn tokens(&self) -> usize {
        self.tokens.tokens()
    }

    /// Rows that this rank's experts got.
    pub fn rows(&self) -> usize {
        self.rows.arriving()
    }

    /// Experts that had shadows in the call, by their owners.
    pub fn shadowed(&self) -> &[usize] {
        &self.rows.own.shadowed
    }
}

/// What a call is given, and where its results go.
pub(super) enum Given<'c> {
    /// Host memory, and the names of what is read back.
    Host(&'c Input<'c>, &'c [&'c str]),
    /// Device memory, for which the caller vouches.
    Raw(&'c RawCall<'c>),
}

impl Given<'_> {
    fn tokens(&self) -> usize {
        match self {
            Given::Host(input, _) => input.tokens,
            Given::Raw(call) => call.tokens,
        }
    }

    fn capacity_factor(&self) -> Option<f64> {
        match self {
            Given::Host(input, _) => input.capacity_factor,
            Given::Raw(call) => call.capacity_factor,
        }
    }
}

/// What a backward pass is given.
pub(super) enum Dy<'c> {
    Host(&'c Tensor<'c>),
    /// Where it and results are, for which the caller vouches.
    Raw(&'c [(&'c str, Ptr)]),
}

impl MeshLayer {
    /// Evaluates the layer for this rank's tokens and reads back the named outputs.
    ///
    /// # Errors
    /// As [`Layer::forward_with`](crate::Layer::forward_with); [`EngineError::Collective`].
    pub fn forward_with(&self, input: &Input<'_>, names: &[&str]) -> Result<Output, EngineError> {
        self.evaluate(&Given::Host(input, names))?.read(names)
    }

    pub(super) fn evaluate(&self, given: &Given<'_>) -> Result<Run<'_>, EngineError> {
        let view = self.view();
        let routing = self.routing_of_all(Pass::Evaluate, given, RngKey::default())?;
        let mut run = self.call(view, self.strategy.comm_dtype)?;
        run.routing = routing;
        let evaluation = &view.passes.evaluation;
        run.begin(Pass::Evaluate, evaluation, given, RngKey::default())?;
        run.borrow_workspace(false)?;
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

    /// Decides where this rank's tokens go as [`MeshLayer::forward_with`] does, and
    /// nothing else.
    ///
    /// # Errors
    /// As [`Layer::route`](crate::Layer::route); [`EngineError::Collective`].
    pub fn route(&self, input: &Input<'_>, names: &[&str]) -> Result<Output, EngineError> {
        let given = Given::Host(input, names);
        self.decide(Pass::Route, &given, RngKey::default())?
            .read(names)
    }

    /// Decides where this rank's tokens go as [`MeshLayer::forward_train`] does with the
    /// same RNG key, and nothing else.
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
        let given = Given::Host(input, names);
        self.decide(Pass::RouteTrain, &given, rng_key)?.read(names)
    }

    /// Rows that each rank's tokens have for each expert with weights, as
    /// [`MeshLayer::forward_train`] would route them, before a capacity drops any: the same on
    /// all ranks. Rows of experts without weights stay where they are, and do not count.
    ///
    /// # Errors
    /// As [`MeshLayer::route_train`].
    pub fn loads(&self, input: &Input<'_>, rng_key: RngKey) -> Result<Vec<Vec<u64>>, EngineError> {
        self.loads_of(&self.route_train(input, &["counts"], rng_key)?)
    }

    /// The same as [`MeshLayer::forward`] would route them.
    ///
    /// # Errors
    /// As [`MeshLayer::route`].
    pub fn evaluation_loads(&self, input: &Input<'_>) -> Result<Vec<Vec<u64>>, EngineError> {
        self.loads_of(&self.route(input, &["counts"])?)
    }

    /// Of every rank, from this one's `counts`.
    pub(super) fn loads_of(&self, output: &Output) -> Result<Vec<Vec<u64>>, EngineError> {
        let counts = output.get("counts").and_then(Tensor::to_vec::<i64>);
        let own = counts.unwrap_or_default().into_iter();
        let travel = own.take(self.tokens.spec().shape.experts);
        let rows: Vec<u64> = travel.map(|rows| rows as u64).collect();
        let call = Call::new("rows for experts");
        Ok(self.mesh.groups().world.gather_numbers(&rows, &call)?)
    }

    pub(super) fn decide(
        &self,
        pass: Pass,
        given: &Given<'_>,
        rng_key: RngKey,
    ) -> Result<Run<'_>, EngineError> {
        let view = self.view();
        let segments = &view.routing[usize::from(pass.trains())];
        let routing = self.routing_of_all(pass, given, rng_key)?;
        let mut run = self.call(view, Both::same(CommDtype::Unchanged))?;
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
        let run = self.train(&Given::Host(input, names), rng_key)?;
        let output = run.read(names)?;
        Ok((output, self.saved(run)))
    }

    pub(super) fn train(&self, given: &Given<'_>, rng_key: RngKey) -> Result<Run<'_>, EngineError> {
        self.tokens.check_training()?;
        let view = self.view();
        let routing = self.routing_of_all(Pass::Train, given, rng_key)?;
        let mut run = self.call(view, self.strategy.comm_dtype)?;
        run.routing = routing;
        run.idle_weights = Some(&view.idle_weights);
        let forward = &view.passes.forward;
        run.begin(Pass::Train, forward, given, rng_key)?;
        run.borrow_workspace(false)?;
        run.run(forward, |part, rows| {
            let layer = part.layer;
            part.train(layer.scalars(Pass::Train, RngKey::default(), rows, None)?)
        })?;
        Ok(run)
    }

    /// What a pass that trains keeps.
    pub(super) fn saved(&self, run: Run<'_>) -> MeshSaved {
        let Run {
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
        let view = self.view();
        MeshSaved {
            comm_dtype: self.strategy.comm_dtype,
            form: view.form,
            passes: Arc::clone(&view.passes),
            tokens,
            experts,
            rows,
            routing,
            shadows: shadows.and_then(PartCall::into_saved),
            shadow_weights,
            shared: shared.and_then(PartCall::into_saved).zip(tp_peers),
        }
    }

    /// Runs the layer backward from this rank's `dy`: returns `dx` and
    /// `grad.topk_weights` of its tokens, and leaves gradients of weights in both parts.
    /// Those of experts are whole but for other groups that hold the same; those of
    /// [`MeshLayer::shared`] are of the tokens of ranks with shards of the same experts;
    /// those of [`MeshLayer::replicated`] are of this rank's tokens alone:
    /// [`MeshLayer::reduce_gradients`] adds up all.
    ///
    /// # Errors
    /// As [`Layer::backward`](crate::Layer::backward); [`EngineError::Collective`].
    pub fn backward(
        &self,
        saved: &MeshSaved,
        dy: &Tensor<'_>,
        accumulate: bool,
    ) -> Result<Output, EngineError> {
        let run = self.back(saved, &Dy::Host(dy), accumulate)?;
        let mut names = self.tokens.input_gradients();
        if run.cast.as_ref().is_some_and(CastCall::counts_backward) {
            names.push(SATURATED);
        }
        run.read(&names)
    }

    pub(super) fn back<'l>(
        &'l self,
        saved: &'l MeshSaved,
        dy: &Dy<'_>,
        accumulate: bool,
    ) -> Result<Run<'l>, EngineError> {
        let view = self
            .views
            .get(&saved.form)
            .ok_or(EngineError::ForeignSaved)?;
        let packing = self.packing(view, saved.comm_dtype);
        if packing.is_none() && saved.comm_dtype != Both::same(CommDtype::Unchanged) {
            return Err(EngineError::ForeignSaved);
        }
        let mut run = self.call(view, saved.comm_dtype)?;
        run.own = Arc::clone(&saved.rows.own);
        run.routing = saved.routing.clone();
        run.begin_back(saved, dy, accumulate)?;
        run.rows = Some(saved.rows.clone());
        run.run(&saved.passes.backward, |_, _| Ok(()))?;
        Ok(run)
    }

    /// A call whose rows are so group nodes.
    fn call<'l>(
        &'l self,
        view: &'l View,
        comm_dtype: Both<CommDtype>,
    ) -> Result<Run<'l>, EngineError> {
        let parts = view.parts(self.held());
        let groups = self.mesh.groups();
        let cast = self.packing(view, comm_dtype).map(Packing::begin);
        Ok(Run {
            cast: cast.transpose()?,
            mesh: &self.mesh,
            plan: &view.plan,
            label: &view.plan.tokens.spec.name,
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
            exchanged: &view.exchanged,
            beside: Beside::default(),
            in_flight: Vec::new(),
            recorder: self.recorder.as_deref(),
        })
    }
}

impl<'l> Run<'l> {
    /// Puts the inputs of this rank's tokens where kernels read them.
    fn begin(
        &mut self,
        pass: Pass,
        segments: &[Segment],
        given: &Given<'_>,
        rng_key: RngKey,
    ) -> Result<(), EngineError> {
        let (layer, tokens) = (self.tokens.layer, given.tokens());
        match given {
            Given::Host(_, names) => layer.check_outputs(pass, &of_layer(names))?,
            Given::Raw(call) => {
                let ports = [Role::Input, Role::Output];
                self.take((tokens, call.tensors), layer.inputs(pass), ports)?;
            }
        }
        let settings = Settings {
            trains: pass.trains(),
            rng_key,
            capacity_factor: given.capacity_factor(),
        };
        let step_counts = self.step_counts(segments, tokens, &settings)?;
        let most = step_counts.map_or(tokens, |step_counts| step_counts.most);
        let before = step_counts.map_or(0, |step_counts| step_counts.before) as u64;
        let rng_key = RngKey {
            first_token: rng_key.first_token + before,
            ..rng_key
        };
        let factor = given.capacity_factor();
        let scalars = layer.scalars_among(pass, rng_key, (tokens, most), factor)?;
        match pass {
            Pass::Train => self.tokens.train(scalars)?,
            _ => self.tokens.pass(scalars)?,
        }
        match given {
            Given::Host(input, names) => {
                let buffer = |tensor| Some(&**self.tokens.buffer(tensor));
                layer.stage(pass, input, &of_layer(names), buffer)
            }
            Given::Raw(_) => self.bring(),
        }
    }

    /// Makes room on all parts for a pass back, and puts `dy` where kernels read it.
    fn begin_back(
        &mut self,
        saved: &'l MeshSaved,
        dy: &Dy<'_>,
        accumulate: bool,
    ) -> Result<(), EngineError> {
        let (layer, tokens) = (self.tokens.layer, saved.tokens());
        layer.check_saved(&saved.tokens)?;
        if let Dy::Raw(tensors) = dy {
            let (inputs, ports) = (layer.id("dy"), [Role::OutputGradient, Role::InputGradient]);
            self.take((tokens, tensors), inputs.as_slice(), ports)?;
        }
        self.borrow_workspace(true)?;
        self.lend_shadows_back(saved.shadow_weights.as_ref())?;
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
            Dy::Host(dy) => {
                layer.check_dy(tokens, dy)?;
                let staged = self.tokens.named("dy").expect("training plans have dy");
                Ok(layer.device.upload(&dy.data, staged, 0)?)
            }
            Dy::Raw(_) => self.bring(),
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

/// The names of tensors of the layer; the other one is of ranks.
fn of_layer<'n>(names: &[&'n str]) -> Vec<&'n str> {
    let names = names.iter().copied();
    names.filter(|name| *name != SATURATED).collect()
}
