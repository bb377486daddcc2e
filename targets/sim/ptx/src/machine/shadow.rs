//! The shadow of a block's shared memory: the last accesses of each word and
//! their times.
//!
//! A word has four bytes. Where threads write parts of a word, its bytes get
//! stamps of their own.

use super::clock::{Clock, Known};
use std::collections::HashMap;

/// A thread that wrote, or a component of TMA or the tensor cores, with flags.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Who(u32);

// The lower 24 bits number threads or components. Four bits from bit 28 say
// which bytes of the word were ever written.
const ENGINE: u32 = 1 << 24;
const ATOMIC: u32 = 1 << 25;
const SPLIT: u32 = 1 << 26;
const VALID: u32 = 28;
const NUMBER: u32 = (1 << 24) - 1;

/// The time of an unfinished write, which no clock reaches.
pub const UNDER_WAY: u32 = u32::MAX;

/// The last write of a word.
#[derive(Clone, Copy, Debug, Default)]
struct Cell {
    time: u32,
    who: Who,
}

/// The reads of a word by one warp since it last released something.
#[derive(Clone, Copy, Debug, Default)]
struct Reads {
    time: u32,
    lanes: u32,
}

/// A thread, or several, that access memory.
pub struct Accessor<'a> {
    /// Warp of the cluster.
    pub warp: u32,
    /// One lane, or several that read the same bytes with the same knowledge.
    pub lanes: u32,
    pub time: u32,
    pub known: &'a Known,
    /// The access is atomic or ordered by itself.
    pub atomic: bool,
    pub pc: u32,
}

/// Two accesses that nothing orders, or a read of unwritten bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clash {
    /// This thread wrote the word, at this instruction.
    Write { thread: u32, pc: u32 },
    /// This thread has read the word.
    Read { thread: u32 },
    /// A `cp.async` of this thread writes the word and was not waited for.
    Copy { thread: u32, pc: u32 },
    /// A bulk copy wrote the word, and nobody waited for its mbarrier.
    Bulk { pc: u32 },
    /// A copy or product may still read the word.
    EngineReads { component: u32 },
    /// Ordinary stores wrote the word, with no proxy fence since.
    NoFence { thread: u32, pc: u32 },
    /// Nothing has written the word.
    Unwritten,
}

/// The recorded accesses to a block's shared memory.
#[derive(Default)]
pub struct Shadow {
    writes: Vec<Cell>,
    write_pcs: Vec<u32>,
    /// Per byte, for words with several writers.
    bytes: HashMap<u32, [Cell; 4]>,
    /// Per warp of the cluster, per word.
    reads: Vec<Vec<Reads>>,
    /// The latest read of a word by any thread.
    last_reads: Vec<u32>,
    /// Per component: the last step that reads each 16 bytes.
    engine_reads: Vec<(u32, Vec<u32>)>,
}

impl Accessor<'_> {
    /// Returns the first of its threads, counted through the cluster.
    fn thread(&self) -> u32 {
        self.warp * 32 + self.lanes.trailing_zeros()
    }

    /// Returns true if `thread` is the only one.
    fn is(&self, thread: u32) -> bool {
        thread / 32 == self.warp && self.lanes == 1 << (thread % 32)
    }
}

impl Cell {
    fn is_engine(self) -> bool {
        self.who.0 & ENGINE != 0
    }

    fn number(self) -> u32 {
        self.who.0 & NUMBER
    }

    /// Returns true if `clock` knows the write.
    #[inline(always)]
    fn known_to(self, clock: &Clock) -> bool {
        if self.is_engine() {
            clock.knows_engine(self.number(), self.time)
        } else {
            self.time != UNDER_WAY && clock.knows(self.number(), self.time)
        }
    }
}

impl Shadow {
    /// Forgets everything. `bytes` is the end of shared memory, `warps` the
    /// number of the cluster's warps.
    pub fn reset(&mut self, bytes: usize, warps: usize) {
        let words = bytes.div_ceil(4);
        self.writes.clear();
        self.writes.resize(words, Cell::default());
        self.write_pcs.resize(words, 0);
        self.bytes.clear();
        // Times only grow, so old reads count as known without being cleared.
        self.last_reads.resize(words, 0);
        self.reads.resize(warps, Vec::new());
        self.engine_reads.clear();
    }

