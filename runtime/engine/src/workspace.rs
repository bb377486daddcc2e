//! The intermediate tensors of a layer: allocated once, grown when a call is
//! larger than every call before it, never shrunk.

use moesaic_plan::{LayerPlan, Role, TensorPlan};
use moesaic_target::{Buffer, Device, DeviceError, Ptr};
use std::collections::{BTreeSet, HashMap};

/// Device memory behind the outputs and intermediates of a layer.
#[derive(Default)]
pub(crate) struct Workspace {
    buffers: HashMap<String, Buffer>,
    tokens: Option<u64>,
}

impl Workspace {
    /// Makes room for a call of `tokens` tokens. Inputs are staged here too.
    ///
    /// # Errors
    /// When memory runs out; the workspace is then empty, and smaller calls
    /// still work.
    pub fn reserve(
        &mut self,
        plan: &LayerPlan,
        device: &dyn Device,
        tokens: u64,
    ) -> Result<(), DeviceError> {
        if self.holds(tokens) {
            return Ok(()); // without an allocation for a list
        }
        let tensors: Vec<&TensorPlan> = held(plan).collect();
        self.reserve_for(&tensors, device, tokens)
    }

    /// As [`Workspace::reserve`], for these tensors only.
    pub fn reserve_for(
        &mut self,
        tensors: &[&TensorPlan],
        device: &dyn Device,
        tokens: u64,
    ) -> Result<(), DeviceError> {
        if self.holds(tokens) {
            return Ok(());
        }
        device.synchronize()?;
        // Free first: the old buffers may be what leaves no room for the new.
        *self = Workspace::default();
        let mut buffers = HashMap::new();
        for tensor in tensors {
            buffers.insert(tensor.name.clone(), allocate(tensor, device, tokens)?);
        }
        *self = Workspace {
            buffers,
            tokens: Some(tokens),
        };
        Ok(())
    }

    /// Whether there is room for a call of `tokens` tokens.
    pub fn holds(&self, tokens: u64) -> bool {
        self.tokens.is_some_and(|have| have >= tokens)
    }

    /// The buffer of a tensor, once reserved.
    pub fn get(&self, name: &str) -> Option<&Buffer> {
        self.buffers.get(name)
    }

    /// The address of a tensor, once reserved.
    pub fn ptr(&self, name: &str) -> Option<Ptr> {
        self.get(name).map(Buffer::ptr)
    }

    /// Bytes held.
    pub fn bytes(&self) -> u64 {
        self.buffers
            .values()
            .map(|buffer| buffer.bytes() as u64)
            .sum()
    }
}

/// The tensors that live in a workspace: not those that outlive a call.
fn held(plan: &LayerPlan) -> impl Iterator<Item = &TensorPlan> {
    let kept: BTreeSet<&str> = plan.saved().iter().map(|t| t.name.as_str()).collect();
    let lasting = |role| matches!(role, Role::Weight | Role::Packed | Role::WeightGradient);
    let tensors = plan.tensors.iter();
    tensors.filter(move |t| !lasting(t.role) && !kept.contains(t.name.as_str()))
}

/// Bytes that a call of `tokens` tokens needs, with what it leaves for backward.
pub(crate) fn needed(plan: &LayerPlan, tokens: u64) -> u64 {
    let kept = plan.saved();
    let bytes = held(plan).chain(kept).map(|tensor| tensor.bytes(tokens));
    bytes.fold(0, u64::saturating_add)
}

fn allocate(tensor: &TensorPlan, device: &dyn Device, tokens: u64) -> Result<Buffer, DeviceError> {
    let bytes = usize::try_from(tensor.bytes(tokens)).unwrap_or(usize::MAX);
    device.alloc(bytes.max(64))
}
