//! Register allocation: virtual registers to rows of a small file.
//!
//! A kernel names thousands of registers, of which few live at a time. Liveness
//! over the flow graph gives each register an interval of statements, and a
//! linear scan hands out rows. A warp's file then stays in the host's
//! first-level cache. Lanes diverge, yet each lane has its own column, so
//! per-thread liveness is enough: only values that never live at once in a
//! thread share a row.

use crate::text::{Class, Operand, ParsedEntry, Statement, Virtual};
use std::collections::{BTreeSet, BinaryHeap, HashMap};

/// The row of each virtual register.
pub struct RegisterRows {
    rows: HashMap<Virtual, u16>,
    /// Rows in use, per class.
    pub counts: HashMap<Class, u16>,
}

impl RegisterRows {
    /// Returns the row of a register.
    pub fn row(&self, register: Virtual) -> u16 {
        self.rows.get(&register).copied().unwrap_or(0)
    }

    /// Returns the predicate behind those of the registers, which is always
    /// true.
    pub fn truth(&self) -> u16 {
        self.count(Class::Predicate)
    }

    /// Returns the number of rows of a class.
    pub fn count(&self, class: Class) -> u16 {
        self.counts.get(&class).copied().unwrap_or(0)
    }
}

/// Opcodes whose first operand is not written.
const NO_RESULT: [&str; 22] = [
    "st",
    "red",
    "bra",
    "brx",
    "bar",
    "barrier",
    "ret",
    "exit",
    "trap",
    "cp",
    "fence",
    "membar",
    "prefetch",
    "prefetchu",
    "setmaxnreg",
    "griddepcontrol",
    "nanosleep",
    "stmatrix",
    "pmevent",
    "discard",
    "applypriority",
    "brkpt",
];

/// Returns true if the statement writes its first operand.
pub fn has_result(statement: &Statement) -> bool {
    let stem = statement.part(0);
    let written = matches!(
        statement.operands.first(),
        Some(Operand::Register(_) | Operand::Pair(..) | Operand::Vector(_) | Operand::Sink)
    );
    let reduces = matches!(stem, "bar" | "barrier") && statement.has("red");
    written && (reduces || !NO_RESULT.contains(&stem))
}

fn registers(operand: &Operand, list: &mut Vec<Virtual>) {
    match operand {
        Operand::Register(register) | Operand::Not(register) => list.push(*register),
        Operand::Vector(parts) => parts.iter().for_each(|part| registers(part, list)),
        Operand::Pair(a, b) => {
            registers(a, list);
            registers(b, list);
        }
        Operand::Memory { base, rest, .. } => {
            registers(base, list);
            rest.iter().for_each(|part| registers(part, list));
        }
        _ => {}
    }
}

/// The registers that a statement reads and writes.
#[derive(Default)]
struct Touch {
    reads: Vec<Virtual>,
    writes: Vec<Virtual>,
    /// The write is unconditional, so the old value is dead.
    kills: bool,
    /// An asynchronous copy or product uses the registers after the statement
    /// is done.
    late: bool,
}

fn touch(statement: &Statement) -> Touch {
    let mut found = Touch::default();
    let result = has_result(statement);
    for (i, operand) in statement.operands.iter().enumerate() {
        let list = if i == 0 && result {
            &mut found.writes
        } else {
            &mut found.reads
        };
        registers(operand, list);
    }
    // A wgmma reads its accumulators as well as writing them, whatever
    // `scale-d` says at run time.
    found.late = statement.part(0) == "wgmma";
    if found.late {
        found.reads.extend(found.writes.clone());
    }
    if let Some((guard, _)) = statement.guard {
        found.reads.push(guard);
    }
    // A guarded write leaves the old value in the lanes that the guard excludes,
    // so the register stays live before it.
    found.kills = statement.guard.is_none() && !found.late;
    found
}

