//! The types of a spec. Field names and enum spellings are those of the TOML.
//!
//! Options are named after the formulas' published systems; docs/SEMANTICS.md gives each formula in
//! full.

use crate::{
    Activation, Biases, Capacity, CapacityMode, ClampSite, Latent, Loss, RouterKind, SharedExpert,
    WeightFormat,
};
use moesaic_kernel::DType;
use serde::{Deserialize, Serialize};
use std::fmt;

/// A whole MoE layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerSpec {
    /// A name that appears in messages, kernels and file names.
    #[serde(default = "default_name")]
    pub name: String,
    /// Widths and counts.
    pub shape: Shape,
    /// Element types.
    #[serde(default)]
    pub precision: Precision,
    /// The router: from tokens to experts and weights.
    #[serde(default)]
    pub router: Router,
    /// The limit on the rows of each expert.
    #[serde(default)]
    pub capacity: Capacity,
    /// The form and activation of the experts.
    #[serde(default)]
    pub experts: Experts,
    /// Projections around the routed experts, which then work in another width.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latent: Option<Latent>,
    /// Experts that every token visits.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shared: Vec<SharedExpert>,
    /// Auxiliary losses, for training.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub losses: Vec<Loss>,
}

fn default_name() -> String {
    "layer".to_string()
}

/// Widths and counts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    /// Width of a token, `d`.
    pub model_dim: usize,
    /// Width inside an expert, `h` (after gating).
    pub hidden_dim: usize,
    /// Experts with weights, `E`.
    pub experts: usize,
    /// Experts per token, `K`: from 1 to the number of experts that the router scores.
    pub top_k: usize,
    /// Width of the output; `model_dim` when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_dim: Option<usize>,
}

/// Element types. Router weights, logits, scores and accumulators of GEMMs are always f32.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Precision {
    /// Expert weights and biases: f32, f16 or bf16.
    pub weights: DType,
    /// Tokens, intermediates and output: f32, f16 or bf16.
    pub activations: DType,
    /// Allow rounding the f32 factors of the experts' GEMMs to TF32 (11 significant bits) on
    /// targets where that is faster. Only with f32 weights and activations.
    pub tf32: bool,
    /// The format in which the routed experts' matrices are stored and multiplied, where they
    /// are quantized: `mxfp4`. Their biases, and shared experts, are of `weights`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub experts: Option<WeightFormat>,
    /// The format of the down projection, where it differs from `experts`, as in GGUF files that
    /// mix `q4_k` and `q6_k`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub experts_down: Option<WeightFormat>,
    /// Quantize what routed experts multiply by their codes: each token's row, and each row of
    /// activations between the two GEMMs, a group of elements at a time with a scale of its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expert_activations: Option<ActivationFormat>,
    /// Gradients of experts' matrices, shared ones included: f32, or the dtype of `weights`. Sums
    /// are f32, and rounded once when they are stored. All other gradients of weights are f32.
    pub expert_gradients: DType,
}

/// The codes of quantized activations. A group has as many elements of a row as share a scale of
/// the weights that they meet, at most 128.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ActivationFormat {
    /// Integers from -127 to 127; the scale is the group's largest magnitude over 127.
    Int8,
    /// E4M3; the scale is the group's largest magnitude over 448.
    Fp8,
}

impl ActivationFormat {
    /// Returns the number of the largest code, which a group's largest magnitude becomes.
    pub fn largest(self) -> f32 {
        match self {
            ActivationFormat::Int8 => 127.0,
            ActivationFormat::Fp8 => 448.0,
        }
    }
}

impl fmt::Display for ActivationFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ActivationFormat::Int8 => "\"int8\"",
            ActivationFormat::Fp8 => "\"fp8\"",
        })
    }
}

impl Precision {
    /// Sets the dtype of the weights. Experts' gradients in 16 bits follow it.
    pub fn set_weights(&mut self, dtype: DType) {
        self.weights = dtype;
        if self.expert_gradients != DType::F32 {
            self.expert_gradients = dtype;
        }
    }

    /// Returns the format of the routed experts' down projection, if they are quantized.
    pub fn down_format(&self) -> Option<WeightFormat> {
        self.experts
            .map(|experts| self.experts_down.unwrap_or(experts))
    }

    /// Returns the format of a matrix of routed experts, by the name of one of its tensors:
    /// `experts.up.scale`. `None` for biases, for other tensors, and where experts are numbers.
    pub fn format_of(&self, tensor: &str) -> Option<WeightFormat> {
        match tensor.rsplit_once('.')? {
            (_, "bias") => None,
            ("experts.gate" | "experts.up", _) => self.experts,
            ("experts.down", _) => self.down_format(),
            _ => None,
        }
    }
}

