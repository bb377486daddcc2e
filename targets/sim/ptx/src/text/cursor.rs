//! A cursor over tokens, and numbers.

use super::lexer::Token;
use crate::error::PtxError;

type Result<T> = std::result::Result<T, PtxError>;

/// A position in a list of tokens.
pub struct Cursor<'a> {
    tokens: &'a [Token<'a>],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub fn new(tokens: &'a [Token<'a>]) -> Cursor<'a> {
        Cursor { tokens, at: 0 }
    }

    pub fn peek(&self) -> Option<Token<'a>> {
        self.tokens.get(self.at).copied()
    }

    pub fn peek_text(&self) -> &'a str {
        self.peek().map_or("", |token| token.text)
    }

    /// Returns the text of the token after the next.
    pub fn second_text(&self) -> &'a str {
        self.tokens.get(self.at + 1).map_or("", |token| token.text)
    }

    pub fn line(&self) -> u32 {
        let token = self.peek().or(self.tokens.last().copied());
        token.map_or(1, |token| token.line)
    }

    pub fn next(&mut self) -> Result<Token<'a>> {
        let token = self.peek();
        self.at += 1;
        token.ok_or_else(|| PtxError::syntax(self.line(), "the text ends too early"))
    }

    /// Takes the next token if it is `text`.
    pub fn take(&mut self, text: &str) -> bool {
        let found = self.peek_text() == text;
        self.at += usize::from(found);
        found
    }

    pub fn expect(&mut self, text: &str) -> Result<()> {
        let token = self.next()?;
        if token.text == text {
            Ok(())
        } else {
            Err(PtxError::syntax(
                token.line,
                format!("`{}` where `{text}` should be", token.text),
            ))
        }
    }

    /// Parses a decimal or hexadecimal integer, possibly negative.
    pub fn integer(&mut self) -> Result<i64> {
        let negative = self.take("-");
        let token = self.next()?;
        let value = integer(token.text).ok_or_else(|| {
            PtxError::syntax(token.line, format!("`{}` is no integer", token.text))
        })?;
        let value = value.cast_signed();
        Ok(if negative {
            value.wrapping_neg()
        } else {
            value
        })
    }

    /// Skips past the next `;`.
    pub fn skip_statement(&mut self) {
        while self.peek().is_some() && !self.take(";") {
            self.at += 1;
        }
    }

    /// Skips a `{ ... }` with its contents.
    pub fn skip_braces(&mut self) -> Result<()> {
        self.expect("{")?;
        let mut depth = 1;
        while depth > 0 {
            match self.next()?.text {
                "{" => depth += 1,
                "}" => depth -= 1,
                _ => {}
            }
        }
        Ok(())
    }
}

/// Returns the value of an integer literal.
pub fn integer(text: &str) -> Option<u64> {
    let digits = text.strip_suffix('U').unwrap_or(text);
    match digits
        .strip_prefix("0x")
        .or_else(|| digits.strip_prefix("0X"))
    {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => digits.parse().ok(),
    }
}

/// Returns the bits of a number: an integer, `0f` with the bits of a float, or
/// `0d`.
pub fn literal(cursor: &mut Cursor<'_>) -> Result<u64> {
    let text = cursor.peek_text();
    let float = text
        .get(..2)
        .filter(|head| matches!(*head, "0f" | "0F" | "0d" | "0D"));
    match float {
        Some(_) => {
            let token = cursor.next()?;
            u64::from_str_radix(&token.text[2..], 16)
                .map_err(|_| PtxError::syntax(token.line, format!("`{}` is no number", token.text)))
        }
        None => cursor.integer().map(i64::cast_unsigned),
    }
}
