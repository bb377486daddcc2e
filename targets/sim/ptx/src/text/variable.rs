//! Parses declarations of variables and parameters.

use super::cursor::{Cursor, literal};
use super::{StateSpace, Variable};
use crate::error::PtxError;

type Result<T> = std::result::Result<T, PtxError>;

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