impl Default for Precision {
    fn default() -> Self {
        Precision {
            weights: DType::F32,
            activations: DType::F32,
            tf32: false,
            experts: None,
            experts_down: None,
            expert_activations: None,
            expert_gradients: DType::F32,
        }
    }
}

/// The router: from tokens to experts and weights.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Router {
    /// The source of the logits, or of the decision itself.
    pub kind: RouterKind,
    /// A bias on the logits.
    pub bias: bool,
    /// The transformation of a token before the projection.
    pub input: RouterInput,
    /// A soft cap c on the logits, `c · tanh(z / c)`, which everything after them sees (Grok).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logit_softcap: Option<f64>,
    /// The function from logits to scores.
    pub score: Score,
    /// The selection of a token's experts from the scores.
    pub select: Select,
    /// A bias on the scores used for selection only (DeepSeek-V3).
    pub select_bias: bool,
    /// The values that the selection bias is added to.
    pub select_bias_on: BiasedValues,
    /// Keep only the best groups of experts before selecting.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub groups: Option<Groups>,
    /// Let each block of tokens agree on some experts first, among which its tokens select.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub blocks: Option<TokenBlocks>,
    /// The last so many experts are chosen by every token, first of all, and share in the
    /// normalization: shared experts that the router scores (Inkling).
    pub always_chosen: usize,
    /// The normalization that turns the selected scores into weights.
    pub renormalize: Renormalize,
    /// The number added to the denominator (`sum`), or its lower bound (`clamp`).
    pub renormalize_eps: f64,
    /// The p of `renormalize = "p-norm"`.
    pub norm_order: f64,
    /// A factor on every weight, after renormalisation.
    pub scale: f64,
    /// A learned factor per expert on its weight, after `scale`.
    pub expert_scale: bool,
    /// The place where the weight acts.
    pub weight_on: WeightSite,
    /// Rows of the table of `kind = "table"`: the vocabulary size.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub table_rows: Option<usize>,
    /// Width of the projection of `kind = "cosine"`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub projection_dim: Option<usize>,
    /// Mask tokens: those whose `token_mask` is 0 get no experts and take no capacity.
    pub token_mask: bool,
    /// Read the number of slots that a call uses, at most K, from `active_k`.
    pub active_k: bool,
    /// Experimental: router entropy sets a temperature, expert load sets a bias.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entropy: Option<Entropy>,
    /// Training only: multiply the router input by uniform(1-jitter, 1+jitter).
    pub jitter: f64,
    /// Training only: the share of router input channels set to zero.
    pub input_dropout: f64,
    /// Training only: noise on the logits, scaled as `noise_kind` says.
    pub noise: f64,
    /// Training only: the distribution of the noise, and the steps that see it.
    pub noise_kind: NoiseKind,
    /// Training only: keep the second expert with probability `min(1, 2 · its weight)` (GShard).
    pub random_second: bool,
}

impl Default for Router {
    fn default() -> Self {
        Router {
            kind: RouterKind::Linear,
            bias: false,
            input: RouterInput::Token,
            logit_softcap: None,
            score: Score::Softmax,
            select: Select::TopK,
            select_bias: false,
            select_bias_on: BiasedValues::Scores,
            groups: None,
            blocks: None,
            always_chosen: 0,
            renormalize: Renormalize::None,
            renormalize_eps: 0.0,
            norm_order: 1.0,
            scale: 1.0,
            expert_scale: false,
            weight_on: WeightSite::Output,
            table_rows: None,
            projection_dim: None,
            token_mask: false,
            active_k: false,
            entropy: None,
            jitter: 0.0,
            input_dropout: 0.0,
            noise: 0.0,
            noise_kind: NoiseKind::Gaussian,
            random_second: false,
        }
    }
}

/// The transformation of a token before the router's projection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RouterInput {
    /// Nothing.
    Token,
    /// `x / sqrt(mean(x²) + 1e-6) ⊙ input_scale · d^-½` (Gemma 4).
    RmsScaled,
}

/// The function from logits to scores, in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Score {
    /// Softmax over all experts, then selection.
    Softmax,
    /// Selection on the logits, then softmax over the selected ones.
    SoftmaxSelected,
    /// Logistic function.
    Sigmoid,
    /// `sqrt(ln(1 + eᶻ))` (DeepSeek-V4).
    SqrtSoftplus,
    /// Every selected expert weighs 1 (hash layers).
    One,
}

