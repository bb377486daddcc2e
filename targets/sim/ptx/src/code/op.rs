//! Decoded instructions.
//!
//! Operands are rows of a warp's register file. Literals and special registers
//! have rows of their own, behind those of the registers, so that no operand
//! needs a case of its own when it is read.

use crate::text::Space;
use moesaic_units::mma::MmaKind;
use moesaic_units::wgmma::WgmmaKind;

/// A row of one of the three files.
pub type Row = u16;

/// No row: a result that is not wanted, a predicate that is not there.
pub const NONE: Row = Row::MAX;

/// The predicate before an instruction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Guard {
    /// [`NONE`] without one.
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
    /// Place in the source.
    pub place: u32,
    pub class: InstructionClass,
}

/// What an instruction counts as.
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

/// Two operands, integers of any width.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Int2 {
    Add,
    Sub,
    Mul,
    MulHighSigned,
    MulHighUnsigned,
    Mul24Signed,
    Mul24Unsigned,
    /// Products of 16-bit numbers, whole.
    Mul16Signed,
    Mul16Unsigned,
    DivSigned,
    DivUnsigned,
    RemSigned,
    RemUnsigned,
    MinSigned,
    MinUnsigned,
    MaxSigned,
    MaxUnsigned,
    And,
    Or,
    Xor,
    ShiftLeft,
    ShiftRightSigned,
    ShiftRightUnsigned,
    /// Saturating at the ends of the signed range.
    AddSaturated,
    SubSaturated,
    FieldMask,
}

/// One operand, integers of any width.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Int1 {
    Negate,
    Absolute,
    Not,
    CountNot,
    Population,
    LeadingZeros,
    Reverse,
    FindSigned,
    FindUnsigned,
    FindShiftSigned,
    FindShiftUnsigned,
    LogicalNot,
}

/// Three or four operands, integers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Int3 {
    MulAdd,
    MulAddHighSigned,
    MulAddHighUnsigned,
    MulAdd24Signed,
    MulAdd24Unsigned,
    SadSigned,
    SadUnsigned,
    FieldSigned,
    FieldUnsigned,
    FunnelLeftWrap,
    FunnelLeftClamp,
    FunnelRightWrap,
    FunnelRightClamp,
    Permute,
    PermuteForward4,
    PermuteBackward4,
    PermuteRepeat8,
    PermuteEdgeLeft,
    PermuteEdgeRight,
    PermuteRepeat16,
    DotSigned,
    DotUnsigned,
}

/// Two operands, floats.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Float2 {
    Add,
    Sub,
    Mul,
    Div,
    Min,
    Max,
    MinNan,
    MaxNan,
    CopySign,
}

/// One operand, floats.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Float1 {
    Negate,
    Absolute,
    Reciprocal,
    SquareRoot,
    ReciprocalRoot,
    Exp2,
    Log2,
    Sine,
    Cosine,
    Tanh,
    Canonical,
}

/// Subnormals to zero, results to [0, 1], negative results to zero.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Mode {
    pub flush: bool,
    pub saturate: bool,
    pub relu: bool,
}

/// The element of half-precision arithmetic.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Half {
    F16,
    Bf16,
}

/// Half-precision arithmetic, one or two elements per register.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HalfForm {
    pub half: Half,
    pub packed: bool,
    pub mode: Mode,
}

/// Comparisons; the unordered forms are true for NaN.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Comparison {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    EqOrNan,
    NeOrNan,
    LtOrNan,
    LeOrNan,
    GtOrNan,
    GeOrNan,
    Number,
    Nan,
}

/// How a comparison is combined with a predicate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Logic {
    And,
    Or,
    Xor,
}

/// The type of a number in a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Number {
    U8,
    U16,
    U32,
    U64,
    S8,
    S16,
    S32,
    S64,
    F16,
    Bf16,
    F32,
    F64,
    Tf32,
}

/// A comparison with its predicates.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Compare {
    pub ty: Number,
    pub comparison: Comparison,
    pub result: Row,
    /// The second result: the comparison was false.
    pub inverse: Row,
    pub logic: Logic,
    /// [`NONE`] when nothing is combined.
    pub with: Row,
    pub negate_with: bool,
    pub a: Row,
    pub b: Row,
}

/// How a conversion rounds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rounding {
    Nearest,
    NearestAway,
    Zero,
    Down,
    Up,
}

/// A conversion of one number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Convert {
    pub to: Number,
    pub from: Number,
    pub rounding: Rounding,
    pub integral: bool,
    pub saturate: bool,
    pub flush: bool,
    pub relu: bool,
    /// The registers are of the 64-bit file.
    pub wide_d: bool,
    pub wide_a: bool,
    pub d: Row,
    pub a: Row,
}

