//! Whole layers on every engine this machine has.

use super::{Case, quick};
use moesaic::spec::{LayerSpec, testing};
use moesaic::{DType, Engine, EngineOptions, Input, Recompute, RngKey, Target};
use moesaic_harness::thorough::{in_turns, one_in, takes};

/// Memory that is never written has a pattern that shows.
pub fn poisoned() -> EngineOptions {
    EngineOptions {
        poison: true,
        ..EngineOptions::default()
    }
}

/// The engines to check: every instruction set this CPU runs, with poisoned memory, and the
/// GPU if there is one. Kernels of CPUs are compiled in a hurry.
pub fn engines() -> Vec<Engine> {
    let hurried = |engine: Engine| match engine.target() {
        target @ Target::Cpu(_) => {
            quick::open(&target.to_string(), poisoned()).expect("it was open")
        }
        _ => engine,
    };
    shipped().into_iter().map(hurried).collect()
}

/// The same engines, whose kernels are compiled as people get them.
pub fn shipped() -> Vec<Engine> {
    let open = |target: Target| match target {
        Target::Cpu(_) => Engine::open(&target.to_string(), poisoned()).ok(),
        _ => None,
    };
    let mut engines: Vec<Engine> = Target::all().into_iter().filter_map(open).collect();
    assert!(
        !engines.is_empty(),
        "no CPU engine: {:?}",
        Engine::cpu().err()
    );
    engines.extend(Engine::open("cuda", poisoned()).ok());
    engines
}

/// The widest CPU engine, for tests that need one only; its kernels are compiled in a
/// hurry.
pub fn engine() -> Engine {
    quick::open("cpu", poisoned()).expect("a CPU")
}

fn small(toml: &str) -> LayerSpec {
    LayerSpec::from_toml(toml).unwrap_or_else(|e| panic!("{}", e.render("spec", false)))
}

const BASE: &str = "shape = { model_dim = 37, hidden_dim = 21, experts = 5, top_k = 2 }";

#[test]
fn random_specs_agree_with_the_reference() {
    // Every compile costs: many layers on the engine that people get, a few
    // on each of the others.
    let widest = engine().target();
    for engine in shipped() {
        let seeds: Vec<u64> = if engine.target() == widest {
            one_in(7, 0, 0..24).collect()
        } else {
            in_turns(0, 100..103).collect()
        };
        for seed in seeds {
            let spec = testing::sample(seed);
            let tokens = [1, 7, 33, 100][seed as usize % 4];
            Case::random(&spec, tokens, seed).check(&engine);
        }
    }
}

#[test]
fn odd_sizes_agree_in_every_dtype() {
    let widest = engine().target();
    let shapes = [
        (1, 1, 1, 1),
        (3, 5, 2, 1),
        (37, 21, 5, 5),
        (80, 56, 40, 7),
        (129, 130, 3, 2),
    ];
    for engine in engines() {
        for (i, (d, h, e, k)) in shapes.into_iter().enumerate() {
            for (j, dtype) in [DType::F32, DType::Bf16, DType::F16]
                .into_iter()
                .enumerate()
            {
                let turns = if engine.target() == widest { 2 } else { 3 };
                if !takes(i + j, turns) {
                    continue;
                }
                let mut spec = small(BASE);
                spec.shape.model_dim = d;
                spec.shape.hidden_dim = h;
                spec.shape.experts = e;
                spec.shape.top_k = k;
                spec.precision.weights = dtype;
                spec.precision.activations = dtype;
                for tokens in [0, 1, 33] {
                    Case::random(&spec, tokens, (d * h + e) as u64).check(&engine);
                }
            }
        }
    }
}

#[test]
fn thousands_of_tokens_agree() {
    let engine = engine();
    for tokens in [777, 3000] {
        Case::random(&small(BASE), tokens, 3).check(&engine);
    }
}

#[test]
fn all_tokens_may_choose_one_expert() {
    let mut spec = small(BASE);
    spec.shape.top_k = 1;
    spec.router.bias = true;
    for engine in engines() {
        let mut case = Case::random(&spec, 200, 5);
        case.weights
            .0
            .get_mut("router.bias")
            .expect("it has one")
            .data = vec![0.0, 0.0, 99.0, 0.0, 0.0];
        case.check(&engine);
    }
}

