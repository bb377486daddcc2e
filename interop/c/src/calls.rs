//! Calls of layers on memory of the caller's.

use crate::layer::Layer;
use crate::pointers::{Out, borrow, free, slice};
use crate::status::{Failure, Status, guard};
use crate::tensors::{Given, Tensor, check_tokens};
use moesaic::Ptr;
use moesaic::{Buffer, LayerCall, LayerTensor, LayerTensorRole as Role};
use moesaic::{RawBackward, RawCall, RngKey as Key};
use std::ffi::c_int;

/// A call. Tensors are on the layer's device: host memory for a CPU.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Call {
    /// The number of tokens T; 0 is allowed.
    pub tokens: usize,
    /// Inputs, "x" [T, model_dim] at least, and the outputs that you want, such as "y"
    /// [T, output_dim] in the spec's activation type, "topk_ids" [T, K] i32, "topk_weights" [T, K]
    /// f32, "counts" [E] i64. moesaic_layer_tensor lists them. A result has memory of its own.
    pub tensors: *const Tensor,
    /// The number of tensors.
    pub tensor_count: usize,
    /// The capacity factor of this call; 0 is the spec's.
    pub capacity_factor: f64,
}

/// The position of a training call. All random numbers follow from it.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct RngKey {
    /// The seed of the run.
    pub seed: u64,
    /// The optimizer step, or micro-batch.
    pub step: u64,
    /// The layer in its model.
    pub layer: u64,
    /// The number of this call's first token in the whole batch; on a mesh that of the first rank.
    pub first_token: u64,
}

/// The state that a training call keeps for backward.
pub struct Saved {
    saved: moesaic::Saved,
    /// Packed copies of strided inputs, which backward reads.
    _copies: Vec<Buffer>,
}

/// The tensors of a call, checked, with packed copies of strided ones.
struct Prepared<'a> {
    tensors: Vec<(&'a str, Ptr)>,
    copies: Vec<PackedCopy<'a>>,
}

struct PackedCopy<'a> {
    given: Given<'a>,
    buffer: Buffer,
    written: bool,
}

impl Prepared<'_> {
    /// Copies results to where the caller wants them, and returns the copies of inputs.
    fn finish(self) -> Vec<Buffer> {
        for copy in self.copies.iter().filter(|copy| copy.written) {
            // SAFETY: the buffer has room for every element of the caller's tensor, and a strided
            // tensor is on the host (`Layer::prepare`).
            unsafe { copy.given.scatter(host(&copy.buffer)) };
        }
        self.copies.into_iter().map(|copy| copy.buffer).collect()
    }
}

/// Returns whether a call writes tensors of a role.
fn is_written(role: Role) -> bool {
    !matches!(role, Role::Input | Role::OutputGradient)
}

/// Returns the address of a buffer on a CPU.
fn host(buffer: &Buffer) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(buffer.ptr().0 as usize)
}

