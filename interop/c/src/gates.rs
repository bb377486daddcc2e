//! Several routers over one set of experts, and layers over another layer's experts.

use crate::calls::{Call, RngKey};
use crate::engine::Engine;
use crate::layer::{Layer, check_ids, check_trained, copy_gradient};
use crate::options::LayerOptions;
use crate::pointers::{Out, borrow, free, slice, text};
use crate::spec::Spec;
use crate::status::{Failure, Status, guard};
use crate::tensors::{Given, Tensor, check_tokens, read_weights};
use moesaic::experts::{MultiGate as Gates, MultiSaved as Kept, SavedByToken};
use moesaic::{Bytes, DType, EngineError, Input, Output, Tensors};
use moesaic::{LayerTensor, LayerTensorRole as Role};
use std::ffi::{c_char, c_int};

/// Makes a layer whose routed experts are those of `bank`, in the same memory. Router, projections
/// and shared experts are the layer's own, copied from `weights`, host memory without the experts.
/// The spec may differ in all but the experts. The layer trains if `bank` does, and has its mesh,
/// all of whose ranks make it. `bank` has weights of its own, and may be freed before the layer.
///
/// The experts of both have one gradient: begin a step with moesaic_layer_zero_gradients of each,
/// and let every backward pass add. Over ranks reduce the gradients of `bank` last. Free the layer
/// by moesaic_layer_free.
///
/// # Safety
/// Handles are live, `weights` has `count` valid tensors; `out` is valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_layer_over_experts_of(
    engine: *const Engine,
    bank: *const Layer,
    spec: *const Spec,
    weights: *const Tensor,
    count: usize,
    out: *mut *mut Layer,
) -> Status {
    guard(|| {
        // SAFETY: the caller vouches for its pointers; weights outlive the copy that a layer makes.
        let (out, engine, bank, spec, weights) = unsafe {
            let out = Out::handle(out)?;
            let (engine, bank) = (borrow(engine, "engine")?, borrow(bank, "bank")?);
            let spec = borrow(spec, "spec")?;
            let weights = read_weights(&spec.spec, slice(weights, count, "weights")?)?;
            (out, engine, bank, spec, weights)
        };
        if bank.binds() {
            let problem = "has no weights of its own: bind the same experts in both layers";
            return Err(Failure::argument("bank", problem));
        }
        if let Some(expert) = weights.keys().find(|name| name.starts_with("experts.")) {
            let problem = "is the bank's: leave it out, or make a layer of its own";
            return Err(Failure::tensor(expert, problem));
        }
        let engine_layer = &bank.layer;
        let layer = engine
            .engine
            .layer_over_experts_of(engine_layer, &spec.spec, &weights)?;
        out.give(Layer::new(engine, layer));
        Ok(())
    })
}

/// The tensors of one router.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct TensorList {
    /// The tensors.
    pub tensors: *const Tensor,
    /// The number of tensors.
    pub count: usize,
}

/// Layers that differ in their routers and share experts, in one memory. A call runs all of them on
/// the same tokens, in one pass over the experts where moesaic_multi_gate_in_one_pass says so.
pub struct MultiGate {
    gates: Gates,
}

/// The state that a training call of a moesaic_multi_gate keeps for backward.
pub struct MultiSaved {
    saved: By,
    tokens: usize,
}

enum By {
    /// Every layer ran on all tokens.
    Layer(Kept),
    /// Each token ran by one layer.
    Token(SavedByToken),
}

/// The name of the input with the number of each token's router.
const ROUTER_IDS: &str = "router_ids";

/// The tensors of a call, checked.
struct Prepared<'a> {
    input: Input<'a>,
    router_ids: Option<Vec<i32>>,
    results: Vec<Given<'a>>,
}

impl MultiGate {
    fn count(&self) -> usize {
        self.gates.layers().len()
    }

    /// Returns the tensors of a layer, which all layers have.
    fn tensors(&self) -> &[LayerTensor] {
        self.gates.layers()[0].tensors()
    }

