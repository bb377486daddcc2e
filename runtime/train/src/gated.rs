//! A layer behind a gate of yours: logits from tokens in Rust, and their gradient back.

use crate::gates::{Chosen, best};
use crate::{TrainError, optimizer::floats_mut};
use moesaic_engine::{CallInput, Input, Layer, Output, RngKey, Saved};
use moesaic_spec::RouterKind;
use moesaic_tensor::Tensor;
use std::fmt;

/// A gate in Rust, as FastMoE's are modules: it computes logits from tokens, and gets their
/// gradient back.
pub trait Gate {
    /// Returns the logits `[T, E]` of the tokens `x [T, d]`.
    fn logits(&self, x: &[f32]) -> Vec<f32>;

    /// Chooses `top_k` of `experts` for each token: the [`best`], unless you call another function
    /// of [`gates`](crate::gates) here, or `best` with other logits. Weights are the softmax over
    /// the logits of the chosen experts alone, so with `top_k = 1` your gate gets no gradient.
    ///
    /// For weights by another rule use no [`GatedLayer`]: pass `topk_ids` and `topk_weights` to a
    /// layer with an external router, whose backward returns `grad.topk_weights`.
    ///
    /// # Errors
    /// As [`best`].
    fn choose(&self, logits: &[f32], experts: usize, top_k: usize) -> Result<Chosen, TrainError> {
        best(logits, experts, top_k)
    }

    /// Computes the gradients of the gate's own parameters, which it holds, and adds the gradient
    /// that tokens get through their logits to `dx [T, d]`.
    fn backward(&mut self, call: &GateBackward<'_>, dx: &mut [f32]);
}

/// The inputs of a gate's backward.
#[derive(Clone, Copy, Debug)]
pub struct GateBackward<'a> {
    /// `[T, d]`, as the forward pass had them.
    pub x: &'a [f32],
    /// The gradient of the logits `[T, E]`.
    pub dlogits: &'a [f32],
    /// Whether gradients of parameters are added to instead of overwritten.
    pub accumulate: bool,
}

/// A layer whose router is a [`Gate`] of yours, on one process or over ranks. The layer's own router
/// is `external`. Over ranks each rank has the same gate, decides for its own tokens, and makes
/// every call; the gate's gradients are those of its own tokens until you sum them
/// ([`Ranks::sum`](moesaic_engine::Ranks::sum)).
pub struct GatedLayer<G> {
    layer: Layer,
    gate: G,
}

impl<G> fmt::Debug for GatedLayer<G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GatedLayer")
            .field("layer", &self.layer)
            .finish_non_exhaustive()
    }
}

/// The state that a forward pass of a [`GatedLayer`] keeps for backward.
pub struct GatedSaved {
    saved: Saved,
    chosen: Chosen,
    x: Vec<f32>,
}

impl fmt::Debug for GatedSaved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GatedSaved")
            .field("saved", &self.saved)
            .finish_non_exhaustive()
    }
}

impl<G: Gate> GatedLayer<G> {
    /// Puts a gate before a layer with an external router.
    ///
    /// # Errors
    /// [`TrainError::Tensor`] for a layer with a router of its own.
    pub fn new(layer: Layer, gate: G) -> Result<GatedLayer<G>, TrainError> {
        match layer.spec().router.kind {
            RouterKind::External => Ok(GatedLayer { layer, gate }),
            _ => {
                let problem = "are of the layer's own router; set `router.kind = \"external\"` in \
                               its spec for a gate of yours";
                Err(TrainError::tensor("router.logits", problem))
            }
        }
    }

    /// Returns the layer behind the gate, with the weights and gradients of experts.
    pub fn layer(&self) -> &Layer {
        &self.layer
    }

    /// Returns the gate.
    pub fn gate(&self) -> &G {
        &self.gate
    }

    /// Returns the gate, for an optimizer that moves its parameters between calls.
    pub fn gate_mut(&mut self) -> &mut G {
        &mut self.gate
    }

    /// Evaluates the layer, with the arguments of [`Layer::forward`] in host memory.
    ///
    /// # Errors
    /// Those of [`Gate::choose`] and of [`Layer::forward`].
    pub fn forward<'i>(&self, input: impl Into<CallInput<'i>>) -> Result<Output, TrainError> {
        let (mut input, outputs) = self.layer.in_host_memory(input.into())?;
        let (_, chosen) = self.decide(&input)?;
        chosen.give(input.to_mut());
        Ok(self.layer.forward(input.reading(outputs))?)
    }

    /// Runs the layer forward as in training, and keeps what backward needs.
    ///
    /// # Errors
    /// Those of [`Gate::choose`] and of [`Layer::forward_train`].
    pub fn forward_train<'i>(
        &self,
        input: impl Into<CallInput<'i>>,
        rng_key: RngKey,
    ) -> Result<(Output, GatedSaved), TrainError> {
        let (mut input, outputs) = self.layer.in_host_memory(input.into())?;
        let (x, chosen) = self.decide(&input)?;
        chosen.give(input.to_mut());
        let call = self.layer.forward_train(input.reading(outputs), rng_key);
        let (output, saved) = call?;
        Ok((output, GatedSaved { saved, chosen, x }))
    }

    /// Runs the layer backward and then the gate, and returns the gradient of the tokens through
    /// both, `dx [T, d]`. The gradients of experts stay with the layer, those of the gate with the
    /// gate.
    ///
    /// # Errors
    /// Those of [`Layer::backward`].
    pub fn backward(
        &mut self,
        saved: &GatedSaved,
        dy: &Tensor<'_>,
        accumulate: bool,
    ) -> Result<Tensor<'static>, TrainError> {
        let back = self.layer.backward(&saved.saved, dy, accumulate)?;
        let read = |name: &str| {
            let tensor = back.get(name);
            tensor.ok_or_else(|| TrainError::tensor(name, "is not in a backward pass"))
        };
        let dlogits = saved
            .chosen
            .gradient(&read("grad.topk_weights")?.to_f32())?;
        let dx = read("dx")?;
        let mut sum = Tensor::owned(&dx.shape, dx.to_f32());
        let call = GateBackward {
            x: &saved.x,
            dlogits: &dlogits,
            accumulate,
        };
        self.gate.backward(&call, floats_mut(&mut sum));
        Ok(Tensor::rounded(dx.dtype, &dx.shape, &sum.to_f32()).into_static())
    }

    /// Returns the tokens as f32, and the gate's decision.
    fn decide(&self, input: &Input<'_>) -> Result<(Vec<f32>, Chosen), TrainError> {
        let x = input.tensors.get("x");
        let x = x.ok_or_else(|| TrainError::tensor("x", "is missing"))?;
        let x = x.to_f32();
        let logits = self.gate.logits(&x);
        let shape = &self.layer.spec().shape;
        let expected = input.tokens * shape.experts;
        if logits.len() != expected {
            let found = logits.len();
            let problem = format!("are {found} numbers of the gate, expected {expected}");
            return Err(TrainError::tensor("router.logits", problem));
        }
        let chosen = self.gate.choose(&logits, shape.experts, shape.top_k)?;
        Ok((x, chosen))
    }
}
