//! Tilings of backward GEMMs by `mma.sync`.

use super::super::WARP;
use super::{LINE, fast, stages};
use crate::ops::grouped_gemm::{
    GemmFamily, GroupedGemmConfig, GroupedGemmDgradDesc, GroupedGemmWgradDesc,
};
use moesaic_kernel::{CudaArch, DType};

/// Lines of a slice whose lines are steps of the contraction.
const DEPTH: usize = 32;

/// Returns the tiling of a dgrad; `None` for types and shapes that the family does not take. Two
/// warps share the rows.
pub fn dgrad(
    d: &GroupedGemmDgradDesc,
    arch: CudaArch,
    tile_rows: usize,
) -> Option<GroupedGemmConfig> {
    let (dtype, size) = (d.weights, d.weights.size());
    if d.weights != d.activations
        || !fast(dtype, d.tf32, arch)
        || !divide([d.inner, d.outer], size, 4)
    {
        return None;
    }
    let panel = LINE / size;
    let most = if divide([d.inner, d.outer], size, 16) {
        128
    } else {
        64
    };
    let tile_columns = d.outer.next_power_of_two().clamp(panel, most);
    let thread_columns = warp_columns(dtype, tile_columns);
    let stage = (tile_rows + tile_columns) * LINE;
    let stages = stages(stage, arch);
    Some(GroupedGemmConfig {
        threads: (2 * tile_columns / thread_columns) as u32 * WARP,
        tile_rows,
        tile_columns,
        tile_depth: panel,
        thread_rows: tile_rows / 2,
        thread_columns,
        family: GemmFamily::Mma {
            stages,
            gather: false,
            shared_bytes: (stages * stage) as u32,
            tf32: d.tf32,
        },
    })
}

/// Returns the tiling of a wgrad; `None` for types and shapes that the family does not take. Two
/// warps share the rows, gate and up where there are both.
pub fn wgrad(d: &GroupedGemmWgradDesc, arch: CudaArch) -> Option<GroupedGemmConfig> {
    let (dtype, size) = (d.left, d.left.size());
    let widths = [d.height, d.width];
    if d.left != d.right || !fast(dtype, d.tf32, arch) || !divide(widths, size, 4) {
        return None;
    }
    let (panel, matrices) = (LINE / size, if d.gated { 2 } else { 1 });
    // An f32 is two factors of tf32, so a warp holds more fragments next to its sums.
    let most_rows = if dtype == DType::F32 { 64 } else { 128 };
    let most_columns = if divide(widths, size, 16) { 128 } else { 64 };
    // Tiles have whole panels, because copies swizzle lines of 128 bytes.
    let tile_rows = d
        .height
        .next_power_of_two()
        .clamp(panel, most_rows / matrices);
    let tile_columns = d.width.next_power_of_two().clamp(panel, most_columns);
    let thread_columns = warp_columns(dtype, tile_columns);
    let stage = (matrices * tile_rows + tile_columns) * DEPTH * size;
    let stages = stages(stage, arch);
    Some(GroupedGemmConfig {
        threads: (2 * tile_columns / thread_columns) as u32 * WARP,
        tile_rows,
        tile_columns,
        tile_depth: DEPTH,
        thread_rows: matrices * tile_rows / 2,
        thread_columns,
        family: GemmFamily::Mma {
            stages,
            gather: d.plain_rows && !d.dense,
            shared_bytes: (stages * stage) as u32,
            tf32: d.tf32,
        },
    })
}

/// Returns whether `bytes` divide rows of both widths, whose elements have `size`.
fn divide(widths: [usize; 2], size: usize, bytes: usize) -> bool {
    widths
        .iter()
        .all(|width| (width * size).is_multiple_of(bytes))
}

/// Returns the columns of a warp. Two warps share the columns; for f32, which needs more registers,
/// as many as it takes.
fn warp_columns(dtype: DType, tile_columns: usize) -> usize {
    match dtype {
        DType::F32 => 32,
        _ => tile_columns / 2,
    }
}