    /// Checks and records a read by an ordinary instruction.
    #[inline]
    pub fn read(&mut self, by: &Accessor<'_>, offset: usize, count: usize) -> Result<(), Clash> {
        let (first, end) = (offset / 4, (offset + count).div_ceil(4));
        let warp = by.warp as usize;
        let words = self.writes.len();
        let reads = &mut self.reads[warp];
        if reads.len() < words {
            reads.resize(words, Reads::default());
        }
        let floor = by.known.seen.floor();
        for word in first..end {
            let cell = self.writes[word];
            let need = byte_mask(word, offset, count);
            // The check of unwritten bytes comes before that of races: a block
            // starts with no valid bits, and a word nobody wrote has no writer
            // to race with.
            if cell.who.0 >> VALID & need != need {
                return Err(Clash::Unwritten);
            }
            // The fast path: the last write is older than anything this thread
            // might not know. It decides nearly all accesses.
            let plain = cell.who.0 & (ENGINE | SPLIT) == 0;
            if !(plain && cell.time <= floor) {
                check_write(&self.bytes, cell, self.write_pcs[word], word, need, by)?;
            }
            // Atomic and volatile reads leave no trace: a thread may poll a
            // flag that its owner resets by a plain store. The price is that a
            // plain write which races with such a read goes unseen.
            if by.atomic {
                continue;
            }
            let own = &mut self.reads[warp][word];
            // The lanes of one warp share an entry for as long as the warp
            // releases nothing, since one time then stands for all their reads.
            if own.time == by.time {
                own.lanes |= by.lanes
            } else {
                *own = Reads {
                    time: by.time,
                    lanes: by.lanes,
                }
            }
            self.last_reads[word] = by.time;
        }
        Ok(())
    }

    /// Checks that no other access to these bytes is unordered.
    #[inline]
    pub fn check_write(&self, by: &Accessor<'_>, offset: usize, count: usize) -> Result<(), Clash> {
        let floor = by.known.seen.floor();
        for word in offset / 4..(offset + count).div_ceil(4) {
            let cell = self.writes[word];
            let need = byte_mask(word, offset, count);
            let plain = cell.who.0 & (ENGINE | SPLIT) == 0;
            if !(plain && cell.time <= floor) && cell.who.0 >> VALID & need != 0 {
                check_write(&self.bytes, cell, self.write_pcs[word], word, need, by)?;
            }
            if self.last_reads[word] > floor {
                self.check_reads(by, word)?;
            }
            // `fence.proxy.async` is not needed against reads: a write after a
            // read by TMA needs the read's completion alone, which the
            // component's step gives.
            for (component, steps) in &self.engine_reads {
                let step = steps[word / 4];
                if step > 0 && !by.known.seen.knows_engine(*component, step) {
                    return Err(Clash::EngineReads {
                        component: *component,
                    });
                }
            }
        }
        Ok(())
    }

    #[inline(never)]
    fn check_reads(&self, by: &Accessor<'_>, word: usize) -> Result<(), Clash> {
        let clock = &by.known.seen;
        for (warp, reads) in self.reads.iter().enumerate() {
            let Some(reads) = reads.get(word).filter(|reads| reads.time > clock.floor()) else {
                continue;
            };
            for lane in (0..32).filter(|lane| reads.lanes >> lane & 1 == 1) {
                let thread = warp as u32 * 32 + lane;
                if !by.is(thread) && !clock.knows(thread, reads.time) {
                    return Err(Clash::Read { thread });
                }
            }
        }
        Ok(())
    }

    /// Records a write by an ordinary instruction.
    #[inline]
    pub fn write(&mut self, by: &Accessor<'_>, offset: usize, count: usize) {
        debug_assert!(by.lanes.is_power_of_two());
        let flags = if by.atomic { ATOMIC } else { 0 };
        self.stamp(by.time, by.thread() | flags, by.pc, offset, count);
    }

    /// Records a write by TMA, known once its component reaches `step`.
    pub fn engine_write(
        &mut self,
        component: u32,
        step: u32,
        pc: u32,
        offset: usize,
        count: usize,
    ) {
        self.stamp(step, component | ENGINE, pc, offset, count);
    }

    /// Records an unfinished copy of a thread.
    pub fn copy(&mut self, by: &Accessor<'_>, offset: usize, count: usize) {
        self.stamp(UNDER_WAY, by.thread(), by.pc, offset, count);
    }

