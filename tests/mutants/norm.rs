//! Mistakes in norms around routed experts.

use super::Mutant;
use super::list::{GFX942, MUTANT, SM_90A};

/// The norm is before the projection up; rows have packs for a part of a warp.
const NORMED: Mutant = Mutant {
    layer: "shape = { model_dim = 24, hidden_dim = 24, experts = 5, top_k = 2 }
latent = { dim = 40, norm_eps = 0.02 }",
    ..MUTANT
};

/// The norm is of each output.
const OUTPUTS: Mutant = Mutant {
    layer: "shape = { model_dim = 24, hidden_dim = 24, experts = 5, top_k = 2, output_dim = 40 }
experts = { output_norm_eps = 0.02 }",
    ..MUTANT
};

/// Mistakes in the norm.
pub const MUTANTS: &[Mutant] = &[
    Mutant {
        mistake: "half of the columns are left out of a mean of squares",
        kernel: "rms_norm",
        from: "i < PACKS; i += WARP) {\n        const Pack<Activation, PACK> pack = load<PACK>(row, i);",
        to: "i < PACKS / 2; i += WARP) {\n        const Pack<Activation, PACK> pack = load<PACK>(row, i);",
        caught: "y of",
        ..NORMED
    },
    Mutant {
        mistake: "a row keeps its gradient along itself",
        target: GFX942,
        kernel: "rms_norm_bwd",
        from: "- to_f32(row.at[j]) * along) * inverse",
        to: "- 0.0f * along) * inverse",
        caught: "dx of",
        training: true,
        ..NORMED
    },
    Mutant {
        mistake: "sums over every fourth token are read with no barrier before",
        target: SM_90A,
        kernel: "rms_norm_bwd",
        from: "    block_sync();\n    if (group > 0",
        to: "    if (group > 0",
        caught: "shared memory",
        training: true,
        ..NORMED
    },
    Mutant {
        mistake: "an output is divided before it is scaled",
        kernel: "rms_norm_experts",
        from: "const f32 scaled = to_f32(pack.at[j]) * scale.at[j];",
        to: "const f32 scaled = to_f32(pack.at[j]);",
        caught: "y of",
        ..OUTPUTS
    },
    Mutant {
        mistake: "the router's weight leaves the gradient of an output alone",
        target: GFX942,
        kernel: "rms_norm_bwd_experts",
        from: "topk_weights[row_slots[index]] * inverse",
        to: "inverse",
        caught: "dx of",
        training: true,
        ..OUTPUTS
    },
];
