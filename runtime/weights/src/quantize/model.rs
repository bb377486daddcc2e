//! The full-precision model that is quantized.

use super::QuantizeError;
use crate::{Checkpoint, LayerReader, LoadOptions, WeightsError};
use moesaic_kernel::DType;
use moesaic_spec::hf::{self, Alternative, HfError, Import, TensorSource, TensorStep, parse_json};
use moesaic_spec::{TensorSpec, canonical_tensors};
use moesaic_tensor::WeightSource;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

/// A folder with config.json and safetensors.
pub(super) struct Model {
    pub folder: PathBuf,
    /// The text of config.json.
    pub config: String,
    pub checkpoint: Checkpoint,
    /// The layers with experts.
    pub layers: Vec<Layer>,
}

/// A layer with experts, whose weights are read as f32.
pub(super) struct Layer {
    pub index: usize,
    pub import: Import,
}

impl Model {
    pub fn open(folder: &Path) -> Result<Model, QuantizeError> {
        let config_file = folder.join("config.json");
        let config = fs::read_to_string(&config_file).map_err(WeightsError::io(&config_file))?;
        check_float(folder, &config_file, &config)?;
        let invalid = |source: HfError| QuantizeError::Config {
            path: config_file.clone(),
            source: Box::new(source),
        };
        let mut layers = Vec::new();
        for index in hf::moe_layers(&config).map_err(invalid)? {
            let mut import = hf::import(&config, index).map_err(invalid)?;
            import.spec.precision.weights = DType::F32;
            layers.push(Layer { index, import });
        }
        if layers.is_empty() {
            return Err(QuantizeError::NoExperts { path: config_file });
        }
        Ok(Model {
            checkpoint: Checkpoint::open(folder)?,
            folder: folder.to_path_buf(),
            config,
            layers,
        })
    }

    /// Returns the readers of all layers, which checks every layer before anything is written.
    pub fn readers(&self) -> Result<Vec<LayerReader<'_>>, QuantizeError> {
        let options = LoadOptions::default();
        let reader =
            |layer: &Layer| LayerReader::of_import(&layer.import, &self.checkpoint, options);
        let readers = self.layers.iter().map(reader);
        Ok(readers.collect::<Result<_, WeightsError>>()?)
    }

    /// Returns the recipe by which the checkpoint holds a tensor.
    pub fn held<'a>(&self, source: &'a TensorSource) -> Option<&'a Alternative> {
        source.alternatives.iter().find(|alternative| {
            let names = alternative.names();
            names.first().is_some_and(|name| self.checkpoint.has(name))
        })
    }

    /// Returns the sum of the tensors' bytes.
    pub fn bytes(&self) -> Result<u64, QuantizeError> {
        let mut bytes = 0;
        for name in self.checkpoint.names() {
            let found = self.checkpoint.find(name)?;
            bytes += found.map_or(0, |tensor| tensor.bytes.len() as u64);
        }
        Ok(bytes)
    }
}

/// Refuses a model that says it is quantized.
fn check_float(folder: &Path, file: &Path, config: &str) -> Result<(), QuantizeError> {
    let read = parse_json(config).unwrap_or_default();
    let beside = folder.join("hf_quant_config.json");
    let (path, method) = match said(&read) {
        Some(said) => {
            let method = said.get("quant_method").and_then(Value::as_str);
            (file.to_path_buf(), method.unwrap_or("unknown"))
        }
        None if beside.exists() => (beside, "modelopt"),
        None => return Ok(()),
    };
    Err(QuantizeError::AlreadyQuantized {
        path,
        method: method.to_string(),
    })
}

/// Returns what a configuration, or one inside it such as `text_config`, says of quantization.
fn said(config: &Value) -> Option<&Value> {
    let own = ["quantization_config", "compression_config"];
    let mut own = own.iter().filter_map(|key| config.get(key));
    let found = own.find(|said| !said.is_null());
    let inner = || {
        let keys = config.as_object()?.iter();
        let mut inner = keys.filter(|(key, _)| key.ends_with("_config"));
        inner.find_map(|(_, value)| said(value))
    };
    found.or_else(inner)
}

impl Layer {
    /// Returns the routed experts' matrices, by canonical names.
    pub fn expert_matrices(&self) -> Vec<TensorSpec> {
        let mut tensors = canonical_tensors(&self.import.spec);
        let is = |name: &str| name.starts_with("experts.") && name.ends_with(".weight");
        tensors.retain(|tensor| is(&tensor.name) && tensor.shape.len() == 3);
        tensors
    }

    pub fn source(&self, canonical: &str) -> Option<&TensorSource> {
        let mut sources = self.import.sources.iter();
        sources.find(|source| source.name == canonical)
    }

    pub fn unsupported(&self, canonical: &str, reason: &str) -> QuantizeError {
        QuantizeError::Unsupported {
            tensor: canonical.to_string(),
            layer: self.import.spec.name.clone(),
            reason: reason.to_string(),
        }
    }
}

/// Returns true for a recipe that computes, so that the file's numbers are not the weight's.
pub(super) fn computes(alternative: &Alternative) -> bool {
    alternative.steps.iter().any(|step| {
        matches!(
            step,
            TensorStep::Factor(_)
                | TensorStep::MulColumns(_)
                | TensorStep::DivColumns(_)
                | TensorStep::Plus(_)
        )
    })
}

/// Reads one expert of a canonical tensor.
pub(super) fn expert(
    reader: &LayerReader<'_>,
    tensor: &str,
    expert: usize,
) -> Result<Vec<f32>, QuantizeError> {
    let rows = reader.rows(tensor, expert..expert + 1);
    let rows = rows.map_err(|error| match error.downcast::<WeightsError>() {
        Ok(error) => QuantizeError::Weights(*error),
        Err(other) => QuantizeError::Unsupported {
            tensor: tensor.to_string(),
            layer: format!("expert {expert}"),
            reason: other.to_string(),
        },
    })?;
    Ok(rows.to_f32())
}

/// Adds a `quantization_config` at the end of a configuration. The rest of its text stays as it is,
/// but for a `quantization_config` of null, which would give the key two values.
pub(super) fn with_config(config: &str, quantization: &Value) -> String {
    let text = without_null(config);
    let text = text.trim_end();
    let before = text.strip_suffix('}').unwrap_or(text).trim_end();
    let said = format!("{quantization:#}").replace('\n', "\n  ");
    let comma = if before.ends_with('{') { "" } else { "," };
    format!("{before}{comma}\n  \"quantization_config\": {said}\n}}\n")
}

/// Removes a `quantization_config` of null, and the comma that it leaves behind.
fn without_null(config: &str) -> String {
    const KEY: &str = "\"quantization_config\"";
    let null = |(at, _): (usize, &str)| {
        let after = config[at + KEY.len()..].trim_start().strip_prefix(':')?;
        Some((at, after.trim_start().strip_prefix("null")?.trim_start()))
    };
    let Some((at, after)) = config.match_indices(KEY).find_map(null) else {
        return config.to_string();
    };
    let before = &config[..at];
    let joined = match after.strip_prefix(',') {
        Some(after) => format!("{before}{}", after.trim_start()),
        None => format!("{}\n{after}", before.trim_end().trim_end_matches(',')),
    };
    without_null(&joined)
}
