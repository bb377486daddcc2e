//! `rms_norm_bwd`: the gradient of normalised rows to that of the rows, and of the weight.

use super::{CPU_TOKENS, offsets, rows_by, rows_shape, warps};
use crate::ops::copies::COPY_THREADS;
use crate::ops::params::{entry, gradient, one, per_slot, some, when};
use crate::ops::{Op, Operator, TileMachine};
use moesaic_kernel::DType::{self, F32, I32};
use moesaic_kernel::{Entry, Param, Size};
use serde::{Deserialize, Serialize};

/// `rms_norm_bwd`: dy `[T, width]` to dx and to the gradient of the weight.
///
/// Rows of experts have weights of their own: dx is the gradient of what such a weight multiplies,
/// and the kernel also sums the gradient of that weight.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RmsNormBwdDesc {
    /// Values of a row.
    pub width: usize,
    /// Element type of x, dy and dx.
    pub activations: DType,
    /// The number added to the mean of squares.
    pub eps: f64,
    /// Experts with rows, whose number the device knows; 0 where rows are tokens.
    pub experts: usize,
    /// K; 0 where rows are tokens.
    pub top_k: usize,
    /// A token whose dy is all zeros adds nothing: it may hold NaN, and 0 · NaN is NaN.
    pub clears: bool,
}

/// Tiling of `rms_norm_bwd`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RmsNormBwdConfig {
    /// Threads per block.
    pub threads: u32,
    /// Rows per block of the entry for rows.
    pub tile_tokens: usize,
    /// Columns per block of the entry for the weight, which sums them over all rows.
    pub columns: usize,
}

/// Columns of a block, whose elements of a row are whole sectors of memory in any type.
const COLUMNS: usize = 32;

impl Operator for RmsNormBwdDesc {
    type Config = RmsNormBwdConfig;

    fn tiling(&self, machine: TileMachine) -> RmsNormBwdConfig {
        match machine {
            TileMachine::Cpu(_) => RmsNormBwdConfig {
                threads: 1,
                tile_tokens: CPU_TOKENS,
                columns: COLUMNS,
            },
            TileMachine::Gpu(gpu) => RmsNormBwdConfig {
                threads: COPY_THREADS,
                tile_tokens: warps(gpu.wave()),
                columns: COLUMNS,
            },
        }
    }

    fn with(self, config: RmsNormBwdConfig) -> Op {
        Op::RmsNormBwd { desc: self, config }
    }

    fn entries(&self, config: &RmsNormBwdConfig) -> Vec<Entry> {
        // Two entries, because the gradient of the weight is a sum over all rows: a block of some
        // columns adds them in order, and no two blocks add to one number.
        vec![rows(self, config), weight(self, config)]
    }

    fn flops(&self, _: &str, tokens: f64) -> f64 {
        4.0 * tokens * self.top_k.max(1) as f64 * self.width as f64
    }
}

fn rows(d: &RmsNormBwdDesc, c: &RmsNormBwdConfig) -> Entry {
    let (rows, of_experts) = (rows_shape(d.experts, d.width), d.experts > 0);
    let params = some([
        Some(Param::read("x", d.activations, &rows)),
        Some(Param::read("weight", F32, format!("[{}]", d.width))),
        Some(Param::read("dy", d.activations, &rows)),
        offsets(d.experts),
        when(of_experts, Param::read("row_slots", I32, "[rows]")),
        when(
            of_experts,
            Param::read("topk_weights", F32, per_slot(d.top_k)),
        ),
        // For the entry behind it, which would go over each row once for every block of columns.
        Some(kept(d, Param::write)),
        when(of_experts, Param::write("dweight_parts", F32, "[rows, 1]")),
        Some(Param::write("dx", d.activations, &rows)),
    ]);
    let grid = [rows_by(d.top_k, c.tile_tokens), one()];
    let summary = "gradients of normalised rows to those of the rows";
    entry("rms_norm_bwd", summary, params, grid, c.threads)
}

/// Returns the numbers of each row that the second entry reads: of a token the inverse of its root
/// mean square, of an expert's row that times the row's weight, and the part of its gradient along
/// itself.
fn kept(d: &RmsNormBwdDesc, access: impl Fn(&str, DType, String) -> Param) -> Param {
    match d.experts {
        0 => access("inverse_rms", F32, "[tokens]".to_string()),
        _ => access("factors", F32, "[rows, 2]".to_string()),
    }
}

fn weight(d: &RmsNormBwdDesc, c: &RmsNormBwdConfig) -> Entry {
    let (rows, of_experts) = (rows_shape(d.experts, d.width), d.experts > 0);
    let weight = format!("[{}]", d.width);
    let params = some([
        Some(Param::read("x", d.activations, &rows)),
        when(of_experts, Param::read("weight", F32, &weight)),
        Some(Param::read("dy", d.activations, &rows)),
        offsets(d.experts),
        Some(kept(d, Param::read)),
        Some(gradient("weight", "", &weight)),
        Some(Param::i64("accumulate")),
    ]);
    let tiles = Size::Const(d.width.div_ceil(c.columns) as u64);
    let summary = "the gradient of the weight of a norm";
    let symbol = "rms_norm_bwd_weight";
    entry(symbol, summary, params, [tiles, one()], c.threads)
}
