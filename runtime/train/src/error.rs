//! What can go wrong.

use moesaic_engine::EngineError;

/// A training step or a change of a checkpoint that cannot be done.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    /// A tensor is missing, unknown, or of another size than it must be.
    #[error("tensor `{name}` {problem}")]
    Tensor {
        /// Its name.
        name: String,
        /// What is wrong, to be read after the name.
        problem: String,
    },
    /// The layer cannot be changed so without changing what it computes.
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
