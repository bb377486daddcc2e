//! Layers of checkpoints, all at once.

use crate::{Checkpoint, LayerReader, WeightsError};
use moesaic_spec::LayerSpec;
use moesaic_spec::hf::{Import, TensorSource};
use moesaic_tensor::Tensors;

/// How strict loading is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadOptions {
    /// Round values to the spec's element type where it cannot hold those of
    /// the file; otherwise that is an error. What was quantized is rounded in any case.
    pub narrow: bool,
    /// Let finite values become infinite where the spec's element type has a smaller range;
    /// otherwise that is an error. What becomes zero is counted, and no error:
    /// [`LayerReader::rounded`].
    pub allow_infinite: bool,
    /// Ignore tensors of the layer that the spec has no use for; otherwise they are an error,
    /// because a bias that is not added, for one, changes what the layer computes.
    pub allow_extra: bool,
}

/// All tensors of a file with canonical names: [`LayerReader::canonical`], loaded.
///
/// Tensors that the file has as they should be stay in the file, which is mapped into
/// memory. It must not be cut short as long as they are there: the system would end
/// the process (SIGBUS) when one is read. Replace such a file by another of its name
/// instead, or keep copies: [`Tensor::copied`](moesaic_tensor::Tensor::copied).
/// [`load_import`], [`load_sources`] and [`load_keys`](crate::load_keys) are alike.
///
/// # Errors
///
/// [`WeightsError`] names the tensor, what it is and what was expected.
pub fn load_canonical(
    spec: &LayerSpec,
    checkpoint: &Checkpoint,
    options: LoadOptions,
) -> Result<Tensors<'static>, WeightsError> {
    LayerReader::canonical(spec, checkpoint, options)?.load()
}

/// All tensors of one layer of a Hugging Face checkpoint: [`LayerReader::of_import`],
/// loaded.
///
/// # Errors
///
/// As [`load_canonical`].
pub fn load_import(
    import: &Import,
    checkpoint: &Checkpoint,
    options: LoadOptions,
) -> Result<Tensors<'static>, WeightsError> {
    LayerReader::of_import(import, checkpoint, options)?.load()
}

/// All tensors of `spec`, each put together by its recipe in `sources`:
/// [`LayerReader::of_sources`], loaded.
///
/// # Errors
///
/// As [`load_canonical`].
pub fn load_sources(
    spec: &LayerSpec,
    sources: &[TensorSource],
    checkpoint: &Checkpoint,
    options: LoadOptions,
) -> Result<Tensors<'static>, WeightsError> {
    LayerReader::of_sources(spec, sources, checkpoint, options)?.load()
}
