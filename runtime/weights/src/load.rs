//! Loads whole layers of checkpoints.

use crate::{Checkpoint, LayerReader, WeightsError};
use moesaic_kernel::DType;
use moesaic_spec::LayerSpec;
use moesaic_spec::hf::{Import, TensorSource};
use moesaic_tensor::Tensors;

/// The strictness of loading.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadOptions {
    /// Allow rounding to the spec's element type where it cannot hold the file's values; otherwise
    /// that is an error. Quantized weights are rounded in any case.
    pub narrow: bool,
    /// Allow finite values to become infinite where the spec's element type has a smaller range;
    /// otherwise that is an error. Values that become zero are counted and never an error:
    /// [`LayerReader::rounded`].
    pub allow_infinite: bool,
    /// Ignore tensors of the layer that the spec does not use. Otherwise they are an error, because
    /// a missing bias, for example, changes what the layer computes.
    pub allow_extra: bool,
    /// Read quantized experts as numbers of this type. Otherwise
    /// [`set_expert_formats`](crate::set_expert_formats) keeps their codes where it can.
    pub dequantize: Option<DType>,
}

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
