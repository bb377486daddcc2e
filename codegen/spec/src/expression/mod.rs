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

mod error;
mod graph;
mod node;
mod parse;

pub use error::ExpressionError;
pub use node::{Id, MathFunction, Node};

use serde::{Deserialize, Serialize};
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

impl Expression {
    /// Longest text, in bytes.
    pub const MAX_TEXT: usize = parse::MAX_TEXT;

    /// Most operations of value and derivative together.
    pub const MAX_NODES: usize = graph::MAX_NODES;

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
