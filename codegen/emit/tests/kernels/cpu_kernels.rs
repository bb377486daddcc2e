//! The CPU kernels, stem by stem, against the reference.

use moesaic_harness::cpu::{host, isas};
use moesaic_harness::specs::{biased, spec, with};
use moesaic_harness::{Harness, check, specs};
use moesaic_kernel::{CpuIsa, DType};
use moesaic_spec::*;

fn run(spec: &LayerSpec, isa: CpuIsa, tokens: &[usize]) {
    let harness = Harness::new(spec, isa, 2);
    for (i, &tokens) in tokens.iter().enumerate() {
        let tensors = harness.run(&harness.random_input(tokens, i as u64));
        check::all(
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

fn typed(weights: DType, activations: DType) -> LayerSpec {
    biased(specs::typed(spec(70, 45, 3, 2), weights, activations))
}

#[test]
fn narrow_isas_compute_every_type() {
    for isa in isas() {
        for dtype in [DType::F32, DType::Bf16, DType::F16] {
            run(&typed(dtype, dtype), isa, &[0, 1, 70]);
        }
    }
}

#[test]
fn types_can_be_mixed() {
    run(&typed(DType::Bf16, DType::F32), host(), &[33]);
    run(&typed(DType::F32, DType::F16), host(), &[33]);
}

#[test]
fn awkward_shapes() {
    for (d, h, e, k) in [
        (1, 1, 1, 1),
        (300, 67, 1, 1),
        (17, 130, 5, 5),
        (5, 3, 37, 4),
    ] {
        run(&spec(d, h, e, k), host(), &[0, 1, 13, 500]);
    }
}

#[test]
fn rows_of_one_expert_take_many_tiles() {
    let wide = with(spec(600, 150, 2, 1), |s| s.precision.weights = DType::Bf16);
    run(&wide, host(), &[1000]);
    let narrow = with(spec(40, 24, 1, 1), |s| s.experts.form = ExpertForm::Plain);
    run(&narrow, CpuIsa::Portable, &[1, 6, 12, 13, 25, 700]);
}

/// Rows of experts that tiles write past the caches: 32 MiB.
#[test]
fn large_results() {
    let mut spec = typed(DType::Bf16, DType::Bf16);
    (spec.shape.model_dim, spec.shape.hidden_dim) = (2048, 32);
    (spec.shape.experts, spec.shape.top_k) = (4, 4);
    run(&spec, host(), &[2048]);
}

#[test]
fn scores() {
    variants(&[
        |s| {
            s.router.score = Score::Sigmoid;
            s.router.select_bias = true;
            s.router.groups = groups(3, 2, GroupStat::Top2Sum, GroupMask::Exclude);
            s.router.renormalize = Renormalize::Sum;
            s.router.renormalize_eps = 1e-20;
            s.router.scale = 2.5;
            s.shared = vec![SharedExpert {
                hidden_dim: 50,
                gate: SharedGate::None,
                bias: None,
                clamp: None,
                activation: None,
            }];
        },
        |s| {
            s.router.groups = groups(3, 1, GroupStat::Max, GroupMask::Zero);
            s.router.select_bias = true;
            s.router.scale = 16.0;
        },
        |s| {
            s.router.score = Score::SqrtSoftplus;
            s.router.renormalize = Renormalize::PNorm;
            s.router.norm_order = 3.0;
        },
        |s| {
            s.router.score = Score::SoftmaxSelected;
            s.router.bias = true;
        },
        |s| s.router.select = Select::SparseMixer(0.1),
        |s| {
            s.router.input = RouterInput::RmsScaled;
            s.router.expert_scale = true;
            s.router.renormalize = Renormalize::Clamp;
            s.router.renormalize_eps = 0.9;
            s.experts.activation = Activation::GeluTanh;
        },
    ]);
}

fn groups(count: usize, keep: usize, stat: GroupStat, mask: GroupMask) -> Option<Groups> {
    Some(Groups {
        count,
        keep,
        stat,
        mask,
    })
}

#[test]
fn routers() {
    variants(&[
        |s| {
            s.router.kind = RouterKind::Table;
            s.router.table_rows = Some(50);
            s.router.score = Score::Sigmoid;
        },
        |s| {
            s.router.kind = RouterKind::Table;
            s.router.table_rows = Some(50);
            s.router.score = Score::One;
        },
        |s| {
            s.router.kind = RouterKind::Cosine;
            s.router.projection_dim = Some(19);
            s.precision.activations = DType::F16;
        },
        |s| {
            s.router.kind = RouterKind::External;
            s.experts.identity = 2;
        },
    ]);
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
        s.experts.identity = 3;
    }]);
}

