//! What a rank runs of a layer.

use super::groups::Mesh;
use super::part::Around;
use super::rows::{Neighbours, Rows};
use super::run::{Run, SLICED, Segment, segments};
use super::shard::Shard;
use super::side::Side;
use crate::call::{Counters, Input, Output};
use crate::engine::Engine;
use crate::error::EngineError;
use crate::layer::{Layer, check_spec};
use crate::pass::Pass;
use crate::texts::Texts;
use crate::training::Saved;
use moesaic_collectives::{Call, agree};
use moesaic_plan::{
    self as plan, LayerPlan, PlanError, RankPlan, RankStep, Step, Strategy, Training, plan_placed,
};
use moesaic_spec::LayerSpec;
use moesaic_tensor::{Tensor, WeightSource};

/// A rank's part of a layer: its own tokens, its own experts, and where shared experts are
/// sliced its slices of them.
///
/// Every call is made by all ranks of the mesh, in the same order, also by those that
/// have no tokens. What ranks get together is what one process gets for the tokens of
/// all, rank after rank: dropless and with whole experts (`shards = 1`) the same bytes.
/// Capacities are agreed on: that of each rank's own tokens, as if it had as many as the
/// rank with the most.
pub struct MeshLayer {
    mesh: Mesh,
    plan: RankPlan,
    tokens: Layer,
    experts: Layer,
    /// Where shared experts are sliced.
    shared: Option<Layer>,
    forward: Vec<Segment>,
    evaluation: Vec<Segment>,
    backward: Vec<Segment>,
    /// Of an evaluation, and of a pass that trains.
    routing: [Vec<Segment>; 2],
    strategy: Strategy,
}

/// What a forward pass of a [`MeshLayer`] left for backward on one rank.
pub struct MeshSaved {
    tokens: Saved,
    experts: Saved,
    rows: Rows,
    /// Where shared experts are sliced.
    shared: Option<(Saved, Neighbours)>,
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
}

impl Engine {
    /// Makes this rank's part of a layer. `weights` are those of the whole layer, of which
    /// only this rank's experts are read, and what every rank has: router, shared experts,
    /// of which a mesh may have slices, projections. All ranks of the mesh call it.
    ///
    /// # Errors
    /// [`EngineError::Plan`] for a mesh that the layer cannot have;
    /// [`EngineError::Collective`] when ranks ask for different layers, naming what
    /// differs; otherwise as [`Engine::layer`].
    pub fn mesh_layer(
        &self,
        mesh: &Mesh,
        spec: &LayerSpec,
        weights: &dyn WeightSource,
        training: Option<Training>,
    ) -> Result<MeshLayer, EngineError> {
        let own = Shard::new(spec, mesh.parallel(), mesh.place(), weights);
        let own = own.placed(mesh.placement());
        self.mesh_layer_with(mesh, spec, (weights, &own), training)
    }

    /// As [`Engine::mesh_layer`], from this rank's part of the weights, such as
    /// [`Mesh::part`] gives: its own experts alone, by the same names.
    ///
    /// # Errors
    /// As [`Engine::mesh_layer`].
    pub fn mesh_layer_of_part(
        &self,
        mesh: &Mesh,
        spec: &LayerSpec,
        part: &dyn WeightSource,
        training: Option<Training>,
    ) -> Result<MeshLayer, EngineError> {
        let around = Around {
            part,
            mesh: mesh.parallel(),
            experts: spec.shape.experts,
        };
        self.mesh_layer_with(mesh, spec, (&around, part), training)
    }

    /// `weights` are those of the tokens' side, and those of this rank's experts and slices.
    fn mesh_layer_with(
        &self,
        mesh: &Mesh,
        spec: &LayerSpec,
        weights: (&dyn WeightSource, &dyn WeightSource),
        training: Option<Training>,
    ) -> Result<MeshLayer, EngineError> {
        check_spec(spec)?;
        let options = self.plan_options(training);
        let (target, parallel) = (self.target(), mesh.parallel());
        let shared_out = (parallel, mesh.placement());
        let plan = plan_placed(spec, target, &options, shared_out, mesh.rank())?;
        check_same(mesh, &plan, training)?;
        let side = |plan: &LayerPlan, weights: &dyn WeightSource| {
            self.layer_of(&Texts::of(plan.clone().into())?, weights)
        };
        let tokens = side(&plan.tokens, weights.0)?;
        let experts = side(&plan.experts, weights.1)?;
        let shared = plan.shared.as_ref().map(|plan| side(plan, weights.1));
        let shared = shared.transpose()?;
        let bound = |steps: &[RankStep], of: fn(&LayerPlan) -> &[Step]| {
            segments(steps, |side, numbers| {
                let layer = match side {
                    plan::Side::Tokens => &tokens,
                    plan::Side::Experts => &experts,
                    plan::Side::Shared => shared.as_ref().expect(SLICED),
                };
                let all = of(layer.plan());
                let steps: Vec<Step> = numbers.iter().map(|&at| all[at].clone()).collect();
                layer.bind(&steps)
            })
        };
        let routing = |steps: &[RankStep], of: fn(&LayerPlan) -> &[Step]| {
            bound(&plan.routing_of(steps, of(&plan.tokens)), of)
        };
        let evaluation = plan.evaluation_steps();
        Ok(MeshLayer {
            routing: [
                routing(evaluation, LayerPlan::evaluation_steps)?,
                routing(&plan.steps, |plan| &plan.steps)?,
            ],
            forward: bound(&plan.steps, |plan| &plan.steps)?,
            evaluation: bound(evaluation, LayerPlan::evaluation_steps)?,
            backward: bound(&plan.backward, |plan| &plan.backward)?,
            mesh: mesh.clone(),
            plan,
            tokens,
            experts,
            shared,
            strategy: Strategy::default(),
        })
    }
}

