//! A layer whose experts live on many ranks: one rank's launches and exchanges in one list of
//! steps.
//!
//! ```text
//! dispatch part   gate ─ scan ─ dispatch ─┐                     ┌─ combine
//! between ranks                  counts, rows             rows back
//! expert part                          └─ up ─ down ─────────┘
//! ```
//!
//! Each rank has both parts: its own tokens and its own experts. The dispatch part is the layer
//! without its experts, planned for this rank's tokens. The expert part is the experts' GEMMs
//! alone, planned for the rows that arrive, as if each row were a token with one expert. Rows are
//! ordered by expert, then by source rank, so there is one GEMM for each expert whatever the number
//! of ranks. Backward uses the same parts with the counts that forward kept.
//!
//! Shared experts belong to the dispatch part, whole, or to a third part, sharded as the routed
//! experts are ([`SharedExperts`]): TP peers gather their tokens, each multiplies all of them with
//! its shard, and a reduce-scatter returns the sums to the tokens' ranks.
//!
//! ```text
//! dispatch part     x ─┐             ┌─ combine
//! between shards      rows          sums
//! shared experts      └─ up ─ down ─┘
//! ```
//!
//! Hot experts may have shadows for one call ([`Strategy::shadows`]): their weights go to all
//! groups, their rows stay, and their gradients are summed at the owner.
//!
//! ```text
//! dispatch part   rows of a shadowed expert ─┐             ┌─ combine
//! between ranks              its weights    │             │
//! shadow part                             └─ up ─ down ─┘
//! ```
//!
//! The mesh does not change semantics: across all ranks, results equal those of one process that is
//! given every rank's tokens in rank order.
//!
//! [`SharedExperts`]: moesaic_dist::SharedExperts
//! [`Strategy::shadows`]: moesaic_dist::Strategy::shadows

mod bytes;
mod chunks;
mod comm_cast;
mod data;
mod ports;
mod regions;
mod steps;
mod text;

pub use comm_cast::{CastRows, RowCasts, SATURATED};
pub use data::{CastLane, Exchange, FromTo, Packed, PartTensor, RankPlan, RankStep};
pub use regions::ShardRegion;

use crate::layer::{Builder, Part, Recompute};
use crate::{LayerPlan, PlanError, PlanOptions};
use moesaic_dist::{
    AdaptiveMesh, MeshError, Parallel, Placement, PlanForm, RankCoords, Strategy, TokenScope,
};
use moesaic_kernel::Target;
use moesaic_spec::{Experts, LayerSpec, Shape, SharedExpert, WeightSite};
use std::borrow::Cow;

/// The sharing of a layer: mesh, placement, form of the plan, and scope.
#[derive(Clone, Copy, Debug)]
pub struct Sharing<'p> {
    mesh: Parallel,
    placement: Option<&'p Placement>,
    form: PlanForm,
    scope: TokenScope,
}

impl From<Parallel> for Sharing<'_> {
    /// Returns the default: contiguous experts, rows to all of their shards, no shadows.
    fn from(mesh: Parallel) -> Self {
        Sharing {
            mesh,
            placement: None,
            form: Strategy::default().plan_form(&mesh),
            scope: TokenScope::Rank,
        }
    }
}

impl<'p> Sharing<'p> {
    /// Sets the form that a strategy asks for ([`Strategy::plan_form`]).
    ///
    /// A plan packs neither weights that ranks gather nor those of shadows. Where ranks return sums,
    /// experts weight their outputs as with `weight_on = "activation"`, also where the spec has
    /// `combine` weight them: the same function up to rounding. The outputs of identity experts and
    /// normalised ones are weighted by `combine` alone, so a layer with some stays as it is.
    #[must_use]
    pub fn by(self, form: PlanForm) -> Sharing<'p> {
        Sharing { form, ..self }
    }

    /// Sets the adaptive parallelism degree ([`AdaptiveMesh`]).
    #[must_use]
    pub fn at_r(self, adaptive_r: usize) -> Sharing<'p> {
        self.by(PlanForm {
            adaptive_r,
            ..self.form
        })
    }

    /// Sets the most experts that every group shadows in one call ([`Strategy::shadows`]).
    #[must_use]
    pub fn shadowing(self, shadows: usize) -> Sharing<'p> {
        self.by(PlanForm {
            shadows,
            ..self.form
        })
    }

    /// Sets the placement of experts; `None` means contiguous ranges.
    #[must_use]
    pub fn placed<'q>(self, placement: Option<&'q Placement>) -> Sharing<'q> {
        Sharing {
            mesh: self.mesh,
            placement,
            form: self.form,
            scope: self.scope,
        }
    }

    /// Sets the tokens that losses, capacities and selections look at.
    #[must_use]
    pub fn over(self, scope: TokenScope) -> Sharing<'p> {
        Sharing { scope, ..self }
    }
}

