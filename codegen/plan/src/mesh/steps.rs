//! Launches of both sides and what ranks do together, in one order.

use super::ways::cut_of;
use super::{BROUGHT_BACK, Exchange, RankPlan, RankStep, Side, TokenScope, Way, shared_part};
use crate::layer::around::Places;
use crate::{LayerPlan, Recompute, Role, Step, TensorId, TensorPlan};
use moesaic_spec::{CapacityMode, CapacityOrder, LayerSpec};
use std::ops::Range;

/// The plan with its steps.
pub(super) fn in_order(mut plan: RankPlan, places: &Places) -> RankPlan {
    let trains = plan.tokens.training.is_some();
    plan.steps = forward(&plan, trains, places.forward);
    if trains {
        plan.evaluation = forward(&plan, false, places.evaluation);
        plan.backward = backward(&plan, places.backward);
    }
    plan
}

fn forward(plan: &RankPlan, trains: bool, at: usize) -> Vec<RankStep> {
    let steps = pass_of(&plan.tokens, trains);
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
    let together = plan.scope == TokenScope::World;
    if together {
        list.push(exchange("routing of all tokens", Way::Placed));
    }
    if let (Some(from), Some(to)) = (named("counts"), named("global_counts")) {
        list.push(exchange("counts of all tokens", Way::Sum { from, to }));
    }
    if let (Some(ids), Some(to)) = (plan.tokens.id("topk_ids"), named("global_tokens")) {
        list.push(exchange("tokens with an expert", Way::Live { ids, to }));
    }
    if let Some(tensor) = named("capacity").filter(|_| counted_capacity(&plan.tokens.spec)) {
        list.push(exchange("capacity", Way::Most { tensor }));
    }
    let summed = if together {
        sums_losses(plan, steps)
    } else {
        None
    };
    let first = summed.unwrap_or(scanned);
    launch(&mut list, Side::Tokens, scanned..first);
    if summed.is_some() {
        list.extend(LOSS_PARTS.into_iter().filter_map(|name| {
            let tensor = named(name)?;
            Some(exchange(name, Way::LossParts { tensor }))
        }));
    }
    launch(&mut list, Side::Tokens, first..at);
    let multiply = pass_of(&plan.experts, trains);
    list.extend(gathered_weights(plan, multiply));
    let weights = named("row_weights").map(|_| ("row_weights", "topk_weights"));
    let sent: Vec<_> = [("rows", "rows")].into_iter().chain(weights).collect();
    if let Some(shadows) = &plan.shadows {
        list.push(exchange("loads", Way::Loads));
        list.extend(of_shadows(plan, shadows, (pass_of(shadows, trains), &sent)));
    }
    list.push(exchange("counts", Way::Counts));
    list.extend(
        sent.iter()
            .filter_map(|(from, to)| to_experts(plan, from, to)),
    );
    if let Some(shadows) = &plan.shadows {
        launch(&mut list, Side::Shadows, 0..pass_of(shadows, trains).len());
        list.extend(from_shadows(plan, shadows, "out"));
    }
    launch(&mut list, Side::Experts, 0..multiply.len());
    list.extend(to_tokens(plan, &["out"]));
    if let Some(shared) = &plan.shared {
        list.push(exchange("tokens of slices", Way::Neighbours));
        list.extend(to_slices(plan, shared, "x"));
        launch(&mut list, Side::Shared, 0..pass_of(shared, trains).len());
        list.extend(from_slices(plan, shared, |part| part == "out"));
    }
    launch(&mut list, Side::Tokens, at..steps.len());
    list
}

/// What losses are made of, a row for each tile of tokens.
const LOSS_PARTS: [&str; 3] = ["loss_parts", "token_parts", "sequence_parts"];

/// The step that makes losses of sums over tiles of tokens, if a pass has one.
fn sums_losses(plan: &RankPlan, steps: &[Step]) -> Option<usize> {
    let slopes = plan.tokens.id("loss_slopes")?;
    steps
        .iter()
        .position(|step| step.tensors().contains(&slopes))
}

/// The steps of a side in a forward pass.
fn pass_of(side: &LayerPlan, trains: bool) -> &[Step] {
    if trains {
        &side.steps
    } else {
        side.evaluation_steps()
    }
}