    fn find(&self, name: &str) -> Result<&LayerTensor, Failure> {
        let found = self.tensors().iter().find(|tensor| tensor.name == name);
        found.ok_or_else(|| Failure::tensor(name, "is none of the layers'"))
    }

    fn gate(&self, gate: usize) -> Result<&moesaic::Layer, Failure> {
        self.gates.layers().get(gate).ok_or_else(|| {
            let problem = format!("is {gate}, there are {} routers", self.count());
            Failure::argument("gate", problem)
        })
    }

    /// Returns the shape of a tensor that each layer has: the layers', then its own. Where each
    /// token runs by one layer, there is one.
    fn shape(&self, tensor: &LayerTensor, tokens: usize, by_token: bool) -> Vec<usize> {
        let mut shape = match by_token {
            true => Vec::new(),
            false => vec![self.count()],
        };
        shape.extend(tensor.shape(tokens));
        shape
    }

    /// Checks the tensors of a call: its input, and the results that it asks for.
    ///
    /// # Safety
    /// The inputs are valid on the host, and stay so for `'a`.
    unsafe fn read<'a>(
        &self,
        tokens: usize,
        given: Vec<Given<'a>>,
    ) -> Result<Prepared<'a>, Failure> {
        check_tokens(tokens)?;
        let mut input = Input {
            tokens,
            tensors: Tensors::new(),
            capacity_factor: None,
        };
        let (ids, given): (Vec<_>, Vec<_>) = given.into_iter().partition(|g| g.name == ROUTER_IDS);
        let router_ids = match ids.first() {
            None => None,
            Some(ids) => {
                ids.check_kind(DType::I32, &[tokens])?;
                // SAFETY: the caller vouches for it.
                Some(unsafe { ids.host() }?.to_vec().unwrap_or_default())
            }
        };
        let mut results = Vec::new();
        for given in given {
            let tensor = self.find(given.name)?;
            match tensor.role {
                Role::Input => {
                    given.check(tensor, tokens)?;
                    check_ids(tensor, &given)?;
                    // SAFETY: the caller vouches for it.
                    input.insert(given.name, unsafe { given.host() }?);
                }
                Role::Output => {
                    let shape = self.shape(tensor, tokens, router_ids.is_some());
                    given.check_kind(tensor.dtype, &shape)?;
                    given.check_distinct()?;
                    results.push(given);
                }
                _ => return Err(Failure::tensor(given.name, "is not of such a call")),
            }
        }
        Ok(Prepared {
            input,
            router_ids,
            results,
        })
    }
}

/// Copies a result of every layer to where the caller wants them, one behind another.
///
/// # Safety
/// The tensor is valid on the host for a write.
unsafe fn give(given: &Given<'_>, each: &[Tensors<'_>]) {
    let parts = each.iter().map(|own| &*own[given.name].data);
    let all: Bytes = parts.collect::<Vec<_>>().concat().into();
    // SAFETY: the shapes of all layers add up to the tensor's, which was checked.
    unsafe { given.scatter(all.as_ptr()) };
}

/// Refuses a router's weight among those of all layers, and another one among a router's: nobody
/// would read it.
fn check_places(weights: &Tensors<'_>, routers: &[Tensors<'_>]) -> Result<(), Failure> {
    let is_of_router = |name: &&String| name.starts_with("router.");
    if let Some(name) = weights.keys().find(is_of_router) {
        let problem = "is each router's own: give it in `routers`, and leave it out of `weights`";
        return Err(Failure::tensor(name, problem));
    }
    let mut given = routers.iter().flat_map(|router| router.keys());
    match given.find(|name| !is_of_router(name)) {
        Some(name) => {
            let problem = "is no router's: give it once for all, in `weights`";
            Err(Failure::tensor(name, problem))
        }
        None => Ok(()),
    }
}

