//! Names of generated items.

use crate::GenerateOptions;
use moesaic_spec::LayerSpec;
use proc_macro2::Span;
use quote::format_ident;
use syn::{Ident, Path, Visibility};

/// The names of one layer's items, and their visibility.
pub(crate) struct Names {
    pub layer: Ident,
    pub weights: Ident,
    pub output: Ident,
    pub routing: Ident,
    pub raw: Ident,
    pub raw_training: Ident,
    pub raw_backward: Ident,
    pub trained: Ident,
    pub input_gradients: Ident,
    pub gradients: Ident,
    pub kernels: Ident,
    pub visibility: Visibility,
    /// The facade crate.
    pub facade: Path,
}

impl Names {
    pub fn new(spec: &LayerSpec, options: &GenerateOptions) -> Names {
        let own = || Ident::new(&type_name(&spec.name), Span::call_site());
        let layer = options.name.clone().unwrap_or_else(own);
        // Callers use the other names too, so these carry the span of the name that the caller
        // wrote.
        Names {
            weights: format_ident!("{layer}Weights"),
            output: format_ident!("{layer}Output"),
            routing: format_ident!("{layer}Routing"),
            raw: format_ident!("{layer}Raw"),
            raw_training: format_ident!("{layer}RawTraining"),
            raw_backward: format_ident!("{layer}RawBackward"),
            trained: format_ident!("{layer}Trained"),
            input_gradients: format_ident!("{layer}InputGradients"),
            gradients: format_ident!("{layer}Gradients"),
            kernels: format_ident!("{}_kernels", snake(&layer.to_string())),
            layer,
            visibility: options.visibility.clone(),
            facade: options.crate_path.clone(),
        }
    }
}

/// Returns the type name for a spec name: `Mixtral8x7b` for `mixtral-8x7b`.
///
/// ```
/// assert_eq!(moesaic_rustgen::type_name("qwen3-30b-a3b"), "Qwen330bA3b");
/// assert_eq!(moesaic_rustgen::type_name("8 experts"), "Layer8Experts");
/// ```
pub fn type_name(name: &str) -> String {
    let words = name
        .split(|c: char| !c.is_ascii_alphanumeric())
        .filter(|word| !word.is_empty());
    let joined: String = words.map(capitalized).collect();
    match joined.chars().next() {
        Some(first) if first.is_ascii_alphabetic() && joined != "Self" => joined,
        _ => format!("Layer{joined}"),
    }
}

/// Returns the file name for a spec name: `mixtral_8x7b.rs` for `mixtral-8x7b`.
pub fn file_name(name: &str) -> String {
    let words = name
        .split(|c: char| !c.is_ascii_alphanumeric())
        .filter(|word| !word.is_empty());
    let joined = words
        .map(str::to_ascii_lowercase)
        .collect::<Vec<_>>()
        .join("_");
    format!("{}.rs", if joined.is_empty() { "layer" } else { &joined })
}

fn capitalized(word: &str) -> String {
    let (first, rest) = word.split_at(1);
    first.to_ascii_uppercase() + rest
}

/// Returns `GateTopk` for `gate_topk`.
pub(crate) fn camel(snake: &str) -> Ident {
    Ident::new(&type_name(snake), Span::call_site())
}

/// Returns `gate_topk` for `GateTopk`.
pub(crate) fn snake(camel: &str) -> String {
    let mut text = String::new();
    let mut after_lower = false;
    for c in camel.chars() {
        if c.is_uppercase() && after_lower {
            text.push('_');
        }
        after_lower = !c.is_uppercase();
        text.extend(c.to_lowercase());
    }
    text
}

/// Returns a field or parameter name: `experts_up_weight` for `experts.up.weight`.
pub(crate) fn field(name: &str) -> Ident {
    let name = name.replace(['.', '-'], "_");
    match syn::parse_str(&name) {
        Ok(ident) => ident,
        Err(_) => format_ident!("{name}_"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_spec_name_gives_a_type_name() {
        for (name, expected) in [
            ("mixtral-8x7b", "Mixtral8x7b"),
            ("self", "LayerSelf"),
            ("", "Layer"),
            ("日本", "Layer"),
            ("7b/chat.v2", "Layer7bChatV2"),
            ("deepSeek V3", "DeepSeekV3"),
        ] {
            assert_eq!(type_name(name), expected);
            assert!(syn::parse_str::<Ident>(&type_name(name)).is_ok());
        }
    }

    #[test]
    fn fields_are_identifiers() {
        assert_eq!(field("shared.0.router.weight"), "shared_0_router_weight");
        assert_eq!(field("in"), "in_");
        assert_eq!(snake("Mixtral8x7bMoE"), "mixtral8x7b_mo_e");
    }
}
