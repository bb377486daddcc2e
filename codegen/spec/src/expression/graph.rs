//! The operations of an expression as a graph. Its constructors simplify, so equal parts exist once
//! and derivatives come out short.

use super::node::{Id, MathFunction, Node};

/// Most operations of value and derivative together.
pub(super) const MAX_NODES: usize = 2000;

/// Largest exponent of either sign.
pub(super) const MAX_POWER: i32 = 64;

/// Nodes in topological order: operands come first.
#[derive(Default)]
pub(super) struct Graph {
    nodes: Vec<Node>,
}

impl Graph {
    pub fn into_nodes(self) -> Vec<Node> {
        self.nodes
    }

    /// Returns the operation behind an id.
    pub fn node(&self, id: Id) -> Node {
        self.nodes[id.index()]
    }

    /// Returns the value of a node that is a constant.
    pub fn number(&self, id: Id) -> Option<f64> {
        match self.node(id) {
            Node::Constant(value) => Some(value),
            _ => None,
        }
    }

    fn is(&self, id: Id, value: f64) -> bool {
        self.number(id) == Some(value)
    }

    /// Returns the id of this node, which exists once. A linear search is cheap because expressions
    /// have few nodes.
    fn intern(&mut self, node: Node) -> Id {
        let known = self.nodes.iter().position(|known| *known == node);
        let index = known.unwrap_or_else(|| {
            self.nodes.push(node);
            self.nodes.len() - 1
        });
        Id(index as u32)
    }

    pub fn x(&mut self) -> Id {
        self.intern(Node::X)
    }

    pub fn constant(&mut self, value: f64) -> Id {
        self.intern(Node::Constant(value))
    }

    pub fn negate(&mut self, a: Id) -> Id {
        match self.node(a) {
            Node::Constant(value) => self.constant(-value),
            Node::Negate(inner) => inner,
            Node::Subtract(left, right) => self.subtract(right, left),
            _ => self.intern(Node::Negate(a)),
        }
    }

    pub fn add(&mut self, a: Id, b: Id) -> Id {
        match (self.node(a), self.node(b)) {
            (Node::Constant(x), Node::Constant(y)) => self.constant(x + y),
            (Node::Constant(0.0), _) => b,
            (_, Node::Constant(0.0)) => a,
            (_, Node::Negate(inner)) => self.subtract(a, inner),
            (Node::Negate(inner), _) => self.subtract(b, inner),
            _ => self.intern(Node::Add(a, b)),
        }
    }

    pub fn subtract(&mut self, a: Id, b: Id) -> Id {
        match (self.node(a), self.node(b)) {
            (Node::Constant(x), Node::Constant(y)) => self.constant(x - y),
            (Node::Constant(0.0), _) => self.negate(b),
            (_, Node::Constant(0.0)) => a,
            (_, Node::Negate(inner)) => self.add(a, inner),
            _ => self.intern(Node::Subtract(a, b)),
        }
    }

    /// Multiplies. Constants move to the left, where they fold into one.
    pub fn multiply(&mut self, a: Id, b: Id) -> Id {
        match (self.node(a), self.node(b)) {
            (Node::Constant(x), Node::Constant(y)) => self.constant(x * y),
            (_, Node::Constant(_)) => self.multiply(b, a),
            (Node::Constant(0.0), _) => a,
            (Node::Constant(1.0), _) => b,
            (Node::Constant(-1.0), _) => self.negate(b),
            (Node::Constant(x), Node::Multiply(c, inner)) if self.number(c).is_some() => {
                let product = self.constant(x * self.number(c).unwrap_or(1.0));
                self.multiply(product, inner)
            }
            (Node::Constant(x), Node::Negate(inner)) => {
                let negative = self.constant(-x);
                self.multiply(negative, inner)
            }
            (Node::Negate(inner), _) => {
                let product = self.multiply(inner, b);
                self.negate(product)
            }
            (_, Node::Negate(inner)) => {
                let product = self.multiply(a, inner);
                self.negate(product)
            }
            _ if a == b => self.power(a, 2),
            _ => self.intern(Node::Multiply(a, b)),
        }
    }

