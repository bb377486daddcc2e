//! Routing keys of Hugging Face configurations, and nested language models.

use moesaic_spec::hf::{HfError, import, moe_layers, routing_keys};
use moesaic_spec::*;

fn error(config: &str, layer: usize) -> String {
    import(config, layer).unwrap_err().to_string()
}

/// A model type, a routing key, and a value that asks for other routing than the family computes.
const DISAGREES: &[(&str, &str, &str)] = &[
    ("scoring_func", "qwen3_moe", "\"sigmoid\""),
    ("score_func", "qwen2_moe", "\"sigmoid\""),
    ("score_function", "olmoe", "\"sigmoid\""),
    ("moe_router_activation_func", "deepseek_v3", "\"softmax\""),
    ("moe_router_activation", "step3p7", "\"softmax\""),
    ("router_activation", "mixtral", "\"sigmoid\""),
    ("moe_router_score_function", "mixtral", "\"sigmoid\""),
    ("expert_selection_fn", "mixtral", "\"sigmoid\""),
    ("moe_gate_act", "ernie4_5_moe", "\"sigmoid\""),
    ("moe_router_use_sigmoid", "laguna", "false"),
    ("use_sigmoid_gating", "mixtral", "true"),
    ("topk_method", "deepseek_v3", "\"greedy\""),
    ("norm_topk_prob", "deepseek_v2", "true"),
    ("moe_renormalize", "olmoe", "true"),
    ("route_norm", "afmoe", "false"),
    ("norm_expert_weight", "step3p7", "false"),
    ("moe_router_norm_topk_prob", "minimax_m2", "false"),
    ("n_group", "qwen3_moe", "4, \"topk_group\": 2"),
    ("num_expert_group", "minimax_m2", "4, \"topk_group\": 2"),
    ("num_expert_groups", "afmoe", "4, \"num_limited_groups\": 2"),
    ("topk_group", "qwen3_moe", "1, \"n_group\": 4"),
    ("num_limited_groups", "afmoe", "1, \"num_expert_groups\": 4"),
    ("router_n_groups", "qwen3_moe", "8"),
    ("expert_capacity", "qwen3_moe", "8"),
    (
        "group_limited_greedy",
        "hunyuan_v1_moe",
        "true, \"n_group\": 4, \"topk_group\": 2",
    ),
    (
        "use_grouped_topk",
        "minimax_m2",
        "true, \"n_group\": 4, \"topk_group\": 2",
    ),
    ("routed_scaling_factor", "minimax_m2", "2.5"),
    ("router_scaling_factor", "mixtral", "2.5"),
    ("moe_routed_scaling_factor", "mixtral", "2.5"),
    ("moe_router_scaling_factor", "mixtral", "2.5"),
    ("moe_router_topk_scaling_factor", "mixtral", "2.5"),
    ("route_scale", "mixtral", "2.5"),
    ("router_scale", "mixtral", "2.5"),
    ("moe_router_enable_routed_scaling", "deepseek_v3", "false"),
    ("router_bias", "gpt_oss", "false"),
    ("moe_router_bias", "mixtral", "true"),
    ("use_router_bias", "mixtral", "true"),
    ("add_router_bias", "mixtral", "true"),
    ("use_routing_bias", "minimax_m2", "false"),
    ("moe_router_enable_expert_bias", "bailing_hybrid", "false"),
    ("use_expert_bias", "mixtral", "true"),
    ("moe_use_aux_free", "ernie4_5_moe", "false"),
    ("use_moe_router_bias", "step3p7", "false"),
    ("num_local_experts", "qwen3_moe", "16, \"num_experts\": 8"),
    ("num_experts", "mixtral", "16, \"num_local_experts\": 8"),
    ("n_routed_experts", "qwen3_moe", "16, \"num_experts\": 8"),
    (
        "moe_num_experts",
        "qwen3_moe",
        "[16, 16], \"num_experts\": 8",
    ),
    ("num_experts_per_tok", "switch_transformers", "2"),
    (
        "num_experts_per_token",
        "mixtral",
        "3, \"num_experts_per_tok\": 2",
    ),
    ("moe_topk", "mixtral", "3, \"num_experts_per_tok\": 2"),
    ("moe_k", "mixtral", "3, \"num_experts_per_tok\": 2"),
    ("top_k_experts", "mixtral", "3, \"num_experts_per_tok\": 2"),
    ("moe_top_k", "mixtral", "3, \"num_experts_per_tok\": 2"),
    (
        "experts_per_token",
        "gpt_oss",
        "3, \"num_experts_per_tok\": 4",
    ),
    ("n_shared_experts", "mixtral", "1"),
    ("num_shared_experts", "qwen3_moe", "2"),
    ("moe_num_shared_experts", "mixtral", "1"),
    ("num_shared_expert", "mixtral", "[1, 1]"),
    ("shared_expert_intermediate_size", "qwen3_moe", "1024"),
    ("moe_shared_expert_intermediate_size", "deepseek_v3", "1000"),
    ("shared_experts_intermediate_size", "mixtral", "1024"),
    ("shared_intermediate_size", "minimax_m2", "1024"),
    ("share_expert_dim", "mixtral", "1024"),
    ("share_expert_dims", "mixtral", "[1024]"),
    ("use_mixed_mlp_moe", "hunyuan_v1_moe", "false"),
    ("moe_router_enable_shared_expert", "bailing_hybrid", "false"),
    ("shared_moe_mode", "qwen2_moe", "\"none\""),
    ("moe_router_logit_softcapping", "mixtral", "30.0"),
    ("router_logit_softcapping", "mixtral", "30.0"),
    ("moe_apply_router_weight_on_input", "mixtral", "true"),
    ("apply_router_weight_on_input", "llama4_text", "false"),
    ("zero_expert_num", "mixtral", "4"),
    ("zero_expert_type", "longcat_flash", "\"constant\""),
    ("moe_latent_size", "deepseek_v3", "512"),
    ("routed_expert_hidden_size", "deepseek_v3", "512"),
    ("moe_hidden_size", "mixtral", "512"),
    ("latent_moe_use_norm", "kimi_linear", "true"),
    ("swiglu_limit", "deepseek_v3", "7.0"),
    ("swiglu_limits", "mixtral", "[7.0]"),
    ("swiglu_limits_shared", "mixtral", "[7.0]"),
    ("expert_swiglu_limit_list", "mixtral", "[7.0]"),
    ("share_expert_swiglu_limit_list", "mixtral", "[7.0]"),
    ("mlp_bias", "qwen3_moe", "true"),
    ("moe_bias", "mixtral", "true"),
    ("first_k_dense_replace", "minimax_m2", "3"),
    ("num_dense_layers", "qwen3_moe", "3"),
    ("moe_layer_num_skipped", "hunyuan_v1_moe", "3"),
    ("decoder_sparse_step", "qwen3_5_moe", "2"),
    ("interleave_moe_layer_step", "mixtral", "2"),
    ("moe_layer_interval", "mixtral", "2"),
    ("moe_layer_freq", "minimax_m2", "[0, 1, 0]"),
    ("moe_every_n_layer", "mixtral", "0"),
    ("mlp_only_layers", "qwen3_5_moe", "[0]"),
    ("moe_layers", "mixtral", "[1, 2]"),
    ("moe_layers_enum", "mixtral", "\"1,2\""),
    ("capacity_factor", "mixtral", "1.25"),
    ("moe_drop_tokens", "mixtral", "true"),
    ("add_router_probs", "switch_transformers", "true"),
    ("uniform_expert_assignment", "mixtral", "true"),
    ("multi_gate", "deepseek_v3", "true"),
    ("router_type", "deepseek_v3", "\"MultiRouter\""),
];

