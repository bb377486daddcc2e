//! A builder for a spec and its recipes.

use super::codes::Codes;
use super::config::Config;
use super::source::half_of;
use super::{
    Alternative, HfError, Import, ModalityRouter, TensorParts, TensorPiece, TensorSource,
    TensorStep,
};
use crate::{
    Activation, Capacity, ClampSite, Experts, Expression, Groups, LayerSpec, Precision,
    Renormalize, Router, Score, Shape, SharedExpert, SharedGate, canonical_tensors,
};
use std::ops::Range;

/// The widths and counts that every family has.
pub(super) struct Sizes {
    pub model: usize,
    pub hidden: usize,
    pub experts: usize,
    pub top_k: usize,
}

/// The layout of a fused `gate_up` tensor.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Fused {
    /// `[E, 2h, d]`, gate rows first; down `[E, d, h]`.
    Rows,
    /// `[E, d, 2h]`, gate columns first; down `[E, h, d]`.
    Columns,
    /// `[E, d, 2h]`, gate in even columns; down `[E, h, d]`.
    InterleavedColumns,
}

/// Names of one projection in a single expert: the usual one, and Mixtral's.
const GATE: [&str; 2] = ["gate_proj", "w1"];
const UP: [&str; 2] = ["up_proj", "w3"];
const DOWN: [&str; 2] = ["down_proj", "w2"];

/// Prefixes before a decoder layer's number: the plain one, and those of larger models that contain
/// the decoder.
pub(super) const DECODER: &[&str] = &[
    "model.layers.",
    "layers.",
    "model.language_model.layers.",
    "language_model.model.layers.",
    "language_model.layers.",
    "language.model.layers.",
    "thinker.model.layers.",
    "llm.model.layers.",
    "model.llm.layers.",
];

/// A spec and its recipes under construction.
pub(super) struct Draft {
    pub spec: LayerSpec,
    pub sources: Vec<TensorSource>,
    pub notes: Vec<String>,
    /// Alternative prefixes of the block's tensors, each ending in a dot.
    pub roots: Vec<String>,
    /// Prefixes of all names of the block. A root directly under the layer, beside attention, owns
    /// only its experts.
    pub block: Vec<String>,
    /// Prefixes inside the block of tensors that belong to another layer or are not used.
    pub beside: Vec<String>,
    /// Indices of experts that belong to another layer or are not used.
    pub others: Range<usize>,
    /// Routers of some tokens, beside the layer's own.
    pub routers: Vec<ModalityRouter>,
    /// Whether the routing keys were checked.
    pub checked: bool,
    /// The codes of a quantized checkpoint.
    codes: Option<Codes>,
}

impl Draft {
    /// Starts a dropless layer with a linear softmax router and gated silu experts.
    pub fn new(config: &Config, sizes: Sizes) -> Draft {
        let precision = Precision {
            weights: config.dtype(),
            activations: config.dtype(),
            ..Precision::default()
        };
        let spec = LayerSpec {
            name: config.model.replace('_', "-"),
            shape: Shape {
                model_dim: sizes.model,
                hidden_dim: sizes.hidden,
                experts: sizes.experts,
                top_k: sizes.top_k,
                output_dim: None,
            },
            precision,
            router: Router::default(),
            capacity: Capacity::default(),
            experts: Experts::default(),
            latent: None,
            shared: Vec::new(),
            losses: Vec::new(),
        };
        Draft {
            spec,
            sources: Vec::new(),
            notes: Vec::new(),
            roots: Vec::new(),
            block: Vec::new(),
            beside: Vec::new(),
            others: 0..0,
            routers: Vec::new(),
            checked: false,
            codes: config.codes.clone(),
        }
    }

    /// Sets the roots of a decoder layer.
    pub fn decoder(&mut self, layer: usize, blocks: &[&str]) {
        self.rooted(DECODER, layer, blocks);
    }

    /// Sets the roots `{prefix}{layer}.{block}`.
    pub fn rooted(&mut self, prefixes: &[&str], layer: usize, blocks: &[&str]) {
        let all = prefixes.iter().flat_map(|prefix| {
            blocks
                .iter()
                .map(move |block| format!("{prefix}{layer}.{block}"))
        });
        self.roots = all.collect();
        let bare = |root: &str| {
            root.trim_end_matches('.')
                .ends_with(|c: char| c.is_ascii_digit())
        };
        let owned = self.roots.iter().map(|root| {
            // A layer's own prefix also covers attention and norms, which are not the block's.
            let only = if bare(root) { "experts." } else { "" };
            format!("{root}{only}")
        });
        self.block.extend(owned);
    }

