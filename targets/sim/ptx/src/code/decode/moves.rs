//! Decodes moves, comparisons and selections.

use super::{Decoder, Result};
use crate::code::RowValue;
use crate::code::layout::PARAM_WINDOW;
use crate::code::op::{Compare, CompareOp, Half, Logic, NONE, Number, PtxOp, RowIndex};
use crate::text::{Class, Operand, Special};

impl<'a> Decoder<'a> {
    pub(super) fn mov(&mut self) -> Result<PtxOp> {
        if self.parts.flag("pred") {
            return self.predicate_move();
        }
        let ty = self.number()?;
        let (to, from) = (self.operand(0)?, self.operand(1)?);
        if let Operand::Special(Special::Clock) = from {
            return Ok(PtxOp::Clock {
                wide: ty.bits() == 64,
                d: self.value(0, ty)?,
            });
        }
        if let Operand::Parameter(offset) = from {
            return self.parameter_address(*offset, ty);
        }
        match (to, from) {
            (_, Operand::Vector(parts)) => self.join(ty, parts),
            (Operand::Vector(parts), _) => self.split(ty, parts),
            _ if ty.bits() == 64 => Ok(PtxOp::LongMove {
                d: self.double(0)?,
                a: self.double(1)?,
            }),
            _ => Ok(PtxOp::Move {
                d: self.word(0)?,
                a: self.word(1)?,
            }),
        }
    }

    /// Decodes the generic address of a parameter, which kernels pass to
    /// instructions that need a tensor map.
    fn parameter_address(&mut self, offset: u32, ty: Number) -> Result<PtxOp> {
        if ty.bits() != 64 {
            return Err(self.unsupported("a short address of a parameter"));
        }
        let source = RowValue::Literal(PARAM_WINDOW + u64::from(offset));
        Ok(PtxOp::LongMove {
            d: self.double(0)?,
            a: self.doubles.row(source),
        })
    }

    fn predicate_move(&mut self) -> Result<PtxOp> {
        let (d, _) = self.predicate(0)?;
        let (a, negate) = self.predicate(1)?;
        Ok(PtxOp::PredicateMove { d, a, negate })
    }

    fn join(&mut self, ty: Number, parts: &'a [Operand]) -> Result<PtxOp> {
        match (ty.bits(), parts) {
            (64, [low, high]) => Ok(PtxOp::Join {
                d: self.double(0)?,
                low: self.word_of(low)?,
                high: self.word_of(high)?,
            }),
            (64, [a, b, c, d]) => Ok(PtxOp::ShortJoin4 {
                d: self.double(0)?,
                parts: [
                    self.word_of(a)?,
                    self.word_of(b)?,
                    self.word_of(c)?,
                    self.word_of(d)?,
                ],
            }),
            (32, [low, high]) => Ok(PtxOp::ShortJoin {
                d: self.word(0)?,
                low: self.word_of(low)?,
                high: self.word_of(high)?,
            }),
            _ => Err(self.unsupported("a vector of this size")),
        }
    }

    fn split(&mut self, ty: Number, parts: &'a [Operand]) -> Result<PtxOp> {
        match (ty.bits(), parts) {
            (64, [low, high]) => Ok(PtxOp::Split {
                low: self.word_of(low)?,
                high: self.word_of(high)?,
                a: self.double(1)?,
            }),
            (64, [a, b, c, d]) => Ok(PtxOp::ShortSplit4 {
                parts: [
                    self.word_of(a)?,
                    self.word_of(b)?,
                    self.word_of(c)?,
                    self.word_of(d)?,
                ],
                a: self.double(1)?,
            }),
            (32, [low, high]) => Ok(PtxOp::ShortSplit {
                low: self.word_of(low)?,
                high: self.word_of(high)?,
                a: self.word(1)?,
            }),
            _ => Err(self.unsupported("a vector of this size")),
        }
    }

    /// Decodes `createpolicy`: caches are not modelled, so any number will do.
    pub(super) fn policy(&mut self) -> Result<PtxOp> {
        self.parts = super::Modifiers::new(&[]);
        let d = self.double(0)?;
        let a = self.double_of(&Operand::Immediate(0))?;
        Ok(PtxOp::LongMove { d, a })
    }

    pub(super) fn choose(&mut self) -> Result<PtxOp> {
        match self.statement.part(0) {
            "setp" => self.compare(),
            "set" => self.set(),
            "selp" => self.select(),
            "testp" => self.float_test(),
            _ => self.select_sign(),
        }
    }

