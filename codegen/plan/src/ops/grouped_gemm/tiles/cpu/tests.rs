//! Tests of blocks for each class of caches.

use super::*;
use crate::{CacheClass, LayerPlan, Op, PlanOptions, Step, Training, plan};
use moesaic_kernel::Size;
use moesaic_spec::LayerSpec;

const TARGETS: [&str; 6] = [
    "cpu:portable",
    "cpu:avx2",
    "cpu:avx512bf16",
    "cpu:amx",
    "cpu:neon",
    "cpu:neonbf16",
];

/// Returns a layer larger than any block.
fn spec(dtype: DType) -> LayerSpec {
    let text = r#"{"shape":{"model_dim":4096,"hidden_dim":3072,"experts":64,"top_k":2}}"#;
    let mut spec: LayerSpec = serde_json::from_str(text).unwrap();
    spec.precision.weights = dtype;
    spec.precision.activations = dtype;
    spec
}

/// Every plan with its class.
fn each(mut check: impl FnMut(&LayerPlan)) {
    for target in TARGETS {
        for dtype in [DType::F32, DType::Bf16] {
            for training in [None, Some(Training::default())] {
                for caches in CacheClass::all() {
                    let options = PlanOptions {
                        training,
                        caches,
                        ..PlanOptions::default()
                    };
                    let target = target.parse().unwrap();
                    check(&plan(&spec(dtype), target, &options).unwrap());
                }
            }
        }
    }
}

fn gemms(plan: &LayerPlan) -> impl Iterator<Item = (&str, &Op, &GroupedGemmConfig)> {
    let kernels = plan.kernels.iter();
    kernels.filter_map(|kernel| Some((&*kernel.name, &kernel.op, kernel.op.gemm()?)))
}

fn has_tiles(c: &GroupedGemmConfig) -> bool {
    matches!(c.family, GemmFamily::Tiles(_))
}

/// Returns the columns of all matrices of a block.
fn columns(op: &Op, c: &GroupedGemmConfig) -> usize {
    match op {
        Op::GroupedGemm { desc: d, .. } => c.tile_columns * d.matrices(),
        Op::GroupedGemmWgrad { .. } => c.tile_columns.min(BLOCK_COLUMNS),
        _ => c.tile_columns,
    }
}

#[test]
fn panels_and_sums_are_part_of_the_second_level() {
    each(|plan| {
        for (name, op, c) in gemms(plan) {
            if has_tiles(c) || name == "grouped_gemm_dgrad_down" {
                continue;
            }
            if matches!(op, Op::GroupedGemm { .. }) {
                continue; // rows are in scratch, and its panels are never there together
            }
            let l2 = plan.caches.l2_bytes();
            let (sums, most) = match op {
                Op::GroupedGemmWgrad { .. } => (0, l2 * 5 / 8), // most experts' rows are one slice
                _ => (c.tile_rows, l2 * 3 / 4),
            };
            let bytes = 4 * columns(op, c) * (2 * c.tile_depth + sums);
            let what = format!("{name} of {} for {:?}", plan.target, plan.caches);
            assert!(bytes <= most, "{what}");
            assert_eq!(c.tile_columns % c.thread_columns, 0, "{what}");
        }
    });
}

/// One token goes to two experts; what is left after that is columns.
#[test]
fn few_tokens_have_blocks_for_many_threads() {
    each(|plan| {
        for (name, op, c) in gemms(plan) {
            let Op::GroupedGemm { .. } = op else {
                continue;
            };
            let what = format!("{name} of {} for {:?}", plan.target, plan.caches);
            let mut launches = plan.call_steps().filter_map(Step::launch);
            let launch = launches.find(|step| plan.kernels[step.entry.kernel].name == name);
            let grid = &plan[launch.unwrap().entry].launch.grid;
            let blocks = |tokens: usize| -> u64 {
                let sizes = grid.iter().map(|size| size.eval(tokens as u64));
                sizes.product()
            };
            assert!(blocks(1) >= 64, "{what}");
            let cpu = c.family.cpu().unwrap();
            // Small caches have narrow blocks for any number of tokens.
            if cpu.decode_tokens > 0 {
                assert!(cpu.decode_columns < c.tile_columns, "{what}");
                assert_eq!(cpu.decode_columns % c.thread_columns, 0, "{what}");
                assert!(
                    blocks(cpu.decode_tokens) > blocks(cpu.decode_tokens + 1),
                    "{what}"
                );
            }
        }
    });
}

