//! Stem `gate_topk`: from tokens to experts and weights.

use crate::choice::{active_k, balanced, expert_choice, exponentials, guided, live};
use crate::formula::formula_row;
use crate::math::{rank, softmax};
use crate::noise::{key_noise, logit_noise, noise_scale};
use crate::norm::denominator;
use crate::rng::{Purpose, Stream, uniform};
use crate::router_input::router_input;
use crate::scores::scores_row;
use crate::{Input, Weights};
use moesaic_spec::{
    Chooser, GroupMask, GroupStat, Groups, LayerSpec, NoiseKind, Renormalize, Score, Select,
    TokenBlocks,
};

/// The result of the gate.
#[derive(Clone, Debug)]
pub struct GateOutput {
    /// `[T, E + identity]`, if the router has any: capped, and in training with the noise that
    /// weights see too.
    pub logits: Option<Vec<f64>>,
    /// The same logits without noise.
    pub clean: Option<Vec<f64>>,
    /// The standard deviation of the noise `[T, E + identity]`, if it is learned.
    pub noise_scale: Option<Vec<f64>>,
    /// Experts and weights.
    pub decision: Decision,
}

/// Experts and weights of every token.
#[derive(Clone, Debug, Default)]
pub struct Decision {
    /// `[T, K]`, best first (a table or an external router keeps its order). A negative id masks
    /// the slot.
    pub ids: Vec<i32>,
    /// `[T, K]`; zero in masked slots.
    pub weights: Vec<f64>,
    /// `[T]`, the key of batch-prioritized placement: the largest unbiased score over all experts.
    /// It is the largest logit if only selected experts have scores, and the largest weight if
    /// there are no logits.
    pub importance: Vec<f64>,
}

/// Returns logits and decision for every token.
pub fn gate(spec: &LayerSpec, weights: &Weights, input: &Input) -> GateOutput {
    let rows = 0..input.tokens;
    let clean = spec.has_logits().then(|| {
        let row = |t: usize| logits_row(spec, weights, &router_input(spec, weights, input, t));
        rows.clone().flat_map(row).collect::<Vec<f64>>()
    });
    let noise: Vec<f64> = rows
        .flat_map(|t| {
            if spec.noisy_logits() {
                let x = router_input(spec, weights, input, t);
                logit_noise(spec, weights, input, t, &x)
            } else {
                vec![0.0; spec.routed_experts()]
            }
        })
        .collect();
    let with_noise = |z: &Vec<f64>| z.iter().zip(&noise).map(|(z, n)| z + n).collect();
    let logits: Option<Vec<f64>> = clean.as_ref().map(with_noise);
    let decision = decide(spec, weights, input, logits.as_deref());
    GateOutput {
        logits,
        clean,
        noise_scale: noise_scale(spec, weights, input),
        decision,
    }
}

/// Returns the logits `[T, E + identity]` of a router that has any, without training noise.
pub fn logits(spec: &LayerSpec, weights: &Weights, x: &[f64], tokens: usize) -> Vec<f64> {
    let input = Input {
        tokens,
        x: x.to_vec(),
        ..Input::default()
    };
    (0..tokens)
        .flat_map(|t| logits_row(spec, weights, &router_input(spec, weights, &input, t)))
        .collect()
}

/// Returns the logits for the result of [`router_input`].
fn logits_row(spec: &LayerSpec, weights: &Weights, x: &[f64]) -> Vec<f64> {
    let mut logits = formula_row(spec, weights, x);
    if spec.router.bias {
        let bias = &weights.get("router.bias").data;
        logits.iter_mut().zip(bias).for_each(|(z, b)| *z += b);
    }
    if let Some(cap) = spec.router.logit_softcap {
        logits.iter_mut().for_each(|z| *z = cap * (*z / cap).tanh());
    }
    logits
}

