//! The activations of experts, and their names.

use crate::Expression;
use serde::{Deserialize, Serialize};

/// The non-linearity φ.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Activation {
    /// `x·σ(alpha·x)`.
    Silu,
    /// `x·Φ(x)` by the error function.
    Gelu,
    /// The tanh approximation of gelu.
    GeluTanh,
    /// `max(x, 0)`.
    Relu,
    /// `max(x, 0)²`.
    Relu2,
    /// `{ expr = "x * sigmoid(1.7 * x)" }`: a custom function.
    #[serde(rename = "expr")]
    Custom(Expression),
}

/// The side of φ on which a clamp bounds the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ClampSite {
    /// `φ(min(gate, clamp))`.
    Input,
    /// `min(φ(gate), clamp)` (Step 3.7, Ling 3).
    Output,
}

/// A name of an activation in transformers.
struct HfName {
    activation: Activation,
    /// The factor inside `silu`.
    alpha: f64,
    /// The spellings; errors name the first.
    names: &'static [&'static str],
}

const fn hf(activation: Activation, alpha: f64, names: &'static [&'static str]) -> HfName {
    HfName {
        activation,
        alpha,
        names,
    }
}

static HF_NAMES: [HfName; 6] = [
    hf(Activation::Silu, 1.0, &["silu", "swish"]),
    // transformers defines it as x·σ(1.702·x).
    hf(Activation::Silu, 1.702, &["quick_gelu"]),
    hf(Activation::Gelu, 1.0, &["gelu", "gelu_python"]),
    hf(
        Activation::GeluTanh,
        1.0,
        &[
            "gelu_pytorch_tanh",
            "gelu_new",
            "gelu_fast",
            "gelu_accurate",
            "gelu_python_tanh",
        ],
    ),
    hf(Activation::Relu, 1.0, &["relu"]),
    hf(Activation::Relu2, 1.0, &["relu2"]),
];

impl Activation {
    /// Returns the word of a spec; `None` for a custom function.
    pub const fn name(&self) -> Option<&'static str> {
        Some(match self {
            Activation::Silu => "silu",
            Activation::Gelu => "gelu",
            Activation::GeluTanh => "gelu-tanh",
            Activation::Relu => "relu",
            Activation::Relu2 => "relu2",
            Activation::Custom(_) => return None,
        })
    }

    /// Returns the activation that transformers calls so, and its factor `alpha`.
    pub(crate) fn of_transformers(name: &str) -> Option<(Activation, f64)> {
        let found = HF_NAMES.iter().find(|known| known.names.contains(&name))?;
        Some((found.activation.clone(), found.alpha))
    }

    /// Lists the names that transformers has for known activations.
    pub(crate) fn transformers_names() -> String {
        let names: Vec<&str> = HF_NAMES.iter().map(|known| known.names[0]).collect();
        match names.split_last() {
            Some((last, others)) => format!("{} and {last}", others.join(", ")),
            None => String::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_the_words_of_a_spec() {
        for known in &HF_NAMES {
            let word = serde_json::to_value(&known.activation).unwrap();
            assert_eq!(word.as_str(), known.activation.name());
        }
    }

    #[test]
    fn names_of_transformers_lead_to_an_activation_and_its_factor() {
        let found = Activation::of_transformers("quick_gelu");
        assert_eq!(found, Some((Activation::Silu, 1.702)));
        assert_eq!(Activation::of_transformers("mish"), None);
        assert_eq!(
            Activation::transformers_names(),
            "silu, quick_gelu, gelu, gelu_pytorch_tanh, relu and relu2"
        );
    }
}
