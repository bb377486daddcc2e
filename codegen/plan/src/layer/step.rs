//! The steps of a pass, and the numbers by which they name tensors and entries.

use super::{LayerPlan, TensorPlan};
use crate::Op;
use moesaic_kernel::{Access, Entry};
use serde::{Deserialize, Serialize};
use std::ops::Index;

/// The number of a tensor in [`LayerPlan::tensors`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TensorId(pub usize);

/// The number of an entry: of its kernel, and within it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct EntryId {
    /// Index into [`LayerPlan::kernels`].
    pub kernel: usize,
    /// Index into the kernel's entries.
    pub entry: usize,
}

/// A step of a pass.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Step {
    /// Launches an entry of a kernel.
    Launch(LaunchStep),
}

/// The launch of an entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaunchStep {
    /// The entry.
    pub entry: EntryId,
    /// The tensor behind each pointer parameter, in order of the parameters.
    pub tensors: Vec<TensorId>,
}

impl Step {
    /// Returns the launch, if it is one.
    pub fn launch(&self) -> Option<&LaunchStep> {
        match self {
            Step::Launch(launch) => Some(launch),
        }
    }

    /// Returns the tensors it reads or writes.
    pub fn tensors(&self) -> &[TensorId] {
        match self {
            Step::Launch(launch) => &launch.tensors,
        }
    }
}

impl LayerPlan {
    /// Returns the number of the tensor of this name.
    pub fn id(&self, name: &str) -> Option<TensorId> {
        let found = self.tensors.iter().position(|tensor| tensor.name == name);
        found.map(TensorId)
    }

    /// Returns the readable name of a step: for a launch the symbol of its entry.
    ///
    /// # Panics
    ///
    /// When the step is not of this plan.
    pub fn symbol(&self, step: &Step) -> &str {
        match step {
            Step::Launch(launch) => &self[launch.entry].symbol,
        }
    }

    /// Returns a name that is unique within a pass: the symbol, or the kernel's name if several
    /// steps share a symbol.
    ///
    /// # Panics
    ///
    /// As [`LayerPlan::symbol`].
    pub fn label(&self, step: &Step) -> &str {
        let symbol = self.symbol(step);
        let mut same = self
            .all_steps()
            .filter(|other| self.symbol(other) == symbol);
        // Routed and shared experts run kernels with the same symbols.
        match (same.nth(1), step) {
            (None, _) => symbol,
            (Some(_), Step::Launch(launch)) => &self.kernels[launch.entry.kernel].name,
        }
    }

    /// Returns the tensors of a step by name, in order.
    pub fn names<'p>(&'p self, step: &'p Step) -> impl Iterator<Item = &'p str> {
        step.tensors().iter().map(|&tensor| &*self[tensor].name)
    }

    /// Returns the access of a step to each of its tensors, in order.
    ///
    /// # Panics
    ///
    /// As [`LayerPlan::symbol`].
    pub fn accesses<'p>(
        &'p self,
        step: &'p Step,
    ) -> impl Iterator<Item = (TensorId, Access)> + use<'p> {
        let Step::Launch(launch) = step;
        let params = self[launch.entry].params.iter();
        let accesses = params.filter_map(|param| Some(param.ty.tensor()?.1));
        launch.tensors.iter().copied().zip(accesses)
    }

    /// Returns the operator of a step; `None` if the step launches no kernel.
    pub(crate) fn op(&self, step: &Step) -> Option<&Op> {
        let kernel = step.launch()?.entry.kernel;
        Some(&self.kernels[kernel].op)
    }

    /// Returns every launch there is, those of [`LayerPlan::prepare`] first.
    pub(crate) fn launches(&self) -> impl Iterator<Item = &LaunchStep> {
        let called = self.call_steps().filter_map(Step::launch);
        self.prepare.iter().chain(called)
    }
}

impl Index<TensorId> for LayerPlan {
    type Output = TensorPlan;

    fn index(&self, tensor: TensorId) -> &TensorPlan {
        &self.tensors[tensor.0]
    }
}

impl Index<EntryId> for LayerPlan {
    type Output = Entry;

    fn index(&self, id: EntryId) -> &Entry {
        &self.kernels[id.kernel].entries[id.entry]
    }
}
