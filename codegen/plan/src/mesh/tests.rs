//! Rank plans, held against what each side needs.

use super::*;
use crate::{Step, Training};
use moesaic_spec::testing::sample;
use std::collections::BTreeSet;

fn spec(text: &str) -> LayerSpec {
    LayerSpec::from_toml(text).unwrap_or_else(|e| panic!("{}", e.render("spec", false)))
}

fn planned(spec: &LayerSpec, target: &str, mesh: Parallel, rank: usize, trains: bool) -> RankPlan {
    let options = PlanOptions::training(trains.then(Training::default));
    let target = target.parse().unwrap();
    plan_rank(spec, target, &options, mesh, rank).unwrap()
}

#[test]
fn a_rank_has_its_steps_in_this_order() {
    let spec = spec(
        "shape = { model_dim = 8, hidden_dim = 16, experts = 4, top_k = 2 }
         experts = { bias = true }
         shared = [{ hidden_dim = 8 }]
         router = { noise = 1.0 }
         capacity = { mode = 'factor', factor = 1.5 }
         losses = [{ kind = 'global', coefficient = 0.1 }]",
    );
    let mesh = Parallel {
        ep: 2,
        shards: 2,
        dp: 1,
    };
    let plan = planned(&spec, "cpu:avx2", mesh, 1, true);
    let text = plan.text();
    let expected = include_str!("steps.txt");
    assert!(text == expected, "steps.txt should be\n{text}");
}

/// Every exchange moves rows of one size, between tensors that both sides have.
#[test]
fn both_sides_of_an_exchange_have_the_same_rows() {
    for seed in 0..60 {
        let spec = sample(seed);
        let mesh = Parallel::of(1 + seed as usize % 8, &spec);
        for target in ["cpu:avx512", "cuda:sm_80", "cuda:sm_90a", "rocm:gfx942"] {
            let plan = planned(&spec, target, mesh, mesh.ranks() - 1, true);
            let passes = [&plan.steps, &plan.evaluation, &plan.backward];
            for step in passes.into_iter().flatten() {
                let RankStep::Exchange(exchange) = step else {
                    continue;
                };
                let (here, there) = match exchange.way {
                    Way::ToExperts { from, to } => (from, to),
                    Way::ToTokens { from, to } | Way::Gather { from, to } => (to, from),
                    _ => continue,
                };
                let [a, b] = [(Side::Tokens, here), (Side::Experts, there)]
                    .map(|(side, tensor)| plan.row_bytes(side, tensor));
                assert_eq!(a, b, "{}: seed {seed}, {target}", exchange.name);
                assert!(a > 0);
            }
        }
    }
}

/// A rank's launches are all of those of its sides, each once and in order.
#[test]
fn every_launch_of_both_sides_is_there_once() {
    for seed in 0..60 {
        let spec = sample(seed);
        let mesh = Parallel::of(1 + seed as usize % 6, &spec);
        let plan = planned(&spec, "cpu:avx2", mesh, 0, true);
        let passes: [(&[RankStep], [&[Step]; 2]); 3] = [
            (&plan.steps, [&plan.tokens.steps, &plan.experts.steps]),
            (
                &plan.evaluation,
                [&plan.tokens.evaluation, &plan.experts.evaluation],
            ),
            (
                &plan.backward,
                [&plan.tokens.backward, &plan.experts.backward],
            ),
        ];
        for (steps, sides) in passes {
            for (side, own) in [Side::Tokens, Side::Experts].into_iter().zip(sides) {
                let launched = steps.iter().filter_map(|step| match step {
                    RankStep::Launch { side: whose, step } if *whose == side => Some(*step),
                    _ => None,
                });
                assert!(launched.eq(0..own.len()), "seed {seed}: {side:?}");
            }
        }
    }
}

/// What one rank sends in a row another must expect, also where ranks have unequally many
/// experts.
#[test]
fn ranks_agree_on_the_parts_of_a_gradient() {
    for target in ["cpu:avx512", "cuda:sm_80", "cuda:sm_90a", "rocm:gfx942"] {
        for experts in [3, 5, 64, 65] {
            let text = format!(
                "shape = {{ model_dim = 64, hidden_dim = 96, experts = {experts}, top_k = 2 }}"
            );
            let spec = spec(&text);
            let mesh = Parallel {
                ep: 3,
                ..Parallel::default()
            };
            let parts = (0..3).map(|rank| {
                let plan = planned(&spec, target, mesh, rank, true);
                let parts = plan.tokens.tensor("dweight_parts").unwrap();
                parts.shape.clone()
            });
            let parts: BTreeSet<String> = parts.map(|shape| format!("{shape:?}")).collect();
            assert_eq!(parts.len(), 1, "{experts} on {target}: {parts:?}");
        }
    }
}

/// Weights of experts are on the experts' side, all others on the tokens'.
#[test]
fn every_weight_has_one_side() {
    for seed in 0..60 {
        let spec = sample(seed);
        let mesh = Parallel::of(2, &spec);
        let plan = planned(&spec, "cpu:avx2", mesh, 0, true);
        let weights = |plan: &LayerPlan| -> BTreeSet<String> {
            let weights = plan.tensors.iter().filter(|t| t.role == Role::Weight);
            weights.map(|tensor| tensor.name.clone()).collect()
        };
        let (tokens, experts) = (weights(&plan.tokens), weights(&plan.experts));
        let twice: Vec<&String> = tokens.intersection(&experts).collect();
        assert!(twice.iter().all(|name| *name == "experts.down.bias"));
        for tensor in moesaic_spec::canonical_tensors(&spec) {
            let own = tensor.name.starts_with("experts.");
            let side = if own { &experts } else { &tokens };
            assert!(side.contains(&tensor.name), "seed {seed}: {}", tensor.name);
        }
    }
}
