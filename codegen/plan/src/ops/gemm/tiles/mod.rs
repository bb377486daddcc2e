//! How products are tiled: one file per kind of machine, the same functions in
//! each.

mod cpu;
mod cuda;
mod registers;
mod rocm;

use super::{GemmFamily, GroupedGemmConfig};
use super::{GroupedGemmDesc, GroupedGemmDgradDesc, GroupedGemmWgradDesc};
use crate::ops::{Gpu, Machine};

/// Of a forward product.
pub(super) fn forward(d: &GroupedGemmDesc, machine: Machine) -> GroupedGemmConfig {
    match machine {
        Machine::Cpu(core) => cpu::forward(d, core),
        Machine::Gpu(Gpu::Cuda(arch)) => cuda::forward(d, arch),
        Machine::Gpu(Gpu::Rocm(arch)) => rocm::forward(d, arch),
    }
}

/// Of a forward product with few rows, in row tiles of so many; `None` where that of many
/// serves.
pub(super) fn decode(
    d: &GroupedGemmDesc,
    machine: Machine,
    tile_rows: usize,
) -> Option<GroupedGemmConfig> {
    match machine {
        Machine::Gpu(Gpu::Cuda(arch)) => cuda::decode(d, arch, tile_rows),
        Machine::Gpu(Gpu::Rocm(arch)) => rocm::decode(d, arch),
        Machine::Cpu(_) => None,
    }
}

/// Of dgrad, with the row tiles of the forward pass.
pub(super) fn dgrad(d: &GroupedGemmDgradDesc, machine: Machine) -> GroupedGemmConfig {
    match machine {
        Machine::Cpu(core) => cpu::dgrad(d, core),
        Machine::Gpu(Gpu::Cuda(arch)) => cuda::dgrad(d, arch),
        Machine::Gpu(Gpu::Rocm(arch)) => rocm::dgrad(d, arch),
    }
}

/// Of wgrad: a tile is a piece of a matrix; depth counts rows.
pub(super) fn wgrad(d: &GroupedGemmWgradDesc, machine: Machine) -> GroupedGemmConfig {
    match machine {
        Machine::Cpu(core) => cpu::wgrad(d, core),
        Machine::Gpu(Gpu::Cuda(arch)) => cuda::wgrad(d, arch),
        Machine::Gpu(Gpu::Rocm(arch)) => rocm::wgrad(d, arch),
    }
}

/// The ordinary family's tiling of one matrix's product: eight rows by eight
/// columns of sums per thread.
fn simt_product(tile_rows: usize) -> GroupedGemmConfig {
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

/// The ordinary family's tiling of a product over rows. The gradients of gate
/// and up share a thread, each with half of its sums.
fn simt_wgrad(d: &GroupedGemmWgradDesc) -> GroupedGemmConfig {
    let matrices = if d.gated { 2 } else { 1 };
    GroupedGemmConfig {
        tile_rows: 64 / matrices,
        thread_rows: 8 / matrices,
        family: GemmFamily::Simt {
            gather: d.plain_rows && !d.dense,
        },
        ..simt_product(64)
    }
}
