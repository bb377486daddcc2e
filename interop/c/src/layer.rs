//! Layers: how they are made, their weights and their gradients. All use of the Rust layer's type
//! is here and in `calls.rs`.

use crate::engine::Engine;
use crate::info::TensorInfo;
use crate::options::LayerOptions;
use crate::pointers::{Out, borrow, free, slice, text};
use crate::spec::Spec;
use crate::status::{Failure, Status, guard};
use crate::tensors::{Given, Tensor, check_tokens, read_weights};
use moesaic::{Device, Ptr};
use moesaic::{Layer as RustLayer, LayerTensor, LayerTensorRole as Role};
use moesaic::{Strategy, Target, Training};
use std::ffi::{CString, c_char, c_int};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

/// A compiled layer, or one rank's part of a layer over ranks. Calls of several threads take turns.
pub struct Layer {
    pub(crate) layer: RustLayer,
    pub(crate) device: Arc<dyn Device>,
    pub(crate) target: Target,
    /// The weights and gradients of a layer without weights, by address.
    bound: Option<RwLock<Vec<(String, Ptr)>>>,
    /// The names of the layer's tensors, as C takes them.
    names: Vec<CString>,
}

fn names(layer: &RustLayer) -> Vec<CString> {
    let names = layer.tensors().iter().map(|tensor| &*tensor.name);
    names
        .map(|name| CString::new(name).unwrap_or_default())
        .collect()
}

impl Layer {
    pub(crate) fn new(engine: &Engine, layer: RustLayer) -> Layer {
        Layer {
            names: names(&layer),
            layer,
            device: engine.engine.device().clone(),
            target: engine.engine.target(),
            bound: None,
        }
    }

    /// Returns whether calls take addresses of the host.
    pub(crate) fn on_host(&self) -> bool {
        matches!(self.target, Target::Cpu(_))
    }

    /// Returns whether the caller binds the weights.
    pub(crate) fn binds(&self) -> bool {
        self.bound.is_some()
    }

