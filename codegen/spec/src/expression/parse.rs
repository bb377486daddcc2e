//! From text to graph: recursive descent over the bytes.

use super::error::ExpressionError;
use super::graph::{Graph, MAX_POWER};
use super::node::{Id, MathFunction};
use crate::suggest;
use std::ops::Range;

/// Names of all callable functions.
const CALLS: [&str; 13] = [
    "exp", "log", "sqrt", "tanh", "sigmoid", "softplus", "erf", "abs", "relu", "step", "min",
    "max", "where",
];

/// Longest text, in bytes.
pub(super) const MAX_TEXT: usize = 1000;

/// Deepest nesting of parentheses and signs, so that recursion cannot overflow the stack.
const MAX_DEPTH: usize = 64;

type Parsed<T = Id> = Result<T, Box<ExpressionError>>;

/// Reads `text` into `graph` and returns the node of the whole.
pub(super) fn parse(text: &str, graph: &mut Graph) -> Result<Id, ExpressionError> {
    if text.len() > MAX_TEXT {
        let message = format!("the expression has {} bytes", text.len());
        let label = format!("at most {MAX_TEXT}");
        return Err(ExpressionError::new(0..text.len(), message).label(label));
    }
    let mut parser = Parser {
        text,
        at: 0,
        depth: 0,
        graph,
    };
    let whole = parser.sum().map_err(|error| *error)?;
    match parser.peek() {
        None => Ok(whole),
        Some(_) => Err(*parser.unexpected("an operator or the end")),
    }
}

struct Parser<'a> {
    text: &'a str,
    /// The index of the next byte.
    at: usize,
    depth: usize,
    graph: &'a mut Graph,
}

