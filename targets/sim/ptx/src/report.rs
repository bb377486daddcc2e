//! Findings with their lines, and counters.

use crate::code::Kernel;
use crate::code::op::InstructionClass;
use crate::finding::Finding;
use crate::machine::{BlockFailure, Tally};
use crate::state::ModuleKernel;
use moesaic_target::{GlobalCounts, InstructionCounts, KernelCounters, SharedCounts};

impl ModuleKernel {
    /// Describes an instruction's lines in short.
    fn place(&self, pc: u32) -> String {
        let instruction = &self.kernel.code[pc as usize];
        let line = self.locations.frames(instruction.place).last();
        let text = line.and_then(|line| self.source.get((*line as usize).wrapping_sub(1)));
        match (line, text) {
            (Some(line), Some(text)) => {
                format!(
                    "PTX line {}, line {line}: {}",
                    instruction.line,
                    text.trim()
                )
            }
            _ => format!("PTX line {}", instruction.line),
        }
    }

    /// Returns the finding that people read.
    pub fn finding(&self, failure: BlockFailure) -> Finding {
        let instruction = &self.kernel.code[failure.pc as usize];
        let frames = self.locations.frames(instruction.place);
        let text = |line: u32| {
            let line = self.source.get((line as usize).wrapping_sub(1));
            line.map_or("", |line| line.trim()).to_string()
        };
        Finding {
            kind: failure.kind,
            kernel: self.kernel.name.clone(),
            block: failure.block,
            threads: failure.threads,
            ptx_line: instruction.line,
            source_line: frames.first().copied(),
            source_text: frames.first().map(|line| text(*line)).unwrap_or_default(),
            called_from: frames
                .iter()
                .skip(1)
                .map(|line| (*line, text(*line)))
                .collect(),
            message: match failure.other {
                Some(pc) => format!("{} (the other access: {})", failure.message, self.place(pc)),
                None => failure.message,
            },
        }
    }
}

/// Adds the counts of a launch to the list, by symbol.
pub fn count(
    list: &mut Vec<KernelCounters>,
    kernel: &Kernel,
    blocks: u64,
    executed: &[u64],
    tally: &Tally,
) {
    let known = list.iter().position(|own| own.symbol == kernel.name);
    let at = known.unwrap_or_else(|| {
        list.push(KernelCounters {
            symbol: kernel.name.clone(),
            ..KernelCounters::default()
        });
        list.len() - 1
    });
    let own = &mut list[at];
    own.launches += 1;
    own.blocks += blocks;
    for (instruction, times) in kernel.code.iter().zip(executed) {
        *class(&mut own.instructions, instruction.class) += times;
    }
    add_global(
        &mut own.global_loads,
        [
            tally.global_load_requests,
            tally.global_load_sectors,
            tally.global_load_bytes,
        ],
    );
    add_global(
        &mut own.global_stores,
        [
            tally.global_store_requests,
            tally.global_store_sectors,
            tally.global_store_bytes,
        ],
    );
    for (own, more) in own.global_widths.iter_mut().zip(tally.global_widths) {
        *own += more;
    }
    own.shared = SharedCounts {
        requests: own.shared.requests + tally.shared_requests,
        wavefronts: own.shared.wavefronts + tally.shared_wavefronts,
        ideal_wavefronts: own.shared.ideal_wavefronts + tally.shared_ideal,
    };
    own.tensor_multiply_adds += tally.multiply_adds;
    own.async_load_bytes += tally.async_load_bytes;
    own.async_store_bytes += tally.async_store_bytes;
}

fn add_global(counts: &mut GlobalCounts, [requests, sectors, bytes]: [u64; 3]) {
    counts.requests += requests;
    counts.sectors += sectors;
    counts.bytes += bytes;
}

fn class(counts: &mut InstructionCounts, class: InstructionClass) -> &mut u64 {
    match class {
        InstructionClass::Integer => &mut counts.integer,
        InstructionClass::Float => &mut counts.float,
        InstructionClass::Convert => &mut counts.convert,
        InstructionClass::Move => &mut counts.moves,
        InstructionClass::Memory => &mut counts.memory,
        InstructionClass::Control => &mut counts.control,
        InstructionClass::Warp => &mut counts.warp,
        InstructionClass::Tensor => &mut counts.tensor,
        InstructionClass::Sync => &mut counts.sync,
        InstructionClass::Async => &mut counts.asynchronous,
    }
}
