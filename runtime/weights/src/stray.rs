//! Hints on tensors that the spec does not use.

use moesaic_spec::{LayerSpec, RouterKind, canonical_tensors, closest};

/// An optional tensor of layers, and the option that adds it.
struct Optional {
    /// The canonical name.
    name: &'static str,
    /// The option as written in a spec.
    option: &'static str,
}

const fn optional(name: &'static str, option: &'static str) -> Optional {
    Optional { name, option }
}

/// Options that add a tensor to every kind of router.
const ROUTER: &[Optional] = &[
    optional("router.bias", "`bias = true` under [router]"),
    optional("router.select_bias", "`select_bias = true` under [router]"),
    optional(
        "router.noise.weight",
        "`noise_kind = \"learned\"` under [router]",
    ),
    optional("router.load", "`entropy` under [router]"),
    optional(
        "router.input_scale",
        "`input = \"rms-scaled\"` under [router]",
    ),
    optional(
        "router.expert_scale",
        "`expert_scale = true` under [router]",
    ),
];

/// Tensors of routed and of shared experts, named without their prefix.
const GATE: &str = "`form = \"gated\"` under [experts]";
const BIAS: &str = "`bias = true` under [experts]";
const FUSED: &str = "`layout = \"concat\"` or \"interleaved\" under [experts]";

/// Returns the name with advice: the option that uses the tensor, or the name that was probably
/// meant.
pub(crate) fn stray(name: &str, spec: &LayerSpec) -> String {
    if let Some(option) = option(name) {
        return format!("`{name}` ({option} uses it)");
    }
    match meant(name, spec) {
        Some(meant) => format!("`{name}` (did you mean `{meant}`?)"),
        None => format!("`{name}`"),
    }
}

/// Returns the option that adds a tensor of this name.
fn option(name: &str) -> Option<String> {
    if let Some(found) = ROUTER.iter().find(|known| known.name == name) {
        return Some(found.option.to_string());
    }
    let kinds = RouterKind::with_weight(name);
    let kinds: Vec<String> = kinds
        .map(|kind| format!("\"{}\"", kind.def().name))
        .collect();
    if !kinds.is_empty() {
        return Some(format!("`kind = {}` under [router]", kinds.join("` or `")));
    }
    let parts: Vec<&str> = name.split('.').collect();
    let text = match parts.as_slice() {
        ["latent", "down" | "up", "weight"] => "a [latent] table".to_string(),
        ["latent", "norm", "weight"] => "`norm_eps` under [latent]".to_string(),
        ["latent", "input_norm", "weight"] => "`input_norm_eps` under [latent]".to_string(),
        ["expert_norm", "weight"] => "`output_norm_eps` under [experts]".to_string(),
        ["latent", "down" | "up", "bias"] => "`bias = true` under [latent]".to_string(),
        ["experts", "gate_up", "weight" | "bias"] | ["shared", _, "gate_up", "weight" | "bias"] => {
            FUSED.to_string()
        }
        ["experts", "gate", "weight"] => GATE.to_string(),
        ["experts", "gate" | "up" | "down", "bias"] => BIAS.to_string(),
        ["shared", index, "router", "weight"] => {
            format!("`gate = \"sigmoid\"` of [[shared]] {index}")
        }
        ["shared", index, "gate" | "up" | "down", "bias"] => {
            format!("`bias = true` of [[shared]] {index}")
        }
        ["shared", index, "gate" | "up" | "down", "weight"] => {
            format!("[[shared]] {index}, counted from 0,")
        }
        _ => return None,
    };
    Some(text)
}

/// Returns the tensor that was probably meant: one of the spec, or one that an option adds.
/// Prefixes are often left out.
fn meant(name: &str, spec: &LayerSpec) -> Option<String> {
    let own: Vec<String> = canonical_tensors(spec)
        .into_iter()
        .map(|t| t.name)
        .collect();
    let added = ["experts.gate.bias", "experts.up.bias", "experts.down.bias"];
    let kinds = RouterKind::ALL.into_iter();
    let of_kinds = kinds.flat_map(|kind| kind.def().weights().map(|weight| weight.name));
    let added = added
        .into_iter()
        .chain(ROUTER.iter().map(|known| known.name))
        .chain(of_kinds);
    let all: Vec<&str> = own.iter().map(String::as_str).chain(added).collect();
    let ends = |known: &&&str| {
        known
            .strip_suffix(name)
            .is_some_and(|rest| rest.ends_with('.'))
    };
    let whole = all.iter().find(ends).copied();
    let near = whole.or_else(|| closest(name, all.iter().copied()));
    near.map(str::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every tensor listed here exists in some spec, so `stray` names real options.
    #[test]
    fn options_have_the_tensors_they_are_named_for() {
        let all = [
            "router = { bias = true, select_bias = true, score = \"sigmoid\" }",
            "router = { noise = 1.0, noise_kind = \"learned\" }",
            "router = { input = \"rms-scaled\", expert_scale = true }",
            "router = { kind = \"table\", table_rows = 4 }",
            "router = { kind = \"cosine\", projection_dim = 2 }",
            "latent = { dim = 2, bias = true, norm_eps = 1e-5, input_norm_eps = 1e-5 }",
            "experts = { bias = true, output_norm_eps = 1e-5 }",
            "shared = [{ hidden_dim = 2, gate = \"sigmoid\", bias = true }]",
        ];
        let mut names = Vec::new();
        for line in all {
            let shape = "shape = { model_dim = 4, hidden_dim = 2, experts = 4, top_k = 2 }";
            let spec = LayerSpec::from_toml(&format!("name = \"s\"\n{shape}\n{line}"));
            let spec = spec.unwrap_or_else(|error| panic!("{line}: {error}"));
            names.extend(canonical_tensors(&spec).into_iter().map(|t| t.name));
        }
        for known in ROUTER.iter().filter(|known| known.name != "router.load") {
            assert!(names.iter().any(|n| n == known.name), "{}", known.name);
        }
        for name in names.iter().filter(|n| !n.starts_with("experts.")) {
            assert!(option(name).is_some(), "{name}");
        }
    }
}
