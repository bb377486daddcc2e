//! Sizes that depend on the token count, as data.
//!
//! Kernels are never specialised by the number of tokens, so buffer sizes and
//! launch grids are small expressions over it, evaluated at launch and
//! printed by `inspect`.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::{Add, Mul};

/// A non-negative size as a function of the token count.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Size {
    /// A size known at generation time.
    Const(u64),
    /// The number of tokens of this call.
    Tokens,
    /// The sum of both.
    Add(Box<Size>, Box<Size>),
    /// The product of both.
    Mul(Box<Size>, Box<Size>),
    /// The quotient by a constant, rounded up.
    CeilDiv(Box<Size>, u64),
    /// The quotient by a constant, rounded down.
    FloorDiv(Box<Size>, u64),
    /// The smaller of both.
    Min(Box<Size>, Box<Size>),
    /// The first size for up to so many tokens, the second for more.
    UpTo(u64, Box<Size>, Box<Size>),
}

impl Size {
    /// Returns `self / by`, rounded up. `by` must not be zero.
    pub fn ceil_div(self, by: u64) -> Size {
        match self {
            _ if by == 1 => self,
            Size::Const(n) => Size::Const(n.div_ceil(by)),
            size => Size::CeilDiv(Box::new(size), by),
        }
    }

    /// Returns `self / by`, rounded down. `by` must not be zero.
    pub fn floor_div(self, by: u64) -> Size {
        match self {
            _ if by == 1 => self,
            Size::Const(n) => Size::Const(n / by),
            size => Size::FloorDiv(Box::new(size), by),
        }
    }

    /// Returns the smaller of both.
    pub fn min(self, rhs: impl Into<Size>) -> Size {
        Size::Min(Box::new(self), Box::new(rhs.into()))
    }

    /// Returns `below` for up to `limit` tokens and `above` for more.
    pub fn up_to(limit: u64, below: Size, above: Size) -> Size {
        match above {
            // A smaller limit inside can never apply.
            Size::UpTo(lower, _, above) if lower <= limit => Size::up_to(limit, below, *above),
            above if below == above => above,
            above => Size::UpTo(limit, Box::new(below), Box::new(above)),
        }
    }

    /// Returns the size for `tokens` tokens. Saturates instead of wrapping.
    pub fn eval(&self, tokens: u64) -> u64 {
        match self {
            Size::Const(n) => *n,
            Size::Tokens => tokens,
            Size::Add(a, b) => a.eval(tokens).saturating_add(b.eval(tokens)),
            Size::Mul(a, b) => a.eval(tokens).saturating_mul(b.eval(tokens)),
            Size::CeilDiv(a, by) => a.eval(tokens).div_ceil(*by),
            Size::FloorDiv(a, by) => a.eval(tokens) / by,
            Size::Min(a, b) => a.eval(tokens).min(b.eval(tokens)),
            Size::UpTo(limit, below, _) if tokens <= *limit => below.eval(tokens),
            Size::UpTo(_, _, above) => above.eval(tokens),
        }
    }
}

impl From<u64> for Size {
    fn from(n: u64) -> Size {
        Size::Const(n)
    }
}

impl<R: Into<Size>> Add<R> for Size {
    type Output = Size;
    fn add(self, rhs: R) -> Size {
        match (self, rhs.into()) {
            (Size::Const(a), Size::Const(b)) => Size::Const(a + b),
            (a, Size::Const(0)) => a,
            (Size::Const(0), b) => b,
            (a, b) => Size::Add(Box::new(a), Box::new(b)),
        }
    }
}

impl<R: Into<Size>> Mul<R> for Size {
    type Output = Size;
    fn mul(self, rhs: R) -> Size {
        match (self, rhs.into()) {
            (Size::Const(a), Size::Const(b)) => Size::Const(a * b),
            (a, Size::Const(1)) => a,
            (Size::Const(1), b) => b,
            (a, b) => Size::Mul(Box::new(a), Box::new(b)),
        }
    }
}

/// Writes the size as a formula over `T`, the token count: `ceil(T*8/64)+128`.
impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Size::Const(n) => write!(f, "{n}"),
            Size::Tokens => f.write_str("T"),
            Size::Add(a, b) => write!(f, "{a}+{b}"),
            Size::Mul(a, b) => {
                let group = |f: &mut fmt::Formatter<'_>, size: &Size| match size {
                    Size::Add(..) => write!(f, "({size})"),
                    _ => write!(f, "{size}"),
                };
                group(f, a)?;
                f.write_str("*")?;
                group(f, b)
            }
            Size::CeilDiv(a, by) => write!(f, "ceil({a}/{by})"),
            Size::FloorDiv(a, by) => write!(f, "floor({a}/{by})"),
            Size::Min(a, b) => write!(f, "min({a}, {b})"),
            Size::UpTo(limit, below, above) => write!(f, "(T<={limit} ? {below} : {above})"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn evaluates_and_prints() {
        let size = (Size::Tokens * 8).ceil_div(64) + 128;
        assert_eq!(size.to_string(), "ceil(T*8/64)+128");
        assert_eq!(size.eval(0), 128);
        assert_eq!(size.eval(9), 130);
        let size = (Size::Tokens * 8).floor_div(64) + 1;
        assert_eq!(size.to_string(), "floor(T*8/64)+1");
        assert_eq!((size.eval(7), size.eval(8)), (1, 2));
        let size = Size::up_to(8, Size::Const(12), Size::Const(4));
        assert_eq!(size.to_string(), "(T<=8 ? 12 : 4)");
        assert_eq!((size.eval(0), size.eval(8), size.eval(9)), (12, 12, 4));
        let size = Size::up_to(9, Size::Const(0), size);
        assert_eq!(size.to_string(), "(T<=9 ? 0 : 4)");
    }

    #[test]
    fn constants_fold() {
        assert_eq!((Size::Const(3) * 4 + 0).ceil_div(5), Size::Const(3));
        assert_eq!((Size::Const(3) * 4).floor_div(5), Size::Const(2));
        assert_eq!(Size::up_to(8, Size::Tokens, Size::Tokens), Size::Tokens);
    }
}
