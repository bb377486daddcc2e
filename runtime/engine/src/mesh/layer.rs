//! One rank's part of a layer over ranks.

use super::all_to_all::RowSchedule;
use super::bound_plan::{BoundPlan, PartLayers, sharing};
use super::comm_cast::Packing;
use super::digests::Digested;
use super::groups::Mesh;
use super::part::ReplicatedWeights;
use super::shard::Shard;
use crate::device_layer::{DeviceLayer, check_spec};
use crate::engine::Engine;
use crate::error::EngineError;
use crate::numbers::Numbers;
use crate::router::is_of_router;
use crate::texts::Texts;
use crate::trace::Recorder;
use moesaic_cache::hash_source;
use moesaic_collectives::{Call, agree};
use moesaic_plan::{
    AdaptiveMesh, Both, CommDtype, ShadowModel, SharedExperts, Sharing, StrategyError, TensorRole,
};
use moesaic_plan::{
    LayerPlan, PlanError, PlanForm, PlanOptions, RankPlan, Strategy, Training, plan_rank,
};
use moesaic_spec::LayerSpec;
use moesaic_tensor::WeightSource;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// One rank's part of a layer: its own tokens, its own experts, and its shards of shared experts
/// where these are sharded.
///
/// All ranks of the mesh make every call, in the same order, also those that have no tokens. The
/// mesh decides whether losses, capacities and selections over tokens look at a rank's own tokens
/// or at those of all ranks ([`Mesh::over`]). With a rank's own tokens the capacity is common to
/// all ranks: that of the rank with the most tokens.
pub(crate) struct RankLayer {
    engine: Engine,
    pub(super) mesh: Mesh,
    /// Its name in exchanges.
    pub(super) label: String,
    pub(super) tokens: DeviceLayer,
    pub(super) experts: DeviceLayer,
    /// The shared-expert part, where shared experts are sharded.
    shared: Option<DeviceLayer>,
    pub(super) reduces: Reduces,
    /// Read by calls, written while the strategy changes.
    choice: RwLock<Choice>,
    /// The recorder of exchanges.
    pub(super) recorder: Option<Arc<dyn Recorder>>,
}

/// The gradients that a layer reduces. The others are another layer's, too, which reduces them: a
/// second sum over ranks would multiply them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reduces {
    All,
    /// The router's alone: everything else is of the first of several routers' layers.
    Router,
    /// All but those of routed experts, which are of the layer of a bank.
    AllButExperts,
}

/// The way that ranks carry out calls from now on, with what that needs.
pub(super) struct Choice {
    pub strategy: Strategy,
    /// The all-to-all schedule of the strategy on these nodes.
    pub row_schedule: RowSchedule,
    /// The model that chooses shadows.
    pub shadow_model: ShadowModel,
    /// The bound plan of every form that was chosen so far.
    pub bound_plans: BTreeMap<PlanForm, BoundPlan>,
    /// The casts of every form and every communication dtype that was chosen so far.
    packings: BTreeMap<(PlanForm, Both<CommDtype>), Arc<Packing>>,
}

/// The sources of a rank's weights.
#[derive(Clone, Copy)]
struct RankWeights<'w> {
    /// Weights of the dispatch part.
    tokens: &'w dyn WeightSource,
    /// Weights of its experts and of its shards of shared ones.
    experts: &'w dyn WeightSource,
}

impl Engine {
    /// Makes this rank's part of a layer from the weights of the whole layer, of which the rank
    /// reads its own. All ranks of the mesh call it.
    pub(crate) fn rank_layer(
        &self,
        mesh: &Mesh,
        spec: &LayerSpec,
        weights: &dyn WeightSource,
        training: Option<Training>,
    ) -> Result<RankLayer, EngineError> {
        self.rank_layer_of_whole(mesh, spec, weights, training, None)
    }

    /// Makes this rank's part of a layer over the experts of another one of the same mesh.
    pub(crate) fn rank_layer_over(
        &self,
        bank: &RankLayer,
        spec: &LayerSpec,
        weights: &dyn WeightSource,
    ) -> Result<RankLayer, EngineError> {
        let training = bank.tokens.plan().training;
        self.rank_layer_of_whole(&bank.mesh, spec, weights, training, Some(&bank.experts))
    }

