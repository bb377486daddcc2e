//! Backward GEMMs by `mma.sync` on the PTX interpreter, against f64. Copies
//! arrive late there, and memory that nobody wrote is an error.

use moesaic_harness::Harness;
use moesaic_harness::gemm_bwd::BackwardGemms;
use moesaic_harness::rows::{Rows, Spread};
use moesaic_harness::specs::{endings, layer};
use moesaic_kernel::DType::{self, Bf16, F16, F32};
use moesaic_spec::*;

/// The backward GEMMs of a layer on a simulated A100 that are of this family:
/// four of them at least.
fn matrix(spec: &LayerSpec) -> BackwardGemms {
    let grads = BackwardGemms::new(
        spec,
        "sim:sm_80",
        |k| k.family() == Some("mma"),
        Harness::of,
    );
    let families = grads.harness.families();
    assert!(families.len() >= 4, "{families:?} of {spec:?}");
    grads
}

fn run_all(cases: &[([usize; 3], [usize; 2])], dtypes: &[DType]) {
    for (i, (&(shape, experts), &dtype)) in cases.iter().zip(dtypes.iter().cycle()).enumerate() {
        let mut spec = layer(shape, experts, dtype);
        // Gradients of every other pair of layers have 16 bits.
        if i % 4 < 2 {
            spec.precision.expert_gradients = dtype;
        }
        let grads = matrix(&spec);
        for tokens in [0, 1, 33, 90] {
            grads.check_alone(&Rows::new(&spec, tokens, Spread::Gaps));
        }
    }
}

/// Widths with and without tails, below, at and above a tile.
#[test]
fn widths_of_whole_chunks() {
    let cases = [
        ([8, 16, 24], [1, 1]),
        ([40, 64, 72], [3, 3]),
        ([200, 136, 8], [17, 1]),
        ([64, 72, 200], [7, 2]),
    ];
    run_all(&cases, &[Bf16, F16]);
}

/// Widths that only copies of 8 or 4 bytes divide.
#[test]
fn widths_of_parts_of_chunks() {
    let cases = [
        ([66, 36, 62], [3, 1]),
        ([12, 130, 66], [17, 1]),
        ([2, 4, 2], [1, 1]),
    ];
    run_all(&cases, &[F16, Bf16]);
}

#[test]
fn widths_of_f32() {
    let cases = [
        ([8, 63, 24], [1, 1]),
        ([65, 136, 40], [3, 2]),
        ([72, 16, 65], [17, 1]),
        ([1, 2, 3], [7, 7]),
    ];
    run_all(&cases, &[F32]);
}

/// Between them these reach every line of what becomes of a sum.
fn epilogues() -> Vec<LayerSpec> {
    use Activation::{Gelu, GeluTanh, Relu, Relu2, Silu};
    use ExpertForm::{Gated, Plain};
    let cases = [
        (Silu, Gated, WeightSite::Output, Bf16),
        (Gelu, Plain, WeightSite::Input, F16),
        (GeluTanh, Gated, WeightSite::Activation, F32),
        (Relu, Plain, WeightSite::Activation, Bf16),
        (Relu2, Gated, WeightSite::Input, F32),
        (Silu, Plain, WeightSite::Output, F16),
    ];
    endings([72, 42, 66], |i| [[3, 2], [40, 1]][i / 2 % 2], cases)
}

#[test]
fn epilogues_are_those_of_f64() {
    for spec in epilogues() {
        matrix(&spec).check_alone(&Rows::new(&spec, 33, Spread::Gaps));
    }
}

#[test]
fn shared_experts_are_dense() {
    for gate in [SharedGate::None, SharedGate::Sigmoid] {
        let mut spec = layer([72, 16, 72], [3, 2], Bf16);
        spec.experts.bias = true.into();
        spec.shared = vec![SharedExpert {
            hidden_dim: 136,
            gate,
            bias: None,
            clamp: None,
            activation: None,
        }];
        let grads = matrix(&spec);
        assert!(
            grads.harness.families().len() >= 8,
            "{:?}",
            grads.harness.families()
        );
        for tokens in [0, 1, 70] {
            grads.check_alone(&Rows::new(&spec, tokens, Spread::Gaps));
        }
    }
}

/// One expert has all the rows.
#[test]
fn the_others_get_zeros() {
    let spec = layer([72, 40, 72], [8, 2], Bf16);
    matrix(&spec).check_alone(&Rows::new(&spec, 100, Spread::One));
}

/// One product of tf32 has the error of its 11 bits.
#[test]
fn tf32_rounds_factors() {
    let mut spec = layer([72, 40, 72], [3, 2], F32);
    spec.precision.tf32 = true;
    matrix(&spec).check_alone(&Rows::new(&spec, 40, Spread::Gaps));
}

/// No bank conflicts; factors are read once per tile that needs them, beside
/// some indices; results leave in whole sectors.
#[test]
fn traffic_is_what_it_has_to_be() {
    for dtype in [Bf16, F32] {
        let spec = layer([256, 128, 256], [2, 1], dtype);
        let grads = matrix(&spec);
        grads.check_alone(&Rows::new(&spec, 96, Spread::One));
        for counters in grads.harness.take_counters() {
            let what = format!("{dtype}: {counters:?}");
            assert_eq!(counters.shared.bank_conflicts(), 0, "{what}");
            let stores = counters.global_stores;
            if counters.symbol != "grouped_gemm_dgrad_down" {
                assert_eq!(stores.sectors * 32, stores.bytes, "{what}");
            }
        }
    }
}
