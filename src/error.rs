//! The error of this crate, around those of its parts.

use moesaic_cache::StoreError;
use moesaic_collectives::CollectiveError;
use moesaic_emit::EmitError;
use moesaic_engine::EngineError;
use moesaic_plan::PlanError;
use moesaic_spec::SpecError;
use moesaic_spec::gguf::GgufError;
use moesaic_spec::hf::HfError;
use moesaic_target::{CompileError, DeviceError};
use moesaic_typed::ShapeError;
use moesaic_weights::WeightsError;
use std::fmt;
use std::path::PathBuf;

use crate::{OpenError, TargetNameError};

/// Any error of this crate. The errors of its functions convert into it by `?`, so a program needs
/// one type.
///
/// `Debug` prints the same text as `Display`, because Rust prints the `Debug` of an error that
/// `main` returns.
///
/// ```
/// use moesaic::{Engine, Input, LayerSpec, Tensors};
///
/// fn run(toml: &str) -> Result<Vec<f32>, moesaic::Error> {
///     let spec = LayerSpec::from_toml(toml)?;
///     let layer = Engine::cpu()?.layer(&spec, &Tensors::new())?;
///     Ok(layer.forward(&Input::new(1, &[0.5f32; 64]))?.y().to_f32())
/// }
///
/// let error = run("shape = { model_dim = 64 }").unwrap_err();
/// assert!(matches!(error, moesaic::Error::Spec(_)));
/// assert_eq!(format!("{error:?}"), error.to_string());
/// ```
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A text that is no valid spec.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// An engine that could not be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A target name that means nothing.
    #[error(transparent)]
    Target(#[from] TargetNameError),
    /// A layer that could not be made or called.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A checkpoint that cannot be read.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// A `config.json` from which no spec can be made.
    #[error(transparent)]
    Hf(Box<HfError>),
    /// A GGUF file from which no spec can be made.
    #[error(transparent)]
    Gguf(Box<GgufError>),
    /// A folder without a model.
    #[error(
        "{folder} has no config.json; give the folder of a model on this machine, as \
         `hf download MODEL --local-dir {folder}` writes it",
        folder = folder.display()
    )]
    NoModel {
        /// The folder.
        folder: PathBuf,
    },
    /// A file that cannot be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A layer that cannot be planned for a target.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A defect in a template.
    #[error(transparent)]
    Emit(#[from] EmitError),
    /// A kernel that does not compile, or a compiler that is missing.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// A device that is missing or failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A store of kernels that cannot be read or written.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A pack that cannot be read or written.
    #[cfg(feature = "packs")]
    #[error(transparent)]
    Pack(#[from] moesaic_cache::PackError),
    /// An exchange between ranks that failed.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// A slice that has not the length of a typed array.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// An optimizer or a checkpoint of training.
    #[cfg(feature = "train")]
    #[error(transparent)]
    Train(#[from] moesaic_train::TrainError),
}

/// Boxed, because these are the largest, and every result of the crate has room for an error.
impl From<HfError> for Error {
    fn from(error: HfError) -> Error {
        Error::Hf(Box::new(error))
    }
}

impl From<GgufError> for Error {
    fn from(error: GgufError) -> Error {
        Error::Gguf(Box::new(error))
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The result of a fallible function of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
