//! The parts of a model around its layers with experts, as numbers.

use super::config::Config;
use super::{HfError, families};
use serde_json::Value;

/// The layers of a model and the matrices around its experts. A plan for a whole model counts
/// their weights, activations and arithmetic.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelShape {
    /// The width of a token.
    pub width: usize,
    /// The number of layers with experts.
    pub moe_layers: usize,
    /// The number of other layers.
    pub dense_layers: usize,
    /// The width inside the feed-forward block of such a layer, which has three matrices.
    pub dense_width: usize,
    /// The attention of every layer.
    pub attention: AttentionShape,
    /// The number of words; 0 leaves out the embedding and the output head.
    pub vocabulary: usize,
    /// Whether the output head is the embedding.
    pub tied: bool,
}

/// The attention of one layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AttentionShape {
    /// The weights that every token is multiplied with.
    pub parameters: f64,
    /// The width of the queries of all heads.
    pub queries: usize,
    /// The width of the keys of all heads that have their own.
    pub keys: usize,
    /// The width of the values of all heads that have their own.
    pub values: usize,
    /// The width of the outputs of all heads.
    pub outputs: usize,
    /// The width of the narrow vectors that queries, keys and values are projected from (DeepSeek's
    /// MLA); 0 where they are projected from the token.
    pub latent: usize,
    /// The weights of these projections.
    pub latent_parameters: f64,
    /// The number of layers that see a window of tokens only.
    pub windowed_layers: usize,
    /// The tokens of that window.
    pub window: usize,
}

impl ModelShape {
    /// Returns the number of layers.
    pub fn layers(&self) -> usize {
        self.moe_layers + self.dense_layers
    }

    /// Returns the parameters of the embedding and, unless it is tied, as many of the head.
    pub fn head_parameters(&self) -> f64 {
        let one = (self.vocabulary * self.width) as f64;
        if self.tied { one } else { 2.0 * one }
    }

    /// Returns the parameters of the feed-forward block of a layer without experts.
    pub fn dense_parameters(&self) -> f64 {
        3.0 * self.width as f64 * self.dense_width as f64
    }
}

/// The words that transformers has for layers whose tokens attend to all tokens before them, or
/// to those of a window.
const ATTENTION: [&str; 4] = [
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "attention",
];

/// Keys that make layers other than such, the value that does not, and the kind of the layers. A
/// published configuration may have one in place of the list of kinds, which transformers derives.
const OTHER_LAYERS: [(&str, u64, &str); 9] = [
    ("attn_layer_period", 1, "layers without attention"),
    ("full_attention_interval", 1, "layers without attention"),
    ("layer_group_size", 1, "layers without attention"),
    ("attn_type_list", 1, "layers without attention"),
    ("hybrid_override_pattern", 1, "layers without attention"),
    ("linear_attn_config", 1, "layers without attention"),
    ("full_attn_idxs", 1, "layers without attention"),
    ("index_topk", 0, "attention to chosen tokens"),
    ("compress_ratios", 0, "compressed attention"),
];

/// Keys with a number n in place of the kinds of layers: each nth has full attention, the others a
/// window.
const FULL_EVERY: [&str; 2] = ["global_attn_every_n_layers", "sliding_window_pattern"];

/// Families whose layers hold matrices that [`ModelShape`] does not count.
const OTHER_MATRICES: [(&[&str], &str); 3] = [
    (
        &["longcat_flash", "longcat_flash_ngram"],
        "layers with two attentions and two dense blocks",
    ),
    (&["jetmoe"], "experts of attention"),
    (
        &[
            "gemma4",
            "gemma4_text",
            "diffusion_gemma",
            "diffusion_gemma_text",
        ],
        "a dense block beside the experts",
    ),
];

