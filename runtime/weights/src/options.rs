//! The options of loading.

use moesaic_kernel::DType;

/// The strictness of loading.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadOptions {
    /// Allow rounding to the spec's element type where it cannot hold the file's values; otherwise
    /// that is an error. Quantized weights are rounded in any case.
    pub narrow: bool,
    /// Allow finite values to become infinite where the spec's element type has a smaller range;
    /// otherwise that is an error. Values that become zero are counted and never an error:
    /// [`LayerReader::rounded`](crate::LayerReader::rounded).
    pub allow_infinite: bool,
    /// Ignore tensors of the layer that the spec does not use. Otherwise they are an error, because
    /// a missing bias, for example, changes what the layer computes.
    pub allow_extra: bool,
    /// Read quantized experts as numbers of this type. Otherwise
    /// [`set_expert_formats`](crate::set_expert_formats) keeps their codes where it can.
    pub dequantize: Option<DType>,
}