    /// Returns the weights and gradients that are bound.
    pub(crate) fn bound(&self) -> Option<RwLockReadGuard<'_, Vec<(String, Ptr)>>> {
        let bound = self.bound.as_ref()?;
        Some(bound.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn tensors(&self) -> &[LayerTensor] {
        self.layer.tensors()
    }

    pub(crate) fn find(&self, name: &str) -> Result<&LayerTensor, Failure> {
        Ok(&self.tensors()[self.number(name)?])
    }

    /// Returns the number of the tensor of a name.
    fn number(&self, name: &str) -> Result<usize, Failure> {
        let mut tensors = self.tensors().iter();
        tensors
            .position(|tensor| tensor.name == name)
            .ok_or_else(|| {
                let names = self.tensors().iter().map(|tensor| &*tensor.name);
                let names: Vec<&str> = names.collect();
                let problem = format!("is none of the layer's; it has: {}", names.join(", "));
                Failure::tensor(name, problem)
            })
    }

    /// Describes a tensor by its number.
    fn info(&self, number: usize, tokens: usize) -> Result<TensorInfo, Failure> {
        let found = self.tensors().get(number).zip(self.names.get(number));
        let (tensor, name) = found.ok_or_else(|| {
            let problem = format!("is {number}, the layer has {} tensors", self.names.len());
            Failure::argument("number", problem)
        })?;
        check_tokens(tokens)?;
        let (role, shape) = (tensor.role.into(), tensor.shape(tokens));
        Ok(TensorInfo::new(name, tensor.dtype, role, &shape))
    }

    fn bind(&self, tensors: &[Given<'_>]) -> Result<(), Failure> {
        let Some(bound) = &self.bound else {
            let problem = "has weights of its own: make it by moesaic_layer_without_weights, or \
                           copy weights by moesaic_layer_set_weight";
            return Err(Failure::argument("layer", problem));
        };
        for given in tensors {
            let tensor = self.find(given.name)?;
            if !matches!(tensor.role, Role::Weight | Role::WeightGradient) {
                let problem = "is no weight and no gradient of one: name it in each call";
                return Err(Failure::tensor(given.name, problem));
            }
            if given.strides.is_some() {
                return Err(Failure::tensor(given.name, "has strides: bind it packed"));
            }
            given.check(tensor, 0)?;
            self.check_ids(tensor, given)?;
        }
        let mut bound = bound.write().unwrap_or_else(PoisonError::into_inner);
        for given in tensors {
            bound.retain(|(name, _)| name != given.name);
            bound.push((given.name.to_string(), Ptr(given.data as u64)));
        }
        Ok(())
    }

    /// Checks the numbers that kernels take for indices, where the host can read them.
    pub(crate) fn check_ids(&self, tensor: &LayerTensor, given: &Given<'_>) -> Result<(), Failure> {
        match self.on_host() {
            true => check_ids(tensor, given),
            false => Ok(()),
        }
    }
}

/// Checks the numbers of a tensor on the host that kernels take for indices.
pub(crate) fn check_ids(tensor: &LayerTensor, given: &Given<'_>) -> Result<(), Failure> {
    if tensor.indices().is_none() {
        return Ok(());
    }
    // SAFETY: the caller of the interface vouches for type and shape, which were checked against
    // the layer's.
    let ids = unsafe { given.host() }?.to_vec::<i32>().unwrap_or_default();
    let checked = tensor.check_indices(&ids);
    checked.map_err(|error| Failure::tensor(given.name, error))
}

/// Makes a layer and copies its weights, which you may free afterwards. Compiles what the engine's
/// cache lacks.
///
/// `weights` are those of the spec (moesaic_spec_weight), of the whole layer, in host memory.
/// `options` may be NULL. Free the layer by moesaic_layer_free.
///
/// # Safety
/// Handles are live, `weights` has `count` valid tensors; `out` is valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_layer_open(
    engine: *const Engine,
    spec: *const Spec,
    weights: *const Tensor,
    count: usize,
    options: *const LayerOptions,
    out: *mut *mut Layer,
) -> Status {
    guard(|| {
        // SAFETY: the caller vouches for its pointers; weights outlive the copy that a layer makes.
        let (out, engine, spec, weights, options) = unsafe {
            let out = Out::handle(out)?;
            let (engine, spec) = (borrow(engine, "engine")?, borrow(spec, "spec")?);
            let weights = read_weights(&spec.spec, slice(weights, count, "weights")?)?;
            let options = options.as_ref().copied().unwrap_or_default();
            (out, engine, spec, weights, options.read()?)
        };
        let layer = engine.engine.layer_with(&spec.spec, &weights, options)?;
        out.give(Layer::new(engine, layer));
        Ok(())
    })
}

/// Makes a layer of one process that copies no weights: you bind the address of each
/// (moesaic_layer_bind), and calls read them there. It can train. Free it by moesaic_layer_free.
///
/// # Safety
/// Handles are live; `out` is valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_layer_without_weights(
    engine: *const Engine,
    spec: *const Spec,
    out: *mut *mut Layer,
) -> Status {
    guard(|| {
        // SAFETY: the caller vouches for its pointers.
        let (out, engine, spec) = unsafe {
            let out = Out::handle(out)?;
            (out, borrow(engine, "engine")?, borrow(spec, "spec")?)
        };
        if spec.spec.precision.experts.is_some() {
            let problem = "has codes of experts, which kernels read packed: use moesaic_layer_open";
            return Err(Failure::argument("spec", problem));
        }
        let training = Training::default();
        let layer = engine.engine.layer_without_weights(&spec.spec, training)?;
        out.give(Layer {
            bound: Some(RwLock::default()),
            ..Layer::new(engine, layer)
        });
        Ok(())
    })
}

/// Binds weights, and the gradients "grad.<weight>" that backward writes: packed tensors on the
/// layer's device, of the types that moesaic_layer_tensor lists. They must stay valid as long as
/// calls and backward passes use them; weights must not change between a forward pass and its
/// backward. A name that is bound already is replaced.
///
/// # Safety
/// `layer` is live, `tensors` has `count` valid tensors.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_layer_bind(
    layer: *const Layer,
    tensors: *const Tensor,
    count: usize,
) -> Status {
    guard(|| {
        // SAFETY: the caller vouches for its pointers.
        let (layer, tensors) = unsafe {
            let tensors = slice(tensors, count, "tensors")?;
            (borrow(layer, "layer")?, Given::read_all(tensors)?)
        };
        layer.bind(&tensors)
    })
}

/// Makes the layer of a model for inference from its folder in the form of transformers: the spec
/// from config.json, the weights from the safetensors files beside it. Layers count from zero. On a
/// CPU quantized experts stay the codes of the files. "x" and "y" have the model's type, mostly
/// bf16; moesaic_layer_find tells it.
///
/// # Safety
/// `engine` is live, `folder` ends in NUL; `out` is valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_layer_from_hf(
    engine: *const Engine,
    folder: *const c_char,
    layer: usize,
    out: *mut *mut Layer,
) -> Status {
    guard(|| {
        // SAFETY: the caller vouches for its pointers.
        let (out, engine, folder) = unsafe {
            let out = Out::handle(out)?;
            (out, borrow(engine, "engine")?, text(folder, "folder")?)
        };
        let made = engine.engine.layer_from_hf(folder, layer)?;
        out.give(Layer::new(engine, made));
        Ok(())
    })
}