    /// Makes the layer from the weights of the whole layer, or over experts that another has.
    fn rank_layer_of_whole(
        &self,
        mesh: &Mesh,
        spec: &LayerSpec,
        weights: &dyn WeightSource,
        training: Option<Training>,
        bank: Option<&DeviceLayer>,
    ) -> Result<RankLayer, EngineError> {
        let weights = Numbers::new(spec, self.target(), weights);
        let own = Shard::new(spec, mesh.parallel(), mesh.place(), &weights);
        let own = own.placed(mesh.placement());
        let weights = RankWeights {
            tokens: &weights,
            experts: &own,
        };
        self.rank_layer_with(mesh, spec, weights, training, bank)
    }

    /// As [`Engine::rank_layer`], from this rank's part of the weights, as [`Mesh::part`] returns
    /// it.
    pub(crate) fn rank_layer_of_part(
        &self,
        mesh: &Mesh,
        spec: &LayerSpec,
        part: &dyn WeightSource,
        training: Option<Training>,
    ) -> Result<RankLayer, EngineError> {
        let part = &Numbers::new(spec, self.target(), part);
        let around = ReplicatedWeights {
            part,
            mesh: mesh.parallel(),
            experts: spec.shape.experts,
        };
        let weights = RankWeights {
            tokens: &around,
            experts: part,
        };
        self.rank_layer_with(mesh, spec, weights, training, None)
    }

    /// Makes the layer from the weights of its parts, or over experts that another has.
    fn rank_layer_with(
        &self,
        mesh: &Mesh,
        spec: &LayerSpec,
        weights: RankWeights<'_>,
        training: Option<Training>,
        bank: Option<&DeviceLayer>,
    ) -> Result<RankLayer, EngineError> {
        check_spec(spec)?;
        let form = Strategy::default().plan_form(&mesh.parallel());
        let plan = self.plan_of(mesh, spec, training, form)?;
        check_same(mesh, &plan, training)?;
        let label = mesh.groups().label(&spec.name);
        let options = options(mesh);
        let part = |plan: &LayerPlan, weights: &dyn WeightSource| {
            let layer = self.device_layer(&Texts::of(plan.clone().into())?, weights);
            layer.map_err(|error| error.needing(&options))
        };
        let call = Call::new("kernels and weights of a layer");
        let everywhere = Digested::new(mesh, weights.tokens);
        let (tokens, experts, shared) = mesh.with_heartbeat(&call, || {
            let tokens = part(&plan.tokens, &everywhere)?;
            let experts = match bank {
                None => part(&plan.experts, weights.experts)?,
                Some(bank) => {
                    let texts = Texts::of(plan.experts.clone().into())?;
                    let layer = self.device_layer_over(&texts, weights.experts, bank);
                    layer.map_err(|error| error.needing(&options))?
                }
            };
            let shared = plan.shared.as_ref().map(|plan| part(plan, weights.experts));
            Ok((tokens, experts, shared.transpose()?))
        })?;
        everywhere.compare(mesh)?;
        let parts = PartLayers {
            tokens: &tokens,
            experts: &experts,
            shadows: None,
            shared: shared.as_ref(),
        };
        let bound = BoundPlan::over(form, plan, parts)?;
        Ok(RankLayer {
            engine: self.clone(),
            mesh: mesh.clone(),
            label,
            tokens,
            experts,
            shared,
            reduces: match bank {
                None => Reduces::All,
                Some(_) => Reduces::AllButExperts,
            },
            choice: RwLock::new(Choice {
                strategy: Strategy::default(),
                row_schedule: RowSchedule::Direct,
                shadow_model: ShadowModel::of(spec),
                bound_plans: BTreeMap::from([(form, bound)]),
                packings: BTreeMap::new(),
            }),
            recorder: None,
        })
    }

    /// Returns the rank plan of a form.
    fn plan_of(
        &self,
        mesh: &Mesh,
        spec: &LayerSpec,
        training: Option<Training>,
        form: PlanForm,
    ) -> Result<RankPlan, EngineError> {
        let options = PlanOptions {
            unpacked: mesh.keeps_unpacked(),
            ..self.plan_options(training)
        };
        let sharing = Sharing::from(mesh.parallel()).by(form);
        let sharing = sharing.placed(mesh.placement()).over(mesh.scope());
        Ok(plan_rank(
            spec,
            self.target(),
            &options,
            sharing,
            mesh.rank(),
        )?)
    }
}

