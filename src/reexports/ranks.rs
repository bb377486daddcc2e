//! Layers whose experts are spread over many ranks.

/// The division of a layer among ranks: expert-parallel groups, tensor-parallel shards of each
/// expert, and replicas of both.
///
/// ```
/// use moesaic::Parallel;
///
/// # let spec = moesaic::example::spec(); // of 4 experts
/// assert_eq!(Parallel::of(4, &spec), Parallel { ep: 4, ..Parallel::default() });
/// let two_and_two = Parallel { ep: 2, dp: 2, ..Parallel::default() };
/// assert_eq!(two_and_two.ranks(), 4);
/// ```
#[doc(inline)]
pub use moesaic_plan::Parallel;

/// The way ranks carry out one call. It may change from call to call, and moves no weights.
///
/// ```
/// use moesaic::{Parallel, Strategy};
/// use moesaic::mesh::{Both, AllToAll};
///
/// let strategy: Strategy = "r=2,overlap_degree=4/2,all_to_all=2dh-inter-first".parse().unwrap();
/// assert_eq!(strategy.overlap_degree, Both { forward: 4, backward: 2 });
/// assert_eq!(strategy.all_to_all, AllToAll::TwoDhInterFirst);
/// assert_eq!(Strategy::default().to_string(), "default");
/// // Rows cannot go to two of three slices.
/// strategy.check(&Parallel { expert_tp: 3, ..Parallel::default() }).unwrap_err();
/// ```
#[doc(inline)]
pub use moesaic_plan::Strategy;

/// A rank's place among the others; you make a layer over ranks with it.
///
/// ```
/// use moesaic::collectives::{Call, threads};
/// use moesaic::{Engine, Input, LayerOptions, Mesh, Parallel};
///
/// # use moesaic::example::{spec, wave, weights};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let engine = Engine::cpu()?;
/// let device = |_| Ok(engine.device().clone());
/// // Two ranks that are threads; under `mpirun` the world comes from `collectives::mpi`.
/// let ranks = threads::run(2, device, |mut world| {
///     let mesh = Mesh::new(&mut world, Parallel { ep: 2, ..Parallel::default() })?;
///     let layer = engine.layer_with(&spec(), &weights(), LayerOptions::over(&mesh))?;
///     let tokens = 3 + mesh.rank(); // each its own
///     let y = layer.forward(&Input::new(tokens, &wave(8 * tokens)))?;
///     world.finish(&Call::new("end"))?;
///     Ok::<_, Box<dyn std::error::Error + Send + Sync>>(y.y().shape.clone())
/// })?;
/// for (rank, shape) in ranks.into_iter().enumerate() {
///     assert_eq!(shape.unwrap().unwrap(), [3 + rank, 8]);
/// }
/// # Ok(())
/// # }
/// ```
#[doc(inline)]
pub use moesaic_engine::Mesh;

/// The options of a layer that [`Engine::layer_with`](crate::Engine::layer_with) makes: training,
/// ranks, their strategy.
///
/// ```
/// use moesaic::{Engine, EngineError, Input, Layer, LayerOptions, Mesh, RngKey, Tensor, Training};
///
/// /// A step of training, with ranks or without: gradients are those of all ranks' tokens
/// /// afterwards.
/// fn step(layer: &Layer, input: &Input, dy: &Tensor) -> Result<(), EngineError> {
///     let (_, saved) = layer.forward_train(input, RngKey::default())?;
///     layer.backward(&saved, dy, false)?;
///     layer.reduce_gradients()
/// }
/// # use moesaic::example::{engine, spec, wave, weights};
/// # fn main() -> Result<(), EngineError> {
/// # let mesh: Option<&Mesh> = None;
/// let options = LayerOptions { mesh, ..LayerOptions::default() };
/// let options = options.training(Training::default());
/// let layer = engine().layer_with(&spec(), &weights(), options)?;
/// let dy = Tensor::new(&[3, 8], &[1.0f32; 24]);
/// step(&layer, &Input::new(3, &wave(24)), &dy)?;
/// assert_eq!(layer.gradient("router.weight")?.shape, [4, 8]);
/// # Ok(())
/// # }
/// ```
#[doc(inline)]
pub use moesaic_engine::LayerOptions;
