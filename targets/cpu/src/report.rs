//! The functions of a shared object or a program.

use moesaic_target::{BinaryReason, KernelReport, SharedError};
use object::{Object, ObjectSection, ObjectSymbol};

/// The machine code of a function that only returns, on x86-64 and aarch64, plain and as a target of
/// indirect jumps. gcc 12 has made kernels like this: it took all their stores for dead.
const EMPTY: [&[u8]; 5] = [
    b"\xc3",
    b"\xf3\xc3",
    b"\xf3\x0f\x1e\xfa\xc3",
    b"\xc0\x03\x5f\xd6",
    b"\x5f\x24\x03\xd5\xc0\x03\x5f\xd6",
];

/// A file that the linker of shared objects did not write.
#[derive(Debug, thiserror::Error)]
#[error("not a shared object: {0}")]
struct NotAnObject(#[source] object::Error);

/// Returns one report per symbol, in order. An error names the symbol that is
/// not exported or empty, or says why the file is not a shared object.
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
    if code(file, &found).is_some_and(|code| EMPTY.contains(&code)) {
        let symbol = symbol.to_string();
        return Err(BinaryReason::Empty { symbol });
    }
    Ok(KernelReport {
        code_bytes: Some(found.size()),
        ..unread(symbol)
    })
}

/// Returns the machine code of a function.
fn code<'data>(
    file: &object::File<'data>,
    function: &impl ObjectSymbol<'data>,
) -> Option<&'data [u8]> {
    let section = file.section_by_index(function.section_index()?).ok()?;
    let code = section.data_range(function.address(), function.size());
    code.ok().flatten()
}

fn unread(symbol: &str) -> KernelReport {
    KernelReport {
        symbol: symbol.to_string(),
        ..KernelReport::default()
    }
}
