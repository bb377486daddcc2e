//! The tensors of a layer: names, types, roles and shapes.

/// A tensor that a layer's calls take or return, or that the layer holds.
///
/// [`Layer::tensors`](crate::Layer::tensors) lists them. Allocate memory for a
/// [`RawCall`](crate::RawCall) by the list, or check that of a caller of yours:
///
/// ```
/// use moesaic::{DType, LayerCall, LayerTensorRole, TensorKind, Training};
///
/// # use moesaic::example::{engine, spec, weights};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let layer = engine().training_layer(&spec(), &weights(), Training::default())?;
/// for tensor in layer.tensors().iter().filter(|tensor| tensor.is_of(LayerCall::Backward)) {
///     println!("{:?} {tensor}: {} bytes for 5 tokens", tensor.role, tensor.bytes(5));
/// }
///
/// let y = layer.tensor("y").expect("every layer has y");
/// assert_eq!((y.role, y.to_string()), (LayerTensorRole::Output, "y [T, 8] f32".to_string()));
/// assert_eq!(y.shape(5), [5, 8]);
/// let found = TensorKind { dtype: DType::F32, shape: &[5, 9] };
/// let error = y.check(found, 5).unwrap_err();
/// assert_eq!(error.to_string(), "has shape [5, 9], expected [5, 8]");
/// # Ok(())
/// # }
/// ```
#[doc(inline)]
pub use moesaic_engine::LayerTensor;

/// The owner of a [`LayerTensor`], and the direction in which it goes.
///
/// ```
/// use moesaic::LayerTensorRole;
///
/// # use moesaic::example::{engine, spec, weights};
/// let layer = engine().layer(&spec(), &weights())?;
/// let weights = layer.tensors().iter().filter(|tensor| tensor.role == LayerTensorRole::Weight);
/// let bytes: usize = weights.map(|weight| weight.bytes(0)).sum();
/// assert_eq!(bytes, (4 * 8 + 3 * 4 * 16 * 8) * 4); // the router, and three matrices of each expert
/// # Ok::<(), moesaic::EngineError>(())
/// ```
#[doc(inline)]
pub use moesaic_engine::LayerTensorRole;

/// One size of a [`LayerTensor`]: fixed, or a number for each token of the call.
///
/// ```
/// use moesaic::TensorDim;
///
/// # use moesaic::example::{engine, spec, weights};
/// let layer = engine().layer(&spec(), &weights())?;
/// let ids = layer.tensor("topk_ids").expect("every layer has ids of experts");
/// assert_eq!(ids.dims, [TensorDim::PerToken(1), TensorDim::Fixed(2)]); // two of each token
/// # Ok::<(), moesaic::EngineError>(())
/// ```
#[doc(inline)]
pub use moesaic_engine::TensorDim;

/// A call of a layer, by which [`LayerTensor::is_of`] tells the tensors of each.
///
/// ```
/// use moesaic::{LayerCall, LayerSpec, layer_tensors, resolve_target, Training};
///
/// # fn main() -> Result<(), moesaic::Error> {
/// let spec = LayerSpec::from_toml(
///     "shape = { model_dim = 64, hidden_dim = 128, experts = 8, top_k = 2 }
///      losses = [{ kind = \"switch\", coefficient = 0.01 }]",
/// )?;
/// let tensors = layer_tensors(&spec, resolve_target("cpu")?, Training::default())?;
/// let loss = tensors.iter().find(|tensor| tensor.name == "loss.switch").unwrap();
/// assert!(loss.is_of(LayerCall::ForwardTrain) && !loss.is_of(LayerCall::Forward));
/// # Ok(())
/// # }
/// ```
#[doc(inline)]
pub use moesaic_engine::LayerCall;

/// Returns the tensors of a spec's layer before you make it, among them the weights to bring.
///
/// ```
/// use moesaic::{LayerSpec, LayerTensorRole, layer_tensors, resolve_target};
///
/// # fn main() -> Result<(), moesaic::Error> {
/// let spec = LayerSpec::from_toml(
///     "shape = { model_dim = 64, hidden_dim = 128, experts = 8, top_k = 2 }",
/// )?;
/// let tensors = layer_tensors(&spec, resolve_target("cpu")?, None)?;
/// let weights = tensors.iter().filter(|tensor| tensor.role == LayerTensorRole::Weight);
/// let lines: Vec<String> = weights.map(ToString::to_string).collect();
/// assert_eq!(
///     lines,
///     [
///         "router.weight [8, 64] f32",
///         "experts.gate.weight [8, 128, 64] f32",
///         "experts.up.weight [8, 128, 64] f32",
///         "experts.down.weight [8, 64, 128] f32",
///     ]
/// );
/// # Ok(())
/// # }
/// ```
///
/// Over ranks each brings its part: [`Mesh::part_shape`](crate::Mesh::part_shape) returns the
/// part's shape.
#[doc(inline)]
pub use moesaic_engine::layer_tensors;