/// The selection of a token's experts. Ties go to the lower id, NaN comes last.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Select {
    /// The K best selection scores.
    #[serde(rename = "top-k")]
    TopK,
    /// Two sequential masked argmaxes, as PhiMoE evaluates them (SparseMixer v2). The number is its
    /// threshold ε.
    SparseMixer(f64),
    /// Every expert takes its best tokens, this many times T / E (Zhou et al.). A token gets 0 to E
    /// experts, so `top_k` is E.
    ExpertChoice(f64),
    /// In training, the K best logits after this many rounds of Sinkhorn balancing (Megatron).
    /// Otherwise as `top-k`.
    Sinkhorn(usize),
    /// As many of the K experts from each of this many groups of equal size (Intern-S1-Pro).
    PerGroup(usize),
}

/// The values that a selection bias is added to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BiasedValues {
    /// The scores (DeepSeek-V3).
    #[default]
    Scores,
    /// The logits (Kolibri 1).
    Logits,
}

/// A temperature from the logits' entropy, and a bias from the expert's load. Experimental.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entropy {
    /// The exponent a of the temperature `exp(a (2 h - 1))`, h the entropy of
    /// the softmax over ln E.
    pub temperature: f64,
    /// The factor b of the bias `-b (E · load - 1)`, load from `router.load`.
    #[serde(default)]
    pub load: f64,
}

/// Noise on router logits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NoiseKind {
    /// Normal deviates times noise / E, for selection and weights (Tutel).
    #[default]
    Gaussian,
    /// Normal deviates times `noise · (softplus(x · Wₙᵀ) + 1e-2)`, for selection
    /// and weights (Shazeer et al., FastMoE).
    Learned,
    /// Gumbel deviates times noise, for selection only (DeepSpeed's RSample).
    Gumbel,
    /// As `gumbel`, except on the first choice (fairseq).
    GumbelSecond,
}

/// Block routing (LLaDA2): the tokens of a block agree on some experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenBlocks {
    /// Tokens of a block. A call's tokens form blocks in order, of which the last may be smaller.
    pub tokens: usize,
    /// Experts that a block agrees on: those whose selection score is best at any of its tokens.
    pub experts: usize,
}

/// Group-limited selection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Groups {
    /// Groups of equal size: a divisor of the number of experts that the router scores.
    pub count: usize,
    /// Groups kept per token: from 1 to `count`, with at least `top_k` experts in all.
    pub keep: usize,
    /// The score of a group.
    pub stat: GroupStat,
    /// The treatment of experts in dropped groups.
    #[serde(default)]
    pub mask: GroupMask,
}

impl Groups {
    /// Returns the scored experts of a group: those with weights in order, then those without.
    pub fn size(&self, spec: &LayerSpec) -> usize {
        (spec.routed_experts() / self.count.max(1)).max(1)
    }
}

/// The score of a group of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GroupStat {
    /// Its best selection score (DeepSeek-V2).
    Max,
    /// The sum of its two best selection scores (DeepSeek-V3).
    #[serde(rename = "top2-sum")]
    Top2Sum,
}

/// The selection scores that experts in dropped groups get.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GroupMask {
    /// Excluded: never selected.
    #[default]
    Exclude,
    /// Zero, as some checkpoints were trained. Zero beats negative scores.
    Zero,
}

/// The normalization from selected scores to weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Renormalize {
    /// None: scores are the weights.
    None,
    /// Divide by `sum + eps`.
    Sum,
    /// Divide by `max(sum, eps)`.
    Clamp,
    /// Divide by the p-norm (DBRX, MegaBlocks).
    PNorm,
}

/// The place where the weight of a token's expert acts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WeightSite {
    /// On the expert's output.
    Output,
    /// On the activation. The output bias is weighted too, so the result equals that of `output` up
    /// to rounding.
    Activation,
    /// On the expert's input (Llama 4): a different function.
    Input,
}

