//! A layer whose experts live on many ranks: what one rank does, launches and exchanges
//! in one list.
//!
//! ```text
//! dispatch part   gate ─ scan ─ dispatch ─┐                     ┌─ combine
//! between ranks                  counts, rows             rows back
//! expert part                          └─ up ─ down ─────────┘
//! ```
//!
//! Each rank has both parts: its own tokens, and its own experts. The dispatch part is the
//! layer without its experts, planned for the tokens of this rank; the expert part is
//! their products alone, planned for the rows that arrive, as if each were a token with
//! one expert. Rows lie by expert, then by the rank they come from, so that a product is
//! one for each expert whatever the number of ranks. Backward goes the same way with the
//! counts that forward kept.
//!
//! Shared experts are on the dispatch part, whole, or on a third one, sharded as the routed
//! experts are ([`SharedExperts`]): ranks with shards of the same experts gather their
//! tokens, each multiplies them all with its shard, and sums come back to their tokens.
//!
//! ```text
//! dispatch part     x ─┐             ┌─ combine
//! between shards      rows          sums
//! shared experts      └─ up ─ down ─┘
//! ```
//!
//! Experts that get most of the rows may have shadows for one call ([`Strategy::shadows`]):
//! their weights go to all groups, their rows stay, and their gradients come back.
//!
//! ```text
//! dispatch part   rows of a shadowed expert ─┐             ┌─ combine
//! between ranks              its weights    │             │
//! shadow part                             └─ up ─ down ─┘
//! ```
//!
//! Semantics do not depend on the mesh: what ranks compute is what one process computes
//! of the tokens of all, rank after rank.

mod adaptive;
mod bytes;
mod comm_cast;
mod data;
mod overlap;
mod parallel;
mod scope;
mod steps;
mod strategy;
mod text;

pub use adaptive::{AdaptiveMesh, ShardRegion};
pub use bytes::Sent;
pub use comm_cast::{Lane, Packed, SATURATED};
pub use data::{CollectiveOp, Exchange, PlanPart, RankPlan, RankStep};
pub use overlap::{Chunk, Distance, Overlap, OverlapBy};
pub use parallel::{MeshError, Parallel, RankCoords, SharedExperts};
pub use scope::TokenScope;
pub use strategy::{AllToAll, Both, CommDtype, MAX_CHUNKS, Strategy, StrategyError};

use crate::layer::{Builder, Part, Recompute, Role};
use crate::{LayerPlan, Placement, PlanError, PlanOptions};
use moesaic_kernel::Target;
use moesaic_spec::{Experts, LayerSpec, Shape, SharedExpert};

/// How ranks share a layer, and to how many shards of their experts rows go.
#[derive(Clone, Copy, Debug)]
pub struct Sharing<'p> {
    mesh: Parallel,
    placement: Option<&'p Placement>,
    adaptive_r: usize,
    shadows: usize,
    scope: TokenScope,
}

impl From<Parallel> for Sharing<'_> {
    /// Experts in order, rows to all shards of them.
    fn from(mesh: Parallel) -> Self {
        Sharing {
            mesh,
            placement: None,
            adaptive_r: mesh.expert_tp,
            shadows: 0,
            scope: TokenScope::Rank,
        }
    }
}

impl<'p> Sharing<'p> {
    /// The same with rows to so many shards ([`AdaptiveMesh`]). Weights that are gathered are not
    /// packed.
    #[must_use]
    pub fn at_r(self, adaptive_r: usize) -> Sharing<'p> {
        Sharing { adaptive_r, ..self }
    }

    /// The same with experts where a placement says; `None`: in order.
    #[must_use]
    pub fn placed<'q>(self, placement: Option<&'q Placement>) -> Sharing<'q> {
        let Sharing {
            mesh,
            adaptive_r,
            shadows,
            scope,
            ..
        } = self;
        Sharing {
            mesh,
            placement,
            adaptive_r,
            shadows,
            scope,
        }
    }

    /// The same where losses, capacities and selections look at these tokens.
    #[must_use]
    pub fn over(self, scope: TokenScope) -> Sharing<'p> {
        Sharing { scope, ..self }
    }

    /// The same with at most so many experts that every group has for one call
    /// ([`Strategy::shadows`]). Weights of shadows are not packed.
    #[must_use]
    pub fn shadowing(self, shadows: usize) -> Sharing<'p> {
        Sharing { shadows, ..self }
    }
}

