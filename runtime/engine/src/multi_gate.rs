//! One set of experts behind several routers, as in MMoE (Ma et al. 2018).

use crate::call::{CallInput, Input, Output, RngKey};
use crate::device_layer::DeviceLayer;
use crate::engine::Engine;
use crate::error::EngineError;
use crate::layer::{Layer, LayerOptions, Saved};
use crate::numbers::Numbers;
use crate::place::check_names;
use crate::router::is_of_router;
use crate::shared::Shared;
use crate::stack::{Stack, StackSaved};
use crate::texts::Texts;
use moesaic_kernel::DType;
use moesaic_plan::stacked;
use moesaic_spec::LayerSpec;
use moesaic_tensor::{SourceError, Tensor, Tensors, WeightSource};
use std::fmt;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Layers that differ in their routers and share experts: all use the same memory for weights and
/// gradients of experts. With `top_k` as large as the number of experts it is the published MMoE.
///
/// A call runs all of them in one pass over the experts and reads their weights once. It runs them
/// one by one if experts have a capacity, which belongs to each layer, or if routing is `external`,
/// and in an engine that compiles nothing and lacks the kernels
/// ([`PrecompileJob::multi_gate`](crate::PrecompileJob::multi_gate)), with a warning.
/// [`MultiGate::in_one_pass`] tells you which it is.
///
/// Over ranks the routers run one by one, each with its own exchange of rows; all ranks make every
/// call. Gradients are complete after [`MultiGate::reduce_gradients`].
///
/// If each token has one of the routers, as tokens of text, images and audio in Ling 3, see
/// [`MultiGate::forward_by_token`].
pub struct MultiGate {
    pub(crate) layers: Vec<Layer>,
    pub(crate) stack: Option<Stack>,
    /// A lock for one backward pass at a time; a pass may be several calls, one of each layer.
    backward: Mutex<()>,
}

impl fmt::Debug for MultiGate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Its layers differ in their routers alone, so one stands for all.
        f.debug_struct("MultiGate")
            .field("routers", &self.layers.len())
            .field("layer", &self.layers.first())
            .finish_non_exhaustive()
    }
}

/// The state that a forward pass of a [`MultiGate`] keeps for backward. You can also put it
/// together from the states of its layers, in order, if they ran by themselves.
pub struct MultiSaved(Kept);

impl fmt::Debug for MultiSaved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let together = matches!(self.0, Kept::Together(_));
        // The rest is memory of the device, which nobody wants in a log.
        f.debug_struct("MultiSaved")
            .field("in_one_pass", &together)
            .finish_non_exhaustive()
    }
}

enum Kept {
    Together(StackSaved),
    Each(Vec<Saved>),
}

impl From<Vec<Saved>> for MultiSaved {
    fn from(each: Vec<Saved>) -> MultiSaved {
        MultiSaved(Kept::Each(each))
    }
}

impl Engine {
    /// Makes one layer per element of `routers`, over one set of the other weights. `moesaic::Engine`
    /// documents it.
    pub fn multi_gate(
        &self,
        spec: &LayerSpec,
        weights: &dyn WeightSource,
        routers: &[Tensors<'_>],
        options: LayerOptions<'_>,
    ) -> Result<MultiGate, EngineError> {
        check_names(spec, weights)?;
        routers
            .iter()
            .try_for_each(|router| check_names(spec, router))?;
        if options.mesh.is_some() {
            return self.multi_gate_over_ranks(spec, weights, routers, &options);
        }
        options.check_one()?;
        let training = options.training;
        let texts = self.texts(spec, training)?;
        let weights = &Numbers::new(spec, self.target(), weights);
        let plan = texts.tilings.first();
        let device = &**self.device();
        let modules = &self.modules(&texts)?[0];
        let shared = Shared::new(plan, modules, device, weights, |name| !is_of_router(name))?;
        let layer = |texts: &Texts, router: &Tensors<'_>| {
            let layer = self.device_layer_sharing(texts, router, shared.weights())?;
            if training.is_some() {
                layer.share_gradients(shared.gradients())?;
            }
            Ok(layer.taking_turns(&shared.turn))
        };
        // All routers have one plan, so one set of texts and of loaded kernels serves them.
        let layers = routers.iter().map(|router| layer(&texts, router));
        let layers = layers.collect::<Result<Vec<DeviceLayer>, EngineError>>()?;
        let stack = match (stacked(spec), &*layers) {
            (Some(experts), [first, _, ..]) => {
                let texts = self.texts(&experts, training)?;
                // The spec of the stack differs from the layer's, so a pack may lack its kernels.
                if self.may_load(&texts) {
                    Some(Stack::new(first, layer(&texts, &Tensors::new())?)?)
                } else {
                    one_by_one(&spec.name);
                    None
                }
            }
            _ => None,
        };
        Ok(MultiGate {
            layers: layers.into_iter().map(Layer::of_one).collect(),
            stack,
            backward: Mutex::default(),
        })
    }

