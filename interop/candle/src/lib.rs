//! A moesaic layer as a differentiable operation of candle.
//!
//! candle's custom operations take at most three inputs, an expert layer has
//! more weights than that. So each weight is handed over by an operation of
//! its own: its inputs are the weight and a *link*, a tensor of one number
//! that ties the operations together, and it gives the next link. Forward
//! copies the weight to the layer; backward gives the gradient that the layer
//! found. The layer itself is an operation of two inputs, `x` and the last
//! link. Nothing is concatenated or kept twice, and candle's own autograd
//! orders it all.
//!
//! ```text
//! link ──hand(router)──> link ──hand(up)──> link ──hand(down)──> link ─┐
//! x ──────────────────────────────────────────────────────────────── layer ──> y
//! ```
//!
//! Tensors lie on candle's CPU device; the layer may run on any target.

use candle_core::{
    CpuStorage, CustomOp2, DType, Device, Error, Layout, Result, Shape, Tensor, Var,
};
use moesaic::spec::canonical_tensors;
use moesaic::{Counters, Engine, HostTensor, Input, Layer, LayerSpec, Saved, Training, Weights};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

/// A Mixture-of-Experts layer with its weights as candle variables.
pub struct MoeLayer {
    inner: Arc<Inner>,
    weights: Vec<(String, Var)>,
}

/// The compiled layer; weights and their gradients lie in it, so that one
/// pass uses it at a time.
struct Inner {
    layer: Layer,
    turn: Mutex<()>,
}

/// One forward pass, for the backward passes that belong to it.
#[derive(Default)]
struct Call {
    saved: Mutex<Option<Saved>>,
    gradients: Mutex<BTreeMap<String, HostTensor<'static>>>,
}

impl MoeLayer {
    /// The layer of `spec`; `weights` are by canonical name, of the spec's
    /// shapes and dtypes, for every tensor of floats.
    ///
    /// # Errors
    /// When a weight is missing or misshapen, or the kernels do not compile.
    pub fn new(
        engine: &Engine,
        spec: &LayerSpec,
        weights: BTreeMap<String, Var>,
    ) -> Result<MoeLayer> {
        let mut list = Vec::new();
        for tensor in canonical_tensors(spec) {
            let var = weights.get(&tensor.name);
            let missing = || Error::Msg(format!("no weight `{}`", tensor.name));
            list.push((tensor.name.clone(), var.cloned().ok_or_else(missing)?));
        }
        let hosts: Result<Vec<HostTensor>> = list.iter().map(|(_, var)| to_host(var)).collect();
        let mut given = Weights::new();
        for ((name, _), host) in list.iter().zip(hosts?) {
            given.insert(name, host);
        }
        let layer = engine
            .training_layer(spec, &given, Training::default())
            .map_err(Error::wrap)?;
        let turn = Mutex::default();
        Ok(MoeLayer {
            inner: Arc::new(Inner { layer, turn }),
            weights: list,
        })
    }

    /// The variables by canonical name, for an optimizer.
    pub fn weights(&self) -> impl Iterator<Item = (&str, &Var)> {
        self.weights.iter().map(|(name, var)| (&**name, var))
    }

    /// `x [.., d]` to `[.., d_out]`, differentiable in `x` and in the weights.
    /// The gradients of the spec's auxiliary losses, times their coefficients,
    /// are added on the way back.
    ///
    /// # Errors
    /// When `x` has another width or dtype than the layer.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let call = Arc::new(Call::default());
        let _turn = lock(&self.inner.turn);
        let mut link = Tensor::zeros(1, DType::F32, &Device::Cpu)?;
        for (name, weight) in &self.weights {
            let hand = Hand {
                inner: self.inner.clone(),
                call: call.clone(),
                name: name.clone(),
            };
            link = link.apply_op2(&weight.as_tensor().contiguous()?, hand)?;
        }
        let mut shape = x.dims().to_vec();
        let width = shape.pop().unwrap_or(0);
        let rows = x.reshape(((), width))?.contiguous()?;
        let inner = self.inner.clone();
        let y = rows.apply_op2(&link, Whole { inner, call })?;
        shape.push(y.dim(1)?);
        y.reshape(shape)
    }
}

/// Hands one weight to the layer, and its gradient back.
struct Hand {
    inner: Arc<Inner>,
    call: Arc<Call>,
    name: String,
}

