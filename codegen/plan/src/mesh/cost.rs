//! What a number of ways costs: bytes that ranks send, memory that they borrow, and the number
//! that takes the least time. Products are as many at any number of ways, so what is sent
//! decides.
//!
//! Of `r` ways, with `A` bytes of rows a rank, `P` bytes of weights of all experts, `s` slices
//! and `ep` groups of experts, a forward pass sends other ranks
//!
//! | | r = 0 | r from 1 to s |
//! |---|---|---|
//! | rows to experts | 0 | A (r - 1 / ep) |
//! | rows back, and sums over slices on the way | 0 | A (1 - 1 / ep) + 2 A (r - 1) |
//! | weights | P (1 - 1 / (ep s)) | P / ep (1 / r - 1 / s) |
//! | weights that are borrowed | P | P / (ep r), none at r = s |
//!
//! Tutel's table (Hwang et al., MLSys 2023, table 4) has `A r` both ways: there every slice
//! answers, and a row's own rank sums.

use super::{Parallel, Ways};

/// What a layer sends, and how fast.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WaysLoad {
    /// Bytes of the rows of a rank's tokens: one for each expert of a token.
    pub rows: f64,
    /// Bytes of the weights of all experts.
    pub weights: f64,
    /// Bytes a second of a rank in an exchange of rows.
    pub rows_rate: f64,
    /// Bytes a second of a rank in a gather of weights.
    pub weights_rate: f64,
}

/// Bytes of a rank in a forward pass at some number of ways, where every expert gets equally
/// many rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WaysCost {
    /// Rows that it sends to other ranks' experts.
    pub to_experts: f64,
    /// Rows that it sends back, and in sums over slices.
    pub to_tokens: f64,
    /// Weights that it gets from others.
    pub weights: f64,
    /// Memory for weights that are gathered.
    pub memory: f64,
}

impl Ways {
    /// What a forward pass costs.
    pub fn cost(&self, load: &WaysLoad) -> WaysCost {
        let mesh = self.mesh();
        let owners = self.owners() as f64;
        let (ep, slices) = (mesh.ep as f64, mesh.shards as f64);
        // At 0 ways this is one group with one slice, to which nothing is sent.
        let here = load.weights / (ep * slices);
        WaysCost {
            to_experts: load.rows * (slices - 1.0 / ep),
            to_tokens: load.rows * (1.0 - 1.0 / ep + 2.0 * (slices - 1.0)),
            weights: here * (1.0 - 1.0 / owners),
            memory: if self.own_alone() { 0.0 } else { here },
        }
    }

    /// Seconds for it, if nothing is sent beside something else.
    pub fn seconds(&self, load: &WaysLoad) -> f64 {
        let cost = self.cost(load);
        (cost.to_experts + cost.to_tokens) / load.rows_rate + cost.weights / load.weights_rate
    }

    /// The number of ways with the fewest seconds; of several the largest, which borrows the
    /// least.
    pub fn best(weights: Parallel, load: &WaysLoad) -> usize {
        let all = Ways::all(weights)
            .into_iter()
            .map(|ways| Ways { weights, ways });
        let seconds = |by: &Ways| by.seconds(load);
        let best = all.rev().min_by(|a, b| seconds(a).total_cmp(&seconds(b)));
        best.map_or(weights.shards, |by| by.count())
    }

    /// Where the seconds of 1 way and more are the fewest, if slices could be cut at will:
    /// `sqrt(P rows_rate / (3 ep A weights_rate))`. The best number is one of its neighbours
    /// among the divisors of the slices, or 0.
    pub fn optimum(weights: Parallel, load: &WaysLoad) -> f64 {
        let per_way = 3.0 * load.rows / load.rows_rate;
        let gathered = load.weights / (weights.ep as f64 * load.weights_rate);
        (gathered / per_way).sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::{Sharing, plan_rank};
    use crate::{PlanOptions, RankStep, Role, Sent};
    use moesaic_spec::LayerSpec;

    fn mesh(ep: usize, shards: usize) -> Parallel {
        Parallel {
            ep,
            shards,
            ..Parallel::default()
        }
    }

    /// What plans send is what the formulas say.
    #[test]
    fn plans_send_what_is_reckoned() {
        let text = "shape = { model_dim = 16, hidden_dim = 48, experts = 4, top_k = 2 }";
        let spec = LayerSpec::from_toml(text).unwrap();
        let target = "cpu:avx2".parse().unwrap();
        let tokens = 96;
        for mesh in [mesh(4, 6), mesh(2, 2), mesh(4, 1), mesh(1, 12)] {
            let mut costs = Vec::new();
            for ways in Ways::all(mesh) {
                let options = PlanOptions::default();
                let sharing = Sharing::from(mesh).at_ways(ways);
                let plan = plan_rank(&spec, target, &options, sharing, 0).unwrap();
                let load = WaysLoad {
                    rows: (tokens * 2 * 16 * 4) as f64,
                    weights: (3 * 4 * 16 * 48 * 4) as f64,
                    rows_rate: 1.0,
                    weights_rate: 1.0,
                };
                let cost = plan.by().cost(&load);
                let named = |wanted: &[&str]| {
                    let steps = plan.steps.iter().filter_map(|step| match step {
                        RankStep::Exchange(exchange) => Some(exchange),
                        RankStep::Launch { .. } => None,
                    });
                    let steps = steps.filter(|exchange| wanted.contains(&&*exchange.name));
                    let sent = steps.map(|exchange| plan.bytes(exchange, tokens, 1));
                    sent.map(|Sent { network, .. }| network).sum::<u64>() as f64
                };
                let what = format!("{ways} ways on {mesh:?}");
                assert_eq!(named(&["rows"]), cost.to_experts, "{what}");
                let back = named(&["out of slices", "out"]);
                assert!((back - cost.to_tokens).abs() < 1e-6 * back + 1e-6, "{what}");
                let matrices = [
                    "experts.gate.weight",
                    "experts.up.weight",
                    "experts.down.weight",
                ];
                let sent = named(&matrices);
                assert!((sent - cost.weights).abs() < 1e-6 * sent + 1e-6, "{what}");
                let weights = plan.experts.tensors.iter();
                let weights = weights.filter(|tensor| tensor.role == Role::Weight);
                let held: u64 = weights.map(|tensor| tensor.bytes(0)).sum();
                assert!(cost.memory == 0.0 || cost.memory == held as f64, "{what}");
                costs.push(cost);
            }
            let fewer = |pair: &[WaysCost]| pair[1].weights <= pair[0].weights;
            assert!(costs.windows(2).all(fewer), "{costs:?}");
        }
    }

    /// The best number is beside the closed form's, or an end.
    #[test]
    fn the_best_is_beside_the_optimum() {
        let slices = mesh(2, 24);
        let mut seen = std::collections::BTreeSet::new();
        for power in -20..20 {
            let load = WaysLoad {
                rows: 3e5,
                weights: 3e5 * 1.9f64.powi(power),
                rows_rate: 2e9,
                weights_rate: 5e9,
            };
            let best = Ways::best(slices, &load);
            let optimum = Ways::optimum(slices, &load);
            let divisors = Ways::all(slices).split_off(1);
            let below = divisors.iter().rev().find(|r| **r as f64 <= optimum);
            let above = divisors.iter().find(|r| **r as f64 >= optimum);
            let ends = [0, 1, 24];
            let beside = [below, above].contains(&Some(&best));
            assert!(
                beside || ends.contains(&best),
                "{best}, not beside {optimum}"
            );
            seen.insert(best);
        }
        assert!(seen.len() >= 5, "{seen:?}");
    }
}
