//! One side of a call: a layer, its memory, and its scalars.

use crate::error::EngineError;
use crate::launch::{Bound, Scalars};
use crate::layer::{Layer, Turn};
use crate::memory::{Addresses, Buffers};
use crate::training::Saved;
use moesaic_plan::{Chunk, TensorId};
use moesaic_target::{Buffer, Ptr};
use std::sync::Arc;

/// A side of one call. The layer takes no other call meanwhile.
pub(super) struct PartCall<'l> {
    pub layer: &'l Layer,
    workspaces: Turn<'l>,
    kept: Kept<'l>,
    scalars: Option<Scalars>,
    /// What the call has of the layer's weights and gradients, where it holds none itself.
    pub borrowed: Buffers,
    /// Weights of shadows that stay from forward to backward.
    pub staying: Buffers,
    /// Tensors that lie where a raw call has them, of which no exchange moves any.
    pub given: Vec<(TensorId, Ptr)>,
    /// Room for the addresses of some of the rows.
    chunk: Addresses,
    /// Whether gradients of weights of some of the rows are there.
    begun: bool,
}

/// Rows that are next to each other, of a chunk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub chunk: Chunk,
    /// The first row.
    pub first: usize,
    /// How many.
    pub rows: usize,
}

/// What a call keeps for backward, or has from forward.
enum Kept<'l> {
    Nothing,
    Now(Saved),
    Before(&'l Saved),
}

impl<'l> PartCall<'l> {
    pub fn new(layer: &'l Layer) -> PartCall<'l> {
        PartCall {
            layer,
            workspaces: layer.lock_workspaces(),
            kept: Kept::Nothing,
            scalars: None,
            borrowed: Buffers::default(),
            staying: Buffers::default(),
            given: Vec::new(),
            chunk: Addresses::default(),
            begun: false,
        }
    }

    /// Makes room for a pass that keeps nothing.
    pub fn pass(&mut self, scalars: Scalars) -> Result<(), EngineError> {
        self.layer.reserve(&mut self.workspaces, scalars.tokens())?;
        self.scalars = Some(scalars);
        self.layer.lay_passing(&mut self.workspaces);
        self.workspaces.addresses.lay(&self.borrowed);
        self.workspaces.addresses.give(&self.given);
        Ok(())
    }

    /// Makes room for a pass that keeps what backward needs.
    pub fn train(&mut self, scalars: Scalars) -> Result<(), EngineError> {
        let (layer, tokens) = (self.layer, scalars.tokens());
        layer.reserve_training(&mut self.workspaces.every, tokens)?;
        let mut saved = layer.saved(tokens, scalars)?;
        saved.kept.given.extend_from_slice(&self.given);
        layer.lay_saved(&mut self.workspaces, &saved);
        self.workspaces.addresses.lay(&self.borrowed);
        self.workspaces.addresses.lay(&self.staying);
        (self.scalars, self.kept) = (Some(scalars), Kept::Now(saved));
        Ok(())
    }

    /// Makes room for the pass back from what forward kept.
    pub fn back(&mut self, saved: &'l Saved, accumulate: bool) -> Result<(), EngineError> {
        let layer = self.layer;
        layer.check_saved(saved)?;
        layer.reserve_every(&mut self.workspaces.every, saved.tokens())?;
        layer.gradient_buffers()?;
        layer.lay_saved(&mut self.workspaces, saved);
        self.workspaces.addresses.lay(&self.borrowed);
        self.workspaces.addresses.lay(&self.staying);
        self.workspaces.addresses.give(&self.given);
        self.scalars = Some(saved.scalars().accumulating(accumulate));
        self.kept = Kept::Before(saved);
        Ok(())
    }

    /// What was kept.
    pub fn into_saved(self) -> Option<Saved> {
        match self.kept {
            Kept::Now(saved) => Some(saved),
            _ => None,
        }
    }

    /// The scalars, once there is room.
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

    /// The same for some of the rows alone, as if there were no others. What is no row lies
    /// where it does for all: scratch, which launches use one after the other, weights, and
    /// their gradients, to which every part but the first adds.
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

    /// The memory of a tensor of the call: kept, passing, or a weight.
    pub fn buffer(&self, tensor: TensorId) -> &Arc<Buffer> {
        let found = self.find(tensor);
        found.expect("tensors of a call have memory")
    }

    /// The same by name, if the pass has such a tensor: an evaluation lacks what only
    /// training keeps.
    pub fn named(&self, name: &str) -> Option<&Arc<Buffer>> {
        self.find(self.layer.id(name)?)
    }

    /// Uploads what kernels read of a tensor, if the pass has it.
    pub fn tell(&self, name: &str, bytes: &[u8]) -> Result<(), EngineError> {
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
            .or_else(|| self.staying.handle(tensor))
    }
}
