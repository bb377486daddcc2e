//! Layers whose calls bring the addresses of all tensors, weights included.

use crate::engines::{self, Held, Place};
use crate::errors::{Failure, without_gil};
use crate::key::Key;
use crate::spec::Spec;
use crate::states::{self, State};
use crate::tensors::{Given, Ids, check};
use moesaic::Ptr;
use moesaic::{Layer as EngineLayer, LayerCall, LayerTensorRole, RawBackward, RawCall};
use pyo3::prelude::*;
use pyo3::types::PyCapsule;
use std::sync::{Arc, OnceLock};

/// A compiled layer without weights. All of one spec in a process share kernels and workspace;
/// calls take turns.
#[pyclass(frozen, module = "moesaic")]
pub struct Layer {
    spec: Spec,
    place: Place,
}

#[pymethods]
impl Layer {
    /// Compiles the layer, or finds it compiled.
    #[new]
    fn new(py: Python<'_>, spec: &Bound<'_, Spec>, place: Place) -> PyResult<Layer> {
        let spec = spec.get().clone();
        if spec.spec.precision.experts.is_some() {
            let problem = "experts of `precision.experts` are codes, which kernels read packed: \
                           make a PackedLayer of the spec";
            return Err(Failure::Invalid(problem.to_string()).into());
        }
        without_gil(py, || engines::layer(&spec.spec, &spec.text, &place))?;
        Ok(Layer { spec, place })
    }

    /// Returns the layer with these weights, (name, address, dtype, shape) each, for calls that
    /// bring tensors of these names, in this order.
    fn bind(
        &self,
        py: Python<'_>,
        weights: Vec<Given>,
        names: Vec<String>,
    ) -> PyResult<BoundLayer> {
        without_gil(py, || BoundLayer::new(self, &weights, names))
    }

    /// Returns the number of states for backward that are alive in the process.
    #[staticmethod]
    fn states() -> usize {
        states::count()
    }
}

/// A layer with weights where their owner has them.
///
/// A call brings the addresses of its other tensors: contiguous, on the layer's device, of the types
/// and shapes of the spec, alive until it returns, on a GPU until its stream has passed the call;
/// what backward reads, until then. Its weights must still lie where they lay.
#[pyclass(frozen, module = "moesaic")]
pub struct BoundLayer {
    spec: Spec,
    place: Place,
    held: Held,
    /// The tensors of a call: first those that it brings, then the weights.
    names: Vec<String>,
    brought: usize,
    weights: Vec<Ptr>,
    /// The tensors whose numbers are looked at before each call.
    ids: Vec<Ids>,
    /// The tensors that backward reads where this layer's forward was given them.
    needed: OnceLock<Arc<[String]>>,
}

impl BoundLayer {
    fn new(of: &Layer, given: &[Given], mut names: Vec<String>) -> Result<BoundLayer, Failure> {
        let Layer { spec, place } = of;
        let (held, layer) = Held::new(&spec.spec, &spec.text, place)?;
        let weights = check(&layer, 0, given)?.tensors;
        if let Some(name) = names.iter().find(|name| layer.tensor(name).is_none()) {
            return Err(Failure::tensor(name, "is none of the layer's"));
        }
        let brought = names.len();
        names.extend(weights.iter().map(|(name, _)| name.to_string()));
        let ids = names.iter().enumerate();
        let ids = ids.filter_map(|(at, name)| Ids::new(&layer, at, layer.tensor(name)?));
        Ok(BoundLayer {
            ids: ids.collect(),
            weights: weights.into_iter().map(|(_, address)| address).collect(),
            spec: spec.clone(),
            place: place.clone(),
            held,
            names,
            brought,
            needed: OnceLock::new(),
        })
    }

    /// Returns the layer of the engine that the process has now.
    fn layer(&self) -> Result<Arc<EngineLayer>, Failure> {
        match self.held.current() {
            Some(layer) => Ok(layer.clone()),
            None => engines::layer(&self.spec.spec, &self.spec.text, &self.place),
        }
    }

    /// Returns the tensors of a call, with ids that were looked at.
    fn tensors(&self, tokens: usize, brought: &[u64]) -> Result<Vec<(&str, Ptr)>, Failure> {
        if brought.len() != self.brought {
            let wanted = self.names[..self.brought].join(", ");
            let problem = format!("{} addresses, expected those of {wanted}", brought.len());
            return Err(Failure::Invalid(problem));
        }
        let brought = brought.iter().map(|address| Ptr(*address));
        let addresses = brought.chain(self.weights.iter().copied());
        let names = self.names.iter().map(String::as_str);
        let tensors: Vec<(&str, Ptr)> = names.zip(addresses).collect();
        for ids in &self.ids {
            // SAFETY: the Python side holds the tensors for the call, of the layer's types and
            // shapes for so many tokens.
            unsafe { ids.check(tokens, tensors[ids.at].1)? };
        }
        Ok(tensors)
    }

