//! Reads the facts that a CUBIN holds about its kernels.
//!
//! A CUBIN is an ELF file. `.nv.info` holds registers and stack by symbol, and
//! `.nv.info.KERNEL` holds block limit and parameters. Both are lists of
//! records {format u8, attribute u8, length u16, payload}.

use moesaic_target::{KernelReport, ParamSlot};
use object::{Object, ObjectSection, ObjectSymbol, SymbolIndex};
use std::collections::HashMap;

/// Attributes that are read, by their number in a record.
const MAX_THREADS: u8 = 0x05;
const REQUIRED_THREADS: u8 = 0x10;
const FRAME_SIZE: u8 = 0x11;
const PARAMETER: u8 = 0x17;
const REGISTER_COUNT: u8 = 0x2f;

/// The format of a record whose payload follows it; every other format holds
/// its value in place of the length.
const SIZED: u8 = 4;

/// A CUBIN that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CubinError {
    /// There are no bytes, as NVRTC returns for a virtual architecture.
    #[error("the CUBIN is empty")]
    Empty,
    /// The bytes are no ELF file, or one that is cut short.
    #[error("the CUBIN is not a readable ELF file: {0}")]
    Elf(String),
    /// A record runs past the end of its section.
    #[error("section `{0}` of the CUBIN is cut short")]
    Truncated(String),
}

/// Reads every kernel, in the order of their code. The file does not hold the
/// spilled bytes, which stay `None`.
///
/// # Errors
/// [`CubinError`], never a panic, whatever the bytes are.
pub fn read_cubin(bytes: &[u8]) -> Result<Vec<KernelReport>, CubinError> {
    if bytes.is_empty() {
        return Err(CubinError::Empty);
    }
    let elf = object::File::parse(bytes).map_err(elf_error)?;
    let mut kernels = code_sections(&elf)?;
    let symbols = symbols(&elf);
    for section in elf.sections() {
        let name = section.name().map_err(elf_error)?;
        if name == ".nv.info" {
            let records = records(name, section.data().map_err(elf_error)?)?;
            symbol_facts(&mut kernels, &symbols, &records);
        } else if let Some(kernel) = find(&mut kernels, name.strip_prefix(".nv.info.")) {
            let records = records(name, section.data().map_err(elf_error)?)?;
            kernel_facts(kernel, &records);
        } else if let Some(kernel) = find(&mut kernels, name.strip_prefix(".nv.shared.")) {
            kernel.shared_bytes =
                u32::try_from(section.size() - reserved(&elf, section.size())).ok();
        }
    }
    Ok(kernels)
}

/// Returns the shared memory that the system takes of each block from
/// capability 9.0 on. The file includes it, but it is not the kernel's.
fn reserved(elf: &object::File, section_bytes: u64) -> u64 {
    let reserves = elf.section_by_name(".nv.shared.reserved.0").is_some();
    if reserves && section_bytes >= 1024 {
        1024
    } else {
        0
    }
}

fn elf_error(error: object::Error) -> CubinError {
    CubinError::Elf(error.to_string())
}

fn find<'a>(kernels: &'a mut [KernelReport], symbol: Option<&str>) -> Option<&'a mut KernelReport> {
    kernels
        .iter_mut()
        .find(|kernel| Some(kernel.symbol.as_str()) == symbol)
}

/// Returns one kernel for each `.text.KERNEL`. A kernel without a shared
/// section uses no shared memory.
fn code_sections(elf: &object::File) -> Result<Vec<KernelReport>, CubinError> {
    let mut kernels = Vec::new();
    for section in elf.sections() {
        let name = section.name().map_err(elf_error)?;
        if let Some(symbol) = name.strip_prefix(".text.") {
            kernels.push(KernelReport {
                symbol: symbol.to_string(),
                code_bytes: Some(section.size()),
                shared_bytes: Some(0),
                ..KernelReport::default()
            });
        }
    }
    Ok(kernels)
}

fn symbols(elf: &object::File) -> HashMap<u32, String> {
    let named =
        |index: SymbolIndex, name: &str| Some((u32::try_from(index.0).ok()?, name.to_string()));
    elf.symbols()
        .filter_map(|symbol| named(symbol.index(), symbol.name().ok()?))
        .collect()
}

/// A record of an info section.
struct Record<'a> {
    attribute: u8,
    payload: &'a [u8],
}

impl Record<'_> {
    /// Returns the payload's 32-bit word number `index`.
    fn word(&self, index: usize) -> Option<u32> {
        let bytes = self.payload.get(index * 4..index * 4 + 4)?;
        Some(u32::from_le_bytes(bytes.try_into().ok()?))
    }
}

fn records<'a>(section: &str, mut bytes: &'a [u8]) -> Result<Vec<Record<'a>>, CubinError> {
    let mut records = Vec::new();
    while let [format, attribute, low, high, rest @ ..] = bytes {
        let length = match *format {
            SIZED => usize::from(u16::from_le_bytes([*low, *high])),
            _ => 0,
        };
        let payload = rest
            .get(..length)
            .ok_or_else(|| CubinError::Truncated(section.to_string()))?;
        records.push(Record {
            attribute: *attribute,
            payload,
        });
        bytes = &rest[length..];
    }
    Ok(records)
}

/// Reads the facts of `.nv.info`: each record is a symbol's index and a value.
fn symbol_facts(kernels: &mut [KernelReport], symbols: &HashMap<u32, String>, records: &[Record]) {
    for record in records {
        let (Some(index), value) = (record.word(0), record.word(1)) else {
            continue;
        };
        let Some(symbol) = symbols.get(&index) else {
            continue;
        };
        let Some(kernel) = find(kernels, Some(symbol.as_str())) else {
            continue;
        };
        match record.attribute {
            REGISTER_COUNT => kernel.registers = value,
            FRAME_SIZE => kernel.stack_bytes = value,
            _ => {}
        }
    }
}

/// Reads the facts of `.nv.info.KERNEL`.
fn kernel_facts(kernel: &mut KernelReport, records: &[Record]) {
    let mut params = Vec::new();
    for record in records {
        match record.attribute {
            MAX_THREADS | REQUIRED_THREADS => kernel.max_threads = threads(record),
            PARAMETER => params.extend(parameter(record)),
            _ => {}
        }
    }
    // The file lists the last parameter first.
    params.sort_by_key(|(ordinal, _)| *ordinal);
    kernel.params = params.into_iter().map(|(_, slot)| slot).collect();
}

fn threads(record: &Record) -> Option<u32> {
    let [x, y, z] = [record.word(0)?, record.word(1)?, record.word(2)?];
    x.checked_mul(y)?.checked_mul(z)
}

/// Reads the words of a parameter: an unused index, ordinal and offset, flags
/// and size.
fn parameter(record: &Record) -> Option<(u32, ParamSlot)> {
    let place = record.word(1)?;
    let slot = ParamSlot {
        offset: place >> 16,
        size: record.word(2)? >> 18,
    };
    Some((place & 0xffff, slot))
}
