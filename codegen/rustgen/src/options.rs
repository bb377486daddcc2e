//! Options of the generator.

use syn::{Attribute, Ident, Path, Visibility, parse_quote};

/// Options for the generated items.
#[derive(Clone, Debug)]
pub struct GenerateOptions {
    /// The name of the layer type; derived from the spec's name when absent.
    pub name: Option<Ident>,
    /// The visibility of every item.
    pub visibility: Visibility,
    /// Attributes and docs of the layer type, before the generated docs.
    pub attributes: Vec<Attribute>,
    /// The path of the facade crate.
    pub crate_path: Path,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        GenerateOptions {
            name: None,
            visibility: parse_quote!(pub),
            attributes: Vec::new(),
            crate_path: parse_quote!(::moesaic),
        }
    }
}
