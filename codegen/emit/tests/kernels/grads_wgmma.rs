//! Backward GEMMs by `wgmma` on the PTX interpreter, against f64. TMA
//! and `wgmma` run late there, by delays that depend on a seed.

use moesaic_harness::Harness;
use moesaic_harness::gemm_bwd::BackwardGemms;
use moesaic_harness::rows::{Rows, Spread};
use moesaic_harness::specs::{endings, layer};
use moesaic_kernel::DType::{self, Bf16, F16};
use moesaic_spec::*;

/// The backward GEMMs of a layer on a simulated H100 that are of this family:
/// four of them at least.
fn hopper(spec: &LayerSpec, seed: u64) -> BackwardGemms {
    let grads = BackwardGemms::new(
        spec,
        "sim:sm_90a",
        |kernel| kernel.family() == Some("wgmma"),
        |plan| Harness::late(plan, seed),
    );
    let families = grads.harness.families();
    assert!(families.len() >= 4, "{families:?} of {spec:?}");
    grads
}

/// Widths with and without tails, below, at and above a tile.
#[test]
fn any_width_that_tma_takes() {
    let cases = [
        ([64, 40, 136], [1, 1]),
        ([72, 264, 64], [3, 2]),
        ([128, 8, 264], [8, 8]),
        ([200, 136, 40], [40, 1]),
    ];
    for (i, (shape, experts)) in cases.into_iter().enumerate() {
        let dtype: DType = [Bf16, F16][i % 2];
        let mut spec = layer(shape, experts, dtype);
        // Gradients of every other pair of layers have 16 bits.
        if i % 4 < 2 {
            spec.precision.expert_gradients = dtype;
        }
        let grads = hopper(&spec, i as u64);
        for tokens in [0, 1, 33, 150] {
            grads.check_alone(&Rows::new(&spec, tokens, Spread::Gaps));
        }
    }
}

/// Between them these reach every line of what becomes of a sum.
fn epilogues() -> Vec<LayerSpec> {
    use Activation::{Gelu, GeluTanh, Relu, Relu2, Silu};
    use ExpertForm::{Gated, Plain};
    let cases = [
        (Silu, Gated, WeightSite::Output, Bf16),
        (Gelu, Plain, WeightSite::Input, F16),
        (GeluTanh, Gated, WeightSite::Activation, F16),
        (Relu, Plain, WeightSite::Activation, Bf16),
        (Relu2, Gated, WeightSite::Input, Bf16),
        (Silu, Plain, WeightSite::Output, F16),
    ];
    endings([72, 40, 64], |i| [[3, 2], [40, 1]][i / 2 % 2], cases)
}

#[test]
fn epilogues_are_those_of_f64() {
    for spec in epilogues() {
        hopper(&spec, 1).check_alone(&Rows::new(&spec, 33, Spread::Gaps));
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
        let grads = hopper(&spec, 2);
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
    hopper(&spec, 3).check_alone(&Rows::new(&spec, 100, Spread::One));
}

/// The ring turns more than twice, under many delays, to the same bits.
#[test]
fn results_do_not_depend_on_delays() {
    let spec = layer([456, 328, 64], [2, 1], Bf16);
    let run = |seed| -> Vec<u64> {
        let values = hopper(&spec, seed).check_alone(&Rows::new(&spec, 330, Spread::One));
        values
            .iter()
            .flat_map(|v| v.values())
            .flatten()
            .map(|v| v.to_bits())
            .collect()
    };
    let first = run(0);
    for seed in 1..3 {
        assert!(first == run(seed), "seed {seed} gives other bits");
    }
}

/// No two accesses meet in a bank, and results leave in whole sectors.
#[test]
fn full_tiles_waste_nothing() {
    let spec = layer([256, 128, 256], [1, 1], Bf16);
    let grads = hopper(&spec, 5);
    grads.check_alone(&Rows::new(&spec, 128, Spread::One));
    for counters in grads.harness.take_counters() {
        let what = format!("{counters:?}");
        assert_eq!(counters.shared.bank_conflicts(), 0, "{what}");
        let stores = counters.global_stores;
        if counters.symbol != "grouped_gemm_dgrad_down" {
            assert_eq!(stores.sectors * 32, stores.bytes, "{what}");
        }
    }
}
