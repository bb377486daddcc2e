//! Errors of weight files.

use crate::Damage;
use moesaic_spec::format::StoredError;
use safetensors::SafeTensorError;
use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;
use thiserror::Error;

/// The reason weights cannot be read, or results cannot be written.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum WeightsError {
    /// The path does not exist.
    #[error("{path} does not exist", path = .path.display())]
    NotFound {
        /// The path.
        path: PathBuf,
    },

    /// The index names a shard that is not in the directory.
    #[error(
        "`{tensor}` is in {file}, which is missing: put this shard beside the index (a layer needs \
         only the shards that hold it)", file = .file.display()
    )]
    MissingShard {
        /// The name in the index.
        tensor: String,
        /// The file.
        file: PathBuf,
    },

    /// The directory holds no readable weights.
    #[error("{dir} has no model.safetensors and no model.safetensors.index.json{found}", dir = .dir.display())]
    NoWeights {
        /// The directory.
        dir: PathBuf,
        /// The files that it has instead.
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

    /// The path is a pipe, a device or the like.
    #[error("{path} is no regular file, and others cannot be mapped: copy its contents to one", path = .path.display())]
    NotRegular {
        /// The path.
        path: PathBuf,
    },

    /// The file is truncated, or its content does not match its name.
    #[error("{file} is damaged: {reason}", file = .file.display())]
    Corrupt {
        /// The file.
        file: PathBuf,
        /// The damage.
        #[source]
        reason: Damage,
    },

    /// A tensor whose bytes are not those of its shape, so no file can hold it.
    #[error("`{tensor}` cannot be written to {file} ({reason})", file = .file.display())]
    Unwritable {
        /// The tensor's name.
        tensor: String,
        /// The file.
        file: PathBuf,
        /// The contradiction.
        #[source]
        reason: SafeTensorError,
    },

    /// A tensor is missing.
    #[error("{path} has no tensor for `{tensor}`{tried}{near}", path = .path.display())]
    MissingTensor {
        /// The canonical name.
        tensor: String,
        /// The checkpoint.
        path: PathBuf,
        /// `; looked for …`, or empty if only the canonical name was tried.
        tried: String,
        /// Similar names that exist.
        near: String,
    },

    /// The file has tensors that the spec does not use, so the layer would compute something else
    /// than the file means.
    #[error(
        "{path} has {}: remove {}, change the spec, or allow extra tensors, which ignores them", strays(.tensors),
        if .tensors.len() == 1 { "it" } else { "them" }, path = .path.display()
    )]
    Extra {
        /// The checkpoint.
        path: PathBuf,
        /// Each name with its likely meaning: `` `router.bias` (used with …) ``.
        tensors: Vec<String>,
    },

    /// A spec asks for codes that the file cannot give exactly.
    #[error(
        "`precision.experts` asks for codes of the format {format}, but `{tensor}` in {file} \
         {reason}: name its own format, or leave the key out to get numbers",
        file = .file.display()
    )]
    NoCodes {
        /// The name in the file.
        tensor: String,
        /// The file.
        file: PathBuf,
        /// The format in the spec.
        format: String,
        /// The reason.
        #[source]
        reason: CodesError,
    },

    /// A tensor fits with and without a transpose, and no other tensor decides.
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

    /// A state dictionary of another library does not match the layer.
    #[error("{path}, read as {library}'s: {problem}", path = .path.display())]
    Keys {
        /// The checkpoint.
        path: PathBuf,
        /// The library.
        library: &'static str,
        /// The mismatch.
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
        /// The expected shape.
        expected: String,
    },

    /// A tensor contradicts the configuration or another tensor.
    #[error("`{tensor}` in {file} contradicts the configuration or another tensor: {problem}", file = .file.display())]
    Contradiction {
        /// The name in the file.
        tensor: String,
        /// The file.
        file: PathBuf,
        /// The contradiction, and its other side.
        problem: String,
    },

    /// The number of tensors in a recipe differs from the rows of the weight.
    #[error("the recipe for `{tensor}` has {found} tensors, one for each of {expected} is needed")]
    WrongCount {
        /// The canonical name.
        tensor: String,
        /// The tensors of the recipe.
        found: usize,
        /// The rows of the weight.
        expected: usize,
    },

    /// An element type cannot be converted to the wanted one.
    #[error("`{tensor}` in {file} has elements of type {found}, expected {expected}", file = .file.display())]
    WrongDType {
        /// The name in the file.
        tensor: String,
        /// The file.
        file: PathBuf,
        /// Its element type.
        found: String,
        /// The accepted types.
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
        /// The spec's type.
        wanted: String,
    },

    /// Rounding to the spec's type makes finite values infinite.
    #[error(
        "rounding `{tensor}` in {file} to {wanted} makes {infinite} of its finite values infinite \
         and {zero} of its others zero: set the spec's precision to one with a wider range \
         (bf16, f32), or allow infinities", file = .file.display()
    )]
    Overflow {
        /// The name in the file; the first one, if several make the weight.
        tensor: String,
        /// The file.
        file: PathBuf,
        /// The spec's type.
        wanted: String,
        /// The number of finite values that become infinite.
        infinite: u64,
        /// The number of nonzero values that become zero.
        zero: u64,
    },

    /// Several tensors do not fit. They are reported together so that you can fix them at once.
    #[error("several tensors do not fit:{}", lines(.errors))]
    Several {
        /// Two or more errors; of missing tensors only the first.
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
        /// The accepted range.
        expected: String,
    },
}

/// A matrix of the file whose codes a layer cannot take as they are.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum CodesError {
    /// It is numbers.
    #[error("is not quantized")]
    NotQuantized,
    /// Every column is multiplied by a number.
    #[error("its columns have factors of their own")]
    ColumnFactors,
    /// The experts of a layer have different formats.
    #[error("experts are quantized in different ways")]
    DifferentExperts,
    /// The layer's rows begin or end within rows of the file.
    #[error("its rows are not whole rows of the file's matrices")]
    PartsOfRows,
    /// No format of codes holds it exactly.
    #[error(transparent)]
    NoFormat(#[from] StoredError),
    /// Another format holds it.
    #[error("has codes of the format {format}")]
    OtherFormat {
        /// Its own format.
        format: String,
    },
    /// The format's type of scales cannot hold one of the file.
    #[error("has a scale of {number:e}, which the format cannot hold")]
    Scale {
        /// The scale in the file.
        number: f32,
    },
}

/// The number of errors shown one by one.
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
    /// Combines a nonempty list of errors into one. Missing tensors usually have a single cause, so
    /// only the first is kept. A request to narrow is kept only if there is no other error.
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
        // Both halves of a fused tensor report the same.
        errors.dedup_by_key(|error| error.to_string());
        match errors.len() {
            1 => errors.remove(0),
            _ => WeightsError::Several { errors },
        }
    }

    /// Wraps a system error.
    pub(crate) fn io(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> WeightsError {
        let path = path.into();
        move |source| match source.kind() {
            io::ErrorKind::NotFound => WeightsError::NotFound { path },
            _ => WeightsError::Io { path, source },
        }
    }
}