/// Whether all ranks make the same layer.
fn check_same(mesh: &Mesh, plan: &RankPlan, training: Option<Training>) -> Result<(), EngineError> {
    let spec = serde_json::to_string(&plan.tokens.spec).unwrap_or_default();
    let placement = plan.placement().to_string();
    let (parallel, training) = (format!("{:?}", mesh.parallel()), format!("{training:?}"));
    let parts = plan.tokens.tensors.iter();
    let parts = parts.filter(|tensor| tensor.name.ends_with("dweight_parts"));
    let parts: Vec<String> = parts.map(|tensor| format!("{:?}", tensor.shape)).collect();
    let parts = parts.join(", ");
    let values = [
        ("moesaic", env!("CARGO_PKG_VERSION")),
        ("mesh", &parallel),
        ("placement", &placement),
        ("spec", &spec),
        ("training", &training),
        ("columns of dweight_parts", &parts),
    ];
    let call = Call::new("a layer of a mesh");
    Ok(agree(&mut *mesh.groups().world, &values, &call)?)
}

impl MeshLayer {
    /// What this rank does.
    pub fn plan(&self) -> &RankPlan {
        &self.plan
    }

    /// The mesh.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// How ranks carry out calls from now on.
    pub fn strategy(&self) -> Strategy {
        self.strategy
    }

    /// Chooses how ranks carry out calls from now on; a backward pass goes as its forward
    /// pass did. All ranks choose the same between the same two calls.
    ///
    /// # Errors
    /// [`EngineError::Plan`] for what the mesh cannot do.
    pub fn set_strategy(&mut self, strategy: Strategy) -> Result<(), EngineError> {
        strategy
            .check(&self.mesh.parallel())
            .map_err(PlanError::from)?;
        self.strategy = strategy;
        Ok(())
    }

    /// The part that every rank has: weights and gradients of router, projections, and shared
    /// experts that are whole.
    pub fn replicated(&self) -> &Layer {
        &self.tokens
    }

    /// The part that is this rank's: weights and gradients of its experts, `experts.` and
    /// the rest of the name, in the order of [`RankPlan::own_experts`].
    pub fn own(&self) -> &Layer {
        &self.experts
    }

    /// This rank's slices of shared experts, by their names in the layer; `None` where
    /// [`MeshLayer::replicated`] has them whole.
    pub fn shared(&self) -> Option<&Layer> {
        self.shared.as_ref()
    }

    /// All of these parts.
    pub fn parts(&self) -> impl Iterator<Item = &Layer> {
        [&self.tokens, &self.experts]
            .into_iter()
            .chain(&self.shared)
    }

