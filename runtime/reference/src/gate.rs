//! Stem `gate_topk`: from tokens to experts and weights.

use crate::math::{dot, rank, sigmoid, softmax, softplus};
use crate::{Input, Weights};
use moesaic_spec::{
    GroupMask, GroupStat, Groups, LayerSpec, Renormalize, RouterInput, RouterKind, Score, Select,
};

/// The gate's whole result.
#[derive(Clone, Debug)]
pub struct Gate {
    /// `[T, E + identity]`, when the router has any.
    pub logits: Option<Vec<f64>>,
    /// Experts and weights.
    pub decision: Decision,
}

/// Experts and weights of every token.
#[derive(Clone, Debug, Default)]
pub struct Decision {
    /// `[T, K]`, best first (a table or an external router keeps its order);
    /// negative is a masked slot.
    pub ids: Vec<i32>,
    /// `[T, K]`; zero in masked slots.
    pub weights: Vec<f64>,
    /// `[T]`, the key of batch-prioritized placement: the largest unbiased
    /// score over all experts (logit, where scores exist for selected experts
    /// only); without logits the largest weight.
    pub importance: Vec<f64>,
}

/// Logits and decision for every token.
pub fn gate(spec: &LayerSpec, weights: &Weights, input: &Input) -> Gate {
    let logits = spec
        .has_logits()
        .then(|| logits(spec, weights, &input.x, input.tokens));
    let decision = match spec.router.kind {
        RouterKind::Linear | RouterKind::Cosine => select(
            spec,
            weights,
            logits.as_deref().unwrap_or_default(),
            input.tokens,
        ),
        RouterKind::Table => lookup(spec, weights, logits.as_deref(), input),
        RouterKind::External => external(spec, input),
    };
    Gate { logits, decision }
}

/// Logits `[T, E + identity]` of a linear, table or cosine router.
pub fn logits(spec: &LayerSpec, weights: &Weights, x: &[f64], tokens: usize) -> Vec<f64> {
    let d = spec.shape.model_dim;
    (0..tokens)
        .flat_map(|t| logits_row(spec, weights, &x[t * d..(t + 1) * d]))
        .collect()
}

fn logits_row(spec: &LayerSpec, weights: &Weights, x: &[f64]) -> Vec<f64> {
    let x = match spec.router.input {
        RouterInput::Token => x.to_vec(),
        RouterInput::RmsScaled => rms_scaled(x, &weights.get("router.input_scale").data),
    };
    let mut logits = match spec.router.kind {
        RouterKind::Cosine => cosine_row(spec, weights, &x),
        _ => {
            let w = weights.get("router.weight");
            (0..spec.routed_experts())
                .map(|e| dot(w.outer(e), &x))
                .collect()
        }
    };
    if spec.router.bias {
        let bias = &weights.get("router.bias").data;
        logits.iter_mut().zip(bias).for_each(|(z, b)| *z += b);
    }
    logits
}

pub(crate) fn rms_scaled(x: &[f64], scale: &[f64]) -> Vec<f64> {
    let d = x.len() as f64;
    let rms = (dot(x, x) / d + 1e-6).sqrt();
    x.iter()
        .zip(scale)
        .map(|(v, s)| v / rms * s / d.sqrt())
        .collect()
}

/// `norm(x · Pᵀ + p) · norm(S) · exp(min(t, ln 100))`.
fn cosine_row(spec: &LayerSpec, weights: &Weights, x: &[f64]) -> Vec<f64> {
    let (p, b) = (
        weights.get("router.projector.weight"),
        weights.get("router.projector.bias"),
    );
    let s = weights.get("router.similarity");
    let (width, experts) = (b.data.len(), spec.routed_experts());
    let projected: Vec<f64> = (0..width).map(|i| dot(p.outer(i), x) + b.data[i]).collect();
    let projected = unit(&projected);
    let scale = weights.get("router.temperature").data[0]
        .min(100f64.ln())
        .exp();
    let column = |e: usize| {
        (0..width)
            .map(|i| s.data[i * experts + e])
            .collect::<Vec<f64>>()
    };
    (0..experts)
        .map(|e| dot(&projected, &unit(&column(e))) * scale)
        .collect()
}

