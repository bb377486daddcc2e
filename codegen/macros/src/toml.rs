//! TOML as Rust tokens: turned back into text for the spec reader, with the span of every part.

use proc_macro2::{Literal, Span, TokenStream, TokenTree};
use std::ops::Range;
use syn::ext::IdentExt;
use syn::parse::{Parse, ParseStream, Result};
use syn::{Ident, Lit, LitStr, Token, token};

/// A TOML document, with the source span of each of its parts.
#[derive(Default)]
pub struct Toml {
    /// The document.
    pub text: String,
    pieces: Vec<(Range<usize>, Span)>,
}

impl Parse for Toml {
    fn parse(input: ParseStream<'_>) -> Result<Toml> {
        let mut toml = Toml::default();
        while !input.is_empty() {
            toml.line(input)?;
            toml.text.push('\n');
        }
        Ok(toml)
    }
}

impl Toml {
    /// Returns tokens with the spans of the parts in `range`. The compiler underlines from the
    /// first to the last. `None` if the range has no part.
    pub fn at(&self, range: &Range<usize>) -> Option<TokenStream> {
        let inside = |piece: &Range<usize>| piece.start < range.end && range.start < piece.end;
        let mut spans = self
            .pieces
            .iter()
            .filter(|(piece, _)| inside(piece))
            .map(|(_, span)| *span);
        let first = spans.next()?;
        let last = spans.next_back().unwrap_or(first);
        let mark = |span| TokenTree::from(Ident::new("here", span));
        Some([mark(first), mark(last)].into_iter().collect())
    }

    /// Returns true if the document starts with the layer's name.
    pub fn names_the_layer(&self) -> bool {
        let root = self.text.lines().take_while(|line| !line.starts_with('['));
        root.into_iter()
            .any(|line| line.starts_with("name = ") || line.starts_with("\"name\" = "))
    }

