//! Several routers over one set of experts.

use crate::dlpack::{Array, Imported, lent};
use crate::engines;
use crate::errors::{Failure, without_gil};
use crate::key::Key;
use crate::packed::{Arrays, Inputs, arrays, check_process, imported_weights};
use crate::ranks::{Mesh, strategy};
use crate::spec::Spec;
use moesaic::experts::{MultiGate, MultiSaved, SavedByToken};
use moesaic::{DType, Input, LayerOptions, Output, Tensors, Training};
use pyo3::prelude::*;
use std::collections::BTreeMap;

/// Layers that differ in their routers and share experts: one pass over the experts runs all, where
/// `in_one_pass` says so.
///
/// GateLayer(spec, weights, routers, training, mesh=None, strategy=None): `routers` has the weights
/// `router.*` of each layer, `weights` all others, by canonical name; it copies them. With a mesh
/// they are this rank's parts, and all ranks make the layer and the same calls in the same order.
#[pyclass(frozen, module = "moesaic")]
pub struct GateLayer {
    gates: MultiGate,
    spec: Spec,
    inputs: Vec<String>,
    process: u32,
}

/// The state between forward and backward of a call of a GateLayer.
#[pyclass(frozen, module = "moesaic")]
pub struct GateState(Saved);

enum Saved {
    /// Every layer ran on all tokens.
    Each(MultiSaved),
    /// Each token ran by one layer.
    ByToken(SavedByToken),
}

#[pymethods]
impl GateLayer {
    #[new]
    #[pyo3(signature = (spec, weights, routers, training, mesh=None, strategy=None))]
    fn new(
        py: Python<'_>,
        spec: &Bound<'_, Spec>,
        weights: Arrays<'_>,
        routers: Vec<Arrays<'_>>,
        training: bool,
        mesh: Option<&Bound<'_, Mesh>>,
        strategy: Option<&str>,
    ) -> PyResult<GateLayer> {
        let spec = spec.get().clone();
        let mesh = mesh.map(|mesh| &mesh.get().0);
        let strategy = strategy.map(self::strategy).transpose()?;
        let own = |given| imported_weights(&spec.spec, given);
        let weights = own(&weights)?;
        let routers = routers.iter().map(own).collect::<PyResult<Vec<_>>>()?;
        let gates = without_gil(py, || {
            if routers.is_empty() {
                return Err(Failure::Invalid("0 routers: give one or more".to_string()));
            }
            let routers: Vec<Tensors<'_>> = routers.iter().map(|own| lent(own)).collect();
            let mut options = mesh.map_or_else(LayerOptions::default, LayerOptions::over);
            options.part = mesh.is_some();
            options.strategy = strategy;
            if training {
                options = options.training(Training::default());
            }
            let engine = engines::engine()?;
            Ok(engine.multi_gate(&spec.spec, &lent(&weights), &routers, options)?)
        })?;
        Ok(GateLayer {
            gates,
            inputs: spec.input_names()?,
            spec,
            process: std::process::id(),
        })
    }

    /// Returns whether a call runs all layers in one pass over the experts.
    #[getter]
    fn in_one_pass(&self) -> bool {
        self.gates.in_one_pass()
    }

