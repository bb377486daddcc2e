//! What a rank runs of a layer.

use super::all_to_all::RowSchedule;
use super::comm_cast::Packing;
use super::groups::Mesh;
use super::part::Around;
use super::shard::Shard;
use super::view::{Form, PartLayers, View};
use crate::engine::Engine;
use crate::error::EngineError;
use crate::layer::{Layer, check_spec};
use crate::texts::Texts;
use crate::trace::Recorder;
use moesaic_cache::hash_source;
use moesaic_collectives::{Call, agree};
use moesaic_plan::{
    AdaptiveMesh, Both, CommDtype, Overlap, Role, ShadowModel, SharedExperts, Sharing,
    StrategyError,
};
use moesaic_plan::{LayerPlan, PlanError, PlanOptions, RankPlan, Strategy, Training, plan_rank};
use moesaic_spec::LayerSpec;
use moesaic_tensor::WeightSource;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A rank's part of a layer: its own tokens, its own experts, and where shared experts are
/// sliced its shards of them.
///
/// Every call is made by all ranks of the mesh, in the same order, also by those that
/// have no tokens. What ranks get together is what one process gets for the tokens of
/// all, rank after rank: dropless and with whole experts (`expert_tp = 1`) the same bytes.
/// Whether losses, capacities, and selections over tokens look at a rank's own tokens or at
/// those of all ranks is said by the mesh ([`Mesh::over`]). Where they look at a rank's own,
/// capacities are agreed on: as if each rank had as many tokens as the rank with the most.
pub struct MeshLayer {
    engine: Engine,
    pub(super) mesh: Mesh,
    pub(super) tokens: Layer,
    pub(super) experts: Layer,
    /// Where shared experts are sliced.
    shared: Option<Layer>,
    /// For each form that was chosen so far.
    pub(super) views: BTreeMap<Form, View>,
    pub(super) strategy: Strategy,
    /// What the route of the strategy is on these nodes.
    pub(super) row_schedule: RowSchedule,
    /// By what experts with shadows are chosen.
    pub(super) shadow_model: ShadowModel,
    /// For each form, and each choice so far of what rows are group nodes, but as they are.
    packings: BTreeMap<(Form, Both<CommDtype>), Packing>,
    /// Who is told of exchanges.
    pub(super) recorder: Option<Arc<dyn Recorder>>,
}

impl Engine {
    /// Makes this rank's part of a layer. `weights` are those of the whole layer, of which
    /// only this rank's experts are read, and what every rank has: router, shared experts,
    /// of which a mesh may have shards, projections. All ranks of the mesh call it.
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

    /// `weights` are those of the dispatch part, and those of this rank's experts and shards.
    fn mesh_layer_with(
        &self,
        mesh: &Mesh,
        spec: &LayerSpec,
        weights: (&dyn WeightSource, &dyn WeightSource),
        training: Option<Training>,
    ) -> Result<MeshLayer, EngineError> {
        check_spec(spec)?;
        let form = Form {
            adaptive_r: mesh.parallel().expert_tp,
            shadows: 0,
        };
        let plan = self.plan_of(mesh, spec, training, form)?;
        check_same(mesh, &plan, training)?;
        let options = options(mesh);
        let part = |plan: &LayerPlan, weights: &dyn WeightSource| {
            let layer = self.layer_of(&Texts::of(plan.clone().into())?, weights);
            layer.map_err(|error| error.needing(&options))
        };
        let call = Call::new("kernels and weights of a layer");
        let (tokens, experts, shared) = mesh.with_heartbeat(&call, || {
            let tokens = part(&plan.tokens, weights.0)?;
            let experts = part(&plan.experts, weights.1)?;
            let shared = plan.shared.as_ref().map(|plan| part(plan, weights.1));
            Ok((tokens, experts, shared.transpose()?))
        })?;
        let parts = PartLayers {
            tokens: &tokens,
            experts: &experts,
            shadows: None,
            shared: shared.as_ref(),
        };
        let view = View::over(form, plan, parts)?;
        Ok(MeshLayer {
            engine: self.clone(),
            packings: BTreeMap::new(),
            mesh: mesh.clone(),
            tokens,
            experts,
            shared,
            views: BTreeMap::from([(form, view)]),
            shadow_model: ShadowModel::of(spec),
            strategy: Strategy::default(),
            row_schedule: RowSchedule::Direct,
            recorder: None,
        })
    }

