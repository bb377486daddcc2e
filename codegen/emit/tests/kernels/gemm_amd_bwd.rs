//! The backward GEMMs on AMD's matrix cores, lane by lane on this CPU,
//! against the reference.

use crate::gemm_amd::{MFMA, WMMA, epilogues};
use moesaic_harness::Harness;
use moesaic_harness::gemm_bwd::BackwardGemms;
use moesaic_harness::rows::{Rows, Spread};
use moesaic_harness::specs::layer;
use moesaic_harness::thorough::{in_turns, one_in};
use moesaic_kernel::DType;
use moesaic_plan::KernelPlan;
use moesaic_spec::*;

/// All GEMMs of experts, and of routers those whose types the unit takes.
fn products(spec: &LayerSpec, target: &str) -> BackwardGemms {
    let unit = if MFMA.contains(&target) {
        Some("mfma")
    } else {
        Some("wmma")
    };
    let wanted = |kernel: &KernelPlan| {
        let of_router = kernel.name.contains("router") || kernel.name.contains("gate_shared");
        !of_router || kernel.family() == unit
    };
    let products = BackwardGemms::new(spec, target, wanted, Harness::of);
    for kernel in &products.harness.plan.kernels {
        assert_eq!(kernel.family(), unit, "{} for {target}", kernel.name);
    }
    products
}

fn run(spec: &LayerSpec, target: &str, calls: &[(usize, Spread)]) {
    let products = products(spec, target);
    for &(tokens, spread) in calls {
        products.check(&Rows::new(spec, tokens, spread));
    }
}

/// Widths that no tile divides, odd ones among them, over all numbers of
/// experts: with both heights of a tile.
fn widths(targets: &[&str], types: &[DType], cases: &[([usize; 3], [usize; 2])]) {
    let calls = [0, 1, 33, 150].map(|tokens| (tokens, Spread::Random));
    for (i, &(shape, experts)) in cases.iter().enumerate() {
        let mut spec = layer(shape, experts, types[i % types.len()]);
        if (i / types.len()).is_multiple_of(2) {
            spec.precision.expert_gradients = spec.precision.weights;
        }
        run(&spec, targets[i / types.len() % targets.len()], &calls);
    }
}

#[test]
fn mfma_of_any_width() {
    use DType::{Bf16, F16, F32};
    let cases = [
        ([8, 63, 136], [1, 1]),
        ([136, 65, 8], [3, 2]),
        ([65, 40, 63], [60, 1]),
        ([16, 136, 24], [7, 2]),
        ([200, 72, 65], [60, 1]),
        ([40, 200, 72], [8, 1]),
        ([24, 16, 40], [60, 2]),
        ([72, 8, 64], [7, 1]),
        ([64, 24, 130], [60, 1]),
    ];
    let types = [Bf16, F16, F32];
    for (i, (shape, experts)) in one_in(4, 0, cases.into_iter().enumerate()) {
        let target = MFMA[i / types.len()];
        widths(&[target], &[types[i % types.len()]], &[(shape, experts)]);
    }
}

#[test]
fn wmma_of_any_width() {
    let cases = [
        ([8, 63, 136], [1, 1]),
        ([136, 65, 8], [60, 1]),
        ([65, 200, 40], [7, 2]),
        ([72, 24, 16], [8, 4]),
    ];
    widths(&WMMA, &[DType::Bf16, DType::F16], &cases);
}

#[test]
fn epilogues_of_mfma() {
    for (spec, target) in epilogues().iter().zip(MFMA.iter().cycle()) {
        run(spec, target, &[(33, Spread::Random)]);
    }
}

#[test]
fn epilogues_of_wmma() {
    for (spec, target) in epilogues().iter().zip(WMMA.iter().cycle()) {
        run(spec, target, &[(33, Spread::Random)]);
    }
}

#[test]
fn shared_experts_are_dense() {
    for (target, dtype) in [("rocm:gfx942", DType::F16), ("rocm:gfx1100", DType::Bf16)] {
        let mut spec = layer([40, 16, 40], [3, 2], dtype);
        spec.experts.bias = true.into();
        spec.shared = [SharedGate::None, SharedGate::Sigmoid]
            .map(|gate| SharedExpert {
                hidden_dim: 65,
                gate,
                bias: None,
                clamp: None,
                activation: None,
            })
            .to_vec();
        run(
            &spec,
            target,
            &[0, 1, 140].map(|tokens| (tokens, Spread::Random)),
        );
    }
}

/// One expert gets all rows, or most get none, whose gradients are zeros.
#[test]
fn rows_lie_anywhere() {
    let targets = ["rocm:gfx942", "rocm:gfx950", "rocm:gfx1100"];
    for (n, target) in targets.into_iter().enumerate() {
        for experts in in_turns(n, [[8, 2], [60, 1]]) {
            let spec = layer([72, 40, 72], experts, DType::Bf16);
            let calls = [Spread::One, Spread::Sparse].map(|spread| (150, spread));
            run(&spec, target, &calls);
        }
    }
}

/// Gradients that are subnormal in f16 count in full, also where products of f16 take such numbers
/// for zero (gfx90a, which the simulator does as well).
#[test]
fn small_gradients_are_not_lost() {
    for (n, target) in MFMA.into_iter().enumerate() {
        for experts in in_turns(n, [[8, 2], [60, 1]]) {
            let spec = layer([72, 40, 72], experts, DType::F16);
            let products = products(&spec, target).with_gradients(0.5f64.powi(16));
            products.check_alone(&Rows::new(&spec, 40, Spread::Random));
        }
    }
}