    /// Adds a tensor that is read unchanged from one of `names` under one of the roots.
    pub fn plain(&mut self, canonical: &str, names: &[&str]) {
        self.stepped(canonical, names, &[]);
    }

    /// Adds a tensor that is read from one of `names` under one of the roots and passed through
    /// `steps`.
    pub fn stepped(&mut self, canonical: &str, names: &[&str], steps: &[TensorStep]) {
        let roots = self.roots.iter();
        let full = roots.flat_map(|root| names.iter().map(move |name| format!("{root}{name}")));
        let alternatives = full
            .map(|name| Alternative {
                parts: TensorParts::One(name),
                steps: steps.to_vec(),
            })
            .collect();
        self.push(canonical, alternatives);
    }

    /// Adds a tensor that is joined from pieces, whose names are under one of the roots.
    pub fn joined(&mut self, canonical: &str, pieces: &[TensorPiece]) {
        let under = |root: &String| {
            let of = |piece: &TensorPiece| TensorPiece {
                name: format!("{root}{}", piece.name),
                ..piece.clone()
            };
            Alternative {
                parts: TensorParts::Joined(pieces.iter().map(of).collect()),
                steps: Vec::new(),
            }
        };
        let alternatives = self.roots.iter().map(under).collect();
        self.push(canonical, alternatives);
    }

    /// Adds a tensor that is one number in the checkpoint, the same for all experts.
    pub fn repeated(&mut self, canonical: &str, name: &str) {
        let count = self.spec.routed_experts();
        let under = |root: &String| Alternative {
            parts: TensorParts::Repeated {
                name: format!("{root}{name}"),
                count,
            },
            steps: vec![TensorStep::Reshape(Vec::new())],
        };
        let alternatives = self.roots.iter().map(under).collect();
        self.push(canonical, alternatives);
    }

    /// Adds alternatives to a tensor.
    pub fn push(&mut self, canonical: &str, alternatives: Vec<Alternative>) {
        match self
            .sources
            .iter_mut()
            .find(|source| source.name == canonical)
        {
            Some(source) => source.alternatives.extend(alternatives),
            None => self.sources.push(TensorSource {
                name: canonical.to_string(),
                alternatives,
            }),
        }
    }

    /// Adds a tensor stacked from `experts.{e}.{name}` for any of `names`.
    pub fn per_expert(&mut self, canonical: &str, before: &str, names: &[String]) {
        self.per_expert_from(0, canonical, before, names);
    }

    /// Adds a tensor as `per_expert` does, starting at expert number `first`.
    pub fn per_expert_from(
        &mut self,
        first: usize,
        canonical: &str,
        before: &str,
        names: &[String],
    ) {
        let count = self.spec.shape.experts;
        let part = |root: &String, name: &String| TensorParts::PerExpert {
            before: format!("{root}{before}"),
            after: format!(".{name}"),
            first,
            count,
        };
        let roots = self.roots.iter();
        let parts: Vec<TensorParts> = roots
            .flat_map(|root| names.iter().map(move |name| part(root, name)))
            .collect();
        let alternatives = parts
            .into_iter()
            .map(|parts| Alternative {
                parts,
                steps: Vec::new(),
            })
            .collect();
        self.push(canonical, alternatives);
    }

    /// Adds gated experts as most families store them: one tensor per expert, or
    /// `experts.gate_up_proj` and `experts.down_proj` fused as `fused` describes.
    pub fn gated_experts(&mut self, fused: Fused) {
        self.single_experts(0);
        self.fused_experts(fused, "experts.gate_up_proj", "experts.down_proj");
    }

    /// Adds gated experts with one tensor each, counted from `first`.
    pub fn single_experts(&mut self, first: usize) {
        for (part, names) in [("gate", GATE), ("up", UP), ("down", DOWN)] {
            let names = names.map(|n| format!("{n}.weight"));
            self.per_expert_from(first, &format!("experts.{part}.weight"), "experts.", &names);
        }
    }

    /// Adds gated experts in two fused tensors.
    pub fn fused_experts(&mut self, fused: Fused, gate_up: &str, down: &str) {
        let hidden = self.spec.shape.hidden_dim;
        // moesaic keeps output features first, these layouts input features.
        let transposed = fused != Fused::Rows;
        let flip = if transposed {
            vec![TensorStep::Transpose]
        } else {
            Vec::new()
        };
        for (half, part) in ["gate", "up"].into_iter().enumerate() {
            let mut steps = flip.clone();
            steps.push(half_of(1, half, hidden, fused == Fused::InterleavedColumns));
            self.stepped(&format!("experts.{part}.weight"), &[gate_up], &steps);
        }
        self.stepped("experts.down.weight", &[down], &flip);
    }