    /// What a rank does in a form.
    fn plan_of(
        &self,
        mesh: &Mesh,
        spec: &LayerSpec,
        training: Option<Training>,
        form: Form,
    ) -> Result<RankPlan, EngineError> {
        let options = PlanOptions {
            unpacked: mesh.keeps_unpacked(),
            ..self.plan_options(training)
        };
        let sharing = Sharing::from(mesh.parallel()).at_r(form.adaptive_r);
        let sharing = sharing.placed(mesh.placement()).shadowing(form.shadows);
        let sharing = sharing.over(mesh.scope());
        Ok(plan_rank(
            spec,
            self.target(),
            &options,
            sharing,
            mesh.rank(),
        )?)
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
        ("token scope", &format!("{:?}", mesh.scope())),
        ("columns of dweight_parts", &parts),
    ];
    let call = Call::new("a layer of a mesh");
    Ok(agree(&mut *mesh.groups().world, &values, &call)?)
}

/// What `precompile` has to be told for the kernels of a mesh's ranks.
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

impl MeshLayer {
    /// What this rank does, as the strategy is now but for chunks: [`RankPlan::in_chunks`] of
    /// [`Strategy::chunks`] is what it does.
    pub fn plan(&self) -> &RankPlan {
        let view = self.view();
        let packing = self.packing(view, self.strategy.comm_dtype);
        packing.map_or(&view.plan, |packing| &packing.plan)
    }

