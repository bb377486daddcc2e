//! Auxiliary losses, and their gradients by the logits.
//!
//! Choices are constant, so counts have no gradient. A token with all slots masked counts nowhere,
//! so padding changes nothing.

use crate::math::{dot, erf, rank, sigmoid, softmax, softplus};
use crate::scores::scores_row;
use crate::{Input, Weights, gate};
use moesaic_spec::{LayerSpec, Loss, LossKind, Score};
use std::collections::BTreeMap;
use std::f64::consts::{PI, SQRT_2};

/// The inputs of the losses of a call.
#[derive(Clone, Copy, Debug)]
pub struct Routed<'a> {
    /// The layer.
    pub spec: &'a LayerSpec,
    /// `[T, E + identity]` as selection saw them, noise included.
    pub logits: &'a [f64],
    /// `[T, E + identity]` without noise.
    pub clean: &'a [f64],
    /// The standard deviation of the noise `[T, E + identity]`, if it is learned.
    pub noise_scale: Option<&'a [f64]>,
    /// `[T, K]`; a negative id masks the slot.
    pub ids: &'a [i32],
    /// The call, with its sequences and the counts of a larger group.
    pub input: &'a Input,
}

/// A loss and its gradient.
#[derive(Clone, Debug)]
pub struct LossValue {
    /// The value, without the coefficient.
    pub value: f64,
    /// The gradient by the logits `[T, E + identity]`, without the coefficient. Noise is added to
    /// logits, so this is the gradient by noisy and by clean logits alike.
    pub dlogits: Vec<f64>,
    /// The part of `dlogits` that comes through the logits without noise.
    pub dclean: Vec<f64>,
    /// The gradient by the standard deviation of the noise, with both kinds of logits held fixed.
    pub dscale: Vec<f64>,
}

/// Returns every loss of the layer as `loss.<kind>`, without its coefficient.
pub fn losses(spec: &LayerSpec, weights: &Weights, input: &Input) -> BTreeMap<String, f64> {
    let gate = gate(spec, weights, input);
    let logits = gate.logits.unwrap_or_default();
    let clean = gate.clean.unwrap_or_default();
    let routed = Routed {
        spec,
        logits: &logits,
        clean: &clean,
        noise_scale: gate.noise_scale.as_deref(),
        ids: &gate.decision.ids,
        input,
    };
    let named = |loss: &Loss| {
        let name = format!("loss.{}", loss.kind.name());
        (name, routed.loss(loss).value)
    };
    spec.losses.iter().map(named).collect()
}

