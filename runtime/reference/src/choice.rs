//! Selections that depend on more than the order of one token's logits.

use crate::Input;
use crate::math::{descending, softmax};
use crate::scores::scores_row;
use crate::{Weights, rank};
use moesaic_spec::{Entropy, LayerSpec};

/// Returns true if a token takes part in routing.
pub(crate) fn live(spec: &LayerSpec, input: &Input, t: usize) -> bool {
    let mask = input
        .token_mask
        .as_deref()
        .filter(|_| spec.router.token_mask);
    mask.is_none_or(|mask| mask[t] != 0)
}

/// Returns the number of slots per token that the call uses.
pub(crate) fn active_k(spec: &LayerSpec, input: &Input) -> usize {
    let k = spec.shape.top_k;
    let given = input.active_k.filter(|_| spec.router.active_k);
    given.map_or(k, |active| active.min(k))
}

/// Returns the temperature of a token by the entropy of its logits: `exp(a (2 h - 1))` with
/// `h = H / ln E`.
pub(crate) fn temperature(entropy: &Entropy, logits: &[f64]) -> f64 {
    let share = spread(logits) / (logits.len() as f64).ln();
    (entropy.temperature * (2.0 * share - 1.0)).exp()
}

/// Returns the entropy of the softmax.
fn spread(logits: &[f64]) -> f64 {
    let terms = softmax(logits);
    // p ln p tends to 0, but 0 · ln 0 is NaN.
    let terms = terms.iter().filter(|p| **p != 0.0);
    -terms.map(|p| p * p.ln()).sum::<f64>()
}

/// Returns the logits that selection and scores see: divided by the temperature of their entropy,
/// less the bias of the expert's load.
pub(crate) fn guided(spec: &LayerSpec, weights: &Weights, logits: &[f64]) -> Vec<f64> {
    let Some(entropy) = &spec.router.entropy else {
        return logits.to_vec();
    };
    let temperature = temperature(entropy, logits);
    let load = &weights.get("router.load").data;
    let bias = |e: usize| entropy.load * (logits.len() as f64 * load[e] - 1.0);
    let of = |(e, z): (usize, &f64)| z / temperature - bias(e);
    logits.iter().enumerate().map(of).collect()
}

/// Turns the gradient of guided logits into that of logits.
pub(crate) fn guided_back(spec: &LayerSpec, logits: &[f64], dguided: &[f64]) -> Vec<f64> {
    let Some(entropy) = &spec.router.entropy else {
        return dguided.to_vec();
    };
    let temperature = temperature(entropy, logits);
    let along: f64 = logits.iter().zip(dguided).map(|(z, d)| z * d).sum();
    let (p, spread) = (softmax(logits), spread(logits));
    let factor = entropy.temperature * 2.0 / (logits.len() as f64).ln();
    // dH/dz = -p (ln p + H); d temperature = temperature * factor * dH.
    let slope = |p: f64| match p {
        0.0 => 0.0,
        p => -p * (p.ln() + spread),
    };
    let of = |(p, d): (&f64, &f64)| (d - along * factor * slope(*p)) / temperature;
    p.iter().zip(dguided).map(of).collect()
}

/// Returns the number of tokens that every expert takes: `int(share · T / E)`, at least one and at
/// most all. The share counts in units of 2⁻¹⁶, as in the kernels.
pub fn chosen_per_expert(share: f64, tokens: usize, experts: usize) -> usize {
    // Integers, so that host and device agree for every T.
    let share = (share * 65536.0).round() as u128;
    let count = share * tokens as u128 / (65536 * experts as u128);
    (count as usize).max(1).min(tokens)
}

/// Returns the expert choice as `ids [T, E]`: slot e of a token holds e if that expert took it, and
/// -1 otherwise. `logits` are guided.
pub(crate) fn expert_choice(
    spec: &LayerSpec,
    input: &Input,
    logits: &[f64],
    share: f64,
) -> Vec<i32> {
    let (experts, tokens) = (spec.routed_experts(), input.tokens);
    let scores: Vec<f64> = logits
        .chunks(experts)
        .flat_map(|row| scores_row(spec, row))
        .collect();
    let mut ids = vec![-1; tokens * experts];
    for e in 0..experts {
        let mut order: Vec<usize> = (0..tokens).filter(|&t| live(spec, input, t)).collect();
        let score = |t: usize| scores[t * experts + e];
        // The sort is stable, so equal scores keep the order of tokens.
        order.sort_by(|&a, &b| descending(score(a), score(b)));
        let count = chosen_per_expert(share, tokens, experts);
        for t in order.into_iter().take(count) {
            ids[t * experts + e] = e as i32;
        }
    }
    ids
}

/// Returns the factor on `exp(z - max)` per expert after `rounds` rounds of Sinkhorn's iteration:
/// rows to 1 / tokens, columns to 1 / E (Megatron). Masked tokens and tokens with NaN exponentials
/// are left out.
pub(crate) fn balanced(spec: &LayerSpec, input: &Input, logits: &[f64], rounds: usize) -> Vec<f64> {
    // Megatron's epsilon, which keeps empty columns finite.
    const FLOOR: f64 = 1e-8;
    let experts = spec.routed_experts();
    let rows: Vec<Vec<f64>> = logits
        .chunks(experts)
        .enumerate()
        .filter(|(t, _)| live(spec, input, *t))
        .map(|(_, row)| exponentials(row))
        .filter(|row| row.iter().all(|v| !v.is_nan()))
        .collect();
    let mut columns = vec![1.0; experts];
    for _ in 0..rounds {
        let mut sums = vec![0.0; experts];
        for row in &rows {
            let sum: f64 = row.iter().zip(&columns).map(|(k, c)| k * c).sum();
            let factor = 1.0 / rows.len() as f64 / (sum + FLOOR);
            sums.iter_mut().zip(row).for_each(|(s, k)| *s += k * factor);
        }
        let column = |sum: &f64| 1.0 / experts as f64 / (sum + FLOOR);
        columns = sums.iter().map(column).collect();
    }
    columns
}

/// Returns `exp(z - max z)`.
pub(crate) fn exponentials(logits: &[f64]) -> Vec<f64> {
    let top = logits[rank(logits)[0]];
    logits.iter().map(|z| (z - top).exp()).collect()
}