/// Makes one layer per element of `routers`, the weights whose names begin with "router."; all
/// others are in `weights`, once for all. Host memory, which is copied. `options` may be NULL; over
/// ranks all of them call it with as many routers. Free it by moesaic_multi_gate_free.
///
/// # Safety
/// Handles are live, the lists have as many valid tensors as they say; `out` is valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_multi_gate_open(
    engine: *const Engine,
    spec: *const Spec,
    weights: *const Tensor,
    count: usize,
    routers: *const TensorList,
    router_count: usize,
    options: *const LayerOptions,
    out: *mut *mut MultiGate,
) -> Status {
    guard(|| {
        // SAFETY: the caller vouches for its pointers; weights outlive the copy that a layer makes.
        let (out, engine, spec, weights, routers, options) = unsafe {
            let out = Out::handle(out)?;
            let (engine, spec) = (borrow(engine, "engine")?, borrow(spec, "spec")?);
            let weights = read_weights(&spec.spec, slice(weights, count, "weights")?)?;
            let routers = slice(routers, router_count, "routers")?;
            let options = options.as_ref().copied().unwrap_or_default();
            (out, engine, spec, weights, routers, options)
        };
        if routers.is_empty() {
            let problem = "is 0: there is a layer for each router";
            return Err(Failure::argument("router_count", problem));
        }
        let router = |list: &TensorList| {
            // SAFETY: as above.
            unsafe { read_weights(&spec.spec, slice(list.tensors, list.count, "tensors")?) }
        };
        let routers: Vec<Tensors<'_>> = routers.iter().map(router).collect::<Result<_, _>>()?;
        check_places(&weights, &routers)?;
        // SAFETY: the caller vouches for the mesh.
        let options = unsafe { options.read() }?;
        let gates = engine
            .engine
            .multi_gate(&spec.spec, &weights, &routers, options)?;
        out.give(MultiGate { gates });
        Ok(())
    })
}

/// Returns 1 if a call runs all layers in one pass over the experts, else 0. They run one by one if
/// experts have a capacity, if the caller routes, over ranks, and for one router.
///
/// # Safety
/// `gates` is NULL or live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_multi_gate_in_one_pass(gates: *const MultiGate) -> c_int {
    // SAFETY: the caller vouches for it.
    unsafe { gates.as_ref() }.map_or(0, |gates| gates.gates.in_one_pass().into())
}

/// Evaluates every layer on the same tokens. Tensors are in host memory on any device: inputs as
/// those of moesaic_forward, and outputs with the number G of routers before the sizes that they
/// have there, such as "y" [G, T, output_dim] or "topk_ids" [G, T, K].
///
/// With the input "router_ids" [T] i32 each token runs by the router of that number alone, such as
/// one for each modality, and outputs have the sizes that they have for moesaic_forward. "counts"
/// then are sums over the routers.
///
/// # Safety
/// `gates` is live, `call` and its tensors are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_multi_gate_forward(
    gates: *const MultiGate,
    call: *const Call,
) -> Status {
    guard(|| {
        // SAFETY: the caller vouches for its pointers.
        let (gates, call) = unsafe { (borrow(gates, "gates")?, borrow(call, "call")?) };
        // SAFETY: as above.
        unsafe {
            pass(gates, call, |input, ids, names| {
                let (gates, input) = (&gates.gates, input.reading(names));
                let outputs = match ids {
                    None => gates.forward(input)?,
                    Some(ids) => vec![gates.forward_by_token(input, ids)?],
                };
                Ok((outputs, ()))
            })
        }
    })
}