/// Returns the 32-bit rows that a statement touches, and true for writes.
pub fn word_rows(statement: &Statement, rows: &RegisterRows) -> Vec<(u16, bool)> {
    let touch = touch(statement);
    let word = |register: &&Virtual| register.class == Class::Word;
    let reads = touch
        .reads
        .iter()
        .filter(word)
        .map(|r| (rows.row(*r), false));
    let writes = touch
        .writes
        .iter()
        .filter(word)
        .map(|r| (rows.row(*r), true));
    reads.chain(writes).collect()
}

/// First and last position of each register; two positions per statement, so
/// that a result may take the row of an operand that ends there.
type Intervals = HashMap<Virtual, (u32, u32)>;

/// Gives each register of a kernel a row.
pub fn allocate(entry: &ParsedEntry) -> RegisterRows {
    let touches: Vec<Touch> = entry.statements.iter().map(touch).collect();
    let intervals = intervals(entry, &touches);
    scan(intervals)
}

fn scan(intervals: Intervals) -> RegisterRows {
    let mut order: Vec<(Virtual, (u32, u32))> = intervals.into_iter().collect();
    order.sort_by_key(|(register, (start, _))| (*start, register.index, register.class as u8));
    let mut rows = RegisterRows {
        rows: HashMap::new(),
        counts: HashMap::new(),
    };
    let mut free: HashMap<Class, BinaryHeap<std::cmp::Reverse<u16>>> = HashMap::new();
    let mut active: HashMap<Class, BTreeSet<(u32, u16)>> = HashMap::new();
    for (register, (start, end)) in order {
        let free = free.entry(register.class).or_default();
        let active = active.entry(register.class).or_default();
        while let Some(&(ended, row)) = active.first().filter(|(ended, _)| *ended < start) {
            active.remove(&(ended, row));
            free.push(std::cmp::Reverse(row));
        }
        let row = free.pop().map_or_else(
            || {
                let count = rows.counts.entry(register.class).or_insert(0);
                *count += 1;
                *count - 1
            },
            |row| row.0,
        );
        active.insert((end, row));
        rows.rows.insert(register, row);
    }
    rows
}

fn intervals(entry: &ParsedEntry, touches: &[Touch]) -> Intervals {
    let blocks = Blocks::of(entry);
    let index = Index::of(touches);
    let live_out = liveness(&blocks, &index, touches);
    let mut spans: Intervals = HashMap::new();
    let mut cover = |register: Virtual, at: u32| {
        let span = spans.entry(register).or_insert((at, at));
        *span = (span.0.min(at), span.1.max(at));
    };
    for (block, live) in blocks.ranges.iter().zip(&live_out) {
        for register in live.iter() {
            cover(index.names[register], 2 * block.1 as u32);
        }
        let entering = transfer(*block, live, &index, touches);
        for register in entering.iter() {
            cover(index.names[register], 2 * block.0 as u32);
        }
    }
    let end = 2 * touches.len() as u32 + 1;
    for (i, touch) in touches.iter().enumerate() {
        let at = 2 * i as u32;
        touch.reads.iter().for_each(|register| cover(*register, at));
        // Several results are written one after the other, so none may take the
        // row of an operand.
        let result = at + u32::from(touch.writes.len() == 1);
        touch.writes.iter().for_each(|register| {
            cover(*register, result);
            cover(*register, at + 1);
        });
        // The product uses its registers until a wait that may be anywhere
        // behind it, also around a loop: they keep their rows for the whole
        // kernel.
        if touch.late {
            for register in &touch.reads {
                cover(*register, 0);
                cover(*register, end);
            }
        }
    }
    spans
}

/// Dense numbers for the registers of a kernel.
struct Index {
    numbers: HashMap<Virtual, usize>,
    names: Vec<Virtual>,
}

impl Index {
    fn of(touches: &[Touch]) -> Index {
        let mut index = Index {
            numbers: HashMap::new(),
            names: Vec::new(),
        };
        for register in touches.iter().flat_map(|t| t.reads.iter().chain(&t.writes)) {
            index.numbers.entry(*register).or_insert_with(|| {
                index.names.push(*register);
                index.names.len() - 1
            });
        }
        index
    }
}

