//! What layers over ranks are described with: placements of experts, routes, wire types.
//!
//! [`Parallel`](crate::Parallel), [`Strategy`](crate::Strategy), [`Mesh`](crate::Mesh) and the
//! layers are at the root.

/// What ranks have of shared experts: all of them, or slices.
///
/// ```
/// use moesaic::Parallel;
/// use moesaic::mesh::SharedExperts;
///
/// let shared = SharedExperts::Sharded;
/// let mesh = Parallel { ep: 2, expert_tp: 2, shared, ..Parallel::default() };
/// assert!(mesh.shards_shared());
/// assert!(!Parallel { expert_tp: 1, ..mesh }.shards_shared()); // one slice is the whole
/// ```
#[doc(inline)]
pub use moesaic_plan::SharedExperts;

/// Whose tokens auxiliary losses, capacities, and selections over tokens look at: a rank's
/// own, or those of all ranks as one process has them.
///
/// ```
/// use moesaic::collectives::threads;
/// use moesaic::mesh::TokenScope;
/// use moesaic::target::Device;
/// use moesaic::{EngineError, Mesh, Parallel};
/// # use moesaic::cpu::CpuDevice;
/// # use std::sync::Arc;
/// # let device: Arc<dyn Device> = Arc::new(CpuDevice::new());
/// let ranks = threads::run(2, |_| Ok(device.clone()), |mut world| {
///     let mesh = Mesh::new(&mut world, Parallel { ep: 2, ..Parallel::default() })?;
///     assert_eq!(mesh.scope(), TokenScope::Rank);
///     Ok::<_, EngineError>(mesh.over(TokenScope::World).scope())
/// });
/// for scope in ranks? {
///     assert_eq!(scope.unwrap()?, TokenScope::World);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(inline)]
pub use moesaic_plan::TokenScope;

/// Which groups of ranks have which experts, some of them on several.
///
/// ```
/// use moesaic::mesh::Placement;
///
/// // Two groups; the second has a replica of expert 2, which the first owns.
/// let placement: Placement = "0-2 | 3-5,+2".parse()?;
/// assert_eq!(*placement.of(1), [3, 4, 5, 2]);
/// assert_eq!((placement.owner(2), &*placement.holders(2)), (0, [0, 1].as_slice()));
/// let error = "0-2 | 4".parse::<Placement>().unwrap_err();
/// assert!(error.to_string().contains("expert 3"), "{error}");
/// # Ok::<(), moesaic::mesh::PlacementError>(())
/// ```
#[doc(inline)]
pub use moesaic_plan::Placement;

/// A placement that is none, or not of a layer.
///
/// ```
/// use moesaic::mesh::{Placement, PlacementError, Split};
///
/// let error = Placement::new(2, vec![vec![0, 1], vec![]], None, Split::Even).unwrap_err();
/// assert_eq!(error, PlacementError::EmptyGroup { group: 1 });
/// ```
#[doc(inline)]
pub use moesaic_plan::PlacementError;

/// How the rows of a replicated expert are shared out.
///
/// ```
/// use moesaic::mesh::{Placement, Split};
///
/// let even: Placement = "0,+2 | 1,2".parse().unwrap();
/// let rows = |placement: &Placement| placement.received(1, &[vec![0, 0, 6], vec![0, 0, 2]]);
/// assert_eq!(rows(&even), [4, 4]);
/// assert_eq!(rows(&even.splitting(Split::Near)), [6, 2]);
/// ```
#[doc(inline)]
pub use moesaic_plan::Split;

/// What EPLB packs replicas of experts to.
///
/// ```
/// use moesaic::plan::rebalance;
/// use moesaic::mesh::Eplb;
///
/// let eplb = Eplb { replicas: 4, expert_groups: 1, nodes: 1, ranks: 2 };
/// let packed = rebalance(&[8.0, 2.0, 2.0], &eplb)?;
/// assert_eq!(packed.experts, [0, 1, 0, 2]); // the first expert on both
/// # Ok::<(), moesaic::mesh::PlacementError>(())
/// ```
#[doc(inline)]
pub use moesaic_plan::Eplb;

/// Follows the loads of a layer's experts and says when another placement is worth it.
///
/// ```
/// use moesaic::mesh::{Balancer, Balancing, Eplb, Placement};
///
/// let eplb = Eplb { replicas: 4, expert_groups: 1, nodes: 1, ranks: 2 };
/// let options = Balancing { patience: 1, rest: 0, ..Balancing::default() };
/// let mut balancer = Balancer::new(3, eplb, options);
/// let present = Placement::contiguous(2, 3);
/// balancer.observe(&[8, 2, 2])?; // of all ranks together
/// let next = balancer.propose(&present)?.expect("ten of twelve rows are on the first");
/// assert_eq!(next.holders(0).len(), 2);
/// # Ok::<(), moesaic::mesh::PlacementError>(())
/// ```
#[doc(inline)]
pub use moesaic_plan::Balancer;