    /// Divides. `a / (1 + e to the c)` becomes `a * sigmoid(-c)`, whose derivative stays finite
    /// where the power overflows.
    pub fn divide(&mut self, a: Id, b: Id) -> Id {
        if let Some(exponent) = self.one_plus_exp(b) {
            let argument = self.negate(exponent);
            let sigmoid = self.call(MathFunction::Sigmoid, argument);
            return self.multiply(a, sigmoid);
        }
        match (self.node(a), self.node(b)) {
            (Node::Constant(x), Node::Constant(y)) => self.constant(x / y),
            (Node::Constant(0.0), _) => a,
            (_, Node::Constant(1.0)) => a,
            (Node::Negate(inner), _) => {
                let quotient = self.divide(inner, b);
                self.negate(quotient)
            }
            _ => self.intern(Node::Divide(a, b)),
        }
    }

    /// Returns the c of `1 + e to the c`.
    fn one_plus_exp(&self, id: Id) -> Option<Id> {
        let Node::Add(a, b) = self.node(id) else {
            return None;
        };
        let power = match (self.is(a, 1.0), self.is(b, 1.0)) {
            (true, _) => b,
            (_, true) => a,
            _ => return None,
        };
        match self.node(power) {
            Node::Call(MathFunction::Exp, exponent) => Some(exponent),
            _ => None,
        }
    }

    pub fn power(&mut self, a: Id, exponent: i32) -> Id {
        match (self.node(a), exponent) {
            (_, 0) => self.constant(1.0),
            (_, 1) => a,
            (Node::Constant(value), _) => self.constant(value.powi(exponent)),
            (Node::Power(inner, first), _) if (first * exponent).abs() <= MAX_POWER => {
                self.power(inner, first * exponent)
            }
            _ => self.intern(Node::Power(a, exponent)),
        }
    }

    pub fn call(&mut self, function: MathFunction, a: Id) -> Id {
        match (function, self.node(a)) {
            (_, Node::Constant(value)) => match folded(function, value) {
                Some(value) => self.constant(value),
                None => self.intern(Node::Call(function, a)),
            },
            (MathFunction::Log, _) => match self.one_plus_exp(a) {
                Some(exponent) => self.call(MathFunction::Softplus, exponent),
                None => self.intern(Node::Call(function, a)),
            },
            _ => self.intern(Node::Call(function, a)),
        }
    }

    /// Returns `then` where `left < right` (or equal), else `otherwise`.
    pub fn choose(
        &mut self,
        (left, right): (Id, Id),
        or_equal: bool,
        then: Id,
        otherwise: Id,
    ) -> Id {
        if then == otherwise {
            return then;
        }
        match (self.number(left), self.number(right)) {
            (Some(a), Some(b)) if a < b || (or_equal && a == b) => then,
            (Some(_), Some(_)) => otherwise,
            _ => self.intern(Node::Choose {
                left,
                right,
                or_equal,
                then,
                otherwise,
            }),
        }
    }

    /// Returns `relu(a)`, which keeps a NaN and has slope 0 at 0.
    pub fn relu(&mut self, a: Id) -> Id {
        let zero = self.constant(0.0);
        self.choose((a, zero), true, zero, a)
    }

    /// Returns 1 above 0, else 0.
    pub fn step(&mut self, a: Id) -> Id {
        let (zero, one) = (self.constant(0.0), self.constant(1.0));
        self.choose((zero, a), false, one, zero)
    }

    /// Returns the smaller operand. A constant goes second, so a NaN of the other operand stays.
    pub fn min(&mut self, a: Id, b: Id) -> Id {
        let (a, b) = if self.number(a).is_some() {
            (b, a)
        } else {
            (a, b)
        };
        self.choose((b, a), false, b, a)
    }

    /// Returns the larger operand; constants as in [`Graph::min`].
    pub fn max(&mut self, a: Id, b: Id) -> Id {
        let (a, b) = if self.number(a).is_some() {
            (b, a)
        } else {
            (a, b)
        };
        self.choose((a, b), false, b, a)
    }

    /// Returns true if the value of a node depends on x.
    pub fn uses_x(&self, id: Id) -> bool {
        let mut uses: Vec<bool> = Vec::with_capacity(self.nodes.len());
        for node in &self.nodes {
            let of = |id: Id| uses[id.index()];
            uses.push(*node == Node::X || node.operands().any(of));
        }
        uses[id.index()]
    }

