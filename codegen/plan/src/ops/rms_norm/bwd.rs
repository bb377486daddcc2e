//! `rms_norm_bwd`: the gradient of normalised rows to that of the rows, and of the weight.

use super::{CPU_TOKENS, desc, warps};
use crate::layer::{Bind, Builder};
use crate::ops::copies::COPY_THREADS;
use crate::ops::params::{entry, gradient, one, tokens_by};
use crate::ops::{Op, Operator, TileMachine};
use moesaic_kernel::DType::{self, F32};
use moesaic_kernel::{Entry, Param, Size};
use serde::{Deserialize, Serialize};

/// `rms_norm_bwd`: dy `[T, width]` to dx and to the gradient of the weight.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RmsNormBwdDesc {
    /// Values of a row.
    pub width: usize,
    /// Element type of x, dy and dx.
    pub activations: DType,
    /// The number added to the mean of squares.
    pub eps: f64,
}

/// Tiling of `rms_norm_bwd`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RmsNormBwdConfig {
    /// Threads per block.
    pub threads: u32,
    /// Tokens per block of the entry for rows.
    pub tile_tokens: usize,
    /// Columns per block of the entry for the weight, which sums them over all tokens.
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
        // Two entries, because the gradient of the weight is a sum over all tokens: a block of some
        // columns adds them in order, and no two blocks add to one number.
        vec![rows(self, config), weight(self, config)]
    }

    fn flops(&self, _: &str, tokens: f64) -> f64 {
        4.0 * tokens * self.width as f64
    }
}

fn rows(d: &RmsNormBwdDesc, c: &RmsNormBwdConfig) -> Entry {
    let rows = format!("[tokens, {}]", d.width);
    let params = vec![
        Param::read("x", d.activations, &rows),
        Param::read("weight", F32, format!("[{}]", d.width)),
        Param::read("dy", d.activations, &rows),
        // For the entry behind it, which would go over each row once for every block of columns.
        Param::write("inverse_rms", F32, "[tokens]"),
        Param::write("dx", d.activations, &rows),
    ];
    let grid = [tokens_by(c.tile_tokens), one()];
    let summary = "gradients of normalised rows to those of the rows";
    entry("rms_norm_bwd", summary, params, grid, c.threads)
}

fn weight(d: &RmsNormBwdDesc, c: &RmsNormBwdConfig) -> Entry {
    let rows = format!("[tokens, {}]", d.width);
    let params = vec![
        Param::read("x", d.activations, &rows),
        Param::read("dy", d.activations, &rows),
        Param::read("inverse_rms", F32, "[tokens]"),
        gradient("weight", "", &format!("[{}]", d.width)),
        Param::i64("accumulate"),
    ];
    let tiles = Size::Const(d.width.div_ceil(c.columns) as u64);
    let summary = "the gradient of the weight of a norm";
    let symbol = "rms_norm_bwd_weight";
    entry(symbol, summary, params, [tiles, one()], c.threads)
}

/// The tensors behind the parameters of a backward pass.
const NAMES: Bind = &[
    ("x", "latent.sum"),
    ("weight", "latent.norm.weight"),
    ("dy", "latent.dnormed"),
    ("inverse_rms", "latent.inverse_rms"),
    ("dx", "latent.dsum"),
    ("grad_weight", "grad.latent.norm.weight"),
];

impl Builder {
    /// Adds the steps from the gradient of the normalised sum to that of the sum.
    pub(crate) fn latent_norm_bwd(&mut self) {
        if let Some(norm) = desc(&self.plan.spec) {
            let desc = RmsNormBwdDesc {
                width: norm.width,
                activations: norm.activations,
                eps: norm.eps,
            };
            self.launch("rms_norm_bwd", desc, NAMES);
        }
    }
}
