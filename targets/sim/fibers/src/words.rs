//! Messages of faults.

use crate::block::Block;
use crate::fault::{Access, Earlier, Fault, Problem};
use crate::image::Facts;
use crate::region::Region;
use crate::stamp::Who;
use crate::worker::Image;
use moesaic_kernel::{Entry, Param};
use moesaic_target::Arg;

/// The context of a message: the image of the failing worker, and the launch.
pub(crate) struct Scene<'a> {
    /// Name of the GPU.
    pub(crate) arch: &'static str,
    pub(crate) facts: &'a Facts,
    pub(crate) image: Image,
    pub(crate) entry: &'a Entry,
    pub(crate) args: &'a [Arg],
    pub(crate) regions: &'a [Region],
    pub(crate) grid_x: u64,
}

impl Scene<'_> {
    /// Describes a fault in one sentence: block, thread, operation, place.
    pub(crate) fn describe(&self, fault: &Fault, block: &Block) -> String {
        let at = format!("block ({}, {})", block.x, block.y);
        let thread = format!("{at}, thread {}", block.current);
        match fault {
            Fault::Deadlock => format!("{at}: deadlock: {}", block.waiting()),
            Fault::Memory(access, problem) => {
                format!("{thread} {}", self.memory(access, *problem))
            }
            Fault::Conflict(access, earlier) => {
                format!("{thread} {}", self.conflict(access, earlier, block))
            }
            Fault::Apart { here, there, lane } => {
                let wave = block.current / block.lanes;
                let other = wave * block.lanes + lane;
                format!(
                    "{thread} is at {} (line {}) while thread {other} of its wave waits at {} (line {}): \
                     all lanes of a wave take part in a collective",
                    here.0.name(),
                    here.1,
                    there.0.name(),
                    there.1
                )
            }
            Fault::Wide { value, bits, line } => format!(
                "{thread} calls match_any<{bits}> with {value}, which has more than {bits} bits (line {line})"
            ),
            Fault::NoProduct { shape, line } => format!(
                "{thread} asks for a matrix product {shape} (line {line}), which {} does not have",
                self.arch
            ),
            Fault::Halves { line } => format!(
                "{at}: lanes l and l + 16 bring different operands to a matrix product (line {line})"
            ),
            Fault::Defect { kind, facts, value } => {
                // SAFETY: the compiler's own facts, in the image of the kernel.
                let (line, column) = unsafe { place(*facts) };
                format!(
                    "{thread} {} (line {line}, column {column})",
                    defect(*kind, *value)
                )
            }
        }
    }

    fn memory(&self, access: &Access, problem: Problem) -> String {
        if let Problem::Foreign(owner) = problem {
            let (verb, line) = (access.kind.verb(), self.line(access.from));
            let bytes = access.bytes;
            return format!("{verb} {bytes} bytes of a local variable of thread {owner}{line}");
        }
        let what = format!(
            "{} {} bytes at {}{}",
            access.kind.verb(),
            access.bytes,
            self.place(access.address),
            self.line(access.from)
        );
        let why = match problem {
            Problem::Outside => "outside of every tensor of the launch and of shared memory",
            Problem::Unwritten => "which nobody has written",
            Problem::Misaligned => "which is not at a multiple of its size",
            Problem::ReadOnly => "a parameter that the kernel declares to only read",
            Problem::Constant => "a constant of the kernel",
            Problem::Foreign(_) => "another thread's",
        };
        format!("{what}: {why}")
    }

    fn conflict(&self, access: &Access, earlier: &Earlier, block: &Block) -> String {
        let stamp = earlier.stamp;
        let other = match (stamp.of_block(), stamp.who()) {
            (None, _) => "threads of several blocks".to_string(),
            (Some(number), who) if number != block.number => {
                let at = (
                    u64::from(number) % self.grid_x,
                    u64::from(number) / self.grid_x,
                );
                format!("{} of block ({}, {})", name(who), at.0, at.1)
            }
            (_, who) => name(who),
        };
        let did = if earlier.wrote { "wrote" } else { "read" };
        let line = earlier.from.map(|from| self.line(from)).unwrap_or_default();
        format!(
            "{} {}{}, which {other} {did}{line} with no barrier between: the result depends on the order of threads",
            access.kind.verb(),
            self.place(access.address),
            self.line(access.from),
        )
    }

    fn line(&self, from: usize) -> String {
        let address = (from as u64).wrapping_sub(self.image.start as u64);
        // The address is that of the return, so the call lies just before.
        let line = self.facts.lines.at(address.wrapping_sub(1));
        line.map(|line| format!(" (line {line})"))
            .unwrap_or_default()
    }

    /// Returns the name of what lies at an address.
    pub(crate) fn place(&self, address: usize) -> String {
        let offset = address.wrapping_sub(self.image.shared);
        if let Some(variable) = self.facts.variable(offset) {
            let byte = offset - variable.offset;
            return format!("shared `{}`, byte {byte}", variable.name);
        }
        let named = self.entry.params.iter().zip(self.args);
        let tensors = named.filter_map(|(param, arg)| self.tensor(param, arg));
        // Where several tensors share an allocation, the last one that starts
        // before the address.
        let nearest =
            tensors.min_by_key(|tensor| (tensor.distance(address), tensor.start.abs_diff(address)));
        nearest
            .and_then(|tensor| tensor.element(address))
            .unwrap_or_else(|| format!("address {address:#x}"))
    }

    fn tensor<'a>(&self, param: &'a Param, arg: &Arg) -> Option<Tensor<'a>> {
        let Arg::Ptr(ptr) = arg else { return None };
        let start = ptr.0 as usize;
        let mut regions = self.regions.iter();
        let region = regions.find(|r| start.wrapping_sub(r.start) <= r.bytes)?;
        Some(Tensor {
            name: &param.name,
            start,
            end: region.start + region.bytes,
            size: param.ty.tensor()?.0.size(),
        })
    }
}