/// Checks that all ranks make the same layer.
fn check_same(mesh: &Mesh, plan: &RankPlan, training: Option<Training>) -> Result<(), EngineError> {
    let spec = serde_json::to_string(&plan.tokens.spec).unwrap_or_default();
    let placement = plan.placement().to_string();
    let (parallel, training) = (format!("{:?}", mesh.parallel()), format!("{training:?}"));
    let parts = plan.tokens.tensors.iter();
    // Ranks may have different targets and so different tilings, but they exchange these partial
    // sums, whose columns depend on the tiling.
    let parts = parts.filter(|tensor| tensor.name.ends_with("dweight_parts"));
    let parts: Vec<String> = parts.map(|tensor| format!("{:?}", tensor.shape)).collect();
    let parts = parts.join(", ");
    let values = [
        ("moesaic", env!("CARGO_PKG_VERSION")),
        ("mesh", &parallel),
        ("placement", &placement),
        ("spec", &spec),
        ("training", &training),
        ("token scope", &format!("{:?}", mesh.scope())),
        ("columns of dweight_parts", &parts),
    ];
    let call = Call::new("a layer of a mesh");
    Ok(agree(&mut *mesh.groups().world, &values, &call)?)
}

/// Returns the options with which `precompile` compiles the kernels of a mesh's ranks.
fn options(mesh: &Mesh) -> String {
    let parallel = mesh.parallel();
    let named = [
        ("ep", parallel.ep),
        ("expert_tp", parallel.expert_tp),
        ("dp", parallel.dp),
    ];
    let mut parts: Vec<String> = named
        .iter()
        .filter(|(name, size)| *name == "ep" || *size > 1)
        .map(|(name, size)| format!("{name}={size}"))
        .collect();
    if parallel.shared == SharedExperts::Sharded {
        parts.push("shared=sharded".to_string());
    }
    let adaptive_r = if mesh.keeps_unpacked() {
        " --adaptive-r"
    } else {
        ""
    };
    let placement = mesh.placement().map_or("", |_| " --placement <file>");
    format!(" --mesh {}{placement}{adaptive_r}", parts.join(","))
}

impl RankLayer {
    /// Returns the choice for a call, which waits while the strategy changes.
    pub(super) fn choice(&self) -> RwLockReadGuard<'_, Choice> {
        self.choice.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn choice_mut(&self) -> RwLockWriteGuard<'_, Choice> {
        self.choice.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the plan of this rank under the present strategy, without chunks.
    pub fn plan(&self) -> RankPlan {
        let choice = self.choice();
        let bound = self.bound(&choice);
        let packing = choice.packing(bound, choice.strategy.comm_dtype);
        packing.map_or(&bound.plan, |packing| &packing.plan).clone()
    }

    /// Returns a text that identifies layers whose steps may take different times; it is the same
    /// on all ranks, even if their targets differ.
    pub fn identity(&self) -> String {
        let (own, mesh) = (self.tokens.plan(), &self.mesh);
        let (parallel, placement) = (mesh.parallel(), mesh.placement());
        // Counts instead of names: a cluster gives every job other hosts, and times depend on how
        // many ranks share one.
        let nodes = mesh.hosts().chunk_by(|a, b| a == b);
        let nodes: Vec<usize> = nodes.map(<[String]>::len).collect();
        let all = (&own.spec, own.training, parallel, placement, nodes);
        let hash = &hash_source(&format!("{all:?}"))[..16];
        format!("{}, {} ranks, {hash}", own.spec.name, parallel.ranks())
    }

    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Returns another handle to the layer: the same weights and kernels, and memory of its own.
    /// It begins with the default strategy, because the kernels of others are made by all ranks
    /// together.
    pub fn handle(&self) -> RankLayer {
        let choice = self.choice();
        let form = self.form(Strategy::default());
        RankLayer {
            engine: self.engine.clone(),
            mesh: self.mesh.clone(),
            label: self.label.clone(),
            tokens: self.tokens.handle(),
            experts: self.experts.handle(),
            shared: self.shared.as_ref().map(DeviceLayer::handle),
            // A handle's gradients are its own, those of experts too.
            reduces: Reduces::All,
            choice: RwLock::new(Choice {
                strategy: Strategy::default(),
                row_schedule: RowSchedule::Direct,
                shadow_model: choice.shadow_model,
                bound_plans: BTreeMap::from([(form, choice.bound_plans[&form].handle())]),
                packings: BTreeMap::new(),
            }),
            recorder: self.recorder.clone(),
        }
    }

