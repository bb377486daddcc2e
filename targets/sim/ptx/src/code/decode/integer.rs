//! Decodes integer arithmetic and logic.

use super::{Decoder, Result};
use crate::code::op::{Int1, Int2, Int3, Logic, Number, PtxOp, RowIndex};

/// The part of a product that an instruction keeps.
#[derive(Clone, Copy, PartialEq)]
enum Half {
    Low,
    High,
    Wide,
}

impl Decoder<'_> {
    pub(super) fn integer(&mut self) -> Result<PtxOp> {
        match self.statement.part(0) {
            "mul" | "mad" | "mul24" | "mad24" => self.product(),
            "shl" | "shr" => self.shift(),
            "shf" => self.funnel(),
            "and" | "or" | "xor" | "not" => self.logic(),
            "lop3" => self.logic3(),
            "bfe" | "bfi" | "bfind" | "brev" | "clz" | "popc" | "bmsk" | "fns" => self.bits(),
            "prmt" => self.permute(),
            "addc" | "subc" | "madc" => self.carry(),
            "add" | "sub" if self.statement.has("cc") => self.carry(),
            "dp4a" => self.dot(),
            "sad" => self.sad(),
            _ => self.simple(),
        }
    }

    fn simple(&mut self) -> Result<PtxOp> {
        let saturate = self.parts.flag("sat");
        let relu = self.parts.flag("relu");
        let ty = self.number()?;
        let signed = ty.is_signed();
        let pick = |a, b| if signed { a } else { b };
        let op = match self.statement.part(0) {
            "add" if saturate => Int2::AddSaturated,
            "sub" if saturate => Int2::SubSaturated,
            "add" => Int2::Add,
            "sub" => Int2::Sub,
            "div" => pick(Int2::DivSigned, Int2::DivUnsigned),
            "rem" => pick(Int2::RemSigned, Int2::RemUnsigned),
            "min" if !relu => pick(Int2::MinSigned, Int2::MinUnsigned),
            "max" if !relu => pick(Int2::MaxSigned, Int2::MaxUnsigned),
            "neg" => return self.unary(Int1::Negate, ty),
            "abs" => return self.unary(Int1::Absolute, ty),
            "cnot" => return self.unary(Int1::LogicalNot, ty),
            _ => return Err(self.unsupported("the instruction")),
        };
        self.binary(op, ty)
    }

    fn binary(&mut self, op: Int2, ty: Number) -> Result<PtxOp> {
        let (d, a, b) = (self.value(0, ty)?, self.value(1, ty)?, self.value(2, ty)?);
        Ok(match ty.bits() {
            64 => PtxOp::Long2 { op, d, a, b },
            32 => PtxOp::Int2 { op, d, a, b },
            _ => PtxOp::Short2 {
                op,
                signed: ty.is_signed(),
                d,
                a,
                b,
            },
        })
    }

    fn unary(&mut self, op: Int1, ty: Number) -> Result<PtxOp> {
        let (d, a) = (self.value(0, ty)?, self.value(1, ty)?);
        Ok(match ty.bits() {
            64 => PtxOp::Long1 { op, d, a },
            32 => PtxOp::Int1 { op, d, a },
            _ => PtxOp::Short1 {
                op,
                signed: ty.is_signed(),
                d,
                a,
            },
        })
    }

    fn product(&mut self) -> Result<PtxOp> {
        let halves = [("lo", Half::Low), ("hi", Half::High), ("wide", Half::Wide)];
        let half = self.parts.one_of(&halves).unwrap_or(Half::Low);
        let ty = self.number()?;
        let stem = self.statement.part(0);
        let (add, short) = (stem.starts_with("mad"), stem.ends_with("24"));
        if half == Half::Wide {
            return self.wide_product(ty, add);
        }
        let signed = ty.is_signed();
        let op = match (half, short, signed) {
            (Half::Low, true, true) => (Int2::Mul24Signed, Int3::MulAdd24Signed),
            (Half::Low, true, false) => (Int2::Mul24Unsigned, Int3::MulAdd24Unsigned),
            (Half::Low, false, _) => (Int2::Mul, Int3::MulAdd),
            (_, false, true) => (Int2::MulHighSigned, Int3::MulAddHighSigned),
            (_, false, false) => (Int2::MulHighUnsigned, Int3::MulAddHighUnsigned),
            _ => return Err(self.unsupported("the high half of a 24-bit product")),
        };
        if ty.bits() == 16 && half == Half::High {
            return Err(self.unsupported("the high half of a 16-bit product"));
        }
        if add {
            self.multiply_add(op.1, ty)
        } else {
            self.binary(op.0, ty)
        }
    }

    fn multiply_add(&mut self, op: Int3, ty: Number) -> Result<PtxOp> {
        let (d, a) = (self.value(0, ty)?, self.value(1, ty)?);
        let (b, c) = (self.value(2, ty)?, self.value(3, ty)?);
        match (ty.bits(), op) {
            (64, Int3::MulAdd) => Ok(PtxOp::LongMulAdd { d, a, b, c }),
            (32, _) => Ok(PtxOp::Int3 { op, d, a, b, c }),
            (16, Int3::MulAdd) => Ok(PtxOp::ShortMulAdd { d, a, b, c }),
            _ => Err(self.unsupported("this width")),
        }
    }

    fn wide_product(&mut self, ty: Number, add: bool) -> Result<PtxOp> {
        let signed = ty.is_signed();
        let (a, b) = (self.word(1)?, self.word(2)?);
        match (ty.bits(), add) {
            (32, false) => Ok(PtxOp::MulWide {
                signed,
                d: self.double(0)?,
                a,
                b,
            }),
            (32, true) => Ok(PtxOp::MulWideAdd {
                signed,
                d: self.double(0)?,
                a,
                b,
                c: self.double(3)?,
            }),
            (16, false) => Ok(PtxOp::Int2 {
                op: if signed {
                    Int2::Mul16Signed
                } else {
                    Int2::Mul16Unsigned
                },
                d: self.word(0)?,
                a,
                b,
            }),
            _ => Err(self.unsupported("this width")),
        }
    }

    fn shift(&mut self) -> Result<PtxOp> {
        let ty = self.number()?;
        let op = match (self.statement.part(0), ty.is_signed()) {
            ("shl", _) => Int2::ShiftLeft,
            (_, true) => Int2::ShiftRightSigned,
            (_, false) => Int2::ShiftRightUnsigned,
        };
        match ty.bits() {
            64 => Ok(PtxOp::LongShift {
                op,
                d: self.double(0)?,
                a: self.double(1)?,
                b: self.word(2)?,
            }),
            _ => self.binary(op, ty),
        }
    }

    fn funnel(&mut self) -> Result<PtxOp> {
        let left = self.parts.one_of(&[("l", true), ("r", false)]) == Some(true);
        let wrap = self.parts.one_of(&[("wrap", true), ("clamp", false)]) == Some(true);
        self.number()?;
        let op = match (left, wrap) {
            (true, true) => Int3::FunnelLeftWrap,
            (true, false) => Int3::FunnelLeftClamp,
            (false, true) => Int3::FunnelRightWrap,
            (false, false) => Int3::FunnelRightClamp,
        };
        self.ternary(op)
    }

    fn ternary(&mut self, op: Int3) -> Result<PtxOp> {
        Ok(PtxOp::Int3 {
            op,
            d: self.word(0)?,
            a: self.word(1)?,
            b: self.word(2)?,
            c: self.word(3)?,
        })
    }

    fn logic(&mut self) -> Result<PtxOp> {
        let stem = self.statement.part(0);
        if self.parts.flag("pred") {
            return self.predicate_logic(stem);
        }
        let ty = self.number()?;
        match stem {
            "and" => self.binary(Int2::And, ty),
            "or" => self.binary(Int2::Or, ty),
            "xor" => self.binary(Int2::Xor, ty),
            _ => self.unary(Int1::Not, ty),
        }
    }

    fn predicate_logic(&mut self, stem: &str) -> Result<PtxOp> {
        let (d, _) = self.predicate(0)?;
        let (a, negate) = self.predicate(1)?;
        let op = match stem {
            "and" => Logic::And,
            "or" => Logic::Or,
            "xor" => Logic::Xor,
            _ => {
                return Ok(PtxOp::PredicateMove {
                    d,
                    a,
                    negate: !negate,
                });
            }
        };
        let (b, negate_b) = self.predicate(2)?;
        Ok(PtxOp::Predicate2 {
            op,
            d,
            a,
            b,
            negate: [negate, negate_b],
        })
    }

    fn logic3(&mut self) -> Result<PtxOp> {
        self.number()?;
        Ok(PtxOp::Logic3 {
            d: self.word(0)?,
            a: self.word(1)?,
            b: self.word(2)?,
            c: self.word(3)?,
            table: self.literal(4)? as u8,
        })
    }

    fn bits(&mut self) -> Result<PtxOp> {
        let shift = self.parts.flag("shiftamt");
        self.parts.flag("clamp");
        let ty = self.number()?;
        let signed = ty.is_signed();
        match (self.statement.part(0), ty.bits()) {
            ("popc", bits) => self.count_bits(Int1::Population, bits),
            ("clz", bits) => self.count_bits(Int1::LeadingZeros, bits),
            ("bfind", bits) => {
                let op = match (shift, signed) {
                    (true, true) => Int1::FindShiftSigned,
                    (true, false) => Int1::FindShiftUnsigned,
                    (false, true) => Int1::FindSigned,
                    (false, false) => Int1::FindUnsigned,
                };
                self.count_bits(op, bits)
            }
            ("brev", _) => self.unary(Int1::Reverse, ty),
            ("bfe", 32) => self.ternary(if signed {
                Int3::FieldSigned
            } else {
                Int3::FieldUnsigned
            }),
            ("bfe", _) => Ok(PtxOp::LongField {
                signed,
                d: self.double(0)?,
                a: self.double(1)?,
                position: self.word(2)?,
                length: self.word(3)?,
            }),
            ("bfi", bits) => self.insert(bits),
            ("bmsk", _) => self.binary(Int2::FieldMask, ty),
            _ => Err(self.unsupported("the instruction")),
        }
    }

    fn count_bits(&mut self, op: Int1, bits: u32) -> Result<PtxOp> {
        let d = self.word(0)?;
        Ok(match bits {
            64 => PtxOp::LongCount {
                op,
                d,
                a: self.double(1)?,
            },
            _ => PtxOp::Int1 {
                op,
                d,
                a: self.word(1)?,
            },
        })
    }

    fn insert(&mut self, bits: u32) -> Result<PtxOp> {
        let (position, length) = (self.word(3)?, self.word(4)?);
        Ok(match bits {
            64 => PtxOp::LongInsert {
                d: self.double(0)?,
                a: self.double(1)?,
                b: self.double(2)?,
                position,
                length,
            },
            _ => PtxOp::Insert {
                d: self.word(0)?,
                a: self.word(1)?,
                b: self.word(2)?,
                position,
                length,
            },
        })
    }

    fn permute(&mut self) -> Result<PtxOp> {
        let modes = [
            ("f4e", Int3::PermuteForward4),
            ("b4e", Int3::PermuteBackward4),
            ("rc8", Int3::PermuteRepeat8),
            ("ecl", Int3::PermuteEdgeLeft),
            ("ecr", Int3::PermuteEdgeRight),
            ("rc16", Int3::PermuteRepeat16),
        ];
        self.number()?;
        let op = self.parts.one_of(&modes).unwrap_or(Int3::Permute);
        self.ternary(op)
    }

    fn carry(&mut self) -> Result<PtxOp> {
        let stem = self.statement.part(0);
        if stem == "madc" {
            return Err(self.unsupported("the instruction"));
        }
        let give = self.parts.flag("cc");
        let ty = self.number()?;
        let (d, a, b): (RowIndex, RowIndex, RowIndex) =
            (self.value(0, ty)?, self.value(1, ty)?, self.value(2, ty)?);
        Ok(PtxOp::Carry {
            subtract: stem.starts_with("sub"),
            wide: ty.bits() == 64,
            take: stem.ends_with('c'),
            give,
            d,
            a,
            b,
        })
    }

    fn dot(&mut self) -> Result<PtxOp> {
        let (a, b) = (self.number()?, self.number()?);
        if a != b {
            return Err(self.unsupported("operands of different signs"));
        }
        self.ternary(if a.is_signed() {
            Int3::DotSigned
        } else {
            Int3::DotUnsigned
        })
    }

    fn sad(&mut self) -> Result<PtxOp> {
        let ty = self.number()?;
        if ty.bits() != 32 {
            return Err(self.unsupported("this width"));
        }
        self.ternary(if ty.is_signed() {
            Int3::SadSigned
        } else {
            Int3::SadUnsigned
        })
    }
}
