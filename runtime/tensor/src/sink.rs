//! Where tensors go, a piece at a time.

use crate::SourceError;
use moesaic_kernel::DType;

/// A tensor by name, without its elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Described {
    /// Its name.
    pub name: String,
    /// The type of its elements.
    pub dtype: DType,
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
}

/// What takes tensors that are not in memory all at once: the counterpart of
/// [`WeightSource`](crate::WeightSource).
pub trait WeightSink {
    /// Says which tensors come, in their order. It is called once, before anything else.
    ///
    /// # Errors
    /// Whatever keeps them from being written.
    fn begin(&mut self, tensors: &[Described]) -> Result<(), SourceError>;

    /// The next bytes of the elements of all tensors, one tensor after the other.
    ///
    /// # Errors
    /// As [`WeightSink::begin`].
    fn write(&mut self, bytes: &[u8]) -> Result<(), SourceError>;

    /// All bytes have come. What was written before counts only now.
    ///
    /// # Errors
    /// As [`WeightSink::begin`]; also when it was less than was said.
    fn end(&mut self) -> Result<(), SourceError>;
}
