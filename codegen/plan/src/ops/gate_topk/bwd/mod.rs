//! `gate_topk_bwd`: auxiliary losses, and the gradients of logits, of scales and of
//! the input of the router's GEMM.

mod entries;
mod steps;

pub(crate) use steps::tensors;

use super::{GateTopkDesc, Logits, gate_topk, team};
use crate::ops::{Op, Operator, TileMachine};
use moesaic_kernel::Entry;
use moesaic_spec::{LayerSpec, Loss, LossKind, RouterInput, Score};
use serde::{Deserialize, Serialize};

/// `gate_topk_bwd`: gradients of `topk_weights [T, K]` and of the losses to
/// those of logits `[T, E]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GateTopkBwdDesc {
    /// The gate.
    pub gate: GateTopkDesc,
    /// The auxiliary losses.
    pub losses: Vec<Loss>,
    /// The probabilities of losses are the scores divided by their sum, not a
    /// softmax of the logits.
    pub normalized_scores: bool,
    /// The sums of the losses over tokens, a row `[E]` each.
    pub sums: Vec<LossSum>,
    /// The slopes that the losses leave for backward, a row `[E]` each.
    pub slopes: Vec<LossSlope>,
    /// Tokens of a sequence where a loss says so.
    pub sequence_length: Option<usize>,
    /// Standard deviation of gaussian noise on a logit.
    pub sigma: f64,
}

/// A sum over tokens, for each expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LossSum {
    /// Probabilities.
    Probability,
    /// First choices.
    First,
    /// All choices.
    Chosen,
    /// The softmax of logits without noise.
    Importance,
    /// The chance that this softmax passes the smallest chosen logit.
    Load,
    /// The softmax over the chosen logits.
    Share,
    /// The chance to be chosen with noise drawn again.
    Chance,
}

/// A factor of the losses' gradient, for each expert; coefficients included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LossSlope {
    /// The derivative by a token's probability.
    Probability,
    /// On `sequence_slopes`; the same for each expert.
    Sequence,
    /// On `logsumexp · softmax`; the same for each expert.
    Z,
    /// The derivative by the terms of [`LossSum::Importance`].
    Importance,
    /// The derivative by the terms of [`LossSum::Load`].
    Load,
    /// The derivative by the terms of [`LossSum::Share`].
    Share,
    /// The derivative by the terms of [`LossSum::Chance`].
    Chance,
}

/// Tiling of `gate_topk_bwd`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GateTopkBwdConfig {
    /// Threads per block.
    pub threads: u32,
    /// Threads that see to one token at a time: a warp, or of many experts the
    /// block; 1 on a CPU.
    pub token_threads: u32,
    /// Tokens per block.
    pub tile_tokens: usize,
    /// Columns per block of sums over all tokens.
    pub columns: usize,
    /// Threads of the one block that finishes the losses.
    pub sum_threads: u32,
}

impl GateTopkBwdDesc {
    fn has(&self, kinds: &[LossKind]) -> bool {
        self.losses.iter().any(|loss| kinds.contains(&loss.kind))
    }

    /// Returns whether a loss is over sequences.
    pub fn sequences(&self) -> bool {
        self.has(&[LossKind::Sequence])
    }

    /// Returns whether a loss is a sum over all tokens.
    pub fn over_tokens(&self) -> bool {
        !self.sums.is_empty() || self.has(&[LossKind::Z])
    }

    /// Returns whether a loss is divided by the tokens that have a choice.
    pub fn counts_tokens(&self) -> bool {
        use LossKind::{Gshard, GshardAll, Switch, Z};
        self.has(&[Switch, Gshard, GshardAll, Z])
    }

    /// Returns whether a loss compares logits with and without noise.
    pub fn noisy(&self) -> bool {
        self.losses.iter().any(|loss| loss.kind.needs_noise())
    }

    /// Returns whether noise is added to capped logits, whose slope follows from those without.
    pub fn caps_clean_logits(&self) -> bool {
        self.gate.router.logit_softcap.is_some() && self.gate.noisy()
    }