/// Makes the layer of a model for inference from a GGUF file, as moesaic_layer_from_hf.
///
/// # Safety
/// `engine` is live, `file` ends in NUL; `out` is valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_layer_from_gguf(
    engine: *const Engine,
    file: *const c_char,
    layer: usize,
    out: *mut *mut Layer,
) -> Status {
    guard(|| {
        // SAFETY: the caller vouches for its pointers.
        let (out, engine, file) = unsafe {
            let out = Out::handle(out)?;
            (out, borrow(engine, "engine")?, text(file, "file")?)
        };
        let made = engine.engine.layer_from_gguf(file, layer)?;
        out.give(Layer::new(engine, made));
        Ok(())
    })
}

/// Makes another layer with the same weights and kernels, and a workspace of its own, so that two
/// threads call at the same time. Over ranks every rank makes it. A layer without weights has none.
///
/// # Safety
/// `layer` is live; `out` is valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_layer_handle(layer: *const Layer, out: *mut *mut Layer) -> Status {
    guard(|| {
        // SAFETY: the caller vouches for its pointers.
        let (out, layer) = unsafe { (Out::handle(out)?, borrow(layer, "layer")?) };
        if layer.binds() {
            let problem = "has no weights to share: make another, they share kernels";
            return Err(Failure::argument("layer", problem));
        }
        let handle = layer.layer.handle();
        out.give(Layer {
            names: names(&handle),
            layer: handle,
            device: layer.device.clone(),
            target: layer.target,
            bound: None,
        });
        Ok(())
    })
}

/// Copies the spec of a layer. Free it by moesaic_spec_free.
///
/// # Safety
/// `layer` is live; `out` is valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_layer_spec(layer: *const Layer, out: *mut *mut Spec) -> Status {
    guard(|| {
        // SAFETY: the caller vouches for its pointers.
        let (out, layer) = unsafe { (Out::handle(out)?, borrow(layer, "layer")?) };
        out.give(Spec::new(layer.layer.spec().clone()));
        Ok(())
    })
}

/// Returns the number of tensors that you may name: those of calls, and weights with their
/// gradients, on a mesh this rank's. 0 for NULL.
///
/// # Safety
/// `layer` is NULL or live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_layer_tensor_count(layer: *const Layer) -> usize {
    // SAFETY: the caller vouches for it.
    unsafe { layer.as_ref() }.map_or(0, |layer| layer.names.len())
}

/// Writes name, type, owner and shape of a tensor by its number, for a call of `tokens` tokens.
///
/// # Safety
/// `layer` is live; `out` is valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_layer_tensor(
    layer: *const Layer,
    number: usize,
    tokens: usize,
    out: *mut TensorInfo,
) -> Status {
    guard(|| {
        // SAFETY: the caller vouches for its pointers.
        let (out, layer) = unsafe { (Out::new(out, "out")?, borrow(layer, "layer")?) };
        out.set(layer.info(number, tokens)?);
        Ok(())
    })
}

/// As moesaic_layer_tensor, by name.
///
/// # Safety
/// `layer` is live, `name` ends in NUL; `out` is valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_layer_find(
    layer: *const Layer,
    name: *const c_char,
    tokens: usize,
    out: *mut TensorInfo,
) -> Status {
    guard(|| {
        // SAFETY: the caller vouches for its pointers.
        let (out, layer, name) = unsafe {
            let out = Out::new(out, "out")?;
            (out, borrow(layer, "layer")?, text(name, "name")?)
        };
        out.set(layer.info(layer.number(name)?, tokens)?);
        Ok(())
    })
}

/// Replaces a weight, on a mesh this rank's part of it, by a copy of a tensor in host memory. Waits
/// for the calls of all handles.
///
/// # Safety
/// `layer` is live, `tensor` is valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_layer_set_weight(
    layer: *const Layer,
    tensor: *const Tensor,
) -> Status {
    guard(|| {
        // SAFETY: the caller vouches for its pointers.
        let (layer, given) = unsafe {
            let layer = borrow(layer, "layer")?;
            (layer, Given::read(borrow(tensor, "tensor")?)?)
        };
        if layer.binds() {
            let problem = "reads weights where they are bound: write there";
            return Err(Failure::argument("layer", problem));
        }
        // SAFETY: the caller vouches for the tensor.
        let host = unsafe { given.host() }?;
        Ok(layer.layer.set_weight(given.name, &host)?)
    })
}