/// Straight pieces of code, `first..end`, and what may follow each.
struct Blocks {
    ranges: Vec<(usize, usize)>,
    next: Vec<Vec<usize>>,
}

/// Returns the statements to which a statement may jump.
pub fn targets(statement: &Statement) -> Vec<usize> {
    let mut found = Vec::new();
    for operand in &statement.operands {
        match operand {
            Operand::Label(at) => found.push(*at),
            Operand::Vector(parts) => found.extend(parts.iter().filter_map(|part| match part {
                Operand::Label(at) => Some(*at),
                _ => None,
            })),
            _ => {}
        }
    }
    found
}

fn falls_through(statement: &Statement) -> bool {
    let leaves = matches!(statement.part(0), "bra" | "brx" | "ret" | "exit" | "trap");
    !leaves || statement.guard.is_some()
}

impl Blocks {
    fn of(entry: &ParsedEntry) -> Blocks {
        let statements = &entry.statements;
        let mut starts = BTreeSet::from([0]);
        for (i, statement) in statements.iter().enumerate() {
            let jumps = targets(statement);
            if !jumps.is_empty() || !falls_through(statement) {
                starts.insert(i + 1);
            }
            starts.extend(jumps);
        }
        starts.retain(|start| *start < statements.len());
        let starts: Vec<usize> = starts.into_iter().collect();
        let ends = starts.iter().skip(1).copied().chain([statements.len()]);
        let ranges: Vec<(usize, usize)> = starts.iter().copied().zip(ends).collect();
        let block_of = |at: usize| starts.binary_search(&at).ok();
        let next = ranges.iter().map(|(first, end)| {
            let Some(last) = statements[*first..*end].last() else {
                return Vec::new();
            };
            let after = falls_through(last).then_some(*end);
            let jumps = targets(last).into_iter().chain(after);
            jumps.filter_map(block_of).collect()
        });
        Blocks {
            next: next.collect(),
            ranges,
        }
    }
}

/// A set of small numbers.
#[derive(Clone, PartialEq)]
struct Set(Vec<u64>);

impl Set {
    fn new(size: usize) -> Set {
        Set(vec![0; size.div_ceil(64)])
    }

    fn insert(&mut self, at: usize) {
        self.0[at / 64] |= 1 << (at % 64);
    }

    fn remove(&mut self, at: usize) {
        self.0[at / 64] &= !(1 << (at % 64));
    }

    fn join(&mut self, other: &Set) {
        for (own, other) in self.0.iter_mut().zip(&other.0) {
            *own |= other;
        }
    }

    fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.0.iter().enumerate().flat_map(|(i, word)| {
            (0..64)
                .filter(move |bit| word >> bit & 1 == 1)
                .map(move |bit| 64 * i + bit)
        })
    }
}

/// Returns the registers live before a block, given those live after it.
fn transfer(block: (usize, usize), after: &Set, index: &Index, touches: &[Touch]) -> Set {
    let mut live = after.clone();
    for touch in touches[block.0..block.1].iter().rev() {
        if touch.kills {
            touch
                .writes
                .iter()
                .for_each(|r| live.remove(index.numbers[r]));
        }
        touch
            .reads
            .iter()
            .for_each(|r| live.insert(index.numbers[r]));
        if !touch.kills {
            touch
                .writes
                .iter()
                .for_each(|r| live.insert(index.numbers[r]));
        }
    }
    live
}

/// Returns the registers live after each block.
fn liveness(blocks: &Blocks, index: &Index, touches: &[Touch]) -> Vec<Set> {
    let count = blocks.ranges.len();
    let mut before = vec![Set::new(index.names.len()); count];
    let mut after = before.clone();
    let mut changed = true;
    while changed {
        changed = false;
        for block in (0..count).rev() {
            let mut out = Set::new(index.names.len());
            blocks.next[block]
                .iter()
                .for_each(|next| out.join(&before[*next]));
            let entering = transfer(blocks.ranges[block], &out, index, touches);
            changed |= entering != before[block];
            before[block] = entering;
            after[block] = out;
        }
    }
    after
}