/// Returns the decision for every token, given logits with their noise.
pub fn decide(
    spec: &LayerSpec,
    weights: &Weights,
    input: &Input,
    logits: Option<&[f64]>,
) -> Decision {
    if spec.router.kind.chooser() == Chooser::Caller {
        return external(spec, input);
    }
    let (k, width) = (spec.shape.top_k, spec.routed_experts());
    let guided: Option<Vec<f64>> = logits.map(|z| {
        z.chunks(width)
            .flat_map(|row| guided(spec, weights, row))
            .collect()
    });
    let ids = choose(spec, weights, input, guided.as_deref());
    let mut all = Decision::default();
    for (t, ids) in ids.chunks(k).enumerate() {
        let row = guided.as_ref().map(|z| &z[t * width..(t + 1) * width]);
        // A table with score one has no logits; every expert scores 1.
        let scores = row.map_or(vec![1.0; width], |row| scores_row(spec, row));
        let chosen = match (spec.router.select, row) {
            (Select::SparseMixer(eps), Some(row)) => mixer(row, ids, eps).0,
            (_, Some(row)) if underflows(spec, &scores, ids) => relative(spec, row, ids),
            _ => gather(spec, &scores, ids),
        };
        let mut ids = ids.to_vec();
        let mut weighed = finish(spec, weights, &ids, &chosen);
        if spec.router.random_second {
            maybe_drop_second(spec, input, t, &mut ids, &mut weighed, &chosen);
        }
        all.importance.push(importance(&scores));
        all.weights.extend(weighed);
        all.ids.extend(ids);
    }
    all
}

/// Returns ids `[T, K]` by guided logits, and -1 in the slots of masked tokens and in those that
/// the call does not use.
fn choose(spec: &LayerSpec, weights: &Weights, input: &Input, logits: Option<&[f64]>) -> Vec<i32> {
    let (k, width) = (spec.shape.top_k, spec.routed_experts());
    if let (Select::ExpertChoice(share), Some(logits)) = (spec.router.select, logits) {
        return expert_choice(spec, input, logits, share);
    }
    let columns = match (spec.router.select, logits) {
        (Select::Sinkhorn(rounds), Some(logits)) if input.draw.is_some() => {
            // Balancing happens in training only; an evaluation falls through to plain top-k.
            Some(balanced(spec, input, logits, rounds))
        }
        _ => None,
    };
    let agreed = match (spec.router.blocks, logits) {
        (Some(blocks), Some(logits)) => Some(best_of_blocks(spec, weights, input, logits, blocks)),
        _ => None,
    };
    let active = active_k(spec, input);
    let mut all = Vec::new();
    for t in 0..input.tokens {
        let row = || &logits.expect("a router that selects has logits")[t * width..][..width];
        let mut ids = match (spec.router.kind.chooser(), &columns, &agreed) {
            (Chooser::Table, ..) => looked_up(weights, input, t),
            (_, _, Some(agreed)) => agreed[t].clone(),
            (_, Some(columns), _) => {
                let keys = exponentials(row()).into_iter().zip(columns);
                best(&keys.map(|(k, c)| k * c).collect::<Vec<f64>>(), k)
            }
            _ => noisy_best(spec, weights, input, t, row()),
        };
        // Slots from here on are masked: all of a masked token, or those beyond `active_k`.
        let masked = if live(spec, input, t) { active } else { 0 };
        ids[masked..].fill(-1);
        all.extend(ids);
    }
    all
}

/// Returns the K best, by keys with Gumbel noise if the spec asks for it.
fn noisy_best(
    spec: &LayerSpec,
    weights: &Weights,
    input: &Input,
    t: usize,
    logits: &[f64],
) -> Vec<i32> {
    let k = spec.shape.top_k;
    let Some(noise) = key_noise(spec, input, t) else {
        return select_row(spec, weights, logits).0;
    };
    let noisy: Vec<f64> = logits.iter().zip(&noise).map(|(z, n)| z + n).collect();
    if spec.router.noise_kind == NoiseKind::Gumbel {
        return best(&noisy, k);
    }
    // With gumbel-second the noise decides from the second choice on.
    let first = best(logits, 1)[0];
    let rest = best(&noisy, logits.len())
        .into_iter()
        .filter(|e| *e != first);
    std::iter::once(first).chain(rest).take(k).collect()
}

