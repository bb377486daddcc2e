//! Products of few rows, which are kernels of their own on GPUs with matrix units.

use super::{GroupedGemmConfig, GroupedGemmDesc, tiles};
use crate::layer::{Builder, borrowed};
use crate::ops::{Calls, Operator};

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
}