/// No routing key is ignored silently: each one in the table is refused where it disagrees, or
/// states why it changes nothing.
#[test]
fn every_routing_key_that_disagrees_is_refused() {
    let must_agree: Vec<&str> = routing_keys()
        .iter()
        .filter(|keys| keys.ignored.is_none())
        .flat_map(|keys| keys.names.iter().copied())
        .collect();
    let tried: Vec<&str> = DISAGREES.iter().map(|(key, ..)| *key).collect();
    assert_eq!(tried, must_agree);
    for (key, model, value) in DISAGREES {
        let config = |pair: &str| format!(r#"{{"model_type": "{model}"{pair}}}"#);
        let least = match *model {
            "deepseek_v2" => ", \"num_experts_per_tok\": 2",
            "bailing_moe" => {
                ", \"hidden_size\": 8, \"num_experts\": 8, \"num_experts_per_tok\": 2, \
                 \"moe_intermediate_size\": 4"
            }
            _ => "",
        };
        let first = moe_layers(&config(least)).unwrap()[0];
        let plain = import(&config(least), first);
        assert!(plain.is_ok(), "{model}: {plain:?}");
        let said = import(&config(&format!("{least}, \"{key}\": {value}")), first);
        match said {
            Err(HfError::Routing { key: found, .. }) => {
                assert!(
                    config(&format!("{value}{key}")).contains(&found),
                    "{key}: {found}"
                );
            }
            other => panic!("{model} with {key} = {value}: {other:?}"),
        }
    }
}

#[test]
fn routing_keys_that_agree_are_read_and_unknown_ones_are_noted() {
    let published = r#"{"model_type": "minimax_m2", "scoring_func": "sigmoid",
        "use_routing_bias": true, "shared_intermediate_size": 0, "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0, "num_mtp_modules": 3, "head_dim": 128}"#;
    assert_eq!(import(published, 0).unwrap().notes, [""; 0]);
    let grouped = r#"{"model_type": "kimi_linear", "num_expert_group": 1, "topk_group": 1,
        "moe_router_activation_func": "sigmoid", "topk_method": "noaux_tc",
        "use_grouped_topk": true, "moe_renormalize": true, "moe_layer_freq": 1}"#;
    import(grouped, 5).unwrap();
    let strange = r#"{"model_type": "mixtral", "moe_router_zigzag": 3}"#;
    let notes = import(strange, 0).unwrap().notes;
    assert!(
        notes[0].contains("no rule is known for `moe_router_zigzag`"),
        "{notes:?}"
    );
    let refused = error(r#"{"model_type": "olmoe", "scoring_func": "sigmoid"}"#, 0);
    assert_eq!(
        refused,
        "olmoe: `scoring_func` = \"sigmoid\" asks for something else than layers of this type \
         compute (the scores of experts): remove the key if the model was not trained with it, or \
         write the spec by hand"
    );
}

/// DeepSeek-VL2's language model names the router of DeepSeek-V3 under DeepSeek-V2's type.
#[test]
fn deepseek_v2_has_the_router_that_its_method_names() {
    let config = r#"{"model_type": "deepseek_vl_v2", "language_config": {
        "model_type": "deepseek_v2", "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        "norm_topk_prob": true, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.0,
        "num_experts_per_tok": 6, "n_routed_experts": 72, "first_k_dense_replace": 1}}"#;
    let got = import(config, 1).unwrap();
    let router = &got.spec.router;
    assert_eq!((router.score, router.select_bias), (Score::Sigmoid, true));
    assert_eq!((router.renormalize, router.scale), (Renormalize::Sum, 2.0));
    let named = |name: &str| {
        got.sources[0]
            .alternatives
            .iter()
            .any(|a| a.names()[0] == name)
    };
    assert!(named("language.model.layers.1.mlp.gate.weight"));
}

