//! The GPU kernels, run on this CPU thread by thread, against the reference.

use moesaic_harness::pass::Tensors;
use moesaic_harness::plans::planned;
use moesaic_harness::specs::{spec, with};
use moesaic_harness::thorough::{in_turns, turn_of};
use moesaic_harness::{Harness, check};
use moesaic_kernel::DType;
use moesaic_plan::PlanOptions;
use moesaic_spec::*;

/// A target with warps of 32 and one with waves of 64.
const TARGETS: [&str; 2] = ["cuda:sm_75", "rocm:gfx942"];

/// A layer whose kernels run under several orders of the threads.
struct Simulated {
    harness: Harness,
    target: &'static str,
}

impl Simulated {
    fn new(spec: &LayerSpec, target: &'static str) -> Simulated {
        let plan = planned(spec, target.parse().unwrap(), &PlanOptions::default());
        let harness = Harness::of(plan);
        Simulated { harness, target }
    }

    fn run(&self, tokens: usize, seed: u64) -> Tensors {
        self.harness.run(&self.harness.random_input(tokens, seed))
    }

    fn check(&self, tokens: usize) {
        let tensors = self.run(tokens, tokens as u64);
        let spec = &self.harness.plan.spec;
        check::all(
            &self.harness,
            &tensors,
            &format!("{}, {tokens} tokens, {spec:?}", self.target),
        );
    }
}

fn run(spec: &LayerSpec, tokens: &[usize]) {
    for target in in_turns(turn_of(spec), TARGETS) {
        let layer = Simulated::new(spec, target);
        tokens.iter().for_each(|&t| layer.check(t));
    }
}

/// Runs what `change` makes of a small layer, on one target after the other.
fn run_with(base: LayerSpec, tokens: &[usize], change: impl FnOnce(&mut LayerSpec)) {
    run(&with(base, change), tokens);
}

#[test]
fn types_and_awkward_widths() {
    use DType::{Bf16, F16, F32};
    let widths = [(33, 21), (24, 40), (7, 130), (150, 36)];
    let types = [(F32, F32), (Bf16, Bf16), (F16, F16), (F32, Bf16)];
    for ((d, h), (weights, activations)) in widths.into_iter().zip(types) {
        run_with(spec(d, h, 5, 2), &[0, 1, 33, 200], |s| {
            s.precision.weights = weights;
            s.precision.activations = activations;
        });
    }
}

#[test]
fn any_number_of_experts_and_choices() {
    for (e, k) in [(1, 1), (3, 3), (40, 5), (64, 64), (300, 7)] {
        run(&spec(8, 4, e, k), &[1, 33]);
    }
    run(&spec(8, 4, 1000, 40), &[5]);
}

#[test]
fn many_tiles() {
    run(&spec(4, 4, 300, 8), &[700]);
    run_with(spec(4, 4, 600, 3), &[1400], |s| {
        s.capacity.order = CapacityOrder::TokenMajor
    });
    run(&spec(4, 4, 2, 2), &[1100]);
}

#[test]
fn scores() {
    let scores = [
        Score::SoftmaxSelected,
        Score::Sigmoid,
        Score::SqrtSoftplus,
        Score::One,
    ];
    let renormalize = [
        Renormalize::Sum,
        Renormalize::PNorm,
        Renormalize::Clamp,
        Renormalize::None,
    ];
    for (score, renormalize) in scores.into_iter().zip(renormalize) {
        run_with(spec(16, 8, 40, 6), &[33], |s| {
            s.router.score = score;
            s.router.renormalize = renormalize;
            s.router.renormalize_eps = match renormalize {
                Renormalize::Sum | Renormalize::Clamp => 1e-3,
                _ => 0.0,
            };
            s.router.norm_order = if renormalize == Renormalize::PNorm {
                2.5
            } else {
                1.0
            };
            s.router.scale = 2.5;
            s.router.bias = true;
            s.router.expert_scale = true;
        });
    }
    run_with(spec(16, 8, 40, 2), &[33], |s| {
        s.router.select = Select::SparseMixer(0.1)
    });
    run_with(spec(16, 8, 70, 2), &[33], |s| {
        s.router.select = Select::SparseMixer(0.05);
        s.capacity.mode = CapacityMode::Factor;
        s.capacity.order = CapacityOrder::BatchPrioritized;
    });
}

