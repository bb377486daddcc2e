//! The products of few rows on the PTX interpreter, against the reference, and what they
//! read and write.

use moesaic_kernel::DType::{self, Bf16, F16, F32};
use moesaic_plan::PlanOptions;
use moesaic_rig::Rig;
use moesaic_rig::gemm::Gemms;
use moesaic_rig::rows::Spread;
use moesaic_rig::specs::layer;
use moesaic_spec::*;

/// The products of a layer on a simulated A100, each in two kernels.
fn gemms(spec: &LayerSpec) -> Gemms {
    let options = PlanOptions::default();
    let gemms = Gemms::planned(spec, "sim:sm_80", &options, Rig::of);
    let pairs = gemms.rig.families();
    let few = pairs.chunks(2).all(|pair| pair == ["mma_few", "mma"]);
    assert!(few, "{pairs:?} of {spec:?}");
    gemms
}

/// Widths of whole chunks of 16 bytes and of parts; columns with a tail; counts below, at
/// and above each height, and more than one tile of one expert.
#[test]
fn widths_and_heights() {
    let cases = [
        ([8, 16, 24], [1, 1], Bf16),
        ([40, 70, 72], [3, 3], F16),
        ([200, 266, 10], [60, 1], Bf16),
        ([66, 38, 6], [7, 2], F16),
        ([65, 41, 7], [3, 2], F32),
        ([264, 40, 264], [8, 8], F32),
    ];
    for (shape, experts, dtype) in cases {
        let gemms = gemms(&layer(shape, experts, dtype));
        for tokens in [0, 1, 9, 33, 64, 70] {
            gemms.check_call(tokens, Spread::Random);
        }
        for tokens in [8, 16, 17, 32, 63, 64] {
            gemms.check_call(tokens, Spread::One);
        }
    }
}

#[test]
fn epilogues_are_the_reference_s() {
    for (i, dtype) in [Bf16, F16, F32, Bf16].into_iter().enumerate() {
        let mut spec = layer([72, 42, 66], [[3, 2], [40, 1]][i % 2], dtype);
        spec.experts.activation =
            [Activation::Silu, Activation::Gelu, Activation::Relu2][i % 3].clone();
        spec.experts.form = [ExpertForm::Gated, ExpertForm::Plain][i / 2 % 2];
        spec.experts.bias = (i != 1).into();
        spec.router.weight_on = [
            WeightSite::Activation,
            WeightSite::Output,
            WeightSite::Input,
        ][i % 3];
        if i < 2 {
            spec.experts.clamp = Some(0.4);
            spec.experts.up_offset = 1.0;
        }
        gemms(&spec).check_call(33, Spread::Random);
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
        }];
        let gemms = gemms(&spec);
        for tokens in [0, 1, 64] {
            gemms.check_call(tokens, Spread::Random);
        }
    }
}

/// A row has the same bits wherever it lies among the rows of its expert.
#[test]
fn rows_lie_anywhere() {
    for (experts, dtype) in [([8, 2], Bf16), ([60, 1], F16), ([8, 2], F32)] {
        let spec = layer([72, 40, 72], experts, dtype);
        let gemms = gemms(&spec);
        gemms.check_anywhere(60);
    }
}

/// Weights are read once, whatever the height, and rows once for 16 lines of weights; requests
/// are 16 bytes wide, and no banks conflict.
#[test]
fn weights_are_read_once() {
    for (dtype, tokens) in [(Bf16, 1), (Bf16, 30), (F16, 64), (F32, 8)] {
        let spec = layer([256, 192, 320], [2, 1], dtype);
        let gemms = gemms(&spec);
        gemms.check_call(tokens, Spread::One);
        let counters = gemms.rig.take_counters();
        let products = [[2, 256, 192], [1, 192, 320]];
        assert_eq!(
            counters.len(),
            products.len(),
            "kernels of many are not launched"
        );
        for (counters, [matrices, inner, outer]) in counters.iter().zip(products) {
            check(dtype, tokens as u64, counters, [matrices, inner, outer]);
        }
    }
}

fn check(
    dtype: DType,
    tokens: u64,
    counters: &moesaic_target::KernelCounters,
    [matrices, inner, outer]: [u64; 3],
) {
    let what = format!("{dtype}, {tokens} tokens: {counters:?}");
    let (line, blocks) = (inner * dtype.size() as u64, outer * matrices / 16);
    let loads = line * (matrices * outer + blocks * tokens);
    let got = counters.global_loads.bytes;
    // Beside these a block's threads read where its rows are.
    let beside = counters.blocks * 1024 + blocks * 8 * tokens.next_multiple_of(64);
    assert!(
        (loads..loads + beside).contains(&got),
        "{loads} bytes: {what}"
    );
    let stores = tokens * outer * dtype.size() as u64;
    assert_eq!(counters.global_stores.bytes, stores, "{what}");
    let wide = counters.global_widths[4] * 16 * 32;
    assert!(
        wide >= loads,
        "{loads} bytes by requests of 16 a lane: {what}"
    );
    assert_eq!(counters.shared.bank_conflicts(), 0, "{what}");
}
