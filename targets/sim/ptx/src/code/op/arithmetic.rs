//! Operations on the registers of a lane.

use super::RowIndex;

/// Integer operations of two operands, any width.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Int2 {
    Add,
    Sub,
    Mul,
    MulHighSigned,
    MulHighUnsigned,
    Mul24Signed,
    Mul24Unsigned,
    /// The whole product of two signed 16-bit numbers.
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
    /// The signed sum, saturating at both ends of the range.
    AddSaturated,
    SubSaturated,
    FieldMask,
}

/// Integer operations of one operand, any width.
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

/// Integer operations of three or four operands.
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

/// Float operations of two operands.
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

/// Float operations of one operand.
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

/// Modifiers of a float operation: subnormals to zero, results to [0, 1],
/// negative results to zero.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct FloatMode {
    pub flush: bool,
    pub saturate: bool,
    pub relu: bool,
}

/// The element type of half-precision arithmetic.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Half {
    F16,
    Bf16,
}

/// Half-precision arithmetic on one or two elements per register.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HalfForm {
    pub half: Half,
    pub packed: bool,
    pub mode: FloatMode,
}

/// Comparisons; the unordered forms are true for NaN.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum CompareOp {
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

/// The combination of a comparison with a predicate.
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
    pub comparison: CompareOp,
    pub result: RowIndex,
    /// The second result: true where the comparison is false.
    pub inverse: RowIndex,
    pub logic: Logic,
    /// The predicate to combine with, or [`NONE`].
    pub with: RowIndex,
    pub negate_with: bool,
    pub a: RowIndex,
    pub b: RowIndex,
}

/// The rounding of a conversion.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rounding {
    Nearest,
    NearestAway,
    Zero,
    Down,
    Up,
}

/// The conversion of one number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Convert {
    pub to: Number,
    pub from: Number,
    pub rounding: Rounding,
    pub integral: bool,
    pub saturate: bool,
    pub flush: bool,
    pub relu: bool,
    /// The result is in the 64-bit file.
    pub wide_d: bool,
    pub wide_a: bool,
    pub d: RowIndex,
    pub a: RowIndex,
}

/// The property that `testp` tests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FloatTest {
    Finite,
    Infinite,
    Number,
    NotNumber,
    Normal,
    Subnormal,
}
