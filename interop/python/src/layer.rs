//! Layers whose calls bring the addresses of all tensors, weights included.

use crate::engines;
use crate::errors::{Failure, without_gil};
use crate::spec::Spec;
use crate::states;
use crate::tensors::{Given, check};
use moesaic::plan::Role;
use moesaic::{RawBackward, RawCall, RngKey};
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

/// A compiled layer without weights. All of one spec in a process share kernels and workspace;
/// calls take turns.
///
/// A tensor of a call is (name, address, dtype, shape): contiguous, on the CPU, alive until the
/// call returns; what backward reads, until then.
#[pyclass(frozen, module = "moesaic")]
pub struct Layer {
    spec: Spec,
}

#[pymethods]
impl Layer {
    /// Compiles the layer, or finds it compiled.
    #[new]
    fn new(py: Python<'_>, spec: &Bound<'_, Spec>) -> PyResult<Layer> {
        let spec = spec.get().clone();
        if spec.spec.precision.experts.is_some() {
            let problem = "experts of `precision.experts` are codes, which kernels read packed: \
                           make a PackedLayer of the spec";
            return Err(Failure::Invalid(problem.to_string()).into());
        }
        without_gil(py, || engines::layer(&spec.spec, &spec.text))?;
        Ok(Layer { spec })
    }

    /// Evaluates. `tensors` has inputs, weights and at least the output y.
    #[pyo3(signature = (tokens, tensors, capacity_factor=None))]
    fn forward(
        &self,
        py: Python<'_>,
        tokens: usize,
        tensors: Vec<Given>,
        capacity_factor: Option<f64>,
    ) -> PyResult<()> {
        without_gil(py, || {
            let layer = engines::layer(&self.spec.spec, &self.spec.text)?;
            let checked = check(&layer, tokens, &tensors)?;
            // SAFETY: the tensors have the sizes of the plan and ids are in range; Python holds
            // their memory until this returns, and a CPU's call is over then.
            let call = unsafe { RawCall::new(tokens, &checked.tensors) }
                .with_capacity_factor(capacity_factor);
            layer.forward(call)?;
            Ok(())
        })
    }

    /// Runs a training call and returns the DLPack capsule of a tensor [1] of i64, whose memory
    /// owns the state for backward. rng_key is (seed, step, layer, first token).
    #[pyo3(signature = (tokens, tensors, rng_key, capacity_factor=None))]
    fn forward_train<'py>(
        &self,
        py: Python<'py>,
        tokens: usize,
        tensors: Vec<Given>,
        rng_key: (u64, u64, u64, u64),
        capacity_factor: Option<f64>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        let (seed, step, number, first_token) = rng_key;
        let key = RngKey {
            seed,
            step,
            layer: number,
            first_token,
        };
        let (layer, saved, needed) = without_gil(py, || {
            let layer = engines::layer(&self.spec.spec, &self.spec.text)?;
            let checked = check(&layer, tokens, &tensors)?;
            // SAFETY: as in `forward`. Backward gets these addresses again: see `needed`.
            let call = unsafe { RawCall::new(tokens, &checked.tensors) }
                .with_capacity_factor(capacity_factor);
            let (_, saved) = layer.forward_train(call, key)?;
            let plan = layer.plan();
            let kept = plan.saved().into_iter().map(|id| &plan[id]);
            let needed = kept
                .filter(|tensor| matches!(tensor.role, Role::Weight) || checked.has(&tensor.name));
            let needed = needed.map(|tensor| tensor.name.clone()).collect();
            Ok((layer, saved, needed))
        })?;
        states::keep(py, layer, saved, needed)
    }

    /// Runs backward of the training call with this state. `tensors` has dy, the weights, whatever
    /// forward was given that backward reads, dx, and grad.<name> of every gradient.
    #[staticmethod]
    fn backward(py: Python<'_>, state: i64, tensors: Vec<Given>) -> PyResult<()> {
        without_gil(py, || {
            let state = states::find(state)?;
            let layer = &state.layer;
            let checked = check(layer, state.saved.tokens(), &tensors)?;
            let needed = state.needed.iter();
            let gradients = layer.plan().tensors.iter();
            let gradients = gradients.filter(|tensor| tensor.role == Role::WeightGradient);
            // Without these, backward would read and write where forward's tensors once were.
            let mut needed = needed.chain(gradients.map(|tensor| &tensor.name));
            if let Some(missing) = needed.find(|name| !checked.has(name)) {
                return Err(Failure::tensor(missing, "is missing, backward needs it"));
            }
            // SAFETY: as in `forward`; every address that forward was given is given again.
            let call = unsafe { RawBackward::new(&checked.tensors) };
            layer.backward(&state.saved, call, false)?;
            Ok(())
        })
    }

    /// Returns the number of states for backward that are alive in the process.
    #[staticmethod]
    fn states() -> usize {
        states::count()
    }
}