/// Reads the shape of the model that `config_json` describes.
///
/// # Errors
///
/// [`HfError`] if the configuration cannot be imported, lacks a size, has an encoder, or has
/// layers without attention or with matrices whose cost is not modelled.
pub fn model_shape(config_json: &str) -> Result<ModelShape, HfError> {
    let config = Config::parse(config_json, families::is_known)?;
    let layers = (families::find(&config)?.layers)(&config)?;
    for key in ["is_encoder_decoder", "num_decoder_layers"] {
        let there = config.peek(key).is_some_and(|value| value != false);
        if there {
            return Err(not_modelled(&config, key, "an encoder beside the decoder"));
        }
    }
    let names = |(names, _): &&(&[&str], _)| names.contains(&config.model.as_str());
    if let Some((_, axis)) = OTHER_MATRICES.iter().find(names) {
        return Err(not_modelled(&config, "model_type", axis));
    }
    let moe_layers = layers.moe.len();
    let width = config.need(&["hidden_size", "n_embd", "d_model"])?;
    Ok(ModelShape {
        width,
        moe_layers,
        dense_layers: layers.total - moe_layers,
        dense_width: match layers.total - moe_layers {
            0 => 0,
            _ => config.need(&["intermediate_size", "ffn_hidden_size", "n_inner"])?,
        },
        attention: attention(&config, width, layers.total)?,
        vocabulary: config.positive(&["vocab_size"])?,
        tied: config.flag(&["tie_word_embeddings"], false)?,
    })
}

/// Spellings of the number of heads with their own keys and values, and DBRX's.
const OWN: &[&str] = &["num_key_value_heads"];
const DBRX_OWN: &[&str] = &["kv_n_heads"];

fn attention(config: &Config, width: usize, layers: usize) -> Result<AttentionShape, HfError> {
    let heads = config.positive(&["num_attention_heads", "n_head", "num_heads", "n_heads"])?;
    let windows = windows(config, layers)?;
    let sizes = match config.size_opt(&["kv_lora_rank"])? {
        Some(latent) => latent_attention(config, [width, heads, latent])?,
        None => {
            let head = config.size(&["head_dim"], width / heads)?;
            let own = own_heads(config)?.unwrap_or(heads);
            let (queries, keys) = (heads * head, own * head);
            AttentionShape {
                parameters: width as f64 * (2 * queries + 2 * keys) as f64,
                queries,
                keys,
                values: keys,
                outputs: queries,
                ..AttentionShape::default()
            }
        }
    };
    Ok(AttentionShape {
        windowed_layers: windows.0,
        window: windows.1,
        ..sizes
    })
}

/// Returns the number of heads that have keys and values of their own; `None` where all have.
fn own_heads(config: &Config) -> Result<Option<usize>, HfError> {
    // DBRX says it in an object of its own, and transformers' default there is one head.
    if config.model == "dbrx" {
        let attention = config.nested("attn_config")?;
        let stated = attention.size_opt(DBRX_OWN)?.is_some();
        return Ok(Some(if stated {
            attention.positive(DBRX_OWN)?
        } else {
            1
        }));
    }
    let stated = config.size_opt(OWN)?.is_some();
    stated.then(|| config.positive(OWN)).transpose()
}

/// Returns the attention whose keys and values come from one narrow vector (DeepSeek's MLA).
fn latent_attention(
    config: &Config,
    [width, heads, latent]: [usize; 3],
) -> Result<AttentionShape, HfError> {
    let plain = config.need(&["qk_nope_head_dim"])?;
    let turned = config.need(&["qk_rope_head_dim"])?;
    let value = config.need(&["v_head_dim"])?;
    let query = heads * (plain + turned);
    // The sizes come from a file, and products of four of them are beyond an integer.
    let count = |sizes: [usize; 2]| sizes[0] as f64 * sizes[1] as f64;
    let narrow = config.size_opt(&["q_lora_rank"])?;
    let (query_down, query_up) = match narrow {
        Some(narrow) => (count([narrow, width]), count([narrow, query])),
        None => (0.0, count([width, query])),
    };
    let down = query_down + count([width, latent + turned]);
    let up = query_up + count([latent, heads * (plain + value)]);
    Ok(AttentionShape {
        parameters: down + up + count([heads * value, width]),
        queries: query,
        keys: query,
        values: heads * value,
        outputs: heads * value,
        latent: narrow.unwrap_or(0) + latent + turned,
        latent_parameters: up,
        ..AttentionShape::default()
    })
}

