//! The instructions that order accesses, and how far each has come.

use crate::machine::clock::{Gathered, Known};
use crate::text::StateSpace;
use std::collections::HashMap;

/// The mbarriers, the locations that order accesses, and the components of
/// copies and products.
#[derive(Default)]
pub struct Sync {
    pub mbarriers: HashMap<(usize, usize), Phases>,
    pub locations: HashMap<(StateSpace, u64), Gathered>,
    /// The component that each number stands for.
    pub components: Vec<Component>,
}

/// A counter that orders copies or products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Component {
    /// Phases of an mbarrier of a block, at an offset.
    Phases { block: usize, offset: usize },
    /// Products of a warpgroup.
    Products { group: usize },
    /// Bulk groups of a thread of the cluster.
    Bulk { thread: u32 },
}

/// A step of a component: the phase of an mbarrier, or the number of a product
/// or of a bulk group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CompletionStep {
    /// Index in [`Sync::components`].
    pub component: u32,
    /// The accesses are over once the component has reached this step.
    pub step: u32,
}

/// The history of an mbarrier.
#[derive(Default)]
pub struct Phases {
    pub component: u32,
    /// Number of completed phases.
    pub count: u32,
    pub gathered: Gathered,
    pub complete: Option<Known>,
}
