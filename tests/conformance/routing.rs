//! Rules of routing that hold on every engine.

use super::Case;
use super::case::{floats, ints};
use super::layers::{engine, engines};
use moesaic::spec::LayerSpec;

/// Every logit ties: each selection takes the lowest experts that it may take.
#[test]
fn ties_go_to_the_lower_expert() {
    let routers = [
        ("", [0, 1, 2, 3]),
        ("select = { per-group = 2 }", [0, 1, 3, 4]),
        ("blocks = { tokens = 2, experts = 4 }", [0, 1, 2, 3]),
        ("always_chosen = 1", [5, 0, 1, 2]),
    ];
    for (router, ids) in routers {
        check_ties(router, ids);
    }
}

/// Checks the experts of six that a router chooses where all of them have the same weights.
fn check_ties(router: &str, ids: [i32; 4]) {
    let shape = "shape = { model_dim = 8, hidden_dim = 4, experts = 6, top_k = 4 }";
    let spec = LayerSpec::from_toml(&format!("{shape}\nrouter = {{ {router} }}"));
    let mut case = Case::random(&spec.expect("it is valid"), 5, 2);
    let row = case.weights.get("router.weight").data[..8].to_vec();
    case.weights
        .0
        .get_mut("router.weight")
        .expect("it has one")
        .data = row.repeat(6);
    for engine in engines() {
        let layer = case.layer(&engine);
        let output = layer
            .forward(case.input().reading(&["topk_ids", "topk_weights"]))
            .expect("it runs");
        assert_eq!(ints(&output, "topk_ids"), ids.repeat(5), "{router}");
        assert!(
            floats(&output, "topk_weights")
                .iter()
                .all(|w| (w - 1.0 / 6.0).abs() < 1e-6)
        );
    }
}

/// Logits that a sigmoid in f32 cannot tell apart still rank their experts.
#[test]
fn saturated_scores_rank_by_logits() {
    let spec = LayerSpec::from_toml(
        "shape = { model_dim = 8, hidden_dim = 4, experts = 4, top_k = 3 }\n\
         router = { score = \"sigmoid\", bias = true }",
    )
    .expect("it is valid");
    let mut case = Case::random(&spec, 5, 2);
    case.weights
        .0
        .get_mut("router.weight")
        .expect("it has one")
        .data
        .fill(0.0);
    case.weights
        .0
        .get_mut("router.bias")
        .expect("it has one")
        .data = vec![20.0, 30.0, 40.0, 1.0];
    for engine in engines() {
        let output = case
            .layer(&engine)
            .forward(case.input().reading(&["topk_ids"]));
        assert_eq!(
            ints(&output.expect("it runs"), "topk_ids"),
            [2, 1, 0].repeat(5)
        );
    }
}

/// Expert counts beside and at the edges of warps, tiles and registers.
#[test]
fn awkward_expert_counts_agree() {
    let shapes = [
        (1, 1),
        (3, 3),
        (7, 2),
        (60, 3),
        (64, 64),
        (128, 8),
        (160, 1),
        (256, 8),
        (384, 8),
        (512, 2),
        (1000, 3),
        (1024, 8),
    ];
    let engine = engine();
    for (experts, top_k) in shapes {
        let spec = sized(experts, top_k);
        for tokens in [0, 1, 33, 257] {
            Case::random(&spec, tokens, experts as u64).check(&engine);
        }
    }
    Case::random(&sized(60, 2), 4096, 1).check(&engine);
}

fn sized(experts: usize, top_k: usize) -> LayerSpec {
    LayerSpec::from_toml(&format!(
        "shape = {{ model_dim = 5, hidden_dim = 3, experts = {experts}, top_k = {top_k} }}"
    ))
    .expect("it is valid")
}
