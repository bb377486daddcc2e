//! What can go wrong with weight files.

use std::collections::BTreeSet;
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

    /// A shard that the index names is not in the directory.
    #[error(
        "`{tensor}` is in {file}, which is not there: put this shard beside the index (those of \
         other layers are not needed)", file = .file.display()
    )]
    MissingShard {
        /// The name in the index.
        tensor: String,
        /// The file.
        file: PathBuf,
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

    /// There are tensors that the spec has no use for: the layer would compute something else
    /// than the file means.
    #[error(
        "{path} has {}: remove {}, change the spec, or allow extra tensors, which ignores them", strays(.tensors),
        if .tensors.len() == 1 { "it" } else { "them" }, path = .path.display()
    )]
    Extra {
        /// The checkpoint.
        path: PathBuf,
        /// Each name, and what it may mean: `` `router.bias` (used with …) ``.
        tensors: Vec<String>,
    },

    /// A tensor fits in two orders of its dimensions, and nothing tells which one it has.
    #[error(
        "`{tensor}` in {file} has shape {found:?}, which fits both as it is and transposed, and no \
         other tensor of the layer tells which one it is: store the experts one by one, or in \
         canonical names", file = .file.display()
    )]
    Ambiguous {
        /// The name in the file.
        tensor: String,
        /// The file.
        file: PathBuf,
        /// Its shape.
        found: Vec<usize>,
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

    /// Rounding to the spec's type makes finite values infinite.
    #[error(
        "rounding `{tensor}` in {file} to {wanted} makes {infinite} of its finite values infinite \
         and {zero} of its others zero: set the spec's precision to one with a wider range \
         (bf16, f32), or allow infinities", file = .file.display()
    )]
    Overflow {
        /// The name in the file; of several that make a weight, the first.
        tensor: String,
        /// The file.
        file: PathBuf,
        /// The spec's type.
        wanted: String,
        /// Finite values of the weight that become infinite.
        infinite: u64,
        /// Values of the weight other than zero that become zero.
        zero: u64,
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

fn strays(tensors: &[String]) -> String {
    let shown = tensors[..tensors.len().min(SHOWN)].join(", ");
    let more = match tensors.len().saturating_sub(SHOWN) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    match tensors.len() {
        1 => format!("a tensor that the layer does not use, {shown}"),
        count => format!("{count} tensors that the layer does not use, {shown}{more}"),
    }
}

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
        let mut causes = BTreeSet::new();
        errors.retain(|error| match error {
            WeightsError::MissingTensor { .. } => causes.insert(None),
            WeightsError::MissingShard { file, .. } => causes.insert(Some(file.clone())),
            _ => true,
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
