//! Tilings of the `mma.sync` family: sm_80 and later.

mod backward;

pub use backward::{dgrad, wgrad};

use super::WARP;
use crate::ops::grouped_gemm::GroupedGemmDesc;
use crate::ops::grouped_gemm::tiles::registers::{Held, widest};
use crate::ops::grouped_gemm::{GemmFamily, GroupedGemmConfig};
use moesaic_kernel::{CudaArch, DType, MatrixUnit};

/// Bytes of a row of a tile in shared memory; they span all banks once.
const LINE: usize = 128;

/// Returns the tiling of a forward GEMM; `None` for types and shapes that the family does not take.
/// Two warps share the rows and two the columns; for f32 four, because an f32 GEMM needs more
/// registers.
pub fn forward(d: &GroupedGemmDesc, arch: CudaArch, tile_rows: usize) -> Option<GroupedGemmConfig> {
    if !takes(d, arch) {
        return None;
    }
    let matrices = if d.gated { 2 } else { 1 };
    // Small pieces take more of them, each with an address; fewer sums leave room.
    let whole = (d.inner * d.weights.size()).is_multiple_of(16);
    let most = if whole { 128 } else { 64 };
    let most = d.outer.next_power_of_two().clamp(32, most / matrices);
    let column_warps = |columns| {
        if d.weights == DType::F32 && columns >= 64 {
            4
        } else {
            2
        }
    };
    let tile_columns = widest([32, most], ROOM, |columns| {
        let warps = column_warps(columns);
        held(d, [tile_rows / 2, columns / warps], 2 * warps)
    });
    let column_warps = column_warps(tile_columns);
    let stage = (tile_rows + matrices * tile_columns) * LINE;
    let stages = stages(stage, arch);
    Some(GroupedGemmConfig {
        threads: 2 * column_warps as u32 * WARP,
        tile_rows,
        tile_columns,
        tile_depth: LINE / d.weights.size(),
        thread_rows: tile_rows / 2,
        thread_columns: tile_columns / column_warps,
        family: GemmFamily::Mma {
            stages,
            gather: d.plain_rows && !d.dense,
            shared_bytes: (stages * stage) as u32,
            tf32: d.tf32,
        },
    })
}

/// Lines of weights that a warp of the decode kernel reads: the A operand of an mma.
const DECODE_LINES: usize = 16;

/// Pipeline of a warp of the decode kernel: ten stages of [`DECODE_LINES`] lines of weights and
/// eight of rows. docs/kernels/grouped_gemm.md compares it with latency times bandwidth.
const DECODE_PIPELINE_BYTES: usize = 10 * (DECODE_LINES + 8) * LINE;

/// Returns the tiling of a decode kernel: a block is a warp, which reads the weights of a few
/// columns end to end.
pub fn decode(d: &GroupedGemmDesc, arch: CudaArch, tile_rows: usize) -> Option<GroupedGemmConfig> {
    takes(d, arch).then(|| GroupedGemmConfig {
        threads: WARP,
        tile_rows,
        tile_columns: DECODE_LINES / d.matrices(),
        tile_depth: LINE / d.weights.size(),
        // Weights are the A operand of an mma and rows the B operand, which has eight columns.
        thread_rows: 8,
        thread_columns: DECODE_LINES / d.matrices(),
        family: GemmFamily::MmaDecode {
            gather: d.plain_rows && !d.dense,
            shared_bytes: DECODE_PIPELINE_BYTES as u32,
            tf32: d.tf32,
        },
    })
}

/// The limit for [`Held`] out of a thread's 255 registers. With 128 sums, weights of rows and an
/// error function NVRTC 13 spills 20 bytes at 192, and nothing at 176, whatever else a kernel does.
const ROOM: usize = 184;

/// Returns the registers of a thread, in a block of so many warps whose warp owns so many rows and
/// columns.
fn held(d: &GroupedGemmDesc, [rows, columns]: [usize; 2], warps: usize) -> Held {
    let columns = columns * d.matrices();
    // An f32 is two factors.
    let parts = if d.weights == DType::F32 && !d.tf32 {
        2
    } else {
        1
    };
    // Threads of a line copy 16 bytes each, 8 or 4, as its length allows.
    let piece = 1 << (d.inner * d.weights.size()).trailing_zeros().min(4);
    let copied = warps * WARP as usize * piece / LINE;
    Held {
        sums: rows * columns / WARP as usize,
        factors: parts * (rows / 16 * 4 + columns / 8 * 2),
        addresses: if d.plain_rows && !d.dense {
            2 * rows / copied
        } else {
            1
        },
        weights: if d.weighted { rows / 8 } else { 0 },
    }
}

/// Returns whether the family takes this GEMM: one type in both operands, and rows that 4-byte
/// copies divide.
fn takes(d: &GroupedGemmDesc, arch: CudaArch) -> bool {
    let whole = (d.inner * d.weights.size()).is_multiple_of(4);
    fast(d.weights, d.tf32, arch) && d.weights == d.activations && whole
}

