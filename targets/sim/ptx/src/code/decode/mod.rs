//! The decoder: one statement to one instruction. An unknown modifier is an
//! error. The decoder skips nothing because it looks harmless.

mod asynchronous;
mod barrier;
mod convert;
mod float;
mod integer;
mod memory;
mod moves;
mod parts;
mod tensor;
mod warp;

use super::layout::Layout;
use super::op::{
    Address, Base, Guard, Instruction, InstructionClass, NONE, Number, PtxOp, RowIndex,
};
use super::registers::RegisterRows;
use super::{Pool, RowValue};
use crate::error::PtxError;
use crate::text::{Class, Operand, ParsedEntry, Statement, Virtual};
use parts::Modifiers;

type Result<T> = std::result::Result<T, PtxError>;

/// The decoder of one statement.
pub struct Decoder<'a> {
    statement: &'a Statement,
    parts: Modifiers<'a>,
    rows: &'a RegisterRows,
    layout: &'a Layout,
    words: &'a mut Pool,
    doubles: &'a mut Pool,
}

/// Returns the exit at the end of a kernel.
pub fn end(entry: &ParsedEntry) -> Instruction {
    Instruction {
        guard: Guard {
            row: NONE,
            negate: false,
        },
        op: PtxOp::Exit,
        line: entry.statements.last().map_or(entry.line, |last| last.line),
        place: entry.statements.last().map_or(0, |last| last.place),
        class: InstructionClass::Control,
    }
}

