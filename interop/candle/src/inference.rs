//! Layers for inference: weights are bound once, and a call copies nothing.

use crate::Inputs;
use crate::host::{candle_type, wrong_type};
use crate::names::{Names, WeightsByName};
use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CustomOp1, DType, Error, Layout, Module, Result, Shape, Tensor, WithDType,
};
use moesaic::Element;
use moesaic::half::{bf16, f16};
use moesaic::{Engine, Input, Layer, LayerSpec};
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

/// A Mixture-of-Experts layer for inference, a [`Module`] from `[.., model_dim]` to `[..,
/// output_dim]`.
///
/// Making it packs the weights for the kernels, so the layer holds them once and you may drop
/// yours. On a CPU a call reads `x` in candle's memory and writes the memory of its result: it
/// copies no weight and no token. The result is detached from the graph; [`crate::MoeLayer`] is the
/// layer that trains.
///
/// A clone shares the weights and has a workspace of its own, so give each thread a clone: their
/// calls run at the same time, while those of one layer take turns.
pub struct InferenceLayer {
    layer: Layer,
}

impl InferenceLayer {
    /// Compiles the layer of `spec` and binds its weights, by canonical name.
    ///
    /// # Errors
    /// Weights are missing or misshapen: the error names each. Or the kernels do not compile.
    pub fn new(
        engine: &Engine,
        spec: &LayerSpec,
        weights: &BTreeMap<String, Tensor>,
    ) -> Result<InferenceLayer> {
        let get = |_: &[usize], name: &str| {
            let none = || Error::Msg("is missing".to_string());
            weights.get(name).cloned().ok_or_else(none)
        };
        InferenceLayer::load(engine, spec, Names::Canonical, get)
    }

    /// Compiles the layer of `spec` and binds the weights that `get` returns for a shape and a
    /// name. `candle_nn::VarBuilder::get` is such a function: pass `|shape, name| vb.get(shape,
    /// name)` with the builder of the MoE block. Experts are read one at a time, so memory holds
    /// the layer once. Floats are rounded to the types of the spec.
    ///
    /// # Names
    /// The layer asks for the weights that its spec has, by these names. `E` is the number of an
    /// expert, each of which has tensors of its own:
    ///
    /// | [`Names::Canonical`] | [`Names::Qwen`] | [`Names::Mixtral`] | shape |
    /// |---|---|---|---|
    /// | `router.weight` | `gate.weight` | `gate.weight` | `[experts, model_dim]` |
    /// | `experts.gate.weight` | `experts.E.gate_proj.weight` | `experts.E.w1.weight` | `[hidden_dim, model_dim]` |
    /// | `experts.up.weight` | `experts.E.up_proj.weight` | `experts.E.w3.weight` | `[hidden_dim, model_dim]` |
    /// | `experts.down.weight` | `experts.E.down_proj.weight` | `experts.E.w2.weight` | `[output_dim, hidden_dim]` |
    /// | `shared.0.router.weight` | `shared_expert_gate.weight` | – | `[1, model_dim]` |
    /// | `shared.0.gate.weight` | `shared_expert.gate_proj.weight` | – | `[shared hidden_dim, model_dim]` |
    /// | `shared.0.up.weight` | `shared_expert.up_proj.weight` | – | `[shared hidden_dim, model_dim]` |
    /// | `shared.0.down.weight` | `shared_expert.down_proj.weight` | – | `[output_dim, shared hidden_dim]` |
    ///
    /// Canonical names hold all experts in one tensor, `[experts, hidden_dim, model_dim]`, and name
    /// every weight that a spec can have: [`moesaic::spec::canonical_tensors`] lists those of
    /// yours. Qwen's and Mixtral's have these alone: none for biases, say.
    ///
    /// ```
    /// use candle_core::{DType, Device, Error, Result, Tensor};
    /// use moesaic::{Engine, LayerSpec};
    /// use moesaic_candle::{InferenceLayer, Names};
    /// use std::cell::RefCell;
    /// use std::collections::BTreeSet;
    ///
    /// # fn main() -> Result<()> {
    /// let spec = "shape = { model_dim = 8, hidden_dim = 4, experts = 2, top_k = 1 }";
    /// let spec = LayerSpec::from_toml(spec).map_err(Error::wrap)?;
    /// let asked = RefCell::new(BTreeSet::new());
    /// let get = |shape: &[usize], name: &str| {
    ///     asked.borrow_mut().insert(format!("{name} {shape:?}"));
    ///     Tensor::zeros(shape, DType::F32, &Device::Cpu) // a VarBuilder: vb.get(shape, name)
    /// };
    /// InferenceLayer::load(&Engine::cpu().map_err(Error::wrap)?, &spec, Names::Qwen, get)?;
    /// let asked: Vec<String> = asked.into_inner().into_iter().collect();
    /// assert_eq!(
    ///     asked,
    ///     [
    ///         "experts.0.down_proj.weight [8, 4]",
    ///         "experts.0.gate_proj.weight [4, 8]",
    ///         "experts.0.up_proj.weight [4, 8]",
    ///         "experts.1.down_proj.weight [8, 4]",
    ///         "experts.1.gate_proj.weight [4, 8]",
    ///         "experts.1.up_proj.weight [4, 8]",
    ///         "gate.weight [2, 8]",
    ///     ]
    /// );
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`InferenceLayer::new`]; also if `names` has no name for weights of the spec.
    pub fn load(
        engine: &Engine,
        spec: &LayerSpec,
        names: Names,
        get: impl Fn(&[usize], &str) -> Result<Tensor>,
    ) -> Result<InferenceLayer> {
        let weights = WeightsByName::new(spec, names, get)?;
        let layer = engine.layer(spec, &weights);
        let layer = layer.map_err(|error| weights.every_error().unwrap_or(Error::wrap(error)))?;
        Ok(InferenceLayer { layer })
    }

    /// Makes layer `layer` of a model from its folder in the form of transformers, as
    /// [`Engine::layer_from_hf`] does: quantized experts stay the codes that the files hold.
    ///
    /// # Errors
    /// As [`Engine::layer_from_hf`].
    pub fn from_hf(
        engine: &Engine,
        folder: impl AsRef<Path>,
        layer: usize,
    ) -> Result<InferenceLayer> {
        let layer = engine.layer_from_hf(folder, layer).map_err(Error::wrap)?;
        Ok(InferenceLayer { layer })
    }

    /// Returns the type of tokens and results, the spec's activations.
    pub fn dtype(&self) -> DType {
        candle_type(self.layer.spec().precision.activations)
    }

    /// Evaluates a layer that reads more than `x`: `token_ids`, a decision of your own, a mask.
    ///
    /// # Errors
    /// An input is missing, misshapen, of another type, or one that the layer does not read.
    pub fn forward_with(&self, inputs: &Inputs) -> Result<Tensor> {
        let spec = self.layer.spec();
        inputs.lend(&self.layer, |input| {
            let sizes = [inputs.leading(), &[spec.output_dim()]].concat();
            match self.dtype() {
                DType::F16 => self.evaluate_to::<f16>(input, sizes),
                DType::BF16 => self.evaluate_to::<bf16>(input, sizes),
                _ => self.evaluate_to::<f32>(input, sizes),
            }
        })
    }

    fn evaluate_to<E: Element + WithDType>(
        &self,
        input: &Input<'_>,
        sizes: Vec<usize>,
    ) -> Result<Tensor> {
        let mut y = vec![E::zero(); sizes.iter().product()];
        let done = self.layer.forward_into(input, &mut y);
        done.map_err(Error::wrap)?;
        Tensor::from_vec(y, sizes, &candle_core::Device::Cpu)
    }

    /// Returns the layer, for calls that candle does not have.
    pub fn layer(&self) -> &Layer {
        &self.layer
    }
}