    /// Makes the layers over ranks: the first holds weights and gradients of experts for all.
    fn multi_gate_over_ranks(
        &self,
        spec: &LayerSpec,
        experts: &dyn WeightSource,
        routers: &[Tensors<'_>],
        options: &LayerOptions<'_>,
    ) -> Result<MultiGate, EngineError> {
        // A rank may have memory for its experts once. So the first layer is made as any other, and
        // the others use its memory.
        let mut layers: Vec<Layer> = Vec::new();
        for router in routers {
            let layer = match layers.first() {
                None => {
                    let weights = WithRouter { router, experts };
                    self.layer_with(spec, &weights, options.clone())?
                }
                Some(first) => {
                    let layer = first.with_router(router)?;
                    let strategy = options
                        .strategy
                        .map(|strategy| layer.set_strategy(strategy));
                    strategy.transpose()?;
                    layer
                }
            };
            layers.push(layer);
        }
        Ok(MultiGate {
            layers,
            stack: None,
            backward: Mutex::default(),
        })
    }
}

/// The weights of one router, and those that all have in common.
struct WithRouter<'w> {
    router: &'w Tensors<'w>,
    experts: &'w dyn WeightSource,
}

impl WithRouter<'_> {
    fn of(&self, name: &str) -> &dyn WeightSource {
        // The weights of experts may be a whole checkpoint, with a router of its own.
        if is_of_router(name) {
            self.router
        } else {
            self.experts
        }
    }
}

impl WeightSource for WithRouter<'_> {
    fn describe(&self, name: &str) -> Option<(DType, Vec<usize>)> {
        self.of(name).describe(name)
    }

    fn rows(&self, name: &str, rows: Range<usize>) -> Result<Tensor<'_>, SourceError> {
        self.of(name).rows(name, rows)
    }
}

impl MultiGate {
    /// Returns the layers, one per router. A layer's `router.` weights and gradients are its own;
    /// those of experts belong to all layers, so their calls take turns. Over ranks the first layer
    /// reduces those of experts, and each its router's.
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// Returns whether a call runs all layers in one pass over the experts.
    pub fn in_one_pass(&self) -> bool {
        self.stack.is_some()
    }

