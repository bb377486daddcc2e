//! Decode kernels: GEMMs of small calls, which GPUs with tensor or matrix cores run in kernels of
//! their own.

use super::{GroupedGemmConfig, GroupedGemmDesc, tiles};
use crate::layer::{Builder, borrowed};
use crate::ops::{Calls, Operator};

impl Builder {
    /// Returns the tiling of the decode kernel of a GEMM; `None` if it has none.
    pub(super) fn decode(&self, desc: &GroupedGemmDesc) -> Option<GroupedGemmConfig> {
        if !self.decode {
            return None;
        }
        // The tile height of larger calls, because routing lists tiles of one height for all GEMMs.
        let among = self.tiling(desc);
        tiles::decode(desc, self.machine, among.tile_rows)
    }

    /// Adds the decode kernel of a GEMM.
    pub(super) fn decode_gemm(
        &mut self,
        name: &str,
        desc: GroupedGemmDesc,
        config: GroupedGemmConfig,
        names: &[(String, String)],
    ) {
        let kernel = self.kernel_for(&format!("{name}_decode"), desc.with(config), Calls::Decode);
        self.launch_all(kernel, &borrowed(names));
    }
}
