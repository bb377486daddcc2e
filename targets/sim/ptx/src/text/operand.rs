//! Parses operands.

use super::body::BodyParser;
use super::parser::literal;
use super::{Operand, Relation, Special};
use crate::error::PtxError;

type Result<T> = std::result::Result<T, PtxError>;

/// Parses one operand: a name, a number, `{...}`, `[...]`, `a|b`, `!p` or `_`.
pub fn operand(body: &mut BodyParser<'_, '_>) -> Result<Operand> {
    let first = simple(body)?;
    if body.cursor.take("|") {
        let second = simple(body)?;
        return Ok(Operand::Pair(Box::new(first), Box::new(second)));
    }
    Ok(first)
}

fn simple(body: &mut BodyParser<'_, '_>) -> Result<Operand> {
    match body.cursor.peek_text() {
        "{" => {
            body.cursor.next()?;
            list(body, "}").map(Operand::Vector)
        }
        "[" => memory(body),
        "!" => negated(body),
        "_" => body.cursor.next().map(|_| Operand::Sink),
        text if text == "-" || text.starts_with(|c: char| c.is_ascii_digit()) => {
            literal(body.cursor).map(Operand::Immediate)
        }
        _ => name(body),
    }
}

fn list(body: &mut BodyParser<'_, '_>, end: &str) -> Result<Vec<Operand>> {
    let mut list = Vec::new();
    while !body.cursor.take(end) {
        list.push(operand(body)?);
        if !body.cursor.take(",") && body.cursor.peek_text() != end {
            let found = body.cursor.peek_text();
            let what = format!("`{found}` where `,` or `{end}` should be");
            return Err(PtxError::syntax(body.cursor.line(), what));
        }
    }
    Ok(list)
}

fn memory(body: &mut BodyParser<'_, '_>) -> Result<Operand> {
    body.cursor.next()?;
    let base = simple(body)?;
    let mut offset = 0i64;
    loop {
        // A minus belongs to the number.
        if body.cursor.take("+") || body.cursor.peek_text() == "-" {
            offset = offset.wrapping_add(body.cursor.integer()?);
        } else {
            break;
        }
    }
    let rest = if body.cursor.take(",") {
        list(body, "]")?
    } else {
        body.cursor.expect("]")?;
        Vec::new()
    };
    Ok(Operand::Memory {
        base: Box::new(base),
        offset,
        rest,
    })
}

fn negated(body: &mut BodyParser<'_, '_>) -> Result<Operand> {
    body.cursor.next()?;
    let token = body.cursor.next()?;
    let register = body.register(token.text);
    register
        .map(Operand::Not)
        .ok_or_else(|| PtxError::syntax(token.line, format!("`{}` is no predicate", token.text)))
}

fn name(body: &mut BodyParser<'_, '_>) -> Result<Operand> {
    let token = body.cursor.next()?;
    if let Some(register) = body.register(token.text) {
        return Ok(Operand::Register(register));
    }
    if let Some(special) = special(token.text) {
        return Ok(special);
    }
    let symbol = body.symbol(token.text);
    symbol.ok_or_else(|| PtxError::syntax(token.line, format!("`{}` is not declared", token.text)))
}

fn special(name: &str) -> Option<Operand> {
    let name = name
        .strip_prefix('%')
        .or((name == "WARP_SZ").then_some(name))?;
    let (stem, axis) = match name.rsplit_once('.') {
        Some((stem, "x")) => (stem, 0),
        Some((stem, "y")) => (stem, 1),
        Some((stem, "z")) => (stem, 2),
        _ => (name, 0),
    };
    Some(Operand::Special(match stem {
        "tid" => Special::Tid(axis),
        "ntid" => Special::Ntid(axis),
        "ctaid" => Special::Ctaid(axis),
        "nctaid" => Special::Nctaid(axis),
        "laneid" => Special::LaneId,
        "warpid" => Special::WarpId,
        "lanemask_lt" => Special::LaneMask(Relation::Below),
        "lanemask_le" => Special::LaneMask(Relation::AtMost),
        "lanemask_eq" => Special::LaneMask(Relation::Equal),
        "lanemask_ge" => Special::LaneMask(Relation::AtLeast),
        "lanemask_gt" => Special::LaneMask(Relation::Above),
        "cluster_ctarank" => Special::ClusterCtaRank,
        "cluster_nctarank" => Special::ClusterCtaCount,
        "cluster_ctaid" => Special::ClusterCtaId(axis),
        "cluster_nctaid" => Special::ClusterCtaShape(axis),
        "clusterid" => Special::ClusterId(axis),
        "nclusterid" => Special::ClusterCount(axis),
        "total_smem_size" => Special::SharedBytes,
        "dynamic_smem_size" => Special::DynamicSharedBytes,
        "smid" => Special::SmId,
        "nsmid" => Special::SmCount,
        "clock" | "clock64" | "globaltimer" | "globaltimer_lo" => Special::Clock,
        "WARP_SZ" => return Some(Operand::Immediate(32)),
        _ => return None,
    }))
}
