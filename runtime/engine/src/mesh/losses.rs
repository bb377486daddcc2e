//! Terms of auxiliary losses, summed over the tokens of all ranks.

use super::mesh_call::MeshCall;
use crate::error::EngineError;
use bytemuck::{cast_slice, cast_slice_mut};
use moesaic_collectives::{Call, CommElement, Reduction, Slice};
use moesaic_plan::{PlanPart, TensorId};
use std::sync::Arc;

impl MeshCall<'_> {
    /// Sums a tensor with a row for each tile of tokens over tiles and ranks. The sum goes to the
    /// first tile and zeros to the others, so that the kernel that sums over tiles gets the sums of
    /// all ranks. A rank without tokens has no tile, and no loss.
    pub(super) fn sum_loss_parts(
        &mut self,
        tensor: TensorId,
        call: &Call,
    ) -> Result<(), EngineError> {
        let device = Arc::clone(&self.parts.tokens.layer.device);
        let width = self.plan.row_bytes(PlanPart::Dispatch, tensor) / size_of::<f32>();
        let tokens = self.parts.tokens.scalars().tokens() as u64;
        let plan = &self.plan.tokens[tensor];
        // Some tensors have one extra row that belongs to no tile.
        let tiles = (plan.elements(tokens) - plan.elements(0)) as usize / width.max(1);
        let mut parts = vec![0.0f32; tiles * width];
        if !parts.is_empty() {
            let bytes = cast_slice_mut(&mut parts);
            device.download(self.parts.tokens.buffer(tensor), 0, bytes)?;
        }
        let mut sums = vec![0.0f32; width];
        for tile in parts.chunks(width.max(1)) {
            sums.iter_mut().zip(tile).for_each(|(sum, n)| *sum += n);
        }
        // The sum is exchanged in memory of its own, because a rank without tokens has no tile but
        // must still take part.
        let workspace = Arc::new(device.alloc((4 * width).max(64))?);
        device.upload(cast_slice(&sums), &workspace, 0)?;
        let data = Slice::new(&workspace, CommElement::F32, 0, width)?;
        let world = &mut self.groups.world;
        world
            .all_reduce(&data, &data, Reduction::Sum, call)?
            .wait()?;
        if parts.is_empty() {
            return Ok(());
        }
        parts.fill(0.0);
        device.download(&workspace, 0, cast_slice_mut(&mut parts[..width]))?;
        device.upload(cast_slice(&parts), self.parts.tokens.buffer(tensor), 0)?;
        Ok(())
    }
}
