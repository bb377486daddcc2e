//! The vocabulary of layers over ranks: expert placements, all-to-all algorithms, communication
//! dtypes.
//!
//! [`Parallel`](crate::Parallel), [`Strategy`](crate::Strategy), [`Mesh`](crate::Mesh) and the
//! layers themselves are at the crate root. [`Mesh`](crate::Mesh) has the example to start from.

/// The form of the shared experts on each rank: whole, or one tensor-parallel shard.
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

/// The set of tokens that auxiliary losses, capacities and token-wise selections look at: one
/// rank's, or those of all ranks as one process would see them.
///
/// ```
/// use moesaic::collectives::threads;
/// use moesaic::mesh::TokenScope;
/// use moesaic::{Engine, EngineError, Mesh, Parallel};
///
/// let engine = Engine::cpu()?;
/// let ranks = threads::run(2, |_| Ok(engine.device().clone()), |mut world| {
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

/// A weight of which ranks hold different values, where all should hold the same.
///
/// ```
/// use moesaic::collectives::threads;
/// use moesaic::{Engine, EngineError, LayerOptions, Mesh, Parallel, Tensor};
///
/// # use moesaic::example::{spec, weights};
/// let engine = Engine::cpu()?;
/// let device = |_| Ok(engine.device().clone());
/// let ranks = threads::run(2, device, |mut world| {
///     let mesh = Mesh::new(&mut world, Parallel { ep: 2, ..Parallel::default() }).unwrap();
///     let layer = engine.layer_with(&spec(), &weights(), LayerOptions::over(&mesh)).unwrap();
///     if mesh.rank() == 1 {
///         let shape = &weights()["router.weight"].shape;
///         let zeros = vec![0.0f32; shape.iter().product()];
///         layer.set_weight("router.weight", &Tensor::owned(shape, zeros)).unwrap();
///     }
///     layer.check_weights()
/// });
/// for checked in ranks? {
///     let Err(EngineError::DifferentWeights(weights)) = checked.unwrap() else { panic!() };
///     assert_eq!(weights[0].to_string(), "`router.weight`: one on rank 0, another on rank 1");
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(inline)]
pub use moesaic_engine::DifferentWeight;

/// The assignment of experts to groups of ranks; an expert may have several replicas.
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

/// The reason a placement is invalid, or does not fit a layer.
///
/// ```
/// use moesaic::mesh::{Placement, PlacementError, Split};
///
/// let error = Placement::new(2, vec![vec![0, 1], vec![]], None, Split::Even).unwrap_err();
/// assert_eq!(error, PlacementError::EmptyGroup { group: 1 });
/// ```
#[doc(inline)]
pub use moesaic_plan::PlacementError;

/// The division of a replicated expert's rows among its replicas.
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

/// The sizes of an EPLB packing: replicas, expert groups, nodes and ranks.
///
/// ```
/// use moesaic::mesh::Eplb;
///
/// // DeepSeek-V3 on four nodes: 32 redundant replicas of 256 experts.
/// let eplb = Eplb { replicas: 288, expert_groups: 8, nodes: 4, ranks: 32 };
/// assert_eq!(eplb.replicas / eplb.ranks, 9); // on each rank
/// ```
#[doc(inline)]
pub use moesaic_plan::Eplb;

#[doc(inline)]
pub use moesaic_plan::Replication;
/// Packs experts by their loads as EPLB does, DeepSeek's balancer: loaded experts get replicas, and
/// ranks get equal loads. [`Balancer`] calls it when moving experts pays off.
///
/// ```
/// use moesaic::mesh::{Eplb, Replication, rebalance};
///
/// let eplb = Eplb { replicas: 4, expert_groups: 1, nodes: 1, ranks: 2 };
/// let packed: Replication = rebalance(&[8.0, 2.0, 2.0], &eplb)?;
/// assert_eq!(packed.experts, [0, 1, 0, 2]); // the first expert on both
/// assert_eq!(packed.placement(2)?.to_string(), "0-1 | +0,2");
/// # Ok::<(), moesaic::mesh::PlacementError>(())
/// ```
#[doc(inline)]
pub use moesaic_plan::rebalance;

/// A watcher of expert loads that says when moving to another placement pays off.
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

/// The thresholds at which a [`Balancer`] moves experts.
///
/// ```
/// use moesaic::mesh::Balancing;
///
/// let eager = Balancing { gain: 0.02, rest: 10, ..Balancing::default() };
/// assert!(eager.gain < Balancing::default().gain);
/// ```
#[doc(inline)]
pub use moesaic_plan::Balancing;

/// A pair of settings: one for forward, one for backward.
///
/// ```
/// use moesaic::Strategy;
/// use moesaic::mesh::{Both, CommDtype};
///
/// let strategy = Strategy {
///     overlap_degree: Both { forward: 4, backward: 2 },
///     comm_dtype: Both::same(CommDtype::Bf16),
///     ..Strategy::default()
/// };
/// assert_eq!(strategy.to_string(), "overlap_degree=4/2,comm_dtype=bf16");
/// ```
#[doc(inline)]
pub use moesaic_plan::Both;

/// The algorithm of the all-to-all that carries rows between ranks.
///
/// ```
/// use moesaic::mesh::AllToAll;
///
/// assert_eq!(AllToAll::default(), AllToAll::Linear);
/// assert_eq!(AllToAll::TwoDhInterFirst.to_string(), "2dh-inter-first");
/// ```
#[doc(inline)]
pub use moesaic_plan::AllToAll;

