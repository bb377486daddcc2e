//! Training: forward calls that keep state, and backward calls that use it.

/// The training settings of a layer, among them the values that backward computes again.
///
/// ```
/// use moesaic::{RngKey, Input, Training};
///
/// # use moesaic::example::{engine, spec, wave, weights};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let layer = engine().training_layer(&spec(), &weights(), Training::default())?;
/// let (x, dy) = (wave(24), moesaic::Tensor::owned(&[3, 8], wave(24)));
/// let (output, saved) = layer.forward_train(&Input::new(3, &x), RngKey::default())?;
/// let back = layer.backward(&saved, &dy, false)?;
/// assert_eq!(back.get("dx").unwrap().shape, [3, 8]);
/// assert_eq!(layer.gradient("router.weight")?.shape, [4, 8]);
/// # Ok(())
/// # }
/// ```
#[doc(inline)]
pub use moesaic_plan::Training;

/// The choice of values that backward computes again instead of keeping. Gradients are the same for
/// each choice.
///
/// ```
/// use moesaic::{Recompute, Training};
///
/// # use moesaic::example::{engine, spec, weights};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let less = Training { recompute: Recompute::Hidden };
/// let less = engine().training_layer(&spec(), &weights(), less)?;
/// let all = engine().training_layer(&spec(), &weights(), Training::default())?;
/// assert!(less.saved_bytes(100) < all.saved_bytes(100));
/// # Ok(())
/// # }
/// ```
#[doc(inline)]
pub use moesaic_plan::Recompute;

/// The seed and position of a training call, from which alone its random numbers follow.
///
/// ```
/// use moesaic::RngKey;
///
/// // The second layer of a model in its 400th step.
/// let rng_key = RngKey { seed: 1, step: 400, layer: 1, ..RngKey::default() };
/// assert_eq!(rng_key.first_token, 0); // of this rank's tokens, among all
/// ```
#[doc(inline)]
pub use moesaic_engine::RngKey;

/// The state that a training call keeps for backward.
///
/// ```
/// use moesaic::{RngKey, Input, Training};
///
/// # use moesaic::example::{engine, spec, wave, weights};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let layer = engine().training_layer(&spec(), &weights(), Training::default())?;
/// let (_, first) = layer.forward_train(Input::new(3, &wave(24)).reading(&[]), RngKey::default())?;
/// let (_, second) = layer.forward_train(Input::new(1, &wave(8)).reading(&[]), RngKey::default())?;
/// assert_eq!((first.tokens(), second.tokens()), (3, 1)); // any number may be alive
/// # Ok(())
/// # }
/// ```
#[doc(inline)]
pub use moesaic_engine::Saved;

/// A backward call on device memory that you own.
///
/// ```
/// use moesaic::{RngKey, Input, RawBackward, Training};
///
/// # use moesaic::example::{engine, spec, wave, weights};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let engine = engine();
/// let layer = engine.training_layer(&spec(), &weights(), Training::default())?;
/// let (_, saved) = layer.forward_train(Input::new(3, &wave(24)).reading(&[]), RngKey::default())?;
/// let (dy, dx) = (engine.device().alloc(96)?, engine.device().alloc(96)?);
/// engine.device().upload(&[0; 96], &dy, 0)?;
/// let tensors = [("dy", dy.ptr()), ("dx", dx.ptr())];
/// // SAFETY: both hold three tokens, and live until the device is done.
/// let call = unsafe { RawBackward::new(&tensors) };
/// layer.backward(&saved, call, false)?;
/// engine.device().synchronize()?;
/// # Ok(())
/// # }
/// ```
#[doc(inline)]
pub use moesaic_engine::RawBackward;

/// The gradient of `y` that a backward pass begins with: a [`Tensor`](crate::Tensor) of yours, or
/// addresses on the device.
///
/// ```
/// use moesaic::{EngineError, Layer, OutputGradient, Saved};
///
/// /// Adds to the gradients of weights, from either form of `dy`.
/// fn add<'d>(
///     layer: &Layer, saved: &Saved, dy: impl Into<OutputGradient<'d>>,
/// ) -> Result<(), EngineError> {
///     layer.backward(saved, dy, true).map(drop)
/// }
/// ```
#[doc(inline)]
pub use moesaic_engine::OutputGradient;
