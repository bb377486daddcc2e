//! The process groups of a mesh, by name.

/// A process group of a mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ProcessGroup {
    /// All ranks. They hold the same router, the same whole shared experts, and the same parameters
    /// of a model around its layers.
    World,
    /// Ranks that hold all experts once.
    Ep,
    /// Ranks with the shards of the same experts.
    ExpertTp,
    /// Ranks with the same shards of the same experts, and so the same expert weights.
    ExpertDp,
    /// Ranks with shards of the same index, whatever their experts. They hold the same shards of
    /// shared experts.
    EpDp,
}
