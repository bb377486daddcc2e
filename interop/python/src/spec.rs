//! Specs of layers.

use crate::dlpack::{Array, Imported};
use crate::errors::{Failure, without_gil};
use crate::sources;
use moesaic::spec::{CapacityOrder, Select, canonical_tensors, hf};
use moesaic::train::replay::{RecordShape, Replay, RoutedExperts};
use moesaic::weights::{Checkpoint, LayerReader, LoadOptions};
use moesaic::{DType, Distribution, Init, LayerSpec, LayerTensor, LayerTensorRole};
use moesaic::{Target, TensorDim, Tensors, Training, layer_tensors};
use pyo3::prelude::*;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The spec of a layer.
///
/// Spec(source) reads TOML text, a dict of the same keys, or the file of a `pathlib.Path`.
/// `str(spec)` is its canonical text, which is equal for equal layers.
#[pyclass(frozen, module = "moesaic", str = "{text}")]
#[derive(Clone)]
pub struct Spec {
    pub spec: LayerSpec,
    pub text: String,
}

/// A name, an element type and a shape; -1 stands for the number of tokens.
type Described = (String, String, Vec<i64>);

impl Spec {
    pub fn new(spec: LayerSpec) -> Spec {
        let text = spec.to_toml();
        Spec { spec, text }
    }

    /// Reads TOML.
    ///
    /// # Errors
    /// The text with its mistakes marked.
    pub fn read(text: &str) -> Result<Spec, Failure> {
        let spec = LayerSpec::from_toml(text);
        let spec = spec.map_err(|e| Failure::Invalid(e.render("spec", false)))?;
        Ok(Spec::new(spec))
    }

    /// Returns the names of the inputs that calls take, in training or not.
    pub fn input_names(&self) -> Result<Vec<String>, Failure> {
        let inputs = self.tensors(LayerTensorRole::Input)?.into_iter();
        Ok(inputs.map(|tensor| tensor.name).collect())
    }

    /// Returns the tensors with a role in the layer, of training where it can train. Their names and
    /// shapes are those of every target.
    fn tensors(&self, role: LayerTensorRole) -> Result<Vec<LayerTensor>, Failure> {
        let target: Target = "cpu:portable".parse().expect("it is a target");
        // Activations that experts round to codes have no gradients.
        let trains = self.spec.precision.expert_activations.is_none();
        let training = trains.then(Training::default);
        let tensors = layer_tensors(&self.spec, target, training)?.into_iter();
        Ok(tensors.filter(|tensor| tensor.role == role).collect())
    }
}

#[pymethods]
impl Spec {
    #[new]
    fn from_source(source: &Bound<'_, PyAny>) -> PyResult<Spec> {
        Ok(Spec::read(&sources::text(source)?)?)
    }

    /// Returns the spec of the layer that looks its experts up in `routed_experts [T, layers, K]`,
    /// integers that a serving engine recorded, at layer `layer` of it, and the weight
    /// `router.table [T, K]` that it then has.
    #[pyo3(signature = (routed_experts, layer=0))]
    fn replay(
        &self,
        py: Python<'_>,
        routed_experts: Bound<'_, PyAny>,
        layer: usize,
    ) -> PyResult<(Spec, Array)> {
        let record = Imported::new("routed_experts", &routed_experts)?;
        let replay = without_gil(py, || replayed(&self.spec, &record, layer))?;
        Ok((Spec::new(replay.spec), Array::new(replay.table)))
    }

    /// Returns the spec of a layer of a model, from the text of its config.json.
    #[staticmethod]
    #[pyo3(signature = (config_json, layer=0))]
    fn from_config(config_json: &str, layer: usize) -> PyResult<Spec> {
        let import = hf::import(config_json, layer);
        let import = import.map_err(|error| Failure::Invalid(error.to_string()))?;
        Ok(Spec::new(import.spec))
    }

    /// Returns the spec with other element types: "f32", "f16" or "bf16". Gradients of experts'
    /// matrices that have the type of the weights keep it.
    #[pyo3(signature = (weights=None, activations=None, expert_gradients=None))]
    fn with_precision(
        &self,
        weights: Option<&str>,
        activations: Option<&str>,
        expert_gradients: Option<&str>,
    ) -> PyResult<Spec> {
        let mut spec = self.spec.clone();
        if let Some(name) = weights {
            spec.precision.set_weights(float(name)?);
        }
        if let Some(name) = expert_gradients {
            spec.precision.expert_gradients = float(name)?;
        }
        if let Some(name) = activations {
            spec.precision.activations = float(name)?;
        }
        checked(spec)
    }

