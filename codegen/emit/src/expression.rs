//! A custom activation as statements of a kernel.

use crate::literal::c_float;
use moesaic_spec::Expression;
use moesaic_spec::expression::{Id, MathFunction, Node};
use std::collections::BTreeSet;

/// The spelling of numbers and function names in a kernel.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Notation {
    /// Vectors of C.
    Vector,
    /// One f32 of CUDA and HIP.
    Scalar,
}

/// The longest part without a line and a name of its own.
const LONG: usize = 60;

/// The binding strength of a text, loosest first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Level {
    Sum,
    Product,
    Signed,
    Atom,
}

/// Returns the body of a function of `x` that returns the node `root`: a line for every part that
/// is used more than once, then the rest.
pub fn body(expression: &Expression, root: Id, notation: Notation) -> String {
    let nodes = expression.nodes();
    let mut writer = Writer {
        notation,
        nodes,
        uses: uses(nodes, root),
        texts: vec![(String::new(), Level::Atom); nodes.len()],
        lines: String::new(),
        names: 0,
    };
    for index in 0..=root.index() {
        if writer.uses[index] > 0 {
            writer.write(index);
        }
    }
    let x = nodes.iter().position(|node| *node == Node::X);
    if x.is_none_or(|x| writer.uses[x] == 0) {
        writer.lines += "    (void)x;\n";
    }
    let value = match nodes[root.index()] {
        Node::Constant(_) => writer.argument(root),
        _ => writer.at(root, Level::Sum),
    };
    format!("{}    return {value};", writer.lines)
}

/// Returns the functions that value and derivative call, by their names in expressions.
pub fn calls(expression: &Expression) -> Vec<String> {
    let called = expression.nodes().iter().filter_map(|node| match node {
        Node::Call(function, _) => Some(*function),
        _ => None,
    });
    let called: BTreeSet<MathFunction> = called.collect();
    called.iter().map(|f| f.name().to_string()).collect()
}

/// Returns the number of uses of each node in the text of `root`. The base of a power counts
/// several times, because its text does.
fn uses(nodes: &[Node], root: Id) -> Vec<u32> {
    let mut uses = vec![0; nodes.len()];
    uses[root.index()] = 1;
    for index in (0..=root.index()).rev() {
        if uses[index] > 0 {
            let times = if matches!(nodes[index], Node::Power(..)) {
                2
            } else {
                1
            };
            for operand in nodes[index].operands() {
                uses[operand.index()] += times;
            }
        }
    }
    uses
}

struct Writer<'a> {
    notation: Notation,
    nodes: &'a [Node],
    uses: Vec<u32>,
    texts: Vec<(String, Level)>,
    lines: String,
    names: usize,
}

