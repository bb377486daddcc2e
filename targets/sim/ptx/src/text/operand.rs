//! Parses operands.

use super::cursor::{Cursor, literal};
use super::names::Names;
use super::{Operand, Relation, Special};
use crate::error::PtxError;

type Result<T> = std::result::Result<T, PtxError>;

/// Parses one operand: a name, a number, `{...}`, `[...]`, `a|b`, `!p` or `_`.
pub fn operand(cursor: &mut Cursor<'_>, names: &Names) -> Result<Operand> {
    let first = simple(cursor, names)?;
    if cursor.take("|") {
        let second = simple(cursor, names)?;
        return Ok(Operand::Pair(Box::new(first), Box::new(second)));
    }
    Ok(first)
}

fn simple(cursor: &mut Cursor<'_>, names: &Names) -> Result<Operand> {
    match cursor.peek_text() {
        "{" => {
            cursor.next()?;
            list(cursor, names, "}").map(Operand::Vector)
        }
        "[" => memory(cursor, names),
        "!" => negated(cursor, names),
        "_" => cursor.next().map(|_| Operand::Sink),
        text if text == "-" || text.starts_with(|c: char| c.is_ascii_digit()) => {
            literal(cursor).map(Operand::Immediate)
        }
        _ => name(cursor, names),
    }
}

fn list(cursor: &mut Cursor<'_>, names: &Names, end: &str) -> Result<Vec<Operand>> {
    let mut list = Vec::new();
    while !cursor.take(end) {
        list.push(operand(cursor, names)?);
        if !cursor.take(",") && cursor.peek_text() != end {
            let found = cursor.peek_text();
            let what = format!("`{found}` where `,` or `{end}` should be");
            return Err(PtxError::syntax(cursor.line(), what));
        }
    }
    Ok(list)
}

fn memory(cursor: &mut Cursor<'_>, names: &Names) -> Result<Operand> {
    cursor.next()?;
    let base = simple(cursor, names)?;
    let mut offset = 0i64;
    loop {
        // A minus belongs to the number.
        if cursor.take("+") || cursor.peek_text() == "-" {
            offset = offset.wrapping_add(cursor.integer()?);
        } else {
            break;
        }
    }
    let rest = if cursor.take(",") {
        list(cursor, names, "]")?
    } else {
        cursor.expect("]")?;
        Vec::new()
    };
    Ok(Operand::Memory {
        base: Box::new(base),
        offset,
        rest,
    })
}

fn negated(cursor: &mut Cursor<'_>, names: &Names) -> Result<Operand> {
    cursor.next()?;
    let token = cursor.next()?;
    let register = names.register(token.text);
    register
        .map(Operand::Not)
        .ok_or_else(|| PtxError::syntax(token.line, format!("`{}` is no predicate", token.text)))
}

fn name(cursor: &mut Cursor<'_>, names: &Names) -> Result<Operand> {
    let token = cursor.next()?;
    if let Some(register) = names.register(token.text) {
        return Ok(Operand::Register(register));
    }
    if let Some(special) = special(token.text) {
        return Ok(special);
    }
    let symbol = names.symbol(token.text);
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