impl Layer {
    /// Checks the tensors of a call.
    ///
    /// # Safety
    /// The tensors are valid, and stay so during the call.
    unsafe fn prepare<'a>(
        &self,
        tokens: usize,
        given: Vec<Given<'a>>,
    ) -> Result<Prepared<'a>, Failure> {
        check_tokens(tokens)?;
        let mut prepared = Prepared {
            tensors: Vec::with_capacity(given.len()),
            copies: Vec::new(),
        };
        for given in &given {
            let tensor = self.find(given.name)?;
            given.check(tensor, tokens)?;
        }
        self.check_apart(&given)?;
        for given in given {
            let tensor = self.find(given.name)?;
            let (role, name) = (tensor.role, given.name);
            if role == Role::Weight || (role == Role::WeightGradient && self.binds()) {
                let problem = match self.binds() {
                    true => "is named in a call: bind it by moesaic_layer_bind",
                    false => "is in the layer's memory: replace it by moesaic_layer_set_weight",
                };
                return Err(Failure::tensor(name, problem));
            }
            let written = is_written(role);
            if !written {
                self.check_ids(tensor, &given)?;
            }
            // With an external router the layer may rescale these in place.
            let written = written || name == "topk_weights";
            if given.strides.is_none() {
                prepared.tensors.push((name, Ptr(given.data as u64)));
                continue;
            }
            if !self.on_host() {
                let problem = format!("has strides, which calls on {} do not take", self.target);
                return Err(Failure::tensor(name, problem + ": copy it packed"));
            }
            if written {
                given.check_distinct()?;
            }
            let buffer = self.device.alloc(given.bytes());
            let buffer = buffer.map_err(moesaic::Error::from)?;
            // Outputs, too: a pass that adds to a gradient reads it.
            // SAFETY: the buffer has room for every element; the caller vouches for the tensor.
            unsafe { given.gather(host(&buffer)) };
            prepared.tensors.push((name, buffer.ptr()));
            prepared.copies.push(PackedCopy {
                given,
                buffer,
                written,
            });
        }
        Ok(prepared)
    }

    /// Refuses a tensor that the pass would neither read nor write, so that no caller waits for a
    /// result that never comes.
    fn check_pass(&self, call: LayerCall, given: &[Given<'_>]) -> Result<(), Failure> {
        for given in given {
            let tensor = self.find(given.name)?;
            if matches!(tensor.role, Role::OutputGradient | Role::InputGradient) {
                let problem = "is no tensor of a forward pass: name it in moesaic_backward";
                return Err(Failure::tensor(given.name, problem));
            }
            // Training has every output, or the layer does not train, of which the engine has an
            // error.
            let known = call == LayerCall::ForwardTrain || tensor.is_of(call);
            if tensor.role == Role::Output && !known {
                let function = match tensor.is_of(LayerCall::Forward) {
                    true => "moesaic_forward",
                    false => "moesaic_forward_train",
                };
                let problem = format!("is not written by this call: name it in {function}");
                return Err(Failure::tensor(given.name, problem));
            }
        }
        Ok(())
    }

    /// Refuses a call that does not name a tensor that it reads.
    fn check_complete(
        &self,
        tokens: usize,
        named: &[(&str, Ptr)],
        is_read: impl Fn(&LayerTensor) -> bool,
    ) -> Result<(), Failure> {
        let is_named = |name: &str| named.iter().any(|(known, _)| *known == name);
        let mut tensors = self.tensors().iter();
        match tensors.find(|one| is_read(one) && !is_named(&one.name)) {
            None => Ok(()),
            Some(missing) => {
                let (dtype, shape) = (missing.dtype, missing.shape(tokens));
                let problem =
                    format!("is missing: name it in the call, {dtype} of shape {shape:?}");
                Err(Failure::tensor(&missing.name, problem))
            }
        }
    }

    /// Refuses a result that lies over another tensor of the call. Copies stand in for strided ones.
    fn check_apart(&self, given: &[Given<'_>]) -> Result<(), Failure> {
        let packed = given.iter().filter(|one| one.strides.is_none());
        let packed: Vec<&Given<'_>> = packed.collect();
        for (number, one) in packed.iter().enumerate() {
            for other in packed[..number].iter().filter(|other| one.overlaps(other)) {
                if is_written(self.find(one.name)?.role) || is_written(self.find(other.name)?.role)
                {
                    let problem = format!(
                        "lies over `{}`: the call writes one and reads the other; give each \
                         memory of its own",
                        other.name
                    );
                    return Err(Failure::tensor(one.name, problem));
                }
            }
        }
        Ok(())
    }

    /// Returns the addresses of a call, with those that are bound: all of `needed` must be.
    fn with_bound<'a>(
        &self,
        own: &[(&'a str, Ptr)],
        bound: Option<&'a [(String, Ptr)]>,
        needed: &[Role],
    ) -> Result<Vec<(&'a str, Ptr)>, Failure> {
        let mut all = own.to_vec();
        let Some(bound) = bound else { return Ok(all) };
        let is_bound = |name: &str| bound.iter().any(|(known, _)| known == name);
        let tensors = self.tensors().iter();
        let mut needed = tensors.filter(|tensor| needed.contains(&tensor.role));
        if let Some(tensor) = needed.find(|tensor| !is_bound(&tensor.name)) {
            let problem = "is not bound: give it to moesaic_layer_bind";
            return Err(Failure::tensor(&tensor.name, problem));
        }
        all.extend(
            bound
                .iter()
                .map(|(name, address)| (name.as_str(), *address)),
        );
        Ok(all)
    }

    /// Runs a pass on the tensors of a call, and returns its result with the copies of inputs.
    ///
    /// # Safety
    /// The call is valid, and its memory stays so as [`RawCall::new`] asks.
    unsafe fn pass<T>(
        &self,
        kind: LayerCall,
        call: &Call,
        run: impl FnOnce(RawCall<'_>) -> Result<T, moesaic::EngineError>,
    ) -> Result<(T, Vec<Buffer>), Failure> {
        // SAFETY: the caller vouches for the call.
        let given = unsafe {
            let tensors = slice(call.tensors, call.tensor_count, "tensors")?;
            Given::read_all(tensors)?
        };
        self.check_pass(kind, &given)?;
        // SAFETY: as above.
        let prepared = unsafe { self.prepare(call.tokens, given) }?;
        let is_read = |tensor: &LayerTensor| tensor.role == Role::Input && tensor.is_of(kind);
        self.check_complete(call.tokens, &prepared.tensors, is_read)?;
        let bound = self.bound();
        let bound = bound.as_ref().map(|bound| bound.as_slice());
        let tensors = self.with_bound(&prepared.tensors, bound, &[Role::Weight])?;
        let capacity_factor = (call.capacity_factor != 0.0).then_some(call.capacity_factor);
        // SAFETY: the tensors have the sizes of the layer's list and ids are in range.
        let raw = unsafe { RawCall::new(call.tokens, &tensors) };
        let result = run(raw.with_capacity_factor(capacity_factor))?;
        Ok((result, prepared.finish()))
    }
}

impl From<RngKey> for Key {
    fn from(key: RngKey) -> Key {
        let RngKey {
            seed,
            step,
            layer,
            first_token,
        } = key;
        Key {
            seed,
            step,
            layer,
            first_token,
        }
    }
}

/// Evaluates a layer. On a CPU it is done when this returns; on a GPU it is launched, and memory of
/// the call must stay until moesaic_engine_synchronize.
///
/// # Safety
/// `layer` is live, `call` and its tensors are valid; on a GPU ids of experts and tokens are in
/// range.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_forward(layer: *const Layer, call: *const Call) -> Status {
    guard(|| {
        // SAFETY: the caller vouches for its pointers.
        let (layer, call) = unsafe { (borrow(layer, "layer")?, borrow(call, "call")?) };
        // SAFETY: as above.
        unsafe { layer.pass(LayerCall::Forward, call, |raw| layer.layer.forward(raw)) }?;
        Ok(())
    })
}

/// Routes as moesaic_forward does and stops there. Name the parts of the record that you want:
/// "topk_ids", "topk_weights", "counts", "locations", "offsets", and with a capacity "capacity" and
/// "overflow".
///
/// # Safety
/// As moesaic_forward.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_route(layer: *const Layer, call: *const Call) -> Status {
    guard(|| {
        // SAFETY: the caller vouches for its pointers.
        let (layer, call) = unsafe { (borrow(layer, "layer")?, borrow(call, "call")?) };
        // SAFETY: as above.
        unsafe { layer.pass(LayerCall::Route, call, |raw| layer.layer.route(raw)) }?;
        Ok(())
    })
}

/// Runs a training call, with noise, dropout and losses where the spec has them, and keeps the
/// state for moesaic_backward in `out`. Free it by moesaic_saved_free. `key` may be NULL for zeros.
/// Packed inputs must stay valid and unchanged until the last backward of the state; of strided
/// ones the state keeps a copy.
///
/// # Safety
/// As moesaic_forward; `key` is NULL or valid; `out` is valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_forward_train(
    layer: *const Layer,
    call: *const Call,
    key: *const RngKey,
    out: *mut *mut Saved,
) -> Status {
    guard(|| {
        // SAFETY: the caller vouches for its pointers.
        let (out, layer, call, key) = unsafe {
            let out = Out::handle(out)?;
            let key = key.as_ref().copied().unwrap_or_default();
            (out, borrow(layer, "layer")?, borrow(call, "call")?, key)
        };
        // SAFETY: as in `moesaic_forward`.
        let ((_, saved), copies) = unsafe {
            layer.pass(LayerCall::ForwardTrain, call, |raw| {
                layer.layer.forward_train(raw, key.into())
            })
        }?;
        out.give(Saved {
            saved,
            _copies: copies,
        });
        Ok(())
    })
}

