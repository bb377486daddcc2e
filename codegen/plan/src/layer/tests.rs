use super::*;
use moesaic_kernel::{CpuIsa, DType, Size};
use moesaic_spec::{CapacityMode, CapacityOrder, Latent, RouterKind, SharedExpert, SharedGate};

fn spec() -> LayerSpec {
    let text = r#"{"shape":{"model_dim":16,"hidden_dim":24,"experts":4,"top_k":2}}"#;
    serde_json::from_str(text).unwrap()
}

fn planned(change: impl FnOnce(&mut LayerSpec)) -> LayerPlan {
    let mut spec = spec();
    change(&mut spec);
    plan(&spec, Target::Cpu(CpuIsa::Avx2), &PlanOptions::default()).unwrap()
}

/// Every tensor of every step is declared, with the parameter's dtype,
/// and every declared tensor is used.
fn check(plan: &LayerPlan) {
    for step in plan.launches() {
        let entry = &plan[step.entry];
        let params = entry.params.iter();
        let pointers: Vec<_> = params.filter(|p| p.ty.tensor().is_some()).collect();
        assert_eq!(step.tensors.len(), pointers.len(), "{}", entry.symbol);
        for (&id, param) in step.tensors.iter().zip(pointers) {
            let tensor = plan.tensors.get(id.0);
            let tensor = tensor.unwrap_or_else(|| panic!("{} is undeclared", param.name));
            let (dtype, _) = param.ty.tensor().unwrap();
            assert_eq!(tensor.dtype, dtype, "{} in {}", tensor.name, entry.symbol);
            assert_eq!(plan.id(&tensor.name), Some(id), "{}", tensor.name);
        }
    }
    for (at, tensor) in plan.tensors.iter().enumerate() {
        let used = plan
            .launches()
            .any(|step| step.tensors.contains(&TensorId(at)));
        assert!(used, "{} is never used", tensor.name);
    }
}

#[test]
fn tensors_and_parameters_agree() {
    check(&planned(|_| ()));
    check(&planned(|s| {
        s.shared.push(SharedExpert {
            hidden_dim: 8,
            gate: SharedGate::Sigmoid,
            bias: None,
            clamp: None,
            activation: None,
        });
        s.experts.bias = true.into();
        s.experts.identity = 2;
        s.capacity.mode = CapacityMode::Bounded;
        s.capacity.order = CapacityOrder::BatchPrioritized;
    }));
    check(&planned(|s| {
        s.router.kind = RouterKind::Cosine;
        s.router.projection_dim = Some(8);
        s.capacity.order = CapacityOrder::Probability;
        s.capacity.renormalize_after_drop = true;
    }));
    check(&planned(|s| s.router.kind = RouterKind::External));
}

/// On GPUs a layer is five launches in decode calls and seven in larger ones.
#[test]
fn launches_are_few_whatever_the_tokens() {
    let mut spec = spec();
    spec.shape.experts = 128;
    spec.shape.top_k = 8;
    (spec.shape.model_dim, spec.shape.hidden_dim) = (2048, 768);
    (spec.precision.weights, spec.precision.activations) = (DType::Bf16, DType::Bf16);
    let trained = PlanOptions::training(Training::default());
    // Rows are put in expert order for gradients by a dispatch, because TMA cannot gather.
    for (target, back) in [("cuda:sm_80", 10), ("cuda:sm_90a", 11), ("rocm:gfx942", 10)] {
        let target: Target = target.parse().unwrap();
        let layer = plan(&spec, target, &PlanOptions::default()).unwrap();
        let trains = plan(&spec, target, &trained).unwrap();
        for (tokens, forward) in [
            (1, 5),
            (8, 5),
            (64, 5),
            (65, 7),
            (449, 7),
            (4096, 7),
            (32768, 7),
        ] {
            let what = format!("{target}, {tokens} tokens");
            let launched = layer.launched(layer.evaluation_steps(), tokens);
            assert_eq!(launched, forward, "{what}");
            let training = trains.launched(&trains.steps, tokens);
            let evaluation = trains.launched(trains.evaluation_steps(), tokens);
            let backward = trains.launched(&trains.backward, tokens);
            assert_eq!([training, evaluation, backward], [7, 7, back], "{what}");
        }
        // Experts' offsets are written without tokens, too.
        let layer = trains.launched(&trains.steps, 0);
        assert_eq!(layer, 2, "{target}: expert_scan_sum, expert_scan_place");
    }
}

