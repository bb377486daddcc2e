//! `combine`: expert rows to tokens.

mod bwd;

pub(crate) use bwd::CombineBwd;
pub use bwd::{CombineBwdConfig, CombineBwdDesc};

use super::copies::{COPY_THREADS, slice_tiling, token_tiling};
use super::params::{entry, one, some, tokens_by, when};
use super::shared::{SharedDesc, adds_later, shared};
use super::{DECODE_TOKENS, Op, Operator, TileMachine};
use crate::layer::{Builder, borrowed, owned};
use moesaic_kernel::DType::{self, F32, I32};
use moesaic_kernel::{Entry, Param, Size};
use moesaic_spec::{LayerSpec, WeightSite};
use serde::{Deserialize, Serialize};

/// `combine`: expert rows `[R, d_out]` to y `[T, d_out]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CombineDesc {
    /// d_out.
    pub output_dim: usize,
    /// Experts with rows; ids from here on are identity experts.
    pub experts: usize,
    /// Identity experts, which add `weight · x`.
    pub identity: usize,
    /// Zero experts, with the ids after those.
    pub zero: usize,
    /// K; 0 where only shared experts are added.
    pub top_k: usize,
    /// Element type of rows, x and y.
    pub activations: DType,
    /// Whether rows are multiplied by their weight here.
    pub weighted: bool,
    /// Shared experts, added with f32 weights.
    pub shared: Vec<SharedDesc>,
    /// The sum over the routed experts, where it has a weight.
    pub routed: Option<RoutedDesc>,
}

/// The sum over the routed experts in a layer with a residual gate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoutedDesc {
    /// The shared expert whose two logits weight the sum, by the first value of their softmax.
    pub shared: usize,
    /// It is written, too, since a backward pass reads it.
    pub kept: bool,
}

/// Tiling of `combine`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CombineConfig {
    /// Threads per block.
    pub threads: u32,
    /// Tokens per block.
    pub tile_tokens: usize,
    /// Adjacent threads that sum one token.
    pub token_threads: u32,
    /// The tiling of decode calls, on GPUs.
    pub decode: Option<CombineDecode>,
}

/// The tiling of `combine` in decode calls. A token is cut into slices of adjacent columns, so that
/// many multiprocessors have a block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CombineDecode {
    /// The most tokens of such a call.
    pub tokens: u64,
    /// Tokens per block.
    pub tile_tokens: usize,
    /// Adjacent threads that sum one slice of a token, a pack each.
    pub token_threads: u32,
    /// Slices of a token.
    pub slices: usize,
}

/// Returns the sum over the routed experts, and the shared ones unless a projection comes between.
/// A layer that trains keeps what has a weight.
fn desc(spec: &LayerSpec, trains: bool) -> CombineDesc {
    let projected = spec.latent.is_some();
    let experts = if projected { &[] } else { &*spec.shared };
    let residual = spec.residual().filter(|_| !projected);
    CombineDesc {
        output_dim: spec.expert_output_dim(),
        experts: spec.shape.experts,
        identity: spec.experts.identity,
        zero: spec.experts.zero,
        top_k: spec.shape.top_k,
        activations: spec.precision.activations,
        weighted: spec.router.weight_on == WeightSite::Output,
        shared: shared(experts),
        routed: residual.map(|shared| RoutedDesc {
            shared,
            kept: trains,
        }),
    }
}

/// Returns the desc where another kernel [adds shared experts](adds_later): the sum over the routed
/// experts as the first shared expert, then the others.
fn later(spec: &LayerSpec) -> CombineDesc {
    let weighted = spec.residual().is_some();
    // The two logits of a residual gate weight the sum and the expert: the first is of the sum.
    let routed = SharedDesc {
        gated: weighted,
        of_pair: weighted.then_some(0),
    };
    CombineDesc {
        output_dim: spec.output_dim(),
        experts: 0,
        identity: 0,
        zero: 0,
        top_k: 0,
        activations: spec.precision.activations,
        weighted: false,
        shared: [vec![routed], shared(&spec.shared)].concat(),
        routed: None,
    }
}

impl Operator for CombineDesc {
    type Config = CombineConfig;

    fn tiling(&self, machine: TileMachine) -> CombineConfig {
        match machine {
            TileMachine::Cpu(_) => on_cpu(),
            TileMachine::Gpu(_) => on_gpu(self),
        }
    }

    fn with(self, config: CombineConfig) -> Op {
        Op::Combine { desc: self, config }
    }

    fn entries(&self, config: &CombineConfig) -> Vec<Entry> {
        entries(self, config)
    }

