//! A moesaic layer as a differentiable operation of candle.
//!
//! An [`InferenceLayer`] is a `candle_core::Module`: its weights are bound once, and a call copies
//! nothing. A [`MoeLayer`] is in candle's graph, with its weights as candle's variables, and is the
//! one to train.
//!
//! A [`MoeLayer`] has two calls. [`MoeLayer::forward`] evaluates: it has no
//! noise and no losses, keeps nothing, and its result is detached from the
//! graph. [`MoeLayer::forward_train`] draws the random numbers of training from
//! the [`RngKey`] of the call, and takes part in candle's autograd. The two
//! return different types, so you cannot take one for the other.
//!
//! # Losses
//! The layer differentiates the auxiliary losses of its spec, too: it adds the
//! gradient of `coefficient · loss` in backward, once per call that `backward`
//! reaches. [`Trained::losses`] holds their values, detached, for you to log or
//! to add to a total that you log. Adding them changes no gradient. If you
//! scale the total before `backward`, as you do when you average micro-batches,
//! scale the coefficients in the spec alike.
//!
//! # In the graph
//! candle's custom operations take at most three inputs, and an expert layer
//! has more weights than that. So an operation of its own ties each weight to
//! the layer: its inputs are the weight and a *link*, a tensor of one number,
//! and its output is the next link. Its backward returns the gradient that the
//! layer computed. The layer itself is an operation of two inputs, `x` and the
//! last link. Nothing is concatenated or kept twice, and candle's own autograd
//! orders the operations.
//!
//! ```text
//! link ──tie(router)──> link ──tie(up)──> link ──tie(down)──> link ─┐
//! x ────────────────────────────────────────────────────────────── layer ──> y
//! ```
//!
//! Tensors lie on candle's CPU device; the layer may run on any target.

//! # Over ranks
//! [`MoeLayer::new_over`] makes a rank's part of a layer. Its calls are the
//! same; all ranks make each of them in the same order, `backward` too, with
//! their own tokens. Gradients of weights are this rank's until
//! [`MoeLayer::reduce_gradients`] adds them up; gradients of tokens are
//! complete. [`part`] returns a rank's part of a weight of the whole layer.

mod exchange;
mod graph;
mod host;
mod inference;
mod inner;
mod inputs;
mod names;
mod ranks;
mod weights;

/// The README's examples, included here so that doctests compile and run them.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;

pub use exchange::{Exchange, exchange};
pub use inference::InferenceLayer;
pub use inputs::Inputs;
pub use moesaic::RngKey;
pub use names::Names;
pub use ranks::{part, reduce_gradients};

use candle_core::{DType, Device, Error, Result, Tensor};
use graph::{Call, Tie, Whole, lock};
use inner::Inner;
use moesaic::Saved;
use moesaic::{
    Engine, EngineError, Input, LayerOptions, LayerSpec, Mesh, Output, Tensor as HostTensor,
    Training,
};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex};
use weights::Weights;

/// A Mixture-of-Experts layer with its weights as candle tensors. Clones are the same layer.
#[derive(Clone)]
pub struct MoeLayer {
    inner: Arc<Inner>,
}

/// The decision of a call, detached.
#[derive(Clone, Debug)]
pub struct Routing {
    /// The experts of each token `[.., K]`, i32; negative where a slot is masked.
    pub ids: Tensor,
    /// Weights of these experts `[.., K]`, f32.
    pub weights: Tensor,
    /// Number of choices of each expert `[E]`, i64, dropped choices included:
    /// the counts for balancing without a loss and for a `global` loss.
    pub counts: Tensor,
}

/// The result of an evaluation, detached from the graph.
#[derive(Clone, Debug)]
pub struct Evaluated {
    /// Output `[.., d_out]`.
    pub y: Tensor,
    /// Decision of the router.
    pub routing: Routing,
}

/// The result of a training call.
#[derive(Clone, Debug)]
pub struct Trained {
    /// Output `[.., d_out]`, differentiable.
    pub y: Tensor,
    /// Auxiliary losses by kind, such as `switch`, without coefficients. They
    /// are detached numbers, because the layer adds their gradients itself.
    pub losses: BTreeMap<String, Tensor>,
    /// Decision of the router.
    pub routing: Routing,
}

