//! Shadow of a block's shared memory: who touched each word, and when.
//!
//! A word is four bytes. Where threads write parts of a word, its bytes get
//! stamps of their own.

use super::clock::{Clock, Known};
use std::collections::HashMap;

/// A thread that wrote, or the component of an engine, with flags.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Who(u32);

const ENGINE: u32 = 1 << 24;
const ATOMIC: u32 = 1 << 25;
const SPLIT: u32 = 1 << 26;
const VALID: u32 = 28;
const NUMBER: u32 = (1 << 24) - 1;

/// The time of a write that is under way: nobody knows it.
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

/// Somebody who accesses memory.
pub struct Accessor<'a> {
    /// Of the cluster.
    pub warp: u32,
    /// One lane, or several that read the same bytes and know the same.
    pub lanes: u32,
    pub time: u32,
    pub known: &'a Known,
    /// The access is atomic, or ordered by itself.
    pub atomic: bool,
    pub pc: u32,
}

/// Two accesses that nothing orders, or a read of nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clash {
    /// This thread wrote it, at this instruction.
    Write { thread: u32, pc: u32 },
    /// This thread has read it.
    Read { thread: u32 },
    /// A `cp.async` of this thread writes it and has not been waited for.
    Copy { thread: u32, pc: u32 },
    /// A bulk copy wrote it; its mbarrier has not been waited for.
    Bulk { pc: u32 },
    /// An engine may still read it.
    EngineReads { component: u32 },
    /// Written by ordinary stores, with no proxy fence since.
    NoFence { thread: u32, pc: u32 },
    /// Nothing has written it.
    Unwritten,
}

/// What is known of a block's shared memory.
#[derive(Default)]
pub struct Shadow {
    writes: Vec<Cell>,
    write_pcs: Vec<u32>,
    /// By byte, for words with several writers.
    bytes: HashMap<u32, [Cell; 4]>,
    /// By warp of the cluster, by word.
    reads: Vec<Vec<Reads>>,
    /// The latest read of a word by anybody.
    last_reads: Vec<u32>,
    /// By engine component: the last of its steps that reads each 16 bytes.
    engine_reads: Vec<(u32, Vec<u32>)>,
}

impl Accessor<'_> {
    /// The first of its threads, counted through the cluster.
    fn thread(&self) -> u32 {
        self.warp * 32 + self.lanes.trailing_zeros()
    }

    /// Whether `thread` is the only one.
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

    /// Whether the write is in order before what `clock` knows.
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
    /// Forgets everything; `bytes` is the end of shared memory, `warps` those
    /// of the cluster.
    pub fn reset(&mut self, bytes: usize, warps: usize) {
        let words = bytes.div_ceil(4);
        self.writes.clear();
        self.writes.resize(words, Cell::default());
        self.write_pcs.resize(words, 0);
        self.bytes.clear();
        // Times only grow, so that old reads are in order by themselves.
        self.last_reads.resize(words, 0);
        self.reads.resize(warps, Vec::new());
        self.engine_reads.clear();
    }

    /// Notes a read by an ordinary instruction.
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
            if cell.who.0 >> VALID & need != need {
                return Err(Clash::Unwritten);
            }
            let plain = cell.who.0 & (ENGINE | SPLIT) == 0;
            if !(plain && cell.time <= floor) {
                check_write(&self.bytes, cell, self.write_pcs[word], word, need, by)?;
            }
            if by.atomic {
                continue;
            }
            let own = &mut self.reads[warp][word];
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

    /// Checks that nothing else touches these bytes unordered.
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

    /// Stamps a write by an ordinary instruction.
    #[inline]
    pub fn write(&mut self, by: &Accessor<'_>, offset: usize, count: usize) {
        debug_assert!(by.lanes.is_power_of_two());
        let flags = if by.atomic { ATOMIC } else { 0 };
        self.stamp(by.time, by.thread() | flags, by.pc, offset, count);
    }

    /// Stamps a write of an engine: known once its component says `step`.
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

    /// Stamps a copy of a thread that is under way.
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
            let mixed = need != 15 && (cell.who.0 & SPLIT != 0 || valid != need);
            let split = if mixed {
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

    /// Notes that step `step` of an engine component reads 16 bytes.
    pub fn engine_reads(&mut self, component: u32, step: u32, offset: usize) {
        let known = self.engine_reads.iter().position(|own| own.0 == component);
        let at = known.unwrap_or_else(|| {
            let chunks = self.writes.len().div_ceil(4);
            self.engine_reads.push((component, vec![0; chunks]));
            self.engine_reads.len() - 1
        });
        self.engine_reads[at].1[offset / 16] = step;
    }

    /// Checks that an engine sees what was written to these bytes.
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
    if cell.time == UNDER_WAY {
        return Err(Clash::Copy { thread, pc });
    }
    if cell.known_to(&known.fenced) {
        return Ok(());
    }
    Err(if cell.known_to(&known.seen) {
        Clash::NoFence { thread, pc }
    } else {
        Clash::Write { thread, pc }
    })
}

/// The bytes of a word that an access covers.
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
