//! Routers of this year's models: each layer forward and backward on a CPU, on a simulator of each
//! family of GPUs and over ranks, and the reference against plain loops.

use super::Case;
use super::cases::small;
use super::layers::engine as cpu;
use super::mesh::{compare, mesh};
use super::simulated::{SIMULATORS, open};
use moesaic::spec::{
    BiasedValues, GroupMask, GroupStat, Groups, LayerSpec, Renormalize, Score, Select, TokenBlocks,
};
use moesaic::{Engine, Recompute, reference};
use moesaic_harness::thorough::in_turns;

fn spec(name: &str, top_k: usize, change: impl Fn(&mut LayerSpec)) -> LayerSpec {
    let mut spec = small(24, 16, 12, top_k);
    spec.name = name.to_string();
    (spec.router.score, spec.router.renormalize) = (Score::Sigmoid, Renormalize::Sum);
    change(&mut spec);
    if let Err(problems) = spec.validate() {
        panic!("{name}: {problems:?}");
    }
    spec
}

/// Layers whose tokens choose without the others.
fn alone() -> Vec<LayerSpec> {
    vec![
        spec("grok", 2, |s| {
            s.router.score = Score::Softmax;
            (s.router.bias, s.router.logit_softcap) = (true, Some(1.5));
            // In training the slope of the cap is that of the logit without noise.
            s.router.noise = 4.0;
        }),
        spec("kolibri", 3, |s| {
            (s.router.select_bias, s.router.select_bias_on) = (true, BiasedValues::Logits);
        }),
        spec("grouped-kolibri", 3, |s| {
            (s.router.select_bias, s.router.select_bias_on) = (true, BiasedValues::Logits);
            s.router.groups = Some(Groups {
                count: 4,
                keep: 2,
                stat: GroupStat::Top2Sum,
                mask: GroupMask::Exclude,
            });
        }),
        spec("intern", 6, |s| {
            (s.router.score, s.router.select) = (Score::Softmax, Select::PerGroup(3));
        }),
        spec("inkling", 5, |s| {
            (s.router.select_bias, s.router.always_chosen) = (true, 2);
            s.router.scale = 2.5;
        }),
    ]
}

/// Layers whose tokens choose by blocks.
fn in_blocks() -> Vec<LayerSpec> {
    let blocks = |tokens, experts| Some(TokenBlocks { tokens, experts });
    vec![
        spec("llada", 3, |s| {
            (s.router.select_bias, s.router.blocks) = (true, blocks(8, 5));
        }),
        spec("masked-llada", 2, |s| {
            (s.router.token_mask, s.router.blocks) = (true, blocks(5, 2));
            s.router.score = Score::SoftmaxSelected;
            s.router.renormalize = Renormalize::None;
        }),
    ]
}

fn routers() -> impl Iterator<Item = (usize, LayerSpec)> {
    alone().into_iter().chain(in_blocks()).enumerate()
}

fn check(engine: &Engine, some: impl Iterator<Item = (usize, LayerSpec)>) {
    for (i, spec) in some {
        let case = Case::random(&spec, 33, i as u64);
        case.check(engine);
        case.check_training(engine, Recompute::None);
    }
}

#[test]
fn cpu_agrees() {
    check(&cpu(), routers());
}

#[test]
fn simulators_agree() {
    for (n, target) in SIMULATORS.into_iter().enumerate() {
        check(&open(target), in_turns(n, routers()));
    }
}

#[test]
fn ranks_agree() {
    for (i, spec) in alone().iter().enumerate() {
        let case = Case::random(spec, 21, i as u64);
        compare(&cpu(), mesh([2, 3][i % 2], 1, 1), &case, Recompute::None);
    }
}

/// The experts of a token by descending key, without those that `takes` refuses.
fn ranked(keys: &[f64], takes: impl Fn(usize) -> bool) -> Vec<usize> {
    let mut order: Vec<usize> = (0..keys.len()).filter(|&e| takes(e)).collect();
    order.sort_by(|&a, &b| keys[b].total_cmp(&keys[a]).then(a.cmp(&b)));
    order
}

