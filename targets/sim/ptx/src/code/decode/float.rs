//! Decodes floating-point arithmetic.

use super::{Decoder, Result};
use crate::code::op::{Float1, Float2, FloatMode, FloatTest, Half, HalfForm, Number, PtxOp};

/// The type in which floats are computed.
#[derive(Clone, Copy)]
enum Form {
    Single,
    Real,
    Half { half: Half, packed: bool },
}

impl Decoder<'_> {
    pub(super) fn float(&mut self) -> Result<PtxOp> {
        let form = self.form()?;
        let mode = FloatMode {
            flush: self.parts.flag("ftz"),
            saturate: self.parts.flag("sat"),
            relu: self.parts.flag("relu"),
        };
        self.rounding()?;
        let nan = self.parts.flag("NaN");
        let op = match self.statement.part(0) {
            "fma" | "mad" => return self.fused(form, mode),
            "add" => Float2::Add,
            "sub" => Float2::Sub,
            "mul" => Float2::Mul,
            "div" => Float2::Div,
            "min" if nan => Float2::MinNan,
            "max" if nan => Float2::MaxNan,
            "min" => Float2::Min,
            "max" => Float2::Max,
            "copysign" => Float2::CopySign,
            stem => {
                let op = float1(stem).ok_or_else(|| self.unsupported("the instruction"))?;
                return self.float1(op, form, mode);
            }
        };
        self.float2(op, form, mode)
    }

    /// Accepts rounding to nearest alone. `.approx` and `.full` are computed
    /// more exactly than the ISA requires.
    fn rounding(&mut self) -> Result<()> {
        for exact in ["rn", "rna", "approx", "full", "noftz"] {
            self.parts.flag(exact);
        }
        for other in ["rz", "rm", "rp"] {
            if self.parts.flag(other) {
                return Err(self.unsupported(format!("rounding `.{other}` of arithmetic")));
            }
        }
        Ok(())
    }

    fn form(&mut self) -> Result<Form> {
        for (name, half) in [("f16x2", Half::F16), ("bf16x2", Half::Bf16)] {
            if self.parts.flag(name) {
                return Ok(Form::Half { half, packed: true });
            }
        }
        let half = |half| Form::Half {
            half,
            packed: false,
        };
        match self.number()? {
            Number::F32 => Ok(Form::Single),
            Number::F64 => Ok(Form::Real),
            Number::F16 => Ok(half(Half::F16)),
            Number::Bf16 => Ok(half(Half::Bf16)),
            _ => Err(self.unsupported("its type")),
        }
    }

    fn fused(&mut self, form: Form, mode: FloatMode) -> Result<PtxOp> {
        if let Form::Real = form {
            return Ok(PtxOp::RealFusedMulAdd {
                d: self.double(0)?,
                a: self.double(1)?,
                b: self.double(2)?,
                c: self.double(3)?,
            });
        }
        let (d, a, b, c) = (self.word(0)?, self.word(1)?, self.word(2)?, self.word(3)?);
        Ok(match form {
            Form::Half { half, packed } => PtxOp::HalfFusedMulAdd {
                form: HalfForm { half, packed, mode },
                d,
                a,
                b,
                c,
            },
            _ => PtxOp::FusedMulAdd { mode, d, a, b, c },
        })
    }

    fn float2(&mut self, op: Float2, form: Form, mode: FloatMode) -> Result<PtxOp> {
        Ok(match form {
            Form::Real => PtxOp::Real2 {
                op,
                d: self.double(0)?,
                a: self.double(1)?,
                b: self.double(2)?,
            },
            Form::Half { half, packed } => PtxOp::Half2 {
                op,
                form: HalfForm { half, packed, mode },
                d: self.word(0)?,
                a: self.word(1)?,
                b: self.word(2)?,
            },
            // The second operand of `copysign` is the magnitude.
            Form::Single => PtxOp::Float2 {
                op,
                mode,
                d: self.word(0)?,
                a: self.word(1)?,
                b: self.word(2)?,
            },
        })
    }

    fn float1(&mut self, op: Float1, form: Form, mode: FloatMode) -> Result<PtxOp> {
        Ok(match form {
            Form::Real => PtxOp::Real1 {
                op,
                d: self.double(0)?,
                a: self.double(1)?,
            },
            Form::Half { half, packed } => PtxOp::Half1 {
                op,
                form: HalfForm { half, packed, mode },
                d: self.word(0)?,
                a: self.word(1)?,
            },
            Form::Single => PtxOp::Float1 {
                op,
                mode,
                d: self.word(0)?,
                a: self.word(1)?,
            },
        })
    }

    pub(super) fn float_test(&mut self) -> Result<PtxOp> {
        let tests = [
            ("finite", FloatTest::Finite),
            ("infinite", FloatTest::Infinite),
            ("number", FloatTest::Number),
            ("notanumber", FloatTest::NotNumber),
            ("normal", FloatTest::Normal),
            ("subnormal", FloatTest::Subnormal),
        ];
        let test = self.parts.one_of(&tests);
        let test = test.ok_or_else(|| self.unsupported("the question"))?;
        let ty = self.number()?;
        Ok(PtxOp::FloatTest {
            test,
            wide: ty.bits() == 64,
            d: self.predicate(0)?.0,
            a: self.value(1, ty)?,
        })
    }
}

fn float1(stem: &str) -> Option<Float1> {
    Some(match stem {
        "neg" => Float1::Negate,
        "abs" => Float1::Absolute,
        "rcp" => Float1::Reciprocal,
        "sqrt" => Float1::SquareRoot,
        "rsqrt" => Float1::ReciprocalRoot,
        "ex2" => Float1::Exp2,
        "lg2" => Float1::Log2,
        "sin" => Float1::Sine,
        "cos" => Float1::Cosine,
        "tanh" => Float1::Tanh,
        _ => return None,
    })
}
