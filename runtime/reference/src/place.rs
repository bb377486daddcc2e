//! Stem `expert_scan`: counts, capacity, and the place of every assignment.

use crate::math::{descending, rank};
use crate::rng::{Draw, Purpose, Stream};
use crate::{Decision, Input};
use moesaic_spec::{CapacityMode, CapacityOrder, LayerSpec};
use std::cmp::Reverse;

/// The place of every assignment.
#[derive(Clone, Debug)]
pub struct AssignmentPlaces {
    /// Assignments to each expert, dropped ones included `[E + identity]`.
    pub counts: Vec<i64>,
    /// Rows per expert; `None` when dropless.
    pub capacity: Option<i64>,
    /// `[T, K]`: the position inside the expert. It is -1 when dropped or masked, and for identity
    /// experts, which have no rows and never drop.
    pub locations: Vec<i32>,
    /// `[T, K]`: weights after dropping; zero when dropped or masked.
    pub weights: Vec<f64>,
    /// Dropped assignments.
    pub overflow: i64,
}

/// Computes counts, capacity and places of all assignments.
pub fn scan(spec: &LayerSpec, decision: &Decision, input: &Input) -> AssignmentPlaces {
    let counts = demanded(spec, &decision.ids);
    let capacity = capacity_rows(spec, input, &counts);
    let mut next = vec![0i64; counts.len()];
    let mut locations = vec![-1i32; decision.ids.len()];
    let mut overflow = 0;
    for slot in processing_order(spec, decision, input.tokens, input.draw) {
        let Ok(expert) = usize::try_from(decision.ids[slot]) else {
            continue;
        };
        if expert >= spec.shape.experts {
            continue;
        }
        if capacity.is_none_or(|rows| next[expert] < rows) {
            locations[slot] = next[expert] as i32;
        } else {
            overflow += 1;
        }
        next[expert] += 1;
    }
    let weights = surviving(spec, decision, &locations);
    AssignmentPlaces {
        counts,
        capacity,
        locations,
        weights,
        overflow,
    }
}

/// Counts the assignments per expert `[E + identity]`.
pub fn demanded(spec: &LayerSpec, ids: &[i32]) -> Vec<i64> {
    let mut counts = vec![0i64; spec.routed_experts()];
    ids.iter()
        .filter(|&&e| e >= 0)
        .for_each(|&e| counts[e as usize] += 1);
    counts
}

/// Returns the rows per expert, or `None` when dropless.
///
/// The factor's formula is Tutel's: `K·int(f·ceil(T/E))`. Identity experts have no rows, so E does
/// not count them.
pub fn capacity_rows(spec: &LayerSpec, input: &Input, counts: &[i64]) -> Option<i64> {
    let c = &spec.capacity;
    let experts = spec.shape.experts;
    let factor = capacity_factor(spec, input);
    let largest = counts[..experts].iter().copied().max().unwrap_or(0);
    let share = input.tokens.div_ceil(experts) as f64;
    let by_factor = spec.shape.top_k as i64 * (factor.abs() * share) as i64;
    let rows = match c.mode {
        CapacityMode::Dropless => return None,
        CapacityMode::MaxCount => largest,
        CapacityMode::Fixed => c.rows.unwrap_or(0) as i64,
        CapacityMode::Factor | CapacityMode::Bounded if factor > 0.0 => by_factor,
        CapacityMode::Factor | CapacityMode::Bounded if factor < 0.0 => largest.min(by_factor),
        CapacityMode::Factor | CapacityMode::Bounded => largest,
    };
    let align = c.align.max(1) as i64;
    Some((rows + align - 1) / align * align)
}

/// Returns the call's own factor, or the spec's; in evaluation the spec's factor for evaluation.
fn capacity_factor(spec: &LayerSpec, input: &Input) -> f64 {
    let c = &spec.capacity;
    let of_pass = match input.draw {
        Some(_) => c.factor,
        None => c.eval_factor.unwrap_or(c.factor),
    };
    input.capacity_factor.unwrap_or(of_pass)
}

/// Returns indices into `[T, K]` in the order in which places are assigned.
pub fn processing_order(
    spec: &LayerSpec,
    decision: &Decision,
    tokens: usize,
    draw: Option<Draw>,
) -> Vec<usize> {
    let k = spec.shape.top_k;
    let slot_major = |tokens: &[usize]| -> Vec<usize> {
        (0..k)
            .flat_map(|slot| tokens.iter().map(move |t| t * k + slot))
            .collect()
    };
    let ascending: Vec<usize> = (0..tokens).collect();
    let mut order = slot_major(&ascending);
    match spec.capacity.order {
        CapacityOrder::SlotMajor => {}
        CapacityOrder::TokenMajor => order.sort_unstable(),
        CapacityOrder::BatchPrioritized => order = slot_major(&rank(&decision.importance)),
        CapacityOrder::Probability => {
            order.sort_by(|&a, &b| descending(decision.weights[a], decision.weights[b]));
        }
        CapacityOrder::Random => {
            order.sort_by_key(|&i| Reverse(random_key(draw, i / k, i % k)));
        }
    }
    order
}

/// Returns the key of the random order; larger keys are served first. In inference the counters are
/// zero.
pub fn random_key(draw: Option<Draw>, token: usize, slot: usize) -> u64 {
    Stream::new(draw.unwrap_or_default(), Purpose::Place).long_word(token, slot)
}

/// Returns true if an assignment reaches an expert: it has a row, or its expert needs none.
pub fn kept(spec: &LayerSpec, id: i32, location: i32) -> bool {
    location >= 0 || id >= spec.shape.experts as i32
}

/// Returns the weights with zeros in dropped slots. Renormalizing after dropping makes a token's
/// weights sum to the router's scale again.
fn surviving(spec: &LayerSpec, decision: &Decision, locations: &[i32]) -> Vec<f64> {
    let slots = decision.weights.iter().zip(&decision.ids).zip(locations);
    let mut result: Vec<f64> = slots
        .map(|((&w, &id), &at)| if kept(spec, id, at) { w } else { 0.0 })
        .collect();
    if spec.capacity.renormalize_after_drop {
        for row in result.chunks_mut(spec.shape.top_k) {
            let sum: f64 = row.iter().sum();
            if sum != 0.0 {
                row.iter_mut()
                    .for_each(|w| *w = spec.router.scale * *w / sum);
            }
        }
    }
    result
}
