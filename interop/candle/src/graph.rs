//! The operations that a training call puts into candle's graph.

use crate::host::{lend, storage, tensor};
use crate::inner::Inner;
use candle_core::{CpuStorage, CustomOp2, Error, Layout, Result, Shape, Tensor};
use moesaic::Saved;
use moesaic::Tensor as HostTensor;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

/// One forward pass, for the backward passes that belong to it.
pub struct Call {
    pub inner: Arc<Inner>,
    pub saved: Mutex<Saved>,
    /// Names of the tensors tied to the layer: weights, and `topk_weights`.
    pub tied: Vec<String>,
    /// Their gradients, of the backward pass in flight.
    pub gradients: Mutex<BTreeMap<String, HostTensor<'static>>>,
}

impl Call {
    /// Runs the layer backward, keeps the gradients of tied tensors and returns
    /// dx.
    fn backward(&self, dy: &HostTensor<'_>) -> Result<HostTensor<'static>> {
        let _turn = lock(&self.inner.turn);
        let layer = &self.inner.layer;
        // As candle's own operations, backward reads the values that the weights have now.
        let reading = self.inner.weights.read_in_place(layer)?;
        let back = layer.backward(&lock(&self.saved), dy, false);
        reading.end(layer)?;
        let mut back = back.map_err(Error::wrap)?.into_tensors();
        let mut gradients = BTreeMap::new();
        for name in &self.tied {
            let gradient = match back.remove(&format!("grad.{name}")) {
                Some(of_input) => of_input,
                None => layer.gradient(name).map_err(Error::wrap)?,
            };
            gradients.insert(name.clone(), gradient);
        }
        *lock(&self.gradients) = gradients;
        let none = || Error::Msg("backward gave no dx".to_string());
        back.remove("dx").ok_or_else(none)
    }
}

/// An operation that ties a tensor to the layer, from one link to the next.
/// Forward does nothing; backward returns the gradient that the layer computed.
pub struct Tie {
    pub call: Arc<Call>,
    pub name: String,
}

impl CustomOp2 for Tie {
    fn name(&self) -> &'static str {
        "moesaic-tie"
    }

    fn cpu_fwd(
        &self,
        _link: &CpuStorage,
        _: &Layout,
        _tied: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.0]), Shape::from(1)))
    }

    fn bwd(
        &self,
        link: &Tensor,
        tied: &Tensor,
        _: &Tensor,
        _: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let gradients = lock(&self.call.gradients);
        let none = || Error::Msg(format!("`{}` was tied without a gradient", self.name));
        let gradient = gradients.get(&self.name).ok_or_else(none)?;
        let gradient = tensor(gradient, tied.dims()).to_dtype(tied.dtype())?;
        Ok((Some(link.zeros_like()?), Some(gradient)))
    }
}

/// The operation of the layer, from rows `[T, d]` and the last link to rows
/// `[T, d_out]`, which the call has computed.
pub struct Whole {
    pub call: Arc<Call>,
    /// Taken when the operation is applied.
    pub y: Mutex<Option<HostTensor<'static>>>,
}

impl CustomOp2 for Whole {
    fn name(&self) -> &'static str {
        "moesaic-layer"
    }

    fn cpu_fwd(
        &self,
        _x: &CpuStorage,
        _: &Layout,
        _link: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let none = || Error::Msg("the operation is applied once".to_string());
        let y = lock(&self.y).take().ok_or_else(none)?;
        Ok((storage(&y), Shape::from(y.shape.as_slice())))
    }

    fn bwd(
        &self,
        x: &Tensor,
        link: &Tensor,
        y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let dtype = self.call.inner.layer.spec().precision.activations;
        let dx = lend(dy, dtype, y.dims(), |dy| self.call.backward(&dy))?;
        Ok((Some(tensor(&dx, x.dims())), Some(link.zeros_like()?)))
    }
}

/// Locks a mutex even after a panic, because the next call replaces the values.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}