impl MoeLayer {
    /// Compiles the layer of `spec` with its weights by canonical name. Each
    /// call reads their current values, where they lie if it can: see
    /// [`MoeLayer::copied_weights`]. Variables are trained; other tensors stay as they
    /// are, such as a `router.table` of integers. Floats may be of another type
    /// than the spec's and are rounded to it: f32 masters of a layer in bf16
    /// get f32 gradients.
    ///
    /// # Errors
    /// Weights are missing: the error names each. Or one is misshapen, or the kernels do not
    /// compile.
    pub fn new(
        engine: &Engine,
        spec: &LayerSpec,
        weights: &BTreeMap<String, Tensor>,
    ) -> Result<MoeLayer> {
        MoeLayer::made(engine, None, spec, weights)
    }

    /// Makes this rank's part of a layer over ranks, as [`MoeLayer::new`] does
    /// for a whole layer. All ranks of the mesh call it. `weights` are this
    /// rank's: its own experts, as [`part`] returns them, and everything else
    /// in full.
    ///
    /// # Errors
    /// As [`MoeLayer::new`]; also if the layer cannot run on the mesh, or ranks
    /// make different layers.
    pub fn new_over(
        engine: &Engine,
        mesh: &Mesh,
        spec: &LayerSpec,
        weights: &BTreeMap<String, Tensor>,
    ) -> Result<MoeLayer> {
        MoeLayer::made(engine, Some(mesh), spec, weights)
    }

    fn made(
        engine: &Engine,
        mesh: Option<&Mesh>,
        spec: &LayerSpec,
        weights: &BTreeMap<String, Tensor>,
    ) -> Result<MoeLayer> {
        let mut held = Weights::find(spec, weights)?;
        let given = held.copied()?;
        let options = LayerOptions {
            training: Some(Training::default()),
            mesh,
            part: mesh.is_some(),
            ..LayerOptions::default()
        };
        let layer = engine.layer_with(spec, &given, options);
        let layer = layer.map_err(Error::wrap)?;
        held.find_in_place(engine, &layer);
        Ok(MoeLayer {
            inner: Arc::new(Inner {
                layer,
                weights: held,
                turn: Mutex::default(),
            }),
        })
    }

    /// Returns the weights by canonical name.
    pub fn weights(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.inner.weights.iter()
    }

    /// Returns the names of the weights that each call copies; it reads the others in candle's
    /// memory. A copy is needed of a weight whose type is not the spec's, such as an f32 master of
    /// a layer in bf16, of one that is not contiguous, of a routing table, and of every weight of a
    /// layer over ranks or on another device than the CPU.
    pub fn copied_weights(&self) -> impl Iterator<Item = &str> {
        self.inner.weights.copied_names()
    }

    /// Evaluates: `x [.., d]` to `y [.., d_out]`, without noise, jitter,
    /// dropout and losses. The result is not differentiable, whatever its
    /// inputs are: nothing is kept, and gradients end here.
    ///
    /// # Errors
    /// An input is missing, misshapen, of another type, or one that the layer
    /// does not read.
    pub fn forward(&self, inputs: &Inputs) -> Result<Evaluated> {
        let layer = &self.inner.layer;
        let names = [&["y"], &ROUTING[..]].concat();
        let output = self.with_input(inputs, |input| layer.forward(input.reading(&names)))?;
        let y = output.y();
        Ok(Evaluated {
            y: host::tensor(y, &shape_of(y, inputs)),
            routing: routing(&output, inputs),
        })
    }

    /// Runs one training call: `x [.., d]` to `y [.., d_out]`, differentiable
    /// in `x`, in the weights and in the weights of an external decision.
    /// `rng_key` alone determine the random numbers, so use other rng_key for
    /// each step and each layer.
    ///
    /// # Errors
    /// As [`MoeLayer::forward`].
    pub fn forward_train(&self, inputs: &Inputs, rng_key: RngKey) -> Result<Trained> {
        let layer = &self.inner.layer;
        let kinds = layer.spec().losses.iter().map(|loss| loss.kind.name());
        let losses: Vec<(&str, String)> = kinds.map(|k| (k, format!("loss.{k}"))).collect();
        let mut names = [&["y"], &ROUTING[..]].concat();
        names.extend(losses.iter().map(|(_, name)| name.as_str()));
        let run = |input: &Input<'_>| layer.forward_train(input.reading(&names), rng_key);
        let (output, saved) = self.with_input(inputs, run)?;
        let values = losses.iter().map(|(kind, name)| {
            let value = output.get(name).expect("it was asked for");
            (kind.to_string(), host::tensor(value, &[]))
        });
        Ok(Trained {
            losses: values.collect(),
            routing: routing(&output, inputs),
            y: self.tie(inputs, output.y(), saved)?,
        })
    }

