//! Parses the module level: variables, kernels and their parameters.

use super::body::BodyParser;
use super::cursor::{Cursor, integer};
use super::lexer::{Token, tokens};
use super::variable::variable;
use super::{ModuleText, Parameter, ParsedEntry};
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
