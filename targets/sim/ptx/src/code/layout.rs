//! Addresses of the variables of a kernel.

use crate::text::{ModuleText, Operand, ParsedEntry, StateSpace};

/// The first shared address. The addresses below belong to the system, so a
/// null pointer is never valid.
pub const SHARED_START: u32 = 1024;

/// Start of shared memory in the generic address space.
pub const SHARED_WINDOW: u64 = 0x7f00_0000_0000;
/// Start of local memory in the generic address space.
pub const LOCAL_WINDOW: u64 = 0x7e00_0000_0000;
/// Start of the kernel parameters in the generic address space.
pub const PARAM_WINDOW: u64 = 0x7d00_0000_0000;
/// Bytes that each window spans.
pub const WINDOW: u64 = 0x100_0000_0000;

/// Bit above which a shared address holds the rank of a block in its cluster,
/// plus one. Zero there stands for the block that uses the address.
pub const RANK_SHIFT: u32 = 24;

/// Addresses of the variables that a kernel names.
pub struct Layout {
    /// Addresses by the variable's index in the module.
    pub addresses: Vec<u64>,
    pub static_shared: u32,
    pub dynamic_shared: u32,
    pub local_bytes: u32,
}

impl Layout {
    /// Lays out the shared and local variables of one kernel.
    pub fn of(module: &ModuleText, entry: &ParsedEntry, globals: &[u64]) -> Layout {
        let used = used(module, entry);
        let mut layout = Layout {
            addresses: globals.to_vec(),
            static_shared: SHARED_START,
            dynamic_shared: SHARED_START,
            local_bytes: 0,
        };
        layout.addresses.resize(module.variables.len(), 0);
        let mut dynamic_align = 16;
        for (i, variable) in module
            .variables
            .iter()
            .enumerate()
            .filter(|(i, _)| used[*i])
        {
            match variable.space {
                StateSpace::Shared if variable.dynamic => {
                    dynamic_align = dynamic_align.max(variable.align);
                }
                StateSpace::Shared => {
                    layout.addresses[i] =
                        place(&mut layout.static_shared, variable.align, variable.bytes);
                }
                StateSpace::Local => {
                    layout.addresses[i] =
                        place(&mut layout.local_bytes, variable.align, variable.bytes);
                }
                _ => {}
            }
        }
        // Dynamic shared memory starts behind the static variables, as in a
        // real launch; `extern` arrays all share this one start (CUDA C++
        // Programming Guide, "__shared__").
        layout.dynamic_shared = layout.static_shared.next_multiple_of(dynamic_align);
        for (i, variable) in module.variables.iter().enumerate() {
            if variable.space == StateSpace::Shared && variable.dynamic {
                layout.addresses[i] = u64::from(layout.dynamic_shared);
            }
        }
        layout
    }
}

fn place(end: &mut u32, align: u32, bytes: u32) -> u64 {
    let at = end.next_multiple_of(align);
    *end = at + bytes;
    u64::from(at)
}

/// Returns true for each variable that an entry names.
fn used(module: &ModuleText, entry: &ParsedEntry) -> Vec<bool> {
    let mut used = vec![false; module.variables.len()];
    for statement in &entry.statements {
        for operand in &statement.operands {
            mark(operand, &mut used);
        }
    }
    used
}

fn mark(operand: &Operand, used: &mut [bool]) {
    match operand {
        Operand::Variable(i) => used[*i] = true,
        Operand::Vector(parts) => parts.iter().for_each(|part| mark(part, used)),
        Operand::Memory { base, .. } => mark(base, used),
        _ => {}
    }
}

/// Returns true if any kernel of the module names variable `i`.
pub fn is_used(module: &ModuleText, i: usize) -> bool {
    module.entries.iter().any(|entry| used(module, entry)[i])
}
