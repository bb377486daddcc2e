//! Selections beyond top-k, masks, and what training draws, on this CPU and
//! on simulated GPUs, against the reference.

use moesaic_harness::cpu::host;
use moesaic_harness::plans::{only, planned, routes};
use moesaic_harness::thorough::takes;
use moesaic_harness::{Harness, check, specs};
use moesaic_kernel::{DType, Target};
use moesaic_plan::{PlanOptions, Training};
use moesaic_spec::*;

type Change = fn(&mut LayerSpec);

fn spec(change: Change, experts: usize) -> LayerSpec {
    let mut spec = specs::with(specs::spec(33, 5, experts, 2), change);
    if matches!(spec.router.select, Select::ExpertChoice(_)) {
        spec.shape.top_k = experts;
    }
    spec
}

/// The routing of a layer on one target.
fn harness(spec: &LayerSpec, target: &str, training: bool) -> Harness {
    let to = match target {
        "cpu" => Target::Cpu(host()),
        gpu => gpu.parse().unwrap(),
    };
    let options = PlanOptions::training(training.then(Training::default));
    let mut plan = planned(spec, to, &options);
    (plan.evaluation, plan.backward) = (Vec::new(), Vec::new());
    Harness::of(only(plan, routes))
}

/// Every change on this CPU, and each on one of the simulators.
fn agree(target: &str, changes: &[Change], training: bool) {
    const SIMULATED: [&str; 3] = ["cuda:sm_75", "rocm:gfx942", "sim:sm_80"];
    let of = SIMULATED.iter().position(|other| *other == target);
    for (i, &change) in changes.iter().enumerate() {
        if of.is_some_and(|n| !takes(n + i, SIMULATED.len())) {
            continue;
        }
        let spec = spec(change, [37, 6][i % 2]);
        spec.validate().unwrap();
        let harness = harness(&spec, target, training);
        // One token alone balances to ties, which rounding breaks.
        let few = match spec.router.select {
            Select::Sinkhorn(_) => 3,
            _ => 1,
        };
        for tokens in [0, few, 67] {
            let tensors = harness.run(&harness.random_input(tokens, i as u64 + 5));
            let what = format!("{target}, {tokens} tokens of {}", spec.to_toml());
            check::routing(&harness, &tensors, &what);
        }
    }
}

/// A shared expert whose gate is a logit beside those of the router.
fn gated_shared() -> SharedExpert {
    SharedExpert {
        clamp: None,
        activation: None,
        hidden_dim: 7,
        gate: SharedGate::Sigmoid,
        bias: None,
    }
}

const SERVED: [Change; 18] = [
    |s| s.router.token_mask = true,
    |s| {
        s.router.token_mask = true;
        s.capacity.mode = CapacityMode::Factor;
        s.capacity.order = CapacityOrder::BatchPrioritized;
    },
    |s| {
        s.shape.top_k = 4;
        s.router.active_k = true;
        s.router.score = Score::SoftmaxSelected;
        s.router.renormalize = Renormalize::Sum;
    },
    |s| {
        (s.router.active_k, s.router.token_mask) = (true, true);
        s.router.select = Select::SparseMixer(0.1);
        s.capacity.order = CapacityOrder::TokenMajor;
    },
    |s| {
        let (temperature, load) = (0.75, 0.5);
        s.router.entropy = Some(Entropy { temperature, load });
        s.router.score = Score::Sigmoid;
    },
    |s| s.router.select = Select::ExpertChoice(1.5),
    |s| {
        s.router.select = Select::ExpertChoice(2.0);
        (s.router.token_mask, s.router.renormalize) = (true, Renormalize::Sum);
        s.router.score = Score::SqrtSoftplus;
    },
    |s| {
        let (temperature, load) = (-0.5, 0.0);
        s.router.entropy = Some(Entropy { temperature, load });
        s.router.select = Select::ExpertChoice(0.3);
    },
    |s| {
        (s.router.logit_softcap, s.router.bias) = (Some(1.5), true);
        s.router.renormalize = Renormalize::PNorm;
        s.router.norm_order = 3.0;
        s.shared = vec![gated_shared()];
    },
    |s| {
        (s.router.kind, s.router.projection_dim) = (RouterKind::Cosine, Some(9));
        (s.router.logit_softcap, s.router.score) = (Some(0.25), Score::Sigmoid);
        s.shared = vec![gated_shared()];
    },
    |s| {
        (s.router.select_bias, s.router.select_bias_on) = (true, BiasedValues::Logits);
        (s.router.score, s.router.renormalize) = (Score::Sigmoid, Renormalize::Sum);
    },
    |s| {
        (s.shape.experts, s.shape.top_k) = (70, 4);
        s.router.select = Select::PerGroup(2);
        s.router.renormalize = Renormalize::Sum;
    },
    |s| {
        (s.shape.experts, s.shape.top_k) = (36, 6);
        s.router.select = Select::PerGroup(6);
        (s.router.select_bias, s.router.score) = (true, Score::SqrtSoftplus);
        s.capacity.mode = CapacityMode::Factor;
        s.capacity.order = CapacityOrder::BatchPrioritized;
    },
    |s| {
        (s.shape.experts, s.shape.top_k) = (24, 3);
        (s.router.select_bias, s.router.select_bias_on) = (true, BiasedValues::Logits);
        s.router.score = Score::SoftmaxSelected;
        s.router.groups = Some(Groups {
            count: 4,
            keep: 2,
            stat: GroupStat::Top2Sum,
            mask: GroupMask::Exclude,
        });
    },
    |s| {
        (s.shape.top_k, s.router.always_chosen) = (5, 2);
        (s.router.score, s.router.select_bias) = (Score::Sigmoid, true);
        s.router.renormalize = Renormalize::Sum;
    },
    |s| {
        (s.shape.top_k, s.router.always_chosen) = (2, 2);
        s.router.renormalize = Renormalize::Sum;
        s.router.active_k = true;
    },
    |s| {
        let (tokens, experts) = (8, 9);
        (s.shape.top_k, s.router.blocks) = (3, Some(TokenBlocks { tokens, experts }));
        (s.router.score, s.router.select_bias) = (Score::Sigmoid, true);
        (s.router.renormalize, s.router.token_mask) = (Renormalize::Sum, true);
    },
    |s| {
        let (tokens, experts) = (5, 2);
        s.router.blocks = Some(TokenBlocks { tokens, experts });
    },
];

