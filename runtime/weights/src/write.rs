//! Writes results in one piece.

use crate::WeightsError;
use moesaic_kernel::DType;
use moesaic_tensor::Tensors;
use safetensors::tensor::TensorView;
use std::collections::HashMap;
use std::fs::{self, Permissions};
use std::io::{self, Write};
use std::path::Path;
use tempfile::NamedTempFile;

/// Writes the tensors to `path` as safetensors, as [`write_whole`] does.
///
/// # Errors
///
/// [`WeightsError::Io`] if the file cannot be written, [`WeightsError::Unwritable`] for a tensor
/// whose bytes do not fit its shape.
pub fn write_safetensors(
    path: impl AsRef<Path>,
    tensors: &Tensors<'_>,
) -> Result<(), WeightsError> {
    write_serialized(path.as_ref(), tensors, None)
}

/// A text in the metadata of a file.
#[derive(Clone, Copy, Debug)]
pub struct Note<'a> {
    /// Its key.
    pub key: &'a str,
    /// The text.
    pub text: &'a str,
}

/// Writes the tensors with a text in the file's metadata, which
/// [`Checkpoint::noted`](crate::Checkpoint::noted) returns. There is only one text because the
/// format keeps no order among several, and equal tensors must give equal bytes.
///
/// # Errors
///
/// The same as [`write_safetensors`].
pub fn write_safetensors_noted(
    path: impl AsRef<Path>,
    tensors: &Tensors<'_>,
    note: Note<'_>,
) -> Result<(), WeightsError> {
    let note = HashMap::from([(note.key.to_string(), note.text.to_string())]);
    write_serialized(path.as_ref(), tensors, Some(note))
}

fn write_serialized(
    path: &Path,
    tensors: &Tensors<'_>,
    note: Option<HashMap<String, String>>,
) -> Result<(), WeightsError> {
    let bytes = serialized(path, tensors, note)?;
    write_whole(path, &bytes).map_err(|source| WeightsError::Io {
        path: path.to_path_buf(),
        source,
    })
}

/// Writes a file in one piece: into a temporary file beside it, which is renamed at the end. A
/// reader sees the old file, the new one, or none.
///
/// It follows a symbolic link. A target that is not an ordinary file, such as a pipe or a device,
/// is written to in place.
///
/// # Errors
///
/// The system's error.
pub fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    match fs::metadata(path) {
        Ok(there) if there.is_file() => replace(&fs::canonicalize(path)?, bytes),
        Ok(_) => fs::OpenOptions::new()
            .write(true)
            .open(path)?
            .write_all(bytes),
        Err(_) => replace(path, bytes),
    }
}

fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
    let mut file = permitted(dir.unwrap_or(Path::new(".")))?;
    file.write_all(bytes)?;
    file.as_file().sync_all()?;
    file.persist(path)?;
    Ok(())
}

/// Returns a temporary file with the permissions of an ordinary one.
pub(crate) fn permitted(dir: &Path) -> io::Result<NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(".moesaic-").suffix(".tmp");
    if let Some(permissions) = permissions() {
        builder.permissions(permissions);
    }
    builder.tempfile_in(dir)
}

fn serialized(
    path: &Path,
    tensors: &Tensors<'_>,
    note: Option<HashMap<String, String>>,
) -> Result<Vec<u8>, WeightsError> {
    let invalid = |name: &str, reason: safetensors::SafeTensorError| WeightsError::Unwritable {
        tensor: name.to_string(),
        file: path.to_path_buf(),
        reason,
    };
    let mut views = Vec::with_capacity(tensors.len());
    for (name, tensor) in tensors {
        let view = TensorView::new(theirs(tensor.dtype), tensor.shape.clone(), &tensor.data);
        views.push((name.as_str(), view.map_err(|e| invalid(name, e))?));
    }
    safetensors::serialize(views, note).map_err(|e| WeightsError::Io {
        path: path.to_path_buf(),
        source: io::Error::other(e.to_string()),
    })
}

pub(crate) fn theirs(dtype: DType) -> safetensors::Dtype {
    match dtype {
        DType::F32 => safetensors::Dtype::F32,
        DType::F16 => safetensors::Dtype::F16,
        DType::Bf16 => safetensors::Dtype::BF16,
        DType::I32 => safetensors::Dtype::I32,
        DType::I64 => safetensors::Dtype::I64,
    }
}

/// Returns the permissions of an ordinary new file, because temporary files are private.
#[cfg(unix)]
fn permissions() -> Option<Permissions> {
    use std::os::unix::fs::PermissionsExt;
    Some(Permissions::from_mode(0o666))
}

#[cfg(not(unix))]
fn permissions() -> Option<Permissions> {
    None
}
