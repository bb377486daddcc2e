//! Mistakes in tile schedulers.

use super::Mutant;
use super::list::{GFX942, MUTANT, SM_90A};

/// Two groups of row tiles, and several of columns.
const GROUPS: &str = "shape = { model_dim = 64, hidden_dim = 264, experts = 18, top_k = 1 }
precision = { weights = \"bf16\", activations = \"bf16\" }";

/// More tiles than a launch has blocks: 33 column tiles for each of some 40 experts.
const WIDE: &str = "shape = { model_dim = 64, hidden_dim = 4224, experts = 40, top_k = 1 }
precision = { weights = \"bf16\", activations = \"bf16\" }";

/// Of the list: the up product of that layer.
const SCHEDULER: Mutant = Mutant {
    target: SM_90A,
    kernel: "grouped_gemm_up",
    layer: WIDE,
    tokens: 200,
    ..MUTANT
};

/// With a shared expert, whose hidden rows are longer than the others': its tiles come first.
const FUSED_SHARED: Mutant = Mutant {
    layer: "shape = { model_dim = 136, hidden_dim = 72, experts = 5, top_k = 2 }
precision = { weights = \"bf16\", activations = \"bf16\" }
shared = [{ hidden_dim = 264 }]",
    ..SCHEDULER
};

/// The list.
pub const MUTANTS: &[Mutant] = &[
    Mutant {
        mistake: "the last group is taken to be as high as the others",
        kernel: "grouped_gemm_up",
        from: "return lesser(GROUP, row_tiles - group());",
        to: "return GROUP;",
        layer: GROUPS,
        tokens: 200,
        caught: "uninitialised global memory",
        ..MUTANT
    },
    Mutant {
        mistake: "the groups before a tile are counted for one column",
        target: GFX942,
        kernel: "grouped_gemm_up",
        from: "return tile_index - group() * COLUMN_TILES;",
        to: "return tile_index - group();",
        layer: GROUPS,
        tokens: 200,
        caught: "which nobody has written",
        ..MUTANT
    },
    Mutant {
        mistake: "every column's part of a weight's gradient is the first",
        kernel: "grouped_gemm_dgrad_down",
        from: "COLUMN_TILES + scheduler.column()] = sum;",
        to: "COLUMN_TILES] = sum;",
        layer: GROUPS,
        tokens: 200,
        training: true,
        caught: "race in global memory",
        ..MUTANT
    },
    Mutant {
        mistake: "the last stage of a tile is never released",
        from: "        if (elect_one())\n            mbarrier_arrive(shared.empty[before]);\n        if (!multiplies)",
        to: "        if (!multiplies)",
        caught: "deadlock",
        ..SCHEDULER
    },
    Mutant {
        mistake: "the pipeline of the consumers begins anew with every tile",
        from: "\n        const RowTile tile = row_tile(offsets, row_tiles, scheduler.row());\n        const i32 first_column",
        to: "\n        state = PipelineState();\n        const RowTile tile = row_tile(offsets, row_tiles, scheduler.row());\n        const i32 first_column",
        caught: "copy in flight",
        ..SCHEDULER
    },
    Mutant {
        mistake: "a block skips a tile",
        from: "tile_index += (i32)grid_x();",
        to: "tile_index += (i32)grid_x() + 1;",
        caught: "y of",
        ..SCHEDULER
    },
    Mutant {
        mistake: "sums of a tile begin with those of the tile before",
        from: "const bool accumulate = k > 0 || step > 0;",
        to: "const bool accumulate = scheduler.tile_index != (i32)block_x() || k > 0 || step > 0;",
        caught: "y of",
        ..SCHEDULER
    },
    Mutant {
        mistake: "tiles after the shared expert's are counted from the first on",
        target: "sim:sm_80",
        from: "return shared() ? tile_index : tile_index - shared_tiles();",
        to: "return tile_index;",
        caught: "uninitialised global memory",
        ..FUSED_SHARED
    },
    Mutant {
        mistake: "every tile of the shared expert has its first rows",
        target: "sim:sm_80",
        from: "first = (i64)scheduler.row() * TILE_ROWS;",
        to: "first = 0;",
        caught: "race in global memory",
        ..FUSED_SHARED
    },
    Mutant {
        mistake: "tokens of the shared expert are those of routed rows",
        from: "scheduler.shared() ? (i32)tile.first + row : row_slots",
        to: "row_slots",
        caught: "y of",
        ..FUSED_SHARED
    },
    Mutant {
        mistake: "the shared expert's rows are multiplied by a routed one's weights",
        kernel: "grouped_gemm_down",
        from: "scheduler.shared() ? shared_down_map : down_map;",
        to: "down_map;",
        caught: "y of",
        ..FUSED_SHARED
    },
    Mutant {
        mistake: "rows of the shared expert are summed as far as routed ones",
        target: GFX942,
        kernel: "grouped_gemm_down",
        from: "depth < tensors.inner; depth",
        to: "depth < INNER; depth",
        caught: "y of",
        ..FUSED_SHARED
    },
    Mutant {
        mistake: "every expert's gradient has the tiles of the first",
        kernel: "grouped_gemm_wgrad_down",
        from: "return index / MATRIX_TILES;",
        to: "return 0;",
        layer: GROUPS,
        training: true,
        caught: "race in global memory",
        ..MUTANT
    },
    Mutant {
        mistake: "consumers ask for more registers than the producer gives back",
        target: SM_90A,
        kernel: "grouped_gemm_up",
        from: "    grow_registers<232>();",
        to: "    grow_registers<240>();",
        caught: "deadlock",
        ..MUTANT
    },
];