/// Copies the gradient of a weight, as f32, to `count` elements of host memory, which must be as
/// many as the weight has. `name` is that of the weight. On a mesh it is this rank's part.
///
/// # Safety
/// `layer` is live, `name` ends in NUL, `data` has room for `count` elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_layer_gradient(
    layer: *const Layer,
    name: *const c_char,
    data: *mut f32,
    count: usize,
) -> Status {
    guard(|| {
        // SAFETY: the caller vouches for its pointers.
        let (layer, name) = unsafe { (borrow(layer, "layer")?, text(name, "name")?) };
        if layer.binds() {
            let problem = "writes gradients where they are bound: read them there";
            return Err(Failure::argument("layer", problem));
        }
        check_trained(layer.tensors(), name)?;
        let gradient = layer.layer.gradient(name)?.to_f32();
        // SAFETY: the caller vouches for the room.
        unsafe { copy_gradient(&gradient, data, count) }
    })
}

/// Refuses a name that is no weight's, or that of a weight without gradient, by names that one may
/// ask for.
pub(crate) fn check_trained(tensors: &[LayerTensor], name: &str) -> Result<(), Failure> {
    let gradients = tensors
        .iter()
        .filter(|one| one.role == Role::WeightGradient);
    let trained: Vec<&str> = gradients.filter_map(LayerTensor::weight).collect();
    // A layer made for inference, and frozen weights, have errors of their own.
    let is_weight = |one: &LayerTensor| one.role == Role::Weight && one.name == name;
    if trained.is_empty() || trained.contains(&name) || tensors.iter().any(is_weight) {
        return Ok(());
    }
    let known = trained.join(", ");
    let problem = format!("is `{name}`, expected a weight that has a gradient: {known}");
    Err(Failure::argument("name", problem))
}

/// Copies a gradient to memory of the caller's.
///
/// # Safety
/// `data` is NULL or has room for `count` elements.
pub(crate) unsafe fn copy_gradient(
    gradient: &[f32],
    data: *mut f32,
    count: usize,
) -> Result<(), Failure> {
    if gradient.len() != count {
        let problem = format!("is {count}, the gradient has {} elements", gradient.len());
        return Err(Failure::argument("count", problem));
    }
    if data.is_null() && count > 0 {
        return Err(Failure::Null("data"));
    }
    // SAFETY: the caller vouches for the room.
    unsafe { std::ptr::copy_nonoverlapping(gradient.as_ptr(), data, count) };
    Ok(())
}

/// Makes all gradients of a training layer zero, where backward passes only add.
///
/// # Safety
/// `layer` is live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_layer_zero_gradients(layer: *const Layer) -> Status {
    guard(|| {
        // SAFETY: the caller vouches for its pointers.
        let layer = unsafe { borrow(layer, "layer") }?;
        if layer.binds() {
            let problem = "writes gradients where they are bound: make them zero there";
            return Err(Failure::argument("layer", problem));
        }
        Ok(layer.layer.zero_gradients()?)
    })
}

/// Sums gradients over the ranks that hold the same weights, and with `average` not 0 divides by
/// the number of ranks. Does nothing without ranks. Call it after the last backward of a step.
///
/// # Safety
/// `layer` is live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_layer_reduce_gradients(
    layer: *const Layer,
    average: c_int,
) -> Status {
    guard(|| {
        // SAFETY: the caller vouches for its pointers.
        let layer = unsafe { borrow(layer, "layer") }?;
        Ok(match average {
            0 => layer.layer.reduce_gradients(),
            _ => layer.layer.average_gradients(),
        }?)
    })
}

/// Sets the strategy of the following calls of a layer over ranks, in the words of
/// docs/DISTRIBUTED.md: "r=2,overlap_degree=4,all_to_all=2dh". Results stay the same up to the
/// rounding of sums. All ranks pass the same text.
///
/// # Safety
/// `layer` is live and used by no other thread meanwhile; `strategy` ends in NUL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_layer_set_strategy(
    layer: *mut Layer,
    strategy: *const c_char,
) -> Status {
    guard(|| {
        // SAFETY: the caller vouches for its pointers.
        let (layer, words) = unsafe { (layer.as_mut(), text(strategy, "strategy")?) };
        let layer = layer.ok_or(Failure::Null("layer"))?;
        let strategy: Result<Strategy, _> = words.parse();
        let strategy = strategy
            .map_err(|error| Failure::argument("strategy", format!("is `{words}`: {error}")))?;
        Ok(layer.layer.set_strategy(strategy)?)
    })
}

/// Frees a layer; NULL is allowed. States of its forward passes may be freed before or after.
///
/// # Safety
/// `layer` is NULL or live, and no other thread uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_layer_free(layer: *mut Layer) {
    // SAFETY: the caller vouches for it.
    unsafe { free(layer) }
}
