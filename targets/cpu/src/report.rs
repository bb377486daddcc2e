//! The functions of a shared object or a program.

use moesaic_target::KernelReport;
use object::{Object, ObjectSymbol};

/// Returns one report per symbol, in order. An error names the symbol that is
/// not exported, or says why the file is not a shared object.
pub(crate) fn kernels(binary: &[u8], symbols: &[&str]) -> Result<Vec<KernelReport>, String> {
    if !binary.starts_with(b"\x7fELF") && !cfg!(target_os = "linux") {
        return Ok(symbols.iter().map(|symbol| unread(symbol)).collect());
    }
    let file =
        object::File::parse(binary).map_err(|error| format!("not a shared object: {error}"))?;
    symbols.iter().map(|symbol| kernel(&file, symbol)).collect()
}

fn kernel(file: &object::File<'_>, symbol: &str) -> Result<KernelReport, String> {
    let found = file
        .dynamic_symbols()
        .chain(file.symbols())
        .find(|candidate| candidate.is_definition() && candidate.name() == Ok(symbol))
        .ok_or_else(|| format!("it does not export `{symbol}`; a kernel must not be `static`"))?;
    Ok(KernelReport {
        code_bytes: Some(found.size()),
        ..unread(symbol)
    })
}

fn unread(symbol: &str) -> KernelReport {
    KernelReport {
        symbol: symbol.to_string(),
        ..KernelReport::default()
    }
}