#[test]
fn biased_and_grouped_selection() {
    let kinds = [
        (
            Score::Sigmoid,
            GroupStat::Top2Sum,
            GroupMask::Exclude,
            64,
            8,
        ),
        (Score::Softmax, GroupStat::Max, GroupMask::Zero, 60, 4),
        (
            Score::SqrtSoftplus,
            GroupStat::Top2Sum,
            GroupMask::Zero,
            240,
            80,
        ),
    ];
    for (score, stat, mask, experts, count) in kinds {
        run_with(spec(16, 8, experts, 6), &[33], |s| {
            s.router.score = score;
            s.router.select_bias = true;
            s.router.renormalize = Renormalize::Sum;
            s.router.groups = Some(Groups {
                count,
                keep: count / 2,
                stat,
                mask,
            });
        });
    }
    run_with(spec(16, 8, 40, 6), &[33], |s| s.router.select_bias = true);
}

#[test]
fn routers() {
    run_with(spec(70, 8, 40, 3), &[1, 33], |s| {
        s.router.kind = RouterKind::Cosine;
        s.router.projection_dim = Some(37);
    });
    run_with(spec(70, 8, 40, 3), &[33], |s| {
        s.router.input = RouterInput::RmsScaled
    });
    run_with(spec(72, 8, 40, 3), &[33], |s| {
        s.router.input = RouterInput::RmsScaled;
        s.precision.activations = DType::Bf16;
    });
    run_with(spec(70, 8, 40, 3), &[33], |s| {
        s.router.kind = RouterKind::Table;
        s.router.table_rows = Some(50);
        s.router.score = Score::SqrtSoftplus;
        s.router.renormalize = Renormalize::Sum;
    });
    run_with(spec(70, 8, 40, 3), &[33], |s| {
        s.router.kind = RouterKind::Table;
        s.router.table_rows = Some(50);
        s.router.score = Score::One;
        s.router.renormalize = Renormalize::Sum;
    });
    run_with(spec(30, 8, 6, 3), &[0, 33], |s| {
        s.router.kind = RouterKind::External
    });
}

#[test]
fn capacity() {
    use CapacityMode::{Bounded, Factor, Fixed, MaxCount};
    let cases = [
        (Factor, 1.25, CapacityOrder::SlotMajor),
        (Factor, -0.5, CapacityOrder::TokenMajor),
        (Factor, 0.0, CapacityOrder::Random),
        (MaxCount, 1.0, CapacityOrder::SlotMajor),
        (Bounded, 0.7, CapacityOrder::BatchPrioritized),
        (Bounded, 0.6, CapacityOrder::Probability),
        (Fixed, 1.0, CapacityOrder::Random),
    ];
    for (i, (mode, factor, order)) in cases.into_iter().enumerate() {
        run_with(spec(8, 4, 5, 2), &[0, 1, 33, 200], |s| {
            s.capacity.mode = mode;
            s.capacity.factor = factor;
            s.capacity.order = order;
            s.capacity.rows = (mode == Fixed).then_some(9);
            s.capacity.align = 1 + i % 3;
            s.capacity.renormalize_after_drop = s.may_drop() && i % 2 == 1;
            s.router.scale = 1.5;
        });
    }
}

#[test]
fn identity_experts() {
    run_with(spec(8, 4, 5, 3), &[33, 200], |s| {
        s.experts.identity = 3;
        s.capacity.mode = CapacityMode::Factor;
        s.capacity.factor = 0.5;
        s.capacity.renormalize_after_drop = true;
    });
    run_with(spec(8, 4, 5, 3), &[33], |s| {
        s.experts.identity = 3;
        s.capacity.mode = CapacityMode::Factor;
        s.capacity.order = CapacityOrder::Probability;
    });
}

