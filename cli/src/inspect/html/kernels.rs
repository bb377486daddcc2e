//! The section on kernels: entries, parameters, source and machine code of each.

use super::super::model::{InspectedKernel, Inspection};
use super::escape;
use super::highlight::lines;
use crate::units;
use moesaic::kernel::{Access, Entry, Param, ParamType, Scalar};

/// Renders every kernel, with the first one open.
pub fn section(inspection: &Inspection, asm: Option<&[String]>) -> String {
    let kernels = inspection.kernels.iter().enumerate();
    let kernels: String = kernels
        .map(|(i, kernel)| one(kernel, asm.and_then(|asm| asm.get(i)), i == 0))
        .collect();
    format!(
        "<h2 id=\"kernels\">Kernels</h2><p>The emitted source, as it goes to the compiler. It \
         includes no header.</p>{kernels}"
    )
}

fn one(kernel: &InspectedKernel, asm: Option<&String>, open: bool) -> String {
    let asm = asm.filter(|asm| !asm.trim().is_empty());
    let source = &kernel.source;
    let entries: String = source.entries.iter().map(entry).collect();
    let facts = format!(
        "{} · {} · {}",
        source.file_name(),
        units::count(source.text.lines().count(), "line"),
        binary(kernel)
    );
    format!(
        "<details class=\"card kernel {stem}\" id=\"{id}\"{open}><summary><b>{name}</b>\
         <span class=\"soft\">{facts}</span></summary>{entries}<div class=\"{beside}\"><pre>{code}</pre>{asm}</div></details>\n",
        stem = source.stem,
        id = escape(&kernel.anchor()),
        name = escape(&kernel.label(&source.name)),
        open = if open { " open" } else { "" },
        facts = escape(&facts),
        code = lines(source.text.trim_end()),
        beside = if asm.is_some() { "beside" } else { "alone" },
        asm = asm.map_or(String::new(), |asm| machine_code(asm)),
    )
}

fn binary(kernel: &InspectedKernel) -> String {
    match &kernel.artifact {
        Some(artifact) if !artifact.binary.is_empty() => {
            format!("{} of binary", units::bytes(artifact.binary.len() as u64))
        }
        Some(_) => "compiled".to_string(),
        None => "not compiled".to_string(),
    }
}

fn entry(entry: &Entry) -> String {
    let params: String = entry.params.iter().map(param).collect();
    format!(
        "<div class=\"entry\"><code>{}</code><p>{}</p><div class=\"params\">{params}</div></div>",
        escape(&entry.symbol),
        escape(&entry.summary)
    )
}

fn param(param: &Param) -> String {
    let (role, dtype) = match param.ty {
        ParamType::Tensor(dtype, Access::Read) => ("input", dtype.to_string()),
        ParamType::Tensor(dtype, _) => ("output", dtype.to_string()),
        ParamType::TensorMap(map) => match map.access {
            Access::Read => ("input", format!("{} map", map.dtype)),
            _ => ("output", format!("{} map", map.dtype)),
        },
        ParamType::Scalar(Scalar::I64) => ("scratch", "i64".to_string()),
        ParamType::Scalar(Scalar::F32) => ("scratch", "f32".to_string()),
    };
    format!(
        "<span class=\"chip {role}\"><code>{}</code><i>{dtype} {}</i></span>",
        escape(&param.name),
        escape(&param.shape)
    )
}

/// Renders machine code, which stands beside its source on a wide screen.
fn machine_code(asm: &str) -> String {
    let count = units::count(asm.lines().count(), "line");
    format!(
        "<section class=\"asm\"><h4>machine code, {count}</h4><pre>{}</pre></section>",
        lines(asm)
    )
}
