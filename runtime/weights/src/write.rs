//! Results written in one piece.

use crate::{HostWeights, WeightsError};
use moesaic_kernel::DType;
use safetensors::tensor::TensorView;
use std::fs::Permissions;
use std::io::{self, Write};
use std::path::Path;

/// Writes the tensors to `path` as safetensors: into a temporary file beside
/// it that takes its name at the end, so that a reader sees the old file, the
/// new one, or none.
///
/// # Errors
///
/// [`WeightsError::Io`] or [`WeightsError::NotFound`] when the directory
/// cannot be written to, [`WeightsError::Corrupt`] for a tensor whose bytes do
/// not fit its shape.
pub fn write_safetensors(
    path: impl AsRef<Path>,
    tensors: &HostWeights,
) -> Result<(), WeightsError> {
    let path = path.as_ref();
    let bytes = serialized(path, tensors)?;
    let dir = match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    };
    let mut builder = tempfile::Builder::new();
    builder.prefix(".moesaic-").suffix(".tmp");
    if let Some(permissions) = permissions() {
        builder.permissions(permissions);
    }
    let mut file = builder.tempfile_in(dir).map_err(WeightsError::io(dir))?;
    file.write_all(&bytes).map_err(WeightsError::io(path))?;
    file.as_file().sync_all().map_err(WeightsError::io(path))?;
    file.persist(path)
        .map_err(|e| WeightsError::io(path)(e.error))?;
    Ok(())
}

fn serialized(path: &Path, tensors: &HostWeights) -> Result<Vec<u8>, WeightsError> {
    let invalid = |name: &str, error: safetensors::SafeTensorError| WeightsError::Corrupt {
        file: path.to_path_buf(),
        reason: format!("`{name}` cannot be written ({error})"),
    };
    let mut views = Vec::with_capacity(tensors.len());
    for (name, tensor) in tensors {
        let view = TensorView::new(theirs(tensor.dtype), tensor.shape.clone(), &tensor.bytes);
        views.push((name.as_str(), view.map_err(|e| invalid(name, e))?));
    }
    safetensors::serialize(views, None).map_err(|e| WeightsError::Io {
        path: path.to_path_buf(),
        source: io::Error::other(e.to_string()),
    })
}

fn theirs(dtype: DType) -> safetensors::Dtype {
    match dtype {
        DType::F32 => safetensors::Dtype::F32,
        DType::F16 => safetensors::Dtype::F16,
        DType::Bf16 => safetensors::Dtype::BF16,
        DType::I32 => safetensors::Dtype::I32,
        DType::I64 => safetensors::Dtype::I64,
    }
}

/// What an ordinary new file would get; temporary files are private otherwise.
#[cfg(unix)]
fn permissions() -> Option<Permissions> {
    use std::os::unix::fs::PermissionsExt;
    Some(Permissions::from_mode(0o666))
}

#[cfg(not(unix))]
fn permissions() -> Option<Permissions> {
    None
}
