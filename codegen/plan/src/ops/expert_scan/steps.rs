//! The tensors and launches of `expert_scan`.

use super::{ExpertScanConfig, ExpertScanDesc, expert_scan};
use crate::layer::{Builder, TensorPlan, TensorRole, constant, tensor};
use crate::ops::route::Routed;
use crate::ops::{Calls, Operator, TileMachine};
use moesaic_kernel::DType::{F32, I32, I64};
use moesaic_kernel::Size;
use moesaic_spec::{CapacityMode, LayerSpec};

pub(crate) fn scan_tensors(
    spec: &LayerSpec,
    machine: TileMachine,
    training: bool,
) -> Vec<TensorPlan> {
    let desc = expert_scan(spec, training);
    let config = desc.tiling(machine);
    let (tokens, k) = (Size::Tokens, constant(desc.top_k));
    let slots = tokens.clone() * k.clone();
    let tiles = desc.tiles(&config);
    let (routed, edges) = (constant(desc.routed_experts), constant(desc.experts + 1));
    let per_slot = [tokens.clone(), k];
    let tile_shape = [tiles, routed.clone()];
    let edge = std::slice::from_ref(&edges);
    let mut list = vec![
        tensor("tile_counts", I32, &tile_shape, TensorRole::Scratch),
        tensor(
            "counts",
            I64,
            std::slice::from_ref(&routed),
            TensorRole::Output,
        ),
        tensor("offsets", I64, edge, TensorRole::Output),
        tensor("row_tiles", I32, edge, TensorRole::Scratch),
        tensor("locations", I32, &per_slot, TensorRole::Output),
        tensor("slot_rows", I32, &per_slot, TensorRole::Output),
        tensor(
            "row_slots",
            I32,
            std::slice::from_ref(&slots),
            TensorRole::Output,
        ),
    ];
    if desc.limited() {
        list.push(tensor("capacity", I64, &[constant(1)], TensorRole::Output));
    }
    if desc.capacity.mode == CapacityMode::Bounded {
        list.push(tensor("overflow", I64, &[constant(1)], TensorRole::Output));
    }
    if let Some(items) = desc.sorted_items() {
        list.push(match config.sort_run {
            Some(_) => tensor("sorted_keys", I64, &[items], TensorRole::Scratch),
            None => tensor(
                "sort_items",
                I64,
                &[constant(2), items],
                TensorRole::Scratch,
            ),
        });
    }
    let per_token = std::slice::from_ref(&tokens);
    list.push(tensor("kept_sums", F32, per_token, TensorRole::Scratch));
    if desc.ordered() {
        list.push(tensor("best_score", F32, per_token, TensorRole::Scratch));
        list.push(tensor("token_order", I32, per_token, TensorRole::Scratch));
    }
    if desc.ranked() {
        list.push(tensor("bucket_offsets", I64, &[edges], TensorRole::Scratch));
        list.push(tensor("bucket_slots", I32, &[slots], TensorRole::Scratch));
    }
    list
}

impl Builder {
    /// Adds the scan. It lists the row tiles of the routed experts' GEMMs, so their heights agree.
    pub(crate) fn scan(&mut self, routed: Routed) {
        let desc = self.scan_desc();
        let config = ExpertScanConfig {
            tile_rows: self.tile_rows(),
            ..desc.tiling(self.machine)
        };
        // One block routes a decode call, scan included, so these launches are for larger calls
        // alone.
        let calls = match routed {
            Routed::Whole => Calls::Prefill,
            Routed::Logits | Routed::Nothing => Calls::All,
        };
        let kernel = self.kernel_for("expert_scan", desc.with(config), calls);
        self.launch_all(kernel, &[]);
    }

    /// Returns the scan of this pass.
    pub(crate) fn scan_desc(&self) -> ExpertScanDesc {
        expert_scan(&self.plan.spec, self.trains())
    }
}
