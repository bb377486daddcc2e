//! Layers for inference that hold their weights, packed, and take arrays.

use crate::dlpack::{Array, Imported, imported, lent};
use crate::engines;
use crate::errors::{Failure, without_gil};
use crate::spec::Spec;
use moesaic::{Engine, Input, Layer, Output, Tensor};
use pyo3::prelude::*;
use std::collections::BTreeMap;

/// A layer for inference with weights of its own, in the order that kernels read. Tensors are any
/// objects with `__dlpack__`, such as NumPy arrays.
///
/// PackedLayer(spec, weights, bank=None): weights by canonical name, which it copies. With `bank`,
/// a PackedLayer, its experts are in the memory of the bank's, and `weights` has all others.
#[pyclass(frozen, module = "moesaic")]
pub struct PackedLayer {
    layer: Layer,
    engine: Engine,
    spec: Spec,
    process: u32,
}

#[pymethods]
impl PackedLayer {
    #[new]
    #[pyo3(signature = (spec, weights, bank=None))]
    fn new(
        py: Python<'_>,
        spec: &Bound<'_, Spec>,
        weights: BTreeMap<String, Bound<'_, PyAny>>,
        bank: Option<&Bound<'_, PackedLayer>>,
    ) -> PyResult<PackedLayer> {
        let spec = spec.get().clone();
        let weights = imported(&weights)?;
        let bank = bank.map(Bound::get);
        let (layer, engine) = without_gil(py, || {
            let weights = lent(&weights);
            let Some(bank) = bank else {
                let engine = engines::engine()?;
                return Ok((engine.layer(&spec.spec, &weights)?, engine));
            };
            check_process(bank.process)?;
            // The bank's engine: `configure` may have opened another since.
            let engine = bank.engine.clone();
            let layer = engine.layer_over_experts_of(&bank.layer, &spec.spec, &weights)?;
            Ok((layer, engine))
        })?;
        let process = std::process::id();
        Ok(PackedLayer {
            layer,
            engine,
            spec,
            process,
        })
    }

    /// Evaluates x [.., model_dim] to the named outputs, such as y [T, output_dim], topk_ids [T, K]
    /// i32, topk_weights [T, K] f32 and counts [E] i64. Further inputs of the spec are arguments of
    /// their names.
    #[pyo3(signature = (x, outputs=vec!["y".to_string()], capacity_factor=None, **inputs))]
    fn forward(
        &self,
        py: Python<'_>,
        x: Bound<'_, PyAny>,
        outputs: Vec<String>,
        capacity_factor: Option<f64>,
        inputs: Option<BTreeMap<String, Bound<'_, PyAny>>>,
    ) -> PyResult<BTreeMap<String, Array>> {
        let x = Imported::new("x", &x)?;
        let others = imported(&inputs.unwrap_or_default())?;
        let output = without_gil(py, || {
            check_process(self.process)?;
            let input = read_input(&self.spec, &x, &others, capacity_factor)?;
            let names: Vec<&str> = outputs.iter().map(String::as_str).collect();
            Ok(self.layer.forward(input.reading(&names))?)
        })?;
        Ok(arrays(output))
    }

    /// Replaces a weight by a copy of another of its type and shape.
    fn set_weight(&self, py: Python<'_>, name: &str, value: Bound<'_, PyAny>) -> PyResult<()> {
        let value = Imported::new(name, &value)?;
        without_gil(py, || {
            check_process(self.process)?;
            Ok(self.layer.set_weight(name, &value.tensor())?)
        })
    }

    /// The spec of the layer.
    #[getter]
    fn spec(&self) -> Spec {
        self.spec.clone()
    }
}

/// Returns whether this process made a layer.
///
/// # Errors
/// It is a child of the process that did.
pub fn check_process(process: u32) -> Result<(), Failure> {
    if process == std::process::id() {
        return Ok(());
    }
    Err(Failure::Other(
        "the layer was made before `fork`, whose child has none of its threads: make it again"
            .to_string(),
    ))
}

/// Returns the input of a call: x [.., model_dim] as rows, and the others.
///
/// # Errors
/// x has another width.
pub fn read_input<'a>(
    spec: &Spec,
    x: &'a Imported,
    others: &'a [(String, Imported)],
    capacity_factor: Option<f64>,
) -> Result<Input<'a>, Failure> {
    let mut tensors = lent(others);
    let rows = rows(x.tensor(), spec.spec.shape.model_dim)?;
    let tokens = rows.shape[0];
    tensors.insert("x", rows);
    Ok(Input {
        tokens,
        tensors,
        capacity_factor,
    })
}

/// Returns the outputs of a call by name, as Python takes them.
pub fn arrays(output: Output) -> BTreeMap<String, Array> {
    let tensors = output.into_tensors().into_iter();
    tensors
        .map(|(name, tensor)| (name, Array::new(tensor)))
        .collect()
}

/// Folds all sizes of x but the last into the number of tokens.
fn rows(x: Tensor<'_>, width: usize) -> Result<Tensor<'_>, Failure> {
    let Some((&last, leading)) = x.shape.split_last() else {
        return Err(Failure::tensor("x", "has no width"));
    };
    if last != width {
        let problem = format!("has width {last}, expected {width}");
        return Err(Failure::tensor("x", problem));
    }
    let tokens = leading.iter().product();
    Ok(Tensor {
        shape: vec![tokens, width],
        ..x
    })
}