/// Plans what `rank` does. The spec must be valid.
///
/// # Errors
/// [`PlanError::Mesh`] for a mesh that the layer cannot have; [`PlanError::Strategy`] for a
/// adaptive parallelism degree, or shadows, that the mesh cannot have; [`PlanError::Placement`] for a placement of other
/// experts or groups.
pub fn plan_rank<'p>(
    spec: &LayerSpec,
    target: Target,
    options: &PlanOptions,
    sharing: impl Into<Sharing<'p>>,
    rank: usize,
) -> Result<RankPlan, PlanError> {
    let Sharing {
        mesh,
        placement,
        adaptive_r,
        shadows,
        scope,
    } = sharing.into();
    mesh.check(spec)?;
    crate::layer::trains(spec, options)?;
    whole_codes(spec, mesh, adaptive_r, shadows)?;
    let place = mesh.place(rank)?;
    let by = AdaptiveMesh::new(mesh, adaptive_r)?.shadowing(shadows)?;
    let placement = out_of_order(placement, mesh, spec.shape.experts)?;
    let of_experts = PlanOptions {
        unpacked: options.unpacked || !by.is_owner_only(),
        ..options.clone()
    };
    let own = match placement.filter(|_| adaptive_r > 0) {
        None => experts_of(spec, by.mesh(), by.place(rank)),
        Some(placement) => {
            let experts = placement.count(place.ep);
            of_so_many(spec, by.mesh(), by.place(rank), experts)
        }
    };
    let experts = plan_experts(spec, target, &of_experts, &own);
    // The last expert never has one, and where every rank has all nobody needs one.
    let most = shadows.min(spec.shape.experts - 1) * usize::from(mesh.ep > 1);
    let shadows = (most > 0).then(|| {
        let options = PlanOptions {
            unpacked: true,
            ..options.clone()
        };
        let shadowed = of_so_many(spec, by.mesh(), by.place(rank), most);
        plan_experts(spec, target, &options, &shadowed)
    });
    let sharded = mesh.shards_shared() && !spec.shared.is_empty();
    let shared = sharded.then(|| plan_shared(spec, target, options, mesh));
    let (tokens, places) = plan_tokens(spec, target, options, (&experts, shared.as_ref()));
    let plan = RankPlan {
        mesh,
        place,
        placement: placement.cloned(),
        adaptive_r,
        steps: Vec::new(),
        evaluation: Vec::new(),
        backward: Vec::new(),
        tokens,
        experts,
        shadows,
        shared,
        scope,
        comm_cast: None,
    };
    Ok(steps::in_order(plan, &places))
}

/// Whether ranks that share a layer so never cut, gather or send codes: they have no kernels for
/// parts of blocks.
fn whole_codes(
    spec: &LayerSpec,
    mesh: Parallel,
    adaptive_r: usize,
    shadows: usize,
) -> Result<(), MeshError> {
    let Some(format) = spec.precision.experts else {
        return Ok(());
    };
    let what = match mesh.expert_tp {
        1 if adaptive_r != 1 => format!("r = {adaptive_r}"),
        1 if shadows > 0 => format!("shadows = {shadows}"),
        1 => return Ok(()),
        shards => format!("expert_tp = {shards}"),
    };
    Err(MeshError::Codes {
        format: format.0.name,
        what,
    })
}

/// A placement that the mesh can have, if it is not that of experts in order.
fn out_of_order(
    placement: Option<&Placement>,
    mesh: Parallel,
    experts: usize,
) -> Result<Option<&Placement>, PlanError> {
    if let Some(placement) = placement {
        placement.check(&mesh, experts)?;
    }
    Ok(placement.filter(|placement| !placement.is_contiguous()))
}

/// The routed experts of a rank as a layer of their own: a row is a token whose one
/// expert is known.
pub fn experts_of(spec: &LayerSpec, mesh: Parallel, place: RankCoords) -> LayerSpec {
    let experts = mesh.experts(place.ep, spec.shape.experts).len();
    of_so_many(spec, mesh, place, experts)
}

fn of_so_many(spec: &LayerSpec, mesh: Parallel, place: RankCoords, experts: usize) -> LayerSpec {
    LayerSpec {
        shape: Shape {
            model_dim: spec.expert_input_dim(),
            hidden_dim: mesh.hidden(place.tp, spec.shape.hidden_dim).len(),
            experts,
            top_k: 1,
            output_dim: Some(spec.expert_output_dim()),
        },
        experts: Experts {
            identity: 0,
            zero: 0,
            ..spec.experts.clone()
        },
        latent: None,
        shared: Vec::new(),
        ..spec.decided_elsewhere()
    }
}

