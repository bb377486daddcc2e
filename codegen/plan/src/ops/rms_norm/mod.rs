//! `rms_norm`: rows divided by their root mean square.

mod bwd;
mod steps;

pub use bwd::{RmsNormBwdConfig, RmsNormBwdDesc};
pub(crate) use steps::{INPUT_NORM, read_by_projection};

use super::copies::COPY_THREADS;
use super::params::{edges, entry, one, slots_by, some, tokens_by, when};
use super::{Operator, TileMachine};
use crate::Op;
use moesaic_kernel::DType::{self, F32, I64};
use moesaic_kernel::{Entry, Param, Size};
use serde::{Deserialize, Serialize};

/// `rms_norm`: `y = x / sqrt(mean(x²) + eps) ⊙ weight`, for rows `[T, width]`.
///
/// Rows of experts are scaled first: `y = u / sqrt(mean(u²) + eps)` of `u = x ⊙ weight`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RmsNormDesc {
    /// Values of a row.
    pub width: usize,
    /// Element type of x and y.
    pub activations: DType,
    /// The number added to the mean of squares.
    pub eps: f64,
    /// Experts with rows, whose number the device knows; 0 where rows are tokens.
    pub experts: usize,
    /// K; 0 where rows are tokens.
    pub top_k: usize,
}

/// Tiling of `rms_norm`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RmsNormConfig {
    /// Threads per block.
    pub threads: u32,
    /// Rows per block.
    pub tile_tokens: usize,
}

impl Operator for RmsNormDesc {
    type Config = RmsNormConfig;

    fn tiling(&self, machine: TileMachine) -> RmsNormConfig {
        match machine {
            TileMachine::Cpu(_) => RmsNormConfig {
                threads: 1,
                tile_tokens: CPU_TOKENS,
            },
            TileMachine::Gpu(gpu) => RmsNormConfig {
                threads: COPY_THREADS,
                tile_tokens: warps(gpu.wave()),
            },
        }
    }

    fn with(self, config: RmsNormConfig) -> Op {
        Op::RmsNorm { desc: self, config }
    }

    fn entries(&self, config: &RmsNormConfig) -> Vec<Entry> {
        let rows = rows_shape(self.experts, self.width);
        let params = some([
            Some(Param::read("x", self.activations, &rows)),
            Some(Param::read("weight", F32, format!("[{}]", self.width))),
            offsets(self.experts),
            Some(Param::write("y", self.activations, &rows)),
        ]);
        let grid = [rows_by(self.top_k, config.tile_tokens), one()];
        let summary = "divides each row by its root mean square";
        vec![entry("rms_norm", summary, params, grid, config.threads)]
    }

    fn flops(&self, _: &str, tokens: f64) -> f64 {
        4.0 * tokens * self.top_k.max(1) as f64 * self.width as f64
    }
}

/// Rows of a block on a CPU.
const CPU_TOKENS: usize = 32;

/// Returns the rows of a block on a GPU: one for each warp, because the sum over a row ends in a
/// reduction over lanes.
fn warps(wave: u32) -> usize {
    (COPY_THREADS / wave) as usize
}

/// Returns the shape of rows: of experts, or of tokens where there are none.
fn rows_shape(experts: usize, width: usize) -> String {
    let count = if experts > 0 { "rows" } else { "tokens" };
    format!("[{count}, {width}]")
}

/// Returns the parameter that has the number of rows of experts.
fn offsets(experts: usize) -> Option<Param> {
    when(experts > 0, Param::read("offsets", I64, edges(experts)))
}

/// Returns the blocks of so many rows each.
fn rows_by(top_k: usize, tile: usize) -> Size {
    match top_k {
        0 => tokens_by(tile),
        k => slots_by(k, tile as u64),
    }
}
