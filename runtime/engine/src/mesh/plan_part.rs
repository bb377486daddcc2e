//! One part of a plan in a call: a layer, its memory and its scalars.

use crate::device_layer::{DeviceLayer, Turn};
use crate::error::EngineError;
use crate::launch::{Bound, Scalars};
use crate::memory::{Addresses, Buffers};
use crate::training::DeviceSaved;
use moesaic_plan::{Chunk, TensorId};
use moesaic_target::{Buffer, Ptr};
use std::sync::Arc;

/// A part of a plan in one call. It holds the layer's lock, so no other call of the layer runs
/// meanwhile.
pub(super) struct PartCall<'l> {
    pub layer: &'l DeviceLayer,
    workspaces: Turn<'l>,
    kept: Kept<'l>,
    scalars: Option<Scalars>,
    /// Weights and gradients from the workspace pool, where the layer holds none itself.
    pub borrowed: Buffers,
    /// Weights of shadows that stay from forward to backward.
    pub kept_weights: Buffers,
    /// Tensors in the caller's memory, in a raw call. Exchanges move none of them.
    pub given: Vec<(TensorId, Ptr)>,
    /// Scratch for the addresses of a chunk's rows.
    chunk: Addresses,
    /// Whether an earlier chunk has written gradients of weights.
    begun: bool,
}

/// The consecutive rows of a chunk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub chunk: Chunk,
    /// The first row.
    pub first: usize,
    /// The number of rows.
    pub rows: usize,
}

/// The tensors that a call keeps for backward, or has from forward.
enum Kept<'l> {
    Nothing,
    Now(DeviceSaved),
    Before(&'l DeviceSaved),
}

impl<'l> PartCall<'l> {
    pub fn new(layer: &'l DeviceLayer) -> PartCall<'l> {
        PartCall {
            layer,
            workspaces: layer.lock_workspaces(),
            kept: Kept::Nothing,
            scalars: None,
            borrowed: Buffers::default(),
            kept_weights: Buffers::default(),
            given: Vec::new(),
            chunk: Addresses::default(),
            begun: false,
        }
    }

    /// Reserves memory for a pass that keeps nothing.
    pub fn pass(&mut self, scalars: Scalars) -> Result<(), EngineError> {
        self.layer.reserve(&mut self.workspaces, scalars.tokens())?;
        self.scalars = Some(scalars);
        self.layer.lay_passing(&mut self.workspaces);
        self.workspaces.addresses.lay(&self.borrowed);
        self.workspaces.addresses.give(&self.given);
        Ok(())
    }

    /// Reserves memory for a pass that keeps what backward needs.
    pub fn train(&mut self, scalars: Scalars) -> Result<(), EngineError> {
        let (layer, tokens) = (self.layer, scalars.tokens());
        layer.reserve_training(&mut self.workspaces.every, tokens)?;
        let mut saved = layer.saved(tokens, scalars)?;
        // Kept with the state, because backward reads the caller's inputs again at these addresses.
        saved.kept.given.extend_from_slice(&self.given);
        layer.lay_saved(&mut self.workspaces, &saved);
        self.workspaces.addresses.lay(&self.borrowed);
        self.workspaces.addresses.lay(&self.kept_weights);
        (self.scalars, self.kept) = (Some(scalars), Kept::Now(saved));
        Ok(())
    }

    /// Reserves memory for a backward pass from the state that forward kept.
    pub fn back(&mut self, saved: &'l DeviceSaved, accumulate: bool) -> Result<(), EngineError> {
        let layer = self.layer;
        layer.check_saved(saved)?;
        layer.reserve_every(&mut self.workspaces.every, saved.tokens())?;
        layer.gradient_buffers()?;
        layer.lay_saved(&mut self.workspaces, saved);
        self.workspaces.addresses.lay(&self.borrowed);
        self.workspaces.addresses.lay(&self.kept_weights);
        self.workspaces.addresses.give(&self.given);
        self.scalars = Some(saved.scalars().accumulating(accumulate));
        self.kept = Kept::Before(saved);
        Ok(())
    }

    /// Returns the state that the call kept.
    pub fn into_saved(self) -> Option<DeviceSaved> {
        match self.kept {
            Kept::Now(saved) => Some(saved),
            _ => None,
        }
    }

    /// Returns the scalars, once memory is reserved.
    pub fn scalars(&self) -> &Scalars {
        self.scalars
            .as_ref()
            .expect("there is workspace for the call")
    }

    /// Launches steps of this part.
    pub fn run(&self, steps: &Bound) -> Result<(), EngineError> {
        let addresses = &self.workspaces.addresses;
        self.layer.run(steps, self.scalars(), addresses, None)
    }

    /// Launches steps for a chunk's rows alone, as if there were no others. Tensors without rows
    /// keep their addresses: scratch, which launches use one after the other; weights; and their
    /// gradients, to which every chunk but the first adds.
    pub fn run_part(&mut self, steps: &Bound, part: Part) -> Result<(), EngineError> {
        let scalars = self.scalars().of_chunk(part.rows, self.begun);
        let plan = self.layer.plan();
        self.chunk.copy(&self.workspaces.addresses);
        for (at, tensor) in plan.tensors.iter().enumerate() {
            if tensor.is_by_token() {
                let bytes = tensor.bytes(part.first as u64);
                self.chunk.shift(TensorId(at), bytes);
            }
        }
        let (layer, chunk) = (self.layer, Some(part.chunk));
        layer.run_chunk(steps, &scalars, &self.chunk, None, chunk)?;
        self.begun = true;
        Ok(())
    }

    /// Returns the memory of a tensor: kept, passing, or a weight.
    pub fn buffer(&self, tensor: TensorId) -> &Arc<Buffer> {
        let found = self.find(tensor);
        found.expect("tensors of a call have memory")
    }

    /// Returns the memory of a tensor by name, if the pass has it: an evaluation lacks what only
    /// training keeps.
    pub fn named(&self, name: &str) -> Option<&Arc<Buffer>> {
        self.find(self.layer.id(name)?)
    }

    /// Uploads a tensor that kernels read, if the pass has it.
    pub fn upload(&self, name: &str, bytes: &[u8]) -> Result<(), EngineError> {
        match self.named(name) {
            Some(buffer) => Ok(self.layer.device.upload(bytes, buffer, 0)?),
            None => Ok(()),
        }
    }

    fn find(&self, tensor: TensorId) -> Option<&Arc<Buffer>> {
        let kept = match &self.kept {
            Kept::Now(saved) => saved.handle(tensor),
            Kept::Before(saved) => saved.handle(tensor),
            Kept::Nothing => self.workspaces.passing.buffers.handle(tensor),
        };
        kept.or_else(|| self.workspaces.every.buffers.handle(tensor))
            .or_else(|| self.layer.weights.handle(tensor))
            .or_else(|| self.borrowed.handle(tensor))
            .or_else(|| self.kept_weights.handle(tensor))
    }
}