/// How easily experts move.
///
/// ```
/// use moesaic::mesh::Balancing;
///
/// let eager = Balancing { gain: 0.02, rest: 10, ..Balancing::default() };
/// assert!(eager.gain < Balancing::default().gain);
/// ```
#[doc(inline)]
pub use moesaic_plan::Balancing;

/// One thing in forward, and one in backward.
///
/// ```
/// use moesaic::Strategy;
/// use moesaic::mesh::{Both, CommDtype};
///
/// let strategy = Strategy {
///     degree: Both { forward: 4, backward: 2 },
///     wire: Both::same(CommDtype::Bf16),
///     ..Strategy::default()
/// };
/// assert_eq!(strategy.to_string(), "overlap_degree=4/2,comm_dtype=bf16");
/// ```
#[doc(inline)]
pub use moesaic_plan::Both;

/// How rows go from rank to rank.
///
/// ```
/// use moesaic::mesh::AllToAll;
///
/// assert_eq!(AllToAll::default(), AllToAll::Linear);
/// assert_eq!(AllToAll::TwoDhInterFirst.to_string(), "inter-first");
/// ```
#[doc(inline)]
pub use moesaic_plan::AllToAll;

/// What makes a chunk of rows.
///
/// ```
/// use moesaic::Strategy;
/// use moesaic::mesh::OverlapBy;
///
/// // A rank's own rows first, then those for its neighbours.
/// let strategy: Strategy = "overlap_degree=4,overlap_by=peers".parse().unwrap();
/// assert_eq!(strategy.cut, OverlapBy::Peers);
/// ```
#[doc(inline)]
pub use moesaic_plan::OverlapBy;

/// What rows are while they are between nodes.
///
/// ```
/// use moesaic::mesh::CommDtype;
///
/// assert_eq!(CommDtype::default(), CommDtype::Unchanged);
/// assert_eq!(CommDtype::Fp8.to_string(), "fp8");
/// ```
#[doc(inline)]
pub use moesaic_plan::CommDtype;

/// What a forward pass of a [`MeshLayer`](crate::MeshLayer) left for backward.
///
/// ```
/// use moesaic::mesh::MeshSaved;
///
/// fn load(saved: &MeshSaved) -> f64 {
///     saved.rows() as f64 / saved.tokens() as f64 // of this rank's experts
/// }
/// ```
#[doc(inline)]
pub use moesaic_engine::MeshSaved;

/// What a forward pass of an [`AnyLayer`](crate::AnyLayer), and so of a layer of
/// [`layer!`](crate::layer), left for backward.
///
/// ```
/// use moesaic::mesh::AnySaved;
///
/// fn experts_are_elsewhere(saved: &AnySaved) -> bool {
///     matches!(saved, AnySaved::Mesh(_))
/// }
/// ```
#[doc(inline)]
pub use moesaic_engine::AnySaved;

/// A point between the launches of a rank's device, by which calls on device memory are timed.
///
/// ```
/// use moesaic::{EngineError, MeshLayer, RawCall};
///
/// /// Seconds of an evaluation.
/// ///
/// /// # Safety
/// /// As [`MeshLayer::forward_raw`].
/// unsafe fn timed(layer: &MeshLayer, call: &RawCall) -> Result<f64, EngineError> {
///     let start = layer.timestamp()?;
///     // SAFETY: what the caller vouches for is the same.
///     unsafe { layer.forward_raw(call)? };
///     layer.timestamp()?.seconds_since(&start)
/// }
/// ```
#[doc(inline)]
pub use moesaic_engine::Timestamp;

/// Which ranks of a mesh do something together, and who has the same of a parameter.
///
/// ```
/// use moesaic::Parallel;
/// use moesaic::mesh::{ProcessGroup, SharedExperts};
///
/// let mesh = Parallel { ep: 2, expert_tp: 2, ..Parallel::default() };
/// assert_eq!(ProcessGroup::of(mesh, "block3.experts.up.weight"), ProcessGroup::ExpertDp);
/// assert_eq!(ProcessGroup::of(mesh, "router.weight"), ProcessGroup::World);
/// assert_eq!(ProcessGroup::of(mesh, "shared.0.up.weight"), ProcessGroup::World);
/// let sliced = Parallel { shared: SharedExperts::Sharded, ..mesh };
/// assert_eq!(ProcessGroup::of(sliced, "shared.0.up.weight"), ProcessGroup::EpDp);
/// ```
#[doc(inline)]
pub use moesaic_engine::ProcessGroup;

/// Ranks that exchange what lies in host memory: the dense parts of a model, numbers for
/// a report, checkpoints.
///
/// ```
/// use moesaic::EngineError;
/// use moesaic::mesh::{ProcessGroup, Ranks};
///
/// /// The mean of a number of each rank.
/// fn mean(ranks: &Ranks, own: f64) -> Result<f64, EngineError> {
///     let sums = ranks.sum_f64(&[own, 1.0], ProcessGroup::World, "mean of losses")?;
///     Ok(sums[0] / sums[1])
/// }
/// ```
#[doc(inline)]
pub use moesaic_engine::Ranks;
