//! The order of steps: launches of all parts and exchanges in one list.

use super::ports::{brought_back, shared_part};
use super::regions::shard_dim;
use super::{Exchange, FromTo, RankPlan, RankStep};
use crate::layer::around::Places;
use crate::{LayerPlan, Recompute, Step, TensorId, TensorPlan, TensorRole};
use moesaic_dist::{CollectiveOp, Payload, PlanPart, TokenScope};
use moesaic_spec::{CapacityMode, CapacityOrder, LayerSpec, WeightSite};
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
    // First, because these counts say at which token of the world the random numbers of a rank
    // begin, and the gate draws.
    if needs_token_counts(&plan.tokens.spec, trains) {
        list.push(counts("tokens", CollectiveOp::TokenCounts));
    }
    let scanned = plan.tokens.routing_of(steps).len();
    launch(&mut list, PlanPart::Dispatch, 0..scanned);
    let together = plan.scope == TokenScope::World;
    // The scan placed the tokens of this rank by themselves; their places among the tokens of all
    // ranks replace those before any row is dispatched.
    if together {
        list.push(counts("routing of all tokens", CollectiveOp::GlobalRouting));
    }
    if let (Some(from), Some(to)) = (named("counts"), named("global_counts")) {
        let op = CollectiveOp::AllReduceSum;
        list.push(exchange("counts of all tokens", op, FromTo { from, to }));
    }
    if let (Some(from), Some(to)) = (plan.tokens.id("topk_ids"), named("global_tokens")) {
        let op = CollectiveOp::CountLiveTokens;
        list.push(exchange("tokens with an expert", op, FromTo { from, to }));
    }
    if let Some(tensor) = named("capacity").filter(|_| counted_capacity(&plan.tokens.spec)) {
        let tensors = FromTo::in_place(tensor);
        list.push(exchange("capacity", CollectiveOp::AllReduceMax, tensors));
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
            let tensors = FromTo::in_place(named(name)?);
            Some(exchange(name, CollectiveOp::ReduceLossParts, tensors))
        }));
    }
    launch(&mut list, PlanPart::Dispatch, first..at);
    let multiply = pass_of(&plan.experts, trains);
    list.extend(gathered_weights(plan, multiply));
    let weight_on = plan.tokens.spec.router.weight_on;
    let rows = RowTensor {
        from: "rows",
        to: "rows",
        payload: match weight_on {
            // Each row is its token times the weight of its expert.
            WeightSite::Input => Payload::PerRow,
            _ => Payload::PerToken,
        },
    };
    let weights = named("row_weights").map(|_| RowTensor {
        from: "row_weights",
        to: "topk_weights",
        payload: Payload::Scalars,
    });
    let sent: Vec<RowTensor> = [rows].into_iter().chain(weights).collect();
    if let Some(shadows) = &plan.shadows {
        list.push(counts("tokens per expert", CollectiveOp::TokensPerExpert));
        list.extend(begin_shadows(
            plan,
            shadows,
            (pass_of(shadows, trains), &sent),
        ));
    }
    // After the choice of shadows, because rows of shadowed experts stay and are not counted.
    list.push(counts("counts", CollectiveOp::RowCounts));
    list.extend(sent.iter().filter_map(|rows| dispatch(plan, rows)));
    // Rows of shadows are here, so they are multiplied while others are in flight.
    if let Some(shadows) = &plan.shadows {
        launch(
            &mut list,
            PlanPart::Shadows,
            0..pass_of(shadows, trains).len(),
        );
        list.extend(return_shadow_rows(plan, shadows, "out"));
    }
    launch(&mut list, PlanPart::Experts, 0..multiply.len());
    let out = RowTensor::back(
        "out",
        match weight_on {
            // `combine` reads each row to weight it.
            WeightSite::Output => Payload::PerRow,
            _ => Payload::PartialSums,
        },
    );
    list.extend(combine(plan, &[out]));
    if let Some(shared) = &plan.shared {
        list.push(counts("tokens of shards", CollectiveOp::TpTokenCounts));
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
        list.push(counts("routing of all tokens", CollectiveOp::GlobalRouting));
    }
    launch(&mut list, PlanPart::Dispatch, again..at);
    list.extend(gathered_weights(plan, &plan.experts.backward));
    let dout = RowTensor {
        from: "dout",
        to: "dout",
        // Behind a norm a row's gradient has its own weight in it.
        payload: match plan.tokens.spec.experts.output_norm_eps {
            Some(_) => Payload::PerRow,
            None => Payload::PerToken,
        },
    };
    if let Some(shadows) = &plan.shadows {
        // Weights of shadows are not kept where hidden values are recomputed: the recomputation
        // needs them again, so they are sent again.
        let training = plan.tokens.training.unwrap_or_default();
        let weights_of = match training.recompute {
            Recompute::None => &[],
            Recompute::Hidden | Recompute::All => &shadows.backward[..],
        };
        list.extend(begin_shadows(plan, shadows, (weights_of, &[dout])));
    }
    // Backward needs no counts: forward's are kept.
    list.extend(dispatch(plan, &dout));
    if let Some(shadows) = &plan.shadows {
        launch(&mut list, PlanPart::Shadows, 0..shadows.backward.len());
        let back = brought_back();
        list.extend(back.filter_map(|name| return_shadow_rows(plan, shadows, name)));
    }
    launch(&mut list, PlanPart::Experts, 0..plan.experts.backward.len());
    let drows = match plan.tokens.spec.router.weight_on {
        // Gradients of input weights read each row.
        WeightSite::Input => Payload::PerRow,
        _ => Payload::PartialSums,
    };
    let back = [
        RowTensor::back("drows", drows),
        RowTensor::back("dweight_parts", Payload::Scalars),
    ];
    list.extend(combine(plan, &back));
    list.extend(scattered_gradients(plan));
    list.extend(
        plan.shadows
            .iter()
            .flat_map(|shadows| reduce_shadow_gradients(plan, shadows)),
    );
    // A bias of the last GEMM is weighted with its row, so the gradient of that weight, which the
    // tokens' rank computes, reads the biases of all experts.
    let weights = plan.tokens.tensors.iter().enumerate();
    for (to, tensor) in weights.filter(|(_, tensor)| tensor.role == TensorRole::Weight) {
        if let Some(from) = plan.experts.id(&tensor.name) {
            let (op, to) = (CollectiveOp::AllGatherExperts, TensorId(to));
            list.push(exchange(&tensor.name, op, FromTo { from, to }));
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
    let wanted = |id: TensorId, dim: Option<usize>| {
        plan.experts.is_multiplied(id) && (dim.is_none() || used(id))
    };
    of_blocks(plan, CollectiveOp::AllGatherWeight, wanted)
}

fn scattered_gradients(plan: &RankPlan) -> Vec<RankStep> {
    let is_gradient = |id: TensorId, _| plan.experts[id].role == TensorRole::WeightGradient;
    of_blocks(plan, CollectiveOp::ReduceScatterGradient, is_gradient)
}

/// Returns an operation of the ranks of a block on each wanted tensor of the expert part; `wanted`
/// is given the tensor and the dimension that shards split.
fn of_blocks(
    plan: &RankPlan,
    op: CollectiveOp,
    wanted: impl Fn(TensorId, Option<usize>) -> bool,
) -> Vec<RankStep> {
    if plan.by().is_owner_only() {
        return Vec::new();
    }
    let tensors = plan.experts.tensors.iter().enumerate();
    let step = |(at, tensor): (usize, &TensorPlan)| {
        let (id, dim) = (TensorId(at), shard_dim(&tensor.name));
        wanted(id, dim).then(|| {
            RankStep::Exchange(Exchange {
                dim,
                ..Exchange::new(&tensor.name, op, Some(FromTo::in_place(id)))
            })
        })
    };
    tensors.filter_map(step).collect()
}

/// Returns the exchanges that bring shadowed experts their weights and rows.
fn begin_shadows(
    plan: &RankPlan,
    shadows: &LayerPlan,
    (steps, sent): (&[Step], &[RowTensor]),
) -> Vec<RankStep> {
    let used = |weight| steps.iter().any(|step| step.tensors().contains(&weight));
    let weights = shadows.tensors.iter().enumerate();
    let weights = weights.map(|(at, tensor)| (TensorId(at), tensor));
    let weights = weights.filter(|(id, _)| shadows.is_multiplied(*id) && used(*id));
    let weight = |(to, tensor): (TensorId, &TensorPlan)| {
        let from = plan.experts.id(&tensor.name)?;
        let op = CollectiveOp::BroadcastShadowWeight;
        Some(exchange(
            &shadow_name(&tensor.name),
            op,
            FromTo { from, to },
        ))
    };
    let rows = |rows: &RowTensor| {
        let tensors = FromTo {
            from: plan.tokens.id(rows.from)?,
            to: shadows.id(rows.to)?,
        };
        let op = CollectiveOp::KeepShadowRows;
        Some(exchange(&shadow_name(rows.from), op, tensors))
    };
    let weights = weights.filter_map(weight);
    weights.chain(sent.iter().filter_map(rows)).collect()
}

fn shadow_name(name: &str) -> String {
    format!("{name} of shadows")
}

fn return_shadow_rows(plan: &RankPlan, shadows: &LayerPlan, name: &str) -> Option<RankStep> {
    let (from, to) = (shadows.id(name)?, plan.tokens.id(name)?);
    let op = CollectiveOp::ReturnShadowRows;
    Some(exchange(&shadow_name(name), op, FromTo { from, to }))
}

fn reduce_shadow_gradients(plan: &RankPlan, shadows: &LayerPlan) -> Vec<RankStep> {
    let tensors = shadows.tensors.iter().enumerate();
    let gradients = tensors.filter(|(_, tensor)| tensor.role == TensorRole::WeightGradient);
    let sum = |(at, tensor): (usize, &TensorPlan)| {
        let (from, to) = (TensorId(at), plan.experts.id(&tensor.name)?);
        let op = CollectiveOp::ReduceShadowGradient;
        Some(exchange(
            &shadow_name(&tensor.name),
            op,
            FromTo { from, to },
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
    let comes_back = |part: &str| brought_back().any(|name| name == part);
    list.extend(reduce_scatter_tp(plan, shared, comes_back));
    let weights = shared.tensors.iter();
    let weights = weights.filter(|tensor| tensor.role == TensorRole::Weight);
    list.extend(weights.filter_map(|tensor| {
        let (from, to) = (shared.id(&tensor.name)?, plan.tokens.id(&tensor.name)?);
        let op = CollectiveOp::BroadcastTp;
        Some(exchange(&tensor.name, op, FromTo { from, to }))
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

fn exchange(name: &str, op: CollectiveOp, tensors: FromTo) -> RankStep {
    RankStep::Exchange(Exchange::new(name, op, Some(tensors)))
}

/// Returns an exchange of counts that no kernel reads.
fn counts(name: &str, op: CollectiveOp) -> RankStep {
    RankStep::Exchange(Exchange::new(name, op, None))
}

/// A tensor whose rows go to experts or come back.
#[derive(Clone, Copy)]
struct RowTensor {
    /// The name on the part that sends.
    from: &'static str,
    /// The name on the part that receives.
    to: &'static str,
    payload: Payload,
}

impl RowTensor {
    /// Returns a tensor that comes back from experts, where both parts have one name for it.
    fn back(name: &'static str, payload: Payload) -> RowTensor {
        RowTensor {
            from: name,
            to: name,
            payload,
        }
    }

    fn exchange(&self, op: CollectiveOp, tensors: FromTo) -> RankStep {
        RankStep::Exchange(Exchange {
            payload: Some(self.payload),
            ..Exchange::new(self.from, op, Some(tensors))
        })
    }
}

fn dispatch(plan: &RankPlan, rows: &RowTensor) -> Option<RankStep> {
    let (from, to) = (plan.tokens.id(rows.from)?, plan.experts.id(rows.to)?);
    Some(rows.exchange(CollectiveOp::Dispatch, FromTo { from, to }))
}

fn all_gather_tp(plan: &RankPlan, shared: &LayerPlan, name: &str) -> Option<RankStep> {
    let (from, to) = (plan.tokens.id(name)?, shared.id(name)?);
    let op = CollectiveOp::AllGatherTp;
    Some(exchange(name, op, FromTo { from, to }))
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
        let op = CollectiveOp::ReduceScatterTp;
        Some(exchange(&tensor.name, op, FromTo { from, to }))
    };
    wanted.filter_map(step).collect()
}

/// Returns the exchanges that bring results back to the tokens. Each shard has only a partial sum,
/// so an all-reduce comes first.
fn combine(plan: &RankPlan, tensors: &[RowTensor]) -> Vec<RankStep> {
    let (mut sums, mut back) = (Vec::new(), Vec::new());
    for rows in tensors {
        let (Some(from), Some(to)) = (plan.experts.id(rows.from), plan.tokens.id(rows.to)) else {
            continue;
        };
        if plan.by().mesh().expert_tp > 1 {
            let (name, op) = (
                format!("{} of shards", rows.from),
                CollectiveOp::AllReduceTp,
            );
            sums.push(exchange(&name, op, FromTo::in_place(from)));
        }
        back.push(rows.exchange(CollectiveOp::Combine, FromTo { from, to }));
    }
    // Sums and answers in two runs, because exchanges that become one operation have to be adjacent
    // (`Exchange::goes_with`).
    [sums, back].concat()
}

#[cfg(test)]
mod tests {
    use super::super::plan_rank;
    use super::*;
    use crate::{PlanOptions, Training};
    use moesaic_dist::Parallel;

    /// Returns the payload of each exchange of rows by name, where the router's weights apply at
    /// one place: behind a norm of outputs with `normed`.
    fn payloads(place: &str) -> Vec<(String, Payload)> {
        let (weight_on, norm) = match place {
            "normed" => ("output", "experts = { output_norm_eps = 0.1 }"),
            place => (place, ""),
        };
        let text = format!(
            "shape = {{ model_dim = 8, hidden_dim = 16, experts = 8, top_k = 2 }}
             router = {{ weight_on = '{weight_on}' }}
             {norm}"
        );
        let spec = LayerSpec::from_toml(&text).unwrap();
        let mesh = Parallel {
            ep: 4,
            ..Parallel::default()
        };
        let options = PlanOptions::training(Training::default());
        let plan = plan_rank(&spec, "cpu:avx2".parse().unwrap(), &options, mesh, 0).unwrap();
        let steps = plan.steps.iter().chain(&plan.backward);
        let exchanges = steps.filter_map(RankStep::exchange);
        for exchange in exchanges.clone() {
            let is_rows = exchange.op.exchanges_rows();
            assert_eq!(exchange.payload.is_some(), is_rows, "{}", exchange.name);
        }
        let payload = |exchange: &Exchange| Some((exchange.name.clone(), exchange.payload?));
        exchanges.filter_map(payload).collect()
    }

    #[test]
    fn the_place_of_weights_decides_what_rows_are() {
        let find = |place: &str, name: &str| {
            let all = payloads(place);
            let found = all.into_iter().find(|(known, _)| known == name);
            found.map(|(_, payload)| payload)
        };
        let wide = |place| ["rows", "out", "dout", "drows"].map(|name| find(place, name));
        let (token, row) = (Some(Payload::PerToken), Some(Payload::PerRow));
        let sums = Some(Payload::PartialSums);
        assert_eq!(wide("output"), [token, row, token, sums]);
        assert_eq!(wide("activation"), [token, sums, token, sums]);
        assert_eq!(wide("input"), [row, sums, token, row]);
        assert_eq!(wide("normed"), [token, row, row, sums]);
        for stays in ["row_weights", "dweight_parts"] {
            assert_eq!(find("normed", stays), None);
        }
        assert_eq!(find("activation", "row_weights"), Some(Payload::Scalars));
        assert_eq!(find("activation", "dweight_parts"), Some(Payload::Scalars));
    }
}
