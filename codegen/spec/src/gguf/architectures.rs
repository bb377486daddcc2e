//! llama.cpp's architectures, mapped to the families of transformers that they were converted from.

use super::GgufError;
use super::block::Block;
use serde_json::{Map, Value, json};

/// An architecture that moesaic reads.
pub(super) struct Architecture {
    /// llama.cpp's name for it.
    pub name: &'static str,
    /// Returns the family, and its configuration keys beyond those that all families have.
    pub build: fn(&Block<'_>) -> Result<Family, GgufError>,
}

/// A `model_type` and its keys.
type Family = (&'static str, Map<String, Value>);

/// Every architecture that moesaic reads. PhiMoE is missing because llama.cpp computes another
/// router for it than transformers does.
pub(super) const ALL: &[Architecture] = &[
    Architecture {
        name: "dbrx",
        build: dbrx,
    },
    Architecture {
        name: "deepseek",
        build: |b| family("deepseek_v2", shared_count(b, json!({}))),
    },
    Architecture {
        name: "deepseek2",
        build: deepseek2,
    },
    Architecture {
        name: "dots1",
        build: biased,
    },
    Architecture {
        name: "glm4moe",
        build: biased,
    },
    Architecture {
        name: "gpt-oss",
        build: |_| family("gpt_oss", json!({})),
    },
    Architecture {
        name: "granitemoe",
        build: granite,
    },
    Architecture {
        name: "llama",
        build: |_| family("mixtral", json!({})),
    },
    Architecture {
        name: "minimax-m2",
        build: |_| family("minimax_m2", json!({})),
    },
    Architecture {
        name: "olmoe",
        build: |_| family("olmoe", json!({})),
    },
    Architecture {
        name: "qwen2moe",
        build: |b| family("qwen2_moe", shared_width(b)),
    },
    Architecture {
        name: "qwen35moe",
        build: |b| family("qwen3_5_moe", shared_width(b)),
    },
    Architecture {
        name: "qwen3moe",
        build: |_| family("qwen3_moe", json!({"norm_topk_prob": true})),
    },
    Architecture {
        name: "qwen3next",
        build: |b| family("qwen3_next", shared_width(b)),
    },
    Architecture {
        name: "qwen3vlmoe",
        build: |_| family("qwen3_moe", json!({"norm_topk_prob": true})),
    },
];

fn family(model_type: &'static str, keys: Value) -> Result<Family, GgufError> {
    match keys {
        Value::Object(keys) => Ok((model_type, keys)),
        _ => Ok((model_type, Map::new())),
    }
}

/// Adds one shared expert, whose width comes from its tensors.
fn shared_count(block: &Block<'_>, mut keys: Value) -> Value {
    keys["n_shared_experts"] = json!(usize::from(block.shared().is_some()));
    keys
}

/// Returns the shared expert's key in Qwen's families.
fn shared_width(block: &Block<'_>) -> Value {
    match block.shared() {
        Some(width) => json!({"shared_expert_intermediate_size": width}),
        None => json!({}),
    }
}

/// Returns Granite's block. llama.cpp has one name for it with and without shared experts.
fn granite(block: &Block<'_>) -> Result<Family, GgufError> {
    match block.shared() {
        Some(width) => family(
            "granitemoeshared",
            json!({"shared_intermediate_size": width}),
        ),
        None => family("granitemoe", json!({})),
    }
}

fn dbrx(block: &Block<'_>) -> Result<Family, GgufError> {
    let ffn = json!({
        "ffn_hidden_size": block.hidden()?,
        "moe_num_experts": block.need("expert_count")?,
        "moe_top_k": block.need("expert_used_count")?,
        "moe_normalize_expert_weights": 1.0,
    });
    family("dbrx", json!({"ffn_config": ffn}))
}

/// Returns DeepSeek-V2, -V3 or a later family: sigmoid scores mark V3.
fn deepseek2(block: &Block<'_>) -> Result<Family, GgufError> {
    if block.size("expert_gating_func")? == Some(2) {
        return biased(block);
    }
    let groups = block.size("expert_group_count")?.unwrap_or(1);
    let keys = if groups > 1 {
        json!({
            "topk_method": "group_limited_greedy",
            "n_group": groups,
            "topk_group": block.need("expert_group_used_count")?,
        })
    } else {
        json!({"topk_method": "greedy"})
    };
    family("deepseek_v2", shared_count(block, keys))
}

/// Returns DeepSeek-V3's block. Absent keys turn a feature off, as in llama.cpp.
fn biased(block: &Block<'_>) -> Result<Family, GgufError> {
    let groups = block.size("expert_group_count")?.unwrap_or(1).max(1);
    let kept = match groups {
        1 => 1,
        _ => block.need("expert_group_used_count")?,
    };
    let keys = json!({
        "n_group": groups,
        "topk_group": kept,
        "norm_topk_prob": block.flag("expert_weights_norm")?.unwrap_or(false),
        "routed_scaling_factor": 1.0,
    });
    family("deepseek_v3", shared_count(block, keys))
}