    fn flops(&self, _: &str, tokens: f64) -> f64 {
        2.0 * tokens * (self.top_k * self.output_dim) as f64
    }
}

fn on_cpu() -> CombineConfig {
    CombineConfig {
        threads: 1,
        tile_tokens: 32,
        token_threads: 1,
        decode: None,
    }
}

fn on_gpu(d: &CombineDesc) -> CombineConfig {
    let (width, k) = (d.output_dim, d.top_k);
    // A token costs the rows of its experts, those of shared experts, and `y`.
    let rows = k + 1 + d.shared.len();
    let tiling = token_tiling(width, d.activations, k, rows);
    CombineConfig {
        threads: COPY_THREADS,
        tile_tokens: tiling.tokens,
        token_threads: tiling.token_threads,
        decode: Some(decode(d, tiling.token_threads)),
    }
}

fn decode(d: &CombineDesc, token_threads: u32) -> CombineDecode {
    let tiling = slice_tiling(d.output_dim, d.activations, d.top_k, token_threads);
    CombineDecode {
        tokens: DECODE_TOKENS,
        tile_tokens: tiling.tokens,
        token_threads: tiling.threads,
        slices: tiling.slices,
    }
}

/// Returns the blocks of tokens, and of slices of a token where there are any.
fn grid(c: &CombineConfig) -> [Size; 2] {
    let many = [tokens_by(c.tile_tokens), one()];
    let Some(decode) = &c.decode else {
        return many;
    };
    // One entry for all calls, and its grid tells the two tilings apart: the host launches the same
    // list whatever the number of tokens.
    let [tokens, whole] = many;
    let slices = Size::Const(decode.slices as u64);
    [
        Size::up_to(decode.tokens, tokens_by(decode.tile_tokens), tokens),
        Size::up_to(decode.tokens, slices, whole),
    ]
}

fn entries(d: &CombineDesc, c: &CombineConfig) -> Vec<Entry> {
    let (k, width) = (d.top_k, d.output_dim);
    let per_slot = format!("[tokens, {k}]");
    let per_token = format!("[tokens, {width}]");
    let (identity, routed) = (d.identity > 0, k > 0);
    let mut params = some([
        when(
            routed,
            Param::read("out", d.activations, format!("[rows, {width}]")),
        ),
        when(routed, Param::read("slot_rows", I32, &per_slot)),
        when(identity, Param::read("topk_ids", I32, &per_slot)),
        when(
            d.weighted || identity,
            Param::read("topk_weights", F32, &per_slot),
        ),
        // An identity expert has no rows: its output is the token itself.
        when(identity, Param::read("x", d.activations, &per_token)),
    ]);
    for (i, shared) in d.shared.iter().enumerate() {
        params.push(Param::read(
            &format!("shared_{i}_out"),
            d.activations,
            &per_token,
        ));
        let logits = if shared.of_pair.is_some() { 2 } else { 1 };
        let shape = format!("[tokens, {logits}]");
        let logit = Param::read(&format!("shared_{i}_logit"), F32, shape);
        params.extend(when(shared.gated, logit));
    }
    let kept = d.routed.as_ref().is_some_and(|routed| routed.kept);
    params.extend(when(
        kept,
        Param::write("routed", d.activations, &per_token),
    ));
    params.push(Param::write("y", d.activations, &per_token));
    vec![entry(
        "combine",
        "sums the weighted expert rows of each token",
        params,
        grid(c),
        c.threads,
    )]
}

impl Builder {
    /// Adds the sum of routed and shared experts, in one step or around a projection.
    pub(crate) fn combine(&mut self) {
        // By the layer and not by the pass, so that its evaluation shares the kernel and writes one
        // tensor in vain.
        let desc = desc(&self.plan.spec, self.plan.training.is_some());
        let mut bind = self.shared_outputs(0);
        if self.plan.spec.latent.is_some() {
            bind.extend(owned(&self.around()));
        }
        self.expert_norm();
        bind.extend(owned(self.normed_rows()));
        self.launch("combine", desc, &borrowed(&bind));
        self.latent_up();
        if self.plan.spec.latent.is_some() && adds_later(&self.plan.spec) {
            let desc = later(&self.plan.spec);
            let mut bind = self.shared_outputs(1);
            bind.push(("shared_0_out".to_string(), "routed".to_string()));
            if let Some(index) = self.plan.spec.residual() {
                let logits = format!("shared.{index}.router.logits");
                bind.push(("shared_0_logit".to_string(), logits));
            }
            self.launch("combine_later", desc, &borrowed(&bind));
        }
    }
}

#[cfg(test)]
mod tests;