impl<'a> Decoder<'a> {
    pub fn new(
        statement: &'a Statement,
        rows: &'a RegisterRows,
        layout: &'a Layout,
        words: &'a mut Pool,
        doubles: &'a mut Pool,
    ) -> Decoder<'a> {
        Decoder {
            statement,
            parts: Modifiers::new(&statement.opcode[1..]),
            rows,
            layout,
            words,
            doubles,
        }
    }

    /// Decodes the instruction.
    pub fn instruction(&mut self) -> Result<Instruction> {
        let (class, op) = self.family()?;
        // Every modifier must have been used up: one that the decoder ignored
        // could change the result or the ordering.
        if let Some(left) = self.parts.left() {
            return Err(self.unsupported(format!("`.{left}`")));
        }
        let guard = self.statement.guard;
        Ok(Instruction {
            guard: Guard {
                row: guard.map_or(NONE, |(register, _)| self.rows.row(register)),
                negate: guard.is_some_and(|(_, negate)| negate),
            },
            op,
            line: self.statement.line,
            place: self.statement.place,
            class,
        })
    }

    fn family(&mut self) -> Result<(InstructionClass, PtxOp)> {
        use InstructionClass as C;
        let found = match self.statement.part(0) {
            "bra" | "brx" | "ret" | "exit" | "trap" | "brkpt" => (C::Control, self.control()?),
            "mov" => (C::Move, self.mov()?),
            "createpolicy" => (C::Move, self.policy()?),
            "cvt" | "cvta" | "isspacep" | "mapa" | "getctarank" => (C::Convert, self.convert()?),
            "setp" | "set" | "selp" | "slct" | "testp" => (C::Integer, self.choose()?),
            "ld" | "ldu" | "st" | "atom" | "red" | "prefetch" | "prefetchu" | "discard"
            | "applypriority" => (C::Memory, self.memory()?),
            "shfl" | "vote" | "match" | "redux" | "activemask" | "elect" => (C::Warp, self.warp()?),
            "bar" | "barrier" | "fence" | "membar" | "griddepcontrol" | "nanosleep"
            | "setmaxnreg" => (C::Sync, self.barrier()?),
            "mbarrier" => (C::Sync, self.mbarrier()?),
            "cp" => (C::Async, self.copy()?),
            "wgmma" => (C::Tensor, self.wgmma()?),
            "mma" => (C::Tensor, self.mma()?),
            "ldmatrix" | "stmatrix" | "movmatrix" => (C::Memory, self.matrix()?),
            _ => self.arithmetic()?,
        };
        Ok(found)
    }

    fn arithmetic(&mut self) -> Result<(InstructionClass, PtxOp)> {
        let float = self.parts.float_type();
        if float {
            Ok((InstructionClass::Float, self.float()?))
        } else {
            Ok((InstructionClass::Integer, self.integer()?))
        }
    }

    fn control(&mut self) -> Result<PtxOp> {
        self.parts.flag("uni");
        match self.statement.part(0) {
            "bra" => Ok(PtxOp::Branch { to: self.label(0)? }),
            "brx" => {
                self.parts.flag("idx");
                let Some(Operand::Vector(labels)) = self.statement.operands.get(1) else {
                    return Err(self.unsupported("the list of targets"));
                };
                let to = labels.iter().map(|label| match label {
                    Operand::Label(at) => *at as u32,
                    _ => 0,
                });
                Ok(PtxOp::BranchTable {
                    index: self.word(0)?,
                    to: to.collect(),
                })
            }
            "trap" | "brkpt" => Ok(PtxOp::Trap),
            _ => Ok(PtxOp::Exit),
        }
    }

    fn label(&self, at: usize) -> Result<u32> {
        match self.statement.operands.get(at) {
            Some(Operand::Label(to)) => Ok(*to as u32),
            _ => Err(self.unsupported("a branch without a label")),
        }
    }

    /// Returns the error that names this instruction.
    pub fn unsupported(&self, what: impl Into<String>) -> PtxError {
        PtxError::Unsupported {
            line: self.statement.line,
            instruction: self.statement.name(),
            what: what.into(),
        }
    }

    fn operand(&self, at: usize) -> Result<&'a Operand> {
        let operand = self.statement.operands.get(at);
        operand.ok_or_else(|| self.unsupported(format!("operand {at} is missing")))
    }

    fn count(&self) -> usize {
        self.statement.operands.len()
    }

    /// Returns the 32-bit row of operand `at`.
    fn word(&mut self, at: usize) -> Result<RowIndex> {
        let operand = self.operand(at)?;
        self.word_of(operand)
    }

    fn word_of(&mut self, operand: &Operand) -> Result<RowIndex> {
        match operand {
            Operand::Register(register) if register.class == Class::Word => {
                Ok(self.rows.row(*register))
            }
            Operand::Sink => Ok(NONE),
            _ => {
                let source = self.source(operand, 32)?;
                Ok(self.words.row(source))
            }
        }
    }

    /// Returns the 64-bit row of operand `at`.
    fn double(&mut self, at: usize) -> Result<RowIndex> {
        let operand = self.operand(at)?;
        self.double_of(operand)
    }

    fn double_of(&mut self, operand: &Operand) -> Result<RowIndex> {
        match operand {
            Operand::Register(register) if register.class == Class::Double => {
                Ok(self.rows.row(*register))
            }
            Operand::Sink => Ok(NONE),
            _ => {
                let source = self.source(operand, 64)?;
                Ok(self.doubles.row(source))
            }
        }
    }

    fn source(&self, operand: &Operand, bits: u32) -> Result<RowValue> {
        let literal = |value: u64| match bits {
            32 => RowValue::Literal(value & 0xffff_ffff),
            _ => RowValue::Literal(value),
        };
        match operand {
            Operand::Immediate(value) => Ok(literal(*value)),
            Operand::Special(special) => Ok(RowValue::Special(*special)),
            Operand::Variable(at) => Ok(literal(self.layout.addresses[*at])),
            Operand::Parameter(offset) => Ok(literal(u64::from(*offset))),
            other => Err(self.unsupported(format!("an operand of {bits} bits that is {other:?}"))),
        }
    }

    /// Returns the predicate row of operand `at` and true if the operand
    /// negates it.
    fn predicate(&mut self, at: usize) -> Result<(RowIndex, bool)> {
        let operand = self.operand(at)?;
        self.predicate_of(operand)
    }

    fn predicate_of(&self, operand: &Operand) -> Result<(RowIndex, bool)> {
        let row = |register: &Virtual| self.rows.row(*register);
        match operand {
            Operand::Register(register) if register.class == Class::Predicate => {
                Ok((row(register), false))
            }
            Operand::Not(register) => Ok((row(register), true)),
            Operand::Immediate(value) => Ok((self.rows.truth(), *value == 0)),
            Operand::Sink => Ok((NONE, false)),
            other => Err(self.unsupported(format!("a predicate that is {other:?}"))),
        }
    }

    /// Returns the row of operand `at` in the file that holds numbers of this
    /// type.
    fn value(&mut self, at: usize, ty: Number) -> Result<RowIndex> {
        match ty.bits() {
            64 => self.double(at),
            _ => self.word(at),
        }
    }

    /// Returns a literal integer.
    fn literal(&self, at: usize) -> Result<u64> {
        match self.operand(at)? {
            Operand::Immediate(value) => Ok(*value),
            other => {
                Err(self.unsupported(format!("operand {at} must be a literal and is {other:?}")))
            }
        }
    }

    /// Decodes `[base+offset]`.
    fn address(&mut self, at: usize) -> Result<Address> {
        let operand = self.operand(at)?;
        self.address_of(operand)
    }

    fn address_of(&mut self, operand: &Operand) -> Result<Address> {
        let Operand::Memory { base, offset, .. } = operand else {
            return Err(self.unsupported(format!("an address that is {operand:?}")));
        };
        let fixed = |at: u64| Address {
            base: Base::Fixed,
            offset: offset.wrapping_add(at.cast_signed()),
        };
        Ok(match &**base {
            Operand::Register(register) if register.class == Class::Word => Address {
                base: Base::Word(self.rows.row(*register)),
                offset: *offset,
            },
            Operand::Register(register) if register.class == Class::Double => Address {
                base: Base::Double(self.rows.row(*register)),
                offset: *offset,
            },
            Operand::Immediate(value) => fixed(*value),
            Operand::Variable(at) => fixed(self.layout.addresses[*at]),
            Operand::Parameter(at) => fixed(u64::from(*at)),
            other => return Err(self.unsupported(format!("an address over {other:?}"))),
        })
    }

    /// Returns the operands behind the comma of `[base, ...]`.
    fn address_rest(&self, at: usize) -> Result<&'a [Operand]> {
        match self.operand(at)? {
            Operand::Memory { rest, .. } => Ok(rest),
            other => Err(self.unsupported(format!("an address that is {other:?}"))),
        }
    }

    /// Returns the parts of a vector; a single operand is a vector of one.
    fn vector(&self, at: usize) -> Result<Vec<&'a Operand>> {
        Ok(match self.operand(at)? {
            Operand::Vector(parts) => parts.iter().collect(),
            one => vec![one],
        })
    }

    /// Returns the 32-bit rows of a vector.
    fn word_rows(&mut self, at: usize) -> Result<Vec<RowIndex>> {
        let parts = self.vector(at)?;
        parts.into_iter().map(|part| self.word_of(part)).collect()
    }

    /// Returns the parts of `a|b`; the second is a sink when there is one part.
    fn pair(&self, at: usize) -> Result<(&'a Operand, &'a Operand)> {
        Ok(match self.operand(at)? {
            Operand::Pair(a, b) => (&**a, &**b),
            one => (one, &Operand::Sink),
        })
    }

    /// Takes the first type among the modifiers.
    fn number(&mut self) -> Result<Number> {
        let found = self.parts.number();
        found.ok_or_else(|| self.unsupported("its type"))
    }
}