/// Where an address comes from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Base {
    Word(Row),
    Double(Row),
    /// The offset alone.
    Fixed,
}

/// An address: a base and an offset.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Address {
    pub base: Base,
    pub offset: i64,
}

/// Ordering and scope of an access, as far as checks care.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    Weak,
    /// `.volatile`, `.relaxed`: no race by itself, orders nothing.
    Relaxed,
    Acquire,
    Release,
    AcquireRelease,
}

/// A load or a store.
#[derive(Clone, Debug, PartialEq)]
pub struct Access {
    pub space: Space,
    /// Shared addresses may be of another block of the cluster.
    pub cluster: bool,
    pub address: Address,
    /// Bytes of one element.
    pub bytes: u8,
    /// Sign-extend loads narrower than the register.
    pub signed: bool,
    /// Rows of the 64-bit file.
    pub wide: bool,
    pub rows: Vec<Row>,
    pub order: Order,
    /// `.nc`: nobody writes it during the launch.
    pub constant: bool,
}

/// What an atomic does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomicKind {
    Add,
    Min,
    Max,
    And,
    Or,
    Xor,
    Exchange,
    CompareSwap,
    Increment,
    Decrement,
}

/// The type an atomic works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomicType {
    Number(Number),
    /// Two halves in 32 bits.
    Pair(Number),
}

/// `atom` or `red`.
#[derive(Clone, Debug, PartialEq)]
pub struct Atomic {
    pub space: Space,
    pub cluster: bool,
    pub address: Address,
    pub kind: AtomicKind,
    pub ty: AtomicType,
    pub bytes: u8,
    pub wide: bool,
    /// Old values; empty for `red`.
    pub results: Vec<Row>,
    pub operands: Vec<Row>,
    /// The new value of a compare and swap.
    pub swap: Row,
    pub order: Order,
}

/// How shuffles name their source.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ShuffleMode {
    Up,
    Down,
    Butterfly,
    Index,
}

/// `shfl.sync`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shuffle {
    pub mode: ShuffleMode,
    pub d: Row,
    pub p: Row,
    pub a: Row,
    pub b: Row,
    pub c: Row,
    pub mask: Row,
}

/// What a vote asks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum VoteKind {
    All,
    Any,
    Uniform,
    Ballot,
}

/// Instructions of a whole warp.
#[derive(Clone, Debug, PartialEq)]
pub enum WarpOp {
    Shuffle(Shuffle),
    Vote {
        kind: VoteKind,
        d: Row,
        a: Row,
        negate: bool,
        mask: Row,
    },
    MatchAny {
        d: Row,
        a: Row,
        wide: bool,
        mask: Row,
    },
    MatchAll {
        d: Row,
        p: Row,
        a: Row,
        wide: bool,
        mask: Row,
    },
    Reduce {
        op: Int2,
        d: Row,
        a: Row,
        mask: Row,
    },
    ActiveMask {
        d: Row,
    },
    Elect {
        d: Row,
        p: Row,
        mask: Row,
    },
    Barrier {
        mask: Row,
    },
}

/// Named barriers.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockBarrier {
    pub id: Row,
    /// [`NONE`]: every thread of the block.
    pub count: Row,
    /// Arrive and go on.
    pub arrive: bool,
    /// Every thread of a warp takes part.
    pub aligned: bool,
    /// What is computed over the threads.
    pub reduce: Option<BarrierReduce>,
}

/// A reduction over the threads of a barrier.
#[derive(Clone, Debug, PartialEq)]
pub struct BarrierReduce {
    pub kind: VoteKind,
    pub population: bool,
    pub d: Row,
    pub p: Row,
    pub negate: bool,
}

/// `mbarrier.*` on an address.
#[derive(Clone, Debug, PartialEq)]
pub struct Mbarrier {
    pub kind: MbarrierKind,
    pub address: Address,
    pub space: Space,
    pub cluster: bool,
    /// The state an arrival returns, or the predicate of a test.
    pub d: Row,
    /// Count, bytes, parity or state.
    pub a: Row,
    /// `.relaxed`: the operation orders nothing.
    pub relaxed: bool,
}

/// What is done to a barrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MbarrierKind {
    Init,
    Invalidate,
    Arrive,
    ArriveExpect,
    ArriveDrop,
    ExpectTx,
    CompleteTx,
    TestParity,
    TestState,
    TryParity,
    TryState,
    PendingCount,
    /// `cp.async.mbarrier.arrive`, counted or not.
    CopyArrive {
        counted: bool,
    },
}

/// `cp.async` of 4, 8 or 16 bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct CopyAsync {
    pub to: Address,
    pub from: Address,
    pub from_generic: bool,
    pub bytes: u8,
    /// How many bytes come from memory; the others are zero.
    pub source_bytes: Row,
    pub ignore: Option<(Row, bool)>,
}

