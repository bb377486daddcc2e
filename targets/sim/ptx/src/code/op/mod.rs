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
    Compare, CompareOp, Convert, Float1, Float2, FloatMode, FloatTest, Half, HalfForm, Int1, Int2,
    Int3, Logic, Number, Rounding,
};
pub use engines::{
    AsyncOp, BulkOp, CopyAsync, Direction, MatrixOp, Mma, ReductionOp, TensorCopy, WgmmaA, WgmmaOp,
};
pub use memory::{Address, Atomic, AtomicKind, AtomicType, Base, MemoryAccess, MemoryOrder};
pub use threads::{
    BarrierReduce, BlockBarrier, ClusterBarrier, Fence, MbarrierKind, MbarrierOp, Shuffle,
    ShuffleMode, VoteKind, WarpOp,
};

use crate::text::StateSpace;

/// The index of a row in one of the three files.
pub type RowIndex = u16;

/// No row: an unused result or an absent predicate.
pub const NONE: RowIndex = RowIndex::MAX;

/// The predicate before an instruction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Guard {
    /// Row of the predicate, or [`NONE`].
    pub row: RowIndex,
    pub negate: bool,
}

/// An instruction ready to run.
#[derive(Clone, Debug)]
pub struct Instruction {
    pub guard: Guard,
    pub op: PtxOp,
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
pub enum PtxOp {
    Nop,
    Int2 {
        op: Int2,
        d: RowIndex,
        a: RowIndex,
        b: RowIndex,
    },
    Int1 {
        op: Int1,
        d: RowIndex,
        a: RowIndex,
    },
    Int3 {
        op: Int3,
        d: RowIndex,
        a: RowIndex,
        b: RowIndex,
        c: RowIndex,
    },
    /// 16-bit integers in 32-bit rows.
    Short2 {
        op: Int2,
        signed: bool,
        d: RowIndex,
        a: RowIndex,
        b: RowIndex,
    },
    Short1 {
        op: Int1,
        signed: bool,
        d: RowIndex,
        a: RowIndex,
    },
    ShortMulAdd {
        d: RowIndex,
        a: RowIndex,
        b: RowIndex,
        c: RowIndex,
    },
    Insert {
        d: RowIndex,
        a: RowIndex,
        b: RowIndex,
        position: RowIndex,
        length: RowIndex,
    },
    Logic3 {
        d: RowIndex,
        a: RowIndex,
        b: RowIndex,
        c: RowIndex,
        table: u8,
    },
    Long2 {
        op: Int2,
        d: RowIndex,
        a: RowIndex,
        b: RowIndex,
    },
    /// The shift amount is a 32-bit row.
    LongShift {
        op: Int2,
        d: RowIndex,
        a: RowIndex,
        b: RowIndex,
    },
    Long1 {
        op: Int1,
        d: RowIndex,
        a: RowIndex,
    },
    /// Population count and the like, from 64 bits to 32.
    LongCount {
        op: Int1,
        d: RowIndex,
        a: RowIndex,
    },
    LongMulAdd {
        d: RowIndex,
        a: RowIndex,
        b: RowIndex,
        c: RowIndex,
    },
    LongInsert {
        d: RowIndex,
        a: RowIndex,
        b: RowIndex,
        position: RowIndex,
        length: RowIndex,
    },
    LongField {
        signed: bool,
        d: RowIndex,
        a: RowIndex,
        position: RowIndex,
        length: RowIndex,
    },
    MulWide {
        signed: bool,
        d: RowIndex,
        a: RowIndex,
        b: RowIndex,
    },
    MulWideAdd {
        signed: bool,
        d: RowIndex,
        a: RowIndex,
        b: RowIndex,
        c: RowIndex,
    },
    /// Adds or subtracts with the carry of the thread.
    Carry {
        subtract: bool,
        wide: bool,
        take: bool,
        give: bool,
        d: RowIndex,
        a: RowIndex,
        b: RowIndex,
    },
    Float2 {
        op: Float2,
        mode: FloatMode,
        d: RowIndex,
        a: RowIndex,
        b: RowIndex,
    },
    Float1 {
        op: Float1,
        mode: FloatMode,
        d: RowIndex,
        a: RowIndex,
    },
    FusedMulAdd {
        mode: FloatMode,
        d: RowIndex,
        a: RowIndex,
        b: RowIndex,
        c: RowIndex,
    },
    FloatTest {
        test: FloatTest,
        wide: bool,
        d: RowIndex,
        a: RowIndex,
    },
    Real2 {
        op: Float2,
        d: RowIndex,
        a: RowIndex,
        b: RowIndex,
    },
    Real1 {
        op: Float1,
        d: RowIndex,
        a: RowIndex,
    },
    RealFusedMulAdd {
        d: RowIndex,
        a: RowIndex,
        b: RowIndex,
        c: RowIndex,
    },
    Half2 {
        op: Float2,
        form: HalfForm,
        d: RowIndex,
        a: RowIndex,
        b: RowIndex,
    },
    Half1 {
        op: Float1,
        form: HalfForm,
        d: RowIndex,
        a: RowIndex,
    },
    HalfFusedMulAdd {
        form: HalfForm,
        d: RowIndex,
        a: RowIndex,
        b: RowIndex,
        c: RowIndex,
    },
    Compare(Box<Compare>),
    /// Sets 32 bits instead of a predicate.
    CompareSet {
        compare: Box<Compare>,
        d: RowIndex,
        float: bool,
    },
    HalfComparePacked {
        half: Half,
        comparison: CompareOp,
        p: RowIndex,
        q: RowIndex,
        a: RowIndex,
        b: RowIndex,
    },
    Select {
        d: RowIndex,
        a: RowIndex,
        b: RowIndex,
        p: RowIndex,
        negate: bool,
    },
    LongSelect {
        d: RowIndex,
        a: RowIndex,
        b: RowIndex,
        p: RowIndex,
        negate: bool,
    },
    /// Selects by the sign of c.
    SelectSign {
        float: bool,
        d: RowIndex,
        a: RowIndex,
        b: RowIndex,
        c: RowIndex,
    },
    Predicate2 {
        op: Logic,
        d: RowIndex,
        a: RowIndex,
        b: RowIndex,
        /// Negation of `a` and of `b`.
        negate: [bool; 2],
    },
    PredicateMove {
        d: RowIndex,
        a: RowIndex,
        negate: bool,
    },
    Move {
        d: RowIndex,
        a: RowIndex,
    },
    LongMove {
        d: RowIndex,
        a: RowIndex,
    },
    /// Joins two words to 64 bits, or splits them.
    Join {
        d: RowIndex,
        low: RowIndex,
        high: RowIndex,
    },
    Split {
        low: RowIndex,
        high: RowIndex,
        a: RowIndex,
    },
    /// Joins two halves to a word, or splits them.
    ShortJoin {
        d: RowIndex,
        low: RowIndex,
        high: RowIndex,
    },
    ShortSplit {
        low: RowIndex,
        high: RowIndex,
        a: RowIndex,
    },
    /// Joins four halves to 64 bits, or splits them.
    ShortJoin4 {
        d: RowIndex,
        parts: [RowIndex; 4],
    },
    ShortSplit4 {
        parts: [RowIndex; 4],
        a: RowIndex,
    },
    Clock {
        d: RowIndex,
        wide: bool,
    },
    Convert(Box<Convert>),
    /// Converts two floats to a packed pair; `high` comes from the first
    /// operand.
    ConvertPair {
        half: Half,
        rounding: Rounding,
        relu: bool,
        d: RowIndex,
        high: RowIndex,
        low: RowIndex,
    },
    /// Converts an address of a space to a generic one, or back.
    ToGeneric {
        space: StateSpace,
        wide: bool,
        d: RowIndex,
        a: RowIndex,
    },
    FromGeneric {
        space: StateSpace,
        wide: bool,
        d: RowIndex,
        a: RowIndex,
    },
    IsSpace {
        space: StateSpace,
        cluster: bool,
        wide: bool,
        d: RowIndex,
        a: RowIndex,
    },
    MapShared {
        wide: bool,
        d: RowIndex,
        a: RowIndex,
        rank: RowIndex,
    },
    GetRank {
        wide: bool,
        d: RowIndex,
        a: RowIndex,
    },
    Branch {
        to: u32,
    },
    BranchTable {
        index: RowIndex,
        to: Box<[u32]>,
    },
    Exit,
    Trap,
    Load(Box<MemoryAccess>),
    Store(Box<MemoryAccess>),
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
