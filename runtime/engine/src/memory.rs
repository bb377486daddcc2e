//! Device memory of a layer's tensors.

use moesaic_plan::{LayerPlan, Step, TensorId, TensorRole, Tilings};
use moesaic_target::{Buffer, Device, DeviceError, Ptr};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Device memory of the tensors of one plan. An exchange keeps the buffers that it accesses alive
/// until it ends.
#[derive(Clone, Default)]
pub(crate) struct Buffers(Vec<(TensorId, Arc<Buffer>)>);

impl Buffers {
    /// Returns the buffer of a tensor, if it is here.
    pub fn get(&self, tensor: TensorId) -> Option<&Buffer> {
        self.handle(tensor).map(|buffer| &**buffer)
    }

    /// Returns a shared handle to the buffer of a tensor, if it is here.
    pub fn handle(&self, tensor: TensorId) -> Option<&Arc<Buffer>> {
        // A walk over a few dozen tensors. Launches do not come here: they read `Addresses`, which
        // is indexed by tensor.
        let found = self.0.iter().find(|(held, _)| *held == tensor);
        found.map(|(_, buffer)| buffer)
    }

    /// Adds the buffer of a tensor that is not here.
    pub fn push(&mut self, tensor: TensorId, buffer: impl Into<Arc<Buffer>>) {
        debug_assert!(self.get(tensor).is_none(), "{tensor:?} is here");
        self.0.push((tensor, buffer.into()));
    }

    /// Each tensor with its buffer.
    pub fn iter(&self) -> impl Iterator<Item = (TensorId, &Buffer)> {
        self.0.iter().map(|(tensor, buffer)| (*tensor, &**buffer))
    }

    /// Each tensor with its buffer.
    pub fn into_iter(self) -> impl Iterator<Item = (TensorId, Arc<Buffer>)> {
        self.0.into_iter()
    }

    /// The graph that the device captures keeps all of them.
    pub fn keep(&self, device: &dyn Device) {
        for (_, buffer) in &self.0 {
            device.keep(Arc::clone(buffer));
        }
    }

    /// Bytes held.
    pub fn bytes(&self) -> u64 {
        let bytes = self.0.iter().map(|(_, buffer)| buffer.bytes() as u64);
        bytes.sum()
    }
}

/// The address of each tensor of a plan in a call; 0 of one that no step of the
/// call names.
#[derive(Default)]
pub(crate) struct Addresses(Vec<Ptr>);

impl Addresses {
    /// No address of any of `count` tensors.
    pub fn clear(&mut self, count: usize) {
        self.0.clear();
        self.0.resize(count, Ptr(0));
    }

    pub fn get(&self, tensor: TensorId) -> Ptr {
        self.0[tensor.0]
    }

    pub fn set(&mut self, tensor: TensorId, address: Ptr) {
        self.0[tensor.0] = address;
    }

    /// Copies the addresses of another call.
    pub fn copy(&mut self, other: &Addresses) {
        self.0.clone_from(&other.0);
    }

    /// Moves a tensor's address by some bytes, if it has memory.
    pub fn shift(&mut self, tensor: TensorId, bytes: u64) {
        let Ptr(address) = &mut self.0[tensor.0];
        if *address > 0 {
            *address += bytes;
        }
    }

    /// Sets the addresses of tensors to their buffers.
    pub fn lay(&mut self, buffers: &Buffers) {
        for (tensor, buffer) in buffers.iter() {
            self.set(tensor, buffer.ptr());
        }
    }

    /// Sets the addresses of tensors to a caller's; if a tensor is there twice, the first address
    /// counts.
    pub fn give(&mut self, given: &[(TensorId, Ptr)]) {
        for &(tensor, address) in given.iter().rev() {
            self.set(tensor, address);
        }
    }
}

/// Memory behind outputs and intermediates of a layer: allocated once, grown
/// when a call is larger than every call before it, never shrunk.
#[derive(Default)]
pub(crate) struct Workspace {
    pub buffers: Buffers,
    tokens: Option<u64>,
    /// The tokens of the last call whose inputs were put here.
    staged: Option<u64>,
}