/// Arithmetic of bulk reductions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reduction {
    pub kind: AtomicKind,
    /// `None` in the form with a tensor map, which knows the type.
    pub ty: Option<Number>,
}

/// A bulk copy in one dimension.
#[derive(Clone, Debug, PartialEq)]
pub struct Bulk {
    pub direction: Direction,
    pub to: Address,
    pub from: Address,
    pub bytes: Row,
    pub mbarrier: Option<Address>,
    pub multicast: Row,
    pub reduction: Option<Reduction>,
}

/// Which way a bulk copy goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    GlobalToShared,
    SharedToGlobal,
    SharedToCluster,
    PrefetchL2,
}

/// A bulk copy of a box.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorCopy {
    pub direction: Direction,
    pub map: Address,
    pub shared: Address,
    pub coordinates: Vec<Row>,
    pub mbarrier: Option<Address>,
    pub multicast: Row,
    pub reduction: Option<Reduction>,
}

/// `mma.sync`.
#[derive(Clone, Debug)]
pub struct Mma {
    pub kind: MmaKind,
    pub d: Vec<Row>,
    pub a: Vec<Row>,
    pub b: Vec<Row>,
    pub c: Vec<Row>,
}

/// `ldmatrix` and `stmatrix`.
#[derive(Clone, Debug, PartialEq)]
pub struct Matrix {
    pub store: bool,
    pub transposed: bool,
    pub address: Address,
    pub space: Space,
    pub rows: Vec<Row>,
}

/// The A operand of a wgmma.
#[derive(Clone, Debug, PartialEq)]
pub enum WgmmaA {
    Descriptor(Row),
    Registers(Vec<Row>),
}

/// `wgmma.mma_async`.
#[derive(Clone, Debug)]
pub struct Wgmma {
    pub kind: WgmmaKind,
    pub d: Vec<Row>,
    pub a: WgmmaA,
    pub b: Row,
    /// False: D is not added to.
    pub scale_d: Row,
    pub negate_a: bool,
    pub negate_b: bool,
    pub transpose_a: bool,
    pub transpose_b: bool,
}

/// Fences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fence {
    /// Block, cluster, device or system scope.
    Memory,
    /// Between ordinary accesses and those of the copy and matrix engines.
    ProxyAsync,
    /// After `mbarrier.init`.
    MbarrierInit,
    /// Other proxies: nothing here depends on them.
    Other,
}

/// Instructions of the asynchronous engines and their groups.
#[derive(Clone, Debug)]
pub enum AsyncOp {
    Copy(CopyAsync),
    CopyCommit,
    /// `None`: all.
    CopyWait(Option<u32>),
    Bulk(Bulk),
    Tensor(TensorCopy),
    BulkCommit,
    BulkWait {
        left: u32,
        read: bool,
    },
    Wgmma(Wgmma),
    WgmmaFence,
    WgmmaCommit,
    WgmmaWait(u32),
}

/// Cluster barrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClusterBarrier {
    Arrive { release: bool, aligned: bool },
    Wait { acquire: bool, aligned: bool },
}

/// Everything a warp can do.
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
    /// Population count and its like: 64 bits to 32.
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
    /// Add or subtract with the carry of the thread.
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
    /// A set of 32 bits instead of a predicate.
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
    /// By the sign of c.
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
    },
    PredicateMove {
        d: Row,
        a: Row,
        negate: bool,
    },
    /// Every lane the same.
    PredicateSet {
        d: Row,
        value: bool,
    },
    Move {
        d: Row,
        a: Row,
    },
    LongMove {
        d: Row,
        a: Row,
    },
    /// Two words to 64 bits, and back.
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
    /// Two halves to a word, and back.
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
    /// Four halves to 64 bits, and back.
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
    /// Two floats to a packed pair: `high` from the first operand.
    ConvertPair {
        half: Half,
        rounding: Rounding,
        relu: bool,
        d: Row,
        high: Row,
        low: Row,
    },
    /// Generic address of a space's address, and back.
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
        generic: bool,
        wide: bool,
        d: Row,
        a: Row,
        rank: Row,
    },
    GetRank {
        generic: bool,
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
    Mbarrier(Box<Mbarrier>),
    Async(Box<AsyncOp>),
    Mma(Box<Mma>),
    Matrix(Box<Matrix>),
    Fence(Fence),
    SetMaxRegisters {
        grow: bool,
        count: u32,
    },
}

/// What `testp` asks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FloatTest {
    Finite,
    Infinite,
    Number,
    NotNumber,
    Normal,
    Subnormal,
}