/// Returns whether tensor cores are faster than CUDA cores for a type. An f32 GEMM is three
/// products of tf32, unless the spec allows one of rounded operands; three pay only where tf32 is
/// many times faster than f32.
fn fast(dtype: DType, tf32: bool, arch: CudaArch) -> bool {
    let caps = arch.caps();
    match dtype {
        DType::F32 if !tf32 => caps.fast_tf32,
        _ => matches!(caps.matrix, MatrixUnit::Mma | MatrixUnit::Wgmma),
    }
}

/// Returns the number of stages: as many, up to four, as let two blocks share a multiprocessor, or
/// one block where two would have less than two stages each.
fn stages(stage: usize, arch: CudaArch) -> usize {
    let limit = arch.caps().block_shared as usize;
    // CUDA keeps 1 KiB of shared memory for each block.
    let two = (limit / 2 - 1024) / stage;
    let fit = if two >= 2 { two } else { limit / stage };
    // Two at least, because copies land in one stage while the other is multiplied.
    fit.clamp(2, 4)
}

#[cfg(test)]
mod tests {
    use crate::ExpertGemm;
    use crate::ops::grouped_gemm::desc::routed as desc;
    use crate::{CacheClass, GroupedGemmConfig, Operator, TileMachine};
    use moesaic_kernel::{CudaArch, DType, Target};
    use moesaic_spec::LayerSpec;

    /// Both halves of a layer of these widths on an architecture.
    fn halves(d: usize, h: usize, dtype: DType, arch: &str) -> [GroupedGemmConfig; 2] {
        let shape =
            format!(r#"{{"shape":{{"model_dim":{d},"hidden_dim":{h},"experts":8,"top_k":2}}}}"#);
        let mut spec: LayerSpec = serde_json::from_str(&shape).unwrap();
        spec.precision.weights = dtype;
        spec.precision.activations = dtype;
        let target: Target = format!("cuda:{arch}").parse().unwrap();
        let machine = TileMachine::of(target, CacheClass::default());
        [ExpertGemm::Up, ExpertGemm::Down].map(|half| desc(&spec, half).tiling(machine))
    }

    fn families(d: usize, h: usize, dtype: DType, arch: &str) -> [&'static str; 2] {
        halves(d, h, dtype, arch).map(|config| config.family.name())
    }

    #[test]
    fn which_products_go_to_the_matrix_units() {
        use DType::{Bf16, F16, F32};
        assert_eq!(families(64, 48, Bf16, "sm_80"), ["mma", "mma"]);
        assert_eq!(families(66, 48, F16, "sm_89"), ["mma", "mma"]);
        assert_eq!(families(66, 48, F16, "sm_90a"), ["mma", "wgmma"]);
        assert_eq!(families(64, 47, F16, "sm_120a"), ["mma", "simt"]);
        assert_eq!(families(63, 47, F32, "sm_80"), ["mma", "mma"]);
        assert_eq!(families(64, 48, F32, "sm_86"), ["simt", "simt"]);
        assert_eq!(families(64, 48, F16, "sm_75"), ["simt", "simt"]);
    }

    /// Half as many columns where rows have weights: of 128 sums with an error function
    /// there were spills.
    #[test]
    fn long_epilogues_have_room() {
        let spec = |d: usize| -> LayerSpec {
            let shape = format!(
                r#"{{"shape":{{"model_dim":{d},"hidden_dim":768,"experts":8,"top_k":2}}}}"#
            );
            serde_json::from_str(&shape).unwrap()
        };
        let arch = CudaArch {
            capability: 89,
            suffix: None,
        };
        let columns = |inner, half, weighted, gated| {
            let mut d = desc(&spec(inner), half);
            (d.weights, d.activations) = (DType::Bf16, DType::Bf16);
            (d.weighted, d.gated, d.inner) = (weighted, gated, inner);
            super::forward(&d, arch, 128).unwrap().tile_columns
        };
        let up = |inner, weighted| {
            [false, true].map(|gated| columns(inner, ExpertGemm::Up, weighted, gated))
        };
        assert_eq!(up(2048, false), [128, 64]);
        assert_eq!(up(2048, true), [64, 32]);
        assert_eq!(up(2050, false), [64, 32], "small pieces");
        assert_eq!(
            columns(2048, ExpertGemm::Down, true, false),
            128,
            "no addresses"
        );
    }

    #[test]
    fn halves_agree_and_fit() {
        let widths = [(4096, 14336), (66, 47), (63, 48), (8, 8), (2050, 1402)];
        for arch in [
            "sm_75", "sm_80", "sm_86", "sm_90", "sm_90a", "sm_100a", "sm_120a",
        ] {
            for (d, h) in widths {
                for dtype in [DType::Bf16, DType::F32] {
                    let [up, down] = halves(d, h, dtype, arch);
                    assert_eq!(up.tile_rows, down.tile_rows, "{arch}, {d} x {h}");
                    for config in [up, down] {
                        check(&config, arch);
                    }
                }
            }
        }
    }

    fn check(config: &GroupedGemmConfig, arch: &str) {
        let limit = match arch {
            "sm_80" => 163 << 10,
            "sm_90" | "sm_90a" | "sm_100a" => 227 << 10,
            _ => 99 << 10,
        };
        assert!(config.shared_bytes() <= limit, "{arch}: {config:?}");
        assert!(config.threads.is_multiple_of(32), "{arch}: {config:?}");
    }
}
