//! The decision of global routing in place of the scan of one rank's tokens.

use super::mesh_call::MeshCall;
use crate::error::EngineError;
use bytemuck::cast_slice;

impl MeshCall<'_> {
    /// Replaces the result of this rank's scan by the decision of global routing.
    pub(super) fn apply_global_routing(&mut self) -> Result<(), EngineError> {
        let Some(routing) = self.counts.routing.clone() else {
            return Ok(());
        };
        let spec = &self.plan.tokens.spec;
        if spec.capacity.renormalize_after_drop && self.parts.tokens.named("kept_sums").is_some() {
            let weights = self.floats("topk_weights", routing.weights.len())?;
            let sums = self.floats("kept_sums", self.parts.tokens.scalars().tokens())?;
            let sums = routing.kept_sums(spec, &weights, &sums);
            self.upload("kept_sums", cast_slice(&sums))?;
        }
        let layout = routing.layout(spec);
        self.upload("topk_ids", cast_slice(&routing.ids))?;
        self.upload("topk_weights", cast_slice(&routing.weights))?;
        self.upload("locations", cast_slice(&routing.locations))?;
        self.upload("counts", cast_slice(&layout.counts))?;
        self.upload("offsets", cast_slice(&layout.offsets))?;
        self.upload("slot_rows", cast_slice(&layout.slot_rows))?;
        self.upload("row_slots", cast_slice(&layout.row_slots))?;
        self.upload("overflow", &layout.dropped.to_le_bytes())?;
        match routing.capacity {
            Some(rows) => self.upload("capacity", &rows.to_le_bytes()),
            None => Ok(()),
        }
    }

    fn upload(&self, name: &str, bytes: &[u8]) -> Result<(), EngineError> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.parts.tokens.upload(name, bytes)
    }

    fn floats(&self, name: &str, count: usize) -> Result<Vec<f32>, EngineError> {
        let mut values = vec![0.0f32; count];
        if let (Some(buffer), true) = (self.parts.tokens.named(name), count > 0) {
            let bytes = bytemuck::cast_slice_mut(&mut values);
            self.parts.tokens.layer.device.download(buffer, 0, bytes)?;
        }
        Ok(values)
    }
}
