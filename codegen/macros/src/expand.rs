//! Turns the parsed macro input into items or compile errors.

use crate::layer::{LayerItem, LayerItems, LayerSource};
use crate::problems;
use moesaic_rustgen::{GenerateOptions, generate};
use moesaic_spec::LayerSpec;
use proc_macro2::TokenStream;
use quote::quote;
use std::path::Path;
use syn::{Error, Ident, LitStr};

/// Returns the items of every layer. Relative paths start at `root`. A layer with errors does not
/// hide the errors of others.
pub fn expand(layers: LayerItems, root: &Path) -> TokenStream {
    let items = layers.0.into_iter().map(|layer| one(layer, root));
    items
        .map(|items| items.unwrap_or_else(|error| error.to_compile_error()))
        .collect()
}

fn one(layer: LayerItem, root: &Path) -> Result<TokenStream, Error> {
    let Found { spec, tracked } = find(&layer.source, &layer.name, root)?;
    let options = GenerateOptions {
        name: Some(layer.name.clone()),
        visibility: layer.visibility,
        attributes: layer.attributes,
        ..GenerateOptions::default()
    };
    let items = generate(&spec, &options).map_err(|e| Error::new(layer.name.span(), e))?;
    Ok(quote!(#items #tracked))
}

/// A spec, and the tokens that make the compiler watch its file.
struct Found {
    spec: LayerSpec,
    tracked: Option<TokenStream>,
}

fn find(source: &LayerSource, name: &Ident, root: &Path) -> Result<Found, Error> {
    match source {
        LayerSource::Inline(toml) => {
            let spec = LayerSpec::from_toml(&toml.text);
            let mut spec = spec.map_err(|error| problems::inline(&error, toml, name))?;
            // A spec without a name takes that of its type.
            if !toml.names_the_layer() {
                spec.name = name.to_string();
            }
            Ok(Found {
                spec,
                tracked: None,
            })
        }
        LayerSource::File(path) => file(path, root),
    }
}

fn file(path: &LitStr, root: &Path) -> Result<Found, Error> {
    let full = root.join(path.value());
    let text = std::fs::read_to_string(&full).map_err(|error| unreadable(path, &error))?;
    let spec = LayerSpec::from_toml(&text).map_err(|error| problems::file(&error, &text, path))?;
    let tracked = tracked(&full);
    Ok(Found { spec, tracked })
}

/// Returns an `include_str!` of the file, which makes the compiler rebuild when the file changes.
fn tracked(full: &Path) -> Option<TokenStream> {
    let full = full.to_str()?;
    Some(quote!(
        const _: &[u8] = ::core::include_bytes!(#full);
    ))
}

fn unreadable(path: &LitStr, error: &std::io::Error) -> Error {
    let message = format!(
        "cannot read the spec `{}`: {error}\nthe path is relative to the folder of Cargo.toml",
        path.value()
    );
    Error::new(path.span(), message)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the compile errors of one macro call as text.
    fn errors(input: &str) -> Vec<String> {
        let layers = syn::parse_str(input).unwrap();
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../spec/tests/ui");
        let file = syn::parse2::<syn::File>(expand(layers, &root)).unwrap();
        let message = |item: &syn::Item| match item {
            syn::Item::Macro(item) => item
                .mac
                .parse_body::<LitStr>()
                .map(|text| text.value())
                .ok(),
            _ => None,
        };
        file.items.iter().filter_map(message).collect()
    }

    #[test]
    fn every_problem_of_a_file_has_its_place() {
        let errors = errors("struct Bad = \"misspelt_keys.toml\";");
        assert_eq!(errors.len(), 6, "{errors:#?}");
        let first = "misspelt_keys.toml:2:1: unknown key `modle_dim` in [shape]: \
                     did you mean `model_dim`?";
        assert_eq!(errors[0], first);
        assert!(errors[5].starts_with("misspelt_keys.toml:11:2: unknown key `rooter`"));
    }

    #[test]
    fn a_layer_that_fails_does_not_hide_the_others() {
        let shape = "shape = { model_dim = 8, hidden_dim = 8, experts = 2, top_k = 1 }";
        let input = format!("struct A {{}} struct B = \"no.toml\"; struct C {{ {shape} }}");
        let errors = errors(&input);
        assert_eq!(errors.len(), 2, "{errors:#?}");
        assert!(errors[0].contains("shape"), "{errors:#?}");
        assert!(
            errors[1].starts_with("cannot read the spec `no.toml`"),
            "{errors:#?}"
        );
    }
}