impl Writer<'_> {
    /// Writes the text of a node whose operands have theirs.
    fn write(&mut self, index: usize) {
        let (text, level) = self.text(index);
        let leaf = matches!(self.nodes[index], Node::X | Node::Constant(_));
        let shared = self.uses[index] > 1 && !leaf;
        self.texts[index] = if shared || text.len() > LONG {
            (self.named(&text), Level::Atom)
        } else {
            (text, level)
        };
    }

    fn text(&mut self, index: usize) -> (String, Level) {
        use Level::{Atom, Product, Signed, Sum};
        match self.nodes[index] {
            Node::X => ("x".to_string(), Atom),
            Node::Constant(value) if value < 0.0 => (c_float(value), Signed),
            Node::Constant(value) => (c_float(value), Atom),
            Node::Negate(a) => (format!("-{}", self.at(a, Atom)), Signed),
            Node::Add(a, b) => (self.pair((a, Sum), "+", (b, Product)), Sum),
            Node::Subtract(a, b) => (self.pair((a, Sum), "-", (b, Product)), Sum),
            Node::Multiply(a, b) => (self.pair((a, Product), "*", (b, Signed)), Product),
            Node::Divide(a, b) => (self.pair((a, Product), "/", (b, Atom)), Product),
            Node::Power(a, exponent) => self.power(a, exponent),
            Node::Call(function, a) => {
                let text = format!("{}({})", self.function(function), self.argument(a));
                (text, Atom)
            }
            Node::Choose { .. } => (self.choice(index), Atom),
        }
    }

    fn pair(&self, left: (Id, Level), sign: &str, right: (Id, Level)) -> String {
        format!(
            "{} {sign} {}",
            self.at(left.0, left.1),
            self.at(right.0, right.1)
        )
    }

    /// Returns the text of a node, in parentheses where it is looser than that.
    fn at(&self, id: Id, level: Level) -> String {
        match &self.texts[id.index()] {
            (text, own) if *own >= level => text.clone(),
            (text, _) => format!("({text})"),
        }
    }

    /// Returns the text as an argument of a function: a vector, even for a number.
    fn argument(&self, id: Id) -> String {
        let text = self.at(id, Level::Sum);
        match (self.notation, self.nodes[id.index()]) {
            (Notation::Vector, Node::Constant(_)) => format!("broadcast({text})"),
            _ => text,
        }
    }

    /// Returns a power as a product of repeated squares.
    fn power(&mut self, base: Id, exponent: i32) -> (String, Level) {
        let mut square = self.at(base, Level::Atom);
        let mut factors: Vec<String> = Vec::new();
        let mut rest = exponent.unsigned_abs();
        while rest > 0 {
            if rest == 2 {
                factors.extend([square.clone(), square.clone()]);
                break;
            }
            if rest % 2 == 1 {
                factors.push(square.clone());
            }
            rest /= 2;
            if rest > 0 {
                square = self.named(&format!("{square} * {square}"));
            }
        }
        let product = factors.join(" * ");
        match (exponent < 0, factors.len()) {
            (false, _) => (product, Level::Product),
            (true, 1) => (format!("1.0f / {product}"), Level::Product),
            (true, _) => (format!("1.0f / ({product})"), Level::Product),
        }
    }

    fn choice(&self, index: usize) -> String {
        let Node::Choose {
            left,
            right,
            or_equal,
            then,
            otherwise,
        } = self.nodes[index]
        else {
            return String::new();
        };
        // A number stands on the right.
        let constant = matches!(self.nodes[left.index()], Node::Constant(_));
        let (a, sign, b) = if constant {
            (right, ">", left)
        } else {
            (left, "<", right)
        };
        let equal = if or_equal { "=" } else { "" };
        let (a, b) = (self.at(a, Level::Sum), self.at(b, Level::Sum));
        let (then, otherwise) = (self.argument(then), self.argument(otherwise));
        match self.notation {
            Notation::Vector => format!("select({a} {sign}{equal} {b}, {then}, {otherwise})"),
            Notation::Scalar => format!("({a} {sign}{equal} {b} ? {then} : {otherwise})"),
        }
    }

    /// Returns a line that gives a text a name.
    fn named(&mut self, text: &str) -> String {
        self.names += 1;
        let name = format!("t{}", self.names);
        let kind = match self.notation {
            Notation::Vector => "vec",
            Notation::Scalar => "const f32",
        };
        self.lines += &format!("    {kind} {name} = {text};\n");
        name
    }

    /// Returns the name that the prelude has for a function.
    fn function(&self, function: MathFunction) -> &'static str {
        let (vector, scalar) = match function {
            MathFunction::Exp => ("exp_f32", "exponential"),
            MathFunction::Log => ("log_f32", "natural_log"),
            MathFunction::Sqrt => ("sqrt_f32", "square_root"),
            MathFunction::Tanh => ("tanh_f32", "hyperbolic_tangent"),
            MathFunction::Sigmoid => ("sigmoid_f32", "sigmoid"),
            MathFunction::Softplus => ("softplus_f32", "softplus"),
            MathFunction::Erf => ("erf_f32", "error_function"),
            MathFunction::Abs => ("abs_f32", "absolute"),
        };
        match self.notation {
            Notation::Vector => vector,
            Notation::Scalar => scalar,
        }
    }
}