fn best(keys: &[f64], k: usize) -> Vec<i32> {
    rank(keys).into_iter().take(k).map(|e| e as i32).collect()
}

/// Returns the expert of a slot, even if it was the second expert and was dropped.
pub(crate) fn considered(id: i32) -> i32 {
    if id < -1 { -2 - id } else { id }
}

/// Keeps the second expert e if `u < 2 · (its score / denominator)`. Otherwise its id becomes -2 -
/// e, so that backward still knows which score is in the denominator.
fn maybe_drop_second(
    spec: &LayerSpec,
    input: &Input,
    t: usize,
    ids: &mut [i32],
    weights: &mut [f64],
    chosen: &[f64],
) {
    let Some(draw) = input.draw.filter(|_| ids[1] >= 0) else {
        return;
    };
    let u = f64::from(uniform(Stream::new(draw, Purpose::Second).word(t, 1)));
    let share = chosen[1] / denominator(&spec.router, chosen);
    // Written so that a NaN share keeps the expert.
    if u >= 2.0 * share {
        ids[1] = -2 - ids[1];
        weights[1] = 0.0;
    }
}

/// Returns the experts of one token, best first, with their raw scores, before renormalization and
/// scaling.
pub fn select_row(spec: &LayerSpec, weights: &Weights, logits: &[f64]) -> (Vec<i32>, Vec<f64>) {
    let k = spec.shape.top_k;
    if let Select::SparseMixer(eps) = spec.router.select {
        return sparse_mixer(logits, k, eps);
    }
    let scores = scores_row(spec, logits);
    let keys = selection_keys(spec, weights, logits, &scores);
    let r = &spec.router;
    let ids = match &r.groups {
        Some(groups) => best_of_groups(&keys, groups, k),
        None => match r.select {
            Select::PerGroup(groups) => best_of_each_group(&keys, groups, k),
            _ => best_after(&keys, r.always_chosen, k),
        },
    };
    let chosen = gather(spec, &scores, &ids);
    (ids, chosen)
}

/// Returns the values by which a token's experts are compared: its logits or scores, with the bias
/// that chooses and does not weigh.
fn selection_keys(spec: &LayerSpec, weights: &Weights, logits: &[f64], scores: &[f64]) -> Vec<f64> {
    let on_logits = spec.router.compares_logits();
    let mut keys = if on_logits { logits } else { scores }.to_vec();
    if spec.router.select_bias {
        let bias = &weights.get("router.select_bias").data;
        keys.iter_mut().zip(bias).for_each(|(s, b)| *s += b);
    }
    keys
}

/// Returns the scores of the chosen experts; zero for masked slots.
pub(crate) fn gather(spec: &LayerSpec, scores: &[f64], ids: &[i32]) -> Vec<f64> {
    let ids = ids.iter().map(|&e| considered(e));
    let live: Vec<f64> = ids
        .clone()
        .filter(|&e| e >= 0)
        .map(|e| scores[e as usize])
        .collect();
    let values = match spec.router.score {
        // The softmax runs over unmasked choices only, as if there were no other slots.
        Score::SoftmaxSelected => softmax(&live),
        Score::One => vec![1.0; live.len()],
        _ => live,
    };
    let mut values = values.into_iter();
    ids.map(|e| {
        if e < 0 {
            0.0
        } else {
            values.next().unwrap_or(0.0)
        }
    })
    .collect()
}

/// Returns true if the chosen scores are so small that f64 may have lost their ratio, which
/// renormalization without an epsilon needs.
pub(crate) fn underflows(spec: &LayerSpec, scores: &[f64], ids: &[i32]) -> bool {
    let r = &spec.router;
    let relative = match r.renormalize {
        Renormalize::None => false,
        Renormalize::Sum | Renormalize::Clamp => r.renormalize_eps == 0.0,
        Renormalize::PNorm => true,
    };
    let of_logits = matches!(
        r.score,
        Score::Softmax | Score::Sigmoid | Score::SqrtSoftplus
    );
    let chosen = gather(spec, scores, ids);
    // Far above f64's smallest number, so that products of two scores still do not underflow.
    relative && of_logits && chosen.iter().all(|s| *s < 1e-60)
}

