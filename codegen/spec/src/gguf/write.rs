//! The metadata of a GGUF file for a layer of another checkpoint: keys and names that
//! [`import`](super::import) reads back as the same layer.

use super::{GgufError, GgufValue, Metadata, TensorInfo, import};
use crate::{LayerSpec, Renormalize, Score, canonical_tensors};

/// llama.cpp's architecture of each family, by the name that specs of the family begin with.
const WRITTEN: [(&str, &str); 14] = [
    ("dbrx", "dbrx"),
    ("deepseek-v2", "deepseek2"),
    ("deepseek-v3", "deepseek2"),
    ("dots1", "dots1"),
    ("glm4-moe", "glm4moe"),
    ("gpt-oss", "gpt-oss"),
    ("granitemoe", "granitemoe"),
    ("kimi-k2", "deepseek2"),
    ("minimax-m2", "minimax-m2"),
    ("mixtral", "llama"),
    ("olmoe", "olmoe"),
    ("qwen2-moe", "qwen2moe"),
    ("qwen3-moe", "qwen3moe"),
    ("qwen3-next", "qwen3next"),
];

/// Returns the architecture for a layer of a family, if llama.cpp has one that moesaic reads.
pub fn architecture_for(spec: &LayerSpec) -> Option<&'static str> {
    let (family, _) = spec.name.rsplit_once("-layer")?;
    let found = WRITTEN.iter().find(|(known, _)| *known == family);
    found.map(|(_, architecture)| *architecture)
}

/// Returns the families of [`architecture_for`].
pub fn written_families() -> Vec<&'static str> {
    WRITTEN.iter().map(|(family, _)| *family).collect()
}

/// Returns the name of a canonical tensor in layer `layer` of a GGUF file, if it has one.
pub fn tensor_name(canonical: &str, layer: usize) -> Option<String> {
    let path: Vec<&str> = canonical.split('.').collect();
    let end = match path.as_slice() {
        ["router", kind @ ("weight" | "bias")] => format!("ffn_gate_inp.{kind}"),
        ["router", "select_bias"] => "exp_probs_b.bias".to_string(),
        ["shared", "0", "router", "weight"] => "ffn_gate_inp_shexp.weight".to_string(),
        ["experts", part, kind] => format!("ffn_{part}_exps.{kind}"),
        ["shared", "0", part, kind] => format!("ffn_{part}_shexp.{kind}"),
        _ => return None,
    };
    Some(format!("blk.{layer}.{end}"))
}

/// Returns the keys of a model with layers such as `spec`, of which it has `layers`.
pub fn keys_for(spec: &LayerSpec, architecture: &str, layers: usize) -> Vec<(String, GgufValue)> {
    let int = |value: usize| GgufValue::Int(value as i64);
    let shape = &spec.shape;
    let score = match spec.router.score {
        Score::Sigmoid => 2,
        Score::SoftmaxSelected => 3,
        _ => 1,
    };
    let mut own = vec![
        ("block_count", int(layers)),
        ("embedding_length", int(shape.model_dim)),
        ("expert_count", int(shape.experts)),
        ("expert_used_count", int(shape.top_k)),
        ("expert_feed_forward_length", int(shape.hidden_dim)),
        ("expert_gating_func", int(score)),
    ];
    match spec.router.renormalize {
        Renormalize::Sum => own.push(("expert_weights_norm", GgufValue::Bool(true))),
        Renormalize::None => own.push(("expert_weights_norm", GgufValue::Bool(false))),
        _ => {}
    }
    if spec.router.scale != 1.0 {
        own.push(("expert_weights_scale", GgufValue::Float(spec.router.scale)));
    }
    if let Some(groups) = &spec.router.groups {
        own.push(("expert_group_count", int(groups.count)));
        own.push(("expert_group_used_count", int(groups.keep)));
    }
    if !spec.shared.is_empty() {
        own.push(("expert_shared_count", int(spec.shared.len())));
    }
    let named = own
        .into_iter()
        .map(|(key, value)| (format!("{architecture}.{key}"), value));
    let first = [
        (
            "general.architecture",
            GgufValue::Text(architecture.to_string()),
        ),
        ("general.quantization_version", GgufValue::Int(2)),
    ];
    let first = first.map(|(key, value)| (key.to_string(), value));
    first.into_iter().chain(named).collect()
}

/// Checks that a file with these keys and the layer's tensors reads as `spec` in layer `layer`.
///
/// # Errors
///
/// [`GgufError::CannotSay`] if the keys cannot express the layer, or why they are not read.
pub fn check_keys(
    spec: &LayerSpec,
    layer: usize,
    keys: &[(String, GgufValue)],
) -> Result<(), GgufError> {
    let mut metadata = Metadata {
        values: keys.iter().cloned().collect(),
        ..Metadata::default()
    };
    let cannot = |what: String| GgufError::CannotSay {
        layer: spec.name.clone(),
        what,
    };
    for tensor in canonical_tensors(spec) {
        let name = tensor_name(&tensor.name, layer)
            .ok_or_else(|| cannot(format!("a tensor `{}`", tensor.name)))?;
        let info = TensorInfo {
            shape: tensor.shape,
            dtype: Some(tensor.dtype),
        };
        metadata.tensors.insert(name, info);
    }
    let mut read = import(&metadata, layer)?.spec;
    read.name.clone_from(&spec.name);
    read.precision.clone_from(&spec.precision);
    if read == *spec {
        return Ok(());
    }
    let [read, wanted] = [read.to_toml(), spec.to_toml()];
    let differ = wanted
        .lines()
        .find(|line| !read.lines().any(|other| other == *line));
    let differ = differ.or_else(|| {
        read.lines()
            .find(|line| !wanted.lines().any(|w| w == *line))
    });
    Err(cannot(format!("`{}`", differ.unwrap_or_default())))
}
