//! The matrix-core GEMMs of AMD on this CPU, lane by lane, against the
//! reference: routing is made up here, so that rows lie as a test wants.

use moesaic_harness::Harness;
use moesaic_harness::gemm::Gemms;
use moesaic_harness::rows::Spread;
use moesaic_harness::specs::{endings, layer};
use moesaic_kernel::DType;
use moesaic_spec::*;

pub const MFMA: [&str; 3] = ["rocm:gfx90a", "rocm:gfx942", "rocm:gfx950"];
pub const WMMA: [&str; 2] = ["rocm:gfx1100", "rocm:gfx1101"];

fn family(target: &str) -> &'static str {
    if MFMA.contains(&target) {
        "mfma"
    } else {
        "wmma"
    }
}

/// The GEMMs of a layer, all on matrix cores.
fn gemms(spec: &LayerSpec, target: &str) -> Gemms {
    let gemms = Gemms::new(spec, target, Harness::of);
    let all = gemms.harness.families();
    let on_unit = all.iter().all(|name| *name == family(target));
    assert!(on_unit, "{all:?} for {target}");
    gemms
}

fn run(spec: &LayerSpec, target: &str, calls: &[(usize, Spread)]) {
    let gemms = gemms(spec, target);
    for &(tokens, spread) in calls {
        gemms.check_call(tokens, spread);
    }
}

/// Widths that no tile divides, odd ones among them, over all numbers of
/// experts: with both heights of a tile.
fn widths(targets: &[&str], types: &[DType], cases: &[([usize; 3], [usize; 2])]) {
    let calls = [0, 1, 33, 200].map(|tokens| (tokens, Spread::Random));
    for (i, &(shape, experts)) in cases.iter().enumerate() {
        let spec = layer(shape, experts, types[i % types.len()]);
        run(&spec, targets[i / types.len() % targets.len()], &calls);
    }
}

#[test]
fn mfma_of_any_width() {
    use DType::{Bf16, F16, F32};
    let cases = [
        ([8, 63, 264], [1, 1]),
        ([264, 65, 8], [3, 2]),
        ([65, 40, 63], [60, 1]),
        ([16, 264, 24], [7, 7]),
        ([200, 72, 65], [60, 1]),
        ([40, 200, 72], [8, 1]),
        ([24, 16, 40], [60, 3]),
        ([72, 8, 64], [7, 1]),
        ([64, 24, 200], [60, 1]),
    ];
    widths(&MFMA, &[Bf16, F16, F32], &cases);
}

#[test]
fn wmma_of_any_width() {
    let cases = [
        ([8, 63, 264], [1, 1]),
        ([264, 65, 8], [60, 1]),
        ([65, 200, 40], [7, 3]),
        ([72, 24, 16], [8, 8]),
    ];
    widths(&WMMA, &[DType::Bf16, DType::F16], &cases);
}

/// Between them these reach every line of the epilogue.
pub fn epilogues() -> Vec<LayerSpec> {
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
    endings([24, 36, 20], |i| [[3, 2], [40, 1]][i % 2], cases)
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
        spec.shared = vec![SharedExpert {
            hidden_dim: 65,
            gate: SharedGate::None,
            bias: None,
            clamp: None,
            activation: None,
        }];
        run(
            &spec,
            target,
            &[0, 1, 200].map(|tokens| (tokens, Spread::Random)),
        );
    }
}

/// One expert gets all rows, or most get none; and a row has the same bits
/// wherever in a tile it lies.
#[test]
fn rows_lie_anywhere() {
    for target in ["rocm:gfx942", "rocm:gfx950", "rocm:gfx1100"] {
        for experts in [[8, 2], [60, 1]] {
            let spec = layer([72, 40, 72], experts, DType::Bf16);
            gemms(&spec, target).check_anywhere(150);
        }
    }
}

/// In a low tile waves without rows multiply nothing: a wave has 64 of 128 rows by
/// MFMA, 32 by WMMA.
#[test]
fn waves_without_rows_rest() {
    let spec = layer([64, 128, 128], [1, 1], DType::Bf16);
    for (target, rows, multiplied) in [
        ("rocm:gfx942", 10, 64),
        ("rocm:gfx942", 70, 128),
        ("rocm:gfx942", 128 + 40, 128 + 64),
        ("rocm:gfx1100", 10, 32),
        ("rocm:gfx1100", 70, 96),
    ] {
        let gemms = gemms(&spec, target);
        let products = |rows: usize| {
            gemms.check_call(rows, Spread::One);
            let up = &gemms.harness.take_counters()[0];
            assert_eq!(up.symbol, "grouped_gemm_up");
            up.tensor_multiply_adds
        };
        let (whole, found) = (products(128), products(rows));
        assert_eq!(128 * found, multiplied * whole, "{target}, {rows} rows");
    }
}
