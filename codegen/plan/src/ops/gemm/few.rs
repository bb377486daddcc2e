//! Products of few rows, which are kernels of their own on GPUs with matrix units, and the
//! shared expert that comes along in their launch.

use super::{Beside, GroupedGemmConfig, GroupedGemmDesc, Half, desc, tiles};
use crate::layer::{Builder, Part, borrowed};
use crate::ops::{Calls, Op, Operator};

impl Builder {
    /// How a product is tiled for few rows, if it is then another kernel.
    pub(super) fn few(&self, desc: &GroupedGemmDesc) -> Option<GroupedGemmConfig> {
        if !self.few {
            return None;
        }
        let among = self.tiling(desc);
        tiles::few(desc, self.machine, among.tile_rows)
    }

    /// Adds the product of few rows.
    pub(super) fn few_rows(
        &mut self,
        name: &str,
        desc: GroupedGemmDesc,
        config: GroupedGemmConfig,
        names: &[(String, String)],
    ) {
        let kernel = self.kernel_for(&format!("{name}_few"), desc.with(config), Calls::Few);
        self.launch_all(kernel, &borrowed(names));
    }

    /// The first shared expert, if few rows of the routed experts and all tokens of it can be
    /// multiplied in one launch, as they would be in two.
    pub(super) fn beside(&self, half: Half) -> Option<Beside> {
        let spec = &self.plan.spec;
        if self.part != Part::Whole || spec.shared.is_empty() || spec.latent.is_some() {
            return None;
        }
        let (routed, shared) = (self.routed(half), desc::shared(spec, half, 0));
        let configs = [&routed, &shared].map(|desc| self.few(desc));
        let [Some(of_routed), Some(of_shared)] = configs else {
            return None;
        };
        // Down reads what up has written.
        let is_there = match half {
            Half::Up => of_routed.gather(),
            Half::Down => self.has_beside(Half::Up),
        };
        let alike = !routed.weighted && routed.bias == shared.bias;
        let together = is_there
            && alike
            && pieces(&routed) == pieces(&shared)
            && multiplied(&of_routed) == multiplied(&of_shared);
        together.then_some(Beside {
            inner: shared.inner,
            outer: shared.outer,
        })
    }

    /// Whether the first shared expert has come along.
    pub(super) fn has_beside(&self, half: Half) -> bool {
        let is_it = |op: &Op| match op {
            Op::GroupedGemm { desc, .. } => desc.half == half && desc.beside.is_some(),
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
