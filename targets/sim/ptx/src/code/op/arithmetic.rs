//! Operations on the registers of a lane.

use super::Row;

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
