//! Reads the facts that an AMD code object holds about its kernels.
//!
//! A code object is an ELF file with a note that holds a MessagePack map:
//! `amdhsa.kernels` lists each kernel's registers, memory and arguments.

use crate::msgpack::MsgpackValue;
use moesaic_target::{KernelReport, ParamSlot};
use object::{Object, ObjectSection, ObjectSymbol};

/// Owner of the note; `TYPE` is its type.
const OWNER: &[u8] = b"AMDGPU\0";
const METADATA: u32 = 32;

/// Bytes of a vector register in one lane.
const REGISTER_BYTES: u32 = 4;

/// A code object that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CodeObjectError {
    /// The bytes are no ELF file, or one that is cut short.
    #[error("the code object is not a readable ELF file: {0}")]
    Elf(String),
    /// The note is missing or cannot be decoded.
    #[error("the code object's metadata cannot be read: {0}")]
    Metadata(String),
}

/// A kernel of a code object.
#[derive(Clone, Debug, PartialEq)]
pub struct CodeObjectKernel {
    /// The facts that every target reports.
    pub report: KernelReport,
    /// Lanes of the wave that the kernel was compiled for.
    pub wave: Option<u32>,
}

/// Reads every kernel, in the order of the metadata.
///
/// # Errors
/// [`CodeObjectError`], never a panic, whatever the bytes are.
pub fn read_code_object(bytes: &[u8]) -> Result<Vec<CodeObjectKernel>, CodeObjectError> {
    let elf = object::File::parse(bytes).map_err(elf_error)?;
    let metadata = metadata(&elf)?;
    let kernels = get(&metadata, "amdhsa.kernels")
        .and_then(MsgpackValue::as_array)
        .ok_or_else(|| bad("it lists no kernels"))?;
    kernels
        .iter()
        .map(|kernel| read_kernel(&elf, kernel))
        .collect()
}

fn elf_error(error: object::Error) -> CodeObjectError {
    CodeObjectError::Elf(error.to_string())
}

fn bad(reason: &str) -> CodeObjectError {
    CodeObjectError::Metadata(reason.to_string())
}

fn metadata(elf: &object::File) -> Result<MsgpackValue, CodeObjectError> {
    for section in elf
        .sections()
        .filter(|section| section.name() == Ok(".note"))
    {
        let mut notes = section.data().map_err(elf_error)?;
        while let Some((note, rest)) = next_note(notes) {
            if note.owner == OWNER && note.kind == METADATA {
                return MsgpackValue::read(note.payload)
                    .ok_or_else(|| bad("the metadata note is damaged"));
            }
            notes = rest;
        }
    }
    Err(bad("there is no AMDGPU metadata note"))
}

struct Note<'a> {
    owner: &'a [u8],
    kind: u32,
    payload: &'a [u8],
}

/// Splits off the first note: three words (owner bytes, payload bytes, type),
/// then owner and payload, each padded to words.
fn next_note(bytes: &[u8]) -> Option<(Note<'_>, &[u8])> {
    let word = |index: usize| {
        let bytes = bytes.get(index * 4..index * 4 + 4)?;
        Some(u32::from_le_bytes(bytes.try_into().ok()?))
    };
    let (owner_bytes, payload_bytes) = (word(0)? as usize, word(1)? as usize);
    let kind = word(2)?;
    let rest = bytes.get(12..)?;
    let (owner, rest) = split_padded(rest, owner_bytes)?;
    let (payload, rest) = split_padded(rest, payload_bytes)?;
    Some((
        Note {
            owner,
            kind,
            payload,
        },
        rest,
    ))
}

fn split_padded(bytes: &[u8], length: usize) -> Option<(&[u8], &[u8])> {
    let taken = bytes.get(..length)?;
    // The last note of a section may lack its padding.
    let rest = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    Some((taken, rest))
}

fn get<'a>(map: &'a MsgpackValue, key: &str) -> Option<&'a MsgpackValue> {
    map.as_map()?
        .iter()
        .find(|(name, _)| name.as_str() == Some(key))
        .map(|(_, value)| value)
}

fn number(map: &MsgpackValue, key: &str) -> Option<u32> {
    u32::try_from(get(map, key)?.as_u64()?).ok()
}

fn read_kernel(
    elf: &object::File,
    kernel: &MsgpackValue,
) -> Result<CodeObjectKernel, CodeObjectError> {
    let symbol = get(kernel, ".name")
        .and_then(MsgpackValue::as_str)
        .ok_or_else(|| bad("a kernel has no name"))?;
    let scratch = number(kernel, ".private_segment_fixed_size");
    let report = KernelReport {
        symbol: symbol.to_string(),
        registers: number(kernel, ".vgpr_count"),
        accumulator_registers: number(kernel, ".agpr_count"),
        scalar_registers: number(kernel, ".sgpr_count"),
        spill_bytes: spill_bytes(kernel, scratch),
        scalar_spills: number(kernel, ".sgpr_spill_count"),
        stack_bytes: scratch,
        shared_bytes: number(kernel, ".group_segment_fixed_size"),
        max_threads: number(kernel, ".max_flat_workgroup_size"),
        code_bytes: code_bytes(elf, symbol),
        params: params(kernel),
    };
    Ok(CodeObjectKernel {
        report,
        wave: number(kernel, ".wavefront_size"),
    })
}

/// Returns the spilled bytes. Registers that were moved to accumulation
/// registers count as spilled too; without scratch none of them reached memory.
fn spill_bytes(kernel: &MsgpackValue, scratch: Option<u32>) -> Option<u32> {
    let registers = number(kernel, ".vgpr_spill_count")?;
    match scratch? {
        0 => Some(0),
        _ => registers.checked_mul(REGISTER_BYTES),
    }
}

fn code_bytes(elf: &object::File, symbol: &str) -> Option<u64> {
    let mut symbols = elf.dynamic_symbols();
    symbols
        .find(|found| found.name() == Ok(symbol))
        .map(|found| found.size())
}

/// Returns the arguments that a launch passes; hidden ones are the runtime's.
fn params(kernel: &MsgpackValue) -> Vec<ParamSlot> {
    let slot = |argument: &MsgpackValue| {
        let kind = get(argument, ".value_kind")?.as_str()?;
        let slot = ParamSlot {
            offset: number(argument, ".offset")?,
            size: number(argument, ".size")?,
        };
        (!kind.starts_with("hidden_")).then_some(slot)
    };
    let arguments = get(kernel, ".args").and_then(MsgpackValue::as_array);
    arguments.into_iter().flatten().filter_map(slot).collect()
}
