//! The formulas of logits. Plans know a formula by its name here alone: its entries, its scratch,
//! and its tiles. Its text is the template `gate_<name>` of each language.

use super::{GateTopkConfig, GateTopkDesc};
use crate::ops::params::{entry, gradient, one, some, tokens_by, when};
use moesaic_kernel::DType::F32;
use moesaic_kernel::{Entry, Param, Size};
use moesaic_spec::{LayerSpec, LogitsFormula, RouterInput};
use serde::{Deserialize, Serialize};

/// The source of logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Logits {
    /// There are none: the table decides and every weight is one.
    None,
    /// `x · Wᵀ (+ b)`.
    Linear,
    /// Cosine similarity after a projection of this width.
    Cosine(usize),
}

impl Logits {
    /// The names of all variants.
    pub const NAMES: [&str; 3] = ["none", "linear", "cosine"];

    /// Returns the name, by which templates tell formulas apart.
    pub fn name(&self) -> &'static str {
        let [none, linear, cosine] = Logits::NAMES;
        match self {
            Logits::None => none,
            Logits::Linear => linear,
            Logits::Cosine(_) => cosine,
        }
    }

    /// Returns the logits of a layer.
    pub(super) fn of(spec: &LayerSpec) -> Logits {
        let Some(def) = spec.logits() else {
            return Logits::None;
        };
        match def.formula {
            LogitsFormula::Linear => Logits::Linear,
            LogitsFormula::Cosine => Logits::Cosine(def.width.size(spec)),
        }
    }

    /// Returns the width that tokens are projected to before logits are computed; `None` where
    /// logits are a product of the tokens themselves.
    pub fn projection(&self) -> Option<usize> {
        match self {
            Logits::None | Logits::Linear => None,
            Logits::Cosine(width) => Some(*width),
        }
    }

    /// Returns the noun, in the plural, of what compares a projected token with experts.
    pub fn compared(&self) -> &'static str {
        match self {
            Logits::None | Logits::Linear => "logits",
            Logits::Cosine(_) => "cosines",
        }
    }

    /// Returns the experts of a GPU's tile.
    pub(super) fn tile_experts(&self, experts: usize) -> usize {
        match self {
            // A thread sums 4 x 4 logits, so no tile is narrower.
            Logits::None | Logits::Linear => experts.next_power_of_two().clamp(4, 32),
            // A cosine router has 32 experts for its 256 threads: a thread compares one of them
            // with every eighth token.
            Logits::Cosine(_) => 32,
        }
    }

    /// Returns the entries from gradients of logits to those of projected tokens, in the order of
    /// their launches.
    pub(super) fn backward_symbols(&self) -> &'static [&'static str] {
        match self {
            Logits::None | Logits::Linear => &[],
            Logits::Cosine(_) => &COSINE_BACKWARD,
        }
    }
}

/// Returns the entries that compute logits.
pub(super) fn entries(d: &GateTopkDesc, c: &GateTopkConfig) -> Vec<Entry> {
    match d.logits {
        Logits::None => Vec::new(),
        Logits::Linear => vec![linear(d, c)],
        Logits::Cosine(width) => vec![project(d, c, width), cosine(d, c, width)],
    }
}

/// The blocks of a backward pass.
#[derive(Clone, Copy)]
pub(super) struct BackwardBlocks {
    /// Tokens per block.
    pub tile_tokens: usize,
    /// Threads per block.
    pub threads: u32,
}

/// Returns the entries that [`Logits::backward_symbols`] names.
pub(super) fn backward_entries(d: &GateTopkDesc, blocks: BackwardBlocks) -> Vec<Entry> {
    match d.logits {
        Logits::None | Logits::Linear => Vec::new(),
        Logits::Cosine(width) => cosine_backward(d, blocks, width).into(),
    }
}

/// Scratch of a formula's backward pass: a row of f32.
pub(super) struct BackwardScratch {
    /// The tensor.
    pub name: &'static str,
    /// Its size.
    pub size: Size,
}

/// Returns the scratch between the entries of a backward pass.
pub(super) fn backward_scratch(d: &GateTopkDesc) -> Vec<BackwardScratch> {
    let scratch = |name, size| BackwardScratch { name, size };
    match d.logits {
        Logits::None | Logits::Linear => Vec::new(),
        Logits::Cosine(_) => vec![
            scratch("inverse_norms", Size::Tokens),
            scratch("temperature_parts", Size::Const(d.experts as u64)),
        ],
    }
}

fn per_expert(d: &GateTopkDesc) -> String {
    format!("[tokens, {}]", d.experts)
}

/// Returns the grid of a product with this many columns.
fn grid(c: &GateTopkConfig, columns: usize) -> [Size; 2] {
    let column_tiles = columns.div_ceil(c.logits_tile_experts) as u64;
    [tokens_by(c.logits_tile_tokens), Size::Const(column_tiles)]
}

fn tokens(d: &GateTopkDesc) -> Param {
    Param::read("x", d.activations, format!("[tokens, {}]", d.model_dim))
}

