//! Launches of both parts and what ranks do together, in one order.

use super::adaptive::cut_of;
use super::{
    BROUGHT_BACK, CollectiveOp, Exchange, PlanPart, RankPlan, RankStep, TokenScope, shared_part,
};
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
        list.push(exchange("tokens", CollectiveOp::TokenCounts));
    }
    let scanned = plan.tokens.routing_of(steps).len();
    launch(&mut list, PlanPart::Dispatch, 0..scanned);
    let together = plan.scope == TokenScope::World;
    if together {
        list.push(exchange(
            "routing of all tokens",
            CollectiveOp::GlobalRouting,
        ));
    }
    if let (Some(from), Some(to)) = (named("counts"), named("global_counts")) {
        list.push(exchange(
            "counts of all tokens",
            CollectiveOp::AllReduceSum { from, to },
        ));
    }
    if let (Some(ids), Some(to)) = (plan.tokens.id("topk_ids"), named("global_tokens")) {
        list.push(exchange(
            "tokens with an expert",
            CollectiveOp::CountLiveTokens { ids, to },
        ));
    }
    if let Some(tensor) = named("capacity").filter(|_| counted_capacity(&plan.tokens.spec)) {
        list.push(exchange("capacity", CollectiveOp::AllReduceMax { tensor }));
    }
    let summed = if together {
        sums_losses(plan, steps)
    } else {
        None
    };
    let first = summed.unwrap_or(scanned);
    launch(&mut list, PlanPart::Dispatch, scanned..first);
    if summed.is_some() {
        list.extend(LOSS_PARTS.into_iter().filter_map(|name| {
            let tensor = named(name)?;
            Some(exchange(name, CollectiveOp::ReduceLossParts { tensor }))
        }));
    }
    launch(&mut list, PlanPart::Dispatch, first..at);
    let multiply = pass_of(&plan.experts, trains);
    list.extend(gathered_weights(plan, multiply));
    let weights = named("row_weights").map(|_| ("row_weights", "topk_weights"));
    let sent: Vec<_> = [("rows", "rows")].into_iter().chain(weights).collect();
    if let Some(shadows) = &plan.shadows {
        list.push(exchange("loads", CollectiveOp::TokensPerExpert));
        list.extend(of_shadows(plan, shadows, (pass_of(shadows, trains), &sent)));
    }
    list.push(exchange("counts", CollectiveOp::RowCounts));
    list.extend(
        sent.iter()
            .filter_map(|(from, to)| to_experts(plan, from, to)),
    );
    if let Some(shadows) = &plan.shadows {
        launch(
            &mut list,
            PlanPart::Shadows,
            0..pass_of(shadows, trains).len(),
        );
        list.extend(from_shadows(plan, shadows, "out"));
    }
    launch(&mut list, PlanPart::Experts, 0..multiply.len());
    list.extend(to_tokens(plan, &["out"]));
    if let Some(shared) = &plan.shared {
        list.push(exchange("tokens of shards", CollectiveOp::TpTokenCounts));
        list.extend(to_slices(plan, shared, "x"));
        launch(
            &mut list,
            PlanPart::Shared,
            0..pass_of(shared, trains).len(),
        );
        list.extend(from_slices(plan, shared, |part| part == "out"));
    }
    launch(&mut list, PlanPart::Dispatch, at..steps.len());
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

/// The steps of a part in a forward pass.
fn pass_of(part: &LayerPlan, trains: bool) -> &[Step] {
    if trains {
        &part.steps
    } else {
        part.evaluation_steps()
    }
}

fn backward(plan: &RankPlan, at: usize) -> Vec<RankStep> {
    let mut list = Vec::new();
    let again = plan.tokens.routing_of(&plan.tokens.backward).len();
    launch(&mut list, PlanPart::Dispatch, 0..again);
    if again > 0 && plan.scope == TokenScope::World {
        list.push(exchange(
            "routing of all tokens",
            CollectiveOp::GlobalRouting,
        ));
    }
    launch(&mut list, PlanPart::Dispatch, again..at);
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
        launch(&mut list, PlanPart::Shadows, 0..shadows.backward.len());
        let back = BROUGHT_BACK.iter();
        list.extend(back.filter_map(|name| from_shadows(plan, shadows, name)));
    }
    launch(&mut list, PlanPart::Experts, 0..plan.experts.backward.len());
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
            list.push(exchange(
                &tensor.name,
                CollectiveOp::AllGatherExperts { from, to },
            ));
        }
    }
    if let Some(shared) = &plan.shared {
        list.extend(backward_of_shared(plan, shared));
    }
    launch(
        &mut list,
        PlanPart::Dispatch,
        at..plan.tokens.backward.len(),
    );
    list
}

/// Weights that steps of a pass multiply with, where ranks own less than that; and the last
/// bias, which the dispatch part may ask for.
fn gathered_weights(plan: &RankPlan, steps: &[Step]) -> Vec<RankStep> {
    let used = |weight| steps.iter().any(|step| step.tensors().contains(&weight));
    let op = |weight, cut: Option<usize>| {
        let wanted = cut.is_none() || used(weight);
        wanted.then_some(CollectiveOp::AllGatherWeight { weight, cut })
    };
    of_blocks(plan, Role::Weight, op)
}

fn scattered_gradients(plan: &RankPlan) -> Vec<RankStep> {
    let op = |gradient, cut| Some(CollectiveOp::ReduceScatterGradient { gradient, cut });
    of_blocks(plan, Role::WeightGradient, op)
}

