//! Parses the module level: variables, kernels and their parameters.

use super::body::BodyParser;
use super::lexer::{Token, tokens};
use super::{ModuleText, Parameter, ParsedEntry, StateSpace, Variable};
use crate::error::PtxError;

type Result<T> = std::result::Result<T, PtxError>;

/// Parses a whole module.
///
/// # Errors
/// [`PtxError::Syntax`] at the first text that the parser does not understand.
pub fn parse(text: &str) -> Result<ModuleText> {
    let tokens = tokens(text);
    let mut parser = Parser {
        cursor: Cursor::new(&tokens),
        module: ModuleText::default(),
    };
    while let Some(token) = parser.cursor.peek() {
        parser.item(token)?;
    }
    Ok(parser.module)
}

/// A position in a list of tokens.
pub struct Cursor<'a> {
    tokens: &'a [Token<'a>],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn new(tokens: &'a [Token<'a>]) -> Cursor<'a> {
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

/// Returns the bytes of a type such as `.u32`, or `None` if it is no data type.
pub fn type_bytes(ty: &str) -> Option<u32> {
    let digits = ty.trim_start_matches(|c: char| !c.is_ascii_digit());
    match ty.trim_start_matches('.') {
        "f16x2" | "bf16x2" => Some(4),
        "pred" => Some(1),
        name if name.starts_with(['b', 'u', 's', 'f']) => {
            digits.parse().ok().map(|bits: u32| bits / 8)
        }
        _ => None,
    }
}

struct Parser<'a> {
    cursor: Cursor<'a>,
    module: ModuleText,
}

impl Parser<'_> {
    fn item(&mut self, token: Token<'_>) -> Result<()> {
        match token.text {
            ".target" => self.target(),
            ".version" | ".address_size" => {
                self.cursor.next()?;
                self.cursor.next().map(|_| ())
            }
            ".file" => self.file(),
            ".section" => {
                while self.cursor.peek_text() != "{" {
                    self.cursor.next()?;
                }
                self.cursor.skip_braces()
            }
            ".visible" | ".weak" | ".common" => self.cursor.next().map(|_| ()),
            ".entry" => self.entry(),
            ".extern" | ".global" | ".const" | ".shared" => {
                let variable = variable(&mut self.cursor)?;
                self.module.variables.push(variable);
                Ok(())
            }
            other => Err(PtxError::syntax(
                token.line,
                format!("`{other}` is not understood outside of kernels"),
            )),
        }
    }

    fn target(&mut self) -> Result<()> {
        self.cursor.next()?;
        self.module.target = self.cursor.next()?.text.to_string();
        while self.cursor.take(",") {
            self.cursor.next()?;
        }
        Ok(())
    }

    /// Parses `.file 1 "name"`, with or without a time and a size.
    fn file(&mut self) -> Result<()> {
        for _ in 0..3 {
            self.cursor.next()?;
        }
        while self.cursor.take(",") {
            self.cursor.next()?;
        }
        Ok(())
    }

    fn entry(&mut self) -> Result<()> {
        self.cursor.next()?;
        let name = self.cursor.next()?;
        let mut entry = ParsedEntry {
            name: name.text.to_string(),
            line: name.line,
            ..ParsedEntry::default()
        };
        let names = self.params(&mut entry)?;
        self.directives(&mut entry)?;
        self.module.locations.restart();
        BodyParser::new(&mut self.cursor, &mut self.module, &mut entry, names).parse()?;
        self.module.entries.push(entry);
        Ok(())
    }

    /// Parses the parameter list; returns the names with their offsets.
    fn params(&mut self, entry: &mut ParsedEntry) -> Result<Vec<(String, u32)>> {
        let mut names = Vec::new();
        if !self.cursor.take("(") {
            return Ok(names);
        }
        while !self.cursor.take(")") {
            let variable = variable(&mut self.cursor)?;
            let offset = entry.param_bytes.next_multiple_of(variable.align);
            entry.params.push(Parameter {
                offset,
                bytes: variable.bytes,
            });
            entry.param_bytes = offset + variable.bytes;
            names.push((variable.name, offset));
            self.cursor.take(",");
        }
        Ok(names)
    }

    fn directives(&mut self, entry: &mut ParsedEntry) -> Result<()> {
        while self.cursor.peek_text() != "{" {
            let directive = self.cursor.next()?;
            let product = self.product()?;
            match directive.text {
                ".maxntid" | ".reqntid" => entry.max_threads = Some(product),
                ".reqnctapercluster" => entry.cluster = Some(product),
                ".minnctapersm" | ".maxnreg" | ".maxclusterrank" | ".explicitcluster"
                | ".blocksareclusters" | ".pragma" => {}
                other => {
                    let what = format!("`{other}` is not understood before a kernel's body");
                    return Err(PtxError::syntax(directive.line, what));
                }
            }
        }
        Ok(())
    }

    /// Returns the product of the numbers that follow a directive.
    fn product(&mut self) -> Result<u32> {
        let mut product = 1u32;
        loop {
            let text = self.cursor.peek_text();
            if text.starts_with('"') || text == ";" || text == "," {
                self.cursor.next()?;
            } else if let Some(value) = integer(text) {
                self.cursor.next()?;
                product = product.saturating_mul(value as u32);
            } else {
                return Ok(product);
            }
        }
    }
}

/// Parses a declaration up to its `;`, or up to the end of a parameter.
pub fn variable(cursor: &mut Cursor<'_>) -> Result<Variable> {
    let mut found = Variable {
        name: String::new(),
        space: StateSpace::Param,
        align: 0,
        bytes: 0,
        dynamic: false,
        contents: Vec::new(),
    };
    let mut element = 0;
    loop {
        let token = cursor.next()?;
        match token.text {
            ".extern" => found.dynamic = true,
            ".global" => found.space = StateSpace::Global,
            ".const" => found.space = StateSpace::Const,
            ".shared" => found.space = StateSpace::Shared,
            ".local" => found.space = StateSpace::Local,
            ".param" | ".ptr" => {}
            ".align" => found.align = cursor.integer()? as u32,
            text if text.starts_with('.') => {
                element = type_bytes(text).unwrap_or(element);
            }
            text => {
                found.name = text.to_string();
                break;
            }
        }
    }
    found.bytes = element * elements(cursor)?;
    found.align = found.align.max(element).max(1);
    found.dynamic &= found.bytes == 0;
    initialiser(cursor, &mut found, element)?;
    cursor.take(";");
    Ok(found)
}

/// Returns the product of array bounds: 1 without bounds, 0 for `[]`.
fn elements(cursor: &mut Cursor<'_>) -> Result<u32> {
    let mut product = 1;
    while cursor.take("[") {
        product *= match cursor.peek_text() {
            "]" => 0,
            _ => cursor.integer()? as u32,
        };
        cursor.expect("]")?;
    }
    Ok(product)
}

fn initialiser(cursor: &mut Cursor<'_>, variable: &mut Variable, element: u32) -> Result<()> {
    if !cursor.take("=") {
        return Ok(());
    }
    variable.contents = Vec::new();
    let mut depth = 0;
    loop {
        match cursor.peek_text() {
            "{" => depth += 1,
            "}" => depth -= 1,
            "," => {}
            ";" => return Ok(()),
            _ => {
                let value = literal(cursor)?;
                let bytes = value.to_le_bytes();
                let count = (element as usize).min(8);
                variable.contents.extend_from_slice(&bytes[..count]);
                if depth == 0 {
                    return Ok(());
                }
                continue;
            }
        }
        cursor.next()?;
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