/// The shards of a layer's shared experts as a layer of their own.
pub fn shared_shards(spec: &LayerSpec, mesh: Parallel) -> LayerSpec {
    let sharded = |shared: &SharedExpert| SharedExpert {
        hidden_dim: shared.hidden_dim / mesh.expert_tp,
        ..shared.clone()
    };
    LayerSpec {
        shape: Shape {
            experts: 1,
            top_k: 1,
            ..spec.shape
        },
        experts: Experts {
            identity: 0,
            zero: 0,
            ..spec.experts.clone()
        },
        latent: None,
        shared: spec.shared.iter().map(sharded).collect(),
        ..spec.decided_elsewhere()
    }
}

/// The tensors that come from other ranks, or go there.
const RECEIVED: [&str; 5] = ["rows", "offsets", "row_tiles", "row_slots", "topk_weights"];

fn plan_experts(
    spec: &LayerSpec,
    target: Target,
    options: &PlanOptions,
    own: &LayerSpec,
) -> LayerPlan {
    let mut builder = Builder::new(own, target, options);
    builder.packs &= !options.unpacked;
    builder.part = Part::Experts {
        of: spec.shape.experts,
        top_k: spec.shape.top_k,
    };
    builder.experts();
    if let Some(training) = options.training {
        builder.backward_of_experts(training.recompute);
        builder.evaluation_of_experts();
    }
    for tensor in &mut builder.plan.tensors {
        match tensor.name.as_str() {
            name if RECEIVED.contains(&name) => tensor.role = Role::Input,
            "out" => tensor.role = Role::Output,
            "dout" => tensor.role = Role::OutputGradient,
            "drows" | "dweight_parts" => tensor.role = Role::InputGradient,
            _ => {}
        }
    }
    builder.finish()
}

/// The part of a tensor's name behind the number of its shared expert: `up.weight` of
/// `shared.0.up.weight`.
fn shared_part(name: &str) -> Option<&str> {
    let (number, part) = name.strip_prefix("shared.")?.split_once('.')?;
    number.parse::<usize>().is_ok().then_some(part)
}

fn plan_shared(
    spec: &LayerSpec,
    target: Target,
    options: &PlanOptions,
    mesh: Parallel,
) -> LayerPlan {
    let mut builder = Builder::new(&shared_shards(spec, mesh), target, options);
    builder.shared_alone(options.training.map(|training| training.recompute));
    for tensor in &mut builder.plan.tensors {
        match shared_part(&tensor.name) {
            Some("out") => tensor.role = Role::Output,
            Some("weight") => tensor.role = Role::OutputGradient,
            Some("drows" | "dweight_parts") => tensor.role = Role::InputGradient,
            _ => {}
        }
    }
    builder.forget_unnamed();
    builder.finish()
}

/// Columns of the parts of each weight's gradient that shards of shared experts leave.
fn shared_columns(shared: &LayerPlan) -> Vec<usize> {
    let names = (0..shared.spec.shared.len()).map(|i| format!("shared.{i}.dweight_parts"));
    let parts = names.map(|name| shared.tensor(&name));
    parts
        .map(|parts| parts.map_or(0, |parts| parts.shape[1].eval(0) as usize))
        .collect()
}

/// What comes back from experts in a backward pass.
const BROUGHT_BACK: [&str; 2] = ["drows", "dweight_parts"];

/// Numbers of all ranks' tokens.
const GLOBAL: [&str; 2] = ["global_counts", "global_tokens"];

fn plan_tokens(
    spec: &LayerSpec,
    target: Target,
    options: &PlanOptions,
    (experts, shared): (&LayerPlan, Option<&LayerPlan>),
) -> (LayerPlan, crate::layer::around::Places) {
    let mut builder = Builder::new(spec, target, options);
    let parts = experts.tensor("dweight_parts");
    builder.part = Part::Tokens {
        parts: parts.map_or(0, |parts| parts.shape[1].eval(0) as usize),
    };
    builder.sharded = shared.map(shared_columns);
    let recompute = options
        .training
        .map_or(Recompute::None, |training| training.recompute);
    let places = builder.around_experts(recompute);
    for tensor in &mut builder.plan.tensors {
        // What a caller has counted for one process ranks count themselves.
        if GLOBAL.contains(&&*tensor.name) {
            tensor.role = Role::Scratch;
        }
        // They are brought at every backward pass, so that forward need not keep them.
        let sharded = shared.is_some();
        let name = shared_part(&tensor.name).filter(|_| sharded);
        if BROUGHT_BACK.contains(&name.unwrap_or(&tensor.name)) {
            tensor.role = Role::OutputGradient;
        }
    }
    builder.forget_experts();
    (builder.finish(), places)
}

#[cfg(test)]
mod tests;
