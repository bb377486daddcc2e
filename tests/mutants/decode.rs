//! Mistakes in decode kernels.

use super::Mutant;
use super::list::{GFX942, MUTANT, SM_90A};

/// A decode call: every pipeline wraps around, and widths have tails.
const DECODE: Mutant = Mutant {
    layer: "shape = { model_dim = 1000, hidden_dim = 70, experts = 5, top_k = 2 }
precision = { weights = \"bf16\", activations = \"bf16\" }",
    tokens: 33,
    ..MUTANT
};

/// The router's matrix is read in two panels.
const WIDE: &str = "shape = { model_dim = 2100, hidden_dim = 8, experts = 5, top_k = 2 }
precision = { weights = \"bf16\", activations = \"bf16\" }";

/// More counters than the block that routes has threads.
const MANY_EXPERTS: &str = "shape = { model_dim = 8, hidden_dim = 8, experts = 200, top_k = 5 }
precision = { weights = \"bf16\", activations = \"bf16\" }";

/// With a shared expert, whose hidden rows are longer than the others'.
const FUSED_SHARED: Mutant = Mutant {
    layer: "shape = { model_dim = 1000, hidden_dim = 72, experts = 5, top_k = 2 }
precision = { weights = \"bf16\", activations = \"bf16\" }
shared = [{ hidden_dim = 136 }]",
    ..DECODE
};

/// With a shared expert that has two logits with biases.
const GATED: Mutant = Mutant {
    layer: "shape = { model_dim = 70, hidden_dim = 72, experts = 5, top_k = 2 }
shared = [{ hidden_dim = 72, gate = \"residual\" }]",
    ..DECODE
};

/// The list.
pub const MUTANTS: &[Mutant] = &[
    Mutant {
        mistake: "a warp multiplies a stage before its copies are seen by all lanes",
        kernel: "grouped_gemm_up_decode",
        from: "        warp_sync();  // this stage is here, and all have read the one before it",
        to: "",
        caught: "race",
        ..DECODE
    },
    Mutant {
        mistake: "a warp waits for one stage too few",
        kernel: "grouped_gemm_up_decode",
        from: "wait_copies<STAGES - 2>();",
        to: "wait_copies<STAGES - 1>();",
        caught: "copy",
        ..DECODE
    },
    Mutant {
        mistake: "the pipeline is one stage shorter than the copies in flight",
        kernel: "grouped_gemm_up_decode",
        from: "        fetch(at + STAGES - 1);",
        to: "        fetch(at + STAGES);",
        caught: "copy",
        ..DECODE
    },
    Mutant {
        mistake: "the last columns are read beyond the last expert's",
        kernel: "grouped_gemm_up_decode",
        from: "(i64)column * INNER, first_column + column < OUTER};",
        to: "(i64)column * INNER, true};",
        caught: "out of bounds",
        ..DECODE
    },
    Mutant {
        mistake: "rows are read beyond their end",
        kernel: "grouped_gemm_down_decode",
        from: "from.exists && k < INNER);",
        to: "from.exists);",
        caught: "out of bounds",
        ..DECODE
    },
    Mutant {
        mistake: "chunks are looked for where they were not laid",
        kernel: "grouped_gemm_up_decode",
        from: "stage + line * LINE + (chunk ^ (line & 7)) * CHUNK; }",
        to: "stage + line * LINE + (chunk ^ (line & 3)) * CHUNK; }",
        caught: "y of",
        ..DECODE
    },
    Mutant {
        mistake: "sums of a decode kernel are picked up with no warp barrier before",
        kernel: "grouped_gemm_up_decode",
        from: "= sums[j][n];\n    warp_sync();",
        to: "= sums[j][n];",
        caught: "race in shared memory",
        ..DECODE
    },
    Mutant {
        mistake: "a row takes the token of the next",
        kernel: "grouped_gemm_up_decode",
        from: "row_slots[first_row + n] / TOP_K",
        to: "row_slots[first_row + (n + 1) % left] / TOP_K",
        caught: "y of",
        ..DECODE
    },
    Mutant {
        mistake: "blocks without a tile end before the launches before have",
        target: SM_90A,
        kernel: "grouped_gemm_up_decode",
        from: "    await_launches();\n",
        to: "    if (block_x() > 1)\n        return;\n    await_launches();\n",
        caught: "order of launches",
        ..DECODE
    },
    Mutant {
        mistake: "counts are summed with no barrier after selection",
        kernel: "route",
        from: "    block_sync();  // choices and their counts are there\n",
        to: "",
        layer: MANY_EXPERTS,
        caught: "uninitialised global memory",
        ..DECODE
    },
    Mutant {
        mistake: "assignments are placed with no barrier after the sums",
        kernel: "route",
        from: "    block_sync();  // the counts of all experts are there\n",
        to: "",
        layer: MANY_EXPERTS,
        caught: "uninitialised shared memory",
        ..DECODE
    },
    Mutant {
        mistake: "warps that have no tile have counters, too",
        target: GFX942,
        kernel: "route",
        from: "counters[exists ? warp_index() : 0]",
        to: "counters[warp_index()]",
        caught: "beyond the end of an array",
        ..DECODE
    },
    Mutant {
        mistake: "a panel of the router's matrix is overwritten while it is read",
        kernel: "route",
        from: "        block_sync();  // the panel before has been used",
        to: "",
        layer: WIDE,
        caught: "race in shared memory",
        ..DECODE
    },
    Mutant {
        mistake: "lanes write rows of the next expert",
        target: GFX942,
        kernel: "grouped_gemm_up_decode",
        from: "            if (row >= left)\n                continue;",
        to: "",
        caught: "no barrier between",
        ..DECODE
    },
    Mutant {
        mistake: "gate and up change places in a wave",
        target: GFX942,
        kernel: "grouped_gemm_up_decode",
        from: "sum < RUN ? gate : up",
        to: "sum < RUN ? up : gate",
        caught: "y of",
        ..DECODE
    },
    Mutant {
        mistake: "a wave reads weights beyond the last expert's",
        target: GFX942,
        kernel: "grouped_gemm_up_decode",
        from: "(first_weight + (brings ? own : 0))",
        to: "(first_weight + own)",
        caught: "beyond its end",
        ..DECODE
    },
    Mutant {
        mistake: "the shared expert takes the rows of the first routed one",
        kernel: "grouped_gemm_up_decode",
        from: "shared ? (i32)first_row + n : ",
        to: "",
        caught: "y of",
        ..FUSED_SHARED
    },
    Mutant {
        mistake: "the first row tile of the routed experts is the shared one's",
        kernel: "grouped_gemm_up_decode",
        from: "row_tiles, (i32)block_x() - 1)",
        to: "row_tiles, (i32)block_x())",
        caught: "uninitialised",
        ..FUSED_SHARED
    },
    Mutant {
        mistake: "the routed experts have as many columns as the shared one",
        kernel: "grouped_gemm_up_decode",
        from: "first_column + column < tensors.outer};",
        to: "first_column + column < SHARED_OUTER};",
        caught: "out of bounds",
        ..FUSED_SHARED
    },
    Mutant {
        mistake: "the shared expert's hidden rows end where those of the others do",
        target: GFX942,
        kernel: "grouped_gemm_down_decode",
        from: "if (depth + turn * TURN < inner)",
        to: "if (depth + turn * TURN < INNER)",
        caught: "y of",
        ..FUSED_SHARED
    },
    Mutant {
        mistake: "a turn is asked for again before it has been multiplied",
        target: GFX942,
        kernel: "grouped_gemm_up_decode",
        from: "            multiply(turn, depth + turn * TURN, false);\n            fetch(turn, depth + (TURNS + turn) * TURN);",
        to: "            fetch(turn, depth + (TURNS + turn) * TURN);\n            multiply(turn, depth + turn * TURN, false);",
        caught: "y of",
        ..DECODE
    },
    Mutant {
        mistake: "what lanes read along beyond the end of a line is multiplied",
        target: GFX942,
        kernel: "grouped_gemm_up_decode",
        from: "if (last && !WHOLE && k + n >= INNER)",
        to: "if (false)",
        caught: "y of",
        ..DECODE
    },
    Mutant {
        mistake: "the logits of the shared expert's gate are no block's",
        kernel: "route",
        from: "block_y() == EXPERT_BLOCKS;",
        to: "block_y() > EXPERT_BLOCKS;",
        caught: "uninitialised",
        ..GATED
    },
    Mutant {
        mistake: "the router has the biases of the shared expert's gate",
        target: GFX942,
        kernel: "route",
        from: "is_shared ? shared_bias : nullptr;",
        to: "shared_bias;",
        caught: "nobody has written",
        ..GATED
    },
    Mutant {
        mistake: "the columns of the shared expert's gate follow the experts'",
        kernel: "gate_topk",
        from: "is_shared ? 0 : (i32)block_y() * TILE_EXPERTS",
        to: "(i32)block_y() * TILE_EXPERTS",
        tokens: 70,
        caught: "uninitialised",
        ..GATED
    },
    Mutant {
        mistake: "every slice of a token is its first",
        kernel: "combine",
        from: "begin = (i32)block_y() * slice;",
        to: "begin = 0;",
        caught: "race in global memory",
        ..DECODE
    },
    Mutant {
        mistake: "the last slice goes on beyond the end of the token",
        target: GFX942,
        kernel: "combine",
        from: "const i32 end = lesser(begin + slice, PACKS);",
        to: "const i32 end = begin + slice;",
        tokens: 1,
        caught: "beyond its end",
        ..DECODE
    },
    Mutant {
        mistake: "a slot without a row adds what its thread has read along",
        target: GFX942,
        kernel: "combine",
        layer: "shape = { model_dim = 72, hidden_dim = 8, experts = 5, top_k = 2 }
precision = { weights = \"bf16\", activations = \"bf16\" }
capacity = { mode = \"factor\", factor = 0.5 }",
        from: "held[n], sources[slot] != NOTHING);",
        to: "held[n]);",
        caught: "y of",
        ..DECODE
    },
    Mutant {
        mistake: "an expert that begins with a tile is not counted for it",
        kernel: "grouped_gemm_down_decode",
        from: "firsts[n] <= tile",
        to: "firsts[n] < tile",
        caught: "out of bounds",
        ..DECODE
    },
    Mutant {
        mistake: "experts beyond those that a warp sees at once have no tiles",
        kernel: "grouped_gemm_up_decode",
        layer: "shape = { model_dim = 8, hidden_dim = 8, experts = 300, top_k = 5 }
precision = { weights = \"bf16\", activations = \"bf16\" }",
        from: "start < EXPERTS; start += HELD * WARP",
        to: "start < HELD * WARP; start += HELD * WARP",
        caught: "uninitialised",
        ..DECODE
    },
];
