//! Calls of a rank on device memory that the caller owns.
//!
//! Kernels use the caller's tensors in place. Exchanges use the layer's own memory, because a
//! failed exchange may still access its buffers long after the call has returned its error. So the
//! few tensors that exchanges move are copied on the device, in stream order: `x` and `dy` where
//! shared experts are sharded, and numbers such as `counts`.

use super::mesh_call::{Bytes, MeshCall};
use crate::error::EngineError;
use crate::reason::InputReason;
use moesaic_plan::{SATURATED, TensorId, TensorRole};
use moesaic_target::{Buffer, Ptr};
use std::collections::BTreeSet;
use std::sync::Arc;

impl MeshCall<'_> {
    /// Takes the caller's tensors of some roles, for `tokens` tokens, before memory is reserved.
    /// All of `inputs` must be there.
    pub(super) fn take(
        &mut self,
        tokens: usize,
        tensors: &[(&str, Ptr)],
        inputs: &[TensorId],
        roles: [TensorRole; 2],
    ) -> Result<(), EngineError> {
        let layer = self.parts.tokens.layer;
        self.refuse_weights(tensors)?;
        let role = |name: &str| layer.id(name).map(|id| layer.plan()[id].role);
        let is_port = |(name, _): &&(&str, Ptr)| role(name).is_some_and(|r| roles.contains(&r));
        let ports: Vec<(&str, Ptr)> = tensors.iter().filter(is_port).copied().collect();
        let mut found = Vec::new();
        layer.find_given(tokens, &ports, inputs, &mut found)?;
        let mut taken = BTreeSet::new();
        // If the caller names a tensor twice, the first address counts.
        for (id, address) in found.into_iter().filter(|(id, _)| taken.insert(*id)) {
            // An exchange may still access its buffer after the call has failed; the layer's memory
            // lives long enough, the caller's may not.
            if self.transfers.exchanged.contains(&id) {
                let bytes = layer.plan()[id].bytes(tokens as u64);
                self.transfers
                    .caller
                    .tensors
                    .push((id, theirs(address, bytes)));
            } else {
                self.parts.tokens.given.push((id, address));
            }
        }
        let count = tensors.iter().find(|(name, _)| *name == SATURATED);
        self.transfers.caller.saturated = match count {
            Some((name, Ptr(0))) => return Err(EngineError::input(name, InputReason::Null)),
            Some((_, address)) => Some(theirs(*address, COUNT_BYTES)),
            None => None,
        };
        Ok(())
    }

    /// Refuses weights and their gradients: they stay with their ranks, which sum gradients in
    /// place.
    fn refuse_weights(&self, tensors: &[(&str, Ptr)]) -> Result<(), EngineError> {
        let is_weight = |name: &str| {
            let mut parts = self.plan.parts();
            parts.any(|plan| {
                plan.tensor(name)
                    .is_some_and(|t| t.role == TensorRole::Weight)
            })
        };
        for (name, _) in tensors {
            let reason = match name.strip_prefix("grad.") {
                Some(weight) if is_weight(weight) => InputReason::GradientOverRanks,
                None if is_weight(name) => InputReason::WeightOverRanks,
                _ => continue,
            };
            return Err(EngineError::input(name, reason));
        }
        Ok(())
    }

    /// Copies inputs that exchanges move to the layer's memory, once it is reserved.
    pub(super) fn copy_inputs(&self) -> Result<(), EngineError> {
        let inputs = self.caller([TensorRole::Input, TensorRole::OutputGradient]);
        inputs
            .into_iter()
            .try_for_each(|[own, theirs]| self.copy_whole(theirs, own, theirs.bytes()))
    }

    /// Copies results that exchanges move to the caller's memory, once the pass is launched.
    pub(super) fn copy_results(&self) -> Result<(), EngineError> {
        let results = self.caller([TensorRole::Output, TensorRole::InputGradient]);
        results
            .into_iter()
            .try_for_each(|[own, theirs]| self.copy_whole(own, theirs, theirs.bytes()))?;
        let Some(to) = &self.transfers.caller.saturated else {
            return Ok(());
        };
        match &self.transfers.cast {
            Some(cast) => {
                let own = cast.packing.kernels.saturated_memory();
                self.copy_whole(own, to, to.bytes())
            }
            None => Ok(self.parts.owned.device.upload(&0i64.to_le_bytes(), to, 0)?),
        }
    }

    /// Returns the tensors of some roles: the layer's memory and the caller's.
    fn caller(&self, roles: [TensorRole; 2]) -> Vec<[&Arc<Buffer>; 2]> {
        let plan = self.parts.tokens.layer.plan();
        let tensors = self.transfers.caller.tensors.iter();
        let tensors = tensors.filter(|(id, _)| roles.contains(&plan[*id].role));
        tensors
            .map(|(id, theirs)| [self.parts.tokens.buffer(*id), theirs])
            .collect()
    }

    fn copy_whole(
        &self,
        from: &Arc<Buffer>,
        to: &Arc<Buffer>,
        bytes: usize,
    ) -> Result<(), EngineError> {
        for first in (0..bytes).step_by(CHUNK_BYTES) {
            let bytes = CHUNK_BYTES.min(bytes - first);
            self.copy_bytes(Bytes::at(from, first), Bytes::at(to, first), bytes)?;
        }
        Ok(())
    }
}

/// The bytes of [`SATURATED`].
const COUNT_BYTES: u64 = 8;

/// The bytes of one copy: a GPU's copy of rows takes rows of less than 2 GiB.
const CHUNK_BYTES: usize = 1 << 30;

/// Wraps a caller's memory; dropping the buffer frees nothing.
fn theirs(address: Ptr, bytes: u64) -> Arc<Buffer> {
    Arc::new(Buffer::new(address, bytes as usize, Box::new(())))
}