/// A parameter with memory behind it.
struct Tensor<'a> {
    name: &'a str,
    start: usize,
    end: usize,
    /// Bytes of an element.
    size: usize,
}

impl Tensor<'_> {
    /// Returns the distance of an address from the tensor in bytes.
    fn distance(&self, address: usize) -> usize {
        match address {
            a if a < self.start => self.start - a,
            a if a >= self.end => a - self.end + 1,
            _ => 0,
        }
    }

    /// Returns the element at an address, unless it is too far off to be meant.
    fn element(&self, address: usize) -> Option<String> {
        const NEAR: usize = 1 << 20;
        let index = (address.wrapping_sub(self.start) as isize).div_euclid(self.size as isize);
        let element = format!("`{}`[{index}]", self.name);
        match self.distance(address) {
            0 => Some(element),
            NEAR.. => None,
            by if address < self.start => Some(format!("{element}, {by} bytes before its start")),
            by => Some(format!("{element}, {} bytes beyond its end", by - 1)),
        }
    }
}

fn name(who: Who) -> String {
    match who {
        Who::Thread(thread) => format!("thread {thread}"),
        Who::Wave(wave) => format!("lanes of wave {wave}"),
        Who::Many => "threads of several waves".to_string(),
    }
}

fn defect(kind: i32, value: u64) -> String {
    match kind {
        0 => format!("uses index {} beyond the end of an array", value as i64),
        1 => format!(
            "uses address {value:#x}, which is not aligned for what it reads or writes there"
        ),
        _ => "divides by zero".to_string(),
    }
}

/// Reads line and column from the compiler's facts about a check.
///
/// # Safety
/// `facts` starts with the location that gcc and clang put there.
unsafe fn place(facts: *const u8) -> (u32, u32) {
    #[repr(C)]
    struct Location {
        file: *const std::ffi::c_char,
        line: u32,
        column: u32,
    }
    // SAFETY: the caller's.
    let location = unsafe { &*facts.cast::<Location>() };
    (location.line, location.column)
}
