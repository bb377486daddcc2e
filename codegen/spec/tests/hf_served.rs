//! Families that vLLM and SGLang serve and transformers has no code for.

use crate::hf::error;
use moesaic_spec::hf::{TensorParts, import, moe_layers};
use moesaic_spec::*;

/// Models without code in transformers, by the keys that tell them from their neighbours.
#[test]
fn served_families_differ_from_their_neighbours() {
    let spec = |config: &str, layer: usize| import(config, layer).unwrap().spec;
    let k2 = r#"{"model_type": "k2_horizon", "router_scaling_factor": 2.5, "mlp_only_layers": [0],
        "num_hidden_layers": 3, "mova_num_experts": 64, "num_shared_experts": 2}"#;
    assert_eq!(moe_layers(k2).unwrap(), [1, 2]);
    let got = import(k2, 1).unwrap();
    let router = &got.spec.router;
    assert_eq!(
        (router.score, router.select_bias, router.scale),
        (Score::Sigmoid, true, 2.5)
    );
    assert_eq!(got.spec.shared[0].hidden_dim, 2 * 768);
    assert!(
        got.notes
            .iter()
            .any(|note| note.contains("mova_num_experts"))
    );
    let bias = got.sources.iter().find(|s| s.name == "router.select_bias");
    let name = TensorParts::One("model.layers.1.mlp.gate.bias".to_string());
    assert!(bias.unwrap().alternatives.iter().any(|a| a.parts == name));

    let pangu = |bias: &str| spec(&format!(r#"{{"model_type": "pangu_ultra_moe"{bias}}}"#), 3);
    assert!(!pangu("").router.select_bias);
    assert!(
        pangu(r#", "router_enable_expert_bias": true"#)
            .router
            .select_bias
    );

    let together = r#"{"model_type": "param2moe", "num_shared_experts": 2,
        "moe_shared_expert_intermediate_size": 4096, "score_function": "softmax"}"#;
    let got = spec(together, 0);
    assert_eq!(got.shared[0].hidden_dim, 4096);
    assert_eq!(
        (got.router.score, got.router.select_bias),
        (Score::Softmax, true)
    );

    let xverse = r#"{"model_type": "xverse", "num_experts": 64, "moe_top_k": 6,
        "num_shared_experts": 2, "intermediate_size": 1728}"#;
    let got = spec(xverse, 27);
    assert_eq!(got.shared[0].hidden_dim, 2 * 1728);
    assert_eq!(got.router.renormalize, Renormalize::None);
    assert_eq!(
        spec(r#"{"model_type": "minicpm", "num_experts": 8}"#, 0)
            .router
            .renormalize,
        Renormalize::Sum
    );
    for dense in ["minicpm", "xverse"] {
        let said = error(&format!(r#"{{"model_type": "{dense}"}}"#), 0);
        assert!(said.contains("num_experts names none"), "{said}");
    }
}

/// Each layer of Nemotron-H Puzzle has its own sizes, in a list of blocks.
#[test]
fn blocks_have_sizes_of_their_own() {
    let config = |blocks: &str| {
        format!(
            r#"{{"model_type": "nemotron_h_puzzle", "n_routed_experts": 512, "moe_latent_size": 1024,
                "moe_intermediate_size": 7, "block_configs": {blocks}}}"#
        )
    };
    let blocks = r#"[{"block_type": "mamba"},
        {"block_type": "moe", "moe_intermediate_size": 1280, "num_experts_per_tok": 4},
        {"block_type": "moe", "moe_intermediate_size": 2688, "num_experts_per_tok": 22}]"#;
    let config_of = config(blocks);
    assert_eq!(moe_layers(&config_of).unwrap(), [1, 2]);
    let shape = |layer: usize| import(&config_of, layer).unwrap().spec.shape;
    assert_eq!((shape(1).hidden_dim, shape(1).top_k), (1280, 4));
    assert_eq!((shape(2).hidden_dim, shape(2).top_k), (2688, 22));
    for (blocks, part) in [
        ("7", "a list of objects"),
        ("[7]", "objects with a block_type"),
        (r#"[{"block_type": "mamba"}]"#, "none of block_type moe"),
    ] {
        let said = error(&config(blocks), 0);
        assert!(said.contains(part), "{said}");
    }
    let none = error(r#"{"model_type": "nemotron_h_puzzle"}"#, 0);
    assert!(none.contains("block_configs"), "{none}");
}
