//! The list of mistakes.

use super::Mutant;

const SM_80: &str = "sim:sm_80";
pub(super) const SM_90A: &str = "sim:sm_90a";
pub(super) const GFX942: &str = "sim:gfx942";

/// One step of the inner dimension.
const SHALLOW: &str = "shape = { model_dim = 64, hidden_dim = 72, experts = 5, top_k = 2 }
precision = { weights = \"bf16\", activations = \"bf16\" }";

/// Enough steps that every pipeline wraps around.
const DEEP: &str = "shape = { model_dim = 448, hidden_dim = 72, experts = 5, top_k = 2 }
precision = { weights = \"bf16\", activations = \"bf16\" }";

/// Weights on the input: rows are scaled on the way, so they are dispatched.
const DISPATCHED: &str = "shape = { model_dim = 64, hidden_dim = 72, experts = 5, top_k = 2 }
router = { weight_on = \"input\" }
precision = { weights = \"bf16\", activations = \"bf16\" }";

/// Defaults of the list: one kernel of a shallow layer on sm_80.
pub(super) const MUTANT: Mutant = Mutant {
    mistake: "",
    target: SM_80,
    kernel: "",
    from: "",
    to: "",
    layer: SHALLOW,
    tokens: 70,
    training: false,
    caught: "",
};

/// A layer whose backward runs on the CUDA cores or vector units of every GPU,
/// because no tensor or matrix core takes factors of two types. In f32 no
/// rounding crosses the clamp.
const TRAINED: &str = "shape = { model_dim = 64, hidden_dim = 72, experts = 5, top_k = 2 }
router = { kind = \"external\" }
experts = { clamp = 0.4, bias = true }
precision = { weights = \"bf16\", activations = \"f32\" }";

/// Defaults of mistakes in backward.
pub(super) const BACKWARD: Mutant = Mutant {
    layer: TRAINED,
    training: true,
    ..MUTANT
};

/// The list.
pub const MUTANTS: &[Mutant] = &[
    Mutant {
        mistake: "a buffer is filled and read with no barrier between",
        kernel: "gate_topk",
        from: "        put(buffer ^ 1);\n        block_sync();",
        to: "        put(buffer ^ 1);",
        caught: "uninitialised shared memory",
        ..MUTANT
    },
    Mutant {
        mistake: "counters are not set to zero",
        kernel: "gate_topk",
        from: "        counts[i] = 0;\n    block_sync();",
        to: "        {}\n    block_sync();",
        caught: "uninitialised shared memory",
        ..MUTANT
    },
    Mutant {
        mistake: "no barrier after counters are set to zero",
        kernel: "gate_topk",
        from: "        counts[i] = 0;\n    block_sync();",
        to: "        counts[i] = 0;",
        caught: "uninitialised shared memory",
        ..MUTANT
    },
    Mutant {
        mistake: "threads add to one counter without an atomic",
        kernel: "gate_topk",
        from: "shared_add(&counts[choice_at(p) * EXPERTS + choices.ids[p]], 1);",
        to: "counts[choice_at(p) * EXPERTS + choices.ids[p]] += 1;",
        caught: "race in shared memory",
        ..MUTANT
    },
    Mutant {
        mistake: "one token too many is read",
        kernel: "gate_topk",
        from: "turn < SELECT_TOKENS && first + turn < tokens;\n        const i64 token",
        to: "turn < SELECT_TOKENS && first + turn <= tokens;\n        const i64 token",
        caught: "out of bounds",
        ..MUTANT
    },
    Mutant {
        mistake: "a shuffle names half of the lanes that take part",
        kernel: "gate_topk",
        from: "return __shfl_sync(0xffffffffu, value, lane);",
        to: "return __shfl_sync(0x0000ffffu, value, lane);",
        caught: "lane mask",
        ..MUTANT
    },
    Mutant {
        mistake: "half of a warp skips a shuffle",
        kernel: "gate_topk",
        from: "    sum = team_sum(sum);",
        to: "    if (lane_index() < 16)\n        sum = team_sum(sum);",
        caught: "partial warp",
        ..MUTANT
    },
    Mutant {
        mistake: "counters of a warp are read and written with no warp barrier between",
        kernel: "expert_scan",
        from: "            warp_sync();\n            if (placed && lane_index() == first_lane(same))",
        to: "            if (placed && lane_index() == first_lane(same))",
        caught: "race in shared memory",
        ..MUTANT
    },
    Mutant {
        mistake: "a part of 16 rows too few is multiplied",
        kernel: "grouped_gemm_up",
        from: "ceil_div(tile.rows - warp_row(), 16);  // of this warp, with rows",
        to: "(tile.rows - warp_row()) / 16;  // of this warp, with rows",
        caught: "y of",
        ..MUTANT
    },
    Mutant {
        mistake: "a warpgroup without rows lets go of no stage",
        target: SM_90A,
        kernel: "grouped_gemm_up",
        from: "if (k > 0 && elect_one())",
        to: "if (multiplies && k > 0 && elect_one())",
        layer: DEEP,
        caught: "deadlock",
        ..MUTANT
    },
    Mutant {
        mistake: "a warpgroup of up to 64 rows multiplies nothing",
        target: SM_90A,
        kernel: "grouped_gemm_up",
        from: "const bool multiplies = 64 * consumer < tile.rows;",
        to: "const bool multiplies = 64 * consumer + 64 < tile.rows;",
        caught: "y of",
        ..MUTANT
    },
    Mutant {
        mistake: "places start at one",
        kernel: "expert_scan",
        from: "place = start + population(same & lanes_below());",
        to: "place = start + population(same & lanes_below()) + 1;",
        caught: "out of bounds",
        ..MUTANT
    },
    Mutant {
        mistake: "one row too many is copied",
        target: SM_90A,
        kernel: "dispatch",
        from: "row < first + TILE_ROWS && row < kept;",
        to: "row < first + TILE_ROWS && row <= kept;",
        layer: DISPATCHED,
        caught: "out of bounds",
        ..MUTANT
    },
    Mutant {
        mistake: "packs are wider than their alignment",
        target: SM_90A,
        kernel: "dispatch",
        from: "Activation *to = rows + row * MODEL_DIM;",
        to: "Activation *to = rows + row * MODEL_DIM + 1;",
        layer: DISPATCHED,
        caught: "misaligned",
        ..MUTANT
    },
    Mutant {
        mistake: "rows of slots are read with no barrier before",
        kernel: "combine",
        from: "        weights[i] = topk_weights[slot];\n    }\n    block_sync();",
        to: "        weights[i] = topk_weights[slot];\n    }",
        caught: "race in shared memory",
        ..MUTANT
    },
    Mutant {
        mistake: "the last token's rows are left out",
        kernel: "combine",
        from: "if (slot >= tokens * TOP_K)",
        to: "if (slot >= tokens * TOP_K - 1)",
        caught: "uninitialised shared memory",
        ..MUTANT
    },
    Mutant {
        mistake: "one group of copies too few is waited for",
        kernel: "grouped_gemm_up",
        from: "        wait_copies<STAGES - 2>();",
        to: "        wait_copies<STAGES - 1>();",
        layer: DEEP,
        caught: "shared memory",
        ..MUTANT
    },
    Mutant {
        mistake: "no barrier between the stages of a pipeline",
        kernel: "grouped_gemm_up",
        from: "        block_sync();  // this stage is here, and all have read the one before it\n",
        to: "",
        layer: DEEP,
        caught: "race in shared memory",
        ..MUTANT
    },
    Mutant {
        mistake: "a stage is filled while it is read",
        kernel: "grouped_gemm_up",
        from: "        fetch(at + STAGES - 1);",
        to: "        fetch(at + STAGES);",
        layer: DEEP,
        caught: "shared memory",
        ..MUTANT
    },
    Mutant {
        mistake: "copies are not committed",
        kernel: "grouped_gemm_up",
        from: "        commit_copies();\n    };",
        to: "    };",
        layer: DEEP,
        caught: "shared memory",
        ..MUTANT
    },
    Mutant {
        mistake: "rows are swizzled one way and read another",
        kernel: "grouped_gemm_up",
        from: "(left_chunk ^ lane % 8) * CHUNK",
        to: "(left_chunk ^ lane % 4) * CHUNK",
        caught: "y of",
        ..MUTANT
    },
    Mutant {
        mistake: "rows beyond the matrix are copied",
        kernel: "grouped_gemm_up",
        from: "const i32 wanted = k < inner ? rows - copied_row(0) : 0;",
        to: "const i32 wanted = k < INNER ? ROWS : 0;",
        caught: "out of bounds",
        ..MUTANT
    },
    Mutant {
        mistake: "a row beyond the tile is stored",
        kernel: "grouped_gemm_down",
        from: "        if (row < rows && first_pack + pack < row_packs)",
        to: "        if (row <= rows && first_pack + pack < row_packs)",
        caught: "global memory",
        ..MUTANT
    },
    Mutant {
        mistake: "fewer bytes are announced than come",
        target: SM_90A,
        kernel: "grouped_gemm_up",
        from: "mbarrier_expect(full, MAPPED);",
        to: "mbarrier_expect(full, MAPPED - 1024);",
        layer: DEEP,
        caught: "mbarrier",
        ..MUTANT
    },
    Mutant {
        mistake: "more bytes are announced than come",
        target: SM_90A,
        kernel: "grouped_gemm_up",
        from: "mbarrier_expect(full, MAPPED);",
        to: "mbarrier_expect(full, MAPPED + 1024);",
        layer: DEEP,
        caught: "deadlock",
        ..MUTANT
    },
    Mutant {
        mistake: "consumers wait for the wrong phase",
        target: SM_90A,
        kernel: "grouped_gemm_up",
        from: "shared.pipeline[state.index];\n            mbarrier_wait(shared.full[state.index], state.phase);",
        to: "shared.pipeline[state.index];\n            mbarrier_wait(shared.full[state.index], state.phase ^ 1);",
        layer: DEEP,
        caught: "shared memory",
        ..MUTANT
    },
    Mutant {
        mistake: "the producer waits for the wrong phase",
        target: SM_90A,
        kernel: "grouped_gemm_up",
        from: "mbarrier_wait(shared.empty[state.index], state.phase ^ 1);",
        to: "mbarrier_wait(shared.empty[state.index], state.phase);",
        layer: DEEP,
        caught: "deadlock",
        ..MUTANT
    },
    Mutant {
        mistake: "the producer does not wait for free stages",
        target: SM_90A,
        kernel: "grouped_gemm_up",
        from: "            mbarrier_wait(shared.empty[state.index], state.phase ^ 1);\n",
        to: "",
        layer: DEEP,
        caught: "mbarrier",
        ..MUTANT
    },
    Mutant {
        mistake: "a stage is released while wgmma reads it",
        target: SM_90A,
        kernel: "grouped_gemm_up",
        from: "        wgmma_wait<1>();",
        to: "        wgmma_wait<2>();",
        layer: DEEP,
        caught: "shared memory",
        ..MUTANT
    },
    Mutant {
        mistake: "sums are read while wgmma writes them",
        target: SM_90A,
        kernel: "grouped_gemm_up",
        from: "    wgmma_wait<0>();\n",
        to: "",
        caught: "in flight",
        ..MUTANT
    },
    Mutant {
        mistake: "no wgmma fence before the first product",
        target: SM_90A,
        kernel: "grouped_gemm_up",
        from: "        wgmma_fence();\n",
        to: "",
        caught: "wgmma",
        ..MUTANT
    },
    Mutant {
        mistake: "the descriptor's stride is half of what it should be",
        target: SM_90A,
        kernel: "grouped_gemm_up",
        from: "(u64)(1024 >> 4) << 32",
        to: "(u64)(512 >> 4) << 32",
        caught: "y of",
        ..MUTANT
    },
    Mutant {
        mistake: "the descriptor names another swizzle than the tensor map",
        target: SM_90A,
        kernel: "grouped_gemm_up",
        from: "(u64)1 << 62",
        to: "(u64)2 << 62",
        caught: "y of",
        ..MUTANT
    },
    Mutant {
        mistake: "a step of the descriptor is twice as far",
        target: SM_90A,
        kernel: "grouped_gemm_up",
        from: "constexpr u64 NEXT_STEP = 16 * sizeof(u16) >> 4;",
        to: "constexpr u64 NEXT_STEP = 32 * sizeof(u16) >> 4;",
        caught: "uninitialised shared memory",
        ..MUTANT
    },
    Mutant {
        mistake: "an operand of wgmma is written by a thread, with no proxy fence",
        target: SM_90A,
        kernel: "grouped_gemm_up",
        from: "        wgmma_fence();\n",
        to: "        if (thread_index() == 128)\n            const_cast<Stage &>(stage).rows[0][0] = Element{0};\n        named_sync<128>(1 + consumer);\n        wgmma_fence();\n",
        caught: "proxy fence",
        ..MUTANT
    },
    Mutant {
        mistake: "gathered rows are shown to wgmma with no proxy fence",
        target: SM_90A,
        kernel: "grouped_gemm_up",
        from: "                proxy_fence();\n",
        to: "",
        layer: DEEP,
        caught: "proxy fence",
        ..MUTANT
    },
    Mutant {
        mistake: "gathered rows are waited for one stage too few",
        target: SM_90A,
        kernel: "grouped_gemm_up",
        from: "wait_copies<LATE>();",
        to: "wait_copies<LATE + 1>();",
        layer: DEEP,
        caught: "race in shared memory",
        ..MUTANT
    },
    Mutant {
        mistake: "chunks of gathered rows are not swizzled",
        target: SM_90A,
        kernel: "grouped_gemm_up",
        from: "(chunk ^ line % 8) * 8",
        to: "chunk * 8",
        caught: "y of",
        ..MUTANT
    },
    Mutant {
        mistake: "a kernel does not wait for the launches before it",
        target: SM_90A,
        kernel: "combine",
        from: "    await_launches();\n",
        to: "",
        caught: "order of launches",
        ..MUTANT
    },
    Mutant {
        mistake: "a kernel that may begin early takes what it reads for constant",
        target: SM_90A,
        kernel: "combine",
        from: "*slot_rows,",
        to: "*__restrict__ slot_rows,",
        caught: "order of launches",
        ..MUTANT
    },
    Mutant {
        mistake: "a kernel looks for its tile before the launches before it have ended",
        target: SM_90A,
        kernel: "grouped_gemm_up",
        from: "    await_launches();\n    (void)tokens;\n    const TileScheduler schedule = {row_tiles[EXPERTS]};\n",
        to: "    const TileScheduler schedule = {row_tiles[EXPERTS]};\n    await_launches();\n    (void)tokens;\n",
        caught: "order of launches",
        ..MUTANT
    },
    Mutant {
        mistake: "barriers are used before all threads see them",
        target: SM_90A,
        kernel: "grouped_gemm_up",
        from: "    block_sync();\n\n    // The producer.",
        to: "    // The producer.",
        caught: "mbarrier",
        ..MUTANT
    },
    Mutant {
        mistake: "a barrier counts one arrival too many",
        target: SM_90A,
        kernel: "grouped_gemm_up",
        from: "mbarrier_init(shared.empty[stage], CONSUMER_WARPS);",
        to: "mbarrier_init(shared.empty[stage], CONSUMER_WARPS + 1);",
        layer: DEEP,
        caught: "deadlock",
        ..MUTANT
    },
    Mutant {
        mistake: "a warp's epilogue tile is read with no warp barrier before",
        target: SM_90A,
        kernel: "grouped_gemm_up",
        from: "            warp_sync();\n            store_epilogue_tile(",
        to: "            store_epilogue_tile(",
        caught: "race in shared memory",
        ..MUTANT
    },
    Mutant {
        mistake: "no barrier before a tile is multiplied",
        target: GFX942,
        kernel: "grouped_gemm_up",
        from: "        block_sync();\n        left_stage.fetch(depth + TILE_DEPTH);",
        to: "        left_stage.fetch(depth + TILE_DEPTH);",
        caught: "nobody has written",
        ..MUTANT
    },
    Mutant {
        mistake: "counters in LDS are not set to zero",
        target: GFX942,
        kernel: "gate_topk",
        from: "        counts[i] = 0;\n    block_sync();",
        to: "        {}\n    block_sync();",
        caught: "nobody has written",
        ..MUTANT
    },
    Mutant {
        mistake: "half of a wave skips a shuffle",
        target: GFX942,
        kernel: "gate_topk",
        from: "    sum = team_sum(sum);",
        to: "    if (lane_index() < 32)\n        sum = team_sum(sum);",
        caught: "wait",
        ..MUTANT
    },
    Mutant {
        mistake: "a wave is taken for 32 lanes",
        target: GFX942,
        kernel: "expert_scan",
        from: "DEVICE i32 lane_index() { return thread_index() % WARP; }",
        to: "DEVICE i32 lane_index() { return thread_index() % 32; }",
        caught: "expert_scan",
        ..MUTANT
    },
    Mutant {
        mistake: "one token too many is read by a wave",
        target: GFX942,
        kernel: "gate_topk",
        from: "turn < SELECT_TOKENS && first + turn < tokens;\n        const i64 token",
        to: "turn < SELECT_TOKENS && first + turn <= tokens;\n        const i64 token",
        caught: "beyond its end",
        ..MUTANT
    },
    Mutant {
        mistake: "one buffer in LDS is used for two",
        target: GFX942,
        kernel: "grouped_gemm_up",
        from: "depth += TILE_DEPTH, buffer ^= 1",
        to: "depth += TILE_DEPTH, buffer ^= 0",
        layer: DEEP,
        caught: "no barrier between",
        ..MUTANT
    },
    Mutant {
        mistake: "threads of two waves add to one counter without an atomic",
        target: GFX942,
        kernel: "gate_topk",
        from: "shared_add(&counts[choice_at(p) * EXPERTS + choices.ids[p]], 1);",
        to: "counts[choice_at(p) * EXPERTS + choices.ids[p]] += 1;",
        caught: "depends on the order",
        ..MUTANT
    },
    Mutant {
        mistake: "sums of a matrix product are stored in another lane's rows",
        target: GFX942,
        kernel: "grouped_gemm_down",
        from: "const i32 row = wave_row + i * EDGE + lane % EDGE;",
        to: "const i32 row = wave_row + i * EDGE + (lane ^ 1) % EDGE;",
        caught: "y of",
        ..MUTANT
    },
    Mutant {
        mistake: "the parts of a row are summed with no barrier before",
        kernel: "grouped_gemm_dgrad_down",
        from: "    block_sync();\n\n    for (i32 row = thread_index(); row < TILE_ROWS",
        to: "    for (i32 row = thread_index(); row < TILE_ROWS",
        caught: "shared memory",
        ..BACKWARD
    },
    Mutant {
        mistake: "a clamp that holds lets gradients pass",
        kernel: "grouped_gemm_dgrad_down",
        from: "    dgate = gate_pre > LIMIT ? 0.0f : dgate;",
        to: "",
        caught: "dx of",
        ..BACKWARD
    },
    Mutant {
        mistake: "no barrier before a step of the depth is multiplied",
        target: GFX942,
        kernel: "grouped_gemm_dgrad_up",
        from: "        put(buffer ^ 1);\n        block_sync();",
        to: "        put(buffer ^ 1);",
        caught: "nobody has written",
        ..BACKWARD
    },
    Mutant {
        mistake: "the last row of an expert is left out",
        target: SM_90A,
        kernel: "grouped_gemm_wgrad_down",
        from: "const i32 count = (i32)(offsets[expert + 1] - first);",
        to: "const i32 count = (i32)(offsets[expert + 1] - first) - 1;",
        caught: "grad.experts.down.weight of",
        ..BACKWARD
    },
    Mutant {
        mistake: "rows are taken for the slots they came from",
        kernel: "grouped_gemm_wgrad_down",
        from: "return topk_weights[row_slots[row]];",
        to: "return topk_weights[row];",
        caught: "grad.experts.down.bias of",
        ..BACKWARD
    },
    Mutant {
        mistake: "one row too many is copied backward",
        target: SM_90A,
        kernel: "combine_bwd",
        from: "row < first + TILE_ROWS && row < kept;",
        to: "row < first + TILE_ROWS && row <= kept;",
        caught: "global memory",
        ..BACKWARD
    },
    Mutant {
        mistake: "sources are read with no barrier before",
        kernel: "dispatch_bwd",
        from: "    block_sync();\n\n    for (i32 turn",
        to: "    for (i32 turn",
        caught: "shared memory",
        ..BACKWARD
    },
    Mutant {
        mistake: "every choice gets the gradient of the first",
        target: GFX942,
        kernel: "combine_bwd",
        from: "const i32 row = slot_rows[slot];",
        to: "const i32 row = slot_rows[token * TOP_K];",
        caught: "outside of every tensor",
        ..BACKWARD
    },
];
