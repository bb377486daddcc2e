//! Sources of a layer's weights.

use crate::{Tensor, Tensors};
use moesaic_kernel::DType;
use std::error::Error;
use std::ops::Range;

/// The reason a weight cannot be read.
pub type SourceError = Box<dyn Error + Send + Sync>;

/// A source of weights that a layer reads on demand. Making a layer takes some rows, copies them to
/// the device, and drops them before it takes the next, so that the weights are never all in host
/// memory.
pub trait WeightSource {
    /// Returns the element type and shape of a weight, or `None` if there is none of that name.
    /// Reads no elements.
    fn describe(&self, name: &str) -> Option<(DType, Vec<usize>)>;

    /// Returns rows of a weight's first dimension, from `rows.start` on: at least one, and at most
    /// those of `rows`. A source returns as many as it has contiguously, without assembling them
    /// first. In a weight of experts, a row is an expert.
    ///
    /// # Errors
    /// Any reason they cannot be read.
    fn rows(&self, name: &str, rows: Range<usize>) -> Result<Tensor<'_>, SourceError>;

    /// Returns the names of all weights, if they were put together for one layer, which refuses
    /// them if its spec lacks one. `None`, the default, is for a source with more than one layer's
    /// weights, such as a checkpoint.
    fn names(&self) -> Option<Vec<&str>> {
        None
    }
}

impl WeightSource for Tensors<'_> {
    fn describe(&self, name: &str) -> Option<(DType, Vec<usize>)> {
        let tensor = self.get(name)?;
        Some((tensor.dtype, tensor.shape.clone()))
    }

    fn rows(&self, name: &str, rows: Range<usize>) -> Result<Tensor<'_>, SourceError> {
        let missing = || SourceError::from(format!("there is no tensor `{name}`"));
        Ok(self.get(name).ok_or_else(missing)?.rows(rows)?)
    }

    fn names(&self) -> Option<Vec<&str>> {
        Some(self.keys().map(String::as_str).collect())
    }
}
