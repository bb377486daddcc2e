//! The Hopper GEMM on the PTX interpreter, against the reference. TMA
//! and `wgmma` run late there, by delays that depend on a seed.

use moesaic_harness::Harness;
use moesaic_harness::gemm::Gemms;
use moesaic_harness::memory::Values;
use moesaic_harness::plans::at_most;
use moesaic_harness::rows::Spread;
use moesaic_harness::specs::{endings, layer};
use moesaic_kernel::DType::{self, Bf16, F16};
use moesaic_spec::*;

const TARGET: &str = "sim:sm_90a";

/// The GEMMs of a layer on a simulated H100 whose engines are late by `seed`.
fn gemms(spec: &LayerSpec, seed: u64) -> Gemms {
    Gemms::new(spec, TARGET, |plan| Harness::late(plan, seed))
}

/// The GEMMs of a layer, which are all of this family.
fn hopper(spec: &LayerSpec, seed: u64) -> Gemms {
    let gemms = gemms(spec, seed);
    let families = gemms.harness.families();
    assert!(
        families.iter().all(|f| *f == "wgmma"),
        "{families:?} of {spec:?}"
    );
    gemms
}

/// Inner widths with and without a tail, outer widths below, at and above a
/// tile, one of them odd; experts and top-k for both heights of a tile.
#[test]
fn any_width_that_tma_takes() {
    let cases = [
        ([64, 40, 136], [1, 1]),
        ([72, 264, 65], [3, 2]),
        ([128, 8, 264], [8, 8]),
        ([200, 136, 40], [60, 1]),
        ([72, 64, 8], [60, 2]),
        ([200, 128, 64], [3, 1]),
        ([8, 72, 200], [60, 1]),
    ];
    for (i, (shape, experts)) in cases.into_iter().enumerate() {
        let dtype = [DType::Bf16, DType::F16][i % 2];
        let gemms = hopper(&layer(shape, experts, dtype), i as u64);
        for tokens in [0, 1, 33, 200] {
            gemms.check_call(tokens, Spread::Random);
        }
    }
}

/// Between them these reach every line of the epilogue.
fn epilogues() -> Vec<LayerSpec> {
    use Activation::{Gelu, GeluTanh, Relu, Relu2, Silu};
    use ExpertForm::{Gated, Plain};
    let cases = [
        (Silu, Gated, WeightSite::Output, Bf16),
        (Gelu, Plain, WeightSite::Input, Bf16),
        (GeluTanh, Gated, WeightSite::Activation, F16),
        (Relu, Plain, WeightSite::Activation, F16),
        (Relu2, Gated, WeightSite::Input, Bf16),
        (Silu, Plain, WeightSite::Activation, Bf16),
    ];
    let experts = [[3, 2], [40, 1], [3, 2], [40, 1], [3, 3], [8, 1]];
    endings([72, 40, 65], |i| experts[i], cases)
}

#[test]
fn epilogues_are_the_reference_s() {
    for spec in epilogues() {
        hopper(&spec, 1).check_call(33, Spread::Random);
    }
}

#[test]
fn shared_experts_are_dense() {
    let mut spec = layer([72, 16, 72], [3, 2], DType::Bf16);
    spec.experts.bias = true.into();
    spec.shared = vec![SharedExpert {
        hidden_dim: 136,
        gate: SharedGate::None,
        bias: None,
        clamp: None,
        activation: None,
    }];
    let gemms = hopper(&spec, 2);
    for tokens in [0, 1, 200] {
        gemms.check_call(tokens, Spread::Random);
    }
}

/// One expert gets all rows, or most get none; and a row has the same bits
/// wherever in a tile it lies.
#[test]
fn rows_lie_anywhere() {
    for experts in [[8, 2], [60, 1]] {
        let spec = layer([72, 40, 72], experts, DType::Bf16);
        let gemms = hopper(&spec, 3);
        gemms.check_anywhere(150);
    }
}

