//! Texts: specs, configurations of models, activations.

use super::{Surface, archive, promise, root};
use crate::mutate;
use moesaic::reference;
use moesaic_spec::testing::{SampleRng, sample};
use moesaic_spec::{Experts, Expression, LayerSpec, canonical_tensors, hf};
use std::fs;

/// A surface of layer specs in TOML.
pub struct Spec {
    examples: Vec<String>,
}

/// Keys and words of specs.
const SPEC_WORDS: &[&str] = &[
    "experts",
    "top_k",
    "[router]",
    "[[losses]]",
    "kind = \"z\"\n",
    "select = { sinkhorn = 3 }\n",
    "score = \"one\"\n",
    "activation = { expr = \"x^2\" }\n",
    "[capacity]\n",
    "shape.experts",
    "token_mask = true\n",
    "= nan\n",
    "= 1e400",
    "\n[shape]\n",
    "identity = 3\n",
    "clamp",
    "\"\"\"",
    "{ count = 2, keep = 1, stat = \"max\" }",
];

impl Spec {
    /// Makes a surface with the examples of the project.
    pub fn new() -> Spec {
        let entries = fs::read_dir(root().join("examples/specs")).expect("the examples are there");
        let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
        paths.sort();
        let texts = paths
            .iter()
            .filter_map(|path| fs::read_to_string(path).ok());
        Spec {
            examples: texts.collect(),
        }
    }
}

impl Surface for Spec {
    fn name(&self) -> &'static str {
        "spec"
    }

    fn share(&self) -> u64 {
        220
    }

    fn input(&mut self, rng: &mut SampleRng) -> Vec<u8> {
        let valid = sample(rng.bits()).to_toml();
        if rng.one_in(8) {
            return valid.into_bytes();
        }
        let seeds = [
            valid.clone(),
            valid,
            sample(rng.bits()).to_toml(),
            rng.pick(&self.examples),
        ];
        mutate::text(rng, &seeds, SPEC_WORDS)
    }

    fn check(&mut self, input: &[u8]) -> Result<bool, String> {
        let text = String::from_utf8_lossy(input);
        match LayerSpec::from_toml(&text) {
            Ok(spec) => {
                promise(spec.validate().is_ok(), || {
                    "an invalid spec was read".to_string()
                })?;
                let written = spec.to_toml();
                let again = LayerSpec::from_toml(&written);
                promise(again.as_ref() == Ok(&spec), || {
                    format!("it reads back as {again:?}")
                })?;
                promise(!canonical_tensors(&spec).is_empty(), || {
                    "no tensors".to_string()
                })?;
                Ok(true)
            }
            Err(error) => {
                promise(!error.problems().is_empty(), || {
                    "an error without a problem".to_string()
                })?;
                let said = error.render("layer.toml", false);
                promise(said.starts_with("error"), || format!("it says {said}"))?;
                let inside = |span: &std::ops::Range<usize>| {
                    span.start <= span.end && span.end <= text.len()
                };
                promise(error.spans().all(|(span, _)| inside(&span)), || {
                    "a span outside".to_string()
                })?;
                Ok(false)
            }
        }
    }
}

/// A surface of a model's `config.json`.
pub struct Config {
    seeds: Vec<String>,
}

const CONFIG_WORDS: &[&str] = &[
    "\"num_experts\": 0,",
    "\"num_hidden_layers\": 99999,",
    "\"text_config\": {",
    "\"num_experts_per_tok\": 4,",
    "\"n_group\": 3,",
    "\"scoring_func\": \"softmax\",",
    "\"topk_method\": \"noaux_tc\",",
    "\"norm_topk_prob\": false,",
    "\"mlp_only_layers\": \"1\",",
    "\"n_shared_experts\": [0],",
    "\"language_config\": {\"model_type\": \"deepseek_v2\"},",
    "NaN",
    "-Infinity",
    "\u{feff}",
    "\"model_type\": \"dbrx\",",
    "\"layer_types\": [\"moe\"],",
    "\"moe_layers\": [0, 1],",
    "null",
    "\"hidden_act\": \"relu\",",
    "\"moe_intermediate_size\": 1073741824,",
    "\"mlp_only_layers\": [0],",
    "\"decoder_sparse_step\": 0,",
    "\"first_k_dense_replace\": 1000,",
    "\"torch_dtype\": \"float8\",",
    "\"quantization_config\": {\"quant_method\": \"fp8\"},",
    "\"quantization_config\": {\"quant_method\": \"mxfp4\"},",
    "\"weight_block_size\": [0, 128],",
    "\"strategy\": \"block\",",
];

impl Config {
    /// Makes a surface with a configuration of every family, and those of real
    /// models.
    pub fn new() -> Config {
        let least = |model: &str| {
            format!(
                "{{\"model_type\": \"{model}\", \"num_experts_per_tok\": 2, \"num_experts\": 16,\n\
                 \"moe_topk\": 2, \"top_k_experts\": 2, \"moe_intermediate_size\": 24,\n\
                 \"enable_moe_block\": true}}"
            )
        };
        let mut seeds: Vec<String> = hf::supported_models().into_iter().map(least).collect();
        let folders = ["hf", "hf_more", "quantized"];
        for folder in folders.map(archive::folder) {
            let entries = fs::read_dir(folder).into_iter().flatten().flatten();
            let mut paths: Vec<_> = entries
                .map(|entry| entry.path().join("config.json"))
                .collect();
            paths.sort();
            seeds.extend(
                paths
                    .iter()
                    .filter_map(|path| fs::read_to_string(path).ok()),
            );
        }
        Config { seeds }
    }
}