    /// Returns the spec of the same layer in evaluation: without noise, dropout and losses, and
    /// with the capacity of evaluation. Training it gives the gradient of an evaluation.
    fn evaluation(&self) -> PyResult<Spec> {
        let mut spec = self.spec.clone();
        let router = &mut spec.router;
        (router.jitter, router.input_dropout, router.noise) = (0.0, 0.0, 0.0);
        router.noise_kind = Default::default();
        router.random_second = false;
        if let Select::Sinkhorn(_) = router.select {
            router.select = Select::TopK;
        }
        spec.capacity.factor = spec.capacity.factor_of(false);
        spec.capacity.eval_factor = None;
        spec.losses.clear();
        checked(spec)
    }

    /// The canonical text.
    #[getter]
    fn toml(&self) -> &str {
        &self.text
    }

    /// The layer's name.
    #[getter]
    fn name(&self) -> &str {
        &self.spec.name
    }

    /// The width of a token.
    #[getter]
    fn model_dim(&self) -> usize {
        self.spec.shape.model_dim
    }

    /// The width of the output.
    #[getter]
    fn output_dim(&self) -> usize {
        self.spec.output_dim()
    }

    /// The number of experts that the router scores.
    #[getter]
    fn experts(&self) -> usize {
        self.spec.routed_experts()
    }

    /// The number of experts per token.
    #[getter]
    fn top_k(&self) -> usize {
        self.spec.shape.top_k
    }

    /// The element type of weights, and that of tokens.
    #[getter]
    fn precision(&self) -> (String, String) {
        let precision = &self.spec.precision;
        (
            precision.weights.to_string(),
            precision.activations.to_string(),
        )
    }

    /// Returns whether experts are stored as codes.
    #[getter]
    fn quantized(&self) -> bool {
        self.spec.precision.experts.is_some()
    }

    /// Returns whether a training call draws random numbers.
    #[getter]
    fn draws(&self) -> bool {
        self.spec.draws() || self.spec.capacity.order == CapacityOrder::Random
    }

    /// Returns whether a call rescales the topk_weights that the caller gives, in place.
    #[getter]
    fn rescales(&self) -> bool {
        self.spec.capacity.renormalize_after_drop
    }

    /// The kinds of the auxiliary losses.
    #[getter]
    fn losses(&self) -> Vec<String> {
        let losses = self.spec.losses.iter();
        losses.map(|loss| loss.kind.name().to_string()).collect()
    }

    /// The weights: name, element type and shape.
    #[getter]
    fn weights(&self) -> Vec<(String, String, Vec<usize>)> {
        let tensors = canonical_tensors(&self.spec).into_iter();
        tensors
            .map(|t| (t.name, t.dtype.to_string(), t.shape))
            .collect()
    }

    /// The distribution of each weight of a new layer, `moesaic::Init::Linear`: name, kind and
    /// number. "constant" is that number, "uniform" lies between it and its negative, and "normal"
    /// has it as its standard deviation. Weights that are no floats have none.
    #[getter]
    fn initial(&self) -> Vec<(String, &'static str, f32)> {
        let all = Init::Linear.distributions(&self.spec).into_iter();
        let described = all.map(|(tensor, distribution)| {
            let (kind, number) = match distribution {
                Distribution::Constant(number) => ("constant", number),
                Distribution::Uniform(bound) => ("uniform", bound),
                Distribution::Normal(deviation) => ("normal", deviation),
            };
            (tensor.name, kind, number)
        });
        described.collect()
    }

    /// The inputs of a call: name, element type and shape, in which -1 is the number of tokens.
    #[getter]
    fn inputs(&self) -> PyResult<Vec<Described>> {
        let size = |dim: &TensorDim| match dim {
            TensorDim::Fixed(size) => *size as i64,
            TensorDim::PerToken(_) => -1,
        };
        let inputs = self.tensors(LayerTensorRole::Input)?.into_iter();
        let described = inputs.map(|tensor| {
            let shape = tensor.dims.iter().map(size).collect();
            (tensor.name, tensor.dtype.to_string(), shape)
        });
        Ok(described.collect())
    }