/// A shared expert that is like the routed ones adds no launch, nor does its gate, one logit or
/// a pair that weighs the routed ones, too. One that is not adds two.
#[test]
fn a_shared_expert_comes_along() {
    let launches = |target: &str, hidden_dim, gate| {
        let mut spec = spec();
        (spec.shape.experts, spec.shape.top_k) = (256, 8);
        (spec.shape.model_dim, spec.shape.hidden_dim) = (7168, 2048);
        (spec.precision.weights, spec.precision.activations) = (DType::Bf16, DType::Bf16);
        spec.shared = vec![SharedExpert {
            hidden_dim,
            gate,
            bias: None,
            clamp: None,
            activation: None,
        }];
        let plan = plan(&spec, target.parse().unwrap(), &PlanOptions::default()).unwrap();
        [1, 64, 65].map(|tokens| plan.launched(plan.evaluation_steps(), tokens))
    };
    for target in ["cuda:sm_80", "cuda:sm_90a", "rocm:gfx942"] {
        for hidden in [2048, 5632] {
            assert_eq!(launches(target, hidden, SharedGate::None), [5, 5, 7]);
            assert_eq!(launches(target, hidden, SharedGate::Sigmoid), [5, 5, 7]);
            assert_eq!(launches(target, hidden, SharedGate::Residual), [5, 5, 7]);
        }
        assert_eq!(
            launches(target, 2044, SharedGate::None),
            [7, 7, 9],
            "{target}"
        );
    }
}

/// Blocks that pack follow each other as those of the GEMM do: on several
/// NUMA nodes each reads what it wrote.
#[test]
fn weights_are_packed_in_the_order_of_their_products() {
    for (target, dtype) in [("cpu:avx2", DType::F32), ("cpu:amx", DType::Bf16)] {
        let mut spec = spec();
        spec.precision.weights = dtype;
        spec.precision.activations = dtype;
        let plan = plan(&spec, target.parse().unwrap(), &PlanOptions::default()).unwrap();
        assert!(!plan.prepare.is_empty());
        let experts = Size::Const(spec.shape.experts as u64);
        for step in &plan.prepare {
            let packing = &plan[step.entry].launch.grid;
            let reads = |product: &&LaunchStep| product.tensors.contains(&step.tensors[1]);
            let mut products = plan.steps.iter().filter_map(Step::launch);
            let product = &plan[products.find(reads).unwrap().entry].launch.grid;
            let by_tokens = |size: &Size| size.eval(9000) != size.eval(90000);
            let at = product.iter().position(by_tokens).unwrap();
            assert_eq!(
                packing[at], experts,
                "{} on {target}",
                plan[step.entry].symbol
            );
        }
    }
}

#[test]
fn a_plan_is_the_same_every_time() {
    assert_eq!(planned(|_| ()), planned(|_| ()));
}

fn trained(recompute: Recompute, change: impl FnOnce(&mut LayerSpec)) -> LayerPlan {
    let mut spec = spec();
    change(&mut spec);
    plan(
        &spec,
        Target::Cpu(CpuIsa::Avx2),
        &PlanOptions::training(Training { recompute }),
    )
    .unwrap()
}

const MODES: [Recompute; 3] = [Recompute::None, Recompute::Hidden, Recompute::All];