    /// Returns the derivative of a node with respect to x. One pass differentiates each node once,
    /// because operands come first.
    pub fn derivative(&mut self, id: Id) -> Id {
        let mut slopes: Vec<Id> = Vec::with_capacity(id.index() + 1);
        for index in 0..=id.0 {
            let slope = self.slope(Id(index), &slopes);
            slopes.push(slope);
        }
        slopes[id.index()]
    }

    fn slope(&mut self, id: Id, slopes: &[Id]) -> Id {
        let of = |id: Id| slopes[id.index()];
        match self.node(id) {
            Node::X => self.constant(1.0),
            Node::Constant(_) => self.constant(0.0),
            Node::Negate(a) => self.negate(of(a)),
            Node::Add(a, b) => self.add(of(a), of(b)),
            Node::Subtract(a, b) => self.subtract(of(a), of(b)),
            Node::Multiply(a, b) => {
                let (left, right) = (self.multiply(of(a), b), self.multiply(a, of(b)));
                self.add(left, right)
            }
            // (a' - (a / b) b') / b rather than the quotient rule, because the square of b might
            // overflow.
            Node::Divide(a, b) => {
                let quotient = self.multiply(id, of(b));
                let difference = self.subtract(of(a), quotient);
                self.divide(difference, b)
            }
            Node::Power(a, exponent) => {
                let (factor, power) = (
                    self.constant(f64::from(exponent)),
                    self.power(a, exponent - 1),
                );
                let outer = self.multiply(factor, power);
                self.multiply(outer, of(a))
            }
            Node::Call(function, a) => {
                let outer = self.function_slope(function, a, id);
                self.multiply(outer, of(a))
            }
            Node::Choose {
                left,
                right,
                or_equal,
                then,
                otherwise,
            } => self.choose((left, right), or_equal, of(then), of(otherwise)),
        }
    }

    /// Returns the derivative of a function at `a`, where its value is `value`.
    fn function_slope(&mut self, function: MathFunction, a: Id, value: Id) -> Id {
        let one = self.constant(1.0);
        match function {
            MathFunction::Exp => value,
            MathFunction::Log => self.divide(one, a),
            MathFunction::Sqrt => {
                let half = self.constant(0.5);
                self.divide(half, value)
            }
            MathFunction::Tanh => {
                let square = self.power(value, 2);
                self.subtract(one, square)
            }
            MathFunction::Sigmoid => {
                let rest = self.subtract(one, value);
                self.multiply(value, rest)
            }
            MathFunction::Softplus => self.call(MathFunction::Sigmoid, a),
            MathFunction::Erf => {
                let square = self.power(a, 2);
                let exponent = self.negate(square);
                let bell = self.call(MathFunction::Exp, exponent);
                let scale = self.constant(std::f64::consts::FRAC_2_SQRT_PI);
                self.multiply(scale, bell)
            }
            MathFunction::Abs => {
                let (zero, minus) = (self.constant(0.0), self.constant(-1.0));
                let above = self.choose((zero, a), false, one, zero);
                self.choose((a, zero), false, minus, above)
            }
        }
    }

    /// Returns the reason the graph cannot become a kernel.
    pub fn problem(&self) -> Option<String> {
        let finite = |node: &Node| match node {
            Node::Constant(value) => (*value as f32).is_finite(),
            _ => true,
        };
        if self.nodes.len() > MAX_NODES {
            let most = MAX_NODES;
            return Some(format!(
                "the expression and its derivative have {} operations, at most {most} are possible",
                self.nodes.len()
            ));
        }
        let all = self.nodes.iter().all(finite);
        (!all).then(|| "the derivative has a constant beyond the range of f32".to_string())
    }
}

/// Evaluates a function of a constant. The error function is left to the kernel, since std has
/// none.
fn folded(function: MathFunction, x: f64) -> Option<f64> {
    Some(match function {
        MathFunction::Exp => x.exp(),
        MathFunction::Log => x.ln(),
        MathFunction::Sqrt => x.sqrt(),
        MathFunction::Tanh => x.tanh(),
        MathFunction::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        MathFunction::Softplus => x.max(0.0) + (-x.abs()).exp().ln_1p(),
        MathFunction::Abs => x.abs(),
        MathFunction::Erf => return None,
    })
}
