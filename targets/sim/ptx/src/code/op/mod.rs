//! Decoded instructions.
//!
//! Operands are rows of a warp's register file. Literals and special registers
//! have rows of their own behind those of the registers, so reading an operand
//! needs no case distinction.

mod arithmetic;
mod engines;
mod memory;
mod threads;

pub use arithmetic::{
    Compare, Comparison, Convert, Float1, Float2, FloatTest, Half, HalfForm, Int1, Int2, Int3,
    Logic, Mode, Number, Rounding,
};
pub use engines::{
    AsyncOp, BulkOp, CopyAsync, Direction, MatrixOp, Mma, ReductionOp, TensorCopy, WgmmaA, WgmmaOp,
};
pub use memory::{Access, Address, Atomic, AtomicKind, AtomicType, Base, Order};
pub use threads::{
    BarrierReduce, BlockBarrier, ClusterBarrier, Fence, MbarrierKind, MbarrierOp, Shuffle,
    ShuffleMode, VoteKind, WarpOp,
};

use crate::text::Space;

/// The index of a row in one of the three files.
pub type Row = u16;

/// No row: an unused result or an absent predicate.
pub const NONE: Row = Row::MAX;

/// The predicate before an instruction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Guard {
    /// Row of the predicate, or [`NONE`].
    pub row: Row,
    pub negate: bool,
}

/// An instruction ready to run.
#[derive(Clone, Debug)]
pub struct Instruction {
    pub guard: Guard,
    pub op: Op,
    /// Line of the PTX.
    pub line: u32,
    /// Index of the place in the source.
    pub place: u32,
    pub class: InstructionClass,
}

/// The class under which an instruction is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstructionClass {
    Integer,
    Float,
    Convert,
    Move,
    Memory,
    Control,
    Warp,
    Tensor,
    Sync,
    Async,
}

