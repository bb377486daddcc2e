//! Small layers, whose calls are launches and little else.

/// Name and text.
pub const SPECS: [(&str, &str); 2] = [
    (
        "gated, top 2 of 8",
        "shape = { model_dim = 64, hidden_dim = 64, experts = 8, top_k = 2 }
         precision = { weights = \"bf16\", activations = \"bf16\" }
         router = { renormalize = \"sum\" }
         experts = { form = \"gated\", activation = \"silu\" }",
    ),
    (
        "capacity, shared expert, losses",
        "shape = { model_dim = 64, hidden_dim = 64, experts = 16, top_k = 4 }
         precision = { weights = \"bf16\", activations = \"bf16\" }
         router = { score = \"sigmoid\", select_bias = true, renormalize = \"sum\" }
         capacity = { mode = \"factor\", factor = 1.25 }
         experts = { form = \"gated\", activation = \"silu\" }
         shared = [{ hidden_dim = 64 }]
         losses = [{ kind = \"z\", coefficient = 0.001 }]",
    ),
];

/// One whose calls are large. It is not run, so its weights are nowhere.
pub const QWEN3: &str = include_str!("../../examples/specs/qwen3-30b-a3b.toml");