/// The way rows are divided into chunks for overlap: by peers or by rows.
///
/// ```
/// use moesaic::Strategy;
/// use moesaic::mesh::OverlapBy;
///
/// // A rank's own rows first, then those for its neighbours.
/// let strategy: Strategy = "overlap_degree=4,overlap_by=peers".parse().unwrap();
/// assert_eq!(strategy.overlap_by, OverlapBy::Peers);
/// ```
#[doc(inline)]
pub use moesaic_plan::OverlapBy;

/// The element type of rows while they travel between nodes.
///
/// ```
/// use moesaic::mesh::CommDtype;
///
/// assert_eq!(CommDtype::default(), CommDtype::Unchanged);
/// assert_eq!(CommDtype::Fp8.to_string(), "fp8");
/// ```
#[doc(inline)]
pub use moesaic_plan::CommDtype;

/// A point in the launch order of a rank's device, from which calls on device memory are timed.
///
/// ```
/// use moesaic::{EngineError, Layer, RawCall};
///
/// /// Seconds of an evaluation.
/// fn timed(layer: &Layer, call: RawCall) -> Result<f64, EngineError> {
///     let start = layer.timestamp()?;
///     layer.forward(call)?;
///     layer.timestamp()?.seconds_since(&start)
/// }
/// ```
#[doc(inline)]
pub use moesaic_engine::Timestamp;

/// A process group of a mesh, named by what its ranks share or replicate.
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

/// Ranks that exchange host memory: dense parts of a model, numbers of a report, checkpoints.
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

#[doc(inline)]
pub use moesaic_plan::MeshError;
/// A rank's coordinates in a mesh: replica, expert-parallel group, tensor-parallel shard.
///
/// ```
/// use moesaic::Parallel;
/// use moesaic::mesh::RankCoords;
///
/// let mesh = Parallel { ep: 2, dp: 2, ..Parallel::default() };
/// assert_eq!(mesh.place(3)?, RankCoords { dp: 1, ep: 1, tp: 0 });
/// # Ok::<(), moesaic::mesh::MeshError>(())
/// ```
#[doc(inline)]
pub use moesaic_plan::RankCoords;

/// The reason that a text is no strategy.
///
/// ```
/// use moesaic::Strategy;
/// use moesaic::mesh::ParseStrategyError;
///
/// let error = "r=2,all_to_all=star".parse::<Strategy>().unwrap_err();
/// assert!(matches!(error, ParseStrategyError::Unknown { .. }), "{error}");
/// ```
#[doc(inline)]
pub use moesaic_plan::ParseStrategyError;
#[doc(inline)]
pub use moesaic_plan::StrategyError;

/// The model that chooses the experts that all groups hold for a call, as
/// [`Layer::set_shadow_model`](crate::Layer::set_shadow_model) takes it.
///
/// ```
/// use moesaic::{EngineError, Layer, mesh::ShadowModel};
///
/// /// Sets what a rank computes in a second, as measured.
/// fn measured(layer: &Layer, operations: f64) -> Result<(), EngineError> {
///     layer.set_shadow_model(ShadowModel { operations, ..layer.shadow_model() })
/// }
/// # let _ = measured;
/// ```
#[doc(inline)]
pub use moesaic_plan::ShadowModel;

/// The prediction that a [`ShadowModel`] makes of a step: the one of FasterMoE's paper, or that of
/// its released code.
///
/// ```
/// use moesaic::mesh::{ShadowForm, ShadowModel};
///
/// # let spec = moesaic::example::spec();
/// let released = ShadowModel { form: ShadowForm::Released, ..ShadowModel::of(&spec) };
/// assert_ne!(released, ShadowModel::of(&spec)); // the paper's
/// ```
#[doc(inline)]
pub use moesaic_plan::ShadowForm;

/// A tuner that sets the strategy of each call of a layer, as
/// [`Layer::set_tuner`](crate::Layer::set_tuner) takes it.
///
/// `LayerTuner` of `moesaic::tune` is the one to use. Write your own where a rule of yours decides:
///
/// ```
/// use moesaic::mesh::{PassTime, StrategyTuner, TunedCall};
/// use moesaic::{EngineError, Layer, Strategy};
///
/// /// Splits the rows of long calls into chunks. All ranks have calls of the same length, so all
/// /// decide alike.
/// struct ByLength;
///
/// impl StrategyTuner for ByLength {
///     fn choose(&self, layer: &Layer, call: &TunedCall<'_>) -> Result<usize, EngineError> {
///         let text = if call.tokens < 1000 { "default" } else { "overlap_degree=4" };
///         layer.set_strategy(text.parse::<Strategy>().expect("a strategy"))?;
///         Ok(0) // it learns nothing, so no choice needs a number
///     }
///     fn took(&self, _choice: usize, _passes: Vec<PassTime>) {}
/// }
/// # fn set(layer: &mut Layer) -> Result<(), EngineError> {
/// layer.set_tuner(Some(std::sync::Arc::new(ByLength)))
/// # }
/// # let _ = set;
/// ```
#[doc(inline)]
pub use moesaic_engine::StrategyTuner;

/// The time of a pass, which a [`StrategyTuner`] learns after the call.
///
/// ```
/// use moesaic::EngineError;
/// use moesaic::mesh::PassTime;
///
/// /// Seconds of a call, forward and backward.
/// fn seconds(passes: &[PassTime]) -> Result<f64, EngineError> {
///     passes.iter().map(PassTime::seconds).sum()
/// }
/// # assert_eq!(seconds(&[PassTime::Seconds(0.25), PassTime::Seconds(0.5)]).unwrap(), 0.75);
/// ```
#[doc(inline)]
pub use moesaic_engine::PassTime;
#[doc(inline)]
pub use moesaic_engine::TunedCall;