    /// Evaluates x [.., model_dim] by every layer to the named outputs of each. With router_ids [T],
    /// i32, each token runs by one layer, and the list has one dict.
    #[pyo3(signature = (
        x, outputs=vec!["y".to_string()], capacity_factor=None, router_ids=None, **inputs
    ))]
    fn forward(
        &self,
        py: Python<'_>,
        x: Bound<'_, PyAny>,
        outputs: Vec<String>,
        capacity_factor: Option<f64>,
        router_ids: Option<Bound<'_, PyAny>>,
        inputs: Option<Arrays<'_>>,
    ) -> PyResult<Vec<BTreeMap<String, Array>>> {
        let given = Inputs::new(&x, inputs, capacity_factor)?;
        let ids = routers_of_tokens(router_ids)?;
        let each = without_gil(py, || {
            check_process(self.process)?;
            let input = given.read(&self.spec, &self.inputs)?;
            let names: Vec<&str> = outputs.iter().map(String::as_str).collect();
            Ok(match &ids {
                None => self.gates.forward(input.reading(&names))?,
                Some(ids) => vec![self.gates.forward_by_token(input.reading(&names), ids)?],
            })
        })?;
        Ok(each.into_iter().map(arrays).collect())
    }

    /// As forward, of a training call, with the state for backward. rng_key is (seed, step, layer,
    /// first token).
    #[pyo3(signature = (x, outputs, rng_key, capacity_factor=None, router_ids=None, **inputs))]
    #[allow(clippy::too_many_arguments, reason = "each is an argument of Python's")]
    fn forward_train(
        &self,
        py: Python<'_>,
        x: Bound<'_, PyAny>,
        outputs: Vec<String>,
        rng_key: Key,
        capacity_factor: Option<f64>,
        router_ids: Option<Bound<'_, PyAny>>,
        inputs: Option<Arrays<'_>>,
    ) -> PyResult<(Vec<BTreeMap<String, Array>>, GateState)> {
        let ids = routers_of_tokens(router_ids)?;
        let given = Inputs::new(&x, inputs, capacity_factor)?;
        let (each, saved) = without_gil(py, || {
            check_process(self.process)?;
            let input = given.read(&self.spec, &self.inputs)?;
            let names: Vec<&str> = outputs.iter().map(String::as_str).collect();
            self.train(input, &names, ids.as_deref(), rng_key)
        })?;
        Ok((each.into_iter().map(arrays).collect(), GateState(saved)))
    }

    /// Runs backward from dy [T, output_dim] of each layer, or from one of a call with router_ids.
    /// Returns dx [T, model_dim] of each, whose sum is the gradient of x; those of weights stay
    /// here until the next backward.
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
            let layers = match saved {
                Saved::Each(_) => self.gates.layers().len(),
                Saved::ByToken(_) => 1,
            };
            if dy.len() != layers {
                let problem = format!("{} gradients dy, expected {layers}", dy.len());
                return Err(Failure::Invalid(problem));
            }
            let dy: Vec<_> = dy.iter().map(Imported::tensor).collect();
            Ok(match saved {
                Saved::Each(saved) => self.gates.backward(saved, &dy, false)?,
                Saved::ByToken(saved) => vec![self.gates.backward_by_token(saved, &dy[0], false)?],
            })
        })?;
        Ok(each.into_iter().map(arrays).collect())
    }

    /// Returns the gradient of a weight: of layer `gate` for `router.*`, else of all.
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
    fn train(
        &self,
        input: Input<'_>,
        names: &[&str],
        ids: Option<&[i32]>,
        Key(key): Key,
    ) -> Result<(Vec<Output>, Saved), Failure> {
        let Some(ids) = ids else {
            let (each, saved) = self.gates.forward_train(input.reading(names), key)?;
            return Ok((each, Saved::Each(saved)));
        };
        let run = self
            .gates
            .forward_train_by_token(input.reading(names), ids, key);
        let (output, saved) = run?;
        Ok((vec![output], Saved::ByToken(saved)))
    }

    fn layer(&self, gate: usize) -> Result<&moesaic::Layer, Failure> {
        check_process(self.process)?;
        let layers = self.gates.layers();
        layers.get(gate).ok_or_else(|| {
            Failure::Invalid(format!("gate {gate}: there are {} layers", layers.len()))
        })
    }
}

/// Reads the number of each token's router.
fn routers_of_tokens(ids: Option<Bound<'_, PyAny>>) -> PyResult<Option<Vec<i32>>> {
    let Some(ids) = ids else {
        return Ok(None);
    };
    let ids = Imported::new("router_ids", &ids)?;
    let tensor = ids.tensor();
    if tensor.dtype != DType::I32 {
        let problem = format!("is {}, expected i32", tensor.dtype);
        return Err(Failure::tensor("router_ids", problem).into());
    }
    let bytes = tensor.data.chunks_exact(4);
    let read = |id: &[u8]| i32::from_ne_bytes(id.try_into().expect("four bytes"));
    Ok(Some(bytes.map(read).collect()))
}