#[test]
fn left_columns_of_wgrad_are_half_of_the_second_level() {
    each(|plan| {
        for (name, op, c) in gemms(plan) {
            let Op::GroupedGemmWgrad { .. } = op else {
                continue;
            };
            if !has_tiles(c) {
                let what = format!("{name} of {} for {:?}", plan.target, plan.caches);
                let bytes = 4 * c.tile_rows * c.tile_depth;
                assert!(bytes <= plan.caches.l2_bytes() / 2, "{what}");
                assert_eq!(c.tile_rows % c.thread_rows, 0, "{what}");
            }
        }
    });
}

#[test]
fn scratch_rows_of_vectors_are_part_of_the_second_level() {
    each(|plan| {
        for (name, op, c) in gemms(plan) {
            let Op::GroupedGemm { desc: d, .. } = op else {
                continue;
            };
            if !has_tiles(c) {
                let what = format!("{name} of {} for {:?}", plan.target, plan.caches);
                let most = plan.caches.l2_bytes() * 3 / 4;
                assert!(4 * c.tile_rows * c.tile_depth <= most, "{what}");
                assert!(4 * c.tile_rows * columns(op, c) <= most, "{what}");
                assert_eq!(c.tile_columns % c.thread_columns, 0, "{what}");
                assert_eq!(c.tile_depth % 16, 0, "{what}");
                let rows_and_sums = c.tile_rows * (c.tile_depth + columns(op, c));
                let panel = c.tile_depth * c.thread_columns * d.matrices();
                let bytes = 4 * (rows_and_sums + panel);
                assert!(c.shared_bytes() as usize <= bytes, "{what}");
            }
        }
    });
}

#[test]
fn a_panel_leaves_room_in_the_first_level() {
    each(|plan| {
        for (name, op, c) in gemms(plan) {
            let is_forward = matches!(op, Op::GroupedGemm { .. });
            if !has_tiles(c) && !is_forward {
                let bytes = c.tile_depth * c.thread_columns * 4;
                assert!(bytes * 4 <= plan.caches.l1_bytes() * 3, "{name}");
            }
        }
    });
}

#[test]
fn slices_are_even() {
    assert_eq!(even_slices(512, 512), (1, 512));
    assert_eq!(even_slices(513, 512), (2, 272));
    assert_eq!(even_slices(768, 512), (2, 384));
    assert_eq!(even_slices(384, 256), (2, 192));
    assert_eq!(even_slices(1, 256), (1, 16));
}

#[test]
fn scratch_rows_of_tiles_are_part_of_the_second_level() {
    let mut tiles = 0;
    each(|plan| {
        for (name, op, c) in gemms(plan) {
            if !has_tiles(c) {
                continue;
            }
            tiles += 1;
            let products = match op {
                Op::GroupedGemmDgrad { desc: d, .. } if c.tile_depth * 2 >= d.inner => 2,
                _ => 1,
            };
            let bytes = 4 * c.tile_rows * c.tile_depth * products;
            let most = plan.caches.l2_bytes() * 5 / 8;
            assert!(bytes <= most, "{name} for {:?}", plan.caches);
            assert_eq!(c.tile_rows % AMX_NR, 0, "{name}");
        }
    });
    assert!(tiles > 0);
}

#[test]
fn no_size_of_a_cache_cuts_a_sum_or_moves_a_tensor() {
    each(|plan| {
        let options = PlanOptions::training(plan.training);
        let plain = crate::plan(&plan.spec, plan.target, &options).unwrap();
        assert_eq!(plan.tensors, plain.tensors);
        assert_eq!(plan.steps, plain.steps);
        assert_eq!(plan.backward, plain.backward);
        for ((name, _, a), (_, _, b)) in gemms(plan).zip(gemms(&plain)) {
            let sums = |c: &GroupedGemmConfig| (c.family.name(), c.thread_columns, c.packed());
            assert_eq!(sums(a), sums(b), "{name}");
            if name == "grouped_gemm_dgrad_down" {
                assert_eq!(a.tile_columns, b.tile_columns);
            }
        }
    });
}

