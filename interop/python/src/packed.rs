//! Layers for inference that hold their weights, packed, and take arrays.

use crate::dlpack::{Array, Imported, imported, lent};
use crate::engines;
use crate::errors::{Failure, without_gil};
use crate::spec::{Spec, float};
use moesaic::spec::check_weight_name;
use moesaic::{Engine, Input, Layer, LayerSpec, Output, Tensor};
use pyo3::prelude::*;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Arrays of Python's by name.
pub type Arrays<'py> = BTreeMap<String, Bound<'py, PyAny>>;

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
    inputs: Vec<String>,
    process: u32,
}

#[pymethods]
impl PackedLayer {
    #[new]
    #[pyo3(signature = (spec, weights, bank=None))]
    fn new(
        py: Python<'_>,
        spec: &Bound<'_, Spec>,
        weights: Arrays<'_>,
        bank: Option<&Bound<'_, PackedLayer>>,
    ) -> PyResult<PackedLayer> {
        let spec = spec.get().clone();
        let weights = imported_weights(&spec.spec, &weights)?;
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
        Ok(PackedLayer::of(layer, engine, spec)?)
    }

    /// Reads the MoE layer of a model from its folder in the form of transformers. Experts that the
    /// folder has as codes stay codes.
    #[staticmethod]
    #[pyo3(signature = (folder, layer=0))]
    fn from_hf(py: Python<'_>, folder: PathBuf, layer: usize) -> PyResult<PackedLayer> {
        PackedLayer::read(py, |engine| engine.layer_from_hf(&folder, layer))
    }

    /// Reads the MoE layer of a model from a GGUF file, as `from_hf` from a folder. x and y are bf16
    /// where the file's experts are codes.
    #[staticmethod]
    #[pyo3(signature = (file, layer=0))]
    fn from_gguf(py: Python<'_>, file: PathBuf, layer: usize) -> PyResult<PackedLayer> {
        PackedLayer::read(py, |engine| engine.layer_from_gguf(&file, layer))
    }

    /// Makes a layer of nothing but the routed experts of a model's layer, from its folder or its
    /// GGUF file: calls take topk_ids and topk_weights [T, K]. x and y have `activations`, such as
    /// "bf16", or the model's type.
    #[staticmethod]
    #[pyo3(signature = (model, layer=0, activations=None))]
    fn experts_of(
        py: Python<'_>,
        model: PathBuf,
        layer: usize,
        activations: Option<&str>,
    ) -> PyResult<PackedLayer> {
        let activations = activations.map(float).transpose()?;
        PackedLayer::read(py, |engine| {
            engine.experts_of_model(&model, layer, activations)
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
        inputs: Option<Arrays<'_>>,
    ) -> PyResult<BTreeMap<String, Array>> {
        let given = Inputs::new(&x, inputs, capacity_factor)?;
        let output = without_gil(py, || {
            check_process(self.process)?;
            let names: Vec<&str> = outputs.iter().map(String::as_str).collect();
            Ok(self
                .layer
                .forward(given.read(&self.spec, &self.inputs)?.reading(&names))?)
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

impl PackedLayer {
    fn of(layer: Layer, engine: Engine, spec: Spec) -> Result<PackedLayer, Failure> {
        Ok(PackedLayer {
            layer,
            engine,
            inputs: spec.input_names()?,
            spec,
            process: std::process::id(),
        })
    }

    fn read(
        py: Python<'_>,
        make: impl FnOnce(&Engine) -> Result<Layer, moesaic::Error> + Send,
    ) -> PyResult<PackedLayer> {
        without_gil(py, || {
            let engine = engines::engine()?;
            let layer = make(&engine)?;
            let spec = Spec::new(layer.spec().clone());
            PackedLayer::of(layer, engine, spec)
        })
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

/// Takes the weights of a spec by name.
///
/// # Errors
/// As [`imported`] and [`check_weight_name`].
pub fn imported_weights(spec: &LayerSpec, given: &Arrays<'_>) -> PyResult<Vec<(String, Imported)>> {
    for name in given.keys() {
        let named = check_weight_name(spec, name);
        named.map_err(|unknown| Failure::tensor(name, unknown))?;
    }
    imported(given)
}

/// The inputs of a call, as Python gave them.
pub struct Inputs {
    x: Imported,
    others: Vec<(String, Imported)>,
    capacity_factor: Option<f64>,
}

impl Inputs {
    /// Takes x [.., model_dim] and the others by name.
    pub fn new(
        x: &Bound<'_, PyAny>,
        others: Option<Arrays<'_>>,
        capacity_factor: Option<f64>,
    ) -> PyResult<Inputs> {
        Ok(Inputs {
            x: Imported::new("x", x)?,
            others: imported(&others.unwrap_or_default())?,
            capacity_factor,
        })
    }

    /// Refuses an input that no layer of the spec reads, such as a name with a slip of the pen. What
    /// only losses read may be there in evaluation.
    fn check_names(&self, known: &[String]) -> Result<(), Failure> {
        match self.others.iter().find(|(name, _)| !known.contains(name)) {
            None => Ok(()),
            Some((name, _)) => {
                let known = known.join(", ");
                let problem = format!("the layer reads no `{name}`, only {known}");
                Err(Failure::Invalid(problem))
            }
        }
    }

    /// Returns the input of a layer, with x as rows.
    ///
    /// # Errors
    /// x has another width, or an input is none of the layer's.
    pub fn read(&self, spec: &Spec, known: &[String]) -> Result<Input<'_>, Failure> {
        self.check_names(known)?;
        let mut tensors = lent(&self.others);
        let rows = rows(self.x.tensor(), spec.spec.shape.model_dim)?;
        let tokens = rows.shape[0];
        tensors.insert("x", rows);
        Ok(Input {
            tokens,
            tensors,
            capacity_factor: self.capacity_factor,
        })
    }
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