    /// Returns whether there are logits, hence `dlogits`.
    pub fn logits(&self) -> bool {
        self.gate.logits != Logits::None
    }

    /// Returns whether the router reads tokens divided by their root mean square.
    pub fn rms_scaled(&self) -> bool {
        self.logits() && self.gate.router.input == RouterInput::RmsScaled
    }

    fn with_rows(mut self) -> GateTopkBwdDesc {
        use LossKind::*;
        let balanced = [Switch, Gshard, GshardAll, Global];
        let sums = [
            (LossSum::Probability, &balanced[..]),
            (LossSum::First, &[Gshard]),
            (LossSum::Chosen, &[Switch, GshardAll]),
            (LossSum::Importance, &[ImportanceLoad]),
            (LossSum::Load, &[ImportanceLoad]),
            (LossSum::Share, &[ImportanceLoadLogits]),
            (LossSum::Chance, &[ImportanceLoadLogits]),
        ];
        let slopes = [
            (LossSlope::Probability, &balanced[..]),
            (LossSlope::Sequence, &[Sequence]),
            (LossSlope::Z, &[Z]),
            (LossSlope::Importance, &[ImportanceLoad]),
            (LossSlope::Load, &[ImportanceLoad]),
            (LossSlope::Share, &[ImportanceLoadLogits]),
            (LossSlope::Chance, &[ImportanceLoadLogits]),
        ];
        let sums = sums.iter().filter(|(_, kinds)| self.has(kinds));
        let sums = sums.map(|(sum, _)| *sum).collect();
        let slopes = slopes.iter().filter(|(_, kinds)| self.has(kinds));
        self.slopes = slopes.map(|(slope, _)| *slope).collect();
        self.sums = sums;
        self
    }
}

/// Returns the desc; `None` if no gradient flows back into a router.
pub(crate) fn gate_topk_bwd(spec: &LayerSpec) -> Option<GateTopkBwdDesc> {
    let gate = gate_topk(spec, true)?;
    if !spec.has_logits() && !spec.router.expert_scale {
        return None;
    }
    let router = &spec.router;
    let mut lengths = spec.losses.iter().filter_map(|loss| loss.sequence_length);
    let desc = GateTopkBwdDesc {
        normalized_scores: matches!(router.score, Score::Sigmoid | Score::SqrtSoftplus),
        losses: spec.losses.clone(),
        sums: Vec::new(),
        slopes: Vec::new(),
        sequence_length: lengths.next_back(),
        // Noise of 1 means a deviation of 1 / E, as in V-MoE's router.
        sigma: router.noise / gate.experts as f64,
        gate,
    };
    Some(desc.with_rows())
}

impl Operator for GateTopkBwdDesc {
    type Config = GateTopkBwdConfig;

    fn tiling(&self, machine: TileMachine) -> GateTopkBwdConfig {
        match machine {
            TileMachine::Cpu(_) => on_cpu(),
            TileMachine::Gpu(gpu) => on_gpu(self, gpu.wave()),
        }
    }

    fn with(self, config: GateTopkBwdConfig) -> Op {
        Op::GateTopkBwd { desc: self, config }
    }

    fn entries(&self, config: &GateTopkBwdConfig) -> Vec<Entry> {
        entries::entries(self, config)
    }

    fn flops(&self, _: &str, tokens: f64) -> f64 {
        tokens * (self.gate.experts * 4) as f64
    }
}

fn on_cpu() -> GateTopkBwdConfig {
    GateTopkBwdConfig {
        threads: 1,
        token_threads: 1,
        tile_tokens: 64,
        columns: 128,
        sum_threads: 1,
    }
}

fn on_gpu(d: &GateTopkBwdDesc, wave: u32) -> GateTopkBwdConfig {
    let (threads, token_threads) = match team(d.gate.experts) {
        Some(block) => (block, block),
        None => (128, wave),
    };
    GateTopkBwdConfig {
        threads,
        token_threads,
        tile_tokens: 32,
        columns: 128,
        sum_threads: 256,
    }
}