/// Returns the number of layers with a window, and its tokens.
fn windows(config: &Config, layers: usize) -> Result<(usize, usize), HfError> {
    let window = config.size(&["sliding_window", "attention_chunk_size"], 0)?;
    let count = |windowed| {
        if window == 0 {
            (0, 0)
        } else {
            (windowed, window)
        }
    };
    let Some(types) = config.words(&["layer_types", "layers_block_type"])? else {
        check_derived(config)?;
        let full = config.size_opt(&FULL_EVERY)?.filter(|every| *every > 0);
        return Ok(count(full.map_or(0, |every| layers - layers / every)));
    };
    if let Some(other) = types.iter().find(|kind| !ATTENTION.contains(&&***kind)) {
        let axis = format!("layers of the kind {other}");
        return Err(not_modelled(config, "layer_types", &axis));
    }
    let narrow = |kind: &&String| matches!(&***kind, "sliding_attention" | "chunked_attention");
    Ok(count(types.iter().take(layers).filter(narrow).count()))
}

/// Refuses keys from which transformers derives layers other than those with attention.
fn check_derived(config: &Config) -> Result<(), HfError> {
    let is_other = |(key, plain, _): &&(&str, u64, &str)| {
        let plain = |value: &Value| value.as_u64() == Some(*plain);
        match config.peek(key) {
            None | Some(Value::Null) => false,
            Some(Value::Array(values)) => !values.iter().all(plain),
            Some(value) => !plain(value),
        }
    };
    OTHER_LAYERS
        .iter()
        .find(is_other)
        .map_or(Ok(()), |(key, _, axis)| {
            Err(not_modelled(config, key, axis))
        })
}

