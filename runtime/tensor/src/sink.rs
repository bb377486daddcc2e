//! Destinations of tensors that are written a few bytes at a time.

use crate::SourceError;
use moesaic_kernel::DType;

/// A tensor's name, type and shape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Described {
    /// Its name.
    pub name: String,
    /// The element type.
    pub dtype: DType,
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
}

/// A destination of tensors that are not all in memory at once: the counterpart of
/// [`WeightSource`](crate::WeightSource).
pub trait WeightSink {
    /// Announces the tensors, in their order. It is called once, before anything else.
    ///
    /// # Errors
    /// Any reason they cannot be written.
    fn begin(&mut self, tensors: &[Described]) -> Result<(), SourceError>;

    /// Writes the next bytes of the elements of all tensors, one tensor after the other.
    ///
    /// # Errors
    /// The same as [`WeightSink::begin`].
    fn write(&mut self, bytes: &[u8]) -> Result<(), SourceError>;

    /// Ends the writing. Only now do the bytes written before take effect.
    ///
    /// # Errors
    /// The same as [`WeightSink::begin`], or if fewer bytes came than were announced.
    fn end(&mut self) -> Result<(), SourceError>;
}
