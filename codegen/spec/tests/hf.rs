//! Import of Hugging Face configurations.

use moesaic_spec::hf::{HfError, Parts, Step, import, moe_layers, supported_models};
use moesaic_spec::*;

fn error(config: &str, layer: usize) -> String {
    import(config, layer).unwrap_err().to_string()
}

/// Every family with nothing but the keys transformers has no default for.
#[test]
fn every_family_builds_every_canonical_tensor() {
    for model in supported_models() {
        let config = format!(
            r#"{{"model_type": "{model}", "num_experts_per_tok": 2, "num_experts": 16,
                 "moe_topk": 2, "top_k_experts": 2, "moe_intermediate_size": 24,
                 "enable_moe_block": true}}"#
        );
        let layers = moe_layers(&config).unwrap_or_else(|e| panic!("{model}: {e}"));
        assert!(!layers.is_empty(), "{model}");
        for layer in [layers[0], layers[layers.len() - 1]] {
            let got = import(&config, layer).unwrap_or_else(|e| panic!("{model}: {e}"));
            let wanted = canonical_tensors(&got.spec);
            let names: Vec<&str> = got.sources.iter().map(|s| s.name.as_str()).collect();
            let expected: Vec<&str> = wanted.iter().map(|t| t.name.as_str()).collect();
            assert_eq!(names, expected, "{model} layer {layer}");
            assert!(
                got.sources.iter().all(|s| !s.alternatives.is_empty()),
                "{model}"
            );
            assert_eq!(
                got.spec,
                LayerSpec::from_toml(&got.spec.to_toml()).unwrap(),
                "{model}"
            );
        }
    }
}

#[test]
fn published_mixtral_spelling() {
    let config = r#"{"architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
        "hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8,
        "num_experts_per_tok": 2, "num_hidden_layers": 32, "torch_dtype": "bfloat16",
        "router_jitter_noise": 0.01, "hidden_act": "silu"}"#;
    let got = import(config, 31).unwrap();
    assert_eq!(got.spec.name, "mixtral-layer31");
    assert_eq!(got.spec.precision.weights.name(), "bf16");
    assert_eq!(got.spec.precision.activations.name(), "bf16");
    assert_eq!(got.spec.router.renormalize, Renormalize::Sum);
    assert_eq!(got.notes.len(), 1);
    let gate = &got.sources[1];
    assert_eq!(gate.name, "experts.gate.weight");
    let stacked = |before: &str, after: &str| Parts::PerExpert {
        before: before.to_string(),
        after: after.to_string(),
        count: 8,
    };
    let hub = stacked("model.layers.31.block_sparse_moe.experts.", ".w1.weight");
    assert!(gate.alternatives.iter().any(|a| a.parts == hub));
    let fused = Parts::One("model.layers.31.mlp.experts.gate_up_proj".to_string());
    let fused = gate.alternatives.iter().find(|a| a.parts == fused).unwrap();
    let half = Step::Take {
        axis: 1,
        start: 0,
        step: 1,
        count: 14336,
        of: 28672,
    };
    assert_eq!(fused.steps, [half]);
}

#[test]
fn published_deepseek_v3_is_quantized() {
    let config = r#"{"model_type": "deepseek_v3", "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}"#;
    assert_eq!(
        error(config, 5),
        "deepseek_v3: the checkpoint is quantized (fp8); weights must be f32, f16 or bf16: \
         use an unquantized checkpoint, or dequantize it and remove `quantization_config`"
    );
}

#[test]
fn published_deepseek_v3_router() {
    let got = import(r#"{"model_type": "deepseek_v3"}"#, 60).unwrap();
    let router = &got.spec.router;
    assert_eq!(
        (router.score, router.select_bias, router.scale),
        (Score::Sigmoid, true, 2.5)
    );
    let groups = Groups {
        count: 8,
        keep: 4,
        stat: GroupStat::Top2Sum,
        mask: GroupMask::Exclude,
    };
    assert_eq!(router.groups, Some(groups));
    assert_eq!(
        got.spec.shared,
        [SharedExpert {
            hidden_dim: 2048,
            gate: SharedGate::None
        }]
    );
    assert_eq!(got.spec.shape.experts, 256);
}

#[test]
fn dense_layers_are_named() {
    assert_eq!(
        error(r#"{"model_type": "deepseek_v3"}"#, 2),
        "layer 2 of this deepseek_v3 model is dense; its MoE layers are 3-60"
    );
    let qwen = r#"{"model_type": "qwen3_moe", "num_hidden_layers": 8, "decoder_sparse_step": 2,
                   "mlp_only_layers": [3]}"#;
    assert_eq!(
        error(qwen, 3),
        "layer 3 of this qwen3_moe model is dense; its MoE layers are 1, 5, 7"
    );
    assert_eq!(
        error(qwen, 8),
        "layer 8 does not exist: this qwen3_moe model has 8 layers, its MoE layers are 1, 5, 7"
    );
    assert_eq!(
        error(r#"{"model_type": "gemma4_text"}"#, 0),
        "this gemma4_text model has no MoE layer: enable_moe_block is false"
    );
}

#[test]
fn which_layers_have_experts() {
    let layers = |config: &str| moe_layers(config).unwrap();
    assert_eq!(
        layers(r#"{"model_type": "nemotron_h", "hybrid_override_pattern": "ME*-E"}"#),
        [1, 4]
    );
    assert_eq!(
        layers(r#"{"model_type": "jamba", "num_hidden_layers": 6}"#),
        [1, 3, 5]
    );
    let ernie = r#"{"model_type": "ernie4_5_moe", "num_hidden_layers": 9, "moe_layer_interval": 2,
                    "moe_layer_start_index": 2, "moe_layer_end_index": 6}"#;
    assert_eq!(layers(ernie), [3, 5]);
    let llama = r#"{"model_type": "llama4", "text_config": {"model_type": "llama4_text",
                    "num_hidden_layers": 4, "interleave_moe_layer_step": 2}}"#;
    assert_eq!(layers(llama), [1, 3]);
    // Encoder layers 1 and 3, decoder layers 1 and 3 behind four encoder layers.
    let switch = r#"{"model_type": "switch_transformers", "num_layers": 4, "num_decoder_layers": 4,
                     "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2}"#;
    assert_eq!(layers(switch), [1, 3, 5, 7]);
    let frequency = r#"{"model_type": "deepseek_v2", "num_experts_per_tok": 2,
                        "num_hidden_layers": 6, "first_k_dense_replace": 1, "moe_layer_freq": 2}"#;
    assert_eq!(layers(frequency), [2, 4]);
}