    /// The weights that have gradients: name, and element type of the gradient.
    #[getter]
    fn trained(&self) -> PyResult<Vec<(String, String)>> {
        let gradients = self.tensors(LayerTensorRole::WeightGradient)?;
        let weight =
            |tensor: &LayerTensor| Some((tensor.weight()?.to_string(), tensor.dtype.to_string()));
        Ok(gradients.iter().filter_map(weight).collect())
    }

    fn __repr__(&self) -> String {
        format!("Spec({:?})", self.text)
    }

    fn __eq__(&self, other: &Spec) -> bool {
        self.text == other.text
    }

    fn __hash__(&self) -> u64 {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let mut hasher = DefaultHasher::new();
        self.text.hash(&mut hasher);
        hasher.finish()
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> (Bound<'py, PyAny>, (String,)) {
        (slf.get_type().into_any(), (slf.get().text.clone(),))
    }
}

fn replayed(spec: &LayerSpec, record: &Imported, layer: usize) -> Result<Replay, Failure> {
    let tensor = record.tensor();
    let &[tokens, layers, top_k] = &*tensor.shape else {
        let problem = format!("has shape {:?}, expected [tokens, layers, K]", tensor.shape);
        return Err(Failure::tensor("routed_experts", problem));
    };
    if tensor.dtype != DType::I32 {
        let problem = format!("is {}, expected i32", tensor.dtype);
        return Err(Failure::tensor("routed_experts", problem));
    }
    let ids = tensor.data.chunks_exact(4);
    let ids = ids.map(|id| i32::from_ne_bytes(id.try_into().expect("four bytes")));
    let shape = RecordShape {
        tokens,
        layers,
        top_k,
    };
    let record = RoutedExperts::new(shape, ids.collect());
    let replay = record.and_then(|record| record.replay(spec, layer));
    replay.map_err(|error| Failure::Invalid(error.to_string()))
}

pub fn float(name: &str) -> Result<DType, Failure> {
    let floats = [DType::F32, DType::F16, DType::Bf16];
    let found = floats.into_iter().find(|dtype| dtype.to_string() == name);
    found.ok_or_else(|| {
        Failure::Invalid(format!("precision `{name}`: a layer has f32, f16 and bf16"))
    })
}

fn checked(spec: LayerSpec) -> PyResult<Spec> {
    let checked = spec.validate().map_err(|problems| {
        let lines: Vec<String> = problems.iter().map(|p| format!("  {p}")).collect();
        Failure::Invalid(format!(
            "the layer spec is not valid:\n{}",
            lines.join("\n")
        ))
    });
    checked?;
    Ok(Spec::new(spec))
}

/// Reads the MoE layer of a model in a folder of transformers: its spec, and its weights by
/// canonical name. Quantized experts are read as the numbers that their codes stand for.
#[pyfunction]
#[pyo3(signature = (folder, layer=0))]
pub fn read_hf(
    py: Python<'_>,
    folder: PathBuf,
    layer: usize,
) -> PyResult<(Spec, BTreeMap<String, Array>)> {
    let (spec, tensors) = without_gil(py, || read(&folder, layer))?;
    let arrays = tensors.into_iter().map(|(n, t)| (n, Array::new(t)));
    Ok((spec, arrays.collect()))
}

fn read(folder: &Path, layer: usize) -> Result<(Spec, Tensors<'static>), Failure> {
    let invalid = |error: &dyn std::fmt::Display| Failure::Invalid(error.to_string());
    let path = folder.join("config.json");
    let config = std::fs::read_to_string(&path)
        .map_err(|error| Failure::Invalid(format!("{}: {error}", path.display())))?;
    let import = hf::import(&config, layer).map_err(|e| invalid(&e))?;
    let checkpoint = Checkpoint::open(folder).map_err(|e| invalid(&e))?;
    let reader = LayerReader::of_import(&import, &checkpoint, LoadOptions::default());
    let tensors = reader.and_then(|reader| reader.load());
    Ok((Spec::new(import.spec), tensors.map_err(|e| invalid(&e))?))
}