#[test]
fn backward_tensors_and_parameters_agree() {
    for recompute in MODES {
        check(&trained(recompute, |_| ()));
        check(&trained(recompute, |s| {
            s.shared.push(SharedExpert {
                hidden_dim: 8,
                gate: SharedGate::Sigmoid,
                bias: None,
                clamp: None,
                activation: None,
            });
            s.experts.bias = true.into();
            s.experts.identity = 2;
            s.capacity.mode = CapacityMode::Bounded;
            s.capacity.renormalize_after_drop = true;
        }));
        check(&trained(recompute, |s| {
            s.router.kind = RouterKind::External
        }));
        check(&trained(recompute, |s| {
            s.router.weight_on = moesaic_spec::WeightSite::Input
        }));
    }
}

/// Routers and losses of every kind name what they need.
#[test]
fn gradients_of_routers_and_losses_agree() {
    for seed in 0..400 {
        let spec = moesaic_spec::testing::sample(seed);
        for recompute in MODES {
            let target = Target::Cpu(CpuIsa::Avx2);
            let plan = plan(
                &spec,
                target,
                &PlanOptions::training(Training { recompute }),
            )
            .unwrap();
            check(&plan);
            for loss in &spec.losses {
                let output = plan.tensor(&format!("loss.{}", loss.kind.name())).unwrap();
                assert_eq!(output.role, TensorRole::Output);
            }
        }
    }
}

/// Every tensor that backward reads was kept, computed before, or is a weight.
#[test]
fn every_weight_has_its_gradient() {
    let plan = trained(Recompute::None, |_| ());
    for name in ["router", "experts.gate", "experts.up", "experts.down"] {
        let name = format!("grad.{name}.weight");
        assert_eq!(plan.tensor(&name).unwrap().role, TensorRole::WeightGradient);
    }
}

/// Only the matrices of experts have gradients in 16 bits.
#[test]
fn gradients_have_their_dtypes() {
    let plan = trained(Recompute::None, |s| {
        s.precision.weights = DType::Bf16;
        s.precision.activations = DType::Bf16;
        s.precision.expert_gradients = DType::Bf16;
        s.experts.bias = true.into();
        s.shared = vec![SharedExpert {
            hidden_dim: 8,
            gate: SharedGate::Sigmoid,
            bias: None,
            clamp: None,
            activation: None,
        }];
        s.latent = Some(Latent {
            dim: 12,
            bias: false,
            norm_eps: Some(1e-5),
            input_norm_eps: None,
        });
    });
    let gradients = plan.tensors.iter();
    let gradients = gradients.filter(|tensor| tensor.role == TensorRole::WeightGradient);
    let narrow = gradients.filter(|tensor| tensor.dtype == DType::Bf16);
    let narrow: Vec<&str> = narrow.map(|tensor| &*tensor.name).collect();
    let parts = ["gate", "up", "down"];
    let of = |owner: &str| parts.map(|part| format!("grad.{owner}.{part}.weight"));
    assert_eq!(narrow, [of("experts"), of("shared.0")].concat());
    check(&plan);
}

/// 2·T·d + 4·T·K·h bytes and the routing record, in 16-bit types.
#[test]
fn what_is_kept() {
    let bf16 = |s: &mut LayerSpec| {
        s.precision.weights = DType::Bf16;
        s.precision.activations = DType::Bf16;
    };
    let (t, d, h, k, e) = (100, 16, 24, 2, 4);
    let kept = |recompute| -> u64 {
        let plan = trained(recompute, bf16);
        let saved = plan.saved().into_iter();
        saved.map(|id| plan[id].bytes(t)).sum()
    };
    // Ids, weights, slot_rows and row_slots; logits; offsets and row_tiles.
    let record = 4 * 4 * t * k + 4 * t * e + 8 * (e + 1) + 4 * (e + 1);
    assert_eq!(kept(Recompute::None), 2 * t * d + 4 * t * k * h + record);
    assert_eq!(kept(Recompute::Hidden), 2 * t * d + record);
    assert_eq!(kept(Recompute::All), 2 * t * d);
}