/// Runs a training call of every layer on the same tokens, as moesaic_multi_gate_forward, and keeps
/// the state for moesaic_multi_gate_backward in `out`. `key` may be NULL for zeros; layers with one
/// key draw the same numbers. Free the state by moesaic_multi_saved_free.
///
/// # Safety
/// As moesaic_multi_gate_forward; `key` is NULL or valid; `out` is valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_multi_gate_forward_train(
    gates: *const MultiGate,
    call: *const Call,
    key: *const RngKey,
    out: *mut *mut MultiSaved,
) -> Status {
    guard(|| {
        // SAFETY: the caller vouches for its pointers.
        let (out, gates, call, key) = unsafe {
            let out = Out::handle(out)?;
            let key = key.as_ref().copied().unwrap_or_default();
            (out, borrow(gates, "gates")?, borrow(call, "call")?, key)
        };
        let run = |input: &Input<'_>, ids: Option<&[i32]>, names: &[&str]| {
            let (gates, input, key) = (&gates.gates, input.reading(names), key.into());
            Ok(match ids {
                None => {
                    let (outputs, saved) = gates.forward_train(input, key)?;
                    (outputs, By::Layer(saved))
                }
                Some(ids) => {
                    let (output, saved) = gates.forward_train_by_token(input, ids, key)?;
                    (vec![output], By::Token(saved))
                }
            })
        };
        // SAFETY: as above.
        let saved = unsafe { pass(gates, call, run) }?;
        let tokens = call.tokens;
        out.give(MultiSaved { saved, tokens });
        Ok(())
    })
}

/// Runs a pass on the tensors of a call, and returns its result.
///
/// # Safety
/// The call and its tensors are valid.
unsafe fn pass<T>(
    gates: &MultiGate,
    call: &Call,
    run: impl FnOnce(&Input<'_>, Option<&[i32]>, &[&str]) -> Result<(Vec<Output>, T), EngineError>,
) -> Result<T, Failure> {
    // SAFETY: the caller vouches for the call.
    let Prepared {
        mut input,
        router_ids,
        results,
    } = unsafe {
        let tensors = slice(call.tensors, call.tensor_count, "tensors")?;
        gates.read(call.tokens, Given::read_all(tensors)?)?
    };
    input.capacity_factor = (call.capacity_factor != 0.0).then_some(call.capacity_factor);
    let names: Vec<&str> = results.iter().map(|given| given.name).collect();
    let (outputs, result) = run(&input, router_ids.as_deref(), &names)?;
    let each: Vec<Tensors<'_>> = outputs.into_iter().map(|o| o.into_tensors()).collect();
    for given in &results {
        // SAFETY: the caller vouches for the tensor, whose shape was checked.
        unsafe { give(given, &each) };
    }
    Ok(result)
}

/// Runs backward of a training call, of every layer. `tensors` are in host memory: "dy" [G, T,
/// output_dim], and the results that you want, "dx" [G, T, model_dim] and "grad.topk_weights" [G,
/// T, K], the part of each router: the gradient of x is their sum. After a call with "router_ids"
/// they have no G. Gradients of weights stay in the layers (moesaic_multi_gate_gradient), those of
/// experts summed over the routers. They are overwritten, or with `accumulate` not 0 added to.
///
/// # Safety
/// `gates` and `saved` are live, `tensors` has `count` valid tensors.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_multi_gate_backward(
    gates: *const MultiGate,
    saved: *const MultiSaved,
    tensors: *const Tensor,
    count: usize,
    accumulate: c_int,
) -> Status {
    guard(|| {
        // SAFETY: the caller vouches for its pointers.
        let (gates, saved, given) = unsafe {
            let tensors = Given::read_all(slice(tensors, count, "tensors")?)?;
            (borrow(gates, "gates")?, borrow(saved, "saved")?, tensors)
        };
        for one in &given {
            let tensor = gates.find(one.name)?;
            if !matches!(tensor.role, Role::OutputGradient | Role::InputGradient) {
                return Err(Failure::tensor(one.name, "is not of a backward pass"));
            }
            let by_token = matches!(saved.saved, By::Token(_));
            one.check_kind(tensor.dtype, &gates.shape(tensor, saved.tokens, by_token))?;
        }
        let (dy, results): (Vec<_>, Vec<_>) = given.into_iter().partition(|one| one.name == "dy");
        let dy = dy
            .first()
            .ok_or_else(|| Failure::tensor("dy", "is missing"))?;
        results.iter().try_for_each(Given::check_distinct)?;
        // SAFETY: as above.
        let dy = unsafe { dy.host() }?;
        let accumulate = accumulate != 0;
        let outputs = match &saved.saved {
            By::Layer(kept) => {
                let each = of_each(gates.count(), &dy);
                gates.gates.backward(kept, &each, accumulate)?
            }
            By::Token(kept) => vec![gates.gates.backward_by_token(kept, &dy, accumulate)?],
        };
        let each: Vec<Tensors<'_>> = outputs.into_iter().map(|o| o.into_tensors()).collect();
        for given in &results {
            // SAFETY: as above.
            unsafe { give(given, &each) };
        }
        Ok(())
    })
}

