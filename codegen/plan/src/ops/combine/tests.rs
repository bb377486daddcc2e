//! Tests of how a call is cut into blocks.

use crate::{LayerPlan, PlanOptions, Training, plan};
use moesaic_kernel::{DType, Entry, Stem, Target};
use moesaic_spec::{Latent, LayerSpec, SharedExpert, SharedGate};

const GPUS: [&str; 4] = ["cuda:sm_75", "cuda:sm_80", "cuda:sm_90a", "rocm:gfx942"];

/// Returns the largest of these GPUs have 132 multiprocessors and 304 compute units.
fn deepseek() -> LayerSpec {
    let text = r#"{"shape":{"model_dim":7168,"hidden_dim":2048,"experts":256,"top_k":8}}"#;
    let mut spec: LayerSpec = serde_json::from_str(text).unwrap();
    (spec.precision.weights, spec.precision.activations) = (DType::Bf16, DType::Bf16);
    spec.shared = vec![SharedExpert {
        hidden_dim: 2048,
        gate: SharedGate::None,
        bias: None,
        clamp: None,
        activation: None,
    }];
    spec
}

fn combines(spec: &LayerSpec, target: &str, options: &PlanOptions) -> Vec<Entry> {
    let target: Target = target.parse().unwrap();
    let plan: LayerPlan = plan(spec, target, options).unwrap();
    let kernels = plan.kernels.iter();
    let kernels = kernels.filter(|kernel| kernel.stem() == Stem::Combine);
    kernels.flat_map(|kernel| kernel.entries.clone()).collect()
}

fn blocks(entry: &Entry, tokens: &[u64]) -> Vec<u64> {
    let launch = &entry.launch;
    tokens.iter().map(|&tokens| launch.blocks(tokens)).collect()
}

/// A slice of a token has 32 packs of 16 bytes, a block those of four tokens; of more tokens
/// it has whole ones. A layer that trains has the same kernel.
#[test]
fn few_tokens_have_blocks_for_many_multiprocessors() {
    let calls = [0, 1, 4, 5, 8, 64, 65, 4096];
    let mut spec = deepseek();
    let options = [
        PlanOptions::default(),
        PlanOptions::training(Training::default()),
    ];
    for target in GPUS {
        for options in &options {
            let entries = combines(&spec, target, options);
            assert_eq!(entries.len(), 1, "{target}");
            let expected = [0, 28, 28, 56, 56, 448, 65, 4096];
            assert_eq!(blocks(&entries[0], &calls), expected, "{target}");
        }
    }
    // A pair of logits weighs what the routed experts add up to, in the same kernel. Behind a
    // projection it is another's.
    spec.shared[0].gate = SharedGate::Residual;
    for latent in [None, Some(7168)] {
        spec.latent = latent.map(|dim| Latent {
            dim,
            bias: false,
            norm_eps: None,
            input_norm_eps: None,
        });
        let entries = combines(&spec, "cuda:sm_90a", &PlanOptions::default());
        assert_eq!(entries.len(), if latent.is_some() { 2 } else { 1 });
        for entry in entries {
            assert_eq!(blocks(&entry, &[0, 1, 8, 64]), [0, 28, 56, 448]);
        }
    }
}

/// Rows that are narrower than a slice are not cut, nor is anything on a CPU.
#[test]
fn narrow_tokens_are_whole() {
    let of = |width, target| {
        let mut spec = deepseek();
        (spec.shape.model_dim, spec.shape.top_k) = (width, 2);
        let entry = combines(&spec, target, &PlanOptions::default()).remove(0);
        blocks(&entry, &[0, 1, 64, 65])
    };
    assert_eq!(of(256, "cuda:sm_80"), [0, 1, 16, 5]);
    assert_eq!(of(264, "cuda:sm_80"), [0, 2, 32, 5]);
    assert_eq!(of(64, "cuda:sm_80"), [0, 1, 4, 2]);
    assert_eq!(of(7168, "cpu:avx2"), [0, 1, 2, 3]);
}

/// A block lists the slots of its tokens in 32 KB, whatever the call.
#[test]
fn slots_of_a_block_have_room() {
    for top_k in [8, 100, 1024, 1500, 4000] {
        let mut spec = deepseek();
        (spec.shape.experts, spec.shape.top_k) = (4096, top_k);
        let plan = plan(
            &spec,
            "cuda:sm_90a".parse().unwrap(),
            &PlanOptions::default(),
        );
        let kernels = plan.unwrap().kernels;
        let configs = kernels.iter().filter_map(|kernel| match &kernel.op {
            crate::Op::Combine { config, .. } => config.decode.as_ref(),
            _ => None,
        });
        for decode in configs {
            assert!(decode.tile_tokens * top_k <= 4096, "{top_k}: {decode:?}");
            let threads = decode.tile_tokens as u32 * decode.token_threads;
            assert_eq!(threads, 128, "{top_k}: {decode:?}");
        }
    }
}
