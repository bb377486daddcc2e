//! `rms_norm`: rows divided by their root mean square.

mod bwd;

pub use bwd::{RmsNormBwdConfig, RmsNormBwdDesc};

use super::copies::COPY_THREADS;
use super::params::{entry, one, tokens_by};
use super::{Op, Operator, TileMachine};
use crate::layer::{Bind, Builder};
use moesaic_kernel::DType::{self, F32};
use moesaic_kernel::{Entry, Param};
use moesaic_spec::LayerSpec;
use serde::{Deserialize, Serialize};

/// `rms_norm`: `y = x / sqrt(mean(x²) + eps) ⊙ weight`, for rows `[T, width]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RmsNormDesc {
    /// Values of a row.
    pub width: usize,
    /// Element type of x and y.
    pub activations: DType,
    /// The number added to the mean of squares.
    pub eps: f64,
}

/// Tiling of `rms_norm`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RmsNormConfig {
    /// Threads per block.
    pub threads: u32,
    /// Tokens per block.
    pub tile_tokens: usize,
}

/// Returns the norm of the routed experts' sum, in a layer that has one.
fn desc(spec: &LayerSpec) -> Option<RmsNormDesc> {
    let latent = spec.latent.as_ref()?;
    latent.norm_eps.map(|eps| RmsNormDesc {
        width: latent.dim,
        activations: spec.precision.activations,
        eps,
    })
}

/// Returns the tensor that the projection behind the routed experts reads, and its gradient.
pub(crate) fn read_by_projection(spec: &LayerSpec) -> [&'static str; 2] {
    match desc(spec) {
        Some(_) => ["latent.normed", "latent.dnormed"],
        None => ["latent.sum", "latent.dsum"],
    }
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
        let rows = format!("[tokens, {}]", self.width);
        let params = vec![
            Param::read("x", self.activations, &rows),
            Param::read("weight", F32, format!("[{}]", self.width)),
            Param::write("y", self.activations, &rows),
        ];
        let grid = [tokens_by(config.tile_tokens), one()];
        let summary = "divides each row by its root mean square";
        vec![entry("rms_norm", summary, params, grid, config.threads)]
    }

    fn flops(&self, _: &str, tokens: f64) -> f64 {
        4.0 * tokens * self.width as f64
    }
}

/// Tokens of a block on a CPU.
const CPU_TOKENS: usize = 32;

/// Returns the tokens of a block on a GPU: one for each warp, because the sum over a row ends in a
/// reduction over lanes.
fn warps(wave: u32) -> usize {
    (COPY_THREADS / wave) as usize
}

/// The tensors behind the parameters of a forward pass.
const NAMES: Bind = &[
    ("x", "latent.sum"),
    ("weight", "latent.norm.weight"),
    ("y", "latent.normed"),
];

impl Builder {
    /// Adds the norm of the routed experts' sum, if the layer has one.
    pub(crate) fn latent_norm(&mut self) {
        if let Some(desc) = desc(&self.plan.spec) {
            self.launch("rms_norm", desc, NAMES);
        }
    }
}