/// A block goes through several tiles, with and without rows for both warpgroups, and with a
/// ring that is longer or shorter than a tile: the same bits as by a block for each tile.
#[test]
fn blocks_go_from_tile_to_tile() {
    let mut shared = layer([72, 16, 72], [3, 2], DType::Bf16);
    shared.experts.bias = true.into();
    shared.shared = vec![SharedExpert {
        hidden_dim: 136,
        gate: SharedGate::None,
        bias: None,
        clamp: None,
        activation: None,
    }];
    let weighted = |site| {
        let mut spec = layer([200, 136, 264], [8, 8], DType::F16);
        spec.router.weight_on = site;
        spec
    };
    let specs = [
        layer([840, 136, 264], [3, 2], DType::Bf16),
        layer([64, 264, 40], [60, 1], DType::F16),
        layer([8, 304, 304], [5, 1], DType::Bf16),
        weighted(WeightSite::Input),
        weighted(WeightSite::Activation),
        shared,
    ];
    for (i, spec) in specs.iter().enumerate() {
        let seed = i as u64;
        let each = hopper(spec, seed).check_call(300, Spread::Random);
        for blocks in [[1, 7], [3, 7]][i % 2] {
            let gemms = Gemms::new(spec, TARGET, |plan| {
                Harness::late(at_most(plan, blocks), seed)
            });
            let few = gemms.check_call(300, Spread::Random);
            assert!(bits(&few) == bits(&each), "{blocks} blocks of {spec:?}");
            gemms.check_call(0, Spread::Random);
            gemms.check_call(70, Spread::Gaps);
        }
    }
}

fn bits(values: &Values) -> Vec<u64> {
    values.values().flatten().map(|v| v.to_bits()).collect()
}

/// The ring turns more than twice, under many delays, to the same bits.
#[test]
fn results_do_not_depend_on_delays() {
    let spec = layer([840, 600, 64], [3, 2], DType::Bf16);
    let first = hopper(&spec, 0).check_call(40, Spread::Random);
    for seed in 1..6 {
        let other = hopper(&spec, seed).check_call(40, Spread::Random);
        assert!(bits(&first) == bits(&other), "seed {seed} gives other bits");
    }
}

/// A half whose rows are no multiple of 16 bytes goes to another family; both
/// halves still share one list of row tiles.
#[test]
fn a_half_that_does_not_fit_falls_back() {
    for (shape, experts) in [([72, 65, 40], [3, 2]), ([65, 72, 40], [60, 1])] {
        let spec = layer(shape, experts, DType::Bf16);
        let gemms = gemms(&spec, 4);
        let families = gemms.harness.families();
        let hopper = families.iter().filter(|f| **f == "wgmma");
        assert_eq!(hopper.count(), 1, "{families:?}");
        gemms.check_call(70, Spread::Random);
    }
}

/// The cost of full tiles: every operand byte once for each tile, no conflict of
/// banks, results 16 bytes at a time in whole sectors.
#[test]
fn full_tiles_waste_nothing() {
    let (rows, inner, outer) = (256u64, 128u64, 256u64);
    let spec = layer([128, 256, 256], [1, 1], DType::Bf16);
    let gemms = hopper(&spec, 5);
    gemms.check_call(rows as usize, Spread::One);
    let up = &gemms.harness.take_counters()[0];
    assert_eq!(up.symbol, "grouped_gemm_up");
    assert_eq!(up.tensor_multiply_adds, rows * inner * 2 * outer);
    let tiles = (rows / 128) * (outer / 128);
    assert_eq!(up.async_load_bytes, tiles * 2 * 128 * inner * 2);
    // Rows are gathered, once for each tile; a thread reads up to 64 bytes more to find them.
    let (loads, gathered) = (up.global_loads.bytes, tiles * 128 * inner * 2);
    let found = tiles * 384 * 64;
    assert!((gathered..gathered + found).contains(&loads), "{loads}");
    let stores = up.global_stores;
    assert_eq!(stores.bytes, rows * outer * 2);
    assert_eq!(
        (stores.requests * 32 * 16, stores.sectors * 32),
        (stores.bytes, stores.bytes)
    );
    assert_eq!(up.shared.bank_conflicts(), 0);

    // Of a tile with few rows half is multiplied.
    gemms.check_call(128 + 40, Spread::One);
    let up = &gemms.harness.take_counters()[0];
    assert_eq!(up.tensor_multiply_adds, (128 + 64) * inner * 2 * outer);
}