#[cfg(test)]
mod tests {
    use crate::ExpertGemm;
    use crate::ops::grouped_gemm::{desc, dgrad, wgrad};
    use crate::{CacheClass, GroupedGemmConfig, Operator, TileMachine};
    use moesaic_kernel::{DType, Target};
    use moesaic_spec::LayerSpec;

    fn spec(d: usize, h: usize, [weights, activations]: [DType; 2]) -> LayerSpec {
        let shape =
            format!(r#"{{"shape":{{"model_dim":{d},"hidden_dim":{h},"experts":8,"top_k":2}}}}"#);
        let mut spec: LayerSpec = serde_json::from_str(&shape).unwrap();
        spec.precision.weights = weights;
        spec.precision.activations = activations;
        spec
    }

    fn chosen(desc: impl Operator<Config = GroupedGemmConfig>, arch: &str) -> GroupedGemmConfig {
        let target: Target = format!("cuda:{arch}").parse().unwrap();
        desc.tiling(TileMachine::of(target, CacheClass::default()))
    }

    /// Families of both halves of dgrad, then of wgrad.
    fn families(spec: &LayerSpec, arch: &str) -> [&'static str; 4] {
        let halves = [ExpertGemm::Down, ExpertGemm::Up];
        let [a, b] = halves.map(|half| chosen(dgrad::routed(spec, half), arch).family.name());
        let [c, d] = halves.map(|half| chosen(wgrad::routed(spec, half), arch).family.name());
        [a, b, c, d]
    }

    #[test]
    fn which_products_go_to_the_matrix_units() {
        use DType::{Bf16, F16, F32};
        let all = |d, h, types, arch| families(&spec(d, h, types), arch);
        assert_eq!(all(64, 48, [Bf16; 2], "sm_80"), ["mma"; 4]);
        assert_eq!(all(64, 48, [Bf16; 2], "sm_90a"), ["wgmma"; 4]);
        assert_eq!(all(66, 48, [F16; 2], "sm_90a"), ["mma"; 4]);
        assert_eq!(all(65, 48, [F16; 2], "sm_90a"), ["simt"; 4]);
        assert_eq!(all(65, 47, [F32; 2], "sm_90a"), ["mma"; 4]);
        assert_eq!(all(64, 48, [F32; 2], "sm_86"), ["simt"; 4]);
        assert_eq!(all(64, 48, [F16; 2], "sm_75"), ["simt"; 4]);
        // A weight gradient has none of the weights' type.
        assert_eq!(
            all(64, 48, [F32, Bf16], "sm_80"),
            ["simt", "simt", "mma", "mma"]
        );
    }

    /// The scan lists row tiles once, for both passes.
    #[test]
    fn tiles_are_as_high_as_forward_and_fit() {
        let archs = [
            ("sm_75", 48),
            ("sm_80", 163),
            ("sm_86", 99),
            ("sm_90a", 227),
            ("sm_120a", 99),
        ];
        for (d, h) in [(4096, 14336), (66, 47), (8, 8), (2050, 1402), (72, 264)] {
            for dtype in [DType::Bf16, DType::F32] {
                let spec = spec(d, h, [dtype; 2]);
                for (arch, kilobytes) in archs {
                    for half in [ExpertGemm::Up, ExpertGemm::Down] {
                        let forward = chosen(desc::routed(&spec, half), arch);
                        let dgrad = chosen(dgrad::routed(&spec, half), arch);
                        let wgrad = chosen(wgrad::routed(&spec, half), arch);
                        assert_eq!(dgrad.tile_rows, forward.tile_rows, "{arch}, {d} x {h}");
                        for config in [dgrad, wgrad] {
                            assert!(
                                config.shared_bytes() <= kilobytes << 10,
                                "{arch}: {config:?}"
                            );
                        }
                    }
                }
            }
        }
    }
}