impl Module for InferenceLayer {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.contiguous()?
            .apply_op1_no_bwd(&Evaluation { layer: &self.layer })
    }
}

impl Clone for InferenceLayer {
    fn clone(&self) -> InferenceLayer {
        InferenceLayer {
            layer: self.layer.handle(),
        }
    }
}

impl fmt::Debug for InferenceLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("InferenceLayer").field(&self.layer).finish()
    }
}

/// The operation of one call.
struct Evaluation<'l> {
    layer: &'l Layer,
}

impl Evaluation<'_> {
    /// Runs the layer from candle's elements to new ones.
    fn run<E: Element + WithDType>(&self, x: &[E], layout: &Layout) -> Result<(Vec<E>, Shape)> {
        let spec = self.layer.spec();
        let mut sizes = layout.dims().to_vec();
        let width = sizes.last().copied().unwrap_or(0);
        let (model_dim, output_dim) = (spec.shape.model_dim, spec.output_dim());
        if width != model_dim {
            candle_core::bail!("`x` has shape {sizes:?}, the layer takes [.., {model_dim}]");
        }
        *sizes.last_mut().expect("it has a width") = output_dim;
        let (start, end) = layout.contiguous_offsets().expect("x was made contiguous");
        let mut y = vec![E::zero(); sizes.iter().product()];
        let done = self.layer.forward_into(&x[start..end], &mut y);
        done.map_err(Error::wrap)?;
        Ok((y, Shape::from(sizes)))
    }
}

impl CustomOp1 for Evaluation<'_> {
    fn name(&self) -> &'static str {
        "moesaic-inference"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let wanted = candle_type(self.layer.spec().precision.activations);
        match (x, wanted) {
            (CpuStorage::F32(x), DType::F32) => {
                let (y, shape) = self.run(x, layout)?;
                Ok((CpuStorage::F32(y), shape))
            }
            (CpuStorage::F16(x), DType::F16) => {
                let (y, shape) = self.run(x, layout)?;
                Ok((CpuStorage::F16(y), shape))
            }
            (CpuStorage::BF16(x), DType::BF16) => {
                let (y, shape) = self.run(x, layout)?;
                Ok((CpuStorage::BF16(y), shape))
            }
            (x, _) => Err(wrong_type(BackendStorage::dtype(x), wanted)),
        }
    }
}
