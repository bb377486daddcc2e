//! Tilings for AMD GPUs.

use super::gpu;
use crate::config::*;
use crate::desc::*;
use moesaic_kernel::{DType, RocmArch};

/// See [`GateTopkConfig`].
pub fn gate_topk(d: &GateTopkDesc, arch: RocmArch) -> GateTopkConfig {
    gpu::gate_topk(d, arch.wave)
}

/// See [`ExpertScanConfig`].
pub fn expert_scan(d: &ExpertScanDesc, arch: RocmArch) -> ExpertScanConfig {
    gpu::expert_scan(d, arch.wave)
}

/// See [`DispatchConfig`].
pub fn dispatch(d: &DispatchDesc, arch: RocmArch) -> DispatchConfig {
    gpu::dispatch(d, arch.wave)
}

/// See [`GroupedGemmConfig`].
pub fn grouped_gemm(d: &GroupedGemmDesc, arch: RocmArch) -> GroupedGemmConfig {
    match family(d, arch) {
        GemmFamily::Mfma => mfma(d, arch),
        GemmFamily::Wmma => wmma(d),
        _ => simt(d),
    }
}

/// Which unit multiplies: by types and architecture alone, so that both halves
/// of a layer get the same one.
fn family(d: &GroupedGemmDesc, arch: RocmArch) -> GemmFamily {
    let half = matches!(d.weights, DType::F16 | DType::Bf16);
    match arch.name {
        _ if d.weights != d.activations => GemmFamily::Simt,
        "gfx90a" | "gfx942" | "gfx950" => GemmFamily::Mfma,
        "gfx1100" | "gfx1101" if half => GemmFamily::Wmma,
        _ => GemmFamily::Simt,
    }
}

/// Rows of a tile. The scan lists the tiles once for both halves of a layer, so
/// this reads only what the two share.
fn tile_rows(d: &GroupedGemmDesc) -> usize {
    // At 4096 tokens the mean expert then fills a tile of 128.
    let busy = 32 * d.top_k >= d.experts;
    if busy { 128 } else { 64 }
}

/// Two by two waves. A row of shared memory is 128 bytes where two blocks fit
/// on a compute unit so, or nearly; gfx950 has 160 KB, the others 64.
fn mfma(d: &GroupedGemmDesc, arch: RocmArch) -> GroupedGemmConfig {
    let tile_rows = tile_rows(d);
    let row_bytes = match (arch.name, tile_rows) {
        ("gfx950", _) | (_, 64) => 128,
        _ => 64,
    };
    GroupedGemmConfig {
        threads: 256,
        tile_depth: row_bytes / d.weights.size(),
        thread_rows: tile_rows / 2,
        family: GemmFamily::Mfma,
        ..matrix(d, tile_rows)
    }
}

/// Waves of 32 rows, two side by side.
fn wmma(d: &GroupedGemmDesc) -> GroupedGemmConfig {
    let tile_rows = tile_rows(d);
    GroupedGemmConfig {
        threads: 2 * tile_rows as u32,
        tile_depth: 64 / d.weights.size(),
        thread_rows: 32,
        family: GemmFamily::Wmma,
        ..matrix(d, tile_rows)
    }
}

/// What both families of matrix units share: 128 columns of a block, half of
/// them up where there is a gate, and a wave has 64 of them.
fn matrix(d: &GroupedGemmDesc, tile_rows: usize) -> GroupedGemmConfig {
    let matrices = if d.gated { 2 } else { 1 };
    GroupedGemmConfig {
        tile_rows,
        tile_columns: 128 / matrices,
        thread_columns: 64 / matrices,
        stages: 2,
        gather: d.plain_rows && !d.dense,
        ..simt(d)
    }
}

