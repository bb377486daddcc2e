//! The decision of global routing for one rank's tokens, and the layout of their rows.

use crate::call::Output;
use moesaic_spec::LayerSpec;
use moesaic_tensor::Tensor;
use std::ops::Range;

/// The decision of global routing for this rank's tokens.
pub(super) struct Routing {
    pub ids: Vec<i32>,
    pub weights: Vec<f32>,
    pub locations: Vec<i32>,
    pub capacity: Option<i64>,
}

/// The layout of the rows of this rank's kept slots.
pub(super) struct Layout {
    pub counts: Vec<i64>,
    pub offsets: Vec<i64>,
    pub slot_rows: Vec<i32>,
    pub row_slots: Vec<i32>,
    pub dropped: i64,
}

impl Routing {
    /// Takes the decision for a range of tokens.
    pub fn of(output: &Output, tokens: &Range<usize>, top_k: usize) -> Routing {
        let slots = tokens.start * top_k..tokens.end * top_k;
        let whole = |name: &str| {
            let values = output.get(name).and_then(Tensor::to_vec::<i32>);
            values.unwrap_or_default()[slots.clone()].to_vec()
        };
        let weights = output.get("topk_weights").and_then(Tensor::to_vec::<f32>);
        let capacity = output.get("capacity").and_then(Tensor::to_vec::<i64>);
        Routing {
            ids: whole("topk_ids"),
            weights: weights.unwrap_or_default()[slots.clone()].to_vec(),
            locations: whole("locations"),
            capacity: capacity.and_then(|rows| rows.first().copied()),
        }
    }

    /// Returns the layout of rows by expert, and within an expert in the order of all ranks' rows.
    pub fn layout(&self, spec: &LayerSpec) -> Layout {
        let experts = spec.shape.experts;
        let mut counts = vec![0; spec.routed_experts()];
        let mut kept: Vec<(i32, i32, usize)> = Vec::new();
        let mut dropped = 0;
        for (slot, (&expert, &location)) in self.ids.iter().zip(&self.locations).enumerate() {
            let Ok(number) = usize::try_from(expert) else {
                continue; // masked
            };
            counts[number] += 1;
            match (number < experts, location >= 0) {
                (true, true) => kept.push((expert, location, slot)),
                (true, false) => dropped += 1,
                (false, _) => {} // without rows
            }
        }
        // By expert, then by location: rows of an expert keep the order in which routing placed
        // them.
        kept.sort_unstable();
        let mut slot_rows = vec![-1; self.ids.len()];
        for (row, (_, _, slot)) in kept.iter().enumerate() {
            slot_rows[*slot] = row as i32;
        }
        let before = |expert: usize| kept.partition_point(|(of, ..)| (*of as usize) < expert);
        Layout {
            offsets: (0..=experts).map(|expert| before(expert) as i64).collect(),
            row_slots: kept.iter().map(|(_, _, slot)| *slot as i32).collect(),
            counts,
            slot_rows,
            dropped,
        }
    }

    /// Returns the sums that weights are divided by where those of kept slots are renormalised.
    /// `weights` and `sums` come from this rank's own scan. That scan drops fewer slots than global
    /// routing, so every kept slot still has its weight.
    pub fn kept_sums(&self, spec: &LayerSpec, weights: &[f32], sums: &[f32]) -> Vec<f32> {
        let (top_k, experts) = (spec.shape.top_k, spec.shape.experts as i32);
        let scale = spec.router.scale as f32;
        let kept = |slot: usize| self.locations[slot] >= 0 || self.ids[slot] >= experts;
        let tokens = sums.iter().enumerate();
        let sum_of = |(token, &sum): (usize, &f32)| {
            let slots = (token * top_k..(token + 1) * top_k).filter(|slot| kept(*slot));
            let own: f32 = slots.map(|slot| weights[slot]).sum();
            // The scan divided the weights by its own sums; this undoes that division and the scale
            // before the sum over the slots that are left.
            if sum == 0.0 { 0.0 } else { own * sum / scale }
        };
        tokens.map(sum_of).collect()
    }
}