    /// Evaluates every layer on the same tokens; `y` has the bytes that the layer
    /// gives by itself.
    ///
    /// # Errors
    /// As [`Layer::forward`].
    pub fn forward<'i>(&self, input: impl Into<CallInput<'i>>) -> Result<Vec<Output>, EngineError> {
        let input = input.into();
        if let Some(stack) = &self.stack {
            let routers = self.routers()?;
            let (input, names) = input.args(routers[0].plan())?.in_host_memory()?;
            return stack.forward(&routers, &input, names);
        }
        let each = self.layers.iter();
        each.map(|layer| layer.forward(input)).collect()
    }

    /// Runs every layer as in training on the same tokens, keeping what backward
    /// needs. Layers with the same RNG key draw the same numbers.
    ///
    /// # Errors
    /// As [`Layer::forward_train`].
    pub fn forward_train<'i>(
        &self,
        input: impl Into<CallInput<'i>>,
        rng_key: RngKey,
    ) -> Result<(Vec<Output>, MultiSaved), EngineError> {
        let input = input.into();
        if let Some(stack) = &self.stack {
            let routers = self.routers()?;
            routers[0].check_training()?;
            let (input, names) = input.args(routers[0].plan())?.in_host_memory()?;
            let inputs = vec![&*input; routers.len()];
            return train_together(stack, &routers, &inputs, names, rng_key);
        }
        self.train_each(self.layers.iter().map(|_| input), rng_key)
    }

    /// Runs every layer as in training, each on its own tokens.
    pub(crate) fn train_on(
        &self,
        inputs: &[Input<'_>],
        names: &[&str],
        rng_key: RngKey,
    ) -> Result<(Vec<Output>, MultiSaved), EngineError> {
        let Some(stack) = &self.stack else {
            return self.train_each(inputs.iter().map(|input| input.reading(names)), rng_key);
        };
        let routers = self.routers()?;
        // The routers are layers of one spec, so what one cannot train none can.
        routers[0].check_training()?;
        let inputs: Vec<&Input<'_>> = inputs.iter().collect();
        train_together(stack, &routers, &inputs, names, rng_key)
    }

    /// Runs the layers one by one, each on an input of its own.
    fn train_each<'i, I: Into<CallInput<'i>>>(
        &self,
        inputs: impl Iterator<Item = I>,
        rng_key: RngKey,
    ) -> Result<(Vec<Output>, MultiSaved), EngineError> {
        let calls = self.layers.iter().zip(inputs);
        let calls = calls.map(|(layer, input)| layer.forward_train(input, rng_key));
        let calls = calls.collect::<Result<Vec<_>, _>>()?;
        let (outputs, saved): (Vec<Output>, Vec<Saved>) = calls.into_iter().unzip();
        Ok((outputs, saved.into()))
    }

    /// Runs every layer backward, each from its own `dy`. Gradients of experts are the sum over the
    /// layers, those of a router its own. Each layer returns its part of `dx`; if all read the same
    /// tokens, the gradient is the sum of the parts.
    ///
    /// # Errors
    /// As [`Layer::backward`].
    ///
    /// # Panics
    /// When there is not one `dy`, and one saved state if they are of layers by
    /// themselves, per layer.
    pub fn backward(
        &self,
        saved: &MultiSaved,
        dy: &[Tensor<'_>],
        accumulate: bool,
    ) -> Result<Vec<Output>, EngineError> {
        assert_eq!(dy.len(), self.layers.len(), "one dy per layer");
        let _turn = self.backward.lock().unwrap_or_else(PoisonError::into_inner);
        match (&saved.0, &self.stack) {
            (Kept::Each(saved), _) => self.backward_each(saved, dy, accumulate),
            (Kept::Together(saved), Some(stack)) => {
                stack.backward(&self.routers()?, saved, dy, accumulate)
            }
            (Kept::Together(_), None) => Err(EngineError::ForeignSaved),
        }
    }

    /// Sums gradients over the ranks that hold the same weights, as [`Layer::reduce_gradients`]:
    /// those of experts once, and each router's. Does nothing without ranks.
    ///
    /// # Errors
    /// As [`Layer::reduce_gradients`].
    pub fn reduce_gradients(&self) -> Result<(), EngineError> {
        self.layers.iter().try_for_each(Layer::reduce_gradients)
    }

    /// As [`MultiGate::reduce_gradients`], then divides all sums by the number of ranks; see
    /// [`Layer::average_gradients`].
    ///
    /// # Errors
    /// As [`Layer::reduce_gradients`].
    pub fn average_gradients(&self) -> Result<(), EngineError> {
        self.layers.iter().try_for_each(Layer::average_gradients)
    }

    /// Returns the layers as the stack takes them.
    pub(crate) fn routers(&self) -> Result<Vec<&DeviceLayer>, EngineError> {
        self.layers.iter().map(|layer| layer.one(ROUTER)).collect()
    }

    fn backward_each(
        &self,
        saved: &[Saved],
        dy: &[Tensor<'_>],
        accumulate: bool,
    ) -> Result<Vec<Output>, EngineError> {
        assert_eq!(saved.len(), self.layers.len(), "one saved state per layer");
        let calls = self.layers.iter().zip(saved).zip(dy).enumerate();
        calls
            .map(|(index, ((layer, saved), dy))| {
                // All layers share the gradients of experts: the first pass overwrites them, the
                // others add.
                if index > 0 && !accumulate {
                    layer.zero_router_gradients()?;
                }
                layer.backward(saved, dy, accumulate || index > 0)
            })
            .collect()
    }
}

/// The purpose of a layer here, for errors.
const ROUTER: &str = "a router over experts of others";

/// Warns that calls run layer by layer, and why.
fn one_by_one(layer: &str) {
    tracing::warn!(
        layer,
        "routers over the same experts run one by one: the kernels of one pass are not cached and \
         nothing may be compiled; `moesaic precompile --multi-gate` adds them"
    );
}

/// Runs all routers in one pass over the experts, each on an input of its own.
fn train_together(
    stack: &Stack,
    routers: &[&DeviceLayer],
    inputs: &[&Input<'_>],
    names: &[&str],
    rng_key: RngKey,
) -> Result<(Vec<Output>, MultiSaved), EngineError> {
    let (outputs, saved) = stack.forward_train(routers, inputs, names, rng_key)?;
    Ok((outputs, MultiSaved(Kept::Together(saved))))
}