impl Routed<'_> {
    /// Returns one loss.
    pub fn loss(&self, loss: &Loss) -> LossValue {
        match loss.kind {
            LossKind::Switch => self.balance(&self.counts(self.k()), self.k(), self.live().count()),
            LossKind::Gshard => self.balance(&self.counts(1), 1, self.live().count()),
            LossKind::GshardAll => self.balance(&self.counts(self.k()), 1, self.live().count()),
            LossKind::Global => match &self.input.global {
                Some((counts, tokens)) => {
                    let counts: Vec<f64> = counts.iter().map(|&n| n as f64).collect();
                    self.balance(&counts, self.k(), *tokens as usize)
                }
                None => self.balance(&self.counts(self.k()), self.k(), self.live().count()),
            },
            LossKind::Sequence => self.sequences(loss.sequence_length),
            LossKind::Z => self.z(),
            LossKind::ImportanceLoad => self.importance_load(),
            LossKind::ImportanceLoadLogits => self.importance_load_logits(),
        }
    }

    /// Returns `Σ coefficient · loss` and its gradients `[T, E + identity]`.
    pub fn total(&self) -> LossValue {
        let mut total = LossValue::zero(self.logits.len());
        for loss in &self.spec.losses {
            let found = self.loss(loss).scaled(loss.coefficient);
            total.value += found.value;
            add(&mut total.dlogits, &found.dlogits);
            add(&mut total.dclean, &found.dclean);
            add(&mut total.dscale, &found.dscale);
        }
        total
    }

    fn k(&self) -> usize {
        self.spec.shape.top_k
    }

    fn experts(&self) -> usize {
        self.spec.routed_experts()
    }

    fn ids(&self, t: usize) -> &[i32] {
        &self.ids[t * self.k()..(t + 1) * self.k()]
    }

    fn row<'r>(&self, values: &'r [f64], t: usize) -> &'r [f64] {
        &values[t * self.experts()..(t + 1) * self.experts()]
    }

    /// Returns the tokens with at least one choice.
    fn live(&self) -> impl Iterator<Item = usize> + Clone + '_ {
        (0..self.input.tokens).filter(|&t| self.ids(t).iter().any(|&e| e >= 0))
    }

    /// Counts the assignments of each expert over the first `slots` choices.
    fn counts(&self, slots: usize) -> Vec<f64> {
        self.counts_of(self.live(), slots)
    }

    fn counts_of(&self, tokens: impl Iterator<Item = usize>, slots: usize) -> Vec<f64> {
        let mut counts = vec![0.0; self.experts()];
        for t in tokens {
            let chosen = self.ids(t)[..slots].iter().filter(|&&e| e >= 0);
            chosen.for_each(|&e| counts[e as usize] += 1.0);
        }
        counts
    }

    /// Returns the scores divided by their sum.
    fn probabilities(&self, t: usize) -> Vec<f64> {
        let logits = self.row(self.logits, t);
        match self.spec.router.score {
            Score::Sigmoid | Score::SqrtSoftplus => {
                let scores = scores_row(self.spec, logits);
                let sum = scores.iter().sum::<f64>() + 1e-20;
                scores.iter().map(|s| s / sum).collect()
            }
            Score::Softmax | Score::SoftmaxSelected | Score::One => softmax(logits),
        }
    }

    /// Turns the gradient of a token's probabilities into that of its logits.
    fn probabilities_back(&self, t: usize, dp: &[f64]) -> Vec<f64> {
        let (logits, p) = (self.row(self.logits, t), self.probabilities(t));
        let mean = dot(&p, dp);
        let scores = scores_row(self.spec, logits);
        let sum = scores.iter().sum::<f64>() + 1e-20;
        let slope = |e: usize| match self.spec.router.score {
            Score::Sigmoid => scores[e] * (1.0 - scores[e]) / sum,
            Score::SqrtSoftplus => sigmoid(logits[e]) / (2.0 * softplus(logits[e]).sqrt()) / sum,
            Score::Softmax | Score::SoftmaxSelected | Score::One => p[e],
        };
        (0..p.len()).map(|e| slope(e) * (dp[e] - mean)).collect()
    }

    /// Returns `E / (choices · T²) · Σ n_e Σ p` over the live tokens.
    fn balance(&self, counts: &[f64], choices: usize, tokens: usize) -> LossValue {
        let mut found = LossValue::zero(self.logits.len());
        self.add_balance(&mut found, self.live(), counts, choices, tokens as f64);
        found
    }

    /// Adds the same loss over some of the tokens.
    fn add_balance(
        &self,
        found: &mut LossValue,
        over: impl Iterator<Item = usize>,
        counts: &[f64],
        choices: usize,
        tokens: f64,
    ) {
        let factor = self.experts() as f64 / (choices as f64 * tokens * tokens);
        let dp: Vec<f64> = counts.iter().map(|n| factor * n).collect();
        for t in over {
            found.value += dot(&dp, &self.probabilities(t));
            found.add_row(t, &self.probabilities_back(t, &dp));
        }
    }

    /// Returns the mean over sequences of `switch` within each.
    fn sequences(&self, length: Option<usize>) -> LossValue {
        let mut found = LossValue::zero(self.logits.len());
        let sequences = self.split(length);
        for tokens in &sequences {
            let counts = self.counts_of(tokens.iter().copied(), self.k());
            let (over, size) = (tokens.iter().copied(), tokens.len() as f64);
            self.add_balance(&mut found, over, &counts, self.k(), size);
        }
        found.scaled(1.0 / sequences.len().max(1) as f64)
    }

    /// Returns the live tokens of each sequence that has any: every `length` tokens, or runs of
    /// equal nonnegative ids.
    fn split(&self, length: Option<usize>) -> Vec<Vec<usize>> {
        let ids = self.input.sequence_ids.as_deref();
        let starts = |t: usize| match (length, ids) {
            (Some(length), _) => t.is_multiple_of(length),
            (None, Some(ids)) => t == 0 || ids[t] != ids[t - 1],
            (None, None) => t == 0,
        };
        // Negative ids belong to no sequence.
        let outside = |t: usize| length.is_none() && ids.is_some_and(|ids| ids[t] < 0);
        let live: Vec<usize> = self.live().collect();
        let mut list: Vec<Vec<usize>> = Vec::new();
        for t in 0..self.input.tokens {
            if starts(t) {
                list.push(Vec::new());
            }
            if live.contains(&t) && !outside(t) {
                list.last_mut().expect("a start comes first").push(t);
            }
        }
        list.retain(|tokens| !tokens.is_empty());
        list
    }

    /// Returns the mean of `logsumexp(z)²`.
    fn z(&self) -> LossValue {
        let mut found = LossValue::zero(self.logits.len());
        for t in self.live() {
            let logits = self.row(self.logits, t);
            let top = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = logits.iter().map(|z| (z - top).exp()).sum();
            let lse = top + sum.ln();
            found.value += lse * lse;
            let d: Vec<f64> = softmax(logits).iter().map(|p| 2.0 * lse * p).collect();
            found.add_row(t, &d);
        }
        found.scaled(1.0 / self.live().count().max(1) as f64)
    }

    /// Returns the standard deviation of gaussian noise, the same for each logit.
    fn sigma(&self) -> f64 {
        self.spec.router.noise / self.experts() as f64
    }

    /// Returns the standard deviation of the noise on the logit of one expert.
    fn sigma_of(&self, t: usize, expert: usize) -> f64 {
        match self.noise_scale {
            Some(scales) => self.row(scales, t)[expert],
            None => self.sigma(),
        }
    }

    /// Returns half the sum of the squared coefficients of variation of `Σ p` and of
    /// `Σ Φ((p − threshold) / σ)`. p is the softmax of the logits without noise, and the threshold
    /// is the smallest chosen logit with noise.
    fn importance_load(&self) -> LossValue {
        let (e, sigma) = (self.experts(), self.sigma());
        let distance = |t: usize| {
            let threshold = self.row(self.logits, t)[self.smallest_chosen(t)];
            softmax(self.row(self.clean, t))
                .into_iter()
                .map(move |p| (p - threshold) / sigma)
        };
        let (mut importance, mut load) = (vec![0.0; e], vec![0.0; e]);
        for t in self.live() {
            let p = softmax(self.row(self.clean, t));
            importance.iter_mut().zip(p).for_each(|(s, p)| *s += p);
            let pairs = load.iter_mut().zip(distance(t));
            pairs.for_each(|(s, v)| *s += normal(v));
        }
        let (importance, load) = (variation(&importance), variation(&load));
        let mut found = LossValue::zero(self.logits.len());
        found.value = importance.0 + load.0;
        for t in self.live() {
            let dload = distance(t)
                .zip(&load.1)
                .map(|(v, d)| d * density(v) / sigma);
            let dload: Vec<f64> = dload.collect();
            let dp: Vec<f64> = importance
                .1
                .iter()
                .zip(&dload)
                .map(|(a, b)| a + b)
                .collect();
            let dclean = softmax_back(&softmax(self.row(self.clean, t)), &dp);
            found.add_row(t, &dclean);
            add(&mut found.dclean[t * e..(t + 1) * e], &dclean);
            // The threshold is the logit of the smallest chosen expert, with the opposite sign in
            // each distance.
            found.dlogits[t * e + self.smallest_chosen(t)] -= dload.iter().sum::<f64>();
        }
        found.scaled(0.5)
    }

    /// Returns the sum of two squared coefficients of variation: that of the experts' weights under
    /// a softmax over the chosen logits, and that of each expert's chance to be chosen again if
    /// only its own noise is redrawn.
    fn importance_load_logits(&self) -> LossValue {
        let e = self.experts();
        let (mut importance, mut load) = (vec![0.0; e], vec![0.0; e]);
        for t in self.live() {
            let shares = self.shares(t);
            importance.iter_mut().zip(shares).for_each(|(s, p)| *s += p);
            for (sum, (v, _)) in load.iter_mut().zip(self.chances(t)) {
                // An expert that faces no other is certain to be chosen.
                *sum += v.map_or(1.0, normal);
            }
        }
        let (importance, load) = (variation(&importance), variation(&load));
        let mut found = LossValue::zero(self.logits.len());
        found.value = importance.0 + load.0;
        for t in self.live() {
            found.add_row(t, &softmax_back(&self.shares(t), &importance.1));
            for (expert, (v, against)) in self.chances(t).into_iter().enumerate() {
                let (Some(v), sigma) = (v, self.sigma_of(t, expert)) else {
                    continue;
                };
                let d = load.1[expert] * density(v) / sigma;
                found.dlogits[t * e + expert] += d;
                found.dclean[t * e + expert] += d;
                found.dlogits[t * e + against] -= d;
                // d/dσ of (z - θ)/σ is -v/σ, and d holds the 1/σ.
                found.dscale[t * e + expert] -= d * v;
            }
        }
        found
    }

    fn chosen(&self, t: usize, expert: usize) -> bool {
        self.ids(t).contains(&(expert as i32))
    }

    /// Returns the chosen expert with the smallest logit, the last of equal ones.
    fn smallest_chosen(&self, t: usize) -> usize {
        let order = rank(self.row(self.logits, t)).into_iter().rev();
        let mut chosen = order.filter(|&e| self.chosen(t, e));
        chosen.next().expect("a live token has a choice")
    }

    /// Returns the expert with the largest logit that was not chosen.
    fn largest_left(&self, t: usize) -> Option<usize> {
        let order = rank(self.row(self.logits, t)).into_iter();
        order.into_iter().find(|&e| !self.chosen(t, e))
    }

    /// Returns the softmax over the chosen logits, zero elsewhere `[E]`.
    fn shares(&self, t: usize) -> Vec<f64> {
        let row = self.row(self.logits, t);
        let pick = |e: usize| {
            if self.chosen(t, e) {
                row[e]
            } else {
                f64::NEG_INFINITY
            }
        };
        softmax(&(0..row.len()).map(pick).collect::<Vec<f64>>())
    }

    /// Returns for each expert `(z − threshold) / σ` and the expert whose logit is the threshold:
    /// the best unchosen one for a chosen expert, the smallest chosen one for the others. `None` if
    /// every expert is chosen.
    fn chances(&self, t: usize) -> Vec<(Option<f64>, usize)> {
        let (last, next) = (self.smallest_chosen(t), self.largest_left(t));
        let (noisy, clean) = (self.row(self.logits, t), self.row(self.clean, t));
        let one = |e: usize| {
            let against = if self.chosen(t, e) { next } else { Some(last) };
            let distance = against.map(|a| (clean[e] - noisy[a]) / self.sigma_of(t, e));
            (distance, against.unwrap_or(e))
        };
        (0..noisy.len()).map(one).collect()
    }
}

