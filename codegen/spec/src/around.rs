//! Layers around the routed experts: latent projections and shared experts.

use crate::{Activation, Biases, Experts, LayerSpec, WeightSite};
use serde::{Deserialize, Serialize};

/// Projections around the routed experts (Nemotron-H). One takes tokens down to `dim` before the
/// experts, the other takes the experts' weighted sum up again. Router and shared experts still
/// read the token itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Latent {
    /// Width of a routed expert's input and output, `l`.
    pub dim: usize,
    /// Biases on both projections.
    #[serde(default)]
    pub bias: bool,
    /// The ε of an RMS norm of the experts' weighted sum before it is taken up, with
    /// `latent.norm.weight [l]` (Kimi-K3); without a norm when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub norm_eps: Option<f64>,
    /// The ε of an RMS norm of the projected token before the experts read it, with
    /// `latent.input_norm.weight [l]` (Muse Spark); without a norm when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input_norm_eps: Option<f64>,
}

/// An expert that every token visits. It has the form, activation, clamp, soft cap, alpha and offset
/// of the routed experts, but for what it sets itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SharedExpert {
    /// Width inside the shared expert.
    pub hidden_dim: usize,
    /// The learned weight that each token gives this expert.
    #[serde(default)]
    pub gate: SharedGate,
    /// Biases of its projections; those of the routed experts when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bias: Option<Biases>,
    /// Its own clamp, where it differs from that of the routed experts; 0 for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clamp: Option<f64>,
    /// Its own activation, where it differs from that of the routed experts; with an alpha of 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub activation: Option<Activation>,
}

impl LayerSpec {
    /// Returns true if a row's weight also acts in the GEMMs of its expert: in backward, where it
    /// multiplies the output. Behind a norm of the output it does not reach them.
    pub fn weighs_gemms(&self) -> bool {
        self.router.weight_on != WeightSite::Input && self.experts.output_norm_eps.is_none()
    }

    /// Returns the biases of a shared expert's projections.
    ///
    /// # Panics
    /// If there is no shared expert `index`.
    pub fn shared_bias(&self, index: usize) -> Biases {
        self.shared[index].bias.unwrap_or(self.experts.bias)
    }

    /// Returns the index of the residual shared expert, whose gate also weights the routed experts.
    pub fn residual(&self) -> Option<usize> {
        let mut gates = self.shared.iter().map(|shared| shared.gate);
        gates.position(|gate| gate == SharedGate::Residual)
    }

    /// Returns the form and activation of a shared expert: those of the routed ones, with its own
    /// clamp and activation.
    ///
    /// # Panics
    /// If there is no shared expert `index`.
    pub fn shared_experts(&self, index: usize) -> Experts {
        let (own, routed) = (&self.shared[index], &self.experts);
        let clamp = own
            .clamp
            .map_or(routed.clamp, |own| (own != 0.0).then_some(own));
        let (activation, alpha) = match &own.activation {
            Some(activation) => (activation.clone(), 1.0),
            None => (routed.activation.clone(), routed.alpha),
        };
        Experts {
            clamp,
            activation,
            alpha,
            ..routed.clone()
        }
    }
}

/// The weight of a shared expert's output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SharedGate {
    /// The constant 1.
    #[default]
    None,
    /// `σ(x · wᵀ)` with `shared.{i}.router.weight [1, d]`.
    Sigmoid,
    /// The second of `softmax(x · Wᵀ + b)` with `shared.{i}.router.weight [2, d]`. The first
    /// multiplies the routed experts' sum (PR-MoE, DeepSpeed's `use_residual`).
    Residual,
}

impl SharedGate {
    /// Returns the number of gate logits per token.
    pub fn logits(self) -> usize {
        match self {
            SharedGate::None => 0,
            SharedGate::Sigmoid => 1,
            SharedGate::Residual => 2,
        }
    }
}
