//! The choice of a tiling for each GEMM: one file per kind of machine, with the same functions in
//! each.

mod cpu;
mod cuda;
mod registers;
mod rocm;

use super::{GemmFamily, GroupedGemmConfig};
use super::{GroupedGemmDesc, GroupedGemmDgradDesc, GroupedGemmWgradDesc};
use crate::ops::{Gpu, TileMachine};

/// Returns the tiling of a forward GEMM.
pub(super) fn forward(d: &GroupedGemmDesc, machine: TileMachine) -> GroupedGemmConfig {
    match machine {
        TileMachine::Cpu(core) => cpu::forward(d, core),
        TileMachine::Gpu(Gpu::Cuda(arch)) => cuda::forward(d, arch),
        TileMachine::Gpu(Gpu::Rocm(arch)) => rocm::forward(d, arch),
    }
}

/// Returns the tiling of a decode kernel with these row tiles; `None` where the kernel of larger
/// calls serves.
pub(super) fn decode(
    d: &GroupedGemmDesc,
    machine: TileMachine,
    tile_rows: usize,
) -> Option<GroupedGemmConfig> {
    match machine {
        TileMachine::Gpu(Gpu::Cuda(arch)) => cuda::decode(d, arch, tile_rows),
        TileMachine::Gpu(Gpu::Rocm(arch)) => rocm::decode(d, arch),
        TileMachine::Cpu(_) => None,
    }
}

/// Returns the tiling of a dgrad, with the row tiles of the forward pass.
pub(super) fn dgrad(d: &GroupedGemmDgradDesc, machine: TileMachine) -> GroupedGemmConfig {
    match machine {
        TileMachine::Cpu(core) => cpu::dgrad(d, core),
        TileMachine::Gpu(Gpu::Cuda(arch)) => cuda::dgrad(d, arch),
        TileMachine::Gpu(Gpu::Rocm(arch)) => rocm::dgrad(d, arch),
    }
}

/// Returns the tiling of a wgrad: a tile is a part of a matrix, and depth counts rows.
pub(super) fn wgrad(d: &GroupedGemmWgradDesc, machine: TileMachine) -> GroupedGemmConfig {
    match machine {
        TileMachine::Cpu(core) => cpu::wgrad(d, core),
        TileMachine::Gpu(Gpu::Cuda(arch)) => cuda::wgrad(d, arch),
        TileMachine::Gpu(Gpu::Rocm(arch)) => rocm::wgrad(d, arch),
    }
}

/// Returns the SIMT tiling of a GEMM with one matrix: eight rows by eight columns of sums per
/// thread.
fn simt_one_matrix(tile_rows: usize) -> GroupedGemmConfig {
    GroupedGemmConfig {
        threads: 128,
        tile_rows,
        tile_columns: 64 * 128 / tile_rows,
        tile_depth: 16,
        thread_rows: 8,
        thread_columns: 8,
        family: GemmFamily::Simt { gather: false },
    }
}

/// Returns the SIMT tiling of a wgrad. The gradients of gate and up share a thread, each with half
/// of its sums.
fn simt_wgrad(d: &GroupedGemmWgradDesc) -> GroupedGemmConfig {
    let matrices = if d.gated { 2 } else { 1 };
    GroupedGemmConfig {
        tile_rows: 64 / matrices,
        thread_rows: 8 / matrices,
        family: GemmFamily::Simt {
            gather: d.plain_rows && !d.dense,
        },
        ..simt_one_matrix(64)
    }
}