fn backward(plan: &RankPlan, at: usize) -> Vec<RankStep> {
    let mut list = Vec::new();
    let again = plan.tokens.routing_of(&plan.tokens.backward).len();
    launch(&mut list, Side::Tokens, 0..again);
    if again > 0 && plan.scope == TokenScope::World {
        list.push(exchange("routing of all tokens", Way::Placed));
    }
    launch(&mut list, Side::Tokens, again..at);
    list.extend(gathered_weights(plan, &plan.experts.backward));
    if let Some(shadows) = &plan.shadows {
        let sent = &[("dout", "dout")];
        // What is computed again instead of being kept is sent again, too.
        let training = plan.tokens.training.unwrap_or_default();
        let weights_of = match training.recompute {
            Recompute::None => &[],
            Recompute::Hidden | Recompute::All => &shadows.backward[..],
        };
        list.extend(of_shadows(plan, shadows, (weights_of, sent)));
    }
    list.extend(to_experts(plan, "dout", "dout"));
    if let Some(shadows) = &plan.shadows {
        launch(&mut list, Side::Shadows, 0..shadows.backward.len());
        let back = BROUGHT_BACK.iter();
        list.extend(back.filter_map(|name| from_shadows(plan, shadows, name)));
    }
    launch(&mut list, Side::Experts, 0..plan.experts.backward.len());
    list.extend(to_tokens(plan, &["drows", "dweight_parts"]));
    list.extend(scattered_gradients(plan));
    list.extend(
        plan.shadows
            .iter()
            .flat_map(|shadows| sums_of_shadows(plan, shadows)),
    );
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

/// Weights that steps of a pass multiply with, where ranks own less than that; and the last
/// bias, which the tokens' side may ask for.
fn gathered_weights(plan: &RankPlan, steps: &[Step]) -> Vec<RankStep> {
    let used = |weight| steps.iter().any(|step| step.tensors().contains(&weight));
    let way = |weight, cut: Option<usize>| {
        let wanted = cut.is_none() || used(weight);
        wanted.then_some(Way::GatherWeight { weight, cut })
    };
    of_blocks(plan, Role::Weight, way)
}

fn scattered_gradients(plan: &RankPlan) -> Vec<RankStep> {
    let way = |gradient, cut| Some(Way::ScatterGradient { gradient, cut });
    of_blocks(plan, Role::WeightGradient, way)
}

fn of_blocks(
    plan: &RankPlan,
    role: Role,
    way: impl Fn(TensorId, Option<usize>) -> Option<Way>,
) -> Vec<RankStep> {
    if plan.by().own_alone() {
        return Vec::new();
    }
    let tensors = plan.experts.tensors.iter().enumerate();
    let tensors = tensors.filter(|(_, tensor)| tensor.role == role);
    let step = |(at, tensor): (usize, &TensorPlan)| {
        let way = way(TensorId(at), cut_of(&tensor.name))?;
        Some(exchange(&tensor.name, way))
    };
    tensors.filter_map(step).collect()
}

/// Weights that these steps of the shadows' side multiply with, and rows, of experts with
/// shadows; of each tensor that is sent the name on both sides.
fn of_shadows(
    plan: &RankPlan,
    shadows: &LayerPlan,
    (steps, sent): (&[Step], &[(&str, &str)]),
) -> Vec<RankStep> {
    let used = |weight| steps.iter().any(|step| step.tensors().contains(&weight));
    let weights = shadows.tensors.iter().enumerate();
    let weights = weights.filter(|(at, tensor)| tensor.role == Role::Weight && used(TensorId(*at)));
    let weight = |(at, tensor): (usize, &TensorPlan)| {
        let (from, to) = (plan.experts.id(&tensor.name)?, TensorId(at));
        Some(exchange(
            &of_shadow(&tensor.name),
            Way::ShadowWeight { from, to },
        ))
    };
    let rows = |(from, to): &(&str, &str)| {
        let way = Way::ToShadows {
            from: plan.tokens.id(from)?,
            to: shadows.id(to)?,
        };
        Some(exchange(&of_shadow(from), way))
    };
    let weights = weights.filter_map(weight);
    weights.chain(sent.iter().filter_map(rows)).collect()
}

fn of_shadow(name: &str) -> String {
    format!("{name} of shadows")
}

fn from_shadows(plan: &RankPlan, shadows: &LayerPlan, name: &str) -> Option<RankStep> {
    let (from, to) = (shadows.id(name)?, plan.tokens.id(name)?);
    Some(exchange(&of_shadow(name), Way::FromShadows { from, to }))
}

fn sums_of_shadows(plan: &RankPlan, shadows: &LayerPlan) -> Vec<RankStep> {
    let tensors = shadows.tensors.iter().enumerate();
    let gradients = tensors.filter(|(_, tensor)| tensor.role == Role::WeightGradient);
    let sum = |(at, tensor): (usize, &TensorPlan)| {
        let (from, to) = (TensorId(at), plan.experts.id(&tensor.name)?);
        Some(exchange(
            &of_shadow(&tensor.name),
            Way::ShadowGradient { from, to },
        ))
    };
    gradients.filter_map(sum).collect()
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
    let piece = None;
    list.extend(steps.map(|step| RankStep::Launch { side, step, piece }));
}

fn exchange(name: &str, way: Way) -> RankStep {
    RankStep::Exchange(Exchange {
        name: name.to_string(),
        way,
        packed: None,
        piece: None,
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
fn to_tokens(plan: &RankPlan, names: &[&str]) -> Vec<RankStep> {
    let (mut sums, mut back) = (Vec::new(), Vec::new());
    for name in names {
        let (Some(tensor), Some(to)) = (plan.experts.id(name), plan.tokens.id(name)) else {
            continue;
        };
        if plan.by().mesh().shards > 1 {
            let way = Way::OverShards { tensor };
            sums.push(exchange(&format!("{name} of slices"), way));
        }
        back.push(exchange(name, Way::ToTokens { from: tensor, to }));
    }
    [sums, back].concat()
}
