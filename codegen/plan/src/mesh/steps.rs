//! The order of steps: launches of all parts and exchanges in one list.

use super::adaptive::shard_dim;
use super::{
    BROUGHT_BACK, CollectiveOp, Exchange, PlanPart, RankPlan, RankStep, TokenScope, shared_part,
};
use crate::layer::around::Places;
use crate::{LayerPlan, Recompute, Role, Step, TensorId, TensorPlan};
use moesaic_spec::{CapacityMode, CapacityOrder, LayerSpec};
use std::ops::Range;

/// Returns the plan with its steps.
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
    if needs_token_counts(&plan.tokens.spec, trains) {
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
    // Sums over tiles are exchanged before the kernel that turns them into losses reads them.
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
        list.push(exchange("tokens per expert", CollectiveOp::TokensPerExpert));
        list.extend(begin_shadows(
            plan,
            shadows,
            (pass_of(shadows, trains), &sent),
        ));
    }
    // After the choice of shadows, because rows of shadowed experts stay and are not counted.
    list.push(exchange("counts", CollectiveOp::RowCounts));
    list.extend(
        sent.iter()
            .filter_map(|(from, to)| dispatch(plan, from, to)),
    );
    if let Some(shadows) = &plan.shadows {
        launch(
            &mut list,
            PlanPart::Shadows,
            0..pass_of(shadows, trains).len(),
        );
        list.extend(return_shadow_rows(plan, shadows, "out"));
    }
    launch(&mut list, PlanPart::Experts, 0..multiply.len());
    list.extend(combine(plan, &["out"]));
    if let Some(shared) = &plan.shared {
        list.push(exchange("tokens of shards", CollectiveOp::TpTokenCounts));
        list.extend(all_gather_tp(plan, shared, "x"));
        launch(
            &mut list,
            PlanPart::Shared,
            0..pass_of(shared, trains).len(),
        );
        list.extend(reduce_scatter_tp(plan, shared, |part| part == "out"));
    }
    launch(&mut list, PlanPart::Dispatch, at..steps.len());
    list
}

/// The tensors that losses are made of, with a row for each tile of tokens.
const LOSS_PARTS: [&str; 3] = ["loss_parts", "token_parts", "sequence_parts"];

/// Returns the index of the step that turns sums over tiles into losses, if the pass has one.
fn sums_losses(plan: &RankPlan, steps: &[Step]) -> Option<usize> {
    let slopes = plan.tokens.id("loss_slopes")?;
    steps
        .iter()
        .position(|step| step.tensors().contains(&slopes))
}

/// Returns the steps of a part in a forward pass.
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
    // The recomputed routing knows this rank's tokens alone, and is replaced as in forward.
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
        // Weights of shadows are not kept where hidden values are recomputed: the recomputation
        // needs them again, so they are sent again.
        let training = plan.tokens.training.unwrap_or_default();
        let weights_of = match training.recompute {
            Recompute::None => &[],
            Recompute::Hidden | Recompute::All => &shadows.backward[..],
        };
        list.extend(begin_shadows(plan, shadows, (weights_of, sent)));
    }
    // Backward needs no counts: forward's are kept.
    list.extend(dispatch(plan, "dout", "dout"));
    if let Some(shadows) = &plan.shadows {
        launch(&mut list, PlanPart::Shadows, 0..shadows.backward.len());
        let back = BROUGHT_BACK.iter();
        list.extend(back.filter_map(|name| return_shadow_rows(plan, shadows, name)));
    }
    launch(&mut list, PlanPart::Experts, 0..plan.experts.backward.len());
    list.extend(combine(plan, &["drows", "dweight_parts"]));
    list.extend(scattered_gradients(plan));
    list.extend(
        plan.shadows
            .iter()
            .flat_map(|shadows| reduce_shadow_gradients(plan, shadows)),
    );
    // A bias of the last GEMM is weighted with its row, so the gradient of that weight, which the
    // tokens' rank computes, reads the biases of all experts.
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

/// Returns the all-gathers of the weights that a pass reads and its ranks own only in part, and of
/// the last bias, which the dispatch part may read.
fn gathered_weights(plan: &RankPlan, steps: &[Step]) -> Vec<RankStep> {
    let used = |weight| steps.iter().any(|step| step.tensors().contains(&weight));
    let op = |weight, dim: Option<usize>| {
        let wanted = dim.is_none() || used(weight);
        wanted.then_some(CollectiveOp::AllGatherWeight { weight, dim })
    };
    of_blocks(plan, |id| plan.experts.is_multiplied(id), op)
}

fn scattered_gradients(plan: &RankPlan) -> Vec<RankStep> {
    let op = |gradient, dim| Some(CollectiveOp::ReduceScatterGradient { gradient, dim });
    let is_gradient = |id: TensorId| plan.experts[id].role == Role::WeightGradient;
    of_blocks(plan, is_gradient, op)
}