/// Returns each layer's part of a tensor [G, ..].
fn of_each<'a>(layers: usize, all: &'a moesaic::Tensor<'_>) -> Vec<moesaic::Tensor<'a>> {
    let bytes = all.data.len() / layers;
    let part = |gate: usize| moesaic::Tensor {
        dtype: all.dtype,
        shape: all.shape[1..].to_vec(),
        data: Bytes::from(&all.data[gate * bytes..(gate + 1) * bytes]),
    };
    (0..layers).map(part).collect()
}

/// Copies the gradient of a weight, as f32, to `count` elements of host memory: of router `gate` for
/// a name that begins with "router.", else of all. Routers count from zero.
///
/// # Safety
/// `gates` is live, `name` ends in NUL, `data` has room for `count` elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_multi_gate_gradient(
    gates: *const MultiGate,
    gate: usize,
    name: *const c_char,
    data: *mut f32,
    count: usize,
) -> Status {
    guard(|| {
        // SAFETY: the caller vouches for its pointers.
        let (gates, name) = unsafe { (borrow(gates, "gates")?, text(name, "name")?) };
        let layer = gates.gate(gate)?;
        check_trained(gates.tensors(), name)?;
        let gradient = layer.gradient(name)?.to_f32();
        // SAFETY: the caller vouches for the room.
        unsafe { copy_gradient(&gradient, data, count) }
    })
}

/// Replaces a weight by a copy of a tensor in host memory: of router `gate` for a name that begins
/// with "router.", else of all.
///
/// # Safety
/// `gates` is live, `tensor` is valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_multi_gate_set_weight(
    gates: *const MultiGate,
    gate: usize,
    tensor: *const Tensor,
) -> Status {
    guard(|| {
        // SAFETY: the caller vouches for its pointers.
        let (gates, given) = unsafe {
            let gates = borrow(gates, "gates")?;
            (gates, Given::read(borrow(tensor, "tensor")?)?)
        };
        // SAFETY: the caller vouches for the tensor.
        let host = unsafe { given.host() }?;
        Ok(gates.gate(gate)?.set_weight(given.name, &host)?)
    })
}

/// Sums gradients over the ranks that hold the same weights, those of experts once, and with
/// `average` not 0 divides by the number of ranks. Does nothing without ranks.
///
/// # Safety
/// `gates` is live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_multi_gate_reduce_gradients(
    gates: *const MultiGate,
    average: c_int,
) -> Status {
    guard(|| {
        // SAFETY: the caller vouches for its pointers.
        let gates = unsafe { borrow(gates, "gates") }?;
        Ok(match average {
            0 => gates.gates.reduce_gradients(),
            _ => gates.gates.average_gradients(),
        }?)
    })
}

/// Frees the layers; NULL is allowed. States of their calls may be freed before or after.
///
/// # Safety
/// `gates` is NULL or live, and no other thread uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_multi_gate_free(gates: *mut MultiGate) {
    // SAFETY: the caller vouches for it.
    unsafe { free(gates) }
}

/// Frees a state; NULL is allowed.
///
/// # Safety
/// `saved` is NULL or live, and no other thread uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_multi_saved_free(saved: *mut MultiSaved) {
    // SAFETY: the caller vouches for it.
    unsafe { free(saved) }
}