const TRAINED: [Change; 10] = [
    |s| s.router.noise = 4.0,
    |s| (s.router.noise, s.router.noise_kind) = (0.7, NoiseKind::Learned),
    |s| (s.router.noise, s.router.noise_kind) = (1.0, NoiseKind::Gumbel),
    |s| {
        (s.router.noise, s.router.noise_kind) = (1.0, NoiseKind::GumbelSecond);
        (s.router.random_second, s.router.renormalize) = (true, Renormalize::Sum);
    },
    |s| {
        s.router.random_second = true;
        s.router.renormalize = Renormalize::Clamp;
        s.router.renormalize_eps = 1e-9;
        s.router.scale = 2.0;
        s.capacity.mode = CapacityMode::Factor;
        s.capacity.order = CapacityOrder::Probability;
    },
    |s| (s.router.jitter, s.router.input_dropout) = (0.1, 0.25),
    |s| {
        (s.router.jitter, s.router.input) = (0.3, RouterInput::RmsScaled);
        (s.precision.activations, s.precision.weights) = (DType::Bf16, DType::Bf16);
        (s.router.noise, s.router.noise_kind) = (0.7, NoiseKind::Learned);
        s.router.kind = RouterKind::Cosine;
        s.router.projection_dim = Some(9);
    },
    |s| s.router.select = Select::Sinkhorn(6),
    |s| {
        s.router.select = Select::Sinkhorn(20);
        (s.router.noise, s.router.token_mask) = (2.0, true);
        s.router.score = Score::Sigmoid;
    },
    |s| (s.router.noise, s.router.logit_softcap) = (4.0, Some(1.0)),
];

#[test]
fn cpu_serves_every_selection() {
    agree("cpu", &SERVED, false);
}

#[test]
fn cpu_draws_what_the_reference_draws() {
    agree("cpu", &TRAINED, true);
}

#[test]
fn warps_of_32_serve_every_selection() {
    agree("cuda:sm_75", &SERVED, false);
}

#[test]
fn warps_of_32_draw_what_the_reference_draws() {
    agree("cuda:sm_75", &TRAINED, true);
}

#[test]
fn ptx_serves_every_selection() {
    agree("sim:sm_80", &SERVED, false);
}

#[test]
fn ptx_draws_what_the_reference_draws() {
    agree("sim:sm_80", &TRAINED, true);
}

#[test]
fn waves_of_64_serve_every_selection() {
    agree("rocm:gfx942", &SERVED, false);
}

#[test]
fn waves_of_64_draw_what_the_reference_draws() {
    agree("rocm:gfx942", &TRAINED, true);
}

/// Every order in every mode, with masked tokens: who is served, and what
/// weights are after dropping.
fn capacities(target: &str) {
    use CapacityMode::*;
    use CapacityOrder::*;
    let modes = [
        (Factor, 1.0),
        (Factor, 0.0),
        (Factor, -0.5),
        (Fixed, 1.0),
        (MaxCount, 1.0),
        (Bounded, 0.75),
    ];
    let orders = [SlotMajor, TokenMajor, BatchPrioritized, Probability, Random];
    for (i, (mode, factor)) in modes.into_iter().enumerate() {
        for (j, order) in orders.into_iter().enumerate() {
            let mut spec = spec(|s| s.router.token_mask = true, 6);
            spec.capacity = Capacity {
                mode,
                factor,
                eval_factor: (j == 0 && mode != Fixed && mode != MaxCount).then_some(0.6),
                rows: (mode == Fixed).then_some(9),
                order,
                align: [1, 4][(i + j) % 2],
                renormalize_after_drop: mode != MaxCount && j % 2 == 0,
            };
            spec.validate().unwrap();
            let harness = harness(&spec, target, false);
            for tokens in [1, 83] {
                let tensors = harness.run(&harness.random_input(tokens, (i + j) as u64));
                let what = format!("{target}, {tokens} tokens of {}", spec.to_toml());
                check::routing(&harness, &tensors, &what);
            }
        }
    }
}

#[test]
fn cpu_keeps_every_capacity() {
    capacities("cpu");
}

#[test]
fn warps_of_32_keep_every_capacity() {
    capacities("cuda:sm_75");
}

#[test]
fn waves_of_64_keep_every_capacity() {
    capacities("rocm:gfx942");
}