    /// Reads a table header, or a key with its value.
    fn line(&mut self, input: ParseStream<'_>) -> Result<()> {
        if input.peek(Token![#]) {
            return Err(input.error("comments of a spec in Rust start with `//`, not with `#`"));
        }
        if input.peek(token::Bracket) {
            return self.header(input);
        }
        self.pair(input)?;
        if input.peek(Token![,]) || input.peek(Token![;]) {
            Err(input.error("nothing stands between the lines of a spec: remove this"))
        } else {
            Ok(())
        }
    }

    /// Reads `[shape]` or `[[shared]]`.
    fn header(&mut self, input: ParseStream<'_>) -> Result<()> {
        let content;
        let bracket = syn::bracketed!(content in input);
        self.push("[", bracket.span.open());
        if content.peek(token::Bracket) {
            self.header(&content)?
        } else {
            self.key(&content)?
        }
        self.push("]", bracket.span.close());
        finished(&content)
    }

    fn pair(&mut self, input: ParseStream<'_>) -> Result<()> {
        self.key(input)?;
        let equals: Token![=] = input.parse()?;
        self.push(" = ", equals.spans[0]);
        self.value(input)
    }

    /// Reads a key: `select`, `router.select`, `sparse-mixer` or `"quoted"`.
    fn key(&mut self, input: ParseStream<'_>) -> Result<()> {
        loop {
            if input.peek(LitStr) {
                self.string(&input.parse()?);
            } else {
                let ident = input.call(Ident::parse_any)?;
                self.push(&ident.to_string(), ident.span());
            }
            if input.peek(Token![.]) {
                self.push(".", input.parse::<Token![.]>()?.spans[0]);
            } else if input.peek(Token![-]) {
                self.push("-", input.parse::<Token![-]>()?.spans[0]);
            } else {
                return Ok(());
            }
        }
    }

    fn value(&mut self, input: ParseStream<'_>) -> Result<()> {
        if input.peek(token::Bracket) {
            let content;
            let bracket = syn::bracketed!(content in input);
            self.list(
                &content,
                ["[", "]"],
                [bracket.span.open(), bracket.span.close()],
                Toml::value,
            )
        } else if input.peek(token::Brace) {
            let content;
            let brace = syn::braced!(content in input);
            self.list(
                &content,
                ["{", "}"],
                [brace.span.open(), brace.span.close()],
                Toml::pair,
            )
        } else {
            self.scalar(input)
        }
    }

    fn list(
        &mut self,
        content: ParseStream<'_>,
        [open, close]: [&str; 2],
        spans: [Span; 2],
        item: fn(&mut Toml, ParseStream<'_>) -> Result<()>,
    ) -> Result<()> {
        self.push(open, spans[0]);
        while !content.is_empty() {
            item(self, content)?;
            if !content.is_empty() {
                let comma: Token![,] = content.parse()?;
                // Rust programmers write a trailing comma, which TOML forbids, so it is dropped.
                if !content.is_empty() {
                    self.push(", ", comma.spans[0]);
                }
            }
        }
        self.push(close, spans[1]);
        Ok(())
    }

    fn scalar(&mut self, input: ParseStream<'_>) -> Result<()> {
        if input.peek(Token![-]) {
            self.push("-", input.parse::<Token![-]>()?.spans[0]);
        } else if input.peek(Token![+]) {
            self.push("+", input.parse::<Token![+]>()?.spans[0]);
        }
        if input.peek(Lit) {
            return self.literal(&input.parse()?);
        }
        match input.call(Ident::parse_any) {
            // `inf` and `nan` are words; the spec reader judges any other.
            Ok(word) => self.push(&word.to_string(), word.span()),
            Err(_) => {
                return Err(input.error("expected a value: a number, \"text\", true or false"));
            }
        }
        Ok(())
    }

    fn literal(&mut self, literal: &Lit) -> Result<()> {
        match literal {
            Lit::Str(text) => self.string(text),
            Lit::Bool(value) => self.push(&value.value.to_string(), value.span),
            Lit::Int(int) => self.number(&int.token(), int.suffix())?,
            Lit::Float(float) => self.number(&float.token(), float.suffix())?,
            _ => {
                let message = "not a value of TOML: write a number, \"text\", true or false";
                return Err(syn::Error::new(literal.span(), message));
            }
        }
        Ok(())
    }

    fn number(&mut self, token: &Literal, suffix: &str) -> Result<()> {
        if !suffix.is_empty() {
            let message = format!("numbers of a spec have no type: remove `{suffix}`");
            return Err(syn::Error::new(token.span(), message));
        }
        self.push(&token.to_string(), token.span());
        Ok(())
    }

    fn string(&mut self, literal: &LitStr) {
        let mut text = String::from('"');
        for c in literal.value().chars() {
            match c {
                '"' | '\\' => text.extend(['\\', c]),
                c if c.is_control() => text += &format!("\\u{:04x}", c as u32),
                c => text.push(c),
            }
        }
        text.push('"');
        self.push(&text, literal.span());
    }

    fn push(&mut self, text: &str, span: Span) {
        let start = self.text.len();
        self.text.push_str(text);
        self.pieces.push((start..self.text.len(), span));
    }
}

fn finished(content: ParseStream<'_>) -> Result<()> {
    if content.is_empty() {
        Ok(())
    } else {
        Err(content.error("expected `]`"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(tokens: &str) -> String {
        syn::parse_str::<Toml>(tokens).map_or_else(|e| format!("error: {e}"), |toml| toml.text)
    }

    #[test]
    fn every_kind_of_value_is_written_again() {
        let tokens = r##"
            name = "a \"b\" \\ \n" raw = r#"c"d"#
            shape = { model_dim = 1_024, top_k = 2, }
            router.select = { sparse-mixer = 1e-2 }
            noise = -0.5 bias = true clamp = +7 odd = inf
            list = [1, [2.5], "x",]
            [router.groups] count = 0x10
            [[losses]] kind = "z" // a comment
            [[losses]] type = 1
        "##;
        let expected = r##"name = "a \"b\" \\ \u000a"
raw = "c\"d"
shape = {model_dim = 1_024, top_k = 2}
router.select = {sparse-mixer = 1e-2}
noise = -0.5
bias = true
clamp = +7
odd = inf
list = [1, [2.5], "x"]
[router.groups]
count = 0x10
[[losses]]
kind = "z"
[[losses]]
type = 1
"##;
        assert_eq!(text(tokens), expected);
    }

    #[test]
    fn what_is_not_toml_is_refused_with_advice() {
        for (tokens, advice) in [
            ("# a comment\na = 1", "start with `//`"),
            ("a = 1,", "remove this"),
            ("a = 'x'", "not a value of TOML"),
            ("a = 1.5f32", "remove `f32`"),
            ("a = 8usize", "remove `usize`"),
            ("a = ", "expected a value"),
            ("a = b\"x\"", "not a value of TOML"),
            ("[shape extra]", "expected `]`"),
            ("[[a] b]", "expected `]`"),
            ("= 3", "expected"),
        ] {
            let text = text(tokens);
            assert!(
                text.starts_with("error: ") && text.contains(advice),
                "{tokens}: {text}"
            );
        }
    }

    #[test]
    fn pieces_of_a_range_are_found() {
        let toml = syn::parse_str::<Toml>("a = 1 b = { c = 2 }").unwrap();
        let start = toml.text.find('{').unwrap();
        assert_eq!(
            toml.at(&(start..start + 7)).map(|t| t.into_iter().count()),
            Some(2)
        );
        assert!(toml.at(&(900..901)).is_none());
    }
}
