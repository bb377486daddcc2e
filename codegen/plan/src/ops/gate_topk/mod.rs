//! `gate_topk`: from tokens to experts and weights, and the random draws of training.

pub(crate) mod bwd;
mod entries;
mod logits;
mod steps;

pub(in crate::ops) use entries::rng_key_params;
pub use logits::Logits;
pub(crate) use steps::selection_tensors;

use super::{Core, Op, Operator, TileMachine};
use moesaic_kernel::{DType, Entry};
use moesaic_spec::{
    CapacityOrder, Chooser, LayerSpec, Loss, LossKind, NoiseKind, Renormalize, Router, RouterInput,
    Score, Select, SharedGate, TokenBlocks,
};
use serde::{Deserialize, Serialize};

/// `gate_topk`: x `[T, d]` to ids and weights `[T, K]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GateTopkDesc {
    /// d.
    pub model_dim: usize,
    /// Experts the router scores, identity experts included.
    pub experts: usize,
    /// K.
    pub top_k: usize,
    /// Element type of x.
    pub activations: DType,
    /// The source of logits.
    pub logits: Logits,
    /// The router as the spec says it, without training noise and without the length of its table,
    /// which each launch says: records of any length are replayed by the same kernel.
    pub router: Router,
    /// Whether ids and weights are computed; a shared expert's gate needs
    /// only logits.
    pub select: bool,
    /// Whether the best score of each token is written, for
    /// batch-prioritised capacity.
    pub best_score: bool,
    /// The order in which the scan takes what is selected here.
    pub order: CapacityOrder,
    /// Noise, jitter and what else only training does.
    pub training: bool,
    /// Whether a loss has a gradient by the scale of learned noise itself.
    pub scale_loss: bool,
    /// Logits of the first shared expert's gate that this kernel computes too: none, one, or two
    /// with a bias.
    pub shared: usize,
}

/// Tiling of `gate_topk`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GateTopkConfig {
    /// Threads per block of the logits kernels.
    pub logits_threads: u32,
    /// Tokens per block of the logits kernels.
    pub logits_tile_tokens: usize,
    /// Experts per block of the logits kernels.
    pub logits_tile_experts: usize,
    /// Elements of the model dimension staged at a time.
    pub logits_tile_depth: usize,
    /// Threads per block of the selection kernel.
    pub select_threads: u32,
    /// Tokens per block of the selection kernel.
    pub select_tile_tokens: usize,
    /// Adjacent lanes that select for one token: a power of two. If they are more than a warp, they
    /// are the whole block.
    pub select_lanes: u32,
    /// The rows of `tile_counts` that the selection kernel writes.
    pub histogram: Histogram,
}

/// The rows of `tile_counts` that a block of the selection kernel writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Histogram {
    /// None: the scan counts for itself.
    #[default]
    None,
    /// One, of all choices of its tokens.
    Tokens,
    /// One per slot, of the choices of its tokens there.
    Slots,
}

/// The most experts whose scores the lanes of a warp hold for one token, 32 each. With more, a
/// block selects for a token, and its sums over tokens go to memory.
pub const WARP_EXPERTS: usize = 1024;

/// Returns the gate of the routed experts; absent when routing comes from outside.
pub(crate) fn gate_topk(spec: &LayerSpec, training: bool) -> Option<GateTopkDesc> {
    if spec.router.kind.chooser() == Chooser::Caller {
        return None;
    }
    // Where training does nothing more, its gate is that of evaluation.
    let serving = serving(&spec.router);
    let training = training && serving != spec.router;
    Some(GateTopkDesc {
        model_dim: spec.shape.model_dim,
        experts: spec.routed_experts(),
        top_k: spec.shape.top_k,
        activations: spec.precision.activations,
        logits: Logits::of(spec),
        router: Router {
            table_rows: None,
            ..if training {
                spec.router.clone()
            } else {
                serving
            }
        },
        select: true,
        best_score: needs_order(spec),
        order: spec.capacity.order,
        training,
        scale_loss: training && scale_loss(spec),
        shared: 0,
    })
}

