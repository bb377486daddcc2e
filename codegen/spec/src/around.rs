//! What is around the routed experts: projections, and shared experts.

use crate::Biases;
use serde::{Deserialize, Serialize};

/// Projections around the routed experts (Nemotron-H): tokens go down to `dim`
/// before them and their weighted sum comes up again. Router and shared experts
/// read the token as it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Latent {
    /// Width of what a routed expert reads and returns, `l`.
    pub dim: usize,
    /// Biases on both projections.
    #[serde(default)]
    pub bias: bool,
}

/// An expert that every token visits. It has the form, activation, clamp,
/// alpha and offset of the routed experts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SharedExpert {
    /// Its inner width.
    pub hidden_dim: usize,
    /// A learned weight per token.
    #[serde(default)]
    pub gate: SharedGate,
    /// Which projections have biases; those of the routed experts when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bias: Option<Biases>,
}

/// The weight of a shared expert's output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SharedGate {
    /// One.
    #[default]
    None,
    /// `σ(x · wᵀ)` with `shared.{i}.router.weight [1, d]`.
    Sigmoid,
    /// The second of `softmax(x · Wᵀ + b)` with `shared.{i}.router.weight [2, d]`;
    /// the first multiplies what the routed experts add up to (PR-MoE,
    /// DeepSpeed's `use_residual`).
    Residual,
}

impl SharedGate {
    /// Logits of a token.
    pub fn logits(self) -> usize {
        match self {
            SharedGate::None => 0,
            SharedGate::Sigmoid => 1,
            SharedGate::Residual => 2,
        }
    }
}
