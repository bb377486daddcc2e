//! Import of Hugging Face configurations.

use moesaic_spec::hf::{
    HfError, TensorParts, TensorStep, import, moe_layers, refused_models, supported_models,
};
use moesaic_spec::*;
use std::f64::consts::FRAC_1_SQRT_2;

pub(crate) fn error(config: &str, layer: usize) -> String {
    import(config, layer).unwrap_err().to_string()
}

/// Every family imports with only the keys that transformers has no default for.
#[test]
fn every_family_builds_every_canonical_tensor() {
    for model in supported_models() {
        let top_k = if model == "switch_transformers" { 1 } else { 2 };
        let more = match model {
            "qwen3_omni_moe_talker" | "qwen3_omni_moe_talker_text" => {
                r#""shared_expert_intermediate_size": 40,"#
            }
            "bailing_moe" | "bailing_moe_v2" | "llada2_moe" => r#""hidden_size": 32,"#,
            "dbrx" => r#""ffn_config": {"moe_num_experts": 16, "moe_top_k": 2},"#,
            "deepseek_ref" => {
                r#""hidden_size": 32, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
                   "norm_topk_prob": true,"#
            }
            "nemotron_h_puzzle" => {
                r#""block_configs": [{"block_type": "moe"}, {"block_type": "mamba"}],"#
            }
            _ => "",
        };
        let config = format!(
            r#"{{"model_type": "{model}", "num_experts_per_tok": {top_k}, "num_experts": 16,
                 "moe_topk": {top_k}, "top_k_experts": {top_k}, "moe_intermediate_size": 24,
                 "enable_moe_block": true, {more}
                 "talker_config": {{"text_config": {{"shared_expert_intermediate_size": 40}}}}}}"#
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
    let stacked = |before: &str, after: &str| TensorParts::PerExpert {
        before: before.to_string(),
        after: after.to_string(),
        first: 0,
        count: 8,
    };
    let hub = stacked("model.layers.31.block_sparse_moe.experts.", ".w1.weight");
    assert!(gate.alternatives.iter().any(|a| a.parts == hub));
    let fused = TensorParts::One("model.layers.31.mlp.experts.gate_up_proj".to_string());
    let fused = gate.alternatives.iter().find(|a| a.parts == fused).unwrap();
    let half = TensorStep::Take {
        axis: 1,
        start: 0,
        step: 1,
        count: 14336,
        of: 28672,
    };
    assert_eq!(fused.steps, [half]);
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
            gate: SharedGate::None,
            bias: None,
            clamp: None,
            activation: None,
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
    // Sparse are encoder layers 1 and 3, and decoder layers 1 and 3 after four encoder layers.
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
        "deepseek_v2: the configuration has no `num_experts_per_tok` or \
         `num_experts_per_token` or `moe_topk` or `moe_k` or `top_k_experts` or `moe_top_k`"
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
                "mlp_only_layers",
                "moe_layers_enum",
                "num_local_experts",
                "num_shared_experts",
                "per_layer_config",
                "pyramid_num_routed",
                "shared_expert_intermediate_size",
                "swiglu_limit",
                "swiglu_limits",
                "talker_config",
                "thinker_config",
                "vision_config",
            ] {
                let config = format!(
                    r#"{{"model_type": "{model}", "moe_topk": 2, "num_hidden_layers": 5, "{key}": {value}}}"#
                );
                let _ = (import(&config, 3), import(&config, 8));
            }
        }
    }
}