impl Parser<'_> {
    fn sum(&mut self) -> Parsed {
        let start = self.next_start();
        let mut sum = self.product()?;
        loop {
            sum = if self.take("+") {
                let right = self.product()?;
                self.graph.add(sum, right)
            } else if self.take("-") {
                let right = self.product()?;
                self.graph.subtract(sum, right)
            } else {
                return Ok(sum);
            };
            // Constants fold while parsing, so check after each step: an error then points at the
            // smallest part.
            self.check_number(sum, start)?;
        }
    }

    fn product(&mut self) -> Parsed {
        let start = self.next_start();
        let mut product = self.signed()?;
        loop {
            product = if self.take("*") {
                let right = self.signed()?;
                self.graph.multiply(product, right)
            } else if self.take("/") {
                let right = self.signed()?;
                self.graph.divide(product, right)
            } else {
                return Ok(product);
            };
            self.check_number(product, start)?;
        }
    }

    fn signed(&mut self) -> Parsed {
        let start = self.next_start();
        if !self.take("-") {
            return self.power();
        }
        self.deeper(start)?;
        let inner = self.signed()?;
        self.depth -= 1;
        Ok(self.graph.negate(inner))
    }

    fn power(&mut self) -> Parsed {
        let start = self.next_start();
        let base = self.atom()?;
        if !self.take("^") {
            return Ok(base);
        }
        let exponent_start = self.next_start();
        let negative = self.take("-");
        self.next_start();
        let digits = self.while_byte(|byte| byte.is_ascii_digit());
        // `x^1.5` would otherwise parse as `x^1` followed by an unexpected `.5`.
        let fraction = self.text[self.at..].starts_with('.');
        let exponent = self.text[digits.clone()].parse::<i32>().ok();
        match exponent.filter(|n| *n <= MAX_POWER && !fraction) {
            Some(n) => {
                let power = self.graph.power(base, if negative { -n } else { n });
                self.check_number(power, start)?;
                Ok(power)
            }
            None => {
                let next = self.text[exponent_start..].chars().next();
                // The span must cover at least one character, and end at a character boundary.
                let least = exponent_start + next.map_or(0, char::len_utf8);
                let end = digits.end.max(least);
                let message = if fraction || digits.is_empty() {
                    "an exponent must be a whole number"
                } else {
                    "this exponent is too large"
                };
                let error = ExpressionError::new(exponent_start..end, message)
                    .label(format!("from -{MAX_POWER} to {MAX_POWER}"))
                    .help("for other powers write exp(p * log(x)) or sqrt(x)");
                Err(Box::new(error))
            }
        }
    }

    fn atom(&mut self) -> Parsed {
        let start = self.next_start();
        match self.peek() {
            Some(b'(') => {
                self.at += 1;
                self.deeper(start)?;
                let inner = self.sum()?;
                self.depth -= 1;
                self.expect(")")?;
                Ok(inner)
            }
            Some(b'0'..=b'9' | b'.') => self.number(),
            Some(byte) if byte.is_ascii_alphabetic() => self.name(),
            _ => Err(self.unexpected("a number, `x`, a function or `(`")),
        }
    }

    fn number(&mut self) -> Parsed {
        let start = self.at;
        self.while_byte(|byte| byte.is_ascii_digit() || byte == b'.');
        let bytes = self.text.as_bytes();
        let sign = |at: usize| usize::from(matches!(bytes.get(at), Some(b'+' | b'-')));
        if matches!(bytes.get(self.at), Some(b'e' | b'E')) {
            let digits = self.at + 1 + sign(self.at + 1);
            if bytes.get(digits).is_some_and(u8::is_ascii_digit) {
                self.at = digits;
                self.while_byte(|byte| byte.is_ascii_digit());
            }
        }
        let span = start..self.at;
        match self.text[span.clone()].parse::<f64>() {
            // Kernels compute in f32, so a larger constant would become infinite there.
            Ok(value) if (value as f32).is_finite() => Ok(self.graph.constant(value)),
            Ok(_) => Err(Box::new(ExpressionError::new(
                span,
                "the number is beyond the range of f32",
            ))),
            Err(_) => Err(Box::new(ExpressionError::new(span, "this is not a number"))),
        }
    }

    /// `x`, a constant, or a call.
    fn name(&mut self) -> Parsed {
        let span = self.while_byte(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        let name = &self.text[span.clone()];
        match name {
            "x" => return Ok(self.graph.x()),
            "pi" => return Ok(self.graph.constant(std::f64::consts::PI)),
            _ if !CALLS.contains(&name) => return Err(unknown(name, span)),
            _ => {}
        }
        self.deeper(span.start)?;
        self.expect("(")?;
        let result = match name {
            "where" => self.choice()?,
            "min" | "max" => {
                let a = self.sum()?;
                self.expect(",")?;
                let b = self.sum()?;
                match name {
                    "min" => self.graph.min(a, b),
                    _ => self.graph.max(a, b),
                }
            }
            _ => self.function(name)?,
        };
        self.depth -= 1;
        self.expect(")")?;
        self.check_number(result, span.start)?;
        Ok(result)
    }

    fn function(&mut self, name: &str) -> Parsed {
        let argument = self.sum()?;
        let function = MathFunction::ALL.into_iter().find(|f| f.name() == name);
        Ok(match function {
            Some(function) => self.graph.call(function, argument),
            None if name == "relu" => self.graph.relu(argument),
            None => self.graph.step(argument),
        })
    }

    /// `left < right, then, otherwise`.
    fn choice(&mut self) -> Parsed {
        let left = self.sum()?;
        // The longer signs first, or `<=` would be read as `<`.
        let signs = ["<=", ">=", "<", ">"];
        let Some(sign) = signs.into_iter().find(|sign| self.take(sign)) else {
            return Err(self.unexpected("a comparison: `<`, `<=`, `>` or `>=`"));
        };
        let right = self.sum()?;
        self.expect(",")?;
        let then = self.sum()?;
        self.expect(",")?;
        let otherwise = self.sum()?;
        // `a > b` is `b < a`, so the graph needs only two comparisons.
        let pair = if sign.starts_with('<') {
            (left, right)
        } else {
            (right, left)
        };
        let or_equal = sign.len() == 2;
        Ok(self.graph.choose(pair, or_equal, then, otherwise))
    }

    /// Refuses a constant expression without a value, such as `log(0)`.
    fn check_number(&self, id: Id, start: usize) -> Parsed<()> {
        match self.graph.number(id) {
            Some(value) if !(value as f32).is_finite() => {
                let message = format!("this is {value}, which no kernel can use");
                Err(Box::new(ExpressionError::new(start..self.at, message)))
            }
            _ => Ok(()),
        }
    }

    fn deeper(&mut self, start: usize) -> Parsed<()> {
        self.depth += 1;
        if self.depth <= MAX_DEPTH {
            return Ok(());
        }
        let message = format!("more than {MAX_DEPTH} levels inside each other");
        Err(Box::new(ExpressionError::new(start..start + 1, message)))
    }

    /// Returns the next byte that is not blank.
    fn peek(&mut self) -> Option<u8> {
        let at = self.next_start();
        self.text.as_bytes().get(at).copied()
    }

    /// Skips blanks and returns the index of the byte after them.
    fn next_start(&mut self) -> usize {
        self.while_byte(|byte| matches!(byte, b' ' | b'\t'));
        self.at
    }

    fn while_byte(&mut self, wanted: impl Fn(u8) -> bool) -> Range<usize> {
        let start = self.at;
        let rest = &self.text.as_bytes()[start..];
        self.at += rest.iter().take_while(|byte| wanted(**byte)).count();
        start..self.at
    }

    fn take(&mut self, sign: &str) -> bool {
        let at = self.next_start();
        let found = self.text[at..].starts_with(sign);
        self.at += if found { sign.len() } else { 0 };
        found
    }

    fn expect(&mut self, sign: &str) -> Parsed<()> {
        if self.take(sign) {
            return Ok(());
        }
        Err(self.unexpected(&format!("`{sign}`")))
    }

    fn unexpected(&mut self, wanted: &str) -> Box<ExpressionError> {
        let at = self.next_start();
        let found = self.text[at..].chars().next();
        let message = match found {
            Some(found) => format!("`{}` cannot stand here", found.escape_debug()),
            None => "the expression ends too early".to_string(),
        };
        let span = match found {
            Some(found) => at..at + found.len_utf8(),
            None => at.saturating_sub(1)..at,
        };
        Box::new(ExpressionError::new(span, message).label(format!("expected {wanted}")))
    }
}

fn unknown(name: &str, span: Range<usize>) -> Box<ExpressionError> {
    let mut known = CALLS.to_vec();
    known.extend(["x", "pi"]);
    let label = match suggest::value(name, &known) {
        Some(meant) => format!("did you mean `{meant}`?"),
        None => "not known".to_string(),
    };
    let error = ExpressionError::new(span, format!("unknown name `{name}`"))
        .label(label)
        .help(format!("known are x, pi, {}", CALLS.join(", ")));
    Box::new(error)
}