    #[inline]
    fn stamp(&mut self, time: u32, who: u32, pc: u32, offset: usize, count: usize) {
        for word in offset / 4..(offset + count).div_ceil(4) {
            let need = byte_mask(word, offset, count);
            let cell = &mut self.writes[word];
            let valid = cell.who.0 >> VALID | need;
            let new = Cell {
                time,
                who: Who(who),
            };
            // A part of a word is written while another part has, or may have,
            // another writer: from now on each byte has a stamp. Without this,
            // two threads that write neighbouring halves, as every bf16 kernel
            // does, would seem to race.
            let mixed = need != 15 && (cell.who.0 & SPLIT != 0 || valid != need);
            let split = if mixed {
                // The valid bits live in the word's cell alone; copies of it in
                // the bytes must not keep stale ones.
                let old = Cell {
                    who: Who(cell.who.0 & !(15 << VALID)),
                    ..*cell
                };
                let bytes = self.bytes.entry(word as u32).or_insert([old; 4]);
                for (byte, own) in bytes.iter_mut().enumerate() {
                    if need >> byte & 1 == 1 {
                        *own = new;
                    }
                }
                SPLIT
            } else {
                if cell.who.0 & SPLIT != 0 {
                    self.bytes.remove(&(word as u32));
                }
                0
            };
            *cell = Cell {
                time,
                who: Who(who | split | valid << VALID),
            };
            self.write_pcs[word] = pc;
        }
    }

    /// Records that step `step` of a component reads 16 bytes.
    pub fn engine_reads(&mut self, component: u32, step: u32, offset: usize) {
        let known = self.engine_reads.iter().position(|own| own.0 == component);
        let at = known.unwrap_or_else(|| {
            let chunks = self.writes.len().div_ceil(4);
            self.engine_reads.push((component, vec![0; chunks]));
            self.engine_reads.len() - 1
        });
        self.engine_reads[at].1[offset / 16] = step;
    }

    /// Checks that TMA or a tensor core sees the writes to these bytes.
    pub fn check_engine_read(
        &self,
        known: &Known,
        offset: usize,
        count: usize,
    ) -> Result<(), Clash> {
        for word in offset / 4..(offset + count).div_ceil(4) {
            let (cell, pc) = (self.writes[word], self.write_pcs[word]);
            let need = byte_mask(word, offset, count);
            if cell.who.0 >> VALID & need != need {
                return Err(Clash::Unwritten);
            }
            if cell.who.0 & SPLIT != 0 {
                let bytes = self.bytes.get(&(word as u32)).copied().unwrap_or([cell; 4]);
                for own in bytes {
                    check_engine(own, pc, known)?;
                }
            } else {
                check_engine(cell, pc, known)?;
            }
        }
        Ok(())
    }
}

#[inline]
fn check_engine(cell: Cell, pc: u32, known: &Known) -> Result<(), Clash> {
    let thread = cell.number();
    if cell.is_engine() {
        return if cell.known_to(&known.seen) {
            Ok(())
        } else {
            Err(Clash::Bulk { pc })
        };
    }
    // The order of the tests is that of the reports: an unfinished copy first,
    // then a missing fence, which needs that the write is known at all.
    if cell.time == UNDER_WAY {
        return Err(Clash::Copy { thread, pc });
    }
    if cell.known_to(&known.fenced) {
        return Ok(());
    }
    // The write is known but not fenced: the thread synchronised correctly and
    // forgot only the proxy fence (PTX ISA, "Async proxy").
    Err(if cell.known_to(&known.seen) {
        Clash::NoFence { thread, pc }
    } else {
        Clash::Write { thread, pc }
    })
}

/// Returns the mask of a word's bytes that an access covers.
#[inline(always)]
fn byte_mask(word: usize, offset: usize, count: usize) -> u32 {
    let start = offset.max(4 * word) - 4 * word;
    let end = (offset + count).min(4 * word + 4) - 4 * word;
    (1 << end) - (1 << start)
}

/// Checks the last write of a word, or of its bytes.
#[inline(never)]
fn check_write(
    bytes: &HashMap<u32, [Cell; 4]>,
    cell: Cell,
    pc: u32,
    word: usize,
    need: u32,
    by: &Accessor<'_>,
) -> Result<(), Clash> {
    if cell.who.0 & SPLIT == 0 {
        return check_cell(cell, pc, by);
    }
    let parts = bytes.get(&(word as u32)).copied().unwrap_or([cell; 4]);
    for (byte, part) in parts.into_iter().enumerate() {
        if need >> byte & 1 == 1 {
            check_cell(part, pc, by)?;
        }
    }
    Ok(())
}

fn check_cell(cell: Cell, pc: u32, by: &Accessor<'_>) -> Result<(), Clash> {
    let thread = cell.number();
    if cell.time == UNDER_WAY && !cell.is_engine() {
        return Err(Clash::Copy { thread, pc });
    }
    let own = !cell.is_engine() && by.is(thread);
    // Two atomic accesses never race with each other (PTX ISA, "Conflict and
    // Data-races": morally strong operations).
    let both_atomic = by.atomic && cell.who.0 & ATOMIC != 0;
    if own || both_atomic || cell.known_to(&by.known.seen) {
        return Ok(());
    }
    Err(if cell.is_engine() {
        Clash::Bulk { pc }
    } else {
        Clash::Write { thread, pc }
    })
}
