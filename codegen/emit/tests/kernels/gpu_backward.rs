//! The backward kernels of the SIMT families, run by simulators of GPUs,
//! stem by stem.

use moesaic_harness::plans::planned;
use moesaic_harness::specs::{biased, external as spec, with};
use moesaic_harness::thorough::in_turns;
use moesaic_harness::{Harness, backward, specs};
use moesaic_kernel::DType;
use moesaic_plan::{PlanOptions, Recompute, Training};
use moesaic_spec::*;

/// GPUs without a family on tensor or matrix cores: warps of 32 and waves of 64 on
/// fibers, and the PTX that NVRTC makes of the text.
const TARGETS: [&str; 3] = ["cuda:sm_75", "rocm:gfx908", "sim:sm_75"];

fn typed(spec: LayerSpec, weights: DType, activations: DType) -> LayerSpec {
    biased(specs::typed(spec, weights, activations))
}

fn harness(spec: &LayerSpec, target: &str, training: Training) -> Harness {
    let options = PlanOptions::training(training);
    Harness::of(planned(spec, target.parse().unwrap(), &options))
}

fn run(target: &str, spec: &LayerSpec, tokens: &[usize]) {
    let harness = harness(spec, target, Training::default());
    for &tokens in tokens {
        let tensors = harness.train(tokens, &[0]);
        let what = format!("{target}, {tokens} tokens, {spec:?}");
        backward::all(&harness, &tensors, &what);
    }
}

/// Changes of a layer of 33 x 21, 6 experts, 2 per token, on one target after
/// the other.
fn variants(changes: &[specs::Change]) {
    for (change, target) in changes.iter().zip(TARGETS.iter().cycle()) {
        run(target, &with(spec(33, 21, 6, 2), change), &[0, 1, 47]);
    }
}

#[test]
fn types_and_awkward_widths() {
    use DType::{Bf16, F16, F32};
    let widths = [(33, 21), (24, 40), (7, 130), (150, 36), (64, 72)];
    let types = [
        (F32, F32),
        (Bf16, Bf16),
        (F16, F16),
        (F32, Bf16),
        (F16, F32),
    ];
    // One text for warps of 32, by both simulators in turn.
    let [fibers, waves, ptx] = TARGETS;
    let warps = [fibers, ptx].into_iter().cycle();
    let cases = widths.into_iter().zip(types).zip(warps);
    for (i, (((d, h), (weights, activations)), warps)) in cases.enumerate() {
        let spec = with(typed(spec(d, h, 5, 2), weights, activations), |s| {
            s.precision.expert_gradients = weights;
        });
        for target in in_turns(i, [warps, waves]) {
            run(target, &spec, &[0, 33, 150]);
        }
    }
}

#[test]
fn any_number_of_experts_and_choices() {
    let cases = [(1, 1), (3, 3), (40, 5), (300, 7), (100, 70)];
    for ((e, k), target) in cases.into_iter().zip(TARGETS.iter().cycle()) {
        run(target, &spec(8, 4, e, k), &[1, 33]);
    }
    run(TARGETS[2], &spec(1, 1, 1, 1), &[0, 1, 3]);
}

#[test]
fn experts() {
    variants(&specs::EXPERTS);
}

#[test]
fn shared_and_identity_experts() {
    variants(&[
        |s| {
            let shared = |hidden_dim, gate| SharedExpert {
                hidden_dim,
                gate,
                bias: None,
                clamp: None,
                activation: None,
            };
            s.shared = vec![
                shared(9, SharedGate::Sigmoid),
                shared(140, SharedGate::None),
            ];
            s.experts.bias = true.into();
            s.experts.identity = 3;
        },
        |s| {
            s.experts.identity = 1;
            s.experts.zero = 2;
            s.precision.activations = DType::F16;
        },
    ]);
}

#[test]
fn capacities() {
    variants(&specs::DROPS);
}

#[test]
fn recomputing_gives_the_same_bits() {
    for target in in_turns(1, TARGETS) {
        let run = |recompute| {
            let harness = harness(&specs::busy(), target, Training { recompute });
            harness.train(90, &[0])
        };
        let kept = run(Recompute::None);
        for recompute in [Recompute::Hidden, Recompute::All] {
            let other = run(recompute);
            assert_eq!(other.gradients(), kept.gradients(), "{target}");
        }
    }
}

#[test]
fn gradients_are_added_in_place() {
    for target in in_turns(0, TARGETS) {
        let harness = harness(&specs::busy(), target, Training::default());
        let (once, twice) = (harness.train(90, &[0]), harness.train(90, &[0, 1]));
        for tensor in &harness.plan.tensors {
            if tensor.role != moesaic_plan::TensorRole::WeightGradient {
                continue;
            }
            let (once, twice) = (once.get(&tensor.name), twice.get(&tensor.name));
            let doubled = once.iter().zip(twice).all(|(a, b)| 2.0 * a == *b);
            assert!(doubled, "{target}: {}", tensor.name);
        }
    }
}
