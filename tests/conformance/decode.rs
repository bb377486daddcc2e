//! GPUs have kernels of their own for few tokens. A token's output has the same bytes in
//! a call of few tokens and in one of many.

use super::Case;
use super::case::floats;
use super::cases::{of_type, small};
use super::simulated::{SIMULATORS, open};
use moesaic::plan::DECODE_TOKENS;
use moesaic::spec::{LayerSpec, SharedExpert, SharedGate};
use moesaic::{DType, Engine};
use moesaic_harness::thorough::in_turns;

const MANY: usize = DECODE_TOKENS as usize + 6;

fn bits(values: &[f64]) -> Vec<u64> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// The first tokens of a case, as a call of their own.
fn first(case: &Case, tokens: usize) -> Case {
    let mut few = Case::random(&case.spec, tokens, 1);
    let width = case.spec.shape.model_dim;
    few.input.x = case.input.x[..tokens * width].to_vec();
    few.input.token_ids = case
        .input
        .token_ids
        .as_ref()
        .map(|ids| ids[..tokens].to_vec());
    few
}

/// Calls of 1, 9, 33 and 64 tokens give what a call of more gives for these tokens.
fn same_bytes(engine: &Engine, spec: &LayerSpec, seed: u64) {
    let case = Case::random(spec, MANY, seed);
    let layer = case.layer(engine);
    let names = ["router.logits", "topk_weights", "y"];
    let widths = [spec.shape.experts, spec.shape.top_k, spec.output_dim()];
    let many = layer.forward(case.input().reading(&names)).unwrap();
    for tokens in [1, 9, 33, DECODE_TOKENS as usize] {
        let input = first(&case, tokens);
        let few = layer.forward(input.input().reading(&names)).unwrap();
        for (name, width) in names.into_iter().zip(widths) {
            let [few, many] = [&few, &many].map(|output| bits(&floats(output, name)));
            let equal = few == many[..tokens * width];
            assert!(equal, "{tokens} tokens, {name}: {}", case.describe());
        }
    }
}

fn shared_of(hidden_dim: usize) -> SharedExpert {
    SharedExpert {
        hidden_dim,
        gate: SharedGate::Sigmoid,
        bias: None,
        clamp: None,
        activation: None,
    }
}

/// Widths of whole lines, of pieces, and odd ones; a shared expert that is multiplied in the
/// launch of the routed ones, one in its own, and none. Targets, numbered, take turns.
fn on(target: &str, turn: usize) {
    let engine = open(target);
    for (i, dtype) in [DType::Bf16, DType::F32, DType::F16]
        .into_iter()
        .enumerate()
    {
        let shapes = [(128, 64, 8, 2), (70, 90, 5, 3), (37, 21, 40, 4)];
        for (j, (d, h, e, k)) in in_turns(turn + i, shapes.into_iter().enumerate()) {
            let mut spec = of_type(dtype, small(d, h, e, k));
            spec.experts.bias = (j == 1).into();
            let shared = [Some(h / 2), Some(h + 1), None][j];
            spec.shared = shared.into_iter().map(shared_of).collect();
            same_bytes(&engine, &spec, (3 * i + j) as u64);
        }
    }
}

#[test]
fn sm_80_gives_a_token_the_same_bytes_in_any_company() {
    on("sim:sm_80", 0);
}

#[test]
fn sm_90a_gives_a_token_the_same_bytes_in_any_company() {
    on("sim:sm_90a", 1);
}

#[test]
fn gfx942_gives_a_token_the_same_bytes_in_any_company() {
    on("sim:gfx942", 1);
}

/// The gate of a shared expert, of one logit or of two with biases, is made with the router's
/// logits, which have biases or none; experts fill their tiles, or do not.
#[test]
fn a_shared_gate_comes_along() {
    for (n, target) in SIMULATORS.into_iter().enumerate() {
        let engine = open(target);
        for (i, gate) in [SharedGate::Sigmoid, SharedGate::Residual]
            .into_iter()
            .enumerate()
        {
            let routers = [(5, true), (33, false), (64, i == 0)];
            for (j, (experts, bias)) in in_turns(n + i, routers.into_iter().enumerate()) {
                let mut spec = of_type(DType::Bf16, small(70, 24, experts, 2));
                spec.router.bias = bias;
                spec.shared = vec![SharedExpert {
                    gate,
                    ..shared_of(24)
                }];
                let seed = (3 * i + j) as u64;
                same_bytes(&engine, &spec, seed);
                for tokens in [1, 33, MANY] {
                    Case::random(&spec, tokens, seed).check(&engine);
                }
            }
        }
    }
}