/// The form and activation of the experts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Experts {
    /// Gated or plain.
    pub form: ExpertForm,
    /// The non-linearity φ.
    pub activation: Activation,
    /// The projections that have biases.
    pub bias: Biases,
    /// Clamp around the activation: gate ≤ clamp, up within ±clamp.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clamp: Option<f64>,
    /// The side of φ on which `clamp` bounds the gate.
    pub clamp_on: ClampSite,
    /// Soft cap c of the up branch, after clamping: `c·tanh(up / c)`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub up_softcap: Option<f64>,
    /// φ(g) = g·σ(alpha·g) for `silu`; 1 is plain silu, 1.702 is gpt-oss.
    pub alpha: f64,
    /// Added to the up branch after clamping (gpt-oss: 1).
    pub up_offset: f64,
    /// The layout of gate and up in a checkpoint.
    pub layout: GateLayout,
    /// Extra experts without weights that return their input (LongCat). The
    /// router scores `experts + identity + zero` experts, in this order.
    pub identity: usize,
    /// Extra experts without weights that return zero (MoE++), so a token can use fewer experts
    /// than K.
    pub zero: usize,
    /// The ε of an RMS norm of each expert's output row v before the router's weight multiplies it:
    /// `u / sqrt(mean(u²) + ε)` of `u = v ⊙ s`, with one `expert_norm.weight [d_out]`, or `[l]`, as
    /// s (Muse Spark); without a norm when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output_norm_eps: Option<f64>,
}

impl Default for Experts {
    fn default() -> Self {
        Experts {
            form: ExpertForm::Gated,
            activation: Activation::Silu,
            bias: Biases::None,
            clamp: None,
            clamp_on: ClampSite::Input,
            up_softcap: None,
            alpha: 1.0,
            up_offset: 0.0,
            layout: GateLayout::Split,
            identity: 0,
            zero: 0,
            output_norm_eps: None,
        }
    }
}

/// Gated or plain experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ExpertForm {
    /// `down(φ(gate(x)) ⊙ up(x))`.
    Gated,
    /// `down(φ(up(x)))`.
    Plain,
}

/// The layout of gate and up in a weight file with canonical names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GateLayout {
    /// `experts.gate.weight` and `experts.up.weight`, both `[E, h, d]`.
    Split,
    /// `experts.gate_up.weight [E, 2h, d]`: gate rows, then up rows.
    Concat,
    /// `experts.gate_up.weight [E, 2h, d]`: gate in even rows, up in odd rows.
    Interleaved,
}

impl LayerSpec {
    /// Returns the layer whose experts are the numbers that the codes of this one stand for.
    pub fn dequantized(&self) -> LayerSpec {
        let mut numbers = self.clone();
        numbers.precision.experts = None;
        numbers.precision.experts_down = None;
        numbers.precision.expert_activations = None;
        numbers
    }

    /// Returns the same experts behind an external router, without a capacity and without losses.
    pub fn decided_elsewhere(&self) -> LayerSpec {
        LayerSpec {
            router: Router {
                kind: RouterKind::External,
                weight_on: self.router.weight_on,
                ..Router::default()
            },
            capacity: Capacity::default(),
            losses: Vec::new(),
            ..self.clone()
        }
    }

    /// Returns the width of the output.
    pub fn output_dim(&self) -> usize {
        self.shape.output_dim.unwrap_or(self.shape.model_dim)
    }

    /// Returns the width of a routed expert's input.
    pub fn expert_input_dim(&self) -> usize {
        let latent = self.latent.as_ref();
        latent.map_or(self.shape.model_dim, |latent| latent.dim)
    }

    /// Returns the width of a routed expert's output.
    pub fn expert_output_dim(&self) -> usize {
        let latent = self.latent.as_ref();
        latent.map_or(self.output_dim(), |latent| latent.dim)
    }

    /// Returns the number of experts that the router scores: those with weights, then identity
    /// experts, then zero experts.
    pub fn routed_experts(&self) -> usize {
        self.shape.experts + self.experts.identity + self.experts.zero
    }

    /// Returns true if experts have a gate projection.
    pub fn gated(&self) -> bool {
        self.experts.form == ExpertForm::Gated
    }

    /// Returns true if a training call adds noise to logits that weights see too.
    pub fn noisy_logits(&self) -> bool {
        let of_logits = matches!(
            self.router.noise_kind,
            NoiseKind::Gaussian | NoiseKind::Learned
        );
        self.router.noise > 0.0 && of_logits && self.has_logits()
    }

    /// Returns true if the scale of that noise is learned.
    pub fn learned_noise(&self) -> bool {
        self.noisy_logits() && self.router.noise_kind == NoiseKind::Learned
    }

    /// Returns true if a training call draws random numbers in the router.
    pub fn draws(&self) -> bool {
        let r = &self.router;
        r.jitter > 0.0 || r.input_dropout > 0.0 || r.noise > 0.0 || r.random_second
    }

    /// Returns true if assignments can be dropped.
    pub fn may_drop(&self) -> bool {
        !matches!(
            self.capacity.mode,
            CapacityMode::Dropless | CapacityMode::MaxCount
        )
    }
}