/// Plans the steps of `rank`. The spec must be valid.
///
/// # Errors
/// [`PlanError::Mesh`] for a mesh that the layer cannot have; [`PlanError::Strategy`] for an
/// adaptive parallelism degree, or shadows, that the mesh cannot have; [`PlanError::Placement`] for
/// a placement of other experts or groups.
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
        form,
        scope,
    } = sharing.into();
    let PlanForm {
        adaptive_r,
        shadows,
        ..
    } = form;
    let spec = &*if form.sums {
        weighted_by_experts(spec)
    } else {
        Cow::Borrowed(spec)
    };
    mesh.check(spec)?;
    crate::layer::check_row_format(spec, target, options)?;
    check_codes_stay(spec, mesh)?;
    let place = mesh.place(rank)?;
    let by = AdaptiveMesh::new(mesh, adaptive_r)?.shadowing(shadows)?;
    let placement = out_of_order(placement, mesh, spec.shape.experts)?;
    let of_experts = PlanOptions {
        // Gathered weights arrive in the layout in which their owners store them.
        unpacked: options.unpacked || !by.is_owner_only(),
        ..options.clone()
    };
    // Where rows stay (a degree of 0), each rank multiplies with all experts in order, wherever
    // their owners are.
    let own = match placement.filter(|_| adaptive_r > 0) {
        None => experts_of(spec, by.mesh(), by.place(rank)),
        Some(placement) => {
            let experts = placement.count(place.ep);
            expert_layer(spec, by.mesh(), by.place(rank), experts)
        }
    };
    let experts = plan_experts(spec, target, &of_experts, &own);
    // The shadow model never chooses the last expert, and with one group every rank has all experts
    // anyway.
    let most = shadows.min(spec.shape.experts - 1) * usize::from(mesh.ep > 1);
    let shadows = (most > 0).then(|| {
        let options = PlanOptions {
            unpacked: true,
            ..options.clone()
        };
        let shadowed = expert_layer(spec, by.mesh(), by.place(rank), most);
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

/// Returns the spec with weights that act inside the experts, where they can instead of on outputs.
fn weighted_by_experts(spec: &LayerSpec) -> Cow<'_, LayerSpec> {
    let own = spec.experts.identity > 0 || spec.experts.output_norm_eps.is_some();
    if spec.router.weight_on != WeightSite::Output || own {
        return Cow::Borrowed(spec);
    }
    let mut spec = spec.clone();
    spec.router.weight_on = WeightSite::Activation;
    Cow::Owned(spec)
}

/// Refuses a mesh that would cut codes, because there are no kernels for parts of blocks.
fn check_codes_stay(spec: &LayerSpec, mesh: Parallel) -> Result<(), MeshError> {
    match (spec.precision.experts, mesh.expert_tp) {
        (Some(format), expert_tp @ 2..) => Err(MeshError::Codes { format, expert_tp }),
        _ => Ok(()),
    }
}

/// Returns the placement if it is not the contiguous one, once it is known to fit the mesh.
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

/// Returns the routed experts of a rank as a layer of its own, in which a row is a token with one
/// known expert.
pub fn experts_of(spec: &LayerSpec, mesh: Parallel, place: RankCoords) -> LayerSpec {
    let experts = mesh.experts(place.ep, spec.shape.experts).len();
    expert_layer(spec, mesh, place, experts)
}

fn expert_layer(spec: &LayerSpec, mesh: Parallel, place: RankCoords, experts: usize) -> LayerSpec {
    let mut elsewhere = spec.decided_elsewhere();
    // The tokens' rank normalises outputs once the sums of all shards are there, and the gradients
    // that it sends back have the weights of rows in them.
    if elsewhere.experts.output_norm_eps.take().is_some() {
        elsewhere.router.weight_on = WeightSite::Input;
    }
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
            ..elsewhere.experts.clone()
        },
        latent: None,
        shared: Vec::new(),
        ..elsewhere
    }
}

/// Returns the shards of a layer's shared experts as a layer of its own.
pub fn shared_shards(spec: &LayerSpec, mesh: Parallel) -> LayerSpec {
    let sharded = |shared: &SharedExpert| SharedExpert {
        hidden_dim: shared.hidden_dim / mesh.expert_tp,
        ..shared.clone()
    };
    LayerSpec {
        shape: Shape {
            // A layer has an expert at least. No step names this one, so its tensors are dropped.
            experts: 1,
            top_k: 1,
            ..spec.shape
        },
        experts: Experts {
            identity: 0,
            zero: 0,
            output_norm_eps: None,
            ..spec.experts.clone()
        },
        latent: None,
        shared: spec.shared.iter().map(sharded).collect(),
        ..spec.decided_elsewhere()
    }
}

fn plan_experts(
    spec: &LayerSpec,
    target: Target,
    options: &PlanOptions,
    own: &LayerSpec,
) -> LayerPlan {
    let mut builder = Builder::new(own, target, options);
    // Other ranks cannot gather packed weights.
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
    ports::of_experts(&mut builder.plan.tensors);
    builder.finish()
}

fn plan_shared(
    spec: &LayerSpec,
    target: Target,
    options: &PlanOptions,
    mesh: Parallel,
) -> LayerPlan {
    let mut builder = Builder::new(&shared_shards(spec, mesh), target, options);
    builder.shared_alone(options.training.map(|training| training.recompute));
    // After the passes, which declare `dweight_parts`: its width follows from their tilings.
    ports::of_shared(&mut builder.plan.tensors);
    builder.forget_unnamed();
    builder.finish()
}

/// Returns, for each shared expert, the columns of the partial gradient of its weight that its
/// shards produce.
fn shared_columns(shared: &LayerPlan) -> Vec<usize> {
    let names = (0..shared.spec.shared.len()).map(|i| format!("shared.{i}.dweight_parts"));
    let parts = names.map(|name| shared.tensor(&name));
    parts
        .map(|parts| parts.map_or(0, |parts| parts.shape[1].eval(0) as usize))
        .collect()
}

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
    ports::of_tokens(&mut builder.plan.tensors, shared.is_some());
    builder.forget_experts();
    (builder.finish(), places)
}

#[cfg(test)]
mod tests;