    /// Returns a layer of another router over the same weights and gradients of everything else.
    /// All ranks call it. It begins with the default strategy, as a handle does, and reduces the
    /// router's gradients alone.
    pub fn with_router(&self, router: &dyn WeightSource) -> Result<RankLayer, EngineError> {
        let texts = Texts::of(self.tokens.plan().clone().into())?;
        // The router is a part of the dispatch part, so this part alone is another one. Its steps
        // name tensors by number and kernels that are loaded once, so those bound for the first
        // layer serve it, too.
        let call = Call::new("weights of a router");
        let router = Digested::new(&self.mesh, router);
        let tokens = self.mesh.with_heartbeat(&call, || {
            sharing(&self.engine, &texts, &self.tokens, &router, |name| {
                !is_of_router(name)
            })
        })?;
        router.compare(&self.mesh)?;
        let shared = self.shared.as_ref().map(DeviceLayer::handle_to_gradients);
        Ok(RankLayer {
            tokens,
            experts: self.experts.handle_to_gradients()?,
            shared: shared.transpose()?,
            reduces: Reduces::Router,
            ..self.handle()
        })
    }

    /// Returns the strategy of calls from now on.
    pub fn strategy(&self) -> Strategy {
        self.choice().strategy
    }

    /// Sets the strategy of calls from now on. The first use of an adaptive parallelism degree
    /// makes its kernels and its process groups, which all layers of the mesh share; both are kept.
    pub fn set_strategy(&self, strategy: Strategy) -> Result<(), EngineError> {
        let call = Call::new(&format!("strategy of {}", self.label));
        let values = [("strategy", &*strategy.to_string())];
        // Ranks compare their choices before any of them changes: a mismatch must leave all layers
        // as they were.
        agree(&mut *self.mesh.groups().world, &values, &call)?;
        let (by, row_schedule) = self.checked(strategy)?;
        let form = self.form(strategy);
        let options = format!("{} --strategy {strategy}", options(&self.mesh));
        let needing = |error: EngineError| error.needing(&options);
        // From here on calls of other threads wait: they would find a strategy without its casts.
        let choice = &mut *self.choice_mut();
        if let Entry::Vacant(place) = choice.bound_plans.entry(form) {
            place.insert(self.bind(by, strategy).map_err(needing)?);
        }
        self.pack(choice, form, strategy.comm_dtype)
            .map_err(needing)?;
        if let Some(bound) = choice.bound_plans.get_mut(&form) {
            bound.bind_chunks(self.held(), strategy.chunks())?;
        }
        choice.row_schedule = row_schedule;
        choice.strategy = strategy;
        Ok(())
    }

    /// Checks a strategy against mesh, nodes and placement. The check exchanges nothing and makes
    /// nothing, so it does not notice packed weights.
    pub fn check_strategy(&self, strategy: Strategy) -> Result<(), EngineError> {
        self.checked(strategy).map(drop)
    }

    fn checked(&self, strategy: Strategy) -> Result<(AdaptiveMesh, RowSchedule), EngineError> {
        let parallel = self.mesh.parallel();
        strategy.check(&parallel).map_err(PlanError::from)?;
        let by =
            AdaptiveMesh::new(parallel, strategy.adaptive_r(&parallel)).map_err(PlanError::from)?;
        Ok((by, self.mesh.row_schedule(strategy.all_to_all, by)?))
    }

    fn form(&self, strategy: Strategy) -> PlanForm {
        strategy.plan_form(&self.mesh.parallel())
    }

    /// Sets the model that chooses shadows from the next call on.
    pub fn set_shadow_model(&self, model: ShadowModel) -> Result<(), EngineError> {
        let call = Call::new(&format!("model of shadows of {}", self.label));
        let values = [("model", &*format!("{model:?}"))];
        agree(&mut *self.mesh.groups().world, &values, &call)?;
        self.choice_mut().shadow_model = model;
        Ok(())
    }

    /// Returns the model that chooses shadows.
    pub fn shadow_model(&self) -> ShadowModel {
        self.choice().shadow_model
    }

    /// Makes the casts of a form, for one communication dtype.
    fn pack(
        &self,
        choice: &mut Choice,
        form: PlanForm,
        comm_dtype: Both<CommDtype>,
    ) -> Result<(), EngineError> {
        let key = (form, comm_dtype);
        if comm_dtype != Both::same(CommDtype::Unchanged) && !choice.packings.contains_key(&key) {
            let call = Call::new("kernels of packed rows");
            // Compiling may take longer than the deadline of an exchange; the heartbeat keeps ranks
            // that are done from giving up on this one.
            let packing = self.mesh.with_heartbeat(&call, || {
                Packing::new(&self.engine, &choice.bound_plans[&form].plan, comm_dtype)
            })?;
            choice.packings.insert(key, packing.into());
        }
        Ok(())
    }