#[test]
fn language_models_are_found_where_others_nest_them() {
    let text = r#"{"model_type": "qwen3_moe", "num_experts": 16, "moe_intermediate_size": 24}"#;
    let spec = import(text, 0).unwrap().spec;
    for outer in [
        format!(r#"{{"model_type": "internvl_chat", "llm_config": {text}}}"#),
        format!(r#"{{"model_type": "x", "language_config": {text}}}"#),
        format!(r#"{{"thinker_config": {{"model_type": "t", "text_config": {text}}}}}"#),
        format!(r#"{{"model_type": "x", "llm_config": {{"text_config": {text}}}}}"#),
    ] {
        assert_eq!(import(&outer, 0).unwrap().spec, spec, "{outer}");
    }
    for (name, more) in [
        ("minimax_m3", ""),
        ("deepseek", ""),
        (
            "bailing_moe",
            r#", "hidden_size": 8, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 4, "first_k_dense_replace": 1"#,
        ),
    ] {
        let config = format!(r#"{{"model_type": "{name}"{more}}}"#);
        let layers = moe_layers(&config).unwrap();
        import(&config, layers[0]).unwrap();
    }
    let missing = error(
        r#"{"model_type": "deepseek_ref", "hidden_size": 8, "moe_intermediate_size": 4,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "topk_method": "noaux_tc"}"#,
        0,
    );
    assert_eq!(
        missing,
        "deepseek_ref: the configuration has no `scoring_func`"
    );
}

#[test]
fn bailing_moe_has_the_router_of_its_version() {
    let config = |more: &str| {
        format!(
            r#"{{"model_type": "bailing_moe", "hidden_size": 8, "num_experts": 8,
                "num_experts_per_tok": 2, "moe_intermediate_size": 4, "num_shared_experts": 2,
                "norm_topk_prob": true{more}}}"#
        )
    };
    let first = import(&config(""), 0).unwrap().spec;
    assert_eq!(first.router.score, Score::Softmax);
    assert_eq!(first.router.renormalize, Renormalize::Sum);
    assert_eq!(first.shared[0].hidden_dim, 8);
    let second = import(
        &config(
            r#", "score_function": "sigmoid", "moe_router_enable_expert_bias": true, "n_group": 4,
            "topk_group": 2, "routed_scaling_factor": 2.5,
            "moe_shared_expert_intermediate_size": 3"#,
        ),
        0,
    );
    let second = second.unwrap().spec;
    assert_eq!(
        (second.router.score, second.router.select_bias),
        (Score::Sigmoid, true)
    );
    assert_eq!((second.router.scale, second.shared[0].hidden_dim), (2.5, 6));
    assert_eq!(second.router.groups.unwrap().count, 4);
}

/// Ling's routers of images and audio, by either key, and what they need.
#[test]
fn routers_by_modality_are_named() {
    let config = |more: &str| {
        format!(
            r#"{{"model_type": "bailing_moe_v2", "hidden_size": 8, "num_experts": 8,
                "num_experts_per_tok": 2, "moe_intermediate_size": 4{more}}}"#
        )
    };
    let biased = r#", "score_function": "sigmoid", "moe_router_enable_expert_bias": true"#;
    for key in [r#""multi_gate": true"#, r#""router_type": "MultiRouter""#] {
        let several = import(&config(&format!("{biased}, {key}")), 0).unwrap();
        let alone = import(&config(biased), 0).unwrap();
        assert_eq!(several.spec, alone.spec);
        assert_eq!(several.sources, alone.sources);
        let names: Vec<&str> = several.routers.iter().map(|router| &*router.name).collect();
        assert_eq!(names, ["image", "audio"]);
        for router in &several.routers {
            let read: Vec<&str> = router.sources.iter().map(|source| &*source.name).collect();
            assert_eq!(read, ["router.weight", "router.select_bias"]);
        }
        assert!(
            several
                .notes
                .iter()
                .any(|note| note.contains("routers of their own"))
        );
        assert!(alone.routers.is_empty());
        let said = error(&config(&format!(", {key}")), 0);
        assert!(
            said.contains("routers by modality without a bias"),
            "{said}"
        );
    }
    let one = config(&format!(
        r#"{biased}, "multi_gate": false, "router_type": "topN""#
    ));
    assert!(import(&one, 0).unwrap().routers.is_empty());
}

/// Python's `json` reads and writes these; published Nemotron files have the second line.
#[test]
fn numbers_of_python_and_a_byte_order_mark_are_read() {
    let config = "\u{feff}{\"model_type\": \"nemotron_h\",
        \"time_step_limit\": [0.0, Infinity], \"a\": -Infinity, \"b\": NaN}";
    let layer = moe_layers(config).unwrap()[0];
    import(config, layer).unwrap();
    let used = r#"{"model_type": "deepseek_v3", "routed_scaling_factor": Infinity}"#;
    assert_eq!(
        error(used, 3),
        "deepseek_v3: `routed_scaling_factor` is \"Infinity\", expected a number"
    );
}
