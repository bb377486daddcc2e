//! The steps of a pass, and the numbers by which they name tensors and entries.

use serde::{Deserialize, Serialize};

/// The number of a tensor in [`LayerPlan::tensors`](crate::LayerPlan::tensors).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TensorId(pub usize);

/// The number of an entry: of its kernel, and within it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct EntryId {
    /// Index into [`LayerPlan::kernels`](crate::LayerPlan::kernels).
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
