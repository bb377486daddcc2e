//! The `mma.sync` GEMM on the PTX interpreter, against the reference. Copies
//! arrive late there, and memory that nobody wrote is an error.

use moesaic_harness::Harness;
use moesaic_harness::gemm::Gemms;
use moesaic_harness::rows::Spread;
use moesaic_harness::specs::{endings, layer};
use moesaic_kernel::DType::{self, Bf16, F16, F32};
use moesaic_plan::{GemmFamily, LayerPlan};
use moesaic_spec::*;

/// The GEMMs of a layer on a simulated A100.
fn gemms(spec: &LayerSpec) -> Gemms {
    Gemms::new(spec, "sim:sm_80", Harness::of)
}

/// The GEMMs of a layer, which are all of this family.
fn matrix(spec: &LayerSpec) -> Gemms {
    let gemms = gemms(spec);
    let families = gemms.harness.families();
    assert!(
        families.iter().all(|f| *f == "mma"),
        "{families:?} of {spec:?}"
    );
    gemms
}

fn run_all(cases: &[([usize; 3], [usize; 2])], dtypes: &[DType]) {
    for (&(shape, experts), &dtype) in cases.iter().zip(dtypes.iter().cycle()) {
        let gemms = matrix(&layer(shape, experts, dtype));
        for tokens in [0, 1, 33, 200] {
            gemms.check_call(tokens, Spread::Random);
        }
    }
}

/// Widths with and without tails, below, at and above a tile; experts and
/// top-k for both heights of a tile.
#[test]
fn widths_of_whole_chunks() {
    let cases = [
        ([8, 16, 24], [1, 1]),
        ([40, 64, 72], [3, 3]),
        ([200, 264, 8], [60, 1]),
        ([64, 72, 200], [7, 2]),
        ([264, 40, 264], [8, 8]),
        ([16, 200, 40], [60, 4]),
    ];
    run_all(&cases, &[Bf16, F16]);
}

/// Inner widths that only copies of 8 or 4 bytes divide, and outer widths
/// whose rows are stored two elements at a time, or one.
#[test]
fn widths_of_parts_of_chunks() {
    let cases = [
        ([66, 36, 63], [3, 1]),
        ([12, 130, 65], [60, 1]),
        ([2, 4, 1], [1, 1]),
        ([202, 68, 66], [8, 3]),
    ];
    run_all(&cases, &[F16, Bf16]);
}

#[test]
fn widths_of_f32() {
    let cases = [
        ([8, 63, 24], [1, 1]),
        ([65, 264, 40], [3, 2]),
        ([72, 16, 65], [60, 1]),
        ([1, 2, 3], [7, 7]),
        ([200, 66, 64], [8, 1]),
    ];
    run_all(&cases, &[F32]);
}

/// Between them these reach every line of the epilogue.
fn epilogues() -> Vec<LayerSpec> {
    use Activation::{Gelu, GeluTanh, Relu, Relu2, Silu};
    use ExpertForm::{Gated, Plain};
    let cases = [
        (Silu, Gated, WeightSite::Output, Bf16),
        (Gelu, Plain, WeightSite::Input, F16),
        (GeluTanh, Gated, WeightSite::Activation, F32),
        (Relu, Plain, WeightSite::Activation, Bf16),
        (Relu2, Gated, WeightSite::Input, F32),
        (Silu, Plain, WeightSite::Activation, F16),
    ];
    endings([72, 42, 65], |i| [[3, 2], [40, 1]][i / 2 % 2], cases)
}

#[test]
fn epilogues_are_the_reference_s() {
    for spec in epilogues() {
        matrix(&spec).check_call(33, Spread::Random);
    }
}

#[test]
fn shared_experts_are_dense() {
    for dtype in [Bf16, F32] {
        let mut spec = layer([72, 16, 72], [3, 2], dtype);
        spec.experts.bias = true.into();
        spec.shared = vec![SharedExpert {
            hidden_dim: 136,
            gate: SharedGate::None,
            bias: None,
            clamp: None,
            activation: None,
        }];
        let gemms = matrix(&spec);
        for tokens in [0, 1, 150] {
            gemms.check_call(tokens, Spread::Random);
        }
    }
}

