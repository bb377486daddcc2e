//! The spellings of keys that families share.

/// Spellings of four sizes: experts, experts per token, model width, expert width.
pub const EXPERTS: &[&str] = &[
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "moe_num_experts",
];
pub const TOP_K: &[&str] = &[
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_k",
    "top_k_experts",
    "moe_top_k",
];
pub const MODEL: &[&str] = &["hidden_size", "d_model"];
pub const WIDE: &[&str] = &["intermediate_size"];
pub const NARROW: &[&str] = &["moe_intermediate_size", "expert_ffn_hidden_size"];

/// Spellings of the number of layers.
pub const DEPTH: &[&str] = &["num_hidden_layers", "n_layers", "num_layers"];

/// Spellings of the number of shared experts.
pub const SHARED: &[&str] = &[
    "n_shared_experts",
    "num_shared_experts",
    "moe_num_shared_experts",
];