impl Surface for Config {
    fn name(&self) -> &'static str {
        "config"
    }

    fn share(&self) -> u64 {
        150
    }

    fn input(&mut self, rng: &mut SampleRng) -> Vec<u8> {
        mutate::text(rng, &self.seeds, CONFIG_WORDS)
    }

    fn check(&mut self, input: &[u8]) -> Result<bool, String> {
        let text = String::from_utf8_lossy(input);
        let layers = match hf::moe_layers(&text) {
            Ok(layers) => layers,
            Err(error) => {
                promise(!error.to_string().is_empty(), || {
                    "it says nothing".to_string()
                })?;
                Vec::new()
            }
        };
        let mut accepted = false;
        let ends = layers.first().into_iter().chain(layers.last()).copied();
        for layer in ends.chain([0, 1, usize::MAX]) {
            let Ok(import) = hf::import(&text, layer) else {
                continue;
            };
            accepted = true;
            promise(layers.contains(&layer), || {
                format!("layer {layer} is none of {layers:?}")
            })?;
            promise(import.spec.validate().is_ok(), || {
                "an invalid spec".to_string()
            })?;
            let wanted = canonical_tensors(&import.spec);
            let names = wanted.iter().map(|tensor| &tensor.name);
            let same = names.eq(import.sources.iter().map(|source| &source.name));
            promise(same, || "sources are not those of the tensors".to_string())?;
        }
        Ok(accepted)
    }

    /// Allows more memory, because a list of up to a hundred thousand layers is
    /// one number in the text.
    fn memory(&self, length: usize) -> usize {
        (16 << 20) + 500 * length
    }

    fn work(&self, length: usize) -> usize {
        (64 << 20) + 4000 * length
    }
}

/// A surface of activations as expressions.
pub struct Activation {
    seeds: Vec<String>,
}

const ACTIVATION_WORDS: &[&str] = &[
    "x",
    "exp(",
    "log(",
    "sqrt(",
    "tanh(",
    "sigmoid(",
    "softplus(",
    "erf(",
    "abs(",
    "relu(",
    "step(",
    "min(",
    "max(",
    "where(x < 0, ",
    "where(",
    ", x)",
    ")",
    "(",
    "^2",
    "^-3",
    "^2147483647",
    "^-2147483648",
    "/0",
    "/x",
    "*x",
    "-x",
    "+1e38",
    "pi",
    "1e-45",
    "0*",
    "<=",
    ">",
];

impl Activation {
    /// Makes a surface with functions in common use.
    pub fn new() -> Activation {
        let seeds = [
            "x * sigmoid(1.7 * x)",
            "max(x, 0.1 * x)",
            "x * tanh(softplus(x))",
            "where(x < 0, exp(x) - 1, x)",
            "min(relu(x), 6)^2 / 6",
            "x / (1 + abs(x)) + 0.5 * erf(x)",
            "log(1 + x^2) + x / sqrt(x^2 + 1)",
            "0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))",
            "1/(1 + exp(-x))",
            "log(1 + exp(x))",
        ];
        Activation {
            seeds: seeds.map(String::from).to_vec(),
        }
    }
}

impl Surface for Activation {
    fn name(&self) -> &'static str {
        "activation"
    }

    fn share(&self) -> u64 {
        150
    }

    fn input(&mut self, rng: &mut SampleRng) -> Vec<u8> {
        mutate::text(rng, &self.seeds, ACTIVATION_WORDS)
    }

    fn check(&mut self, input: &[u8]) -> Result<bool, String> {
        let text = String::from_utf8_lossy(input);
        let expression = match Expression::parse(&text) {
            Ok(expression) => expression,
            Err(error) => {
                let span = &error.span;
                let inside = span.start <= span.end && span.end <= text.len();
                let whole = text.is_char_boundary(span.start) && text.is_char_boundary(span.end);
                promise(inside && whole, || format!("the span {span:?} of {error}"))?;
                promise(!error.message.is_empty(), || "it says nothing".to_string())?;
                return Ok(false);
            }
        };
        let nodes = expression.nodes();
        promise(nodes.len() <= Expression::MAX_NODES, || {
            format!("{} nodes", nodes.len())
        })?;
        for (at, node) in nodes.iter().enumerate() {
            let before = node.operands().all(|operand| operand.index() < at);
            promise(before, || format!("node {at} uses a later one"))?;
        }
        let finite = |node: &moesaic_spec::expression::Node| match node {
            moesaic_spec::expression::Node::Constant(value) => value.is_finite(),
            _ => true,
        };
        promise(nodes.iter().all(finite), || {
            "a constant is not finite".to_string()
        })?;
        let experts = Experts {
            activation: moesaic_spec::Activation::Custom(expression),
            ..Experts::default()
        };
        for x in [
            -1e30,
            -2.5,
            -1.0,
            -0.0,
            0.0,
            1e-30,
            0.75,
            3.0,
            f64::INFINITY,
            f64::NAN,
        ] {
            reference::activate(&experts, None, x);
        }
        Ok(true)
    }
}