/// Returns the gate of a shared expert: one logit, or two and a bias.
pub(crate) fn shared_gate(spec: &LayerSpec, index: usize) -> GateTopkDesc {
    let pair = spec.shared[index].gate == SharedGate::Residual;
    GateTopkDesc {
        model_dim: spec.shape.model_dim,
        experts: spec.shared[index].gate.logits(),
        top_k: 1,
        activations: spec.precision.activations,
        logits: Logits::Linear,
        router: Router {
            bias: pair,
            ..Router::default()
        },
        select: false,
        best_score: false,
        order: CapacityOrder::SlotMajor,
        training: false,
        scale_loss: false,
        shared: 0,
    }
}

/// Returns the logits of the first shared expert's gate that the router's GEMM can compute with the
/// experts': the same GEMM, over unscaled tokens.
pub(crate) fn fused_shared_logits(spec: &LayerSpec) -> usize {
    // Asked of training's gate for both passes: one that jitters its tokens has no unscaled ones to
    // multiply, and the two passes must give the same logits.
    let alike = gate_topk(spec, true).is_some_and(|gate| gate.multiplies_tokens());
    match spec.shared.first() {
        Some(shared) if alike => shared.gate.logits(),
        _ => 0,
    }
}

/// Returns whether tokens are placed in the order of their best score.
fn needs_order(spec: &LayerSpec) -> bool {
    spec.capacity.order == CapacityOrder::BatchPrioritized
}

impl GateTopkDesc {
    /// Returns whether the router reads tokens that were jittered or had channels dropped.
    pub fn draws_input(&self) -> bool {
        let r = &self.router;
        self.training && self.logits != Logits::None && (r.jitter > 0.0 || r.input_dropout > 0.0)
    }

    /// Returns whether logits are a plain GEMM of the tokens.
    pub fn multiplies_tokens(&self) -> bool {
        let plain = self.logits == Logits::Linear && self.router.input == RouterInput::Token;
        plain && !self.draws_input()
    }