/// Runs backward of a training call. `tensors` has "dy" [T, output_dim], in the spec's activation
/// type, and the results that you want: "dx" [T, model_dim] of the same type, "grad.topk_weights"
/// [T, K] f32. Gradients of weights are f32, those of experts' matrices of the spec's
/// `expert_gradients`: the layer keeps them (moesaic_layer_gradient), or writes them where they are
/// bound. They are overwritten, or with `accumulate` not 0 added to. A state may run backward
/// several times.
///
/// # Safety
/// `layer` and `saved` are live, `tensors` has `count` valid tensors.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_backward(
    layer: *const Layer,
    saved: *const Saved,
    tensors: *const Tensor,
    count: usize,
    accumulate: c_int,
) -> Status {
    guard(|| {
        // SAFETY: the caller vouches for its pointers.
        let (layer, saved, given) = unsafe {
            let (layer, saved) = (borrow(layer, "layer")?, borrow(saved, "saved")?);
            let tensors = slice(tensors, count, "tensors")?;
            (layer, saved, Given::read_all(tensors)?)
        };
        // SAFETY: as above.
        let prepared = unsafe { layer.prepare(saved.saved.tokens(), given) }?;
        layer.check_complete(saved.saved.tokens(), &prepared.tensors, |tensor| {
            tensor.role == Role::OutputGradient
        })?;
        let bound = layer.bound();
        let bound = bound.as_ref().map(|bound| bound.as_slice());
        let needed = [Role::Weight, Role::WeightGradient];
        let tensors = layer.with_bound(&prepared.tensors, bound, &needed)?;
        // SAFETY: the tensors have the sizes of the layer's list.
        let call = unsafe { RawBackward::new(&tensors) };
        layer.layer.backward(&saved.saved, call, accumulate != 0)?;
        prepared.finish();
        Ok(())
    })
}

/// Frees a state; NULL is allowed.
///
/// # Safety
/// `saved` is NULL or live, and no other thread uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_saved_free(saved: *mut Saved) {
    // SAFETY: the caller vouches for it.
    unsafe { free(saved) }
}