/// One expert gets all rows, or most get none; and a row has the same bits
/// wherever in a tile it lies.
#[test]
fn rows_lie_anywhere() {
    for (experts, dtype) in [([8, 2], Bf16), ([60, 1], F16), ([8, 2], F32)] {
        let spec = layer([72, 40, 72], experts, dtype);
        let gemms = matrix(&spec);
        gemms.check_anywhere(150);
    }
}

/// Only the weight on the input needs rows to be dispatched.
#[test]
fn rows_are_gathered() {
    let mut spec = layer([16, 16, 16], [3, 2], Bf16);
    assert!(matrix(&spec).harness.plan.tensor("rows").is_none());
    spec.router.weight_on = WeightSite::Input;
    assert!(matrix(&spec).harness.plan.tensor("rows").is_some());
}

/// A half whose rows have odd widths stays with SIMT; both halves still share
/// one list of row tiles.
#[test]
fn a_half_of_odd_width_falls_back() {
    for (shape, experts) in [([72, 65, 40], [3, 2]), ([65, 72, 40], [60, 1])] {
        let gemms = gemms(&layer(shape, experts, F16));
        let families = gemms.harness.families();
        let matrix = families.iter().filter(|f| **f == "mma");
        assert_eq!(matrix.count(), 1, "{families:?}");
        gemms.check_call(70, Spread::Random);
    }
}

/// Three products of tf32 are nearly as good as one of f32.
#[test]
fn split_products_are_near_those_of_f32() {
    let spec = layer([520, 392, 520], [3, 2], F32);
    let error = |gemms: Gemms| gemms.error(20, Spread::Random);
    let split = error(matrix(&spec));
    let simt = error(Gemms::new(&spec, "sim:sm_75", Harness::of));
    assert!(split <= 4.0 * simt, "{split:e} against {simt:e}");
}

/// One product of tf32 has the error of its 11 bits.
#[test]
fn tf32_rounds_factors() {
    let spec = layer([72, 40, 72], [3, 2], F32);
    let gemms = Gemms::new(&spec, "sim:sm_80", |plan| Harness::of(with_tf32(plan)));
    let error = gemms.error(20, Spread::Random);
    assert!((1e-5..5e-3).contains(&error), "{error:e}");
}

fn with_tf32(mut plan: LayerPlan) -> LayerPlan {
    for kernel in &mut plan.kernels {
        if let Some(config) = kernel.op.gemm_mut()
            && let GemmFamily::Mma { tf32, .. } = &mut config.family
        {
            *tf32 = true;
        }
    }
    plan
}

/// No bank conflicts; weights are read once per row tile and rows once per
/// column tile, beside some indices; results are written in whole sectors; rows are
/// multiplied 16 at a time.
#[test]
fn traffic_is_what_it_has_to_be() {
    for (dtype, tile_rows) in [(Bf16, 128), (F32, 64)] {
        let spec = layer([256, 192, 320], [2, 1], dtype);
        let gemms = matrix(&spec);
        gemms.check_call(100, Spread::One);
        let counters = gemms.harness.take_counters();
        for (counters, [matrices, inner, outer]) in
            counters.iter().zip([[2, 256, 192], [1, 192, 320]])
        {
            let what = format!("{dtype}: {counters:?}");
            assert_eq!(counters.shared.bank_conflicts(), 0, "{what}");
            let row_tiles = 100_u64.div_ceil(tile_rows);
            let column_tiles = u64::div_ceil(outer, 128 / matrices);
            let line = inner * dtype.size() as u64;
            let loads = line * (row_tiles * matrices * outer + column_tiles * 100);
            let got = counters.global_loads.bytes;
            assert!(
                (loads..loads + loads / 8).contains(&got),
                "{loads} bytes: {what}"
            );
            let stores = 100 * outer * dtype.size() as u64;
            assert_eq!(counters.global_stores.bytes, stores, "{what}");
            assert_eq!(counters.global_stores.sectors * 32, stores, "{what}");
            // Of 100 rows 112 are multiplied, whatever the height of a tile.
            let products = if dtype == F32 { 3 } else { 1 };
            let multiplied = products * 112 * inner * matrices * outer;
            assert_eq!(counters.tensor_multiply_adds, multiplied, "{what}");
        }
    }
}