#[test]
fn every_expert_may_be_chosen() {
    let mut spec = small(BASE);
    spec.shape.top_k = 5;
    for engine in engines() {
        Case::random(&spec, 65, 8).check(&engine);
    }
}

#[test]
fn a_nan_token_spoils_only_itself() {
    let engine = engine();
    let mut case = Case::random(&small(BASE), 9, 4);
    let clean = case
        .layer(&engine)
        .forward(&case.input())
        .expect("it runs")
        .y()
        .to_f32();
    case.input.x[3 * 37 + 5] = f64::NAN;
    let spoilt = case
        .layer(&engine)
        .forward(case.input().reading(&["y", "topk_ids"]))
        .expect("it runs");
    let y = spoilt.y().to_f32();
    let same = |t: usize| y[t * 37..(t + 1) * 37] == clean[t * 37..(t + 1) * 37];
    assert!((0..9).filter(|&t| t != 3).all(same));
    assert!(y[3 * 37..4 * 37].iter().all(|v| v.is_nan()));
    let ids: Vec<i32> = spoilt
        .get("topk_ids")
        .and_then(|t| t.to_vec())
        .expect("ids are i32");
    assert_eq!(
        ids[6..8],
        [0, 1],
        "all logits of the token are NaN, so the lower ids win"
    );
}

#[test]
fn results_do_not_depend_on_threads() {
    let case = Case::random(&small(BASE), 500, 6);
    let run = |threads| {
        let options = EngineOptions {
            threads: Some(threads),
            ..EngineOptions::default()
        };
        let engine = Engine::open("cpu", options).expect("a C compiler");
        case.layer(&engine)
            .forward(&case.input())
            .expect("it runs")
            .y()
            .data
            .to_vec()
    };
    let one = run(1);
    assert!([2, 3, 8].into_iter().all(|threads| run(threads) == one));
}

#[test]
fn no_token_count_compiles_anything() {
    let engine = engine();
    // As narrow as it can be: only the counts matter, and there are many.
    let narrow = "shape = { model_dim = 3, hidden_dim = 2, experts = 5, top_k = 2 }";
    let case = Case::random(&small(narrow), 1, 1);
    let layer = case.layer(&engine);
    let before = engine.stats();
    let x = vec![0.5f32; 4096 * 3];
    for tokens in 0..=4096 {
        layer
            .forward(&Input::new(tokens, &x[..tokens * 3]))
            .expect("it runs");
    }
    assert_eq!(engine.stats(), before);
}

#[test]
fn no_call_has_more_tokens_than_can_be_counted() {
    let layer = Case::random(&small(BASE), 1, 5).layer(&engine());
    let most = layer.max_tokens();
    assert_eq!(most, i32::MAX as usize / 2);
    let input = Input {
        tokens: most + 1,
        ..Input::default()
    };
    let error = layer.forward(&input).unwrap_err().to_string();
    let end = format!("a call takes at most {most}, so split it");
    assert!(error.ends_with(&end), "{error}");
}

#[test]
fn timing_needs_a_call_of_that_size() {
    let case = Case::random(&small(BASE), 10, 1);
    let layer = case.layer(&engine());
    assert!(layer.time_steps(1).is_err());
    layer.forward(&case.input()).expect("it runs");
    assert_eq!(
        layer.time_steps(10).expect("it runs").len(),
        layer.plan().steps.len()
    );
    let error = layer
        .time_steps(11)
        .expect_err("no call was that large")
        .to_string();
    assert!(error.contains("fewer than 11 tokens"), "{error}");
}

/// An evaluation leaves nothing that both passes of training could run on again.
#[test]
fn timing_training_needs_a_training_call() {
    let case = Case::random(&small(BASE), 10, 1);
    let layer = case.training_layer(&engine(), Recompute::None);
    layer.forward(&case.input()).expect("it runs");
    let error = layer.time_steps(10).expect_err("nothing was trained");
    assert!(error.to_string().contains("run forward_train"), "{error}");
    let trained = layer.forward_train(&case.input(), RngKey::default());
    drop(trained.expect("it runs"));
    let times = layer.time_steps(10).expect("it runs");
    assert_eq!(times.len(), layer.plan().all_steps().count());
    assert!(layer.time_steps(11).is_err());
}