#[test]
fn experts() {
    use Activation::{Gelu, GeluTanh, Relu, Relu2, Silu};
    let cases = [
        (Silu, ExpertForm::Gated, WeightSite::Output),
        (Gelu, ExpertForm::Plain, WeightSite::Input),
        (GeluTanh, ExpertForm::Gated, WeightSite::Activation),
        (Relu, ExpertForm::Plain, WeightSite::Activation),
        (Relu2, ExpertForm::Gated, WeightSite::Input),
    ];
    for (i, (activation, form, site)) in cases.into_iter().enumerate() {
        run_with(spec(18, 22, 3, 2), &[33], |s| {
            s.experts.activation = activation.clone();
            s.experts.form = form;
            s.experts.bias = (i != 4).into();
            s.router.weight_on = site;
            if i % 2 == 0 {
                s.experts.clamp = Some(0.4);
                s.experts.up_offset = 1.0;
            }
            s.experts.alpha = if activation == Silu { 1.702 } else { 1.0 };
            if i == 2 {
                s.experts.clamp_on = ClampSite::Output;
                s.experts.up_softcap = Some(0.8);
            }
            s.shape.output_dim = (i == 1).then_some(11);
        });
    }
}

#[test]
fn shared_experts() {
    run_with(spec(18, 22, 3, 2), &[0, 1, 70], |s| {
        s.shared = vec![
            SharedExpert {
                hidden_dim: 13,
                gate: SharedGate::Sigmoid,
                bias: None,
                clamp: None,
                activation: None,
            },
            SharedExpert {
                hidden_dim: 140,
                gate: SharedGate::None,
                bias: None,
                clamp: None,
                activation: None,
            },
        ];
        s.experts.bias = true.into();
        s.precision.activations = DType::Bf16;
    });
}

#[test]
fn ties_go_to_the_lower_expert() {
    let (tokens, experts) = (7, 9);
    let blocks = Some(TokenBlocks { tokens, experts });
    let layer = spec(6, 4, 72, 6);
    let grouped = with(layer.clone(), |s| s.router.select = Select::PerGroup(2));
    let agreed = with(layer.clone(), |s| s.router.blocks = blocks);
    let layers = [
        (layer, [0, 1, 2, 3, 4, 5]),
        (grouped, [0, 1, 2, 36, 37, 38]),
        (agreed, [0, 1, 2, 3, 4, 5]),
    ];
    for (target, (spec, ids)) in TARGETS
        .iter()
        .flat_map(|t| layers.iter().map(move |l| (*t, l)))
    {
        let mut layer = Simulated::new(spec, target);
        let router = layer.harness.weights.0.get_mut("router.weight").unwrap();
        router.data.fill(0.0);
        let tensors = layer.run(40, 1);
        for row in tensors.ids().chunks(6) {
            assert_eq!(row, *ids, "{target}");
        }
        layer.check(40);
    }
}

/// Equal weights and equal best scores: the first in slot-major order stay.
#[test]
fn ties_keep_their_place() {
    for order in [CapacityOrder::Probability, CapacityOrder::BatchPrioritized] {
        let mut spec = spec(6, 4, 7, 2);
        spec.capacity.mode = CapacityMode::Fixed;
        spec.capacity.rows = Some(21);
        spec.capacity.order = order;
        for target in TARGETS {
            let mut layer = Simulated::new(&spec, target);
            let router = layer.harness.weights.0.get_mut("router.weight").unwrap();
            router.data.fill(0.0);
            layer.check(70);
        }
    }
}

#[test]
fn nan_logits_give_valid_choices() {
    for target in TARGETS {
        let mut layer = Simulated::new(&spec(6, 4, 70, 5), target);
        let router = layer.harness.weights.0.get_mut("router.weight").unwrap();
        router.data[3 * 6..4 * 6].fill(f64::NAN);
        let tensors = layer.run(20, 1);
        for row in tensors.ids().chunks(5) {
            let mut sorted = row.to_vec();
            sorted.sort_unstable();
            sorted.dedup();
            assert_eq!(sorted.len(), 5, "{target}: {row:?}");
            assert!(
                sorted.iter().all(|id| (0..70).contains(id)),
                "{target}: {row:?}"
            );
            assert!(!sorted.contains(&3), "{target}: NaN is last: {row:?}");
        }
        assert!(
            tensors.get("topk_weights").iter().all(|w| w.is_nan()),
            "{target}"
        );
    }
}
