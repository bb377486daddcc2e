//! A warp: its registers and the places of its threads.

use super::clock::Known;
use crate::code::op::{NONE, RowIndex};
use crate::code::{Kernel, RowValue};
use crate::text::{Relation, Special};
use std::collections::VecDeque;

/// 32-bit values of the 32 lanes.
pub type Words = [u32; 32];
/// 64-bit values of the 32 lanes.
pub type Doubles = [u64; 32];

/// Iterates over the lanes of a mask.
pub fn lanes_of(mask: u32) -> impl Iterator<Item = usize> {
    let mut left = mask;
    std::iter::from_fn(move || {
        let lane = left.trailing_zeros() as usize;
        left &= left.wrapping_sub(1);
        (lane < 32).then_some(lane)
    })
}

/// The event that threads wait for.
#[derive(Clone, Debug, PartialEq)]
pub enum Wait {
    /// No event: the threads can go on.
    No,
    /// The other lanes of this mask come to the same instruction.
    Lanes(u32),
    /// Barrier `id` of the block completes a round.
    Barrier { id: u32, count: u32 },
    /// The barrier at a shared address completes a phase.
    Mbarrier { address: u32, parity: bool },
    /// The products of the warpgroup, except those of the last groups.
    Products(u32),
    /// The bulk copies of the thread, except those of the last groups.
    Bulk { left: u32, read: bool },
    /// Other warps of the block give back so many registers of each thread.
    Registers(u32),
    /// The other blocks of the cluster arrive.
    Cluster,
    /// A polled condition was false; other threads go first.
    Politely,
}

/// The effect of an instruction on the threads that executed it.
pub enum Flow {
    /// The threads go on.
    Next,
    /// The threads execute the instruction again once the wait is over.
    Again(Wait),
    /// The threads go on once the wait is over.
    After(Wait),
}

/// Some lanes of one warp.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WarpLanes {
    /// Number of the warp in the cluster.
    pub warp: u32,
    /// Lane mask.
    pub lanes: u32,
}

/// A product that its warp has issued and not waited for.
#[derive(Clone, Copy, Debug)]
pub struct IssuedProduct {
    /// Number of the product among those of the warp, from 1.
    pub step: u32,
    /// Its instruction.
    pub pc: u32,
}

/// Threads of a warp that are at the same instruction.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    pub pc: u32,
    pub lanes: u32,
    pub wait: Wait,
}

/// The register files and the remaining state of a warp.
#[derive(Debug, Default)]
pub struct Warp {
    pub words: Vec<Words>,
    pub doubles: Vec<Doubles>,
    pub predicates: Vec<u32>,
    /// The carry flag of each lane.
    pub carry: u32,
    /// Threads that have not ended.
    pub groups: Vec<Group>,
    /// Number among the warps of the cluster.
    pub number: u32,
    /// Number of the block in the cluster.
    pub block: u32,
    /// First thread, counted in the block.
    pub first_thread: u32,
    /// Lanes that are threads.
    pub lanes: u32,
    /// Lanes that have ended.
    pub ended: u32,
    /// Local memory, thread by thread.
    pub local: Vec<u8>,
    pub max_registers: u32,
    /// For each lane, the events of other threads that it knows.
    pub known: Vec<Known>,
    /// Lanes that have not waited for earlier launches which may still run.
    pub early: u32,
    /// Lanes that have executed a memory fence.
    pub fences: u32,
    /// Products in flight.
    pub flying: VecDeque<IssuedProduct>,
    /// A wgmma.fence was executed.
    pub fenced: bool,
    /// Registers of products written since the last fence.
    pub unfenced: Vec<RowIndex>,
}

/// The values of the special registers.
#[derive(Clone, Copy, Debug, Default)]
pub struct SpecialRegisters {
    pub block: [u32; 3],
    pub grid: [u32; 3],
    pub threads: u32,
    pub rank: u32,
    pub cluster: u32,
    pub shared_bytes: u32,
    pub dynamic_bytes: u32,
}

impl Warp {
    /// Resets the warp to the first instruction of `kernel`.
    pub fn reset(
        &mut self,
        kernel: &Kernel,
        number: u32,
        first_thread: u32,
        place: &SpecialRegisters,
        known: &Known,
    ) {
        self.known.clear();
        self.known.resize(32, known.clone());
        self.fences = 0;
        self.early = 0;
        self.flying.clear();
        self.fenced = false;
        self.unfenced.clear();
        let lanes = (place.threads - first_thread).min(32);
        self.number = number;
        self.block = place.rank;
        self.first_thread = first_thread;
        self.lanes = (u64::from(u32::MAX) >> (32 - lanes)) as u32;
        self.ended = !self.lanes;
        self.carry = 0;
        self.groups.clear();
        self.groups.push(Group {
            pc: 0,
            lanes: self.lanes,
            wait: Wait::No,
        });
        self.max_registers = 0;
        self.predicates.clear();
        self.predicates.resize(kernel.predicates as usize, 0);
        // An immediate predicate reads this row: `Rows::truth`.
        self.predicates.push(u32::MAX);
        // Local memory starts with a pattern that shows in results; its reads
        // are not checked.
        self.local.clear();
        self.local.resize(32 * kernel.local_bytes as usize, 0xee);
        self.words.clear();
        self.words.resize(kernel.words as usize, [0; 32]);
        // Literals and special registers are rows behind the registers of the
        // kernel, filled once per block. Operands are then row numbers
        // throughout, with no test for immediates in the inner loops.
        let word = |source: &RowValue| value(source, first_thread, place).map(|value| value as u32);
        self.words.extend(kernel.word_sources.iter().map(word));
        self.doubles.clear();
        self.doubles.resize(kernel.doubles as usize, [0; 32]);
        let double = |source: &RowValue| value(source, first_thread, place);
        self.doubles
            .extend(kernel.double_sources.iter().map(double));
    }

