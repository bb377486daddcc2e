//! The intermediate tensors of a layer: allocated once, grown when a call is
//! larger than every call before it, never shrunk.

use moesaic_plan::{LayerPlan, Role, Tilings};
use moesaic_target::{Buffer, Device, DeviceError, Ptr};
use std::collections::{BTreeSet, HashMap};

/// Device memory behind the outputs and intermediates of a layer.
#[derive(Default)]
pub(crate) struct Workspace {
    buffers: HashMap<String, Buffer>,
    tokens: Option<u64>,
    /// The tokens of the last call whose inputs were put here.
    staged: Option<u64>,
}

impl Workspace {
    /// Makes room for a call of `tokens` tokens. Inputs are staged here too.
    ///
    /// # Errors
    /// When memory runs out; the workspace is then empty, and smaller calls
    /// still work.
    pub fn reserve(
        &mut self,
        tilings: &Tilings,
        device: &dyn Device,
        tokens: u64,
    ) -> Result<(), DeviceError> {
        if self.holds(tokens) {
            return Ok(()); // without an allocation for a list
        }
        self.reserve_for(held(tilings.first()), tilings, device, tokens)
    }

    /// As [`Workspace::reserve`], for these tensors only. One buffer is for all
    /// tilings: as large as any needs.
    pub fn reserve_for<'a>(
        &mut self,
        names: impl Iterator<Item = &'a str>,
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
        let mut buffers = HashMap::new();
        for name in names {
            let bytes = usize::try_from(tilings.bytes(name, tokens)).unwrap_or(usize::MAX);
            buffers.insert(name.to_string(), device.alloc(bytes.max(64))?);
        }
        *self = Workspace {
            buffers,
            tokens: Some(tokens),
            staged: None,
        };
        Ok(())
    }

    /// Whether there is room for a call of `tokens` tokens.
    pub fn holds(&self, tokens: u64) -> bool {
        self.tokens.is_some_and(|have| have >= tokens)
    }

    /// Notes that the inputs of a call are here.
    pub fn stage(&mut self, tokens: usize) {
        self.staged = Some(tokens as u64);
    }

    /// Whether inputs of so many tokens are here.
    pub fn has_staged(&self, tokens: usize) -> bool {
        self.staged.is_some_and(|have| have >= tokens as u64)
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

/// Device memory of a layer's calls, which nothing is left in.
#[derive(Default)]
pub(crate) struct Workspaces {
    /// What no call keeps for backward.
    pub every: Workspace,
    /// What training keeps, for calls that keep nothing.
    pub passing: Workspace,
}

impl Workspaces {
    /// The buffer of a tensor in a call that keeps nothing, once reserved.
    pub fn get(&self, name: &str) -> Option<&Buffer> {
        self.passing.get(name).or_else(|| self.every.get(name))
    }

    /// The address of a tensor in a call that keeps nothing, once reserved.
    pub fn ptr(&self, name: &str) -> Option<Ptr> {
        self.get(name).map(Buffer::ptr)
    }

    /// Whether there is room for a call of `tokens` tokens that keeps nothing.
    pub fn hold(&self, tokens: u64) -> bool {
        self.every.holds(tokens) && self.passing.holds(tokens)
    }

    /// Bytes held.
    pub fn bytes(&self) -> u64 {
        self.every.bytes() + self.passing.bytes()
    }
}

/// The tensors that live in a workspace: not those that outlive a call.
fn held(plan: &LayerPlan) -> impl Iterator<Item = &str> {
    let kept: BTreeSet<&str> = plan.saved().iter().map(|t| &*plan[*t].name).collect();
    let lasting = |role| matches!(role, Role::Weight | Role::Packed | Role::WeightGradient);
    let passing = plan.tensors.iter().filter(move |t| !lasting(t.role));
    let names = passing.map(|t| t.name.as_str());
    names.filter(move |name| !kept.contains(name))
}

/// Bytes that a call of `tokens` tokens needs in the workspace and for `others`.
pub(crate) fn needed<'a>(
    tilings: &'a Tilings,
    others: impl Iterator<Item = &'a str>,
    tokens: u64,
) -> u64 {
    let names = held(tilings.first()).chain(others);
    let bytes = names.map(|name| tilings.bytes(name, tokens));
    bytes.fold(0, u64::saturating_add)
}