impl CustomOp2 for Hand {
    fn name(&self) -> &'static str {
        "moesaic-weight"
    }

    fn cpu_fwd(
        &self,
        _link: &CpuStorage,
        _: &Layout,
        weight: &CpuStorage,
        layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let host = view(weight, layout)?;
        self.inner
            .layer
            .set_weight(&self.name, &host)
            .map_err(Error::wrap)?;
        Ok((CpuStorage::F32(vec![0.0]), Shape::from(1)))
    }

    fn bwd(
        &self,
        link: &Tensor,
        weight: &Tensor,
        _: &Tensor,
        _: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let gradients = lock(&self.call.gradients);
        let gradient = gradients
            .get(&self.name)
            .map(|g| Tensor::from_vec(g.to_f32(), weight.shape(), weight.device()))
            .transpose()?
            .map(|g| g.to_dtype(weight.dtype()))
            .transpose()?;
        Ok((Some(link.zeros_like()?), gradient))
    }
}

/// The layer, from rows `[T, d]` to rows `[T, d_out]`.
struct Whole {
    inner: Arc<Inner>,
    call: Arc<Call>,
}

impl CustomOp2 for Whole {
    fn name(&self) -> &'static str {
        "moesaic-layer"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        layout: &Layout,
        _link: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let x = view(x, layout)?;
        let mut input = Input {
            tokens: layout.dims()[0],
            tensors: BTreeMap::new(),
        };
        input.insert("x", x);
        let (output, saved) = self
            .inner
            .layer
            .forward_train(&input, &["y"], Counters::default())
            .map_err(Error::wrap)?;
        *lock(&self.call.saved) = Some(saved);
        let y = output.y();
        Ok((to_storage(y)?, Shape::from(y.shape.as_slice())))
    }

    fn bwd(
        &self,
        x: &Tensor,
        link: &Tensor,
        _: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let _turn = lock(&self.inner.turn);
        let saved = lock(&self.call.saved);
        let none = || Error::Msg("backward came before forward".to_string());
        let layer = &self.inner.layer;
        let back = layer.backward(saved.as_ref().ok_or_else(none)?, &to_host(dy)?, false);
        let output = back.map_err(Error::wrap)?;
        *lock(&self.call.gradients) = layer.gradients().map_err(Error::wrap)?;
        let dx = output.get("dx").ok_or_else(none)?;
        let dx = Tensor::from_vec(dx.to_f32(), x.shape(), x.device())?.to_dtype(x.dtype())?;
        Ok((Some(dx), Some(link.zeros_like()?)))
    }
}

/// A panic elsewhere leaves values that the next call replaces.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// The elements of a contiguous tensor, where they lie.
fn view<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<HostTensor<'a>> {
    let contiguous = layout.contiguous_offsets();
    let (start, end) = contiguous.ok_or_else(|| Error::Msg("not contiguous".to_string()))?;
    let shape = layout.dims();
    match storage {
        CpuStorage::F32(data) => Ok(HostTensor::new(shape, &data[start..end])),
        CpuStorage::F16(data) => Ok(HostTensor::new(shape, &data[start..end])),
        CpuStorage::BF16(data) => Ok(HostTensor::new(shape, &data[start..end])),
        _ => candle_core::bail!("a layer takes f32, f16 or bf16"),
    }
}

/// The elements of a tensor, copied.
fn to_host(tensor: &Tensor) -> Result<HostTensor<'static>> {
    let (shape, flat) = (tensor.dims(), tensor.flatten_all()?);
    match tensor.dtype() {
        DType::F32 => Ok(HostTensor::owned(shape, flat.to_vec1::<f32>()?)),
        DType::F16 => Ok(HostTensor::owned(
            shape,
            flat.to_vec1::<moesaic::half::f16>()?,
        )),
        DType::BF16 => Ok(HostTensor::owned(
            shape,
            flat.to_vec1::<moesaic::half::bf16>()?,
        )),
        other => candle_core::bail!("a layer takes f32, f16 or bf16, not {other:?}"),
    }
}

fn to_storage(host: &HostTensor<'_>) -> Result<CpuStorage> {
    let none = || Error::Msg("the layer gave integers".to_string());
    match host.dtype {
        moesaic::DType::F32 => host.to_vec().map(CpuStorage::F32),
        moesaic::DType::F16 => host.to_vec().map(CpuStorage::F16),
        moesaic::DType::Bf16 => host.to_vec().map(CpuStorage::BF16),
        _ => None,
    }
    .ok_or_else(none)
}
