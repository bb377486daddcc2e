//! The unit of a CPU that multiplies in a GEMM.

use moesaic_kernel::{CpuIsa, DType};
use moesaic_plan::{GemmFamily, GroupedGemmConfig, GroupedGemmDesc};

/// The instructions that multiply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    /// f32 by vectors.
    F32,
    /// Four bytes of integers by vectors.
    Bytes,
    /// Pairs of bf16 by vectors.
    Pairs,
    /// Two rows by two columns of four bf16 each by vectors.
    Quads,
    /// Pairs of bf16 by AMX tiles.
    Tiles,
}

impl Unit {
    /// Returns the unit for factors of these types.
    pub(crate) fn of(config: &GroupedGemmConfig, isa: CpuIsa, left: DType, right: DType) -> Unit {
        let bf16 = left == DType::Bf16 && right == DType::Bf16;
        match config.family {
            GemmFamily::Tiles(_) => Unit::Tiles,
            _ if bf16 && isa.bf16_quads() => Unit::Quads,
            _ if bf16 && isa.bf16_pairs() => Unit::Pairs,
            _ => Unit::F32,
        }
    }

    /// Returns the unit of a forward GEMM, which may have codes on both sides.
    pub(crate) fn forward(d: &GroupedGemmDesc, config: &GroupedGemmConfig, isa: CpuIsa) -> Unit {
        let [left, right] = d.factors(isa);
        if d.multiplies_bytes(isa) {
            return Unit::Bytes;
        }
        Unit::of(config, isa, left, right)
    }
}