/// Gate and up columns share a thread: eight rows by eight columns of sums each
/// way.
fn simt(d: &GroupedGemmDesc) -> GroupedGemmConfig {
    let matrices = if d.gated { 2 } else { 1 };
    GroupedGemmConfig {
        threads: 128,
        tile_rows: 64,
        tile_columns: 128 / matrices,
        tile_depth: 16,
        thread_rows: 8,
        thread_columns: 8 / matrices,
        family: GemmFamily::Simt,
        stages: 1,
        gather: false,
        shared_bytes: 0,
        tf32: false,
    }
}

/// See [`CombineConfig`].
pub fn combine(d: &CombineDesc, _: RocmArch) -> CombineConfig {
    gpu::combine(d)
}

/// See [`CombineBwdConfig`].
pub fn combine_bwd(d: &CombineBwdDesc, arch: RocmArch) -> CombineBwdConfig {
    gpu::combine_bwd(d, arch.wave)
}

/// See [`GroupedGemmConfig`]. Row tiles are those of the forward pass.
pub fn grouped_gemm_dgrad(d: &GroupedGemmDgradDesc, arch: RocmArch) -> GroupedGemmConfig {
    gpu::simt_product(grouped_gemm(&d.forward(), arch).tile_rows)
}

/// See [`GroupedGemmConfig`]. A tile is a piece of a matrix; depth counts rows.
pub fn grouped_gemm_wgrad(d: &GroupedGemmWgradDesc, _: RocmArch) -> GroupedGemmConfig {
    gpu::simt_wgrad(d)
}

/// See [`GateTopkBwdConfig`].
pub fn gate_topk_bwd(d: &GateTopkBwdDesc, _: RocmArch) -> GateTopkBwdConfig {
    gpu::gate_topk_bwd(d)
}

/// See [`DispatchBwdConfig`].
pub fn dispatch_bwd(d: &DispatchBwdDesc, _: RocmArch) -> DispatchBwdConfig {
    gpu::dispatch_bwd(d)
}

#[cfg(test)]
mod tests {
    use super::*;
    use DType::{Bf16, F16, F32};
    use moesaic_spec::LayerSpec;

    fn halves(name: &'static str, [w, a]: [DType; 2], experts: usize) -> [GroupedGemmConfig; 2] {
        let text = format!(
            r#"{{"shape":{{"model_dim":63,"hidden_dim":40,"experts":{experts},"top_k":1}}}}"#
        );
        let mut spec: LayerSpec = serde_json::from_str(&text).unwrap();
        spec.precision.weights = w;
        spec.precision.activations = a;
        let arch = RocmArch { name, wave: 64 };
        [Half::Up, Half::Down]
            .map(|half| grouped_gemm(&crate::desc::grouped_gemm(&spec, half), arch))
    }

    #[test]
    fn types_and_architecture_choose_the_unit() {
        let unit = |name, types| halves(name, types, 8)[0].family;
        for name in ["gfx90a", "gfx942", "gfx950"] {
            for dtype in [Bf16, F16, F32] {
                assert_eq!(unit(name, [dtype, dtype]), GemmFamily::Mfma);
            }
            assert_eq!(unit(name, [F32, Bf16]), GemmFamily::Simt);
        }
        for name in ["gfx1100", "gfx1101"] {
            assert_eq!(unit(name, [F16, F16]), GemmFamily::Wmma);
            assert_eq!(unit(name, [F32, F32]), GemmFamily::Simt);
        }
        for name in ["gfx908", "gfx1030", "gfx1200", "gfx1201"] {
            assert_eq!(unit(name, [Bf16, Bf16]), GemmFamily::Simt);
        }
    }

    #[test]
    fn both_halves_have_the_same_rows() {
        for name in ["gfx90a", "gfx950", "gfx1100", "gfx1201"] {
            for experts in [8, 60] {
                let [up, down] = halves(name, [F16, F16], experts);
                assert_eq!(up.tile_rows, down.tile_rows, "{name}, {experts} experts");
                assert_eq!(up.gather, up.family != GemmFamily::Simt, "{name}");
                assert!(!down.gather, "{name}");
            }
        }
    }
}