/// Returns the derivative of the score's logarithm by its logit, in the limit of tiny scores.
pub(crate) fn slope_of_log(score: Score) -> f64 {
    match score {
        Score::SqrtSoftplus => 0.5,
        _ => 1.0,
    }
}

/// Returns tiny chosen scores in units of the largest one, computed from their logits.
pub(crate) fn relative(spec: &LayerSpec, logits: &[f64], ids: &[i32]) -> Vec<f64> {
    let chosen = ids
        .iter()
        .filter_map(|&e| usize::try_from(considered(e)).ok());
    let top = chosen.map(|e| logits[e]).fold(f64::NEG_INFINITY, f64::max);
    let of = |&e: &i32| match usize::try_from(considered(e)) {
        Ok(e) => ((logits[e] - top) * slope_of_log(spec.router.score)).exp(),
        Err(_) => 0.0,
    };
    ids.iter().map(of).collect()
}

/// Applies renormalization, scale and learned factors.
fn finish(spec: &LayerSpec, weights: &Weights, ids: &[i32], scores: &[f64]) -> Vec<f64> {
    let r = &spec.router;
    let denominator = denominator(r, scores);
    let factor = |e: i32| match (r.expert_scale, usize::try_from(e)) {
        (true, Ok(e)) => weights.get("router.expert_scale").data[e],
        _ => 1.0,
    };
    let weigh = |(&e, s): (&i32, &f64)| {
        if e < 0 {
            0.0
        } else {
            s / denominator * r.scale * factor(e)
        }
    };
    ids.iter().zip(scores).map(weigh).collect()
}

/// Returns the K best experts with those of dropped groups masked. If no group has a number for its
/// score, dropped groups are excluded under either mask, so a NaN token chooses the lowest ids.
fn best_of_groups(keys: &[f64], groups: &Groups, k: usize) -> Vec<i32> {
    let size = keys.len() / groups.count;
    let stats: Vec<f64> = keys
        .chunks(size)
        .map(|group| group_stat(group, groups.stat))
        .collect();
    let ranked = rank(&stats);
    // If even the best group is NaN, all are. Zeros would then beat every kept expert.
    let left_out = groups.mask == GroupMask::Exclude || stats[ranked[0]].is_nan();
    let keeps = |e: usize| ranked[..groups.keep].contains(&(e / size));
    let masked = (0..keys.len()).map(|e| if keeps(e) { keys[e] } else { 0.0 });
    let order = rank(&masked.collect::<Vec<f64>>()).into_iter();
    let order = order.filter(|&e| keeps(e) || !left_out);
    order.take(k).map(|e| e as i32).collect()
}

/// Returns each token's best experts among those that its block agrees on: the experts whose key is
/// best at any token of the block.
fn best_of_blocks(
    spec: &LayerSpec,
    weights: &Weights,
    input: &Input,
    logits: &[f64],
    blocks: TokenBlocks,
) -> Vec<Vec<i32>> {
    let width = spec.routed_experts();
    let keys = logits
        .chunks(width)
        .map(|row| selection_keys(spec, weights, row, &scores_row(spec, row)));
    let keys: Vec<Vec<f64>> = keys.collect();
    let mut best = Vec::new();
    for (block, rows) in keys.chunks(blocks.tokens).enumerate() {
        let first = block * blocks.tokens;
        let most = |e: usize| {
            let rows = rows.iter().enumerate();
            let heard = rows.filter(|(at, _)| live(spec, input, first + at));
            let column: Vec<f64> = heard.map(|(_, row)| row[e]).collect();
            rank(&column).first().map_or(f64::NAN, |&best| column[best])
        };
        let most: Vec<f64> = (0..width).map(most).collect();
        let agreed = &rank(&most)[..blocks.experts];
        best.extend(rows.iter().map(|row| {
            let own = rank(row).into_iter().filter(|e| agreed.contains(e));
            own.take(spec.shape.top_k).map(|e| e as i32).collect()
        }));
    }
    best
}

