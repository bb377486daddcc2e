//! Products of few rows, which are kernels of their own on GPUs with matrix units.

use super::{GroupedGemmConfig, GroupedGemmDesc, tiles};
use crate::layer::{Builder, borrowed};
use crate::ops::{Calls, Operator};

impl Builder {
    /// How a product is tiled for few rows, if it is then another kernel.
    pub(super) fn decode(&self, desc: &GroupedGemmDesc) -> Option<GroupedGemmConfig> {
        if !self.decode {
            return None;
        }
        let among = self.tiling(desc);
        tiles::decode(desc, self.machine, among.tile_rows)
    }

    /// Adds the product of few rows.
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
