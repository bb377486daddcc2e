//! Errors of training.

use moesaic_engine::EngineError;

/// The reason a training step or a change of a checkpoint failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    /// A tensor is missing, unknown, or of the wrong size.
    #[error("tensor `{name}` {problem}")]
    Tensor {
        /// Its name.
        name: String,
        /// The problem, to be read after the name.
        problem: String,
    },
    /// The change would alter the layer's function.
    #[error("{0}")]
    NotPreserved(String),
    /// The layer failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

impl TrainError {
    pub(crate) fn tensor(name: &str, problem: impl Into<String>) -> TrainError {
        TrainError::Tensor {
            name: name.to_string(),
            problem: problem.into(),
        }
    }
}