/// Muse Spark as transformers' configuration describes it without arguments.
#[test]
fn muse_spark_has_norms_around_experts_in_a_narrower_width() {
    let got = import(r#"{"model_type": "muse_spark", "text_config": {}}"#, 61).unwrap();
    let (spec, latent) = (&got.spec, got.spec.latent.clone().unwrap());
    assert_eq!((spec.shape.model_dim, latent.dim), (8192, 4096));
    assert_eq!((latent.input_norm_eps, latent.norm_eps), (Some(1e-5), None));
    assert_eq!(spec.experts.output_norm_eps, Some(1e-8));
    assert_eq!(spec.router.renormalize_eps, 1e-15);
    let steps = |name: &str| {
        let source = got.sources.iter().find(|source| source.name == name);
        source.unwrap().alternatives[0].steps.clone()
    };
    let factor = TensorStep::Factor(0.1767766952966369);
    assert_eq!(steps("router.weight"), [factor]);
    for name in ["latent.input_norm.weight", "expert_norm.weight"] {
        assert_eq!(steps(name), [TensorStep::Plus(1.0)], "{name}");
    }
}

#[test]
fn refused_families_name_what_they_do() {
    for (model, does) in refused_models() {
        let found = import(&format!(r#"{{"model_type": "{model}"}}"#), 0).unwrap_err();
        let said = found.to_string();
        assert!(matches!(found, HfError::Family { .. }), "{said}");
        let start = format!("{model}: the layer cannot be expressed: {does}; the spec has ");
        assert!(said.starts_with(&start), "{said}");
    }
    assert_eq!(
        error(r#"{"model_type": "zaya"}"#, 0),
        "zaya: the layer cannot be expressed: the router is a network of three layers with a \
         state that it hands to the next layer's; the spec has routers of one projection of the \
         token"
    );
}

#[test]
fn refused_values_of_families_that_are_read() {
    let cannot = |key: &str, value: &str, axis: &str, remedy: &str| {
        format!("`{key}` = {value} cannot be expressed: the spec has no axis for {axis}; {remedy}")
    };
    let laguna = r#"{"model_type": "laguna", "moe_router_logit_softcapping": 30.0}"#;
    let capped = import(laguna, 1).unwrap().spec.router.logit_softcap;
    assert_eq!(capped, Some(30.0));
    let mixtral = r#"{"model_type": "mixtral", "router_logit_softcapping": 30.0}"#;
    assert!(error(mixtral, 0).contains("a soft cap on logits"));
    let aria = r#"{"model_type": "aria_text", "hidden_act": "gelu"}"#;
    let axis = "an activation of shared experts alone";
    let said = cannot("hidden_act", "\"gelu\"", axis, "only silu can be read");
    assert_eq!(error(aria, 0), format!("aria_text: {said}"));
    let step = |layer: usize| {
        let config = r#"{"model_type": "step3p7", "text_config": {"model_type": "step3p5",
            "num_hidden_layers": 5, "swiglu_limits": [0, 0, 0, null, 7.0],
            "swiglu_limits_shared": [0, 0, 0, 0.0, 16]}}"#;
        let spec = import(config, layer).unwrap().spec;
        (
            spec.experts.clamp,
            spec.experts.clamp_on,
            spec.shared[0].clamp,
        )
    };
    assert_eq!(step(3), (None, ClampSite::Input, None));
    assert_eq!(step(4), (Some(7.0), ClampSite::Output, Some(16.0)));
    let laguna = r#"{"model_type": "laguna", "moe_apply_router_weight_on_input": true}"#;
    assert!(error(laguna, 1).contains("expected false: transformers computes nothing else"));
}

/// The keys of the configuration that InternLM publishes.
#[test]
fn groups_that_each_give_experts() {
    let intern = r#"{"model_type": "interns1_pro", "text_config": {"decoder_sparse_step": 1,
        "hidden_act": "silu", "hidden_size": 4096, "mlp_only_layers": [], "num_hidden_layers": 94,
        "model_type": "interns1_pro_text", "moe_intermediate_size": 1536, "norm_topk_prob": true,
        "num_experts": 512, "num_experts_per_tok": 8, "router_n_groups": 8}}"#;
    let got = import(intern, 93).unwrap().spec;
    assert_eq!(got.router.select, Select::PerGroup(8));
    assert_eq!(got.router.renormalize, Renormalize::Sum);
    assert_eq!((got.shape.experts, got.shape.top_k), (512, 8));
    let plain = intern.replace(r#""router_n_groups": 8"#, r#""router_n_groups": -1"#);
    assert_eq!(import(&plain, 0).unwrap().spec.router.select, Select::TopK);
    let qwen = r#"{"model_type": "qwen3_moe", "router_n_groups": 8}"#;
    assert!(error(qwen, 0).contains("groups that each give as many experts"));
}

#[test]
fn blocks_of_tokens_that_agree_on_experts() {
    let llada = r#"{"model_type": "llada2_moe", "hidden_size": 2048, "num_hidden_layers": 20,
        "moe_intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8, "n_group": 8,
        "topk_group": 4, "score_function": "sigmoid", "moe_router_enable_expert_bias": true,
        "norm_topk_prob": true, "routed_scaling_factor": 2.5, "num_shared_experts": 1,
        "first_k_dense_replace": 1, "block_size": 32, "expert_capacity": 48}"#;
    let got = import(llada, 19).unwrap().spec.router;
    let (tokens, experts) = (32, 48);
    assert_eq!(got.blocks, Some(TokenBlocks { tokens, experts }));
    assert_eq!((got.groups, got.scale), (None, 2.5));
    let before = llada.replace(r#", "block_size": 32, "expert_capacity": 48"#, "");
    let got = import(&before, 19).unwrap().spec.router;
    assert_eq!((got.blocks, got.groups.unwrap().keep), (None, 4));
}

/// Limits of experts as published configurations name them.
#[test]
fn limits_of_experts() {
    let ling = r#"{"model_type": "bailing_hybrid", "num_hidden_layers": 4, "first_k_dense_replace": 1,
        "expert_swiglu_limit_list": [0, 0, 7, 0], "share_expert_swiglu_limit_list": [0, 0, 7, 9.5]}"#;
    let limits = |layer: usize| {
        let spec = import(ling, layer).unwrap().spec;
        (
            spec.experts.clamp,
            spec.experts.clamp_on,
            spec.shared[0].clamp,
        )
    };
    assert_eq!(limits(1), (None, ClampSite::Input, None));
    assert_eq!(limits(2), (Some(7.0), ClampSite::Output, None));
    assert_eq!(limits(3), (None, ClampSite::Output, Some(9.5)));
    let kimi = |more: &str| {
        let config = format!(
            r#"{{"model_type": "kimi_k3", "text_config": {{"model_type": "kimi_linear",
            "hidden_size": 7168, "routed_expert_hidden_size": 3584, "num_experts": 896,
            "num_experts_per_token": 16, "moe_intermediate_size": 2048, "num_shared_experts": 2,
            "hidden_act": "situ", "num_hidden_layers": 4 {more}}}}}"#
        );
        import(&config, 1).map(|got| got.spec)
    };
    let situ = |c: f64| format!("{c:?} * tanh(x / {c:?}) * sigmoid(x)");
    let caps = r#", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0"#;
    for (more, gate, up) in [("", 1.0, None), (caps, 4.0, Some(25.0))] {
        let spec = kimi(more).unwrap();
        let formula = Activation::Custom(Expression::parse(&situ(gate)).unwrap());
        assert_eq!(
            (spec.experts.activation, spec.experts.up_softcap),
            (formula, up)
        );
        let latent = spec.latent.unwrap();
        assert_eq!((latent.dim, latent.norm_eps), (3584, None));
    }
    let normed = kimi(r#", "latent_moe_use_norm": true, "rms_norm_eps": 1e-5"#).unwrap();
    assert_eq!(normed.latent.unwrap().norm_eps, Some(1e-5));
    let said = kimi(r#", "activation_situ_beta": 0"#)
        .unwrap_err()
        .to_string();
    assert!(said.contains("a number above 0"), "{said}");
}

/// Files of Grok name the types of other models.
#[test]
fn an_architecture_goes_before_the_model_type() {
    let grok = |more: &str| {
        let config = format!(
            r#"{{"architectures": ["Grok1ForCausalLM"], "model_type": "mixtral", "hidden_size": 8192,
            "intermediate_size": 32768, "num_local_experts": 8, "num_experts_per_tok": 2 {more}}}"#
        );
        import(&config, 63).unwrap()
    };
    let two = grok(r#", "residual_moe": true, "moe_intermediate_size": 16384"#);
    // The sum of both is divided by the square root of 2: by the router in the routed experts, and by
    // the down projection in the dense ones.
    let dense = two
        .sources
        .iter()
        .find(|source| source.name == "shared.0.down.weight");
    let half = TensorStep::Factor(FRAC_1_SQRT_2);
    assert!(dense.unwrap().alternatives[0].steps.contains(&half));
    assert_eq!(two.spec.router.scale, FRAC_1_SQRT_2);
    let (one, two) = (grok("").spec, two.spec);
    assert_eq!((one.shape.hidden_dim, one.shared.len()), (32768, 0));
    assert_eq!(one.router.logit_softcap, Some(30.0));
    assert_eq!(one.router.renormalize, Renormalize::None);
    assert_eq!(two.shape.hidden_dim, 16384);
    assert_eq!(two.shared[0].hidden_dim, 32768);
    assert_eq!(two.shared[0].activation, Some(Activation::GeluTanh));
}