impl Number {
    /// Returns the type of this name; untyped bits are unsigned.
    pub fn named(name: &str) -> Option<Number> {
        Some(match name {
            "u8" | "b8" => Number::U8,
            "u16" | "b16" => Number::U16,
            "u32" | "b32" => Number::U32,
            "u64" | "b64" => Number::U64,
            "s8" => Number::S8,
            "s16" => Number::S16,
            "s32" => Number::S32,
            "s64" => Number::S64,
            "f16" => Number::F16,
            "bf16" => Number::Bf16,
            "f32" => Number::F32,
            "f64" => Number::F64,
            "tf32" => Number::Tf32,
            _ => return None,
        })
    }

    /// Returns the bits of a value.
    pub const fn bits(self) -> u32 {
        match self {
            Number::U8 | Number::S8 => 8,
            Number::U16 | Number::S16 | Number::F16 | Number::Bf16 => 16,
            Number::U32 | Number::S32 | Number::F32 | Number::Tf32 => 32,
            Number::U64 | Number::S64 | Number::F64 => 64,
        }
    }

    /// Returns true for two's complement integers.
    pub const fn is_signed(self) -> bool {
        matches!(self, Number::S8 | Number::S16 | Number::S32 | Number::S64)
    }

    /// Returns true for floating-point formats.
    pub const fn is_float(self) -> bool {
        matches!(
            self,
            Number::F16 | Number::Bf16 | Number::F32 | Number::F64 | Number::Tf32
        )
    }
}