#[test]
fn large_and_unknown_caches_have_the_plan_that_is_assumed() {
    let known = |l1: u64, l2: u64| {
        CacheClass::of(moesaic_kernel::CpuCaches {
            l1_bytes: Some(l1 << 10),
            l2_bytes: Some(l2 << 10),
        })
    };
    for target in TARGETS {
        let (spec, target) = (spec(DType::F32), target.parse().unwrap());
        let plain = plan(&spec, target, &PlanOptions::default()).unwrap();
        for caches in [CacheClass::default(), known(48, 2048), known(192, 16384)] {
            let options = PlanOptions {
                caches,
                ..PlanOptions::default()
            };
            assert_eq!(plan(&spec, target, &options).unwrap(), plain);
        }
        let text = serde_json::to_string(&plain).unwrap();
        assert!(!text.contains("l2_bytes"));
    }
}

#[test]
fn blocks_follow_the_classes() {
    let mut seen = Vec::new();
    for l2 in CacheClass::L2_BYTES {
        let options = PlanOptions {
            caches: CacheClass::of(moesaic_kernel::CpuCaches {
                l1_bytes: Some(32 << 10),
                l2_bytes: Some(l2),
            }),
            ..PlanOptions::default()
        };
        let down = |target: &str, dtype| {
            let plan = plan(&spec(dtype), target.parse().unwrap(), &options).unwrap();
            let mut all = gemms(&plan).filter(|(name, ..)| *name == "grouped_gemm_down");
            all.next().unwrap().2.clone()
        };
        let (vectors, tiles) = (down("cpu:avx512", DType::F32), down("cpu:amx", DType::Bf16));
        assert_eq!(vectors.tile_rows, 384);
        seen.push((vectors.tile_columns, vectors.tile_depth, tiles.tile_rows));
    }
    let expected = [
        (128, 128, 32),
        (256, 256, 64),
        (512, 512, 160),
        (512, 512, 320),
    ];
    assert_eq!(seen, expected);
}

/// A block finds codes of its rows in scratch, and reads the panels that follow in memory.
#[test]
fn codes_go_through_the_columns_of_an_expert_first() {
    for (format, rows) in [("mxfp4", None), ("q4_k", Some("int8")), ("fp8", None)] {
        let mut text = format!(
            "shape = {{ model_dim = 1024, hidden_dim = 768, experts = 16, top_k = 2 }}\n\
             precision = {{ weights = \"bf16\", activations = \"bf16\", experts = \"{format}\""
        );
        if let Some(rows) = rows {
            text += &format!(", expert_activations = \"{rows}\"");
        }
        let spec = LayerSpec::from_toml(&(text + " }\n")).unwrap();
        for target in ["cpu:avx2", "cpu:avx512bf16", "cpu:neon"] {
            let plan = plan(&spec, target.parse().unwrap(), &PlanOptions::default()).unwrap();
            let what = format!("{format} on {target}");
            for step in plan.call_steps().filter_map(Step::launch) {
                let entry = &plan[step.entry];
                if !entry.symbol.starts_with("grouped_gemm") {
                    continue;
                }
                let [columns, tiles] = [0, 1].map(|axis| &entry.launch.grid[axis]);
                let sizes = |size: &Size| [64, 1024].map(|tokens| size.eval(tokens));
                assert_eq!(sizes(columns)[0], sizes(columns)[1], "{what}: columns");
                assert!(sizes(tiles)[0] < sizes(tiles)[1], "{what}: tiles of rows");
            }
            for step in &plan.prepare {
                let packs = plan[step.entry].symbol.contains("_pack_");
                assert!(!packs || plan.expert_axis(step) == 1, "{what}: experts");
            }
        }
    }
}
