//! The record `g` of gate templates. It holds what follows from a desc, computed by the desc's own
//! methods, so that text and parameter lists cannot differ.

use moesaic_plan::{GateTopkDesc, Logits, Op};
use moesaic_spec::{Chooser, RouterInput, Select};
use serde::Serialize;

/// A gate, for its templates, forward and backward.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct GateText {
    /// Gradients are computed, not choices.
    backward: bool,
    /// There are logits.
    has_logits: bool,
    /// The formula of the logits: see [`Logits::name`].
    formula: &'static str,
    /// Tokens are projected, and logits computed of what that gives. The text of the formula may
    /// use exponentials, floors and sums over a block.
    projects: bool,
    /// Columns of the product of tokens: of the projection, or the experts.
    columns: usize,
    /// The parameter of the projection's matrix; empty without a projection.
    matrix: &'static str,
    /// The parameter of its bias.
    matrix_bias: &'static str,
    /// See [`Logits::compared`].
    compared: &'static str,
    /// The router reads tokens divided by their root mean square.
    rms: bool,
    /// The experts of a token come from a table.
    table: bool,
    /// One expert after the other, each by a softmax of its own.
    mixer: bool,
    /// Experts choose their tokens.
    choice: bool,
    /// Each group gives as many of a token's experts.
    per_group: bool,
    /// Blocks of tokens agree on experts.
    blocks: bool,
    /// Selection compares logits, not scores.
    compares_logits: bool,
    /// Chosen scores close to zero are divided by the largest.
    relative: bool,
    /// Sinkhorn's iteration balances logits.
    sinkhorn: bool,
    /// Entropy sets a temperature, load a bias.
    guided: bool,
    /// The kernel draws random numbers.
    draws: bool,
    /// The router reads tokens times random factors.
    draws_input: bool,
    /// Noise is added to logits.
    noisy: bool,
    /// The scale of that noise is learned.
    learned: bool,
    /// Noise is added to the keys of selection.
    key_noise: bool,
    /// The second expert of a token goes by chance.
    second: bool,
}

impl GateText {
    /// Returns the record of an operator; `None` if it has no gate.
    pub(crate) fn new(op: &Op) -> Option<GateText> {
        match op {
            Op::GateTopk { desc, .. } => Some(gate(desc)),
            Op::GateTopkBwd { desc, .. } => Some(GateText {
                backward: true,
                ..gate(&desc.gate)
            }),
            Op::Route { desc, .. } => Some(gate(&desc.gate)),
            _ => None,
        }
    }
}

fn gate(d: &GateTopkDesc) -> GateText {
    let has_logits = d.logits != Logits::None;
    GateText {
        backward: false,
        has_logits,
        formula: d.logits.name(),
        projects: d.logits.projection().is_some(),
        columns: d.logits.projection().unwrap_or(d.experts),
        matrix: d.projection_param("weight").unwrap_or_default(),
        matrix_bias: d.projection_param("bias").unwrap_or_default(),
        compared: d.logits.compared(),
        rms: has_logits && d.router.input == RouterInput::RmsScaled,
        table: d.router.kind.chooser() == Chooser::Table,
        mixer: matches!(d.router.select, Select::SparseMixer(_)),
        choice: d.expert_choice().is_some(),
        per_group: d.per_group().is_some(),
        blocks: d.blocks().is_some(),
        compares_logits: d.router.compares_logits(),
        relative: d.relative_scores(),
        sinkhorn: d.sinkhorn().is_some(),
        guided: d.router.entropy.is_some(),
        draws: d.draws_input() || d.noisy() || d.draws_selection(),
        draws_input: d.draws_input(),
        noisy: d.noisy(),
        learned: d.learned_noise(),
        key_noise: d.key_noise(),
        second: d.draws_second(),
    }
}
