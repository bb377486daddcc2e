//! Transfers of rows, and element types, as collectives take them.

use super::all_to_all::RowContent;
use super::rows::RowRange;
use crate::error::EngineError;
use moesaic_collectives::{CommElement, Slice, Transfer};
use moesaic_kernel::DType;
use moesaic_plan::{self as plan, TensorId};
use moesaic_target::Buffer;
use std::ops::Range;
use std::sync::Arc;

/// The rows of a part's tensor that an exchange sends or receives.
pub(super) struct TensorRows {
    pub part: plan::PlanPart,
    pub tensor: TensorId,
    pub ranges: Vec<RowRange>,
}

/// The rows of an exchange.
pub(super) struct RowTransfer {
    pub content: RowContent,
    /// The indices of chunks of [`super::rows::Rows`].
    pub chunks: Range<usize>,
    /// The rows that this rank sends.
    pub sent: TensorRows,
    /// The rows that it receives.
    pub received: TensorRows,
}

/// Returns transfers of ranges of a buffer's rows, of `bytes` bytes each.
pub(super) fn transfers(
    buffer: &Arc<Buffer>,
    bytes: usize,
    chunks: &[RowRange],
) -> Result<Vec<Transfer>, EngineError> {
    let transfer = |chunk: &RowRange| {
        let (first, size) = (chunk.first * bytes, chunk.rows * bytes);
        Ok(Transfer {
            peer: chunk.peer,
            // Bytes, whatever the dtype, because an exchange only moves rows. A schedule that sums
            // some of them knows their element type itself.
            slice: Slice::new(buffer, CommElement::U8, first, size)?,
        })
    };
    chunks.iter().map(transfer).collect()
}

/// Returns the element type of collectives for a dtype.
pub(super) fn element(dtype: DType) -> CommElement {
    match dtype {
        DType::F32 => CommElement::F32,
        DType::F16 => CommElement::F16,
        DType::Bf16 => CommElement::Bf16,
        DType::I32 => CommElement::I32,
        DType::I64 => CommElement::I64,
    }
}