    /// Makes the bound plan of a strategy. All ranks call it.
    fn bind(&self, by: AdaptiveMesh, strategy: Strategy) -> Result<BoundPlan, EngineError> {
        let held = self.experts.plan();
        let mut weights = held
            .tensors
            .iter()
            .filter(|tensor| tensor.role == TensorRole::Weight);
        // Only the packed form is in memory, in the layout of one rank's kernels, and other ranks
        // could not use it. Codes are packed alike in every plan of a layer.
        let codes = held.spec.precision.experts.is_some();
        if strategy.gathers(&self.mesh.parallel())
            && !codes
            && weights.any(|tensor| held.id(&tensor.name).is_some_and(|id| held.packs_away(id)))
        {
            return Err(PlanError::from(StrategyError::Packed { strategy }).into());
        }
        let form = self.form(strategy);
        let (spec, training) = (self.tokens.spec(), self.tokens.plan().training);
        let plan = self.engine.plan_of(&self.mesh, spec, training, form)?;
        check_same(&self.mesh, &plan, training)?;
        let call = Call::new("kernels of a strategy");
        let mut bound = self.mesh.with_heartbeat(&call, || {
            if by.is_owner_only() {
                BoundPlan::owning(&self.engine, form, plan, self.held())
            } else {
                BoundPlan::gathering(&self.engine, form, plan, self.held())
            }
        })?;
        bound.record(self.recorder.as_ref());
        // A collective call, so it comes after everything that can fail on one rank alone.
        self.mesh.groups().add(by)?;
        Ok(bound)
    }

    /// Sets the recorder of every launch and exchange; `None` removes it.
    pub fn record(&mut self, recorder: Option<Arc<dyn Recorder>>) {
        let held = [&mut self.tokens, &mut self.experts];
        for part in held.into_iter().chain(&mut self.shared) {
            part.record(recorder.clone());
        }
        let choice = self.choice.get_mut();
        let choice = choice.unwrap_or_else(PoisonError::into_inner);
        for bound in choice.bound_plans.values_mut() {
            bound.record(recorder.as_ref());
        }
        self.recorder = recorder;
    }

    /// Returns the bound plan of a choice.
    pub(super) fn bound<'c>(&self, choice: &'c Choice) -> &'c BoundPlan {
        &choice.bound_plans[&self.form(choice.strategy)]
    }

    /// Returns the layers that hold weights.
    pub(super) fn held(&self) -> PartLayers<'_> {
        PartLayers {
            tokens: &self.tokens,
            experts: &self.experts,
            shadows: None,
            shared: self.shared.as_ref(),
        }
    }

    /// Returns the part that every rank holds: weights and gradients of router, projections and
    /// whole shared experts.
    pub fn replicated(&self) -> &DeviceLayer {
        &self.tokens
    }

    /// Returns the part that only this rank holds: weights and gradients of its experts, named
    /// `experts.` and the rest, in the order of [`RankPlan::own_experts`].
    pub fn own(&self) -> &DeviceLayer {
        &self.experts
    }

    /// Returns this rank's shards of shared experts, by their names in the layer; `None` where
    /// [`RankLayer::replicated`] holds them whole.
    pub fn shared(&self) -> Option<&DeviceLayer> {
        self.shared.as_ref()
    }

    /// Returns all of these parts.
    pub fn parts(&self) -> impl Iterator<Item = &DeviceLayer> {
        [&self.tokens, &self.experts]
            .into_iter()
            .chain(&self.shared)
    }

    /// Returns the bytes of device memory of the layer's intermediates, in all its bound plans, and
    /// of the workspace pool, which all layers of the mesh share.
    pub fn workspace_bytes(&self) -> u64 {
        let choice = self.choice();
        let bound_plans = choice.bound_plans.values();
        let others = bound_plans.flat_map(BoundPlan::own_layers);
        let parts = self.parts().chain(others);
        let held: u64 = parts.map(DeviceLayer::workspace_bytes).sum();
        held + self.mesh.groups().workspaces.bytes() as u64
    }
}

impl Choice {
    /// Returns the casts of a bound plan; `None` where rows travel as they are.
    pub fn packing(&self, bound: &BoundPlan, comm_dtype: Both<CommDtype>) -> Option<&Packing> {
        self.packings
            .get(&(bound.form, comm_dtype))
            .map(|packing| &**packing)
    }
}
