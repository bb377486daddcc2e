//! Experts written in Rust, and experts behind several routers.
//!
//! Implement [`UserExpert`], and [`Engine::user_layer`](crate::Engine::user_layer) makes a layer of
//! yours. [`Engine::multi_gate`](crate::Engine::multi_gate) puts several routers before one set of
//! experts.

/// An expert as Rust code, for a [`UserLayer`].
///
/// ```
/// use moesaic::experts::{ExpertBackward, UserExpert};
///
/// /// Multiplies by a number that it does not learn.
/// struct Scale(f32);
///
/// impl UserExpert for Scale {
///     fn forward(&self, rows: &[f32], out: &mut [f32], _saved: Option<&mut Vec<f32>>) {
///         out.iter_mut().zip(rows).for_each(|(out, x)| *out = self.0 * x);
///     }
///     fn backward(&mut self, call: &ExpertBackward<'_>, drows: &mut [f32]) {
///         drows.iter_mut().zip(call.dout).for_each(|(dx, dy)| *dx = self.0 * dy);
///     }
/// }
///
/// let mut doubled = [0.0; 2];
/// Scale(2.0).forward(&[1.0, 3.0], &mut doubled, None);
/// assert_eq!(doubled, [2.0, 6.0]);
/// ```
#[doc(inline)]
pub use moesaic_engine::UserExpert;

/// The arguments of [`UserExpert`]'s backward pass.
///
/// ```
/// use moesaic::experts::ExpertBackward;
///
/// /// The gradient of a bias: the sum of its rows' gradients.
/// fn bias_gradient(call: &ExpertBackward<'_>, gradient: &mut [f32]) {
///     if !call.accumulate {
///         gradient.fill(0.0);
///     }
///     for row in call.dout.chunks(gradient.len()) {
///         gradient.iter_mut().zip(row).for_each(|(sum, dy)| *sum += dy);
///     }
/// }
///
/// let dout = [1.0, 2.0, 3.0, 4.0];
/// let call = ExpertBackward { rows: &[0.0; 4], saved: &[], dout: &dout, accumulate: false };
/// let mut gradient = [0.0; 2];
/// bias_gradient(&call, &mut gradient);
/// assert_eq!(gradient, [4.0, 6.0]);
/// ```
#[doc(inline)]
pub use moesaic_engine::ExpertBackward;

/// A layer whose experts are [`UserExpert`]s: moesaic routes, dispatches and combines.
///
/// ```
/// use moesaic::{Input, LayerOptions};
/// use moesaic::experts::UserExpert;
/// # use moesaic::example::{engine, spec, wave, weights};
/// # use moesaic::experts::ExpertBackward;
/// # struct Scale(f32);
/// # impl UserExpert for Scale {
/// #     fn forward(&self, rows: &[f32], out: &mut [f32], _saved: Option<&mut Vec<f32>>) {
/// #         out.iter_mut().zip(rows).for_each(|(out, x)| *out = self.0 * x);
/// #     }
/// #     fn backward(&mut self, _: &ExpertBackward<'_>, _: &mut [f32]) {}
/// # }
/// # fn main() -> Result<(), moesaic::Error> {
/// let experts = [1.0, 2.0, 3.0, 4.0].map(Scale); // or boxes of several types
/// let options = LayerOptions::default(); // for inference, in one process
/// let mut layer = engine().user_layer(&spec(), &weights(), experts.into(), options)?;
/// let y = layer.forward(&Input::new(3, &wave(24)))?;
/// assert_eq!(y.y().shape, [3, 8]);
/// layer.experts_mut()[1].0 *= 0.5; // they stay of your type
/// assert_eq!(layer.experts()[1].0, 1.0);
/// # Ok(())
/// # }
/// ```
#[doc(inline)]
pub use moesaic_engine::UserLayer;

/// The state that a training call of a [`UserLayer`] keeps for backward.
///
/// ```
/// use moesaic::{EngineError, Tensor, Input, Output};
/// use moesaic::experts::{UserLayer, UserSaved};
///
/// /// Both passes of a step.
/// fn step(
///     layer: &mut UserLayer, input: &Input<'_>, dy: &Tensor<'_>,
/// ) -> Result<Output, EngineError> {
///     let (_, saved): (_, UserSaved) = layer.forward_train(input.reading(&[]), Default::default())?;
///     layer.backward(&saved, dy, false)
/// }
/// ```
#[doc(inline)]
pub use moesaic_engine::UserSaved;

/// One set of experts behind several routers, as in MMoE.
///
/// ```
/// use moesaic::{Input, LayerOptions, Tensors};
///
/// # use moesaic::example::{engine, spec, wave, weights};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let (one, other) = (wave(32), vec![0.5f32; 32]);
/// let routers = [&one, &other].map(|w| Tensors::new().with("router.weight", &[4, 8], w));
/// # let all = weights();
/// # let mut experts = Tensors::new();
/// # for (name, tensor) in all.iter().filter(|(name, _)| name.starts_with("experts.")) {
/// #     experts.insert(name, tensor.clone());
/// # }
/// let gates = engine().multi_gate(&spec(), &experts, &routers, LayerOptions::default())?;
/// let outputs = gates.forward(&Input::new(3, &wave(24)))?;
/// assert_eq!(outputs.len(), 2); // one for each router
/// # Ok(())
/// # }
/// ```
#[doc(inline)]
pub use moesaic_engine::MultiGate;

/// The state that a training call of a [`MultiGate`] with one router for each token keeps for
/// backward.
///
/// ```
/// use moesaic::experts::{MultiGate, SavedByToken};
/// use moesaic::{EngineError, Input, RngKey, Tensor};
///
/// /// One step of a layer whose tokens of text have router 0, and those of images router 1.
/// fn step(gates: &MultiGate, x: &Input<'_>, modality: &[i32], dy: &Tensor<'_>) -> Result<(), EngineError> {
///     let (_, saved): (_, SavedByToken) =
///         gates.forward_train_by_token(x, modality, RngKey::default())?;
///     gates.backward_by_token(&saved, dy, false).map(drop)
/// }
/// ```
#[doc(inline)]
pub use moesaic_engine::SavedByToken;

/// The state that a training call of a [`MultiGate`] keeps for backward.
///
/// ```
/// use moesaic::Saved;
/// use moesaic::experts::MultiSaved;
///
/// /// Gates that ran by themselves can go back together.
/// fn together(each: Vec<Saved>) -> MultiSaved {
///     MultiSaved::from(each)
/// }
/// ```
#[doc(inline)]
pub use moesaic_engine::MultiSaved;