#[test]
fn nested_text_config_and_its_prefixes() {
    let config = r#"{"model_type": "llama4", "torch_dtype": "bfloat16", "text_config":
        {"model_type": "llama4_text", "hidden_size": 64, "intermediate_size": 48,
         "num_local_experts": 16, "num_hidden_layers": 2}}"#;
    let got = import(config, 0).unwrap();
    assert_eq!(got.spec.precision.weights.name(), "bf16");
    assert_eq!(got.spec.router.weight_on, WeightSite::Input);
    let names: Vec<String> = got.sources[0]
        .alternatives
        .iter()
        .flat_map(|a| a.names())
        .collect();
    let hub = "language_model.model.layers.0.feed_forward.router.weight";
    assert!(names.iter().any(|n| n == hub), "{names:?}");
}

#[test]
fn unknown_models_get_a_suggestion() {
    let text = error(r#"{"model_type": "qwen3_mo"}"#, 0);
    assert!(
        text.starts_with("model type `qwen3_mo` is not supported; did you mean `qwen3_moe`?"),
        "{text}"
    );
    assert!(text.contains("; supported are afmoe, ") && text.contains(", switch_transformers"));
    let text = error(r#"{"model_type": "bert"}"#, 0);
    assert!(
        text.starts_with("model type `bert` is not supported; supported are "),
        "{text}"
    );
}

#[test]
fn bad_configurations() {
    assert_eq!(
        error("[1]", 0),
        "the configuration is not a JSON object: it is a list"
    );
    assert!(error("{", 0).starts_with("the configuration is not a JSON object: EOF"));
    assert!(matches!(import("{}", 0), Err(HfError::NoModelType)));
    assert_eq!(
        error(r#"{"model_type": "mixtral", "num_local_experts": "8"}"#, 0),
        "mixtral: `num_local_experts` is \"8\", expected a whole number"
    );
    assert_eq!(
        error(r#"{"model_type": "mixtral", "dtype": "float8_e4m3fn"}"#, 0),
        "mixtral: `dtype` is \"float8_e4m3fn\", expected float32, float16 or bfloat16"
    );
    assert_eq!(
        error(r#"{"model_type": "deepseek_v2"}"#, 0),
        "deepseek_v2: the configuration has no `num_experts_per_tok` or `moe_topk` or `moe_k` \
         or `top_k_experts` or `moe_top_k`"
    );
    assert_eq!(
        error(r#"{"model_type": "nemotron_h", "moe_latent_size": 64}"#, 1),
        "nemotron_h: `moe_latent_size` = 64 cannot be expressed: the spec has no axis for a latent \
         projection around the routed experts; only models without it can be read"
    );
    let text = error(r#"{"model_type": "mixtral", "num_experts_per_tok": 9}"#, 0);
    assert!(
        text.starts_with("mixtral: the configuration describes no valid layer: "),
        "{text}"
    );
}

#[test]
fn nothing_in_a_configuration_can_make_it_panic() {
    let huge = [
        "1e14",
        "18446744073709551615",
        "-1",
        "0",
        "null",
        "[]",
        "true",
        "1.5",
        "\"\"",
    ];
    for model in supported_models() {
        for value in huge {
            for key in [
                "hidden_size",
                "num_experts",
                "num_local_experts",
                "moe_intermediate_size",
                "n_shared_experts",
                "zero_expert_num",
                "moe_num_shared_experts",
                "n_group",
                "num_hidden_layers",
                "moe_layer_freq",
                "decoder_sparse_step",
                "mlp_layer_types",
                "shared_intermediate_size",
                "moe_layer_end_index",
                "vocab_size",
                "text_config",
                "num_sparse_encoder_layers",
                "expert_layer_period",
                "ffn_config",
            ] {
                let config = format!(
                    r#"{{"model_type": "{model}", "moe_topk": 2, "num_hidden_layers": 5, "{key}": {value}}}"#
                );
                let _ = import(&config, 3);
            }
        }
    }
}
