//! The input of `layer!`, between its braces.

use crate::toml::Toml;
use syn::parse::{Parse, ParseStream, Result};
use syn::{Attribute, Ident, LitStr, Token, Visibility, token};

/// One or more layers.
pub struct LayerItems(pub Vec<LayerItem>);

/// `pub struct Name = "path";` or `pub struct Name { toml }`.
pub struct LayerItem {
    pub attributes: Vec<Attribute>,
    pub visibility: Visibility,
    pub name: Ident,
    pub source: LayerSource,
}

/// The place of the spec.
pub enum LayerSource {
    /// A file, relative to the folder of Cargo.toml.
    File(LitStr),
    /// TOML written in place.
    Inline(Toml),
}

impl Parse for LayerItems {
    fn parse(input: ParseStream<'_>) -> Result<LayerItems> {
        let mut layers = vec![input.parse()?];
        while !input.is_empty() {
            layers.push(input.parse()?);
        }
        Ok(LayerItems(layers))
    }
}

impl Parse for LayerItem {
    fn parse(input: ParseStream<'_>) -> Result<LayerItem> {
        let (attributes, visibility) = (input.call(Attribute::parse_outer)?, input.parse()?);
        input.parse::<Token![struct]>()?;
        let name = input.parse()?;
        let source = if input.peek(token::Brace) {
            let content;
            syn::braced!(content in input);
            LayerSource::Inline(content.parse()?)
        } else if input.peek(Token![=]) {
            input.parse::<Token![=]>()?;
            let path = input.parse()?;
            input.parse::<Token![;]>()?;
            LayerSource::File(path)
        } else {
            return Err(input.error("expected `= \"spec.toml\";` or the spec in braces"));
        };
        Ok(LayerItem {
            attributes,
            visibility,
            name,
            source,
        })
    }
}
