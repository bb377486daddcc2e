//! Evaluation, training and routing alone, from the command line.

use crate::common::*;
use moesaic::{Tensor, Tensors};

/// The small layer with noise in training, and with a capacity.
const NOISY: &str = "\
name = \"small\"
shape = { model_dim = 20, hidden_dim = 12, experts = 5, top_k = 2 }
router = { jitter = 0.3, noise = 2.0 }
capacity = { mode = \"factor\", factor = 0.6, eval_factor = 1.2 }
[[losses]]
kind = \"global\"
coefficient = 0.1
";

fn ints(shape: &[usize], values: &[i64]) -> Tensor<'static> {
    Tensor::copied(shape, values)
}

/// The noisy layer with all that training takes; the counts are made up.
fn noisy() -> Small {
    let small = Small::of(NOISY);
    let mut input = small_input();
    input.insert("dy".to_string(), tensor(&[7, 20], 6));
    group(&mut input, &[4, 3, 2, 3, 2], 7);
    save(small.dir.path(), "x.safetensors", &input);
    small
}

fn group(input: &mut Tensors<'_>, counts: &[i64], tokens: i64) {
    input.insert("global_counts".to_string(), ints(&[5], counts));
    input.insert("global_tokens".to_string(), ints(&[1], &[tokens]));
}

fn y(small: &Small, more: &[&str]) -> Vec<f64> {
    small.run(more).ok();
    load(&small.output, "y").2
}

#[test]
fn a_run_evaluates_unless_it_is_told_to_train() {
    let small = noisy();
    let evaluated = y(&small, &[]);
    assert_eq!(y(&small, &[]), evaluated);
    let trained = y(&small, &["--training", "--seed", "3"]);
    assert_ne!(trained, evaluated);
    assert_ne!(y(&small, &["--training", "--seed", "4"]), trained);
    let both = y(&small, &["--grad", "--seed", "3"]);
    assert_eq!(both, trained);
    load(&small.output, "loss.global");
    std::fs::remove_file(&small.output).unwrap();
    small.refuses(&["--training", "--grad"], &["cannot be used with"]);
}

/// A pass is held against the reference's same pass.
#[test]
fn every_pass_is_compared_with_its_own_reference() {
    let small = noisy();
    let passes: [&[&str]; 5] = [
        &[],
        &["--training", "--seed", "3"],
        &["--grad", "--seed", "5", "--step", "2"],
        &["--grad", "--capacity-factor", "0.4"],
        &["--capacity-factor", "-0.8"],
    ];
    for pass in passes {
        let report = small
            .run(&[pass, &["--reference", "--json"]].concat())
            .json();
        let compared = &report["reference"];
        assert!(
            compared["y_error"].as_f64().unwrap() < 1e-5,
            "{pass:?}: {report}"
        );
        assert_eq!(compared["tokens_with_other_experts"], 0, "{pass:?}");
        if pass.contains(&"--grad") {
            assert!(
                compared["gradient_error"].as_f64().unwrap() < 1e-4,
                "{report}"
            )
        } else {
            assert!(compared["gradient_error"].is_null())
        }
    }
}

fn capacity(small: &Small, more: &[&str]) -> f64 {
    small.run(more).ok();
    load(&small.output, "capacity").2[0]
}

/// `K int(f ceil(T / E))` of 7 tokens, 5 experts and 2 choices.
#[test]
fn capacity_is_evaluations_trainings_or_the_calls_own() {
    let small = noisy();
    assert_eq!(capacity(&small, &[]), 4.0);
    assert_eq!(capacity(&small, &["--training"]), 2.0);
    for pass in [&[][..], &["--training"], &["--routing-only"]] {
        let of = |factor: &str| capacity(&small, &[pass, &["--capacity-factor", factor]].concat());
        assert_eq!(of("3"), 12.0);
        let largest = of("0");
        assert!(largest > 2.0 && largest < 12.0);
        assert_eq!(of("-3"), largest);
        assert_eq!(of("-0.5"), 2.0);
    }
    std::fs::remove_file(&small.output).unwrap();
    small.refuses(
        &["--capacity-factor", "inf"],
        &["capacity factor inf: it must be between"],
    );
    Small::new().refuses(
        &["--capacity-factor", "1"],
        &[
            "mode = \"dropless\" has no factor",
            "\"factor\" and \"bounded\"",
        ],
    );
}

/// What routing alone decides is what the whole run decides.
#[test]
fn routing_alone_gives_no_outputs() {
    let small = noisy();
    let names = [
        "topk_ids",
        "topk_weights",
        "counts",
        "locations",
        "capacity",
        "router.logits",
    ];
    for pass in [&[][..], &["--training", "--seed", "3"]] {
        small.run(pass).ok();
        let whole = names.map(|name| load(&small.output, name));
        let more = [pass, &["--routing-only", "--reference", "--json"]].concat();
        let report = small.run(&more).json();
        assert_eq!(names.map(|name| load(&small.output, name)), whole);
        let tensors = report["tensors"].as_array().unwrap();
        assert_eq!(tensors.len(), names.len(), "{report}");
        assert_eq!(report["reference"]["tokens_with_other_experts"], 0);
        assert!(report["reference"]["y_error"].is_null());
    }
    std::fs::remove_file(&small.output).unwrap();
    small.refuses(&["--grad", "--routing-only"], &["cannot be used with"]);
}

