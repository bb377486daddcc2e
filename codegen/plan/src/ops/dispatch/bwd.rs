//! `dispatch_bwd`: gradients of expert rows to tokens.

use crate::layer::{Builder, borrowed, owned};
use crate::ops::copies::{COPY_THREADS, token_tiling};
use crate::ops::params::{entry, one, per_slot, some, tokens_by, when};
use crate::ops::shared::{SharedBwdDesc, shared_bwd};
use crate::ops::{Op, Operator, TileMachine};
use moesaic_kernel::DType::{self, F32, I32};
use moesaic_kernel::{Entry, Param};
use moesaic_spec::{LayerSpec, WeightSite};
use serde::{Deserialize, Serialize};

/// `dispatch_bwd`: gradients of rows, shared experts and router to dx `[T, d]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DispatchBwdDesc {
    /// d.
    pub model_dim: usize,
    /// Experts with rows; ids from here on are identity experts.
    pub experts: usize,
    /// Identity experts, whose part is `weight · dy`.
    pub identity: usize,
    /// Zero experts, with the ids after those.
    pub zero: usize,
    /// K.
    pub top_k: usize,
    /// Element type of rows, dy and dx.
    pub activations: DType,
    /// Rows were multiplied by their weight before the expert.
    pub weighted: bool,
    /// Shared experts: rows `shared_i_drows [T, d]`, with a gate also
    /// `shared_i_dlogit [T, 1]` times its router row.
    pub shared: Vec<SharedBwdDesc>,
    /// The router's part `router_dx [T, d]`, f32.
    pub router: bool,
}

/// Tiling of `dispatch_bwd`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DispatchBwdConfig {
    /// Threads per block.
    pub threads: u32,
    /// Tokens per block.
    pub tile_tokens: usize,
    /// Adjacent threads that sum one token.
    pub token_threads: u32,
}

/// Returns the gradients of what the routed experts read; with a projection before them that is not
/// yet the token.
fn desc(spec: &LayerSpec, shared_parts: &[usize]) -> DispatchBwdDesc {
    let latent = spec.latent.is_some();
    // Shared experts and the router read tokens, not their projection, so their gradients wait for
    // `later`.
    let shared_parts = if latent { &[] } else { shared_parts };
    DispatchBwdDesc {
        model_dim: spec.expert_input_dim(),
        experts: spec.shape.experts,
        identity: spec.experts.identity,
        zero: spec.experts.zero,
        top_k: spec.shape.top_k,
        activations: spec.precision.activations,
        weighted: spec.router.weight_on == WeightSite::Input,
        shared: shared_bwd(spec, shared_parts),
        router: spec.has_logits() && !latent,
    }
}

/// Returns the gradients of tokens before a projection: its input's as if it were a shared
/// expert's, those of the others, and the router's.
fn later(spec: &LayerSpec, shared_parts: &[usize]) -> DispatchBwdDesc {
    let projected = SharedBwdDesc {
        gated: false,
        residual: false,
        bias: false,
        parts: 0,
    };
    DispatchBwdDesc {
        model_dim: spec.shape.model_dim,
        experts: 0,
        identity: 0,
        zero: 0,
        top_k: 0,
        activations: spec.precision.activations,
        weighted: false,
        shared: [vec![projected], shared_bwd(spec, shared_parts)].concat(),
        router: spec.has_logits(),
    }
}

impl Operator for DispatchBwdDesc {
    type Config = DispatchBwdConfig;

    fn tiling(&self, machine: TileMachine) -> DispatchBwdConfig {
        match machine {
            TileMachine::Cpu(_) => on_cpu(),
            TileMachine::Gpu(_) => on_gpu(self),
        }
    }

    fn with(self, config: DispatchBwdConfig) -> Op {
        Op::DispatchBwd { desc: self, config }
    }

    fn entries(&self, config: &DispatchBwdConfig) -> Vec<Entry> {
        entries(self, config)
    }

    fn flops(&self, _: &str, tokens: f64) -> f64 {
        tokens * (self.top_k * self.model_dim) as f64
    }
}

fn on_cpu() -> DispatchBwdConfig {
    DispatchBwdConfig {
        threads: 1,
        tile_tokens: 32,
        token_threads: 1,
    }
}

fn on_gpu(d: &DispatchBwdDesc) -> DispatchBwdConfig {
    // A token costs the rows of its experts, those of shared experts, and `dx`.
    let rows = d.top_k + 1 + d.shared.len();
    let tiling = token_tiling(d.model_dim, d.activations, d.top_k, rows);
    DispatchBwdConfig {
        threads: COPY_THREADS,
        tile_tokens: tiling.tokens,
        token_threads: tiling.token_threads,
    }
}

fn entries(d: &DispatchBwdDesc, c: &DispatchBwdConfig) -> Vec<Entry> {
    let (slots, identity, routed) = (per_slot(d.top_k), d.identity > 0, d.top_k > 0);
    let token =
        |name: &str, dtype: DType| Param::read(name, dtype, format!("[tokens, {}]", d.model_dim));
    let rows = format!("[rows, {}]", d.model_dim);
    let mut params = some([
        when(routed, Param::read("drows", d.activations, rows)),
        when(routed, Param::read("slot_rows", I32, &slots)),
        when(identity, Param::read("topk_ids", I32, &slots)),
        when(
            d.weighted || identity,
            Param::read("topk_weights", F32, &slots),
        ),
        when(identity, token("dy", d.activations)),
        when(d.router, token("router_dx", F32)),
    ]);
    for (i, shared) in d.shared.iter().enumerate() {
        params.push(token(&format!("shared_{i}_drows"), d.activations));
        if shared.gated {
            let logits = shared.logits();
            let weight = format!("[{logits}, {}]", d.model_dim);
            params.push(Param::read(
                &format!("shared_{i}_dlogit"),
                F32,
                format!("[tokens, {logits}]"),
            ));
            params.push(Param::read(&format!("shared_{i}_router"), F32, weight));
        }
    }
    let width = format!("[tokens, {}]", d.model_dim);
    params.push(Param::write("dx", d.activations, width));
    let grid = [tokens_by(c.tile_tokens), one()];
    let summary = "sums the gradients that reach each token";
    vec![entry("dispatch_bwd", summary, params, grid, c.threads)]
}

impl Builder {
    /// Sums the gradients that reach each token.
    pub(crate) fn dispatch_bwd(&mut self) {
        let parts = self.shared_parts();
        let desc = desc(&self.plan.spec, &parts);
        let mut bind = self.shared_names(0);
        bind.push(("router_dx".to_string(), "router.dx".to_string()));
        bind.extend(owned(&self.around()));
        self.launch("dispatch_bwd", desc, &borrowed(&bind));
        self.latent_down_bwd();
        self.dispatch_bwd_later(&parts);
    }

    /// Adds the gradient of tokens before a projection: from the projection, shared experts and the
    /// router.
    fn dispatch_bwd_later(&mut self, shared_parts: &[usize]) {
        if self.plan.spec.latent.is_none() {
            return;
        }
        let desc = later(&self.plan.spec, shared_parts);
        let mut bind = self.shared_names(1);
        let mut add = |from: &str, to: &str| bind.push((from.to_string(), to.to_string()));
        add("shared_0_drows", "latent.drows");
        add("router_dx", "router.dx");
        self.launch("dispatch_bwd_later", desc, &borrowed(&bind));
    }
}