    /// Returns the parameter of a part, `weight` or `bias`, of the matrix that tokens are projected
    /// by before logits are computed.
    pub fn projection_param(&self, part: &str) -> Option<&'static str> {
        let logits = self.router.kind.def().logits?;
        self.logits.projection()?;
        logits.of_matrix(part).map(|weight| weight.param)
    }

    /// Returns whether noise is added to the logits themselves.
    pub fn noisy(&self) -> bool {
        use NoiseKind::{Gaussian, Learned};
        let r = &self.router;
        let kind = matches!(r.noise_kind, Gaussian | Learned);
        self.training && self.logits != Logits::None && r.noise > 0.0 && kind
    }

    /// Returns whether the scale of that noise is learned.
    pub fn learned_noise(&self) -> bool {
        self.noisy() && self.router.noise_kind == NoiseKind::Learned
    }

    /// Returns whether noise is added to what selection looks at.
    pub fn key_noise(&self) -> bool {
        let noise = self.router.noise > 0.0 && self.logits != Logits::None;
        self.training && self.select && noise && !self.noisy()
    }

    /// Returns whether renormalisation without an epsilon may meet chosen scores that are all close
    /// to zero. f32 has lost their ratio then; their logits still have it.
    pub fn relative_scores(&self) -> bool {
        let router = &self.router;
        let divides = match router.renormalize {
            Renormalize::None => false,
            Renormalize::Sum | Renormalize::Clamp => router.renormalize_eps as f32 == 0.0,
            // A p-norm has no epsilon that could keep its denominator from zero.
            Renormalize::PNorm => true,
        };
        // The best of all softmax scores is 1 / E at least.
        let best_chosen = router.kind.chooser() == Chooser::Scores
            && matches!(router.select, Select::TopK | Select::PerGroup(_))
            && !router.select_bias
            && router.groups.is_none()
            && router.always_chosen < self.top_k
            && router.blocks.is_none()
            && !self.key_noise();
        let reaches_nothing = match router.score {
            Score::Sigmoid | Score::SqrtSoftplus => true,
            Score::Softmax => !best_chosen,
            // Of a softmax over the chosen the largest is 1 / K at least.
            Score::SoftmaxSelected | Score::One => false,
        };
        let mixes = matches!(router.select, Select::SparseMixer(_));
        self.select && self.logits != Logits::None && divides && reaches_nothing && !mixes
    }

    /// Returns whether a token's second expert goes by chance.
    pub fn draws_second(&self) -> bool {
        self.training && self.select && self.router.random_second
    }

    /// Returns whether selection draws random numbers.
    pub fn draws_selection(&self) -> bool {
        self.key_noise() || self.draws_second()
    }

    /// Returns whether fused logits of a shared expert have a bias: a pair does.
    pub fn shared_bias(&self) -> bool {
        self.shared == SharedGate::Residual.logits()
    }

    /// Returns the tokens per expert, times T / E, of an expert choice.
    pub fn expert_choice(&self) -> Option<f64> {
        match self.router.select {
            Select::ExpertChoice(share) if self.select => Some(share),
            _ => None,
        }
    }

    /// Returns the blocks of tokens that agree on experts.
    pub fn blocks(&self) -> Option<TokenBlocks> {
        self.router.blocks.filter(|_| self.select)
    }

    /// Returns the number of groups, each of which gives equally many of a token's experts.
    pub fn per_group(&self) -> Option<usize> {
        match self.router.select {
            Select::PerGroup(groups) if self.select => Some(groups),
            _ => None,
        }
    }

    /// Returns the rounds of Sinkhorn's iteration.
    pub fn sinkhorn(&self) -> Option<usize> {
        match self.router.select {
            Select::Sinkhorn(rounds) if self.select && self.training => Some(rounds),
            _ => None,
        }
    }
}

/// Returns the router without what only training does.
fn serving(router: &Router) -> Router {
    Router {
        jitter: 0.0,
        input_dropout: 0.0,
        noise: 0.0,
        noise_kind: NoiseKind::default(),
        random_second: false,
        select: match router.select {
            // Sinkhorn balances a batch. In evaluation a token must not depend on its batch, so the
            // best experts are taken, as in Megatron-LM.
            Select::Sinkhorn(_) => Select::TopK,
            other => other,
        },
        ..router.clone()
    }
}

/// Returns whether a loss is a function of the scale of learned noise: the chance to be chosen is.
fn scale_loss(spec: &LayerSpec) -> bool {
    let by_chance = |loss: &Loss| loss.kind == LossKind::ImportanceLoadLogits;
    spec.learned_noise() && spec.losses.iter().any(by_chance)
}

/// Returns the projection behind the scale of learned noise.
pub(crate) fn noise_gate(spec: &LayerSpec) -> Option<GateTopkDesc> {
    let gate = gate_topk(spec, true)?;
    // Its tokens are those that the gate has jittered already, so it draws nothing itself.
    gate.learned_noise().then(|| GateTopkDesc {
        logits: Logits::Linear,
        router: Router {
            input: spec.router.input,
            ..Router::default()
        },
        select: false,
        best_score: false,
        training: false,
        scale_loss: false,
        ..gate
    })
}

impl Operator for GateTopkDesc {
    type Config = GateTopkConfig;

    fn tiling(&self, machine: TileMachine) -> GateTopkConfig {
        match machine {
            TileMachine::Cpu(core) => on_cpu(self, core),
            TileMachine::Gpu(gpu) => on_gpu(self, gpu.wave()),
        }
    }

    fn with(self, config: GateTopkConfig) -> Op {
        Op::GateTopk { desc: self, config }
    }

    fn entries(&self, config: &GateTopkConfig) -> Vec<Entry> {
        entries::entries(self, config)
    }