impl LossValue {
    fn zero(len: usize) -> LossValue {
        LossValue {
            value: 0.0,
            dlogits: vec![0.0; len],
            dclean: vec![0.0; len],
            dscale: vec![0.0; len],
        }
    }

    fn add_row(&mut self, t: usize, row: &[f64]) {
        add(&mut self.dlogits[t * row.len()..(t + 1) * row.len()], row);
    }

    fn scaled(mut self, factor: f64) -> LossValue {
        self.value *= factor;
        let gradients = [&mut self.dlogits, &mut self.dclean, &mut self.dscale];
        let all = gradients.into_iter().flatten();
        all.for_each(|d| *d *= factor);
        self
    }
}

/// Returns the squared coefficient of variation, `var / (mean² + 1e-10)` with the unbiased
/// variance, and its gradient; zero for a single value.
fn variation(values: &[f64]) -> (f64, Vec<f64>) {
    let count = values.len() as f64;
    // The unbiased variance of one value is undefined.
    if values.len() < 2 {
        return (0.0, vec![0.0; values.len()]);
    }
    let mean = values.iter().sum::<f64>() / count;
    let spread: f64 = values.iter().map(|v| (v - mean) * (v - mean)).sum();
    let (variance, floor) = (spread / (count - 1.0), mean * mean + 1e-10);
    let value = variance / floor;
    let slope = |v: &f64| 2.0 * ((v - mean) / (count - 1.0) - value * mean / count) / floor;
    (value, values.iter().map(slope).collect())
}

fn add(sums: &mut [f64], values: &[f64]) {
    sums.iter_mut().zip(values).for_each(|(s, v)| *s += v);
}

fn softmax_back(p: &[f64], d: &[f64]) -> Vec<f64> {
    let mean = dot(p, d);
    p.iter().zip(d).map(|(p, d)| p * (d - mean)).collect()
}

/// Returns the normal distribution function.
fn normal(x: f64) -> f64 {
    0.5 * (1.0 + erf(x / SQRT_2))
}

fn density(x: f64) -> f64 {
    (-0.5 * x * x).exp() / (2.0 * PI).sqrt()
}
