//! Decodes loads, stores and atomics.

use super::{Decoder, Result};
use crate::code::op::{
    Address, Atomic, AtomicKind, AtomicType, MemoryAccess, MemoryOrder, NONE, Number, PtxOp,
    RowIndex,
};
use crate::text::{Class, Operand, StateSpace};

impl Decoder<'_> {
    pub(super) fn memory(&mut self) -> Result<PtxOp> {
        match self.statement.part(0) {
            "ld" | "ldu" => self.load(),
            "st" => self.store(),
            "atom" | "red" => self.atomic(),
            // Hints change nothing that can be observed.
            _ => {
                self.parts = super::Modifiers::new(&[]);
                Ok(PtxOp::Nop)
            }
        }
    }

    /// Reads ordering, scope and cache modifiers.
    fn order(&mut self) -> MemoryOrder {
        for scope in ["cta", "cluster", "gpu", "sys"] {
            self.parts.flag(scope);
        }
        let names = [
            ("weak", MemoryOrder::Weak),
            ("volatile", MemoryOrder::Relaxed),
            ("relaxed", MemoryOrder::Relaxed),
            ("acq_rel", MemoryOrder::AcquireRelease),
            ("acquire", MemoryOrder::Acquire),
            ("release", MemoryOrder::Release),
        ];
        let order = self.parts.one_of(&names).unwrap_or(MemoryOrder::Weak);
        self.parts.flag("mmio");
        order
    }

    fn lanes_of_vector(&mut self) -> usize {
        let names = [("v2", 2), ("v4", 4), ("v8", 8)];
        self.parts.one_of(&names).unwrap_or(1)
    }

    fn access(&mut self, values: usize, address: usize) -> Result<MemoryAccess> {
        let order = self.order();
        let (space, cluster) = self.space();
        let constant = self.parts.flag("nc");
        self.parts.cache_hints();
        let count = self.lanes_of_vector();
        let ty = self.number()?;
        let parts = self.vector(values)?;
        if parts.len() != count {
            return Err(self.unsupported("a vector of another size than its type"));
        }
        // A register may be wider than the value that is moved.
        let is_double =
            |part: &&Operand| matches!(part, Operand::Register(r) if r.class == Class::Double);
        let wide = ty.bits() == 64 || parts.iter().any(is_double);
        let rows = parts.into_iter().map(|part| {
            if wide {
                self.double_of(part)
            } else {
                self.word_of(part)
            }
        });
        Ok(MemoryAccess {
            rows: rows.collect::<Result<Vec<RowIndex>>>()?,
            space,
            cluster,
            address: self.address(address)?,
            bytes: (ty.bits() / 8) as u8,
            signed: ty.is_signed(),
            wide,
            order,
            constant,
        })
    }

    fn load(&mut self) -> Result<PtxOp> {
        self.access(0, 1)
            .map(|access| PtxOp::Load(Box::new(access)))
    }

    fn store(&mut self) -> Result<PtxOp> {
        if self.parts.flag("async") {
            return Err(self.unsupported("`.async`"));
        }
        self.access(1, 0)
            .map(|access| PtxOp::Store(Box::new(access)))
    }

    fn atomic(&mut self) -> Result<PtxOp> {
        if self.parts.flag("async") {
            return Err(self.unsupported("`.async`"));
        }
        let returns = self.statement.part(0) == "atom";
        // Atomics without an order are relaxed (PTX ISA, "atom").
        let order = match self.order() {
            MemoryOrder::Weak => MemoryOrder::Relaxed,
            order => order,
        };
        let (space, cluster) = self.space();
        self.parts.cache_hints();
        self.parts.flag("noftz");
        let kind = self.atomic_kind()?;
        let count = self.lanes_of_vector();
        let ty = self.atomic_type()?;
        let bytes = ty.bytes();
        let first = usize::from(returns);
        let swap = kind == AtomicKind::CompareSwap;
        let results = if returns {
            self.atomic_rows(0, bytes)?
        } else {
            Vec::new()
        };
        let operands = self.atomic_rows(first + 1, bytes)?;
        if operands.len() != count {
            return Err(self.unsupported("a vector of another size than its type"));
        }
        Ok(PtxOp::Atomic(Box::new(Atomic {
            space,
            cluster,
            address: self.atomic_address(first)?,
            kind,
            ty,
            bytes,
            wide: bytes == 8,
            results,
            operands,
            swap: if swap {
                self.atomic_rows(first + 2, bytes)?[0]
            } else {
                NONE
            },
            order,
        })))
    }

    fn atomic_address(&mut self, at: usize) -> Result<Address> {
        self.address(at)
    }

    fn atomic_rows(&mut self, at: usize, bytes: u8) -> Result<Vec<RowIndex>> {
        let parts: Vec<&Operand> = self.vector(at)?;
        let rows = parts.into_iter().map(|part| match bytes {
            8 => self.double_of(part),
            _ => self.word_of(part),
        });
        rows.collect()
    }

    pub(super) fn atomic_kind(&mut self) -> Result<AtomicKind> {
        let names = [
            ("add", AtomicKind::Add),
            ("min", AtomicKind::Min),
            ("max", AtomicKind::Max),
            ("and", AtomicKind::And),
            ("or", AtomicKind::Or),
            ("xor", AtomicKind::Xor),
            ("exch", AtomicKind::Exchange),
            ("cas", AtomicKind::CompareSwap),
            ("inc", AtomicKind::Increment),
            ("dec", AtomicKind::Decrement),
        ];
        let found = self.parts.one_of(&names);
        found.ok_or_else(|| self.unsupported("the operation"))
    }

    fn atomic_type(&mut self) -> Result<AtomicType> {
        let pairs = [("f16x2", Number::F16), ("bf16x2", Number::Bf16)];
        match self.parts.one_of(&pairs) {
            Some(ty) => Ok(AtomicType::Pair(ty)),
            None => self.number().map(AtomicType::Number),
        }
    }
}

impl AtomicType {
    /// Returns the bytes of one value.
    pub const fn bytes(self) -> u8 {
        match self {
            AtomicType::Number(ty) => (ty.bits() / 8) as u8,
            AtomicType::Pair(_) => 4,
        }
    }
}

impl StateSpace {
    /// Returns the name of the space for messages.
    pub const fn name(self) -> &'static str {
        match self {
            StateSpace::Generic => "generic",
            StateSpace::Global => "global",
            StateSpace::Shared => "shared",
            StateSpace::Local => "local",
            StateSpace::Param => "parameter",
            StateSpace::Const => "constant",
        }
    }
}