    fn comparison(&mut self, ty: Number) -> Result<CompareOp> {
        let names = [
            ("eq", CompareOp::Eq),
            ("ne", CompareOp::Ne),
            ("lt", CompareOp::Lt),
            ("le", CompareOp::Le),
            ("gt", CompareOp::Gt),
            ("ge", CompareOp::Ge),
            ("lo", CompareOp::Lt),
            ("ls", CompareOp::Le),
            ("hi", CompareOp::Gt),
            ("hs", CompareOp::Ge),
            ("equ", CompareOp::EqOrNan),
            ("neu", CompareOp::NeOrNan),
            ("ltu", CompareOp::LtOrNan),
            ("leu", CompareOp::LeOrNan),
            ("gtu", CompareOp::GtOrNan),
            ("geu", CompareOp::GeOrNan),
            ("num", CompareOp::Number),
            ("nan", CompareOp::Nan),
        ];
        let found = self.parts.one_of(&names);
        let found = found.ok_or_else(|| self.unsupported("the comparison"))?;
        Ok(match found {
            // Ordered inequality of floats is false for NaN.
            CompareOp::Ne if ty.is_float() => CompareOp::Ne,
            found => found,
        })
    }

    fn compare(&mut self) -> Result<PtxOp> {
        if self.statement.has("f16x2") || self.statement.has("bf16x2") {
            return self.compare_packed();
        }
        let (compare, _) = self.compare_of(1)?;
        let (result, inverse) = self.pair(0)?;
        let compare = Compare {
            result: self.predicate_of(result)?.0,
            inverse: self.predicate_of(inverse)?.0,
            ..compare
        };
        Ok(PtxOp::Compare(Box::new(compare)))
    }

    /// Decodes the comparison of the operands from `at` on; the results stay
    /// open.
    fn compare_of(&mut self, at: usize) -> Result<(Compare, Number)> {
        self.parts.flag("ftz");
        let logic = [("and", Logic::And), ("or", Logic::Or), ("xor", Logic::Xor)];
        let logic = self.parts.one_of(&logic);
        let ty = self.number()?;
        let comparison = self.comparison(ty)?;
        let (a, b) = (self.value(at, ty)?, self.value(at + 1, ty)?);
        let (with, negate_with) = match logic {
            Some(_) => self.predicate(at + 2)?,
            None => (NONE, false),
        };
        let compare = Compare {
            ty,
            comparison,
            result: NONE,
            inverse: NONE,
            logic: logic.unwrap_or(Logic::And),
            with,
            negate_with,
            a,
            b,
        };
        Ok((compare, ty))
    }

    fn compare_packed(&mut self) -> Result<PtxOp> {
        self.parts.flag("ftz");
        let half = if self.parts.flag("f16x2") {
            Half::F16
        } else {
            self.parts.flag("bf16x2");
            Half::Bf16
        };
        let comparison = self.comparison(Number::F16)?;
        let (p, q) = self.pair(0)?;
        Ok(PtxOp::HalfComparePacked {
            half,
            comparison,
            p: self.predicate_of(p)?.0,
            q: self.predicate_of(q)?.0,
            a: self.word(1)?,
            b: self.word(2)?,
        })
    }

    /// Decodes `set`, whose result is all ones or 1.0.
    fn set(&mut self) -> Result<PtxOp> {
        let to = self.number()?;
        if to.bits() != 32 {
            return Err(self.unsupported("a result that is not 32 bits"));
        }
        let (compare, _) = self.compare_of(1)?;
        Ok(PtxOp::CompareSet {
            compare: Box::new(compare),
            d: self.word(0)?,
            float: to.is_float(),
        })
    }

    fn select(&mut self) -> Result<PtxOp> {
        let ty = self.number()?;
        let (p, negate) = self.predicate(3)?;
        let (d, a, b): (RowIndex, RowIndex, RowIndex) =
            (self.value(0, ty)?, self.value(1, ty)?, self.value(2, ty)?);
        Ok(match ty.bits() {
            64 => PtxOp::LongSelect { d, a, b, p, negate },
            _ => PtxOp::Select { d, a, b, p, negate },
        })
    }

    fn select_sign(&mut self) -> Result<PtxOp> {
        self.parts.flag("ftz");
        let (ty, by) = (self.number()?, self.number()?);
        if ty.bits() != 32 {
            return Err(self.unsupported("this width"));
        }
        Ok(PtxOp::SelectSign {
            float: by.is_float(),
            d: self.word(0)?,
            a: self.word(1)?,
            b: self.word(2)?,
            c: self.word(3)?,
        })
    }

    /// Returns the class of operand `at` if it is a register.
    pub(super) fn class(&self, at: usize) -> Option<Class> {
        match self.statement.operands.get(at) {
            Some(Operand::Register(register)) => Some(register.class),
            _ => None,
        }
    }
}
