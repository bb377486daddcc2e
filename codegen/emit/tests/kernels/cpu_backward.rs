//! The backward kernels for CPUs, stem by stem.

use moesaic_harness::cpu::{host, isas};
use moesaic_harness::specs::{biased, external as spec, with};
use moesaic_harness::thorough::in_turns;
use moesaic_harness::{Harness, backward, specs};
use moesaic_kernel::{CpuIsa, DType};
use moesaic_plan::{Recompute, Training};
use moesaic_spec::*;

fn typed(spec: LayerSpec, weights: DType, activations: DType) -> LayerSpec {
    biased(specs::typed(spec, weights, activations))
}

fn run(spec: &LayerSpec, isa: CpuIsa, tokens: &[usize]) {
    let harness = Harness::training(spec, isa, 2, Training::default());
    for &tokens in tokens {
        let tensors = harness.train(tokens, &[0]);
        backward::all(
            &harness,
            &tensors,
            &format!("{isa:?}, {tokens} tokens, {spec:?}"),
        );
    }
}

/// Changes of a layer of 33 x 21, 6 experts, 2 per token.
fn variants(changes: &[specs::Change]) {
    for change in changes {
        run(&with(spec(33, 21, 6, 2), change), host(), &[0, 1, 47]);
    }
}

#[test]
fn every_isa_computes_every_type() {
    for (n, isa) in isas().into_iter().enumerate() {
        for dtype in in_turns(n, [DType::F32, DType::Bf16, DType::F16]) {
            let spec = with(typed(spec(70, 45, 3, 2), dtype, dtype), |s| {
                s.precision.expert_gradients = dtype;
            });
            run(&spec, isa, &[0, 1, 70]);
        }
    }
}

#[test]
fn types_can_be_mixed() {
    let narrow = |s: &mut LayerSpec| s.precision.expert_gradients = DType::Bf16;
    let mixed = typed(spec(70, 45, 3, 2), DType::Bf16, DType::F32);
    run(&with(mixed, narrow), host(), &[33]);
    run(
        &typed(spec(70, 45, 3, 2), DType::F32, DType::F16),
        host(),
        &[33],
    );
}

#[test]
fn awkward_shapes() {
    for (d, h, e, k) in [
        (1, 1, 1, 1),
        (300, 67, 1, 1),
        (17, 530, 5, 5),
        (5, 3, 37, 4),
    ] {
        let plain = spec(d, h, e, k);
        run(&plain, host(), &[0, 1, 33, 777]);
        run(&typed(plain, DType::Bf16, DType::Bf16), host(), &[33, 777]);
    }
}

#[test]
fn rows_of_one_expert_take_many_slices() {
    let wide = typed(spec(600, 270, 2, 1), DType::Bf16, DType::Bf16);
    run(&wide, host(), &[1300]);
    run(&spec(40, 24, 1, 1), CpuIsa::Portable, &[1, 6, 13, 700]);
}

/// So deep that AMX tiles need slices, and gradients that are written past the
/// caches where rows of a matrix are whole vectors.
#[test]
fn deep_products_and_large_gradients() {
    let odd = typed(spec(2101, 1063, 1, 1), DType::Bf16, DType::Bf16);
    run(&odd, host(), &[40]);
    let large = spec(2112, 1072, 4, 1);
    run(&large, host(), &[33]);
    run(&typed(large, DType::Bf16, DType::Bf16), host(), &[33]);
}

/// Gradients of experts' rows that tiles write past the caches: 32 MiB.
#[test]
fn large_results() {
    let large = typed(spec(2048, 32, 4, 4), DType::Bf16, DType::Bf16);
    run(&large, host(), &[2800]);
}

#[test]
fn experts() {
    variants(&specs::EXPERTS);
}

#[test]
fn shared_and_identity_experts() {
    variants(&[|s| {
        let shared = |gate| specs::shared(9, gate);
        s.shared = vec![shared(SharedGate::Sigmoid), shared(SharedGate::None)];
        s.experts.bias = true.into();
        s.experts.identity = 2;
        s.experts.zero = 1;
    }]);
}

#[test]
fn capacities() {
    variants(&specs::DROPS);
}

#[test]
fn recomputing_gives_the_same_bits() {
    let run = |recompute| {
        let harness = Harness::training(&specs::busy(), host(), 2, Training { recompute });
        harness.train(300, &[0])
    };
    let kept = run(Recompute::None);
    for recompute in [Recompute::Hidden, Recompute::All] {
        let other = run(recompute);
        assert_eq!(other.gradients(), kept.gradients(), "{recompute:?}");
    }
}

#[test]
fn threads_give_the_same_bits() {
    let run = |threads| {
        let harness = Harness::training(&specs::busy(), host(), threads, Training::default());
        harness.train(300, &[0])
    };
    let one = run(1);
    assert_eq!(run(2).gradients(), one.gradients());
    assert_eq!(run(5).gradients(), one.gradients());
}

#[test]
fn gradients_add_up() {
    for tokens in [0, 200] {
        let harness = Harness::training(&specs::busy(), host(), 2, Training::default());
        let once = harness.train(tokens, &[0]);
        let twice = harness.train(tokens, &[0, 1]);
        let weights = harness
            .plan
            .tensors
            .iter()
            .filter(|t| t.role == moesaic_plan::TensorRole::WeightGradient);
        for tensor in weights {
            let doubled: Vec<f64> = once.get(&tensor.name).iter().map(|v| 2.0 * v).collect();
            assert_eq!(twice.get(&tensor.name), doubled, "{}", tensor.name);
        }
    }
}

#[test]
fn experts_without_rows_get_zeros() {
    for dropped in [false, true] {
        let spec = with(typed(spec(20, 30, 5, 2), DType::F32, DType::F32), |s| {
            s.shared.clear();
        });
        let harness = Harness::training(&spec, host(), 2, Training::default());
        let mut input = harness.random_input(90, 3);
        let routing = input.routing.as_mut().unwrap();
        routing.0.fill(if dropped { -1 } else { 3 });
        let tensors = harness.run_training(&input, &harness.random_dy(90), &[0]);
        backward::all(&harness, &tensors, "one expert");
        let grad = tensors.get("grad.experts.up.weight");
        let touched: Vec<bool> = grad
            .chunks(20 * 30)
            .map(|m| m.iter().any(|v| *v != 0.0))
            .collect();
        let want: Vec<bool> = (0..5).map(|e| e == 3 && !dropped).collect();
        assert_eq!(touched, want);
        if dropped {
            assert!(tensors.get("dx").iter().all(|v| *v == 0.0));
        }
    }
}
