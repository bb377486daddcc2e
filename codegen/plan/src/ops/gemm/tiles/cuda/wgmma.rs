//! Tilings of the `wgmma` family: sm_90a.

mod backward;

pub use backward::{dgrad, wgrad};

use super::is_half;
use crate::ops::gemm::GroupedGemmDesc;
use crate::ops::gemm::{GemmFamily, GroupedGemmConfig};
use moesaic_kernel::CudaArch;

/// Bytes of a row of a tile: a line of the 128-byte swizzle.
const LINE: usize = 128;

/// 16-bit elements of a line.
const TILE_DEPTH: usize = LINE / 2;

/// Threads of a warpgroup, and rows that it multiplies at a time.
const WARPGROUP: usize = 128;
const WARPGROUP_ROWS: usize = 64;

/// Bytes of a barrier; a stage has two.
const BARRIER: usize = 8;

/// Dynamic shared memory that a block of sm_90 can have.
const SHARED: usize = 227 << 10;

/// Most stages: more would not hide more.
const MOST_STAGES: usize = 6;

/// Whether there is `wgmma`, which no later architecture has.
pub fn is_hopper(arch: CudaArch) -> bool {
    arch.capability == 90 && arch.suffix == Some('a')
}

/// A warpgroup per 64 rows that multiplies, and one that loads. `None` for
/// types and shapes that `wgmma` or the copy engine do not take: rows have to be
/// multiples of 16 bytes.
pub fn forward(d: &GroupedGemmDesc, arch: CudaArch, tile_rows: usize) -> Option<GroupedGemmConfig> {
    if !is_hopper(arch) || !is_half(d) || !d.inner.is_multiple_of(8) {
        return None;
    }
    let matrices = if d.gated { 2 } else { 1 };
    let most = most_sums(d) * WARPGROUP / WARPGROUP_ROWS / matrices;
    let tile_columns = d.outer.next_power_of_two().clamp(64, most);
    let longest = d
        .fused_shared
        .map_or(d.inner, |shared| d.inner.max(shared.inner));
    let ring = Ring {
        left: tile_rows,
        right: matrices * tile_columns,
        corners: tile_rows * LINE,
        slices: longest.div_ceil(TILE_DEPTH),
    };
    let mut config = ring.config(tile_rows, tile_columns);
    if let GemmFamily::Wgmma { gather, .. } = &mut config.family {
        *gather = d.plain_rows && !d.dense;
    }
    Some(config)
}

/// Sums of a thread, which has 168 registers: 128 leave room for an epilogue,
/// 64 also for one that adds biases and keeps what it adds them to.
fn most_sums(d: &GroupedGemmDesc) -> usize {
    if d.keep && d.bias { 64 } else { 128 }
}

/// What lies in shared memory.
struct Ring {
    /// Lines of the left factors in a stage; a warpgroup multiplies 64.
    left: usize,
    /// Lines of the right factors in a stage.
    right: usize,
    /// Bytes of what the epilogue writes through.
    corners: usize,
    /// Steps along the inner dimension.
    slices: usize,
}

impl Ring {
    fn config(&self, tile_rows: usize, tile_columns: usize) -> GroupedGemmConfig {
        let stage = (self.left + self.right) * LINE;
        let (stages, shared_bytes) = stages(stage, self.corners, self.slices);
        GroupedGemmConfig {
            threads: (WARPGROUP + self.left / WARPGROUP_ROWS * WARPGROUP) as u32,
            tile_rows,
            tile_columns,
            tile_depth: TILE_DEPTH,
            thread_rows: 16,
            thread_columns: tile_columns,
            family: GemmFamily::Wgmma {
                stages,
                gather: false,
                shared_bytes,
            },
        }
    }
}

/// As many stages as fit and are used, and the bytes of all shared memory: a
/// struct whose size, like its address, is a multiple of 1024.
fn stages(stage: usize, corners: usize, slices: usize) -> (usize, u32) {
    let each = stage + 2 * BARRIER;
    let stages = ((SHARED - corners) / each).min(slices).min(MOST_STAGES);
    let bytes = stages * each + corners;
    (stages, bytes.next_multiple_of(1024) as u32)
}

#[cfg(test)]
mod tests {
    use crate::Half;
    use crate::ops::gemm::desc::routed as desc;
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
        super::forward(&desc(&spec, Half::Up), arch, 128)
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
            let mut d = desc(&spec, Half::Up);
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

    /// A ring longer than the inner dimension would only take memory.
    #[test]
    fn stages_are_as_many_as_slices() {
        for (d, stages) in [(8, 1), (64, 1), (72, 2), (200, 4), (256, 4), (320, 4)] {
            let config = up(d, 128, [DType::Bf16; 2]).unwrap();
            assert_eq!(self::stages(&config), stages, "{d}");
            assert!(
                config.shared_bytes() as usize <= super::SHARED,
                "{config:?}"
            );
        }
    }
}
