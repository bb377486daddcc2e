//! The shared expert whose products come along in the launches of the routed experts'.

use super::{FusedShared, GroupedGemmConfig, GroupedGemmDesc, Half, desc};
use crate::layer::{Builder, Part};
use crate::ops::Op;

impl Builder {
    /// The first shared expert, where the routed experts' rows and all its tokens can be
    /// multiplied in one launch as they would be in two: on GPUs that have kernels for few rows,
    /// by those and by the ones for many, which take the same types and widths.
    pub(super) fn fused_shared(&self, half: Half) -> Option<FusedShared> {
        let spec = &self.plan.spec;
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
            Half::Up => of_routed.gather(),
            Half::Down => self.has_fused_shared(Half::Up),
        };
        let alike = !routed.weighted && routed.bias == shared.bias;
        let together = is_there
            && alike
            && pieces(&routed) == pieces(&shared)
            && multiplied(&of_routed) == multiplied(&of_shared);
        together.then_some(FusedShared {
            inner: shared.inner,
            outer: shared.outer,
        })
    }

    /// Whether the first shared expert has come along.
    pub(super) fn has_fused_shared(&self, half: Half) -> bool {
        let is_it = |op: &Op| match op {
            Op::GroupedGemm { desc, .. } => desc.half == half && desc.fused_shared.is_some(),
            _ => false,
        };
        self.plan.kernels.iter().any(|kernel| is_it(&kernel.op))
    }
}

/// Bytes of the pieces, up to 16, in which rows and results are moved: the kernel has one
/// length of each.
fn pieces(d: &GroupedGemmDesc) -> [u32; 2] {
    [d.inner, d.outer].map(|width| (width * d.weights.size()).trailing_zeros().min(4))
}

/// What decides about the order of sums and the lines of a block.
fn multiplied(config: &GroupedGemmConfig) -> [usize; 3] {
    [config.thread_rows, config.tile_columns, config.tile_depth]
}