/// The instructions of a warp.
#[derive(Clone, Debug)]
pub enum Op {
    Nop,
    Int2 {
        op: Int2,
        d: Row,
        a: Row,
        b: Row,
    },
    Int1 {
        op: Int1,
        d: Row,
        a: Row,
    },
    Int3 {
        op: Int3,
        d: Row,
        a: Row,
        b: Row,
        c: Row,
    },
    /// 16-bit integers in 32-bit rows.
    Short2 {
        op: Int2,
        signed: bool,
        d: Row,
        a: Row,
        b: Row,
    },
    Short1 {
        op: Int1,
        signed: bool,
        d: Row,
        a: Row,
    },
    ShortMulAdd {
        d: Row,
        a: Row,
        b: Row,
        c: Row,
    },
    Insert {
        d: Row,
        a: Row,
        b: Row,
        position: Row,
        length: Row,
    },
    Logic3 {
        d: Row,
        a: Row,
        b: Row,
        c: Row,
        table: u8,
    },
    Long2 {
        op: Int2,
        d: Row,
        a: Row,
        b: Row,
    },
    /// The shift amount is a 32-bit row.
    LongShift {
        op: Int2,
        d: Row,
        a: Row,
        b: Row,
    },
    Long1 {
        op: Int1,
        d: Row,
        a: Row,
    },
    /// Population count and the like, from 64 bits to 32.
    LongCount {
        op: Int1,
        d: Row,
        a: Row,
    },
    LongMulAdd {
        d: Row,
        a: Row,
        b: Row,
        c: Row,
    },
    LongInsert {
        d: Row,
        a: Row,
        b: Row,
        position: Row,
        length: Row,
    },
    LongField {
        signed: bool,
        d: Row,
        a: Row,
        position: Row,
        length: Row,
    },
    MulWide {
        signed: bool,
        d: Row,
        a: Row,
        b: Row,
    },
    MulWideAdd {
        signed: bool,
        d: Row,
        a: Row,
        b: Row,
        c: Row,
    },
    /// Adds or subtracts with the carry of the thread.
    Carry {
        subtract: bool,
        wide: bool,
        take: bool,
        give: bool,
        d: Row,
        a: Row,
        b: Row,
    },
    Float2 {
        op: Float2,
        mode: Mode,
        d: Row,
        a: Row,
        b: Row,
    },
    Float1 {
        op: Float1,
        mode: Mode,
        d: Row,
        a: Row,
    },
    FusedMulAdd {
        mode: Mode,
        d: Row,
        a: Row,
        b: Row,
        c: Row,
    },
    FloatTest {
        test: FloatTest,
        wide: bool,
        d: Row,
        a: Row,
    },
    Real2 {
        op: Float2,
        d: Row,
        a: Row,
        b: Row,
    },
    Real1 {
        op: Float1,
        d: Row,
        a: Row,
    },
    RealFusedMulAdd {
        d: Row,
        a: Row,
        b: Row,
        c: Row,
    },
    Half2 {
        op: Float2,
        form: HalfForm,
        d: Row,
        a: Row,
        b: Row,
    },
    Half1 {
        op: Float1,
        form: HalfForm,
        d: Row,
        a: Row,
    },
    HalfFusedMulAdd {
        form: HalfForm,
        d: Row,
        a: Row,
        b: Row,
        c: Row,
    },
    Compare(Box<Compare>),
    /// Sets 32 bits instead of a predicate.
    CompareSet {
        compare: Box<Compare>,
        d: Row,
        float: bool,
    },
    HalfComparePacked {
        half: Half,
        comparison: Comparison,
        p: Row,
        q: Row,
        a: Row,
        b: Row,
    },
    Select {
        d: Row,
        a: Row,
        b: Row,
        p: Row,
        negate: bool,
    },
    LongSelect {
        d: Row,
        a: Row,
        b: Row,
        p: Row,
        negate: bool,
    },
    /// Selects by the sign of c.
    SelectSign {
        float: bool,
        d: Row,
        a: Row,
        b: Row,
        c: Row,
    },
    Predicate2 {
        op: Logic,
        d: Row,
        a: Row,
        b: Row,
        /// Negation of `a` and of `b`.
        negate: [bool; 2],
    },
    PredicateMove {
        d: Row,
        a: Row,
        negate: bool,
    },
    Move {
        d: Row,
        a: Row,
    },
    LongMove {
        d: Row,
        a: Row,
    },
    /// Joins two words to 64 bits, or splits them.
    Join {
        d: Row,
        low: Row,
        high: Row,
    },
    Split {
        low: Row,
        high: Row,
        a: Row,
    },
    /// Joins two halves to a word, or splits them.
    ShortJoin {
        d: Row,
        low: Row,
        high: Row,
    },
    ShortSplit {
        low: Row,
        high: Row,
        a: Row,
    },
    /// Joins four halves to 64 bits, or splits them.
    ShortJoin4 {
        d: Row,
        parts: [Row; 4],
    },
    ShortSplit4 {
        parts: [Row; 4],
        a: Row,
    },
    Clock {
        d: Row,
        wide: bool,
    },
    Convert(Box<Convert>),
    /// Converts two floats to a packed pair; `high` comes from the first
    /// operand.
    ConvertPair {
        half: Half,
        rounding: Rounding,
        relu: bool,
        d: Row,
        high: Row,
        low: Row,
    },
    /// Converts an address of a space to a generic one, or back.
    ToGeneric {
        space: Space,
        wide: bool,
        d: Row,
        a: Row,
    },
    FromGeneric {
        space: Space,
        wide: bool,
        d: Row,
        a: Row,
    },
    IsSpace {
        space: Space,
        cluster: bool,
        wide: bool,
        d: Row,
        a: Row,
    },
    MapShared {
        wide: bool,
        d: Row,
        a: Row,
        rank: Row,
    },
    GetRank {
        wide: bool,
        d: Row,
        a: Row,
    },
    Branch {
        to: u32,
    },
    BranchTable {
        index: Row,
        to: Box<[u32]>,
    },
    Exit,
    Trap,
    Load(Box<Access>),
    Store(Box<Access>),
    Atomic(Box<Atomic>),
    Warp(Box<WarpOp>),
    Barrier(Box<BlockBarrier>),
    Cluster(ClusterBarrier),
    Mbarrier(Box<MbarrierOp>),
    Async(Box<AsyncOp>),
    Mma(Box<Mma>),
    Matrix(Box<MatrixOp>),
    Fence(Fence),
    /// Waits for the launches before this one.
    AwaitLaunches,
    SetMaxRegisters {
        grow: bool,
        count: u32,
    },
}
