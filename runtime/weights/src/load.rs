//! Loads whole layers of checkpoints.

use crate::{Checkpoint, LayerReader, LoadOptions, WeightsError};
use moesaic_spec::LayerSpec;
use moesaic_spec::hf::{Import, TensorSource};
use moesaic_tensor::Tensors;

/// Loads all tensors of a file with canonical names: [`LayerReader::canonical`], loaded.
///
/// Tensors that need no conversion stay in the mapped file. Do not truncate it while they are
/// alive: the system would end the process (SIGBUS) at the next read. Rename another file onto it
/// instead, or keep copies: [`Tensor::copied`](moesaic_tensor::Tensor::copied). The same holds for
/// [`load_import`], [`load_sources`] and [`load_keys`](crate::load_keys).
///
/// # Errors
///
/// [`WeightsError`] names the tensor, its actual and its expected form.
pub fn load_canonical(
    spec: &LayerSpec,
    checkpoint: &Checkpoint,
    options: LoadOptions,
) -> Result<Tensors<'static>, WeightsError> {
    LayerReader::canonical(spec, checkpoint, options)?.load()
}

/// Loads all tensors of one layer of a Hugging Face checkpoint: [`LayerReader::of_import`], loaded.
///
/// # Errors
///
/// The same as [`load_canonical`].
pub fn load_import(
    import: &Import,
    checkpoint: &Checkpoint,
    options: LoadOptions,
) -> Result<Tensors<'static>, WeightsError> {
    LayerReader::of_import(import, checkpoint, options)?.load()
}

/// Loads all tensors of `spec`, each by its recipe in `sources`: [`LayerReader::of_sources`],
/// loaded.
///
/// # Errors
///
/// The same as [`load_canonical`].
pub fn load_sources(
    spec: &LayerSpec,
    sources: &[TensorSource],
    checkpoint: &Checkpoint,
    options: LoadOptions,
) -> Result<Tensors<'static>, WeightsError> {
    LayerReader::of_sources(spec, sources, checkpoint, options)?.load()
}
