//! Tilings of the `wgmma` family.

mod backward;

pub use backward::{dgrad, wgrad};

use super::is_half;
use crate::ops::grouped_gemm::GroupedGemmDesc;
use crate::ops::grouped_gemm::{GemmFamily, GroupedGemmConfig};
use moesaic_kernel::{CudaArch, MatrixUnit};

/// Bytes of a row of a tile: a line of the 128-byte swizzle.
const LINE: usize = 128;

/// 16-bit elements of a line.
const TILE_DEPTH: usize = LINE / 2;

/// Threads of a warpgroup, and rows that it multiplies at a time.
const WARPGROUP: usize = 128;
const WARPGROUP_ROWS: usize = 64;

/// Bytes of a barrier; a stage has two.
const BARRIER: usize = 8;

/// The most stages. More would hide no more latency.
const MAX_STAGES: usize = 6;

fn has_wgmma(arch: CudaArch) -> bool {
    arch.caps().matrix == MatrixUnit::Wgmma
}

/// Returns the tiling of a forward GEMM; `None` for types and shapes that `wgmma` or TMA do not
/// take, such as rows that are no multiple of 16 bytes. A block has a producer warpgroup and a
/// consumer warpgroup for each 64 rows.
pub fn forward(d: &GroupedGemmDesc, arch: CudaArch, tile_rows: usize) -> Option<GroupedGemmConfig> {
    if !has_wgmma(arch) || !is_half(d) || !d.inner.is_multiple_of(8) {
        return None;
    }
    let matrices = if d.gated { 2 } else { 1 };
    let most = most_sums(d) * WARPGROUP / WARPGROUP_ROWS / matrices;
    let tile_columns = d.outer.next_power_of_two().clamp(64, most);
    // The pipeline serves both experts, so the one with more slices says how many stages have a
    // use.
    let longest = d
        .fused_shared
        .map_or(d.inner, |shared| d.inner.max(shared.inner));
    let pipeline = Pipeline {
        arch,
        left: tile_rows,
        right: matrices * tile_columns,
        epilogue_bytes: tile_rows * LINE,
        slices: longest.div_ceil(TILE_DEPTH),
    };
    let mut config = pipeline.config(tile_rows, tile_columns);
    if let GemmFamily::Wgmma { gather, .. } = &mut config.family {
        *gather = d.plain_rows && !d.dense;
    }
    Some(config)
}

/// Returns the most sums of a thread, which has 168 registers. 128 leave room for an epilogue, 64
/// for one that also adds biases and keeps the result for backward.
fn most_sums(d: &GroupedGemmDesc) -> usize {
    if d.keep && d.bias { 64 } else { 128 }
}

/// The contents of shared memory.
struct Pipeline {
    arch: CudaArch,
    /// Lines of the left operands in a stage; a warpgroup multiplies 64.
    left: usize,
    /// Lines of the right operands in a stage.
    right: usize,
    /// Bytes of the epilogue tiles.
    epilogue_bytes: usize,
    /// Steps along the inner dimension.
    slices: usize,
}

impl Pipeline {
    fn config(&self, tile_rows: usize, tile_columns: usize) -> GroupedGemmConfig {
        let stage = (self.left + self.right) * LINE;
        let (stages, shared_bytes) = self.stages(stage);
        GroupedGemmConfig {
            threads: (WARPGROUP + self.left / WARPGROUP_ROWS * WARPGROUP) as u32,
            tile_rows,
            tile_columns,
            tile_depth: TILE_DEPTH,
            // A warp has 16 of the 64 rows that its warpgroup multiplies.
            thread_rows: 16,
            thread_columns: tile_columns,
            family: GemmFamily::Wgmma {
                stages,
                gather: false,
                shared_bytes,
            },
        }
    }

    /// Returns the number of stages, as many as fit and have a use, and the bytes of all shared
    /// memory: a struct whose size, like its address, is a multiple of 1024.
    fn stages(&self, stage: usize) -> (usize, u32) {
        let each = stage + 2 * BARRIER;
        let room = self.arch.caps().block_shared as usize - self.epilogue_bytes;
        let stages = (room / each).min(self.slices).min(MAX_STAGES);
        let bytes = stages * each + self.epilogue_bytes;
        (stages, bytes.next_multiple_of(1024) as u32)
    }
}

#[cfg(test)]
mod tests {
    use crate::ExpertGemm;
    use crate::ops::grouped_gemm::desc::routed as desc;
    use crate::{GemmFamily, GroupedGemmConfig};
    use moesaic_kernel::{CudaArch, DType};
    use moesaic_spec::LayerSpec;

    fn up(d: usize, h: usize, [weights, activations]: [DType; 2]) -> Option<GroupedGemmConfig> {
        let shape =
            format!(r#"{{"shape":{{"model_dim":{d},"hidden_dim":{h},"experts":8,"top_k":2}}}}"#);
        let mut spec: LayerSpec = serde_json::from_str(&shape).unwrap();
        spec.precision.weights = weights;
        spec.precision.activations = activations;
        let arch = CudaArch {
            capability: 90,
            suffix: Some('a'),
        };
        super::forward(&desc(&spec, ExpertGemm::Up), arch, 128)
    }

    fn stages(config: &GroupedGemmConfig) -> usize {
        match config.family {
            GemmFamily::Wgmma { stages, .. } => stages,
            _ => 0,
        }
    }

    #[test]
    fn what_the_family_takes() {
        use DType::{Bf16, F16, F32};
        let taken = up(2048, 768, [Bf16; 2]).unwrap();
        assert_eq!((taken.threads, taken.tile_columns), (384, 128));
        assert_eq!(stages(&taken), 4);
        assert!(up(8, 1, [F16; 2]).is_some());
        assert_eq!(up(2044, 768, [Bf16; 2]), None, "rows of 4088 bytes");
        assert_eq!(up(2048, 768, [F32; 2]), None);
        assert_eq!(up(2048, 768, [F16, Bf16]), None);
    }

    /// Half as many columns where pre-activations with biases are kept.
    #[test]
    fn long_epilogues_have_room() {
        let shape = r#"{"shape":{"model_dim":2048,"hidden_dim":768,"experts":8,"top_k":2}}"#;
        let spec: LayerSpec = serde_json::from_str(shape).unwrap();
        let arch = CudaArch {
            capability: 90,
            suffix: Some('a'),
        };
        let columns = |keep, bias, gated| {
            let mut d = desc(&spec, ExpertGemm::Up);
            (d.weights, d.activations) = (DType::Bf16, DType::Bf16);
            (d.keep, d.bias, d.gated) = (keep, bias, gated);
            super::forward(&d, arch, 128).unwrap().tile_columns
        };
        assert_eq!(
            [columns(true, true, true), columns(true, true, false)],
            [64, 128]
        );
        assert_eq!(
            [columns(false, true, true), columns(true, false, false)],
            [128, 256]
        );
    }

    /// More stages than slices would only take memory.
    #[test]
    fn stages_are_as_many_as_slices() {
        for (d, stages) in [(8, 1), (64, 1), (72, 2), (200, 4), (256, 4), (320, 4)] {
            let config = up(d, 128, [DType::Bf16; 2]).unwrap();
            assert_eq!(self::stages(&config), stages, "{d}");
            assert!(config.shared_bytes() <= 227 << 10, "{config:?}");
        }
    }
}
