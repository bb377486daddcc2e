//! Decodes conversions between numbers and between address spaces.

use super::{Decoder, Result};
use crate::code::op::{Convert, Half, Number, PtxOp, Rounding, RowIndex};
use crate::text::{Class, Operand, StateSpace};

impl Decoder<'_> {
    pub(super) fn convert(&mut self) -> Result<PtxOp> {
        match self.statement.part(0) {
            "cvt" => self.number_conversion(),
            "cvta" => self.address_conversion(),
            "isspacep" => self.is_space(),
            "mapa" => self.map_shared(),
            _ => self.get_rank(),
        }
    }

    fn number_conversion(&mut self) -> Result<PtxOp> {
        if self.parts.flag("pack") {
            return Err(self.unsupported("`.pack`"));
        }
        let (rounding, integral) = self.rounding_of();
        let (saturate, flush) = (self.parts.flag("sat"), self.parts.flag("ftz"));
        let relu = self.parts.flag("relu");
        for (name, half) in [("f16x2", Half::F16), ("bf16x2", Half::Bf16)] {
            if self.parts.flag(name) {
                self.number()?;
                return Ok(PtxOp::ConvertPair {
                    half,
                    rounding,
                    relu,
                    d: self.word(0)?,
                    high: self.word(1)?,
                    low: self.word(2)?,
                });
            }
        }
        let (to, from) = (self.number()?, self.number()?);
        self.parts.flag("satfinite");
        Ok(PtxOp::Convert(Box::new(Convert {
            to,
            from,
            rounding,
            integral,
            saturate,
            flush,
            relu,
            wide_d: self.is_wide(0, to),
            wide_a: self.is_wide(1, from),
            d: self.sized(0, to)?,
            a: self.sized(1, from)?,
        })))
    }

    /// Returns true if the register is of the 64-bit file. Registers may be
    /// wider than the number in them.
    fn is_wide(&self, at: usize, ty: Number) -> bool {
        ty.bits() == 64 || self.class(at) == Some(Class::Double)
    }

    fn sized(&mut self, at: usize, ty: Number) -> Result<RowIndex> {
        if self.is_wide(at, ty) {
            self.double(at)
        } else {
            self.word(at)
        }
    }

    fn rounding_of(&mut self) -> (Rounding, bool) {
        let names = [
            ("rni", (Rounding::Nearest, true)),
            ("rzi", (Rounding::Zero, true)),
            ("rmi", (Rounding::Down, true)),
            ("rpi", (Rounding::Up, true)),
            ("rna", (Rounding::NearestAway, false)),
            ("rn", (Rounding::Nearest, false)),
            ("rz", (Rounding::Zero, false)),
            ("rm", (Rounding::Down, false)),
            ("rp", (Rounding::Up, false)),
        ];
        self.parts
            .one_of(&names)
            .unwrap_or((Rounding::Nearest, false))
    }

    /// Reads the state space among the modifiers; true if shared memory of the
    /// whole cluster is meant.
    pub(super) fn space(&mut self) -> (StateSpace, bool) {
        let names = [
            ("global", (StateSpace::Global, false)),
            ("shared::cluster", (StateSpace::Shared, true)),
            ("shared::cta", (StateSpace::Shared, false)),
            ("shared", (StateSpace::Shared, false)),
            ("local", (StateSpace::Local, false)),
            ("const", (StateSpace::Const, false)),
            ("param::entry", (StateSpace::Param, false)),
            ("param", (StateSpace::Param, false)),
        ];
        self.parts
            .one_of(&names)
            .unwrap_or((StateSpace::Generic, true))
    }

    fn address_conversion(&mut self) -> Result<PtxOp> {
        let back = self.parts.flag("to");
        let (space, _) = self.space();
        let ty = self.number()?;
        let wide = ty.bits() == 64;
        let (d, a) = (self.value(0, ty)?, self.value(1, ty)?);
        Ok(if back {
            PtxOp::FromGeneric { space, wide, d, a }
        } else {
            PtxOp::ToGeneric { space, wide, d, a }
        })
    }

    fn is_space(&mut self) -> Result<PtxOp> {
        let (space, cluster) = self.space();
        let wide = self.class(1) == Some(Class::Double);
        Ok(PtxOp::IsSpace {
            space,
            cluster,
            wide,
            d: self.predicate(0)?.0,
            a: if wide { self.double(1)? } else { self.word(1)? },
        })
    }

    fn map_shared(&mut self) -> Result<PtxOp> {
        self.space();
        let ty = self.number()?;
        if matches!(self.operand(1)?, Operand::Sink) {
            return Err(self.unsupported("an address that is not there"));
        }
        Ok(PtxOp::MapShared {
            wide: ty.bits() == 64,
            d: self.value(0, ty)?,
            a: self.value(1, ty)?,
            rank: self.word(2)?,
        })
    }

    fn get_rank(&mut self) -> Result<PtxOp> {
        self.space();
        let ty = self.number()?;
        Ok(PtxOp::GetRank {
            wide: ty.bits() == 64,
            d: self.word(0)?,
            a: self.value(1, ty)?,
        })
    }
}