pub(crate) fn unit(v: &[f64]) -> Vec<f64> {
    let norm = dot(v, v).sqrt().max(1e-12);
    v.iter().map(|x| x / norm).collect()
}

/// The decision of a linear or cosine router for every token.
pub fn select(spec: &LayerSpec, weights: &Weights, logits: &[f64], tokens: usize) -> Decision {
    let width = spec.routed_experts();
    let mut all = Decision::default();
    for t in 0..tokens {
        let row = &logits[t * width..(t + 1) * width];
        let (ids, scores) = select_row(spec, weights, row);
        all.importance.push(importance(&scores_row(spec, row)));
        all.weights.extend(finish(spec, weights, &ids, scores));
        all.ids.extend(ids);
    }
    all
}

/// Experts of one token, best first, with their raw scores: what
/// renormalisation and scaling start from.
pub fn select_row(spec: &LayerSpec, weights: &Weights, logits: &[f64]) -> (Vec<i32>, Vec<f64>) {
    let k = spec.shape.top_k;
    if let Select::SparseMixer(eps) = spec.router.select {
        return sparse_mixer(logits, k, eps);
    }
    // Biased scores choose; the weight is gathered from the unbiased ones.
    // Without bias and groups logits choose: their order is that of the
    // scores, which rounding would blur.
    let scores = scores_row(spec, logits);
    let on_logits = !spec.router.select_bias && spec.router.groups.is_none();
    let mut keys = if on_logits {
        logits.to_vec()
    } else {
        scores.clone()
    };
    if spec.router.select_bias {
        let bias = &weights.get("router.select_bias").data;
        keys.iter_mut().zip(bias).for_each(|(s, b)| *s += b);
    }
    if let Some(groups) = &spec.router.groups {
        keys = mask_groups(&keys, groups);
    }
    let ids: Vec<i32> = rank(&keys).into_iter().take(k).map(|e| e as i32).collect();
    let chosen = gather(spec, &scores, &ids);
    (ids, chosen)
}

/// Scores of all experts of one token; logits where the score is a matter of
/// the selected experts only.
pub(crate) fn scores_row(spec: &LayerSpec, logits: &[f64]) -> Vec<f64> {
    match spec.router.score {
        Score::Softmax => softmax(logits),
        Score::Sigmoid => logits.iter().map(|&z| sigmoid(z)).collect(),
        Score::SqrtSoftplus => logits.iter().map(|&z| softplus(z).sqrt()).collect(),
        Score::SoftmaxSelected | Score::One => logits.to_vec(),
    }
}

/// Scores of the chosen experts; zero for masked slots.
pub(crate) fn gather(spec: &LayerSpec, scores: &[f64], ids: &[i32]) -> Vec<f64> {
    let live: Vec<f64> = ids
        .iter()
        .filter(|&&e| e >= 0)
        .map(|&e| scores[e as usize])
        .collect();
    let values = match spec.router.score {
        Score::SoftmaxSelected => softmax(&live),
        Score::One => vec![1.0; live.len()],
        _ => live,
    };
    let mut values = values.into_iter();
    ids.iter()
        .map(|&e| {
            if e < 0 {
                0.0
            } else {
                values.next().unwrap_or(0.0)
            }
        })
        .collect()
}