    /// Returns a row of the 32-bit file.
    #[inline(always)]
    pub fn word(&self, row: RowIndex) -> &Words {
        &self.words[row as usize]
    }

    /// Returns a row of the 64-bit file.
    #[inline(always)]
    pub fn double(&self, row: RowIndex) -> &Doubles {
        &self.doubles[row as usize]
    }

    /// Returns a predicate, negated or not, as a lane mask.
    #[inline(always)]
    pub fn predicate(&self, row: RowIndex, negate: bool) -> u32 {
        self.predicates[row as usize] ^ 0u32.wrapping_sub(u32::from(negate))
    }

    /// Writes the lanes of `mask`.
    #[inline(always)]
    pub fn put(&mut self, row: RowIndex, value: &Words, mask: u32) {
        if row != NONE {
            blend(&mut self.words[row as usize], value, mask);
        }
    }

    /// Writes the lanes of `mask`.
    #[inline(always)]
    pub fn put_double(&mut self, row: RowIndex, value: &Doubles, mask: u32) {
        if row != NONE {
            blend_double(&mut self.doubles[row as usize], value, mask);
        }
    }

    /// Writes the lanes of `mask`.
    #[inline(always)]
    pub fn put_predicate(&mut self, row: RowIndex, value: u32, mask: u32) {
        if row != NONE {
            let own = &mut self.predicates[row as usize];
            *own = (*own & !mask) | (value & mask);
        }
    }

    /// Returns the lanes that can still run.
    pub fn alive(&self) -> u32 {
        !self.ended
    }

    /// Returns true if every thread has ended.
    pub fn is_done(&self) -> bool {
        self.groups.is_empty()
    }
}

#[inline(always)]
fn blend(row: &mut Words, value: &Words, mask: u32) {
    if mask == u32::MAX {
        *row = *value;
        return;
    }
    for (lane, (own, new)) in row.iter_mut().zip(value).enumerate() {
        let take = 0u32.wrapping_sub(mask >> lane & 1);
        *own = (*own & !take) | (new & take);
    }
}

#[inline(always)]
fn blend_double(row: &mut Doubles, value: &Doubles, mask: u32) {
    if mask == u32::MAX {
        *row = *value;
        return;
    }
    for (lane, (own, new)) in row.iter_mut().zip(value).enumerate() {
        let take = 0u64.wrapping_sub(u64::from(mask >> lane & 1));
        *own = (*own & !take) | (new & take);
    }
}

/// Returns the value of a literal or a special register in each lane.
fn value(source: &RowValue, first_thread: u32, place: &SpecialRegisters) -> Doubles {
    let special = match source {
        RowValue::Literal(value) => return [*value; 32],
        RowValue::Special(special) => *special,
    };
    std::array::from_fn(|lane| u64::from(special_value(special, lane as u32, first_thread, place)))
}

fn special_value(special: Special, lane: u32, first_thread: u32, place: &SpecialRegisters) -> u32 {
    let axis = |values: [u32; 3], axis: u8| values[axis as usize];
    let clusters = [
        place.grid[0] / place.cluster.max(1),
        place.grid[1],
        place.grid[2],
    ];
    match special {
        Special::Tid(0) => first_thread + lane,
        Special::Tid(_) => 0,
        Special::Ntid(0) => place.threads,
        Special::Ntid(_) => 1,
        Special::Ctaid(at) => axis(place.block, at),
        Special::Nctaid(at) => axis(place.grid, at),
        Special::LaneId => lane,
        Special::WarpId => first_thread / 32,
        Special::LaneMask(relation) => lane_mask(relation, lane),
        Special::ClusterCtaRank | Special::ClusterCtaId(0) => place.rank,
        Special::ClusterCtaCount | Special::ClusterCtaShape(0) => place.cluster,
        Special::ClusterCtaId(_) => 0,
        Special::ClusterCtaShape(_) => 1,
        Special::ClusterId(0) => place.block[0] / place.cluster.max(1),
        Special::ClusterId(at) => axis(place.block, at),
        Special::ClusterCount(at) => axis(clusters, at),
        Special::SharedBytes => place.shared_bytes,
        Special::DynamicSharedBytes => place.dynamic_bytes,
        Special::SmId | Special::Clock => 0,
        Special::SmCount => 1,
    }
}

fn lane_mask(relation: Relation, lane: u32) -> u32 {
    let own = 1u32 << lane;
    match relation {
        Relation::Below => own - 1,
        Relation::AtMost => own | (own - 1),
        Relation::Equal => own,
        Relation::AtLeast => !(own - 1),
        Relation::Above => !(own | (own - 1)),
    }
}