    fn evaluated(
        &self,
        tokens: usize,
        addresses: &[u64],
        capacity_factor: Option<f64>,
    ) -> Result<(), Failure> {
        let tensors = self.tensors(tokens, addresses)?;
        // SAFETY: the tensors have the sizes of the layer's list, and ids are in range; Python
        // holds their memory until this returns. A CPU's call is over then; torch gives memory of a
        // GPU away in the order of the stream that the call is on.
        let call = unsafe { RawCall::new(tokens, &tensors) }.with_capacity_factor(capacity_factor);
        self.layer()?.forward(call)?;
        Ok(())
    }

    fn trained(
        &self,
        tokens: usize,
        addresses: &[u64],
        key: Key,
        capacity_factor: Option<f64>,
    ) -> Result<State, Failure> {
        let layer = self.layer()?;
        let tensors = self.tensors(tokens, addresses)?;
        // SAFETY: as in `evaluated`. Backward gets these addresses again: see `needed`.
        let call = unsafe { RawCall::new(tokens, &tensors) }.with_capacity_factor(capacity_factor);
        let (_, saved) = layer.forward_train(call, key.0)?;
        Ok(State {
            needed: self.needed(&layer),
            layer,
            place: self.place.clone(),
            saved,
            process: std::process::id(),
        })
    }

    fn differentiated(
        &self,
        state: &State,
        tokens: usize,
        addresses: &[u64],
        accumulate: bool,
    ) -> Result<(), Failure> {
        let (layer, saved) = (&state.layer, state.saved.tokens());
        if tokens != saved {
            let problem = format!("{tokens} tokens, the forward pass had {saved}");
            return Err(Failure::Invalid(problem));
        }
        if state.place != self.place {
            let problem = "backward runs on another stream than its forward pass".to_string();
            return Err(Failure::Invalid(problem));
        }
        let tensors = self.tensors(tokens, addresses)?;
        let needed = state.needed.iter();
        let gradients = layer.tensors().iter();
        let gradients = gradients.filter(|tensor| tensor.role == LayerTensorRole::WeightGradient);
        // Without these, backward would read and write where forward's tensors once were.
        let mut needed = needed.chain(gradients.map(|tensor| &tensor.name));
        if let Some(missing) = needed.find(|name| !self.has(name)) {
            return Err(Failure::tensor(missing, "is missing, backward needs it"));
        }
        // SAFETY: as in `evaluated`; every address that forward was given is given again.
        let call = unsafe { RawBackward::new(&tensors) };
        layer.backward(&state.saved, call, accumulate)?;
        Ok(())
    }

    fn has(&self, name: &str) -> bool {
        self.names.iter().any(|known| known == name)
    }

    /// Returns the names of what backward reads where forward was given it.
    fn needed(&self, layer: &EngineLayer) -> Arc<[String]> {
        let find = || {
            let kept = layer.tensors().iter().filter(|tensor| {
                let of_forward = [LayerTensorRole::Input, LayerTensorRole::Output];
                of_forward.contains(&tensor.role) && tensor.is_of(LayerCall::Backward)
            });
            let needed = kept.filter(|tensor| self.has(&tensor.name));
            needed.map(|tensor| tensor.name.clone()).collect()
        };
        self.needed.get_or_init(find).clone()
    }
}

#[pymethods]
impl BoundLayer {
    /// Evaluates x to y, which are all that the call brings.
    fn evaluate(&self, py: Python<'_>, tokens: usize, x: u64, y: u64) -> PyResult<()> {
        without_gil(py, || self.evaluated(tokens, &[x, y], None))
    }

    /// Evaluates. The call brings inputs and at least the output y.
    #[pyo3(signature = (tokens, addresses, capacity_factor=None))]
    fn forward(
        &self,
        py: Python<'_>,
        tokens: usize,
        addresses: Vec<u64>,
        capacity_factor: Option<f64>,
    ) -> PyResult<()> {
        without_gil(py, || self.evaluated(tokens, &addresses, capacity_factor))
    }

    /// Runs a training call and returns the DLPack capsule of a tensor [1] of i64, whose memory
    /// owns the state for backward. rng_key is (seed, step, layer, first token).
    #[pyo3(signature = (tokens, addresses, rng_key, capacity_factor=None))]
    fn forward_train<'py>(
        &self,
        py: Python<'py>,
        tokens: usize,
        addresses: Vec<u64>,
        rng_key: Key,
        capacity_factor: Option<f64>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        let state = without_gil(py, || {
            self.trained(tokens, &addresses, rng_key, capacity_factor)
        })?;
        states::keep(py, state)
    }

    /// Runs backward of the training call with this state. The call brings dy, whatever forward
    /// was given that backward reads, dx, and grad.<name> of every gradient of a weight, to which
    /// `accumulate` adds: those of experts without tokens then are not touched.
    fn backward(
        &self,
        py: Python<'_>,
        state: i64,
        tokens: usize,
        addresses: Vec<u64>,
        accumulate: bool,
    ) -> PyResult<()> {
        without_gil(py, || {
            let state = states::find(state)?;
            self.differentiated(&state, tokens, &addresses, accumulate)
        })
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests;
