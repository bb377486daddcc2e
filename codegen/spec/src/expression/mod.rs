//! Activations written as an expression of `x`, and their derivatives.
//!
//! ```text
//! sum     = product { ("+" | "-") product }
//! product = signed { ("*" | "/") signed }
//! signed  = "-" signed | power
//! power   = atom [ "^" [ "-" ] digits ]
//! atom    = number | "x" | "pi" | "(" sum ")" | name "(" sum { "," sum } ")"
//!         | "where" "(" sum ("<" | "<=" | ">" | ">=") sum "," sum "," sum ")"
//! ```
//!
//! Functions are `exp log sqrt tanh sigmoid softplus erf abs relu step` of one
//! argument, `min` and `max` of two. Where a function has a kink its derivative is
//! that of the side it takes: `relu`, `step` and `abs` have slope 0 at 0.

mod graph;
mod parse;

use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::sync::Arc;

use graph::Graph;

/// A function of `x` and its derivative, which share one graph.
#[derive(Clone, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Expression {
    text: String,
    parsed: Arc<Parsed>,
}

struct Parsed {
    nodes: Vec<Node>,
    value: Id,
    slope: Id,
}

/// A node's position in [`Expression::nodes`]; its operands come before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Id(u32);

impl Id {
    /// Returns the index into [`Expression::nodes`].
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

/// A text that is not a valid expression.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ExpressionError {
    /// The problem.
    pub message: String,
    /// A few words shown beside the place.
    pub label: String,
    /// The accepted forms.
    pub help: Option<String>,
    /// Bytes of the text at fault.
    pub span: Range<usize>,
}

impl ExpressionError {
    fn new(span: Range<usize>, message: impl Into<String>) -> ExpressionError {
        ExpressionError {
            message: message.into(),
            label: String::new(),
            help: None,
            span,
        }
    }

    fn label(mut self, label: impl Into<String>) -> ExpressionError {
        self.label = label.into();
        self
    }

    fn help(mut self, help: impl Into<String>) -> ExpressionError {
        self.help = Some(help.into());
        self
    }
}

impl Expression {
    /// Longest text, in bytes.
    pub const MAX_TEXT: usize = 1000;

    /// Most operations of value and derivative together.
    pub const MAX_NODES: usize = 2000;

    /// Reads an expression and differentiates it.
    ///
    /// ```
    /// # mod moesaic { pub use moesaic_spec as spec; }
    /// use moesaic::spec::Expression;
    ///
    /// assert!(Expression::parse("x * sigmoid(1.7 * x)").is_ok());
    /// let error = Expression::parse("x * sigmod(x)").unwrap_err();
    /// assert_eq!((error.span, error.label.as_str()), (4..10, "did you mean `sigmoid`?"));
    /// ```
    ///
    /// # Errors
    /// The first problem of the text.
    pub fn parse(text: &str) -> Result<Expression, ExpressionError> {
        let mut graph = Graph::default();
        let value = parse::parse(text, &mut graph)?;
        let everything = 0..text.len();
        if !graph.uses_x(value) {
            let error = ExpressionError::new(everything, "the expression does not use `x`");
            return Err(error
                .label("is the same for every x")
                .help("such as \"x * sigmoid(x)\""));
        }
        let slope = graph.derivative(value);
        if let Some(problem) = graph.problem() {
            return Err(ExpressionError::new(everything, problem));
        }
        Ok(Expression {
            text: text.to_string(),
            parsed: Arc::new(Parsed {
                nodes: graph.into_nodes(),
                value,
                slope,
            }),
        })
    }

    /// Returns the text as written.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Returns all operations; operands come before their users.
    pub fn nodes(&self) -> &[Node] {
        &self.parsed.nodes
    }

    /// Returns the node of the value.
    pub fn value(&self) -> Id {
        self.parsed.value
    }

    /// Returns the node of the derivative with respect to `x`.
    pub fn slope(&self) -> Id {
        self.parsed.slope
    }
}

/// Compares the texts. Two texts of one function still make two kernels.
impl PartialEq for Expression {
    fn eq(&self, other: &Expression) -> bool {
        self.text == other.text
    }
}

impl Eq for Expression {}

impl std::fmt::Debug for Expression {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.text)
    }
}

impl TryFrom<String> for Expression {
    type Error = ExpressionError;

    fn try_from(text: String) -> Result<Expression, ExpressionError> {
        Expression::parse(&text)
    }
}

impl From<Expression> for String {
    fn from(expression: Expression) -> String {
        expression.text
    }
}