    /// Adds experts in MXFP4, if the checkpoint has them. Its rows are the columns of the fused
    /// float tensors.
    pub fn mxfp4_experts(&mut self, fused: Fused) {
        let Some(codes) = self.blocks() else {
            return;
        };
        let (hidden, numbers) = (self.spec.shape.hidden_dim, TensorStep::Dequantize(codes));
        for (half, part) in ["gate", "up"].into_iter().enumerate() {
            let half = half_of(1, half, hidden, fused == Fused::InterleavedColumns);
            let (name, steps) = (format!("experts.{part}.weight"), [numbers.clone(), half]);
            self.stepped(&name, &["experts.gate_up_proj_blocks"], &steps);
        }
        self.stepped(
            "experts.down.weight",
            &["experts.down_proj_blocks"],
            &[numbers],
        );
    }

    /// Returns the name of a form that no recipe reads: MXFP4 in families that are not published
    /// so.
    pub fn unread(&self) -> Option<&'static str> {
        let alternatives = self.sources.iter().flat_map(|source| &source.alternatives);
        let mut steps = alternatives.flat_map(|alternative| &alternative.steps);
        let unread =
            self.blocks().is_some() && !steps.any(|step| matches!(step, TensorStep::Dequantize(_)));
        unread.then_some("mxfp4")
    }

    /// Returns gpt-oss' MXFP4 codes, if the checkpoint has them.
    fn blocks(&self) -> Option<Codes> {
        self.codes.clone().filter(Codes::is_blocks)
    }

    /// Lets every tensor hold codes with scales beside it, if the checkpoint is quantized so.
    fn dequantize(&mut self) {
        let Some(codes) = self.codes.clone() else {
            return;
        };
        self.notes.push(super::QUANTIZED_NOTE.to_string());
        if codes.is_blocks() {
            return;
        }
        let alternatives = self.sources.iter_mut().flat_map(|s| &mut s.alternatives);
        // Decoding comes first, because the other steps reorder numbers and not codes.
        alternatives.for_each(|a| a.steps.insert(0, TensorStep::Dequantize(codes.clone())));
    }

    /// Adds a shared expert whose tensors are under `{root}{module}.` of one of
    /// `modules`.
    pub fn shared(&mut self, modules: &[&str], hidden_dim: usize, gate: SharedGate) {
        let index = self.spec.shared.len();
        self.spec.shared.push(SharedExpert {
            hidden_dim,
            gate,
            bias: None,
            clamp: None,
            activation: None,
        });
        let mut parts = vec![("up", UP), ("down", DOWN)];
        if self.spec.gated() {
            parts.push(("gate", GATE));
        }
        for (part, names) in parts {
            // Recipes for tensors that the spec lacks are dropped in `finish`.
            for kind in ["weight", "bias"] {
                let under = |module: &&str| names.map(|n| format!("{module}.{n}.{kind}"));
                let names: Vec<String> = modules.iter().flat_map(under).collect();
                let names: Vec<&str> = names.iter().map(String::as_str).collect();
                self.plain(&format!("shared.{index}.{part}.{kind}"), &names);
            }
        }
    }

    /// Gives biases to the shared experts although the routed ones have none.
    pub fn biased(&mut self) {
        let shared = self.spec.shared.iter_mut();
        shared.for_each(|expert| expert.bias = Some(true.into()));
    }

    /// Appends a step to every form of a tensor.
    pub fn then(&mut self, canonical: &str, step: TensorStep) {
        let sources = self.sources.iter_mut().filter(|s| s.name == canonical);
        let alternatives = sources.flat_map(|source| &mut source.alternatives);
        alternatives.for_each(|alternative| alternative.steps.push(step.clone()));
    }

    /// Divides weights by the sum of the selected scores if the flag is set.
    pub fn renormalize(&mut self, on: bool, eps: f64) {
        if on {
            self.spec.router.renormalize = Renormalize::Sum;
            self.spec.router.renormalize_eps = eps;
        }
    }

    /// Sets a sigmoid router with a selection bias.
    pub fn sigmoid(&mut self, bias_names: &[&str]) {
        self.spec.router.score = Score::Sigmoid;
        self.select_bias(bias_names);
    }

    /// Adds a router of a modality's tokens over the layer's experts, whose module is named
    /// `<name>_gate`.
    pub fn modality_router(&mut self, name: &str) {
        let own = std::mem::take(&mut self.sources);
        self.plain("router.weight", &[&format!("{name}_gate.weight")]);
        let flat = [TensorStep::Reshape(vec![self.spec.routed_experts()])];
        let bias = [format!("{name}_gate.expert_bias")];
        self.stepped("router.select_bias", &[&bias[0]], &flat);
        self.routers.push(ModalityRouter {
            name: name.to_string(),
            sources: std::mem::replace(&mut self.sources, own),
        });
    }

    /// Adds a bias for selection only.
    pub fn select_bias(&mut self, names: &[&str]) {
        self.spec.router.select_bias = true;
        // Some checkpoints keep it as [1, E].
        let flat = [TensorStep::Reshape(vec![self.spec.routed_experts()])];
        self.stepped("router.select_bias", names, &flat);
    }

    /// Sets group-limited selection, unless it keeps every group.
    pub fn groups(&mut self, groups: Groups) {
        if groups.count > 1 && groups.keep < groups.count {
            self.spec.router.groups = Some(groups);
        }
    }

    /// Sets gpt-oss's gated activation: clamped, `x·σ(alpha·x)`, one added to up.
    pub fn swiglu_oai(&mut self, config: &Config) -> Result<(), HfError> {
        let experts = &mut self.spec.experts;
        experts.alpha = config.number(&["swiglu_alpha"], 1.702)?;
        experts.clamp = Some(config.number(&["swiglu_limit"], 7.0)?);
        experts.up_offset = 1.0;
        Ok(())
    }

    /// Sets the limits of SwiGLU behind its activation, from the lists for routed and for shared
    /// experts. An entry of 0 or null is no limit.
    pub fn limits_behind(
        &mut self,
        config: &Config,
        layer: usize,
        [routed, shared]: [&str; 2],
    ) -> Result<(), HfError> {
        let routed = config.number_at(routed, layer)?;
        let shared = config.number_at(shared, layer)?;
        let spec = &mut self.spec;
        spec.experts.clamp = (routed != 0.0).then_some(routed);
        for expert in &mut spec.shared {
            expert.clamp = (shared != routed).then_some(shared);
        }
        if routed != 0.0 || shared != 0.0 && !spec.shared.is_empty() {
            spec.experts.clamp_on = ClampSite::Output;
        }
        Ok(())
    }

    /// Sets SiTU-GLU: `c·tanh(g / c)·σ(g)` with c under `key`, and a soft cap of up if there is one.
    pub fn situ(
        &mut self,
        config: &Config,
        key: &str,
        default: f64,
        up: Option<f64>,
    ) -> Result<(), HfError> {
        let cap = config.number(&[key], default)?;
        let formula = format!("{cap:?} * tanh(x / {cap:?}) * sigmoid(x)");
        let activation = Expression::parse(&formula).ok().filter(|_| cap > 0.0);
        let Some(activation) = activation else {
            return Err(config.bad(key, &cap.into(), "a number above 0"));
        };
        self.spec.experts.activation = Activation::Custom(activation);
        self.spec.experts.up_softcap = up;
        Ok(())
    }

    /// Sets the activation by its name in transformers.
    pub fn activation(
        &mut self,
        config: &Config,
        keys: &[&str],
        default: &str,
    ) -> Result<(), HfError> {
        let name = config.text(keys, default)?;
        if name == "situ" {
            let up = config.number_opt("activation_situ_linear_beta")?;
            return self.situ(config, "activation_situ_beta", 1.0, up);
        }
        let Some((activation, alpha)) = Activation::of_transformers(&name) else {
            let remedy = format!("known are {}", Activation::transformers_names());
            return Err(config.unsupported(keys[0], "this activation", &remedy));
        };
        self.spec.experts.activation = activation;
        self.spec.experts.alpha = alpha;
        Ok(())
    }

    /// Returns the import, with one recipe per canonical tensor in canonical order.
    pub fn finish(mut self) -> Import {
        self.dequantize();
        let Draft {
            spec,
            mut sources,
            notes,
            block,
            beside,
            others,
            routers,
            ..
        } = self;
        let wanted = canonical_tensors(&spec);
        let place = |name: &str| wanted.iter().position(|tensor| tensor.name == name);
        // Families register more recipes than a configuration may need, such as those of biases.
        sources.retain(|source| place(&source.name).is_some());
        sources.sort_by_key(|source| place(&source.name));
        let complete = sources.len() == wanted.len()
            && sources.iter().all(|source| !source.alternatives.is_empty());
        debug_assert!(complete, "a tensor of {} has no recipe", spec.name);
        Import {
            spec,
            sources,
            notes,
            block,
            beside,
            others,
            routers,
        }
    }
}
