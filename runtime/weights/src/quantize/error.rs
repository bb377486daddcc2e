//! Errors of quantizing.

use crate::WeightsError;
use moesaic_spec::format::EncodeError;
use moesaic_spec::gguf::GgufError;
use moesaic_spec::hf::HfError;
use std::io;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// The reason a model cannot be quantized.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum QuantizeError {
    /// The source's weights cannot be read.
    #[error(transparent)]
    Weights(#[from] WeightsError),

    /// The source's configuration cannot be read.
    #[error("{path}: {source}", path = .path.display())]
    Config {
        /// The configuration.
        path: PathBuf,
        /// The reason.
        source: Box<HfError>,
    },

    /// The source is quantized already.
    #[error(
        "{path} has a quantization_config of `{method}`: quantizing starts from full precision",
        path = .path.display()
    )]
    AlreadyQuantized {
        /// The configuration.
        path: PathBuf,
        /// Its method.
        method: String,
    },

    /// The source has no layer with experts.
    #[error("{path} describes a model without MoE layers", path = .path.display())]
    NoExperts {
        /// The configuration.
        path: PathBuf,
    },

    /// A weight is stored in a form for which the output has no names.
    #[error("`{tensor}` of {layer} cannot be written: {reason}")]
    Unsupported {
        /// The canonical name.
        tensor: String,
        /// The layer.
        layer: String,
        /// The missing part.
        reason: String,
    },

    /// The keys of GGUF cannot express the model.
    #[error(transparent)]
    Gguf(Box<GgufError>),

    /// The values of a matrix, or its size, do not fit the format.
    #[error("`{tensor}`: {source}")]
    Encode {
        /// The name in the source.
        tensor: String,
        /// The reason.
        source: EncodeError,
    },

    /// The output cannot be written.
    #[error("cannot write {path}: {source}", path = .path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },

    /// A file of the output exists and is not what this run would write.
    #[error(
        "{path} is there and is not of this model in this format, or was changed: remove it, or \
         name another output",
        path = .path.display()
    )]
    InTheWay {
        /// The file.
        path: PathBuf,
    },

    /// Another process writes to the same place.
    #[error("another process is writing to {path}", path = .path.display())]
    Busy {
        /// The output.
        path: PathBuf,
    },
}

impl From<GgufError> for QuantizeError {
    fn from(error: GgufError) -> QuantizeError {
        QuantizeError::Gguf(Box::new(error))
    }
}

impl QuantizeError {
    /// Wraps a system error of writing.
    pub(super) fn write(path: &Path) -> impl FnOnce(io::Error) -> QuantizeError + use<> {
        let path = path.to_path_buf();
        move |source| QuantizeError::Write { path, source }
    }

    /// Wraps an encoder's error.
    pub(super) fn encode(tensor: &str) -> impl FnOnce(EncodeError) -> QuantizeError + use<> {
        let tensor = tensor.to_string();
        move |source| QuantizeError::Encode { tensor, source }
    }
}