/// Renormalisation, scale and learned factors.
fn finish(spec: &LayerSpec, weights: &Weights, ids: &[i32], scores: Vec<f64>) -> Vec<f64> {
    let r = &spec.router;
    let sum: f64 = scores.iter().sum();
    let denominator = match r.renormalize {
        Renormalize::None => 1.0,
        Renormalize::Sum => sum + r.renormalize_eps,
        Renormalize::Clamp => clamp_below(sum, r.renormalize_eps),
        Renormalize::PNorm => {
            let sum: f64 = scores.iter().map(|s| s.abs().powf(r.norm_order)).sum();
            sum.powf(1.0 / r.norm_order)
        }
    };
    let factor = |e: i32| match (r.expert_scale, usize::try_from(e)) {
        (true, Ok(e)) => weights.get("router.expert_scale").data[e],
        _ => 1.0,
    };
    let weigh = |(&e, s): (&i32, f64)| {
        if e < 0 {
            0.0
        } else {
            s / denominator * r.scale * factor(e)
        }
    };
    ids.iter().zip(scores).map(weigh).collect()
}

/// `max(value, floor)` that keeps a NaN.
fn clamp_below(value: f64, floor: f64) -> f64 {
    if value < floor { floor } else { value }
}

/// Keys with the experts of dropped groups masked.
fn mask_groups(keys: &[f64], groups: &Groups) -> Vec<f64> {
    let size = keys.len() / groups.count;
    let stats: Vec<f64> = keys
        .chunks(size)
        .map(|group| group_stat(group, groups.stat))
        .collect();
    let kept: Vec<usize> = rank(&stats).into_iter().take(groups.keep).collect();
    let masked = match groups.mask {
        GroupMask::Exclude => f64::NEG_INFINITY,
        GroupMask::Zero => 0.0,
    };
    let keep = |e: usize| {
        if kept.contains(&(e / size)) {
            keys[e]
        } else {
            masked
        }
    };
    (0..keys.len()).map(keep).collect()
}

fn group_stat(group: &[f64], stat: GroupStat) -> f64 {
    let best = rank(group);
    match stat {
        GroupStat::Max => group[best[0]],
        GroupStat::Top2Sum => best.iter().take(2).map(|&e| group[e]).sum(),
    }
}

/// Whether the sparse mixer leaves out a logit.
pub(crate) fn far_from(top: f64, z: f64, eps: f64) -> bool {
    (top - z) / z.abs().max(top) > 2.0 * eps
}

/// Sequential argmaxes; each weight is a softmax over the logits near the
/// maximum, with earlier choices left out.
fn sparse_mixer(logits: &[f64], k: usize, eps: f64) -> (Vec<i32>, Vec<f64>) {
    let mut left = logits.to_vec();
    let (mut ids, mut weights) = (Vec::new(), Vec::new());
    for _ in 0..k {
        let best = rank(&left)[0];
        let top = left[best];
        let near: Vec<f64> = left
            .iter()
            .map(|&z| {
                if far_from(top, z, eps) {
                    f64::NEG_INFINITY
                } else {
                    z
                }
            })
            .collect();
        weights.push(softmax(&near)[best]);
        ids.push(best as i32);
        left[best] = f64::NEG_INFINITY;
    }
    (ids, weights)
}

/// The decision of a table router: ids by token id, in the table's order.
pub fn lookup(
    spec: &LayerSpec,
    weights: &Weights,
    logits: Option<&[f64]>,
    input: &Input,
) -> Decision {
    let table = weights.get("router.table");
    let tokens = input
        .token_ids
        .as_ref()
        .expect("a table router needs token ids");
    let width = spec.routed_experts();
    let mut all = Decision::default();
    for (t, &token) in tokens.iter().enumerate() {
        let ids: Vec<i32> = table
            .outer(token as usize)
            .iter()
            .map(|&e| e as i32)
            .collect();
        let row = logits.map_or(vec![1.0; width], |z| {
            scores_row(spec, &z[t * width..(t + 1) * width])
        });
        let chosen = gather(spec, &row, &ids);
        all.importance.push(importance(&row));
        all.weights.extend(finish(spec, weights, &ids, chosen));
        all.ids.extend(ids);
    }
    all
}

/// What the caller decided, with masked slots weighing nothing.
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