#[test]
fn capacities() {
    variants(&[
        |s| {
            s.capacity.mode = CapacityMode::Factor;
            s.capacity.factor = 0.7;
            s.capacity.order = CapacityOrder::BatchPrioritized;
        },
        |s| {
            s.capacity.mode = CapacityMode::Bounded;
            s.capacity.order = CapacityOrder::TokenMajor;
            s.capacity.align = 4;
        },
        |s| {
            s.capacity.mode = CapacityMode::Factor;
            s.capacity.factor = -0.9;
            s.capacity.order = CapacityOrder::Probability;
            s.capacity.renormalize_after_drop = true;
            s.router.scale = 3.0;
            s.experts.identity = 1;
        },
        |s| {
            s.capacity.mode = CapacityMode::Fixed;
            s.capacity.rows = Some(7);
            s.capacity.order = CapacityOrder::Random;
        },
        |s| {
            s.capacity.mode = CapacityMode::MaxCount;
            s.capacity.align = 8;
        },
        |s| {
            s.capacity.mode = CapacityMode::Bounded;
            s.capacity.factor = 0.0;
        },
    ]);
}

#[test]
fn many_assignments_take_many_scan_tiles() {
    let limited = |order| {
        with(spec(3, 2, 9, 3), |s| {
            s.capacity.mode = CapacityMode::Factor;
            s.capacity.factor = 0.8;
            s.capacity.order = order;
        })
    };
    run(&limited(CapacityOrder::SlotMajor), host(), &[5000]);
    run(&limited(CapacityOrder::BatchPrioritized), host(), &[3000]);
    run(&limited(CapacityOrder::Random), host(), &[3000]);
}

#[test]
fn all_tokens_go_to_one_expert() {
    let external = specs::external(20, 30, 5, 2);
    let harness = Harness::new(&external, host(), 2);
    let mut input = harness.random_input(400, 3);
    let (ids, _) = input.routing.as_mut().unwrap();
    ids.chunks_mut(2)
        .for_each(|pair| pair.copy_from_slice(&[3, -1]));
    check::all(&harness, &harness.run(&input), "all to expert 3");
}

#[test]
fn results_do_not_depend_on_threads_or_on_other_tokens() {
    let spec = spec(130, 40, 4, 2);
    let many = Harness::new(&spec, host(), 3);
    let input = many.random_input(300, 5);
    let (all, one) = (many.run(&input), Harness::new(&spec, host(), 1).run(&input));
    for name in [
        "router.logits",
        "topk_ids",
        "topk_weights",
        "hidden",
        "out",
        "y",
    ] {
        assert_eq!(all.get(name), one.get(name), "{name}");
    }
    let mut first = input.clone();
    first.tokens = 1;
    first.x.truncate(130);
    let alone = many.run(&first);
    assert_eq!(alone.get("router.logits"), &all.get("router.logits")[..4]);
}

#[test]
fn a_nan_token_spoils_only_itself() {
    for score in [Score::Softmax, Score::Sigmoid, Score::SoftmaxSelected] {
        let harness = Harness::new(
            &with(spec(24, 16, 7, 3), |s| s.router.score = score),
            host(),
            2,
        );
        let mut input = harness.random_input(30, 9);
        input.x[5 * 24 + 2] = f64::NAN;
        let tensors = harness.run(&input);
        for (token, ids) in tensors.ids().chunks(3).enumerate() {
            assert!(ids.iter().all(|id| (0..7).contains(id)), "{ids:?}");
            assert!(
                ids[0] != ids[1] && ids[1] != ids[2] && ids[0] != ids[2],
                "{ids:?}"
            );
            let y = &tensors.get("y")[token * 24..(token + 1) * 24];
            assert_eq!(y.iter().any(|v| v.is_nan()), token == 5, "token {token}");
        }
        assert_eq!(tensors.ids()[15..18], [0, 1, 2]);
    }
}
