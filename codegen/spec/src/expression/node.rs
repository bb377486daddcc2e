//! The operations that an expression consists of.

/// A node's position in [`Expression::nodes`](crate::Expression::nodes); its operands come before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Id(pub(super) u32);

impl Id {
    /// Returns the index into [`Expression::nodes`](crate::Expression::nodes).
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// One operation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Node {
    /// The argument.
    X,
    /// A finite number.
    Constant(f64),
    /// `-a`.
    Negate(Id),
    /// `a + b`.
    Add(Id, Id),
    /// `a - b`.
    Subtract(Id, Id),
    /// `a * b`.
    Multiply(Id, Id),
    /// `a / b`.
    Divide(Id, Id),
    /// `a` to a power that is neither 0 nor 1.
    Power(Id, i32),
    /// A function of one argument.
    Call(MathFunction, Id),
    /// `then` where `left < right`, else `otherwise`, also if either is NaN.
    Choose {
        /// The left side of the comparison.
        left: Id,
        /// The right side of the comparison.
        right: Id,
        /// Whether equal operands choose `then` as well.
        or_equal: bool,
        /// The value where the comparison holds.
        then: Id,
        /// The value elsewhere.
        otherwise: Id,
    },
}

impl Node {
    /// Returns the operands, in the order of the fields.
    pub fn operands(self) -> impl Iterator<Item = Id> {
        let list = match self {
            Node::X | Node::Constant(_) => [None; 4],
            Node::Negate(a) | Node::Power(a, _) | Node::Call(_, a) => [Some(a), None, None, None],
            Node::Add(a, b) | Node::Subtract(a, b) | Node::Multiply(a, b) | Node::Divide(a, b) => {
                [Some(a), Some(b), None, None]
            }
            Node::Choose {
                left,
                right,
                then,
                otherwise,
                ..
            } => [left, right, then, otherwise].map(Some),
        };
        list.into_iter().flatten()
    }
}

/// A function that the kernels of every target provide.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MathFunction {
    /// `eˣ`.
    Exp,
    /// The natural logarithm.
    Log,
    /// The square root.
    Sqrt,
    /// The hyperbolic tangent.
    Tanh,
    /// `1 / (1 + e⁻ˣ)`.
    Sigmoid,
    /// `ln(1 + eˣ)`.
    Softplus,
    /// The error function.
    Erf,
    /// The absolute value.
    Abs,
}

impl MathFunction {
    /// Every function.
    pub const ALL: [MathFunction; 8] = [
        MathFunction::Exp,
        MathFunction::Log,
        MathFunction::Sqrt,
        MathFunction::Tanh,
        MathFunction::Sigmoid,
        MathFunction::Softplus,
        MathFunction::Erf,
        MathFunction::Abs,
    ];

    /// Returns its name in an expression.
    pub fn name(self) -> &'static str {
        match self {
            MathFunction::Exp => "exp",
            MathFunction::Log => "log",
            MathFunction::Sqrt => "sqrt",
            MathFunction::Tanh => "tanh",
            MathFunction::Sigmoid => "sigmoid",
            MathFunction::Softplus => "softplus",
            MathFunction::Erf => "erf",
            MathFunction::Abs => "abs",
        }
    }
}
