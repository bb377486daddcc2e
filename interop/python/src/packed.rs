//! Layers for inference that hold their weights, packed, and take arrays.

use crate::dlpack::{Array, Imported, imported, lent};
use crate::engines;
use crate::errors::{Failure, without_gil};
use crate::spec::Spec;
use moesaic::{Input, Layer, Tensor};
use pyo3::prelude::*;
use std::collections::BTreeMap;

/// A layer for inference with weights of its own, in the order that kernels read. Tensors are any
/// objects with `__dlpack__`, such as NumPy arrays.
///
/// PackedLayer(spec, weights): weights by canonical name, which it copies.
#[pyclass(frozen, module = "moesaic")]
pub struct PackedLayer {
    layer: Layer,
    spec: Spec,
    process: u32,
}

#[pymethods]
impl PackedLayer {
    #[new]
    fn new(
        py: Python<'_>,
        spec: &Bound<'_, Spec>,
        weights: BTreeMap<String, Bound<'_, PyAny>>,
    ) -> PyResult<PackedLayer> {
        let spec = spec.get().clone();
        let weights = imported(&weights)?;
        let layer = without_gil(py, || {
            Ok(engines::engine()?.layer(&spec.spec, &lent(&weights))?)
        })?;
        let process = std::process::id();
        Ok(PackedLayer {
            layer,
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
        let tensors = without_gil(py, || {
            self.check_process()?;
            let mut tensors = lent(&others);
            let rows = rows(x.tensor(), self.spec.spec.shape.model_dim)?;
            let tokens = rows.shape[0];
            tensors.insert("x", rows);
            let input = Input {
                tokens,
                tensors,
                capacity_factor,
            };
            let names: Vec<&str> = outputs.iter().map(String::as_str).collect();
            Ok(self.layer.forward(input.reading(&names))?.into_tensors())
        })?;
        let arrays = tensors.into_iter().map(|(n, t)| (n, Array::new(t)));
        Ok(arrays.collect())
    }

    /// Replaces a weight by a copy of another of its type and shape.
    fn set_weight(&self, py: Python<'_>, name: &str, value: Bound<'_, PyAny>) -> PyResult<()> {
        let value = Imported::new(name, &value)?;
        without_gil(py, || {
            self.check_process()?;
            Ok(self.layer.set_weight(name, &value.tensor())?)
        })
    }

    /// The spec of the layer.
    #[getter]
    fn spec(&self) -> Spec {
        self.spec.clone()
    }
}

impl PackedLayer {
    fn check_process(&self) -> Result<(), Failure> {
        if self.process == std::process::id() {
            return Ok(());
        }
        Err(Failure::Other(
            "the layer was made before `fork`, whose child has none of its threads: make it again"
                .to_string(),
        ))
    }
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