impl Workspace {
    /// Makes room for these tensors in a call of `tokens` tokens. One buffer is
    /// for all tilings: as large as any needs.
    ///
    /// # Errors
    /// When memory runs out; the workspace is then empty, and smaller calls
    /// still work.
    pub fn reserve(
        &mut self,
        tensors: impl IntoIterator<Item = TensorId>,
        tilings: &Tilings,
        device: &dyn Device,
        tokens: u64,
    ) -> Result<(), DeviceError> {
        if self.holds(tokens) {
            return Ok(());
        }
        device.synchronize()?;
        // Free first: the old buffers may be what leaves no room for the new.
        *self = Workspace::default();
        let mut buffers = Buffers::default();
        for tensor in tensors {
            let bytes = usize::try_from(tilings.bytes(tensor, tokens)).unwrap_or(usize::MAX);
            // Never empty: a tensor without elements in this call still needs an address, because
            // address 0 means a tensor that has no memory.
            buffers.push(tensor, device.alloc(bytes.max(64))?);
        }
        *self = Workspace {
            buffers,
            tokens: Some(tokens),
            staged: None,
        };
        Ok(())
    }

    /// Returns true if there is room for a call of `tokens` tokens.
    pub fn holds(&self, tokens: u64) -> bool {
        self.tokens.is_some_and(|have| have >= tokens)
    }

    /// Notes that the inputs of a call are here.
    pub fn stage(&mut self, tokens: usize) {
        self.staged = Some(tokens as u64);
    }

    /// Returns true if the inputs of that many tokens are here.
    pub fn has_staged(&self, tokens: usize) -> bool {
        self.staged.is_some_and(|have| have >= tokens as u64)
    }

    /// The buffer of a tensor, once reserved.
    pub fn get(&self, tensor: TensorId) -> Option<&Buffer> {
        self.buffers.get(tensor)
    }

    /// Bytes held.
    pub fn bytes(&self) -> u64 {
        self.buffers.bytes()
    }
}

/// Device memory of a layer's calls; nothing in it outlives a call.
#[derive(Default)]
pub(crate) struct Workspaces {
    /// The tensors that no call keeps for backward.
    pub every: Workspace,
    /// The tensors that training keeps, for calls that keep nothing.
    pub passing: Workspace,
    /// Scratch for the addresses of a call.
    pub addresses: Addresses,
    /// Scratch for the addresses that a raw call gives.
    pub given: Vec<(TensorId, Ptr)>,
    /// Weights that calls read in memory of the caller instead of the layer's.
    pub weights: Vec<(TensorId, Ptr)>,
}

impl Workspaces {
    /// The buffer of a tensor in a call that keeps nothing, once reserved.
    pub fn get(&self, tensor: TensorId) -> Option<&Buffer> {
        let passing = self.passing.get(tensor);
        passing.or_else(|| self.every.get(tensor))
    }

    /// Returns true if there is room for a call of `tokens` tokens that keeps nothing.
    pub fn hold(&self, tokens: u64) -> bool {
        self.every.holds(tokens) && self.passing.holds(tokens)
    }

    /// Bytes held.
    pub fn bytes(&self) -> u64 {
        self.every.bytes() + self.passing.bytes()
    }
}

/// The tensors that a training call keeps for backward.
#[derive(Default)]
pub(crate) struct Kept {
    pub workspace: Workspace,
    /// Tensors at addresses that a raw call gave.
    pub given: Vec<(TensorId, Ptr)>,
}

/// The tensors that live in a workspace: not those that outlive a call.
pub(crate) fn passing_tensors(plan: &LayerPlan) -> Vec<TensorId> {
    let kept: BTreeSet<TensorId> = plan.saved().into_iter().collect();
    let all = (0..plan.tensors.len()).map(TensorId);
    let passing = all.filter(|&id| !outlives_calls(plan[id].role) && !kept.contains(&id));
    passing.collect()
}

/// The tensors that steps read or write.
pub(crate) fn tensors<'s>(steps: impl IntoIterator<Item = &'s Step>) -> BTreeSet<TensorId> {
    let each = steps.into_iter();
    each.flat_map(|step| step.tensors().iter().copied())
        .collect()
}

/// Returns whether a layer holds a tensor of this role as long as it lives.
pub(crate) fn outlives_calls(role: TensorRole) -> bool {
    matches!(
        role,
        TensorRole::Weight | TensorRole::Packed | TensorRole::WeightGradient
    )
}

/// Returns the bytes that a call of `tokens` tokens needs for tensors.
pub(crate) fn needed<'a>(
    tilings: &Tilings,
    tensors: impl Iterator<Item = &'a TensorId>,
    tokens: u64,
) -> u64 {
    let bytes = tensors.map(|&tensor| tilings.bytes(tensor, tokens));
    bytes.fold(0, u64::saturating_add)
}
