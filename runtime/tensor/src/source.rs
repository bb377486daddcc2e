//! Where a layer's weights come from.

use crate::{Tensor, Tensors};
use moesaic_kernel::DType;
use std::error::Error;
use std::ops::Range;

/// Why a weight cannot be read.
pub type SourceError = Box<dyn Error + Send + Sync>;

/// What gives a layer its weights, each when it is asked for: who makes a layer
/// takes a piece, puts it on the device, and lets go of it before the next.
pub trait WeightSource {
    /// The element type and the shape of a weight; `None` if there is none of
    /// that name. Reads no element.
    fn describe(&self, name: &str) -> Option<(DType, Vec<usize>)>;

    /// Rows of a weight's first dimension, from `rows.start` on: at least one and
    /// at most those of `rows`, as many as can be had without putting them
    /// together first. Of a weight of experts a row is an expert.
    ///
    /// # Errors
    /// Whatever keeps them from being read.
    fn rows(&self, name: &str, rows: Range<usize>) -> Result<Tensor<'_>, SourceError>;
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
}