    /// Routes tokens as [`MoeLayer::forward`] does, and nothing else.
    ///
    /// # Errors
    /// As [`MoeLayer::forward`].
    pub fn route(&self, inputs: &Inputs) -> Result<Routing> {
        let layer = &self.inner.layer;
        let output = self.with_input(inputs, |input| layer.route(input.reading(&ROUTING)))?;
        Ok(routing(&output, inputs))
    }

    /// Routes tokens as [`MoeLayer::forward_train`] does with the same
    /// rng_key, and nothing else. The counts are those that a `global` loss
    /// sums over ranks and micro-batches.
    ///
    /// # Errors
    /// As [`MoeLayer::forward`].
    pub fn route_train(&self, inputs: &Inputs, rng_key: RngKey) -> Result<Routing> {
        let layer = &self.inner.layer;
        let route = |input: &Input<'_>| layer.route(input.reading(&ROUTING).in_training(rng_key));
        Ok(routing(&self.with_input(inputs, route)?, inputs))
    }

    /// Runs the layer on the inputs of a call.
    fn with_input<R>(
        &self,
        inputs: &Inputs,
        run: impl FnOnce(&Input<'_>) -> std::result::Result<R, EngineError>,
    ) -> Result<R> {
        let layer = &self.inner.layer;
        inputs.lend(layer, |input| {
            let inner = &self.inner;
            let _turn = lock(&inner.turn);
            let reading = inner.weights.hand_over(layer)?;
            let result = run(input).map_err(Error::wrap);
            reading.end(layer)?;
            result
        })
    }

    /// Adds a call to the graph and returns its `y`.
    fn tie(&self, inputs: &Inputs, y: &HostTensor<'static>, saved: Saved) -> Result<Tensor> {
        let layer = &self.inner.layer;
        let decided = inputs.others.get_key_value("topk_weights");
        let all = self
            .weights()
            .chain(decided.map(|(name, tensor)| (*name, tensor)));
        let learns = |(name, tensor): &(&str, &Tensor)| {
            tensor.track_op() && layer.tensor(&format!("grad.{name}")).is_some()
        };
        let tied: Vec<(&str, &Tensor)> = all.filter(learns).collect();
        let call = Arc::new(Call {
            inner: self.inner.clone(),
            saved: Mutex::new(saved),
            tied: tied.iter().map(|(name, _)| name.to_string()).collect(),
            gradients: Mutex::default(),
        });
        let mut link = Tensor::zeros(1, DType::F32, &Device::Cpu)?;
        for (name, tensor) in tied {
            let (call, name) = (call.clone(), name.to_string());
            link = link.apply_op2(tensor, Tie { call, name })?;
        }
        let shape = shape_of(y, inputs);
        let y = Mutex::new(Some(y.clone()));
        let rows = inputs.x.reshape((inputs.tokens(), inputs.width()))?;
        rows.apply_op2(&link, Whole { call, y })?.reshape(shape)
    }
}

impl fmt::Debug for MoeLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MoeLayer")
            .field("shape", &self.inner.layer.spec().shape)
            .field("weights", &self.inner.weights)
            .finish_non_exhaustive()
    }
}

/// The outputs behind [`Routing`].
const ROUTING: [&str; 3] = ["topk_ids", "topk_weights", "counts"];

fn routing(output: &Output, inputs: &Inputs) -> Routing {
    let [ids, weights, counts] = ROUTING.map(|name| output.get(name).expect("it was asked for"));
    Routing {
        ids: host::tensor(ids, &shape_of(ids, inputs)),
        weights: host::tensor(weights, &shape_of(weights, inputs)),
        counts: host::tensor(counts, &counts.shape),
    }
}

/// Returns the shape of a result with a row per token, with the leading sizes
/// of `x`.
fn shape_of(rows: &HostTensor<'_>, inputs: &Inputs) -> Vec<usize> {
    [inputs.leading(), &rows.shape[1..]].concat()
}