fn of_blocks(
    plan: &RankPlan,
    role: Role,
    op: impl Fn(TensorId, Option<usize>) -> Option<CollectiveOp>,
) -> Vec<RankStep> {
    if plan.by().is_owner_only() {
        return Vec::new();
    }
    let tensors = plan.experts.tensors.iter().enumerate();
    let tensors = tensors.filter(|(_, tensor)| tensor.role == role);
    let step = |(at, tensor): (usize, &TensorPlan)| {
        let op = op(TensorId(at), cut_of(&tensor.name))?;
        Some(exchange(&tensor.name, op))
    };
    tensors.filter_map(step).collect()
}

/// Weights that these steps of the shadow part multiply with, and rows, of experts with
/// shadows; of each tensor that is sent the name on both parts.
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
            CollectiveOp::BroadcastShadowWeight { from, to },
        ))
    };
    let rows = |(from, to): &(&str, &str)| {
        let op = CollectiveOp::KeepShadowRows {
            from: plan.tokens.id(from)?,
            to: shadows.id(to)?,
        };
        Some(exchange(&of_shadow(from), op))
    };
    let weights = weights.filter_map(weight);
    weights.chain(sent.iter().filter_map(rows)).collect()
}

fn of_shadow(name: &str) -> String {
    format!("{name} of shadows")
}

fn from_shadows(plan: &RankPlan, shadows: &LayerPlan, name: &str) -> Option<RankStep> {
    let (from, to) = (shadows.id(name)?, plan.tokens.id(name)?);
    Some(exchange(
        &of_shadow(name),
        CollectiveOp::ReturnShadowRows { from, to },
    ))
}

fn sums_of_shadows(plan: &RankPlan, shadows: &LayerPlan) -> Vec<RankStep> {
    let tensors = shadows.tensors.iter().enumerate();
    let gradients = tensors.filter(|(_, tensor)| tensor.role == Role::WeightGradient);
    let sum = |(at, tensor): (usize, &TensorPlan)| {
        let (from, to) = (TensorId(at), plan.experts.id(&tensor.name)?);
        Some(exchange(
            &of_shadow(&tensor.name),
            CollectiveOp::ReduceShadowGradient { from, to },
        ))
    };
    gradients.filter_map(sum).collect()
}

/// Rows of gradients go to the shards, and what those make of them comes back.
fn backward_of_shared(plan: &RankPlan, shared: &LayerPlan) -> Vec<RankStep> {
    let mut list: Vec<RankStep> = to_slices(plan, shared, "dy").into_iter().collect();
    for tensor in &shared.tensors {
        if shared_part(&tensor.name) == Some("weight") {
            list.extend(to_slices(plan, shared, &tensor.name));
        }
    }
    launch(&mut list, PlanPart::Shared, 0..shared.backward.len());
    let comes_back = |part: &str| BROUGHT_BACK.contains(&part);
    list.extend(from_slices(plan, shared, comes_back));
    let weights = shared.tensors.iter();
    let weights = weights.filter(|tensor| tensor.role == Role::Weight);
    list.extend(weights.filter_map(|tensor| {
        let (from, to) = (shared.id(&tensor.name)?, plan.tokens.id(&tensor.name)?);
        Some(exchange(
            &tensor.name,
            CollectiveOp::BroadcastTp { from, to },
        ))
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

fn launch(list: &mut Vec<RankStep>, part: PlanPart, steps: Range<usize>) {
    let chunk = None;
    list.extend(steps.map(|step| RankStep::Launch { part, step, chunk }));
}

fn exchange(name: &str, op: CollectiveOp) -> RankStep {
    RankStep::Exchange(Exchange {
        name: name.to_string(),
        op,
        packed: None,
        chunk: None,
    })
}

fn to_experts(plan: &RankPlan, from: &str, to: &str) -> Option<RankStep> {
    let (name, from, to) = (from, plan.tokens.id(from)?, plan.experts.id(to)?);
    Some(exchange(name, CollectiveOp::Dispatch { from, to }))
}

fn to_slices(plan: &RankPlan, shared: &LayerPlan, name: &str) -> Option<RankStep> {
    let (from, to) = (plan.tokens.id(name)?, shared.id(name)?);
    Some(exchange(name, CollectiveOp::AllGatherTp { from, to }))
}

/// What shards have of each shared expert's tensors of some kinds.
fn from_slices(plan: &RankPlan, shared: &LayerPlan, of: impl Fn(&str) -> bool) -> Vec<RankStep> {
    let tensors = shared.tensors.iter().enumerate();
    let wanted = tensors.filter(|(_, tensor)| shared_part(&tensor.name).is_some_and(&of));
    let step = |(from, tensor): (usize, &TensorPlan)| {
        let (from, to) = (TensorId(from), plan.tokens.id(&tensor.name)?);
        Some(exchange(
            &tensor.name,
            CollectiveOp::ReduceScatterTp { from, to },
        ))
    };
    wanted.filter_map(step).collect()
}

/// Back to the tokens, summed over shards first: each has only a part.
fn to_tokens(plan: &RankPlan, names: &[&str]) -> Vec<RankStep> {
    let (mut sums, mut back) = (Vec::new(), Vec::new());
    for name in names {
        let (Some(tensor), Some(to)) = (plan.experts.id(name), plan.tokens.id(name)) else {
            continue;
        };
        if plan.by().mesh().expert_tp > 1 {
            let op = CollectiveOp::AllReduceTp { tensor };
            sums.push(exchange(&format!("{name} of shards"), op));
        }
        back.push(exchange(name, CollectiveOp::Combine { from: tensor, to }));
    }
    [sums, back].concat()
}
