//! The functions of a shared object or a program.

use moesaic_target::{BinaryReason, KernelReport, SharedError};
use object::{Object, ObjectSymbol};

/// A file that the linker of shared objects did not write.
#[derive(Debug, thiserror::Error)]
#[error("not a shared object: {0}")]
struct NotAnObject(#[source] object::Error);

/// Returns one report per symbol, in order. An error names the symbol that is
/// not exported, or says why the file is not a shared object.
pub(crate) fn kernels(binary: &[u8], symbols: &[&str]) -> Result<Vec<KernelReport>, BinaryReason> {
    if !binary.starts_with(b"\x7fELF") && !cfg!(target_os = "linux") {
        return Ok(symbols.iter().map(|symbol| unread(symbol)).collect());
    }
    let file = object::File::parse(binary)
        .map_err(|error| BinaryReason::Unreadable(SharedError::new(NotAnObject(error))))?;
    symbols.iter().map(|symbol| kernel(&file, symbol)).collect()
}

fn kernel(file: &object::File<'_>, symbol: &str) -> Result<KernelReport, BinaryReason> {
    let found = file
        .dynamic_symbols()
        .chain(file.symbols())
        .find(|candidate| candidate.is_definition() && candidate.name() == Ok(symbol))
        .ok_or_else(|| BinaryReason::NotExported {
            symbol: symbol.to_string(),
        })?;
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