fn not_modelled(config: &Config, key: &str, axis: &str) -> HfError {
    let remedy = "a plan for the model needs the number of its layers and parameters instead";
    config.unsupported(key, axis, remedy)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEEPSEEK_V3: &str = r#"{ "model_type": "deepseek_v3", "hidden_size": 7168,
        "num_hidden_layers": 61, "first_k_dense_replace": 3, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "num_attention_heads": 128, "num_key_value_heads": 128,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280,
        "tie_word_embeddings": false }"#;

    #[test]
    fn layers_and_matrices_of_deepseek_v3_are_counted() {
        let shape = model_shape(DEEPSEEK_V3).unwrap();
        assert_eq!((shape.moe_layers, shape.dense_layers), (58, 3));
        // 671 billion parameters, as published: experts are 256 + 1 of three matrices.
        let experts = 58.0 * (257.0 * 3.0 * 7168.0 * 2048.0 + 256.0 * 7168.0);
        let attention = 61.0 * shape.attention.parameters;
        let all = experts + attention + 3.0 * shape.dense_parameters() + shape.head_parameters();
        assert!((all / 671e9 - 1.0).abs() < 0.001, "{all}");
    }

    /// DBRX nests the sizes of its attention and of its experts.
    #[test]
    fn heads_and_matrices_of_dbrx_are_counted() {
        let config = r#"{ "model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40,
            "attn_config": { "clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000 },
            "ffn_config": { "ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4 },
            "vocab_size": 100352, "tie_word_embeddings": false }"#;
        let shape = model_shape(config).unwrap();
        let attention = &shape.attention;
        assert_eq!((attention.queries, attention.keys), (6144, 8 * 128));
        // 132 billion parameters, as published.
        let experts = 40.0 * (16.0 * 3.0 * 6144.0 * 10752.0 + 16.0 * 6144.0);
        let all = experts + 40.0 * attention.parameters + shape.head_parameters();
        assert!((all / 131.6e9 - 1.0).abs() < 0.001, "{all}");
        let one = model_shape(&config.replace("\"kv_n_heads\": 8, ", "")).unwrap();
        assert_eq!(one.attention.keys, 128);
        let none = model_shape(&config.replace("\"kv_n_heads\": 8", "\"kv_n_heads\": 0"));
        let text = none.unwrap_err().to_string();
        assert!(text.contains("`kv_n_heads`"), "{text}");
    }

    #[test]
    fn windows_are_read_and_other_layers_refused() {
        let config = |types: &str| {
            format!(
                r#"{{ "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 2,
                "intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4,
                "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
                "vocab_size": 201088, "sliding_window": 128, "layer_types": [{types}] }}"#
            )
        };
        let shape = model_shape(&config(r#""sliding_attention", "full_attention""#)).unwrap();
        assert_eq!(shape.attention.windowed_layers, 1);
        assert_eq!(shape.attention.window, 128);
        let error = model_shape(&config(r#""linear_attention", "full_attention""#)).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("layers of the kind linear_attention"),
            "{text}"
        );
    }

    /// Published configurations name a number in place of the kinds of layers: DeepSeek-V3.2, Jamba
    /// and Qwen3-Next do. Their layers would be counted as full attention.
    #[test]
    fn layers_of_derived_kinds_are_refused() {
        let with = |extra: &str| {
            let config = DEEPSEEK_V3.replace("\"vocab_size\"", &format!("{extra}, \"vocab_size\""));
            model_shape(&config)
        };
        for (extra, axis) in [
            (r#""index_topk": 2048"#, "attention to chosen tokens"),
            (r#""attn_layer_period": 8"#, "layers without attention"),
            (
                r#""full_attention_interval": 4"#,
                "layers without attention",
            ),
            (r#""attn_type_list": [1, 0, 1]"#, "layers without attention"),
            (
                r#""linear_attn_config": {"a": 1}"#,
                "layers without attention",
            ),
            (r#""compress_ratios": [0, 4]"#, "compressed attention"),
        ] {
            let text = with(extra).unwrap_err().to_string();
            assert!(text.contains(axis), "{extra}: {text}");
        }
        for extra in [
            r#""index_topk": null"#,
            r#""full_attention_interval": 1"#,
            r#""attn_type_list": [1, 1]"#,
            r#""full_attention_interval": 4, "layer_types": ["full_attention"]"#,
        ] {
            assert_eq!(with(extra), with(r#""a": 1"#), "{extra}");
        }
    }

    #[test]
    fn a_number_in_place_of_kinds_gives_the_windows() {
        let attention = |extra: &str| {
            let config = DEEPSEEK_V3.replace("\"vocab_size\"", &format!("{extra}, \"vocab_size\""));
            model_shape(&config).unwrap().attention
        };
        for key in FULL_EVERY {
            let found = attention(&format!(r#""{key}": 4, "sliding_window": 128"#));
            assert_eq!((found.windowed_layers, found.window), (46, 128), "{key}");
            assert_eq!(attention(&format!(r#""{key}": 4"#)).windowed_layers, 0);
        }
    }

    /// LongCat-Flash would lose half of its attention and all dense blocks.
    #[test]
    fn layers_with_more_matrices_are_refused() {
        let config = r#"{ "model_type": "longcat_flash", "hidden_size": 6144, "num_layers": 28,
            "expert_ffn_hidden_size": 2048, "ffn_hidden_size": 12288, "moe_topk": 12,
            "n_routed_experts": 512, "zero_expert_num": 256, "num_attention_heads": 64,
            "vocab_size": 131072 }"#;
        let text = model_shape(config).unwrap_err().to_string();
        assert!(
            text.contains("two attentions and two dense blocks"),
            "{text}"
        );
    }
}
