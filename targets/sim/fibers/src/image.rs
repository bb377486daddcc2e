//! Facts that the binary of a kernel holds about itself.

use crate::lines::Lines;
use moesaic_kernel::Entry;
use moesaic_target::KernelReport;
use object::{Object, ObjectSection, ObjectSegment, ObjectSymbol};

const SECTION: &str = "sim_shared";

/// The reason the binary of a kernel cannot be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ImageError {
    #[error("not a shared object: {0}")]
    NotAnObject(#[source] object::Error),
    #[error("it exports no `sim_image`: it is not HIP text over prelude/sim")]
    NoImage,
    #[error("it exports no `sim_{0}`")]
    NoKernel(String),
}

/// A variable in shared memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Variable {
    pub(crate) name: String,
    /// The function that declares it; empty when the name does not tell.
    pub(crate) function: String,
    /// Offset from the start of shared memory in bytes, and size.
    pub(crate) offset: usize,
    pub(crate) bytes: usize,
}

/// Facts for reports, by addresses in the image.
#[derive(Clone, Debug, Default)]
pub(crate) struct Facts {
    pub(crate) variables: Vec<Variable>,
    pub(crate) lines: Lines,
    /// Address of `sim_image`, and end of the image.
    pub(crate) anchor: u64,
    pub(crate) end: u64,
}

impl Facts {
    pub(crate) fn read(binary: &[u8]) -> Result<Facts, ImageError> {
        let file = parse(binary)?;
        let section = file.section_by_name(".debug_line");
        let lines = section.and_then(|section| section.data().ok());
        let anchor = file.dynamic_symbols().find(|s| s.name() == Ok("sim_image"));
        let anchor = anchor.ok_or(ImageError::NoImage)?;
        let ends = file.segments().map(|s| s.address() + s.size());
        Ok(Facts {
            variables: variables(&file),
            lines: lines.map(Lines::parse).unwrap_or_default(),
            anchor: anchor.address(),
            end: ends.max().unwrap_or(0),
        })
    }

    /// Returns the shared memory of `kernel` in bytes: its own variables and
    /// those of functions that are no kernel.
    pub(crate) fn shared_bytes(&self, kernel: &str, entries: &[Entry]) -> u32 {
        let others = |v: &&Variable| {
            v.function == kernel || !entries.iter().any(|entry| entry.symbol == v.function)
        };
        let bytes = self.variables.iter().filter(others).map(|v| v.bytes as u32);
        bytes.sum()
    }

    /// Returns the variable at a byte of shared memory.
    pub(crate) fn variable(&self, offset: usize) -> Option<&Variable> {
        let holds = |v: &&Variable| offset.wrapping_sub(v.offset) < v.bytes;
        self.variables.iter().find(holds)
    }
}

/// Returns one report per entry. An error names the entry that is not exported,
/// or says why the file is not a shared object.
pub(crate) fn kernels(binary: &[u8], entries: &[Entry]) -> Result<Vec<KernelReport>, ImageError> {
    let (file, facts) = (parse(binary)?, Facts::read(binary)?);
    let report = |entry: &Entry| {
        let symbol = |name: &str| {
            file.symbols()
                .find(|s| s.is_definition() && s.name() == Ok(name))
        };
        symbol(&format!("sim_{}", entry.symbol))
            .ok_or_else(|| ImageError::NoKernel(entry.symbol.clone()))?;
        Ok(KernelReport {
            symbol: entry.symbol.clone(),
            shared_bytes: Some(facts.shared_bytes(&entry.symbol, entries)),
            ..KernelReport::default()
        })
    };
    entries.iter().map(report).collect()
}

fn parse(binary: &[u8]) -> Result<object::File<'_>, ImageError> {
    object::File::parse(binary).map_err(ImageError::NotAnObject)
}

fn variables(file: &object::File<'_>) -> Vec<Variable> {
    let Some(section) = file.section_by_name(SECTION) else {
        return Vec::new();
    };
    let inside = file
        .symbols()
        .filter(|symbol| symbol.section_index() == Some(section.index()) && symbol.size() > 0);
    let mut list: Vec<Variable> = inside
        .map(|symbol| {
            let (function, name) = demangle(symbol.name().unwrap_or_default());
            Variable {
                name,
                function,
                offset: (symbol.address() - section.address()) as usize,
                bytes: symbol.size() as usize,
            }
        })
        .collect();
    list.sort_by_key(|variable| variable.offset);
    list
}

/// Splits the symbol of a local variable into function and name:
/// `_ZZ6kernelE4tile`, `kernel()::tile` with parameters, or `tile.3` of a
/// function with C linkage.
fn demangle(symbol: &str) -> (String, String) {
    let parts = symbol.strip_prefix("_ZZ").and_then(|rest| {
        let (function, rest) = counted(rest)?;
        let (name, _) = counted(&rest[rest.find('E')? + 1..])?;
        Some((function.to_string(), name.to_string()))
    });
    let plain = symbol.split('.').next().unwrap_or(symbol);
    parts.unwrap_or_else(|| (String::new(), plain.to_string()))
}

/// Returns the name behind its length, and the rest.
fn counted(text: &str) -> Option<(&str, &str)> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let length: usize = text[..digits].parse().ok()?;
    text[digits..].split_at_checked(length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_locals_are_read() {
        let pair = |function: &str, name: &str| (function.to_string(), name.to_string());
        assert_eq!(demangle("_ZZ6kernelE4tile"), pair("kernel", "tile"));
        assert_eq!(demangle("_ZZ4scanPKfiE6totals_0"), pair("scan", "totals"));
        assert_eq!(demangle("tile.3"), pair("", "tile"));
        assert_eq!(demangle("_ZZ99"), pair("", "_ZZ99"));
    }

    #[test]
    fn garbage_is_refused() {
        let error = Facts::read(b"nothing").unwrap_err().to_string();
        assert!(error.contains("not a shared object"), "{error}");
    }
}
