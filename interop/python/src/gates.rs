//! Several routers over one set of experts.

use crate::dlpack::{Array, Imported, imported, lent};
use crate::engines;
use crate::errors::{Failure, without_gil};
use crate::key::read_key;
use crate::packed::{arrays, check_process, read_input};
use crate::spec::Spec;
use moesaic::experts::{MultiGate, MultiSaved};
use moesaic::{LayerOptions, Tensors, Training};
use pyo3::prelude::*;
use std::collections::BTreeMap;

type Arrays<'py> = BTreeMap<String, Bound<'py, PyAny>>;

/// Layers that differ in their routers and share experts: one pass over the experts runs all, where
/// `in_one_pass` says so.
///
/// GateLayer(spec, weights, routers, training): `routers` has the weights `router.*` of each layer,
/// `weights` all others, by canonical name; it copies them.
#[pyclass(frozen, module = "moesaic")]
pub struct GateLayer {
    gates: MultiGate,
    spec: Spec,
    process: u32,
}

/// The state between forward and backward of a call of a GateLayer.
#[pyclass(frozen, module = "moesaic")]
pub struct GateState(MultiSaved);

#[pymethods]
impl GateLayer {
    #[new]
    fn new(
        py: Python<'_>,
        spec: &Bound<'_, Spec>,
        weights: Arrays<'_>,
        routers: Vec<Arrays<'_>>,
        training: bool,
    ) -> PyResult<GateLayer> {
        let spec = spec.get().clone();
        let weights = imported(&weights)?;
        let routers = routers.iter().map(imported).collect::<PyResult<Vec<_>>>()?;
        let gates = without_gil(py, || {
            if routers.is_empty() {
                return Err(Failure::Invalid("0 routers: give one or more".to_string()));
            }
            let routers: Vec<Tensors<'_>> = routers.iter().map(|own| lent(own)).collect();
            let options = match training {
                true => LayerOptions::default().training(Training::default()),
                false => LayerOptions::default(),
            };
            let engine = engines::engine()?;
            Ok(engine.multi_gate(&spec.spec, &lent(&weights), &routers, options)?)
        })?;
        Ok(GateLayer {
            gates,
            spec,
            process: std::process::id(),
        })
    }

    /// Returns whether a call runs all layers in one pass over the experts.
    #[getter]
    fn in_one_pass(&self) -> bool {
        self.gates.in_one_pass()
    }

    /// Evaluates x [.., model_dim] by every layer to the named outputs of each.
    #[pyo3(signature = (x, outputs=vec!["y".to_string()], capacity_factor=None, **inputs))]
    fn forward(
        &self,
        py: Python<'_>,
        x: Bound<'_, PyAny>,
        outputs: Vec<String>,
        capacity_factor: Option<f64>,
        inputs: Option<Arrays<'_>>,
    ) -> PyResult<Vec<BTreeMap<String, Array>>> {
        let x = Imported::new("x", &x)?;
        let others = imported(&inputs.unwrap_or_default())?;
        let each = without_gil(py, || {
            check_process(self.process)?;
            let input = read_input(&self.spec, &x, &others, capacity_factor)?;
            let names: Vec<&str> = outputs.iter().map(String::as_str).collect();
            Ok(self.gates.forward(input.reading(&names))?)
        })?;
        Ok(each.into_iter().map(arrays).collect())
    }

    /// As forward, of a training call, with the state for backward. rng_key is (seed, step, layer,
    /// first token).
    #[pyo3(signature = (x, outputs, rng_key, capacity_factor=None, **inputs))]
    fn forward_train(
        &self,
        py: Python<'_>,
        x: Bound<'_, PyAny>,
        outputs: Vec<String>,
        rng_key: (u64, u64, u64, u64),
        capacity_factor: Option<f64>,
        inputs: Option<Arrays<'_>>,
    ) -> PyResult<(Vec<BTreeMap<String, Array>>, GateState)> {
        let key = read_key(rng_key);
        let x = Imported::new("x", &x)?;
        let others = imported(&inputs.unwrap_or_default())?;
        let (each, saved) = without_gil(py, || {
            check_process(self.process)?;
            let input = read_input(&self.spec, &x, &others, capacity_factor)?;
            let names: Vec<&str> = outputs.iter().map(String::as_str).collect();
            Ok(self.gates.forward_train(input.reading(&names), key)?)
        })?;
        Ok((each.into_iter().map(arrays).collect(), GateState(saved)))
    }

    /// Runs backward from dy [T, output_dim] of each layer. Returns dx [T, model_dim] of each,
    /// whose sum is the gradient of x; those of weights stay here until the next backward.
    fn backward(
        &self,
        py: Python<'_>,
        state: &Bound<'_, GateState>,
        dy: Vec<Bound<'_, PyAny>>,
    ) -> PyResult<Vec<BTreeMap<String, Array>>> {
        let saved = &state.get().0;
        let dy = dy.iter().map(|one| Imported::new("dy", one));
        let dy = dy.collect::<PyResult<Vec<Imported>>>()?;
        let each = without_gil(py, || {
            check_process(self.process)?;
            let (layers, found) = (self.gates.layers().len(), dy.len());
            if found != layers {
                let problem = format!("{found} gradients dy, expected one of each of {layers}");
                return Err(Failure::Invalid(problem));
            }
            let dy: Vec<_> = dy.iter().map(Imported::tensor).collect();
            Ok(self.gates.backward(saved, &dy, false)?)
        })?;
        Ok(each.into_iter().map(arrays).collect())
    }

    /// Returns the gradient of a weight, f32: of layer `gate` for `router.*`, else of all.
    fn gradient(&self, py: Python<'_>, gate: usize, name: &str) -> PyResult<Array> {
        let gradient = without_gil(py, || Ok(self.layer(gate)?.gradient(name)?))?;
        Ok(Array::new(gradient))
    }

    /// Replaces a weight by a copy of another of its type and shape: of layer `gate` for `router.*`,
    /// else of all.
    fn set_weight(
        &self,
        py: Python<'_>,
        gate: usize,
        name: &str,
        value: Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let value = Imported::new(name, &value)?;
        without_gil(py, || {
            Ok(self.layer(gate)?.set_weight(name, &value.tensor())?)
        })
    }
}

impl GateLayer {
    fn layer(&self, gate: usize) -> Result<&moesaic::Layer, Failure> {
        check_process(self.process)?;
        let layers = self.gates.layers();
        layers.get(gate).ok_or_else(|| {
            Failure::Invalid(format!("gate {gate}: there are {} layers", layers.len()))
        })
    }
}
