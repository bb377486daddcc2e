//! The GEMMs of a shared expert, of few rows and of many: in the launch of the routed
//! experts' where both are alike, else in a launch of their own.

use crate::gemm_amd::MFMA;
use moesaic_harness::Harness;
use moesaic_harness::gemm::Gemms;
use moesaic_harness::rows::Spread;
use moesaic_harness::specs::{layer, with};
use moesaic_harness::thorough::in_turns;
use moesaic_kernel::DType::{self, Bf16, F16, F32};
use moesaic_plan::{Op, PlanOptions};
use moesaic_spec::*;

/// A layer whose experts have `hidden` columns, the shared one `shared`.
fn shared(dtype: DType, experts: [usize; 2], [hidden, shared]: [usize; 2]) -> LayerSpec {
    with(layer([72, hidden, 72], experts, dtype), |s| {
        s.shared = vec![SharedExpert {
            hidden_dim: shared,
            gate: SharedGate::None,
            bias: None,
            clamp: None,
            activation: None,
        }];
    })
}

fn gemms(spec: &LayerSpec, target: &str) -> Gemms {
    Gemms::planned(spec, target, &PlanOptions::default(), Harness::of)
}

/// The decode kernels and of many: launches, and how many of them have a shared expert.
fn launches(gemms: &Gemms) -> [[usize; 2]; 2] {
    let mut launches = [[0; 2]; 2];
    for kernel in &gemms.harness.plan.kernels {
        if let Op::GroupedGemm { desc, config } = &kernel.op {
            let many = !config.family.name().ends_with("_decode");
            launches[many as usize][0] += 1;
            launches[many as usize][1] += desc.fused_shared.is_some() as usize;
        }
    }
    launches
}

/// Checks the results of calls of few and of many tokens, which have so many launches each, and
/// so many with a shared expert.
fn check(spec: &LayerSpec, target: &str, expected: [usize; 2]) {
    let gemms = gemms(spec, target);
    assert_eq!(launches(&gemms), [expected; 2], "{target}: {spec:?}");
    for tokens in [0, 1, 9, 33, 64, 70, 200] {
        gemms.check_call(tokens, Spread::Random);
    }
    for tokens in [8, 17, 64, 150] {
        gemms.check_call(tokens, Spread::One);
    }
}

/// Widths alike, wider than the routed experts' and narrower; tails of columns; one piece of
/// a line and several.
#[test]
fn it_comes_along() {
    let nvidia = ["sim:sm_80", "sim:sm_90a"].into_iter();
    for (i, target) in nvidia.chain(MFMA).enumerate() {
        for (j, dtype) in in_turns(i, [Bf16, F16, F32].into_iter().enumerate()) {
            let widths = [[24, 24], [16, 136], [136, 40], [40, 24]][(i + j) % 4];
            let spec = with(shared(dtype, [3, 2], widths), |s| {
                s.experts.form = [ExpertForm::Gated, ExpertForm::Plain][(i + j) % 2];
                s.experts.bias = (j == 1).into();
            });
            check(&spec, target, [2, 2]);
        }
    }
}

/// Rows in pieces of 8, 4 and 2 bytes.
#[test]
fn pieces_can_be_small() {
    check(&shared(Bf16, [5, 1], [20, 12]), "sim:sm_80", [2, 2]);
    check(&shared(F32, [5, 3], [17, 3]), "sim:sm_80", [2, 2]);
    check(&shared(F16, [5, 1], [7, 33]), "rocm:gfx942", [2, 2]);
}

/// Pieces of other lengths, biases of one kind alone, rows with weights in front of them or
/// behind, a product of another unit's order: each has launches of its own.
#[test]
fn what_is_unlike_stays_apart() {
    let like = || shared(Bf16, [3, 2], [24, 24]);
    let biased = with(like(), |s| s.shared[0].bias = Some(true.into()));
    let weighted = |site| with(like(), |s| s.router.weight_on = site);
    check(&shared(Bf16, [3, 2], [24, 28]), "sim:sm_80", [4, 0]);
    check(&biased, "sim:sm_80", [4, 0]);
    let limited = with(like(), |s| s.shared[0].clamp = Some(0.5));
    check(&limited, "sim:sm_80", [4, 0]);
    // Down products would be alike, but read what up products write.
    check(&weighted(WeightSite::Activation), "sim:sm_80", [4, 0]);
    check(&weighted(WeightSite::Input), "sim:sm_80", [4, 0]);
    // Few of many experts: waves of 32 rows have the smaller instruction.
    check(&shared(F16, [60, 1], [24, 24]), "rocm:gfx942", [4, 0]);
}

/// Of several shared experts the first is fused.
#[test]
fn the_others_have_launches() {
    let spec = with(shared(Bf16, [3, 2], [24, 40]), |s| {
        let second = s.shared[0].clone();
        s.shared.push(second);
    });
    check(&spec, "sim:sm_80", [4, 2]);
}

/// More row tiles than are multiplied one after the other, of a shared expert that is wider or
/// narrower than the routed ones by whole tiles: tiles of all tokens, and then the others.
#[test]
fn many_tiles_of_both() {
    let cases = [
        ("sim:sm_80", [296, 24], 1_100),
        ("sim:sm_90a", [24, 296], 2_100),
        ("rocm:gfx942", [24, 296], 2_100),
    ];
    for (target, widths, tokens) in cases {
        let spec = shared(Bf16, [5, 1], widths);
        gemms(&spec, target).check_call(tokens, Spread::Random);
    }
}