#[test]
fn spellings_of_published_configurations() {
    let kimi = r#"{"model_type": "kimi_linear", "num_hidden_layers": 27, "num_experts": 256,
        "num_experts_per_token": 8, "num_shared_experts": 1, "moe_intermediate_size": 1024,
        "moe_renormalize": true, "num_expert_group": 1, "topk_group": 1, "moe_layer_freq": 1,
        "first_k_dense_replace": 1, "routed_scaling_factor": 2.446, "hidden_size": 2304}"#;
    assert_eq!(moe_layers(kimi).unwrap(), (1..27).collect::<Vec<_>>());
    let got = import(kimi, 26).unwrap().spec;
    assert_eq!((got.shape.experts, got.shape.top_k), (256, 8));
    assert_eq!((got.router.scale, &got.router.groups), (2.446, &None));
    assert_eq!(got.shared[0].hidden_dim, 1024);

    let mimo = r#"{"model_type": "mimo_v2_flash", "num_hidden_layers": 4,
        "moe_layer_freq": [0, 1, 0, 1], "routed_scaling_factor": null, "n_shared_experts": null}"#;
    assert_eq!(moe_layers(mimo).unwrap(), [1, 3]);
    let got = import(mimo, 3).unwrap().spec;
    assert_eq!((got.router.scale, got.shared.len()), (1.0, 0));

    for listed in [r#""3,4, 6""#, "[3, 4, 6]"] {
        let step = format!(
            r#"{{"model_type": "step3p7", "text_config": {{"num_hidden_layers": 7,
                 "moe_layers_enum": {listed}, "moe_num_experts": 288, "moe_top_k": 8}}}}"#
        );
        assert_eq!(moe_layers(&step).unwrap(), [3, 4, 6]);
        assert_eq!(import(&step, 4).unwrap().spec.shape.experts, 288);
    }
    let wrong = r#"{"model_type": "step3p7", "moe_layers_enum": "3,x"}"#;
    assert_eq!(
        error(wrong, 3),
        "step3p7: `moe_layers_enum` is \"3,x\", expected whole numbers divided by commas"
    );
    let flint = r#"{"model_type": "flint", "num_hidden_layers": 5}"#;
    assert_eq!(moe_layers(flint).unwrap(), [2, 3, 4]);
}