    /// What tells the layer from others whose steps may take another time, the same on all
    /// ranks, whose targets may differ: its name, how many ranks there are, and a hash of spec,
    /// training, mesh, placement of experts, and how many ranks each node has.
    pub fn identity(&self) -> String {
        let (own, mesh) = (self.tokens.plan(), &self.mesh);
        let (parallel, placement) = (mesh.parallel(), mesh.placement());
        let nodes = mesh.hosts().chunk_by(|a, b| a == b);
        let nodes: Vec<usize> = nodes.map(<[String]>::len).collect();
        let all = (&own.spec, own.training, parallel, placement, nodes);
        let hash = &hash_source(&format!("{all:?}"))[..16];
        format!("{}, {} ranks, {hash}", own.spec.name, parallel.ranks())
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
    /// pass did. All ranks call it, and choose the same. What a adaptive parallelism degree needs is made
    /// when it is first chosen, and kept: kernels, and groups of ranks, which all layers of
    /// the mesh share.
    ///
    /// # Errors
    /// [`EngineError::Plan`] for what the mesh cannot do, or the nodes that ranks are on, or
    /// the layer, whose weights are packed: see [`Mesh::for_any_r`];
    /// [`EngineError::Collective`], also when ranks choose differently; otherwise as
    /// [`Engine::layer`], also for the kernels of rows that are packed group nodes.
    pub fn set_strategy(&mut self, strategy: Strategy) -> Result<(), EngineError> {
        let call = Call::new(&format!("strategy of {}", self.tokens.spec().name));
        let values = [("strategy", &*strategy.to_string())];
        agree(&mut *self.mesh.groups().world, &values, &call)?;
        let (by, row_schedule) = self.checked(strategy)?;
        let form = self.form(strategy);
        let options = format!("{} --strategy {strategy}", options(&self.mesh));
        let needing = |error: EngineError| error.needing(&options);
        if !self.views.contains_key(&form) {
            self.add(by, strategy).map_err(needing)?;
        }
        self.pack(form, strategy.comm_dtype).map_err(needing)?;
        self.take_pieces(form, strategy.chunks())?;
        self.row_schedule = row_schedule;
        self.strategy = strategy;
        Ok(())
    }

    /// Whether ranks can carry out calls so, by mesh, nodes and placement. Nobody is asked, and
    /// nothing made: a layer whose weights are packed finds that out when it chooses.
    ///
    /// # Errors
    /// [`EngineError::Plan`], as [`MeshLayer::set_strategy`].
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

    fn form(&self, strategy: Strategy) -> Form {
        Form {
            adaptive_r: strategy.adaptive_r(&self.mesh.parallel()),
            shadows: strategy.shadows,
        }
    }

    /// Chooses by what model experts get shadows, from the next call on
    /// ([`Strategy::shadows`]); before, by [`ShadowModel::of`] the layer. All ranks call it,
    /// with the same model.
    ///
    /// # Errors
    /// [`EngineError::Collective`], also when models differ.
    pub fn set_shadow_model(&mut self, model: ShadowModel) -> Result<(), EngineError> {
        let call = Call::new(&format!("model of shadows of {}", self.tokens.spec().name));
        let values = [("model", &*format!("{model:?}"))];
        agree(&mut *self.mesh.groups().world, &values, &call)?;
        self.shadow_model = model;
        Ok(())
    }

    /// By what model experts get shadows.
    pub fn shadow_model(&self) -> &ShadowModel {
        &self.shadow_model
    }

    /// Makes what rows need that are so group nodes, in a form.
    fn pack(&mut self, form: Form, comm_dtype: Both<CommDtype>) -> Result<(), EngineError> {
        let key = (form, comm_dtype);
        if comm_dtype != Both::same(CommDtype::Unchanged) && !self.packings.contains_key(&key) {
            let call = Call::new("kernels of packed rows");
            let packing = self.mesh.with_heartbeat(&call, || {
                Packing::new(&self.engine, &self.views[&form].plan, comm_dtype)
            })?;
            self.packings.insert(key, packing);
        }
        Ok(())
    }

    /// What packs rows of a view; `None` where they stay as they are.
    pub(super) fn packing(&self, view: &View, comm_dtype: Both<CommDtype>) -> Option<&Packing> {
        self.packings.get(&(view.form, comm_dtype))
    }

    /// Binds the passes of a form for rows in chunks.
    fn take_pieces(&mut self, form: Form, chunks: Overlap) -> Result<(), EngineError> {
        let held = PartLayers {
            tokens: &self.tokens,
            experts: &self.experts,
            shadows: None,
            shared: self.shared.as_ref(),
        };
        if let Some(view) = self.views.get_mut(&form) {
            view.take_pieces(held, chunks)?;
        }
        Ok(())
    }

    /// Makes what the form of a strategy needs. All ranks do it.
    fn add(&mut self, by: AdaptiveMesh, strategy: Strategy) -> Result<(), EngineError> {
        let held = self.experts.plan();
        let mut weights = held
            .tensors
            .iter()
            .filter(|tensor| tensor.role == Role::Weight);
        if weights.any(|tensor| held.id(&tensor.name).is_some_and(|id| held.packs_away(id))) {
            return Err(PlanError::from(StrategyError::Packed { strategy }).into());
        }
        let form = self.form(strategy);
        let (spec, training) = (self.tokens.spec(), self.tokens.plan().training);
        let plan = self.engine.plan_of(&self.mesh, spec, training, form)?;
        check_same(&self.mesh, &plan, training)?;
        let call = Call::new("kernels of a strategy");
        let mut view = self.mesh.with_heartbeat(&call, || {
            if by.is_owner_only() {
                View::shadowed(&self.engine, (form, plan), self.held())
            } else {
                View::beside(&self.engine, (form, plan), self.held())
            }
        })?;
        view.record(self.recorder.as_ref());
        self.mesh.groups().add(by)?;
        self.views.insert(form, view);
        Ok(())
    }

    /// Tells a recorder of every launch and exchange from now on, or nobody; see
    /// [`Layer::record`].
    pub fn record(&mut self, recorder: Option<Arc<dyn Recorder>>) {
        let held = [&mut self.tokens, &mut self.experts];
        for part in held.into_iter().chain(&mut self.shared) {
            part.record(recorder.clone());
        }
        for view in self.views.values_mut() {
            view.record(recorder.as_ref());
        }
        self.recorder = recorder;
    }

    pub(super) fn view(&self) -> &View {
        &self.views[&self.form(self.strategy)]
    }

    /// The layers that have weights.
    pub(super) fn held(&self) -> PartLayers<'_> {
        PartLayers {
            tokens: &self.tokens,
            experts: &self.experts,
            shadows: None,
            shared: self.shared.as_ref(),
        }
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

    /// This rank's shards of shared experts, by their names in the layer; `None` where
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

    /// Bytes of device memory that its intermediates hold at present, in all its forms,
    /// and that weights which are gathered borrow, with all layers of the mesh.
    pub fn workspace_bytes(&self) -> u64 {
        let views = self.views.values();
        let others = views.flat_map(View::own_layers);
        let held: u64 = self.parts().chain(others).map(Layer::workspace_bytes).sum();
        held + self.mesh.groups().workspaces.bytes() as u64
    }
}