    fn flops(&self, symbol: &str, tokens: f64) -> f64 {
        match (symbol, self.logits.projection()) {
            ("gate_project", Some(p)) => 2.0 * tokens * (p * self.model_dim) as f64,
            ("gate_logits", Some(p)) => 2.0 * tokens * (p * self.experts) as f64,
            ("gate_logits", _) => {
                2.0 * tokens * (self.model_dim * (self.experts + self.shared)) as f64
            }
            _ => tokens * (self.experts * 4) as f64,
        }
    }
}

/// Tokens of a tile of the scan, where their assignments are few enough.
const TILE_TOKENS: usize = 64;

/// Assignments that a warp of the scan places one after the other.
const TILE_SLOTS: usize = 512;

/// Counts of choices that a block of the selection kernel keeps: 32 KB.
const HISTOGRAM: usize = 8192;

fn on_cpu(d: &GateTopkDesc, core: Core) -> GateTopkConfig {
    GateTopkConfig {
        logits_threads: 1,
        logits_tile_tokens: 16,
        logits_tile_experts: d
            .experts
            .next_multiple_of(core.isa.vector_bytes() / 4)
            .min(64),
        logits_tile_depth: 512,
        select_threads: 1,
        select_tile_tokens: 32,
        select_lanes: 1,
        histogram: Histogram::None,
    }
}

fn on_gpu(d: &GateTopkDesc, wave: u32) -> GateTopkConfig {
    let histogram = if d.select {
        histogram(d.order, d.experts, d.top_k)
    } else {
        Histogram::None
    };
    // Without logits only the choices of a token are dealt out over lanes.
    let width = match d.logits {
        Logits::None => d.top_k,
        _ => d.experts,
    };
    let decode = (width.next_power_of_two() as u32).min(wave);
    let lanes = team(width).unwrap_or(decode);
    // What a lane holds of many experts takes half the registers.
    let most = if d.experts > 512 { 256 } else { 512 };
    let tokens = match histogram {
        // Without counts no tile is prescribed, so a block has as many tokens as fill 128 threads.
        Histogram::None => (128 / lanes).max(1) as usize,
        _ => tile_tokens(d.order, d.top_k),
    };
    GateTopkConfig {
        logits_threads: 256,
        logits_tile_tokens: 32,
        logits_tile_experts: d.logits.tile_experts(d.experts),
        logits_tile_depth: 32,
        select_threads: if lanes > wave {
            lanes
        } else {
            (tokens as u32 * lanes).clamp(128, most)
        },
        select_tile_tokens: tokens,
        select_lanes: lanes,
        histogram,
    }
}

/// Returns the threads of a block that selects for one token, where the registers of a warp do not
/// hold the scores of all experts: one for eight experts.
pub(in crate::ops) fn team(experts: usize) -> Option<u32> {
    (experts > WARP_EXPERTS).then(|| experts.next_power_of_two() as u32 / 8)
}

/// Returns the tokens of a tile: see [`crate::ScanTile::Tokens`]. The selection kernel counts by
/// the same tiles.
pub(in crate::ops) fn tile_tokens(order: CapacityOrder, top_k: usize) -> usize {
    match order {
        CapacityOrder::TokenMajor => (TILE_SLOTS / top_k).clamp(1, TILE_TOKENS),
        _ => TILE_TOKENS,
    }
}

/// Returns the counts of a selection kernel. Tiles must be of adjacent tokens, and the counters of
/// a block must fit its shared memory.
pub(in crate::ops) fn histogram(order: CapacityOrder, experts: usize, top_k: usize) -> Histogram {
    match order {
        CapacityOrder::BatchPrioritized => Histogram::None,
        CapacityOrder::TokenMajor if experts <= HISTOGRAM => Histogram::Tokens,
        CapacityOrder::TokenMajor => Histogram::None,
        _ if experts * top_k <= HISTOGRAM => Histogram::Slots,
        _ => Histogram::None,
    }
}
