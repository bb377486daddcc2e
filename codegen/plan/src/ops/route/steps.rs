//! The launches that route decode calls.

use super::RouteDesc;
use crate::layer::{Bind, Builder};
use crate::ops::{Calls, Op, Operator, TileMachine};

/// The routing steps that have decode kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Routed {
    Nothing,
    /// The logits.
    Logits,
    /// All of it.
    Whole,
}

impl Builder {
    /// Adds the router of decode calls, where a machine has one.
    pub(crate) fn route_decode(&mut self, name: &str, mut desc: RouteDesc, bind: Bind) -> Routed {
        if !matches!(self.machine, TileMachine::Gpu(_)) || !self.decode {
            return Routed::Nothing;
        }
        let routed = if desc.is_one_block(self.machine) {
            Routed::Whole
        } else {
            // Logits alone, then: selection and scan run in the launches of larger calls.
            desc.scan = None;
            Routed::Logits
        };
        let mut config = desc.tiling(self.machine);
        if let Some(scan) = &mut config.scan {
            // The GEMMs of decode calls read the row tiles that this scan lists.
            scan.tile_rows = self.tile_rows();
        }
        if desc.entries(&config).is_empty() {
            return Routed::Nothing;
        }
        let op = Op::Route { desc, config };
        let kernel = self.kernel_for(name, op, Calls::Decode);
        self.launch_all(kernel, bind);
        routed
    }
}