    /// Evaluates the layer for this rank's tokens and reads back the named outputs.
    ///
    /// # Errors
    /// As [`Layer::forward_with`]; [`EngineError::Collective`].
    pub fn forward_with(&self, input: &Input<'_>, names: &[&str]) -> Result<Output, EngineError> {
        let mut run = self.call();
        run.begin(
            Pass::Evaluate,
            &self.evaluation,
            input,
            names,
            Counters::default(),
        )?;
        run.run(&self.evaluation, |side, rows| {
            let layer = side.layer;
            side.pass(layer.scalars(Pass::Evaluate, Counters::default(), rows, None)?)
        })?;
        run.read(names)
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
    /// As [`Layer::route`]; [`EngineError::Collective`].
    pub fn route(&self, input: &Input<'_>, names: &[&str]) -> Result<Output, EngineError> {
        self.decide(Pass::Route, input, names, Counters::default())
    }

    /// Decides where this rank's tokens go as [`MeshLayer::forward_train`] does with the
    /// same counters, and nothing else.
    ///
    /// # Errors
    /// As [`Layer::route_train`]; [`EngineError::Collective`].
    pub fn route_train(
        &self,
        input: &Input<'_>,
        names: &[&str],
        counters: Counters,
    ) -> Result<Output, EngineError> {
        self.tokens.check_training()?;
        self.decide(Pass::RouteTrain, input, names, counters)
    }

    fn decide(
        &self,
        pass: Pass,
        input: &Input<'_>,
        names: &[&str],
        counters: Counters,
    ) -> Result<Output, EngineError> {
        let segments = &self.routing[usize::from(pass.trains())];
        let mut run = self.call();
        run.begin(pass, segments, input, names, counters)?;
        run.run(segments, |_, _| Ok(()))?;
        run.read(names)
    }

    /// Runs the layer forward as in training, reads back the named outputs, and keeps what
    /// backward needs. `counters.first_token` is the number of the first token of the
    /// whole mesh; that of this rank follows from it.
    ///
    /// # Errors
    /// As [`Layer::forward_train`]; [`EngineError::Collective`].
    pub fn forward_train(
        &self,
        input: &Input<'_>,
        names: &[&str],
        counters: Counters,
    ) -> Result<(Output, MeshSaved), EngineError> {
        self.tokens.check_training()?;
        let mut run = self.call();
        run.begin(Pass::Train, &self.forward, input, names, counters)?;
        run.run(&self.forward, |side, rows| {
            let layer = side.layer;
            side.train(layer.scalars(Pass::Train, Counters::default(), rows, None)?)
        })?;
        let output = run.read(names)?;
        let Run {
            tokens,
            experts,
            shared,
            rows,
            neighbours,
            ..
        } = run;
        let (tokens, experts) = (tokens.into_saved(), experts.into_saved());
        let kept = tokens.zip(experts).zip(rows);
        let ((tokens, experts), rows) = kept.expect("a pass that trains keeps all of it");
        let saved = MeshSaved {
            tokens,
            experts,
            rows,
            shared: shared.and_then(Side::into_saved).zip(neighbours),
        };
        Ok((output, saved))
    }

    /// Runs the layer backward from this rank's `dy`: returns `dx` and
    /// `grad.topk_weights` of its tokens, and leaves gradients of weights in both parts.
    /// Those of experts are whole but for other groups that hold the same; those of
    /// [`MeshLayer::shared`] are of the tokens of ranks with slices of the same experts;
    /// those of [`MeshLayer::replicated`] are of this rank's tokens alone:
    /// [`MeshLayer::reduce_gradients`] adds up all.
    ///
    /// # Errors
    /// As [`Layer::backward`]; [`EngineError::Collective`].
    pub fn backward(
        &self,
        saved: &MeshSaved,
        dy: &Tensor<'_>,
        accumulate: bool,
    ) -> Result<Output, EngineError> {
        let mut run = self.call();
        run.tokens.back(&saved.tokens, accumulate)?;
        run.experts.back(&saved.experts, accumulate)?;
        if let (Some(side), Some((kept, neighbours))) = (&mut run.shared, &saved.shared) {
            side.back(kept, accumulate)?;
            run.neighbours = Some(neighbours.clone());
        }
        self.tokens.check_dy(saved.tokens(), dy)?;
        let staged = run.tokens.named("dy").expect("training plans have dy");
        self.tokens.device.upload(&dy.data, staged, 0)?;
        run.rows = Some(saved.rows.clone());
        run.run(&self.backward, |_, _| Ok(()))?;
        run.read(&self.tokens.input_gradients())
    }

    fn call(&self) -> Run<'_> {
        Run {
            mesh: &self.mesh,
            plan: &self.plan,
            label: &self.plan.tokens.spec.name,
            groups: self.mesh.groups(),
            tokens: Side::new(&self.tokens),
            experts: Side::new(&self.experts),
            shared: self.shared.as_ref().map(Side::new),
            rows: None,
            neighbours: None,
            under_way: Vec::new(),
        }
    }
}

impl Run<'_> {
    /// Puts the inputs of this rank's tokens where kernels read them.
    fn begin(
        &mut self,
        pass: Pass,
        segments: &[Segment],
        input: &Input<'_>,
        names: &[&str],
        counters: Counters,
    ) -> Result<(), EngineError> {
        let layer = self.tokens.layer;
        layer.check_outputs(pass, names)?;
        let census = self.census(segments, input.tokens)?;
        let most = census.map_or(input.tokens, |census| census.most);
        let before = census.map_or(0, |census| census.before) as u64;
        let counters = Counters {
            first_token: counters.first_token + before,
            ..counters
        };
        let tokens = (input.tokens, most);
        let scalars = layer.scalars_among(pass, counters, tokens, input.capacity_factor)?;
        match pass {
            Pass::Train => self.tokens.train(scalars)?,
            _ => self.tokens.pass(scalars)?,
        }
        let buffer = |tensor| Some(&**self.tokens.buffer(tensor));
        layer.stage(pass, input, names, buffer)
    }

    fn read(&self, names: &[&str]) -> Result<Output, EngineError> {
        let tokens = self.tokens.scalars().tokens();
        let buffer = |tensor| Some(&**self.tokens.buffer(tensor));
        self.tokens.layer.read(names, tokens, buffer)
    }
}