/// Chooses and weighs experts for one token of a call, by a plain loop after each model's own code.
fn by_hand(case: &Case, logits: &[f64], t: usize) -> (Vec<usize>, Vec<f64>) {
    let (spec, e) = (&case.spec, case.spec.shape.experts);
    let k = spec.shape.top_k;
    let row = |t: usize| &logits[t * e..(t + 1) * e];
    let sigmoid = |z: f64| 1.0 / (1.0 + (-z).exp());
    let bias = |e: usize| {
        if spec.router.select_bias {
            case.weights.get("router.select_bias").data[e]
        } else {
            0.0
        }
    };
    let biased = |t: usize| -> Vec<f64> {
        let of = |(e, &z): (usize, &f64)| sigmoid(z) + bias(e);
        row(t).iter().enumerate().map(of).collect()
    };
    let shares = |ids: &[usize], value: &dyn Fn(f64) -> f64| -> Vec<f64> {
        let values: Vec<f64> = ids.iter().map(|&e| value(row(t)[e])).collect();
        let sum: f64 = values.iter().sum();
        values.iter().map(|v| v / sum * spec.router.scale).collect()
    };
    let ids = match spec.name.as_str() {
        "grok" => {
            // Softmax over all and then shares of the chosen: the softmax over the chosen.
            let ids = ranked(row(t), |_| true)[..k].to_vec();
            return (ids.clone(), shares(&ids, &f64::exp));
        }
        "kolibri" => {
            let keys: Vec<f64> = (0..e).map(|e| row(t)[e] + bias(e)).collect();
            ranked(&keys, |_| true)[..k].to_vec()
        }
        "intern" => {
            let of = |group: usize| ranked(row(t), |e| e / 4 == group)[..2].to_vec();
            let taken: Vec<usize> = (0..3).flat_map(of).collect();
            let ids = ranked(row(t), |e| taken.contains(&e));
            return (ids.clone(), shares(&ids, &f64::exp));
        }
        "inkling" => {
            // log σ of all, less their logsumexp.
            let others = ranked(&biased(t), |e| e < 10)[..3].to_vec();
            let ids = [vec![10, 11], others].concat();
            let logs: Vec<f64> = ids
                .iter()
                .map(|&e| -(1.0 + (-row(t)[e]).exp()).ln())
                .collect();
            let sum = logs.iter().map(|l| l.exp()).sum::<f64>().ln();
            let weights = logs.iter().map(|l| (l - sum).exp() * spec.router.scale);
            return (ids, weights.collect());
        }
        _ => {
            let tokens = (t / 8 * 8)..(t / 8 * 8 + 8).min(logits.len() / e);
            let rows: Vec<Vec<f64>> = tokens.map(biased).collect();
            let most = |e: usize| rows.iter().map(|row| row[e]).fold(f64::MIN, f64::max);
            let most: Vec<f64> = (0..e).map(most).collect();
            let agreed = ranked(&most, |_| true)[..5].to_vec();
            ranked(&biased(t), |e| agreed.contains(&e))[..k].to_vec()
        }
    };
    (ids.clone(), shares(&ids, &sigmoid))
}

#[test]
fn the_reference_is_what_plain_loops_compute() {
    let named = |name: &&LayerSpec| !name.name.contains('-');
    for spec in alone().iter().chain(&in_blocks()).filter(named) {
        let case = Case::random(spec, 21, 9);
        let gate = reference::gate(spec, &case.weights, &case.input);
        let logits = gate.logits.unwrap();
        let k = spec.shape.top_k;
        for t in 0..21 {
            let (ids, weights) = by_hand(&case, &logits, t);
            let got = &gate.decision.ids[t * k..(t + 1) * k];
            let got: Vec<usize> = got.iter().map(|&e| e as usize).collect();
            assert_eq!(got, ids, "{}, token {t}", spec.name);
            for (got, want) in gate.decision.weights[t * k..].iter().zip(weights) {
                assert!((got - want).abs() < 1e-12, "{}: {got} {want}", spec.name);
            }
        }
    }
}
