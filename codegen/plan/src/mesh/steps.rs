//! Launches of both sides and what ranks do together, in one order.

use super::{BROUGHT_BACK, Exchange, Parallel, Place, RankPlan, RankStep, Side, Way, shared_part};
use crate::layer::around::Places;
use crate::{LayerPlan, Placement, Role, TensorId, TensorPlan};
use moesaic_spec::{CapacityMode, CapacityOrder, LayerSpec};
use std::ops::Range;

pub(super) fn in_order(
    (mesh, place, placement): (Parallel, Place, Option<Placement>),
    tokens: LayerPlan,
    experts: LayerPlan,
    shared: Option<LayerPlan>,
    places: &Places,
) -> RankPlan {
    let mut plan = RankPlan {
        mesh,
        place,
        placement,
        tile_rows: tile_rows(&experts),
        steps: Vec::new(),
        evaluation: Vec::new(),
        backward: Vec::new(),
        tokens,
        experts,
        shared,
    };
    let trains = plan.tokens.training.is_some();
    plan.steps = forward(&plan, trains, places.forward);
    if trains {
        plan.evaluation = forward(&plan, false, places.evaluation);
        plan.backward = backward(&plan, places.backward);
    }
    plan
}

/// Of the products of experts, whose row tiles are listed once for all.
fn tile_rows(experts: &LayerPlan) -> usize {
    let mut products = experts.kernels.iter().filter_map(|kernel| kernel.op.gemm());
    products.next().map_or(1, |config| config.tile_rows)
}

fn forward(plan: &RankPlan, trains: bool, at: usize) -> Vec<RankStep> {
    let launched = |plan: &LayerPlan| match trains {
        true => plan.steps.len(),
        false => plan.evaluation_steps().len(),
    };
    let steps = match trains {
        true => &plan.tokens.steps,
        false => plan.tokens.evaluation_steps(),
    };
    let named = |name: &str| {
        let id = plan.tokens.id(name);
        id.filter(|id| steps.iter().any(|step| step.tensors().contains(id)))
    };
    let mut list = Vec::new();
    if tokens_matter(&plan.tokens.spec, trains) {
        list.push(exchange("tokens", Way::Tokens));
    }
    let scanned = plan.tokens.routing_of(steps).len();
    launch(&mut list, Side::Tokens, 0..scanned);
    if let (Some(from), Some(to)) = (named("counts"), named("global_counts")) {
        list.push(exchange("counts of all tokens", Way::Sum { from, to }));
    }
    if let (Some(ids), Some(to)) = (plan.tokens.id("topk_ids"), named("global_tokens")) {
        list.push(exchange("tokens with an expert", Way::Live { ids, to }));
    }
    if let Some(tensor) = named("capacity").filter(|_| counted_capacity(&plan.tokens.spec)) {
        list.push(exchange("capacity", Way::Most { tensor }));
    }
    launch(&mut list, Side::Tokens, scanned..at);
    list.push(exchange("counts", Way::Counts));
    list.extend(to_experts(plan, "rows", "rows"));
    if named("row_weights").is_some() {
        list.extend(to_experts(plan, "row_weights", "topk_weights"));
    }
    launch(&mut list, Side::Experts, 0..launched(&plan.experts));
    list.extend(to_tokens(plan, "out"));
    if let Some(shared) = &plan.shared {
        list.push(exchange("tokens of slices", Way::Neighbours));
        list.extend(to_slices(plan, shared, "x"));
        launch(&mut list, Side::Shared, 0..launched(shared));
        list.extend(from_slices(plan, shared, |part| part == "out"));
    }
    launch(&mut list, Side::Tokens, at..steps.len());
    list
}

fn backward(plan: &RankPlan, at: usize) -> Vec<RankStep> {
    let mut list = Vec::new();
    launch(&mut list, Side::Tokens, 0..at);
    list.extend(to_experts(plan, "dout", "dout"));
    launch(&mut list, Side::Experts, 0..plan.experts.backward.len());
    list.extend(to_tokens(plan, "drows"));
    list.extend(to_tokens(plan, "dweight_parts"));
    let weights = plan.tokens.tensors.iter().enumerate();
    for (to, tensor) in weights.filter(|(_, tensor)| tensor.role == Role::Weight) {
        if let Some(from) = plan.experts.id(&tensor.name) {
            let to = TensorId(to);
            list.push(exchange(&tensor.name, Way::Gather { from, to }));
        }
    }
    if let Some(shared) = &plan.shared {
        list.extend(backward_of_shared(plan, shared));
    }
    launch(&mut list, Side::Tokens, at..plan.tokens.backward.len());
    list
}

