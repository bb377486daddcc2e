//! Decodes asynchronous copies and wgmma.

use super::{Decoder, Result};
use crate::code::RowValue;
use crate::code::op::{
    AsyncOp, Base, BulkOp, CopyAsync, Direction, MbarrierKind, MbarrierOp, NONE, PtxOp,
    ReductionOp, RowIndex, TensorCopy, WgmmaA, WgmmaOp,
};
use crate::text::{Class, Operand, StateSpace};
use moesaic_hardware::wgmma::{Accumulator, MmaElement, WgmmaKind};

impl Decoder<'_> {
    pub(super) fn copy(&mut self) -> Result<PtxOp> {
        let reduces = self.parts.flag("reduce");
        if !self.parts.flag("async") {
            return Err(self.unsupported("the instruction"));
        }
        let op = if self.parts.flag("bulk") {
            self.bulk(reduces)?
        } else if self.parts.flag("mbarrier") {
            return self.copy_arrive();
        } else {
            self.copy_async()?
        };
        Ok(PtxOp::Async(Box::new(op)))
    }

    /// Decodes `cp.async.mbarrier.arrive[.noinc]`.
    fn copy_arrive(&mut self) -> Result<PtxOp> {
        self.parts.flag("arrive");
        self.parts.flag("b64");
        let counted = !self.parts.flag("noinc");
        let (space, cluster) = self.space();
        Ok(PtxOp::Mbarrier(Box::new(MbarrierOp {
            kind: MbarrierKind::CopyArrive { counted },
            address: self.address(0)?,
            space,
            cluster,
            d: NONE,
            a: NONE,
            relaxed: false,
        })))
    }

    fn copy_async(&mut self) -> Result<AsyncOp> {
        if self.parts.flag("commit_group") {
            return Ok(AsyncOp::CopyCommit);
        }
        if self.parts.flag("wait_all") {
            return Ok(AsyncOp::CopyWait(None));
        }
        if self.parts.flag("wait_group") {
            return Ok(AsyncOp::CopyWait(Some(self.literal(0)? as u32)));
        }
        self.parts.cache_hints();
        let generic = !self.parts.flag("global");
        for part in ["shared", "shared::cta"] {
            self.parts.flag(part);
        }
        let bytes = self.literal(2)?;
        if !matches!(bytes, 4 | 8 | 16) {
            return Err(self.unsupported(format!("a copy of {bytes} bytes")));
        }
        let (source_bytes, ignore) = self.copy_limit(bytes)?;
        Ok(AsyncOp::Copy(CopyAsync {
            to: self.address(0)?,
            from: self.address(1)?,
            from_generic: generic,
            bytes: bytes as u8,
            source_bytes,
            ignore,
        }))
    }

    /// Reads the fourth operand: the number of bytes to read, or a predicate to
    /// read none.
    fn copy_limit(&mut self, bytes: u64) -> Result<(RowIndex, Option<(RowIndex, bool)>)> {
        let whole = self.words.row(RowValue::Literal(bytes));
        match self.statement.operands.get(3) {
            None => Ok((whole, None)),
            Some(Operand::Not(_)) => Ok((whole, Some(self.predicate(3)?))),
            Some(Operand::Register(r)) if r.class == Class::Predicate => {
                Ok((whole, Some(self.predicate(3)?)))
            }
            // A 64-bit register is a cache policy, which changes no result.
            Some(Operand::Register(r)) if r.class == Class::Double => Ok((whole, None)),
            Some(_) => Ok((self.word(3)?, None)),
        }
    }

    fn bulk(&mut self, reduces: bool) -> Result<AsyncOp> {
        if self.parts.flag("commit_group") {
            return Ok(AsyncOp::BulkCommit);
        }
        if self.parts.flag("wait_group") {
            return Ok(AsyncOp::BulkWait {
                read: self.parts.flag("read"),
                left: self.literal(0)? as u32,
            });
        }
        let prefetch = self.parts.flag("prefetch");
        let hint = self.parts.flag("L2::cache_hint");
        let multicast = self.parts.flag("multicast::cluster");
        let tensor = self.parts.flag("tensor");
        // Every form of prefetch does nothing, so its remaining modifiers need
        // no names.
        if prefetch {
            self.parts = super::Modifiers::new(&[]);
            return Ok(AsyncOp::Bulk(self.nothing()));
        }
        let direction = self.direction()?;
        self.parts.flag("bulk_group");
        self.parts.flag("mbarrier::complete_tx::bytes");
        let reduction = if reduces {
            Some(self.reduction(tensor)?)
        } else {
            None
        };
        if tensor {
            self.tensor_copy(direction, reduction, multicast, hint)
        } else {
            self.line_copy(direction, reduction, multicast, hint)
        }
    }

    /// Returns a prefetch, which moves nothing that can be observed.
    fn nothing(&mut self) -> BulkOp {
        let fixed = crate::code::op::Address {
            base: Base::Fixed,
            offset: 0,
        };
        BulkOp {
            direction: Direction::PrefetchL2,
            to: fixed,
            from: fixed,
            bytes: NONE,
            mbarrier: None,
            multicast: NONE,
            reduction: None,
        }
    }

    /// Reads the destination and source spaces, in this order in the opcode.
    fn direction(&mut self) -> Result<Direction> {
        let spaces: Vec<&str> = self
            .statement
            .opcode
            .iter()
            .map(String::as_str)
            .filter(|part| matches!(*part, "global" | "shared::cta" | "shared::cluster"))
            .collect();
        for space in ["global", "shared::cta", "shared::cluster"] {
            while self.parts.flag(space) {}
        }
        match spaces[..] {
            ["shared::cluster" | "shared::cta", "global"] => Ok(Direction::GlobalToShared),
            ["global", "shared::cta"] => Ok(Direction::SharedToGlobal),
            ["shared::cluster", "shared::cta"] => Ok(Direction::SharedToCluster),
            _ => Err(self.unsupported("the spaces")),
        }
    }

    fn reduction(&mut self, tensor: bool) -> Result<ReductionOp> {
        self.parts.flag("noftz");
        Ok(ReductionOp {
            kind: self.atomic_kind()?,
            ty: if tensor { None } else { Some(self.number()?) },
        })
    }

    fn line_copy(
        &mut self,
        direction: Direction,
        reduction: Option<ReductionOp>,
        multicast: bool,
        hint: bool,
    ) -> Result<AsyncOp> {
        let signals = direction != Direction::SharedToGlobal;
        let last = self.count() - usize::from(hint);
        Ok(AsyncOp::Bulk(BulkOp {
            direction,
            to: self.address(0)?,
            from: self.address(1)?,
            bytes: self.word(2)?,
            mbarrier: if signals {
                Some(self.address(3)?)
            } else {
                None
            },
            multicast: if multicast {
                self.word(last - 1)?
            } else {
                NONE
            },
            reduction,
        }))
    }

    fn tensor_copy(
        &mut self,
        direction: Direction,
        reduction: Option<ReductionOp>,
        multicast: bool,
        hint: bool,
    ) -> Result<AsyncOp> {
        self.parts.flag("tile");
        for rank in ["1d", "2d", "3d", "4d", "5d"] {
            self.parts.flag(rank);
        }
        let load = direction == Direction::GlobalToShared;
        let (map, shared) = if load { (1, 0) } else { (0, 1) };
        let coordinates = match self.address_rest(map)? {
            [Operand::Vector(list)] => list.iter().collect::<Vec<_>>(),
            _ => return Err(self.unsupported("the coordinates")),
        };
        let coordinates = coordinates.into_iter().map(|at| self.word_of(at));
        let coordinates = coordinates.collect::<Result<Vec<RowIndex>>>()?;
        let last = self.count() - usize::from(hint);
        Ok(AsyncOp::Tensor(TensorCopy {
            direction,
            map: self.address(map)?,
            shared: self.address(shared)?,
            coordinates,
            mbarrier: if load { Some(self.address(2)?) } else { None },
            multicast: if multicast {
                self.word(last - 1)?
            } else {
                NONE
            },
            reduction,
        }))
    }

    pub(super) fn wgmma(&mut self) -> Result<PtxOp> {
        self.parts.flag("sync");
        self.parts.flag("aligned");
        let op = if self.parts.flag("fence") {
            AsyncOp::WgmmaFence
        } else if self.parts.flag("commit_group") {
            AsyncOp::WgmmaCommit
        } else if self.parts.flag("wait_group") {
            AsyncOp::WgmmaWait(self.literal(0)? as u32)
        } else if self.parts.flag("mma_async") {
            AsyncOp::Wgmma(self.product_async()?)
        } else {
            return Err(self.unsupported("the operation"));
        };
        Ok(PtxOp::Async(Box::new(op)))
    }

    fn product_async(&mut self) -> Result<WgmmaOp> {
        let kind = self.wgmma_kind()?;
        let d = self.word_rows(0)?;
        let a = match self.operand(1)? {
            Operand::Vector(_) => WgmmaA::Registers(self.word_rows(1)?),
            _ => WgmmaA::Descriptor(self.double(1)?),
        };
        if d.len() != kind.d_registers() {
            return Err(self.unsupported("another number of registers than its shape has"));
        }
        let registers = matches!(a, WgmmaA::Registers(_));
        let signs = (self.literal(4)?, self.literal(5)?);
        let mut majors = Vec::new();
        for at in 6..self.count() {
            majors.push(self.literal(at)? == 1);
        }
        let transpose_b = majors.last().copied().unwrap_or(false);
        Ok(WgmmaOp {
            kind,
            d,
            b: self.double(2)?,
            scale_d: self.scale_d()?,
            negate_a: signs.0 as i32 == -1,
            negate_b: signs.1 as i32 == -1,
            transpose_a: !registers && majors.first().copied().unwrap_or(false),
            transpose_b,
            a,
        })
    }

    fn scale_d(&mut self) -> Result<RowIndex> {
        match self.operand(3)? {
            Operand::Register(_) => Ok(self.predicate(3)?.0),
            other => Err(self.unsupported(format!("a scale of D that is {other:?}"))),
        }
    }

    fn wgmma_kind(&mut self) -> Result<WgmmaKind> {
        let shape = self.parts.prefixed("m64n").unwrap_or_default();
        let n = shape.split('k').next().and_then(|n| n.parse().ok());
        let d = self.number()?;
        let (a, b) = (self.number()?, self.number()?);
        let element = super::tensor::element(a).filter(|_| a == b);
        let accumulator = match d {
            crate::code::op::Number::F16 => Accumulator::F16,
            _ => Accumulator::F32,
        };
        let kind = n
            .zip(element)
            .and_then(|(n, element): (usize, MmaElement)| WgmmaKind::new(n, element, accumulator));
        kind.ok_or_else(|| self.unsupported("its shape and types"))
    }

    /// Returns `Generic` or `Shared` for an address, as the opcode says.
    pub(super) fn shared_or_generic(&mut self) -> StateSpace {
        self.space().0
    }
}
