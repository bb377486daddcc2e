//! The backward products on AMD's matrix units, lane by lane on this CPU,
//! against the reference.

use crate::gemms_bwd::{Call, Products, Spread, layer};
use crate::gpu_host;
use moesaic_kernel::{DType, Stem};
use moesaic_plan::{KernelPlan, LayerPlan};
use moesaic_spec::*;
use moesaic_target::{Device, Module};
use std::sync::Arc;

const MFMA: [&str; 3] = ["rocm:gfx90a", "rocm:gfx942", "rocm:gfx950"];
const WMMA: [&str; 2] = ["rocm:gfx1100", "rocm:gfx1101"];
const STEMS: [Stem; 3] = [
    Stem::GroupedGemm,
    Stem::GroupedGemmDgrad,
    Stem::GroupedGemmWgrad,
];

fn load(plan: &LayerPlan) -> (Arc<dyn Device>, Vec<Arc<dyn Module>>) {
    let device = gpu_host::device(plan);
    let modules = gpu_host::modules_of(plan, &device, &STEMS);
    (Arc::new(device), modules)
}

/// All products of experts, and of routers those whose types the unit takes.
fn products(spec: &LayerSpec, target: &str) -> Products {
    let unit = if MFMA.contains(&target) {
        Some("mfma")
    } else {
        Some("wmma")
    };
    let wanted = |kernel: &KernelPlan| {
        let of_router = kernel.name.contains("router") || kernel.name.contains("gate_shared");
        !of_router || kernel.family() == unit
    };
    let products = Products::new(spec, target, wanted, load);
    for kernel in &products.plan.kernels {
        assert_eq!(kernel.family(), unit, "{} for {target}", kernel.name);
    }
    products
}

fn run(spec: &LayerSpec, target: &str, calls: &[(usize, Spread)]) {
    let products = products(spec, target);
    for &(tokens, spread) in calls {
        let call = Call::new(spec, tokens, spread);
        products.check(&call, &products.run(&call));
    }
}

/// Widths that no tile divides, odd ones among them, over all numbers of
/// experts: with both heights of a tile.
fn widths(targets: &[&str], types: &[DType], cases: &[([usize; 3], [usize; 2])]) {
    let calls = [0, 1, 33, 150].map(|tokens| (tokens, Spread::Random));
    for (i, &(shape, experts)) in cases.iter().enumerate() {
        let spec = layer(shape, experts, types[i % types.len()]);
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
    widths(&MFMA, &[Bf16, F16, F32], &cases);
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

/// Between them these reach every line of the epilogue.
fn epilogues() -> Vec<LayerSpec> {
    use Activation::{Gelu, GeluTanh, Relu, Relu2, Silu};
    let cases = [
        (Silu, ExpertForm::Gated, WeightSite::Output, DType::Bf16),
        (Gelu, ExpertForm::Plain, WeightSite::Input, DType::F16),
        (
            GeluTanh,
            ExpertForm::Gated,
            WeightSite::Activation,
            DType::F16,
        ),
        (Relu, ExpertForm::Plain, WeightSite::Activation, DType::Bf16),
        (Relu2, ExpertForm::Gated, WeightSite::Input, DType::Bf16),
    ];
    let specs = cases.into_iter().enumerate();
    let specs = specs.map(|(i, (activation, form, site, dtype))| {
        let experts = if i % 2 == 0 { [3, 2] } else { [40, 1] };
        let mut spec = layer([24, 36, 20], experts, dtype);
        if activation == Silu {
            spec.experts.alpha = 1.702;
        }
        spec.experts.activation = activation;
        spec.experts.form = form;
        spec.experts.bias = (i != 4).into();
        spec.router.weight_on = site;
        if i % 2 == 0 {
            spec.experts.clamp = Some(0.4);
            spec.experts.up_offset = 1.0;
        }
        spec
    });
    specs.collect()
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
    for target in ["rocm:gfx942", "rocm:gfx950", "rocm:gfx1100"] {
        for experts in [[8, 2], [60, 1]] {
            let spec = layer([72, 40, 72], experts, DType::Bf16);
            let calls = [Spread::One, Spread::Sparse].map(|spread| (150, spread));
            run(&spec, target, &calls);
        }
    }
}