/// Rows of gradients go to the slices, and what those make of them comes back.
fn backward_of_shared(plan: &RankPlan, shared: &LayerPlan) -> Vec<RankStep> {
    let mut list: Vec<RankStep> = to_slices(plan, shared, "dy").into_iter().collect();
    for tensor in &shared.tensors {
        if shared_part(&tensor.name) == Some("weight") {
            list.extend(to_slices(plan, shared, &tensor.name));
        }
    }
    launch(&mut list, Side::Shared, 0..shared.backward.len());
    let comes_back = |part: &str| BROUGHT_BACK.contains(&part);
    list.extend(from_slices(plan, shared, comes_back));
    let weights = shared.tensors.iter();
    let weights = weights.filter(|tensor| tensor.role == Role::Weight);
    list.extend(weights.filter_map(|tensor| {
        let (from, to) = (shared.id(&tensor.name)?, plan.tokens.id(&tensor.name)?);
        Some(exchange(&tensor.name, Way::OfFirst { from, to }))
    }));
    list
}

/// Whether what a pass does depends on how many tokens other ranks have.
fn tokens_matter(spec: &LayerSpec, trains: bool) -> bool {
    let by_factor = matches!(
        spec.capacity.mode,
        CapacityMode::Factor | CapacityMode::Bounded
    );
    let random = spec.capacity.order == CapacityOrder::Random;
    by_factor || random || (trains && spec.draws())
}

/// Whether the capacity is the largest number of rows that an expert has.
fn counted_capacity(spec: &LayerSpec) -> bool {
    matches!(
        spec.capacity.mode,
        CapacityMode::Factor | CapacityMode::Bounded | CapacityMode::MaxCount
    )
}

fn launch(list: &mut Vec<RankStep>, side: Side, steps: Range<usize>) {
    list.extend(steps.map(|step| RankStep::Launch { side, step }));
}

fn exchange(name: &str, way: Way) -> RankStep {
    RankStep::Exchange(Exchange {
        name: name.to_string(),
        way,
    })
}

fn to_experts(plan: &RankPlan, from: &str, to: &str) -> Option<RankStep> {
    let (name, from, to) = (from, plan.tokens.id(from)?, plan.experts.id(to)?);
    Some(exchange(name, Way::ToExperts { from, to }))
}

fn to_slices(plan: &RankPlan, shared: &LayerPlan, name: &str) -> Option<RankStep> {
    let (from, to) = (plan.tokens.id(name)?, shared.id(name)?);
    Some(exchange(name, Way::ToSlices { from, to }))
}

/// What slices have of each shared expert's tensors of some kinds.
fn from_slices(plan: &RankPlan, shared: &LayerPlan, of: impl Fn(&str) -> bool) -> Vec<RankStep> {
    let tensors = shared.tensors.iter().enumerate();
    let wanted = tensors.filter(|(_, tensor)| shared_part(&tensor.name).is_some_and(&of));
    let step = |(from, tensor): (usize, &TensorPlan)| {
        let (from, to) = (TensorId(from), plan.tokens.id(&tensor.name)?);
        Some(exchange(&tensor.name, Way::FromSlices { from, to }))
    };
    wanted.filter_map(step).collect()
}

/// Back to the tokens, summed over slices first: each has only a part.
fn to_tokens(plan: &RankPlan, name: &str) -> Vec<RankStep> {
    let (Some(tensor), Some(to)) = (plan.experts.id(name), plan.tokens.id(name)) else {
        return Vec::new();
    };
    let sum = exchange(&format!("{name} of slices"), Way::OverShards { tensor });
    let back = exchange(name, Way::ToTokens { from: tensor, to });
    let sliced = plan.mesh.shards > 1;
    sliced.then_some(sum).into_iter().chain([back]).collect()
}
