//! Findings: the defects of a kernel, with the place where each showed.

use std::fmt;

/// The kinds of defects that the machine distinguishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum FindingKind {
    /// Two threads touch the same shared memory, one of them writes, and no
    /// synchronisation orders them.
    SharedRace,
    /// Two threads or blocks race in the same way in global memory.
    GlobalRace,
    /// TMA or a tensor core touches bytes that ordinary instructions touch,
    /// without a proxy fence between the two.
    MissingProxyFence,
    /// A thread reads shared memory that nothing has written.
    UninitialisedShared,
    /// A thread reads global memory that nothing has written.
    UninitialisedGlobal,
    /// An access outside every allocation, or outside shared memory.
    OutOfBounds,
    /// An address is no multiple of the alignment that the instruction needs.
    Misaligned,
    /// A thread touches shared memory that an unfinished copy reads or writes.
    CopyInFlight,
    /// A thread touches registers of a wgmma that is still running.
    AccumulatorInFlight,
    /// A thread misuses an mbarrier in shared memory.
    Mbarrier,
    /// A thread misuses a barrier of the block or the cluster.
    Barrier,
    /// Only some lanes of a warp reached an instruction that needs all of them.
    PartialWarp,
    /// A lane mask lacks the lane that uses it, or names lanes that never come.
    LaneMask,
    /// Threads wait for an event that never happens.
    Deadlock,
    /// A thread ended before its own copies or products had finished.
    PendingAtExit,
    /// A block needs more shared memory than the launch gave it, or than there
    /// is.
    SharedSize,
    /// The instruction has operands that hardware does not accept.
    Operand,
    /// A dependent launch touches global memory before it has waited for the
    /// launches before it, or ends without having waited.
    LaunchOrder,
    /// The kernel executed `trap`.
    Trap,
}

/// A defect, with the place where it showed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Kind of the defect.
    pub kind: FindingKind,
    /// The kernel's symbol.
    pub kernel: String,
    /// The block, x, y, z.
    pub block: [u32; 3],
    /// Threads of the block that were at the instruction, or that wait.
    pub threads: Vec<u32>,
    /// Line of the PTX, from 1.
    pub ptx_line: u32,
    /// Line of the kernel's source, from 1, in the function at fault.
    pub source_line: Option<u32>,
    /// The text of that line, trimmed.
    pub source_text: String,
    /// Lines from which that function was inlined, innermost first, with their
    /// text.
    pub called_from: Vec<(u32, String)>,
    /// The defect in one sentence.
    pub message: String,
}

impl FindingKind {
    /// Returns the name of the defect, two or three words.
    pub const fn name(self) -> &'static str {
        match self {
            FindingKind::SharedRace => "race in shared memory",
            FindingKind::GlobalRace => "race in global memory",
            FindingKind::MissingProxyFence => "missing proxy fence",
            FindingKind::UninitialisedShared => "uninitialised shared memory",
            FindingKind::UninitialisedGlobal => "uninitialised global memory",
            FindingKind::OutOfBounds => "out of bounds",
            FindingKind::Misaligned => "misaligned access",
            FindingKind::CopyInFlight => "copy in flight",
            FindingKind::AccumulatorInFlight => "registers in flight",
            FindingKind::Mbarrier => "mbarrier misuse",
            FindingKind::Barrier => "barrier misuse",
            FindingKind::PartialWarp => "partial warp",
            FindingKind::LaneMask => "wrong lane mask",
            FindingKind::Deadlock => "deadlock",
            FindingKind::PendingAtExit => "exit with work in flight",
            FindingKind::SharedSize => "shared memory size",
            FindingKind::Operand => "invalid operand",
            FindingKind::LaunchOrder => "order of launches",
            FindingKind::Trap => "trap",
        }
    }
}

impl fmt::Display for FindingKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl std::error::Error for Finding {}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [x, y, z] = self.block;
        write!(f, "{}: {}", self.kind, self.message)?;
        write!(
            f,
            "\n  in block ({x}, {y}, {z}), {}",
            threads(&self.threads)
        )?;
        write!(f, ", PTX line {}", self.ptx_line)?;
        if let Some(line) = self.source_line {
            write!(f, "\n  at line {line}: {}", self.source_text)?;
        }
        for (line, text) in &self.called_from {
            write!(f, "\n  from line {line}: {text}")?;
        }
        Ok(())
    }
}

/// Formats thread numbers with runs abbreviated: `threads 0-31, 64`.
pub(crate) fn threads(list: &[u32]) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for &thread in list {
        match runs.last_mut() {
            Some((_, end)) if *end + 1 == thread => *end = thread,
            _ => runs.push((thread, thread)),
        }
    }
    let one = |(first, last): &(u32, u32)| {
        if first == last {
            first.to_string()
        } else {
            format!("{first}-{last}")
        }
    };
    let text = runs.iter().map(one).collect::<Vec<_>>().join(", ");
    match list.len() {
        1 => format!("thread {text}"),
        _ => format!("threads {text}"),
    }
}

/// A defect whose place is not known yet.
#[derive(Debug)]
pub(crate) struct Fault {
    pub kind: FindingKind,
    /// Lanes at fault; zero stands for the active ones.
    pub lanes: u32,
    pub message: String,
    /// Instruction of the other access.
    pub other: Option<u32>,
    /// The place, if it is not the instruction that ran.
    pub at: Option<FaultPlace>,
}

/// A place other than the instruction that ran.
#[derive(Clone, Debug)]
pub(crate) struct FaultPlace {
    pub pc: u32,
    /// Number of the block in its cluster.
    pub block: u32,
    pub threads: Vec<u32>,
}

pub(crate) type Step<T> = Result<T, Box<Fault>>;

impl Fault {
    pub fn new(kind: FindingKind, lanes: u32, message: impl Into<String>) -> Box<Fault> {
        Box::new(Fault {
            kind,
            lanes,
            message: message.into(),
            other: None,
            at: None,
        })
    }
}