/// Routing needs no counts of the group: it makes them.
#[test]
fn counts_of_a_group_come_from_routing() {
    let small = noisy();
    save(small.dir.path(), "x.safetensors", &small_input());
    small.refuses(&["--training"], &["has no tensor `global_counts`"]);
    small.run(&["--training", "--routing-only"]).ok();
    let counts = load(&small.output, "counts").2;
    let counts: Vec<i64> = counts.into_iter().map(|n| n as i64).collect();
    assert_eq!(counts.iter().sum::<i64>(), 14);
    let mut input = small_input();
    group(&mut input, &counts, 7);
    save(small.dir.path(), "x.safetensors", &input);
    small.run(&["--training"]).ok();
    for (counts, tokens, part) in [
        ([4, 3, -1, 3, 2], 7, "`global_counts`: has -1 at element 2"),
        ([4, 3, 2, 3, 2], 0, "`global_tokens`: has 0 at element 0"),
        ([4, 3, 2, 3, 2], -7, "expected 1 or more"),
    ] {
        let mut input = small_input();
        group(&mut input, &counts, tokens);
        save(small.dir.path(), "wrong.safetensors", &input);
        let wrong = small.dir.path().join("wrong.safetensors");
        let mut call = command();
        call.args(["run", "--target", "cpu", "--training", "--spec"]);
        call.arg(&small.spec).arg("--weights").arg(&small.weights);
        call.arg("--input").arg(wrong).arg("--output");
        finish(call.arg(small.dir.path().join("none"))).fails(2, &[part]);
    }
    let loss = load(&small.output, "loss.global").2[0];
    assert!(loss > 0.5 && loss < 5.0, "{loss}");
}

/// Layers that draw, mask, and have losses over sequences and groups.
#[test]
fn bench_trains_every_layer() {
    let small = Small::of(EVERY_INPUT);
    let mut call = command();
    let args = [
        "bench",
        "--target",
        "cpu",
        "--tokens",
        "1,16",
        "--seconds",
        "0",
    ];
    call.args(args).args(["--training", "--json", "--spec"]);
    let json = finish(call.arg(&small.spec)).json();
    assert!(json["y_error"].as_f64().unwrap() < 1e-5, "{json}");
    let launches = json["runs"][1]["launches"].as_array().unwrap();
    let has = |symbol: &str| launches.iter().any(|l| l["launch"] == symbol);
    assert!(
        has("gate_draw") && has("gate_draw_bwd") && has("gate_losses"),
        "{json}"
    );
}

#[test]
fn every_layer_is_simulated_in_training() {
    let small = Small::of(EVERY_INPUT);
    let mut call = command();
    call.args([
        "inspect",
        "--target",
        "sim:gfx942",
        "--simulate",
        "9",
        "--json",
    ]);
    let json = finish(call.args(["--training", "--spec"]).arg(&small.spec)).json();
    let counted = json["counted"]["kernels"].as_array().unwrap();
    let has = |symbol: &str| counted.iter().any(|kernel| kernel["symbol"] == symbol);
    assert!(has("gate_draw_bwd") && has("gate_losses"), "{json}");
}

/// A layer that trains has the kernels of its evaluation too.
#[test]
fn kernels_of_evaluation_belong_to_training() {
    let small = noisy();
    let page = small.dir.path().join("page.html");
    let with = |args: &[&str]| {
        let mut call = command();
        finish(
            call.args(args)
                .args(["--target", "cpu:avx2", "--training", "--spec"])
                .arg(&small.spec),
        )
    };
    let emitted = small.dir.path().join("kernels");
    let emitted = emitted.to_str().unwrap();
    let texts = [
        with(&["inspect", "--json"]).ok(),
        with(&["precompile"]).ok(),
        with(&["emit", "-o", emitted]).ok(),
    ];
    for text in texts {
        for name in ["gate_topk_eval", "grouped_gemm_up_eval"] {
            assert!(text.contains(name), "{name} is not in {text}");
        }
        assert!(!text.contains("grouped_gemm_down_eval"), "{text}");
    }
    let shown = with(&["inspect", "--html", page.to_str().unwrap()]).ok();
    assert!(shown.contains("page.html"), "{shown}");
    let text = std::fs::read_to_string(&page).unwrap();
    assert!(text.contains("grouped_gemm_up_eval"));
    let text = with(&["inspect"]).ok();
    assert!(text.contains("to evaluate"), "{text}");
}

/// Without a compiler, what was precompiled for training evaluates as well.
#[test]
fn a_strict_run_trains_and_evaluates_from_one_cache() {
    let (small, cache) = (noisy(), scratch());
    let cache = cache.path().to_str().unwrap();
    let mut call = command();
    let args = [
        "precompile",
        "--target",
        "cpu",
        "--training",
        "--cache",
        cache,
        "--spec",
    ];
    finish(call.args(args).arg(&small.spec)).ok();
    small
        .run(&["--strict", "--training", "--cache", cache])
        .ok();
}
