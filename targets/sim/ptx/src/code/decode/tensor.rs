//! Decodes the matrix instructions of a warp.

use super::{Decoder, Result};
use crate::code::op::{MatrixOp, Mma, Number, PtxOp};
use moesaic_hardware::mma::{Accumulator, MmaElement, MmaKind};

/// Returns the element of a matrix operand.
pub fn element(ty: Number) -> Option<MmaElement> {
    Some(match ty {
        Number::F16 => MmaElement::F16,
        Number::Bf16 => MmaElement::Bf16,
        Number::Tf32 => MmaElement::Tf32,
        Number::S8 => MmaElement::S8,
        Number::U8 => MmaElement::U8,
        _ => return None,
    })
}

fn accumulator(ty: Number) -> Option<Accumulator> {
    Some(match ty {
        Number::F32 => Accumulator::F32,
        Number::F16 => Accumulator::F16,
        Number::S32 => Accumulator::S32,
        _ => return None,
    })
}

impl Decoder<'_> {
    pub(super) fn mma(&mut self) -> Result<PtxOp> {
        for part in ["sync", "aligned", "row", "col"] {
            self.parts.flag(part);
        }
        let k = self.parts.prefixed("m16n8k").and_then(|k| k.parse().ok());
        let types = [
            self.number()?,
            self.number()?,
            self.number()?,
            self.number()?,
        ];
        let kind = k.zip(element(types[1])).zip(accumulator(types[0]));
        let kind = kind
            .filter(|_| types[0] == types[3] && types[1] == types[2])
            .and_then(|((k, element), accumulator)| MmaKind::new(k, element, accumulator));
        let kind = kind.ok_or_else(|| self.unsupported("its shape and types"))?;
        let mma = Mma {
            kind,
            d: self.word_rows(0)?,
            a: self.word_rows(1)?,
            b: self.word_rows(2)?,
            c: self.word_rows(3)?,
        };
        let fits = mma.d.len() == kind.c_registers()
            && mma.a.len() == kind.a_registers()
            && mma.b.len() == kind.b_registers()
            && mma.c.len() == kind.c_registers();
        if fits {
            Ok(PtxOp::Mma(Box::new(mma)))
        } else {
            Err(self.unsupported("another number of registers than its shape has"))
        }
    }

    pub(super) fn matrix(&mut self) -> Result<PtxOp> {
        let store = self.statement.part(0) == "stmatrix";
        if self.statement.part(0) == "movmatrix" {
            return Err(self.unsupported("the instruction"));
        }
        for part in ["sync", "aligned", "m8n8", "b16"] {
            self.parts.flag(part);
        }
        let transposed = self.parts.flag("trans");
        let counts = [("x1", 1), ("x2", 2), ("x4", 4)];
        let count = self.parts.one_of(&counts).unwrap_or(1);
        let space = self.shared_or_generic();
        let (values, address) = if store { (1, 0) } else { (0, 1) };
        let rows = self.word_rows(values)?;
        if rows.len() != count {
            return Err(self.unsupported("another number of registers than matrices"));
        }
        Ok(PtxOp::Matrix(Box::new(MatrixOp {
            store,
            transposed,
            address: self.address(address)?,
            space,
            rows,
        })))
    }
}
