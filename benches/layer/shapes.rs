//! The layers of known models, scaled where 24 GiB ask for it.

use moesaic::{DType, LayerSpec};
use serde_json::{Value, json};

/// The activation between the two GEMMs of an expert.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `silu(gate) * up`.
    Silu,
    /// gpt-oss: clamped to 7, slope 1.702, up + 1.
    Clamped,
    /// No gate: `relu(up)`.
    Relu,
}

/// From logits to weights.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Score {
    Softmax,
    SoftmaxSelected,
    Sigmoid,
}

/// A layer.
#[derive(Clone, Debug)]
pub struct Shape {
    pub name: &'static str,
    /// Sizes that are smaller than in the model, for the table's head.
    pub scaled: &'static str,
    pub model_dim: usize,
    pub hidden_dim: usize,
    pub experts: usize,
    pub top_k: usize,
    pub activation: Activation,
    pub bias: bool,
    pub score: Score,
    pub renormalize: bool,
    pub scale: f64,
    /// Width of the shared expert; 0 without.
    pub shared_dim: usize,
}

impl std::fmt::Debug for Activation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::fmt::Debug for Score {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl Activation {
    fn name(self) -> &'static str {
        match self {
            Activation::Silu => "silu",
            Activation::Clamped => "clamped",
            Activation::Relu => "relu",
        }
    }
}

impl Score {
    fn name(self) -> &'static str {
        match self {
            Score::Softmax => "softmax",
            Score::SoftmaxSelected => "softmax-selected",
            Score::Sigmoid => "sigmoid",
        }
    }
}

const GATED: Shape = Shape {
    name: "",
    scaled: "",
    model_dim: 0,
    hidden_dim: 0,
    experts: 0,
    top_k: 0,
    activation: Activation::Silu,
    bias: false,
    score: Score::Softmax,
    renormalize: true,
    scale: 1.0,
    shared_dim: 0,
};

/// All of them; sizes are those of examples/specs and, for OLMoE, of
/// config.json of allenai/OLMoE-1B-7B-0924.
pub const SHAPES: &[Shape] = &[
    Shape {
        name: "qwen3",
        model_dim: 2048,
        hidden_dim: 768,
        experts: 128,
        top_k: 8,
        ..GATED
    },
    Shape {
        name: "mixtral",
        scaled: "experts a quarter as wide",
        model_dim: 4096,
        hidden_dim: 3584,
        experts: 8,
        top_k: 2,
        ..GATED
    },
    Shape {
        name: "deepseek-v3",
        scaled: "8 of 256 experts, half of such a device's rows",
        model_dim: 7168,
        hidden_dim: 2048,
        experts: 8,
        top_k: 4,
        score: Score::Sigmoid,
        scale: 2.5,
        shared_dim: 2048,
        ..GATED
    },
    Shape {
        name: "gpt-oss",
        scaled: "16 of 32 experts",
        model_dim: 2880,
        hidden_dim: 2880,
        experts: 16,
        top_k: 4,
        activation: Activation::Clamped,
        bias: true,
        score: Score::SoftmaxSelected,
        ..GATED
    },
    Shape {
        name: "olmoe",
        model_dim: 2048,
        hidden_dim: 1024,
        experts: 64,
        top_k: 8,
        renormalize: false,
        ..GATED
    },
    Shape {
        name: "olmoe-half",
        scaled: "both widths halved",
        model_dim: 1024,
        hidden_dim: 512,
        experts: 64,
        top_k: 8,
        renormalize: false,
        ..GATED
    },
    Shape {
        name: "tutel",
        model_dim: 2048,
        hidden_dim: 2048,
        experts: 2,
        top_k: 2,
        activation: Activation::Relu,
        bias: true,
        ..GATED
    },
];

impl Shape {
    /// Gate and up, or up alone.
    pub fn gated(&self) -> bool {
        self.activation != Activation::Relu
    }

    /// Divides the widths.
    pub fn shrink(&mut self, by: usize) {
        for width in [
            &mut self.model_dim,
            &mut self.hidden_dim,
            &mut self.shared_dim,
        ] {
            *width /= by;
        }
    }

    /// Returns the spec that we run.
    ///
    /// # Panics
    /// Never: the shapes above are valid.
    pub fn spec(&self, dtype: DType) -> LayerSpec {
        let text = format!("{}{}", self.router_text(dtype), self.experts_text());
        LayerSpec::from_toml(&text).expect("a valid spec")
    }

    fn router_text(&self, dtype: DType) -> String {
        let renormalize = match self.score {
            Score::SoftmaxSelected => "",
            _ if self.renormalize => "renormalize = \"sum\"\n",
            _ => "renormalize = \"none\"\n",
        };
        format!(
            "name = \"{}\"\n\
             shape = {{ model_dim = {}, hidden_dim = {}, experts = {}, top_k = {} }}\n\
             precision = {{ weights = \"{dtype}\", activations = \"{dtype}\" }}\n\
             [router]\nscore = \"{}\"\nbias = {}\nselect_bias = {}\nscale = {:?}\n{renormalize}",
            self.name,
            self.model_dim,
            self.hidden_dim,
            self.experts,
            self.top_k,
            self.score.name(),
            self.score == Score::SoftmaxSelected,
            self.score == Score::Sigmoid,
            self.scale,
        )
    }

    fn experts_text(&self) -> String {
        let what = match self.activation {
            Activation::Silu => "",
            Activation::Clamped => "clamp = 7.0\nalpha = 1.702\nup_offset = 1.0\n",
            Activation::Relu => "form = \"plain\"\nactivation = \"relu\"\n",
        };
        let shared = match self.shared_dim {
            0 => String::new(),
            width => format!("[[shared]]\nhidden_dim = {width}\n"),
        };
        format!("[experts]\nbias = {}\n{what}{shared}", self.bias)
    }

    /// Returns `layer.json`, the shape for peers.
    pub fn json(&self, dtype: DType) -> Value {
        json!({
            "name": self.name,
            "dtype": dtype.to_string(),
            "model_dim": self.model_dim,
            "hidden_dim": self.hidden_dim,
            "experts": self.experts,
            "top_k": self.top_k,
            "activation": self.activation.name(),
            "plain": !self.gated(),
            "score": self.score.name(),
            "renormalize": self.renormalize,
            "scale": self.scale,
            "shared_dim": self.shared_dim,
        })
    }
}