fn input_scale(d: &GateTopkDesc) -> Option<Param> {
    let scale = Param::read("input_scale", F32, format!("[{}]", d.model_dim));
    when(d.router.input == RouterInput::RmsScaled, scale)
}

fn linear(d: &GateTopkDesc, c: &GateTopkConfig) -> Entry {
    let (e, model) = (d.experts, d.model_dim);
    let params = [
        Some(tokens(d)),
        // The router's tensors are f32 in every layer: a rounded logit may choose another
        // expert.
        Some(Param::read("weight", F32, format!("[{e}, {model}]"))),
        when(d.router.bias, Param::read("bias", F32, format!("[{e}]"))),
        input_scale(d),
        Some(Param::write("logits", F32, per_expert(d))),
    ];
    let params = some(params).into_iter().chain(shared_params(d)).collect();
    let [tokens, columns] = grid(c, e);
    // Column tiles of their own behind the router's, because the two matrices are two
    // tensors.
    let of_shared = d.shared.div_ceil(c.logits_tile_experts) as u64;
    let summary = "projects tokens to router logits";
    let grid = [tokens, columns + of_shared];
    entry("gate_logits", summary, params, grid, c.logits_threads)
}

/// Returns the parameters of the shared expert's gate, where this kernel computes its logits.
fn shared_params(d: &GateTopkDesc) -> Vec<Param> {
    let shared = d.shared;
    if shared == 0 {
        return Vec::new();
    }
    some([
        Some(Param::read(
            "shared_weight",
            F32,
            format!("[{shared}, {}]", d.model_dim),
        )),
        when(
            d.shared_bias(),
            Param::read("shared_bias", F32, format!("[{shared}]")),
        ),
        Some(Param::write(
            "shared_logits",
            F32,
            format!("[tokens, {shared}]"),
        )),
    ])
}

/// Returns the projection of tokens that a formula begins with.
fn project(d: &GateTopkDesc, c: &GateTopkConfig, width: usize) -> Entry {
    let weight = |part: &str, shape: String| {
        let param = d.projection_param(part)?;
        Some(Param::read(param, F32, shape))
    };
    let params = some([
        Some(tokens(d)),
        weight("weight", format!("[{width}, {}]", d.model_dim)),
        weight("bias", format!("[{width}]")),
        input_scale(d),
        Some(Param::write("projected", F32, format!("[tokens, {width}]"))),
    ]);
    let summary = "projects tokens into the space of the expert directions";
    let grid = grid(c, width);
    entry("gate_project", summary, params, grid, c.logits_threads)
}

const COSINE_BACKWARD: [&str; 3] = [
    "gate_cosine_bwd",
    "gate_similarity_bwd",
    "gate_temperature_bwd",
];

fn projected(width: usize) -> Param {
    Param::read("projected", F32, format!("[tokens, {width}]"))
}

fn similarity(d: &GateTopkDesc, width: usize) -> Param {
    Param::read("similarity", F32, format!("[{width}, {}]", d.experts))
}

fn temperature() -> Param {
    Param::read("temperature", F32, "[1]")
}

fn cosine(d: &GateTopkDesc, c: &GateTopkConfig, width: usize) -> Entry {
    let params = vec![
        projected(width),
        similarity(d, width),
        temperature(),
        Param::write("logits", F32, per_expert(d)),
    ];
    let summary = "compares projected tokens with the expert directions";
    let grid = grid(c, d.experts);
    entry("gate_logits", summary, params, grid, c.logits_threads)
}

fn cosine_backward(d: &GateTopkDesc, blocks: BackwardBlocks, width: usize) -> [Entry; 3] {
    let e = d.experts;
    let dlogits = || Param::read("dlogits", F32, per_expert(d));
    let tokens = vec![
        projected(width),
        similarity(d, width),
        temperature(),
        dlogits(),
        Param::write("dprojected", F32, format!("[tokens, {width}]")),
        Param::write("inverse_norms", F32, "[tokens]"),
    ];
    let experts = vec![
        projected(width),
        Param::read("inverse_norms", F32, "[tokens]"),
        similarity(d, width),
        temperature(),
        dlogits(),
        gradient("similarity", "", &format!("[{width}, {e}]")),
        Param::write("temperature_parts", F32, format!("[{e}]")),
        Param::i64("accumulate"),
    ];
    let whole = vec![
        Param::read("temperature_parts", F32, format!("[{e}]")),
        temperature(),
        gradient("temperature", "", "[1]"),
        Param::i64("accumulate"),
    ];
    // Three launches: each needs what blocks of the one before left, the temperature that of all
    // experts, and blocks of a grid do not wait for each other.
    let [directions, similarities, temperatures] = COSINE_BACKWARD;
    [
        entry(
            directions,
            "gradients of projected tokens",
            tokens,
            [tokens_by(blocks.tile_tokens), one()],
            blocks.threads,
        ),
        entry(
            similarities,
            "gradients of the expert directions",
            experts,
            [Size::Const(e as u64), one()],
            blocks.threads,
        ),
        entry(
            temperatures,
            "the gradient of the temperature",
            whole,
            [one(), one()],
            blocks.threads,
        ),
    ]
}
