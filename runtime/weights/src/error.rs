//! What can go wrong with weight files.

use std::io;
use std::path::PathBuf;
use thiserror::Error;

/// Why weights cannot be read or results not be written.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum WeightsError {
    /// The path does not exist.
    #[error("{path} does not exist", path = .path.display())]
    NotFound {
        /// The path.
        path: PathBuf,
    },

    /// The directory holds no weights that can be read.
    #[error("{dir} has no model.safetensors and no model.safetensors.index.json{found}", dir = .dir.display())]
    NoWeights {
        /// The directory.
        dir: PathBuf,
        /// What is there instead.
        found: String,
    },

    /// The system refused to read or write.
    #[error("{path}: {source}", path = .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },

    /// The file is not what its name says, or is cut short.
    #[error("{file} is damaged: {reason}", file = .file.display())]
    Corrupt {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        reason: String,
    },

    /// A tensor is not there.
    #[error("{path} has no tensor for `{tensor}`{tried}{near}", path = .path.display())]
    MissingTensor {
        /// The canonical name.
        tensor: String,
        /// The checkpoint.
        path: PathBuf,
        /// `; looked for …`, or empty where that is the canonical name.
        tried: String,
        /// Similar names that are there.
        near: String,
    },

    /// A state dictionary of another library is not the layer.
    #[error("{path}, read as {library}'s: {problem}", path = .path.display())]
    Keys {
        /// The checkpoint.
        path: PathBuf,
        /// The library.
        library: &'static str,
        /// What does not fit.
        problem: String,
    },

    /// A tensor has another shape.
    #[error("`{tensor}` in {file} has shape {found:?}, expected {expected}", file = .file.display())]
    WrongShape {
        /// The name in the file.
        tensor: String,
        /// The file.
        file: PathBuf,
        /// Its shape.
        found: Vec<usize>,
        /// What it should be.
        expected: String,
    },

    /// A tensor says something else than the configuration or another tensor.
    #[error("`{tensor}` in {file} contradicts what is said elsewhere: {problem}", file = .file.display())]
    Contradiction {
        /// The name in the file.
        tensor: String,
        /// The file.
        file: PathBuf,
        /// What is said, and where.
        problem: String,
    },

    /// A recipe has not as many tensors as the weight has rows.
    #[error("the recipe for `{tensor}` has {found} tensors, one for each of {expected} is needed")]
    WrongCount {
        /// The canonical name.
        tensor: String,
        /// Tensors of the recipe.
        found: usize,
        /// Rows of the weight.
        expected: usize,
    },

    /// A tensor has an element type that cannot become the wanted one.
    #[error("`{tensor}` in {file} has elements of type {found}, expected {expected}", file = .file.display())]
    WrongDType {
        /// The name in the file.
        tensor: String,
        /// The file.
        file: PathBuf,
        /// Its element type.
        found: String,
        /// What it may be.
        expected: String,
    },

    /// The spec's type cannot hold the tensor's values exactly.
    #[error(
        "`{tensor}` in {file} is {found}, the spec stores it as {wanted}, which would round its values: \
         set the spec's precision to {found}, or allow narrowing", file = .file.display()
    )]
    Narrowing {
        /// The name in the file.
        tensor: String,
        /// The file.
        file: PathBuf,
        /// Its element type.
        found: String,
        /// The spec's.
        wanted: String,
    },

    /// Several tensors do not fit, so that all can be mended at once.
    #[error("several tensors do not fit:{}", lines(.errors))]
    Several {
        /// What is wrong with each, two or more; of those that are missing the first.
        errors: Vec<WeightsError>,
    },

    /// A table names an expert that does not exist, or a number is too large.
    #[error("`{tensor}` in {file} has the value {value}, expected {expected}", file = .file.display())]
    BadValue {
        /// The name in the file.
        tensor: String,
        /// The file.
        file: PathBuf,
        /// The value.
        value: i64,
        /// The legal range.
        expected: String,
    },
}

/// Errors that are shown one by one.
const SHOWN: usize = 8;

fn lines(errors: &[WeightsError]) -> String {
    let shown = errors.iter().take(SHOWN);
    let mut text: String = shown.map(|error| format!("\n  {error}")).collect();
    if let more @ 1.. = errors.len().saturating_sub(SHOWN) {
        text += &format!("\n  and {more} more");
    }
    text
}

impl WeightsError {
    /// One error for all that is wrong, at least one thing. Tensors that are missing have one cause as a
    /// rule, which the first of them shows; narrowing is asked for once, when all else is right.
    pub(crate) fn all(mut errors: Vec<WeightsError>) -> WeightsError {
        let misfit = |error: &WeightsError| !matches!(error, WeightsError::Narrowing { .. });
        if errors.iter().any(misfit) {
            errors.retain(misfit)
        } else {
            errors.truncate(1)
        }
        let mut missing = 0;
        errors.retain(|error| {
            missing += usize::from(matches!(error, WeightsError::MissingTensor { .. }));
            missing <= 1 || !matches!(error, WeightsError::MissingTensor { .. })
        });
        // Both halves of a fused tensor say the same.
        errors.dedup_by_key(|error| error.to_string());
        match errors.len() {
            1 => errors.remove(0),
            _ => WeightsError::Several { errors },
        }
    }

    /// Wraps an error of the system.
    pub(crate) fn io(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> WeightsError {
        let path = path.into();
        move |source| match source.kind() {
            io::ErrorKind::NotFound => WeightsError::NotFound { path },
            _ => WeightsError::Io { path, source },
        }
    }
}
