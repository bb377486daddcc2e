//! The fused shared expert: its GEMMs run in the launches of the routed experts.

use super::{ExpertGemm, FusedShared, GroupedGemmConfig, GroupedGemmDesc, desc};
use crate::layer::{Builder, Part};
use crate::ops::Op;

impl Builder {
    /// Returns the first shared expert, if its GEMM can run in the routed experts' launch with
    /// unchanged results. That holds on GPUs with decode kernels, for the decode kernels and for
    /// those of larger calls, which take the same types and widths.
    pub(super) fn fused_shared(&self, half: ExpertGemm) -> Option<FusedShared> {
        let spec = &self.plan.spec;
        // Ranks that share a layer have tokens and routed experts in different parts, and behind a
        // projection the routed experts read other rows than the tokens.
        if self.part != Part::Whole || spec.shared.is_empty() || spec.latent.is_some() {
            return None;
        }
        let (routed, shared) = (self.routed(half), desc::shared(spec, half, 0));
        let configs = [&routed, &shared].map(|desc| self.decode(desc));
        let [Some(of_routed), Some(of_shared)] = configs else {
            return None;
        };
        // Down reads what up has written.
        let is_there = match half {
            ExpertGemm::Up => of_routed.gather(),
            ExpertGemm::Down => self.has_fused_shared(ExpertGemm::Up),
        };
        // One kernel has one epilogue, so a shared expert with a clamp of its own has a launch of
        // its own.
        let alike = !routed.weighted
            && routed.bias == shared.bias
            && routed.nonlinearity == shared.nonlinearity;
        let together = is_there
            && alike
            && pack_bytes(&routed) == pack_bytes(&shared)
            && multiplied(&of_routed) == multiplied(&of_shared);
        together.then_some(FusedShared {
            inner: shared.inner,
            outer: shared.outer,
        })
    }

    /// Returns whether the plan fuses the first shared expert.
    pub(super) fn has_fused_shared(&self, half: ExpertGemm) -> bool {
        let is_it = |op: &Op| match op {
            Op::GroupedGemm { desc, .. } => desc.half == half && desc.fused_shared.is_some(),
            _ => false,
        };
        self.plan.kernels.iter().any(|kernel| is_it(&kernel.op))
    }
}

/// Returns the logarithms of the bytes, up to 16, in which rows and results move. A kernel has one
/// length for each.
fn pack_bytes(d: &GroupedGemmDesc) -> [u32; 2] {
    [d.inner, d.outer].map(|width| (width * d.weights.size()).trailing_zeros().min(4))
}

/// Returns what decides the order of sums and the lines of a block.
fn multiplied(config: &GroupedGemmConfig) -> [usize; 3] {
    [config.thread_rows, config.tile_columns, config.tile_depth]
}