/// Returns the last `always` experts in order, then the best of the others.
fn best_after(keys: &[f64], always: usize, k: usize) -> Vec<i32> {
    let others = keys.len() - always;
    let best = rank(&keys[..others]).into_iter().take(k - always);
    let ids = (others..keys.len()).chain(best);
    ids.map(|e| e as i32).collect()
}

/// Returns the K / `groups` best experts of every group, all of them best first.
fn best_of_each_group(keys: &[f64], groups: usize, k: usize) -> Vec<i32> {
    let (size, each) = (keys.len() / groups, k / groups);
    let of = |group: usize| {
        let first = group * size;
        let ranked = rank(&keys[first..first + size]).into_iter().take(each);
        ranked.map(move |e| first + e)
    };
    let taken: Vec<usize> = (0..groups).flat_map(of).collect();
    let order = rank(keys).into_iter().filter(|e| taken.contains(e));
    order.map(|e| e as i32).collect()
}

fn group_stat(group: &[f64], stat: GroupStat) -> f64 {
    let best = rank(group);
    match stat {
        GroupStat::Max => group[best[0]],
        GroupStat::Top2Sum => best.iter().take(2).map(|&e| group[e]).sum(),
    }
}

/// Returns true if the sparse mixer leaves out a logit.
pub(crate) fn far_from(top: f64, z: f64, eps: f64) -> bool {
    (top - z) / z.abs().max(top) > 2.0 * eps
}

/// Takes sequential argmaxes. Each weight is a softmax over the logits near the maximum, without
/// earlier choices.
fn sparse_mixer(logits: &[f64], k: usize, eps: f64) -> (Vec<i32>, Vec<f64>) {
    // The maximum without the earlier choices is the next best.
    let ids = best(logits, k);
    let weights = mixer(logits, &ids, eps).0;
    (ids, weights)
}

/// Returns the weights of the sparse mixer's choices, and the softmax behind each.
pub(crate) fn mixer(logits: &[f64], ids: &[i32], eps: f64) -> (Vec<f64>, Vec<Vec<f64>>) {
    let mut left = logits.to_vec();
    let (mut weights, mut rows) = (Vec::new(), Vec::new());
    for &id in ids {
        let Ok(chosen) = usize::try_from(id) else {
            weights.push(0.0);
            rows.push(vec![0.0; logits.len()]);
            continue;
        };
        let top = left[rank(&left)[0]];
        let near = |z: &f64| {
            if far_from(top, *z, eps) {
                f64::NEG_INFINITY
            } else {
                *z
            }
        };
        let row = softmax(&left.iter().map(near).collect::<Vec<f64>>());
        weights.push(row[chosen]);
        rows.push(row);
        // The next round must not see this choice.
        left[chosen] = f64::NEG_INFINITY;
    }
    (weights, rows)
}

/// Returns the ids of token `t` by its token id, in the table's order: none for a token id that the
/// table does not have.
fn looked_up(weights: &Weights, input: &Input, t: usize) -> Vec<i32> {
    let tokens = input.token_ids.as_ref();
    let token = tokens.expect("a table router needs token ids")[t];
    let table = weights.get("router.table");
    match usize::try_from(token) {
        Ok(row) if row < table.shape[0] => table.outer(row).iter().map(|&e| e as i32).collect(),
        _ => vec![-1; table.shape[1]],
    }
}

/// Returns the caller's decision, with zero weight in masked slots.
fn external(spec: &LayerSpec, input: &Input) -> Decision {
    let (ids, weights) = input
        .routing
        .clone()
        .expect("an external router needs ids and weights");
    let weights: Vec<f64> = ids
        .iter()
        .zip(weights)
        .map(|(&e, w)| if e < 0 { 0.0 } else { w })
        .collect();
    let importance = weights.chunks(spec.shape.top_k).map(importance).collect();
    Decision {
        ids,
        weights,
        importance,
    }
}

fn importance(scores: &[f64]) -> f64 {
    scores[rank(scores)[0]]
}
