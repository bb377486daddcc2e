//! Mistakes in the sums over tiles, and in what follows from them.

use super::Mutant;
use super::list::MUTANT;

/// More experts than a warp has lanes.
const MANY_EXPERTS: &str = "shape = { model_dim = 8, hidden_dim = 8, experts = 70, top_k = 2 }
precision = { weights = \"bf16\", activations = \"bf16\" }";

/// The list.
pub const MUTANTS: &[Mutant] = &[
    Mutant {
        mistake: "runs of tiles are summed with no barrier before",
        kernel: "expert_scan",
        from: "        block_sync();  // the sums of all runs are there\n",
        to: "",
        caught: "uninitialised shared memory",
        ..MUTANT
    },
    Mutant {
        mistake: "what is before a run is read with no barrier after it was summed",
        kernel: "expert_scan",
        from: "        block_sync();  // and now what is before each\n",
        to: "",
        caught: "race in shared memory",
        ..MUTANT
    },
    Mutant {
        mistake: "tiles beyond the last are summed",
        kernel: "expert_scan",
        from: "held[i] = owns && first + i < tiles ?",
        to: "held[i] = owns ?",
        caught: "out of bounds",
        ..MUTANT
    },
    Mutant {
        mistake: "experts begin before the counts of all are there",
        kernel: "expert_scan",
        from: "    block_sync();  // the counts of all experts are there\n",
        to: "",
        caught: "uninitialised shared memory",
        layer: MANY_EXPERTS,
        ..MUTANT
    },
    Mutant {
        mistake: "places are given before it is known where experts begin",
        kernel: "expert_scan",
        from: "    block_sync();  // the starts are there\n",
        to: "",
        caught: "race in shared memory",
        ..MUTANT
    },
    Mutant {
        mistake: "every block writes down where experts begin",
        kernel: "expert_scan",
        from: "if (block_x() == 0) {",
        to: "if (block_x() >= 0) {",
        caught: "race in global memory",
        tokens: 300,
        ..MUTANT
    },
];