fn of_blocks(
    plan: &RankPlan,
    wanted: impl Fn(TensorId) -> bool,
    op: impl Fn(TensorId, Option<usize>) -> Option<CollectiveOp>,
) -> Vec<RankStep> {
    if plan.by().is_owner_only() {
        return Vec::new();
    }
    let tensors = plan.experts.tensors.iter().enumerate();
    let tensors = tensors.filter(|(at, _)| wanted(TensorId(*at)));
    let step = |(at, tensor): (usize, &TensorPlan)| {
        let op = op(TensorId(at), shard_dim(&tensor.name))?;
        Some(exchange(&tensor.name, op))
    };
    tensors.filter_map(step).collect()
}

/// Returns the exchanges that bring shadowed experts their weights and rows. `sent` names each
/// tensor on the dispatch part and on the shadow part.
fn begin_shadows(
    plan: &RankPlan,
    shadows: &LayerPlan,
    (steps, sent): (&[Step], &[(&str, &str)]),
) -> Vec<RankStep> {
    let used = |weight| steps.iter().any(|step| step.tensors().contains(&weight));
    let weights = shadows.tensors.iter().enumerate();
    let weights = weights.map(|(at, tensor)| (TensorId(at), tensor));
    let weights = weights.filter(|(id, _)| shadows.is_multiplied(*id) && used(*id));
    let weight = |(to, tensor): (TensorId, &TensorPlan)| {
        let from = plan.experts.id(&tensor.name)?;
        Some(exchange(
            &shadow_name(&tensor.name),
            CollectiveOp::BroadcastShadowWeight { from, to },
        ))
    };
    let rows = |(from, to): &(&str, &str)| {
        let op = CollectiveOp::KeepShadowRows {
            from: plan.tokens.id(from)?,
            to: shadows.id(to)?,
        };
        Some(exchange(&shadow_name(from), op))
    };
    let weights = weights.filter_map(weight);
    weights.chain(sent.iter().filter_map(rows)).collect()
}

fn shadow_name(name: &str) -> String {
    format!("{name} of shadows")
}

fn return_shadow_rows(plan: &RankPlan, shadows: &LayerPlan, name: &str) -> Option<RankStep> {
    let (from, to) = (shadows.id(name)?, plan.tokens.id(name)?);
    Some(exchange(
        &shadow_name(name),
        CollectiveOp::ReturnShadowRows { from, to },
    ))
}

fn reduce_shadow_gradients(plan: &RankPlan, shadows: &LayerPlan) -> Vec<RankStep> {
    let tensors = shadows.tensors.iter().enumerate();
    let gradients = tensors.filter(|(_, tensor)| tensor.role == Role::WeightGradient);
    let sum = |(at, tensor): (usize, &TensorPlan)| {
        let (from, to) = (TensorId(at), plan.experts.id(&tensor.name)?);
        Some(exchange(
            &shadow_name(&tensor.name),
            CollectiveOp::ReduceShadowGradient { from, to },
        ))
    };
    gradients.filter_map(sum).collect()
}

/// Returns the steps of shared experts in backward: rows of gradients go to the TP peers, and the
/// reduced results come back.
fn backward_of_shared(plan: &RankPlan, shared: &LayerPlan) -> Vec<RankStep> {
    let mut list: Vec<RankStep> = all_gather_tp(plan, shared, "dy").into_iter().collect();
    for tensor in &shared.tensors {
        if shared_part(&tensor.name) == Some("weight") {
            list.extend(all_gather_tp(plan, shared, &tensor.name));
        }
    }
    launch(&mut list, PlanPart::Shared, 0..shared.backward.len());
    let comes_back = |part: &str| BROUGHT_BACK.contains(&part);
    list.extend(reduce_scatter_tp(plan, shared, comes_back));
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

/// Returns whether a pass depends on how many tokens other ranks have.
fn needs_token_counts(spec: &LayerSpec, trains: bool) -> bool {
    let by_factor = matches!(
        spec.capacity.mode,
        CapacityMode::Factor | CapacityMode::Bounded
    );
    let random = spec.capacity.order == CapacityOrder::Random;
    // Capacities follow from the rank with the most tokens, random numbers from the index of a
    // rank's first one.
    by_factor || random || (trains && spec.draws())
}

/// Returns whether the capacity follows from the largest number of rows of an expert.
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

fn dispatch(plan: &RankPlan, from: &str, to: &str) -> Option<RankStep> {
    let (name, from, to) = (from, plan.tokens.id(from)?, plan.experts.id(to)?);
    Some(exchange(name, CollectiveOp::Dispatch { from, to }))
}

fn all_gather_tp(plan: &RankPlan, shared: &LayerPlan, name: &str) -> Option<RankStep> {
    let (from, to) = (plan.tokens.id(name)?, shared.id(name)?);
    Some(exchange(name, CollectiveOp::AllGatherTp { from, to }))
}

/// Returns the reduce-scatters of some tensors of each shared expert.
fn reduce_scatter_tp(
    plan: &RankPlan,
    shared: &LayerPlan,
    of: impl Fn(&str) -> bool,
) -> Vec<RankStep> {
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

/// Returns the exchanges that bring results back to the tokens. Each shard has only a partial sum,
/// so an all-reduce comes first.
fn combine(plan: &RankPlan, names: &[&str]) -> Vec<RankStep> {
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
    // Sums and answers in two runs, because exchanges that become one operation have to be adjacent
    // (`Exchange::goes_with`).
    [sums, back].concat()
}
