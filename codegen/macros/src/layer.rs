//! The input of `layer!`, between its braces.

use crate::toml::Toml;
use syn::parse::{Parse, ParseStream, Result};
use syn::{Attribute, Ident, LitStr, Token, Visibility, token};

/// One or more layers.
pub struct Layers(pub Vec<Layer>);

/// `pub struct Name = "path";` or `pub struct Name { toml }`.
pub struct Layer {
    pub attributes: Vec<Attribute>,
    pub visibility: Visibility,
    pub name: Ident,
    pub source: Source,
}

/// The place of the spec.
pub enum Source {
    /// A file, relative to the folder of Cargo.toml.
    File(LitStr),
    /// TOML written in place.
    Inline(Toml),
}

impl Parse for Layers {
    fn parse(input: ParseStream<'_>) -> Result<Layers> {
        let mut layers = vec![input.parse()?];
        while !input.is_empty() {
            layers.push(input.parse()?);
        }
        Ok(Layers(layers))
    }
}

impl Parse for Layer {
    fn parse(input: ParseStream<'_>) -> Result<Layer> {
        let (attributes, visibility) = (input.call(Attribute::parse_outer)?, input.parse()?);
        input.parse::<Token![struct]>()?;
        let name = input.parse()?;
        let source = if input.peek(token::Brace) {
            let content;
            syn::braced!(content in input);
            Source::Inline(content.parse()?)
        } else if input.peek(Token![=]) {
            input.parse::<Token![=]>()?;
            let path = input.parse()?;
            input.parse::<Token![;]>()?;
            Source::File(path)
        } else {
            return Err(input.error("expected `= \"spec.toml\";` or the spec in braces"));
        };
        Ok(Layer {
            attributes,
            visibility,
            name,
            source,
        })
    }
}