/// Text keys are at the top level; the tower lists its experts per block.
#[test]
fn two_stacks_are_numbered_through() {
    let dots = r#"{"model_type": "dots3_note", "num_hidden_layers": 3, "vision_config":
        {"model_type": "dots3_note_vision_encoder", "pyramid_num_routed": [-1, 4, 2],
         "capacity_factor": 3, "embed_dim": 48, "moe_intermediate_size": 16}}"#;
    assert_eq!(moe_layers(dots).unwrap(), [1, 2, 4, 5]);
    let shape = |layer: usize| import(dots, layer).unwrap().spec.shape;
    assert_eq!((shape(1).experts, shape(1).model_dim), (256, 5120));
    assert_eq!(
        (shape(4).experts, shape(4).top_k, shape(4).model_dim),
        (4, 3, 48)
    );
    assert_eq!((shape(5).experts, shape(5).top_k), (2, 2));
    // Its published tower: 25 dense blocks, then 4 to 64 experts and 64 again.
    let published = r#"{"model_type": "dots3_note", "num_hidden_layers": 1,
        "vision_config": {"num_experts_per_tok": null}}"#;
    assert_eq!(moe_layers(published).unwrap(), (26..43).collect::<Vec<_>>());
    assert_eq!(import(published, 26).unwrap().spec.shape.top_k, 2);
    let alone = r#"{"model_type": "dots3_note_text", "num_hidden_layers": 3}"#;
    assert_eq!(moe_layers(alone).unwrap(), [1, 2]);

    let ernie = r#"{"model_type": "ernie4_5_vl_moe", "text_config": {"num_hidden_layers": 3}}"#;
    assert_eq!(moe_layers(ernie).unwrap(), [1, 2, 4, 5]);
    let got = import(ernie, 5).unwrap();
    assert_eq!(
        (got.spec.shape.hidden_dim, got.spec.shared[0].hidden_dim),
        (512, 3072)
    );
    let vision = TensorParts::PerExpert {
        before: "model.layers.2.mlp.experts.".to_string(),
        after: ".gate_proj.weight".to_string(),
        first: 64,
        count: 64,
    };
    let gate = &got.sources[2];
    assert_eq!(gate.name, "experts.gate.weight");
    assert!(gate.alternatives.iter().any(|way| way.parts == vision));
}

/// A long model type is compared and shown in shortened form.
#[test]
fn a_long_model_type_is_cut() {
    let model = "mixtral(".repeat(4_000);
    let said = error(&format!("{{\"model_type\": \"{model}\"}}"), 0);
    assert!(said.contains("`mixtral(mixtral("), "{said}");
    assert!(said.contains('…') && said.len() < 3_000, "{said}");
}
