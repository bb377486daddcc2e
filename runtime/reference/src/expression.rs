//! Custom activations: every operation with its derivative beside it, so that tests do not rely on
//! the symbolic derivative.

use crate::math::{erf, sigmoid, softplus};
use moesaic_spec::Expression;
use moesaic_spec::expression::{MathFunction, Node};
use std::f64::consts::FRAC_2_SQRT_PI;

/// A value and its derivative with respect to x.
type Dual = (f64, f64);

/// Returns the value of an expression at x, and its derivative there.
pub(crate) fn evaluate(expression: &Expression, x: f64) -> Dual {
    let mut duals: Vec<Dual> = Vec::with_capacity(expression.nodes().len());
    for node in expression.nodes() {
        let of = |id: moesaic_spec::expression::Id| duals[id.index()];
        let dual = match *node {
            Node::X => (x, 1.0),
            Node::Constant(value) => (value, 0.0),
            Node::Negate(a) => (-of(a).0, -of(a).1),
            Node::Add(a, b) => (of(a).0 + of(b).0, of(a).1 + of(b).1),
            Node::Subtract(a, b) => (of(a).0 - of(b).0, of(a).1 - of(b).1),
            Node::Multiply(a, b) => (of(a).0 * of(b).0, of(a).1 * of(b).0 + of(a).0 * of(b).1),
            Node::Divide(a, b) => {
                let quotient = of(a).0 / of(b).0;
                (quotient, (of(a).1 - quotient * of(b).1) / of(b).0)
            }
            Node::Power(a, n) => {
                let slope = f64::from(n) * of(a).0.powi(n - 1);
                (of(a).0.powi(n), slope * of(a).1)
            }
            Node::Call(function, a) => {
                let (value, slope) = call(function, of(a).0);
                (value, slope * of(a).1)
            }
            Node::Choose {
                left,
                right,
                or_equal,
                then,
                otherwise,
            } => {
                let (left, right) = (of(left).0, of(right).0);
                let holds = left < right || (or_equal && left == right);
                of(if holds { then } else { otherwise })
            }
        };
        duals.push(dual);
    }
    duals[expression.value().index()]
}

/// Returns a function's value and derivative.
fn call(function: MathFunction, x: f64) -> Dual {
    match function {
        MathFunction::Exp => (x.exp(), x.exp()),
        MathFunction::Log => (x.ln(), 1.0 / x),
        MathFunction::Sqrt => (x.sqrt(), 0.5 / x.sqrt()),
        MathFunction::Tanh => (x.tanh(), 1.0 - x.tanh() * x.tanh()),
        MathFunction::Sigmoid => (sigmoid(x), sigmoid(x) * sigmoid(-x)),
        MathFunction::Softplus => (softplus(x), sigmoid(x)),
        MathFunction::Erf => (erf(x), FRAC_2_SQRT_PI * (-x * x).exp()),
        MathFunction::Abs => (x.abs(), if x == 0.0 { 0.0 } else { x.signum() }),
    }
}
