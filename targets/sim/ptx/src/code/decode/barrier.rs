//! Decodes barriers of blocks and clusters, mbarriers and fences.

use super::{Decoder, Result};
use crate::code::op::{
    BarrierReduce, BlockBarrier, ClusterBarrier, Fence, MbarrierKind, MbarrierOp, NONE, PtxOp,
    VoteKind, WarpOp,
};
use crate::text::Operand;

impl Decoder<'_> {
    pub(super) fn barrier(&mut self) -> Result<PtxOp> {
        match self.statement.part(0) {
            "bar" | "barrier" => self.block_barrier(),
            "fence" | "membar" => self.fence(),
            "setmaxnreg" => self.registers(),
            "griddepcontrol" => {
                self.parts.flag("launch_dependents");
                Ok(if self.parts.flag("wait") {
                    PtxOp::AwaitLaunches
                } else {
                    PtxOp::Nop
                })
            }
            _ => {
                self.number()?;
                Ok(PtxOp::Nop)
            }
        }
    }

    fn block_barrier(&mut self) -> Result<PtxOp> {
        if self.parts.flag("warp") {
            self.parts.flag("sync");
            let mask = self.word(0)?;
            return Ok(PtxOp::Warp(Box::new(WarpOp::Barrier { mask })));
        }
        self.parts.flag("cta");
        let aligned = self.parts.flag("aligned") || self.statement.part(0) == "bar";
        if self.parts.flag("cluster") {
            return self.cluster_barrier(aligned);
        }
        let arrive = self.parts.flag("arrive");
        self.parts.flag("sync");
        if self.parts.flag("red") {
            return self.barrier_reduce(aligned);
        }
        Ok(PtxOp::Barrier(Box::new(BlockBarrier {
            id: self.word(0)?,
            count: if self.count() > 1 {
                self.word(1)?
            } else {
                NONE
            },
            arrive,
            aligned,
            reduce: None,
        })))
    }

    fn barrier_reduce(&mut self, aligned: bool) -> Result<PtxOp> {
        let population = self.parts.flag("popc");
        let and = self.parts.flag("and");
        self.parts.flag("or");
        self.parts.flag("pred");
        self.parts.flag("u32");
        let last = self.count() - 1;
        let (p, negate) = self.predicate(last)?;
        let reduce = BarrierReduce {
            kind: if and { VoteKind::All } else { VoteKind::Any },
            population,
            d: if population {
                self.word(0)?
            } else {
                self.predicate(0)?.0
            },
            p,
            negate,
        };
        Ok(PtxOp::Barrier(Box::new(BlockBarrier {
            id: self.word(1)?,
            count: if self.count() > 3 {
                self.word(2)?
            } else {
                NONE
            },
            arrive: false,
            aligned,
            reduce: Some(reduce),
        })))
    }

    fn cluster_barrier(&mut self, aligned: bool) -> Result<PtxOp> {
        let relaxed = self.parts.flag("relaxed");
        self.parts.flag("release");
        self.parts.flag("acquire");
        if self.parts.flag("arrive") {
            return Ok(PtxOp::Cluster(ClusterBarrier::Arrive {
                release: !relaxed,
                aligned,
            }));
        }
        if self.parts.flag("wait") {
            return Ok(PtxOp::Cluster(ClusterBarrier::Wait {
                acquire: true,
                aligned,
            }));
        }
        Err(self.unsupported("the operation"))
    }

    fn fence(&mut self) -> Result<PtxOp> {
        for part in [
            "cta", "cluster", "gpu", "sys", "gl", "sc", "acq_rel", "acquire", "release",
        ] {
            self.parts.flag(part);
        }
        for part in [
            "sync_restrict::shared::cta",
            "sync_restrict::shared::cluster",
        ] {
            self.parts.flag(part);
        }
        if self.parts.flag("mbarrier_init") {
            return Ok(PtxOp::Fence(Fence::MbarrierInit));
        }
        if !self.parts.flag("proxy") {
            return Ok(PtxOp::Fence(Fence::Memory));
        }
        for asynchronous in ["async", "async::generic"] {
            if self.parts.flag(asynchronous) {
                for part in ["global", "shared::cta", "shared::cluster"] {
                    self.parts.flag(part);
                }
                return Ok(PtxOp::Fence(Fence::ProxyAsync));
            }
        }
        for other in ["alias", "tensormap::generic"] {
            if self.parts.flag(other) {
                return Ok(PtxOp::Fence(Fence::Other));
            }
        }
        Err(self.unsupported("the proxy"))
    }

    fn registers(&mut self) -> Result<PtxOp> {
        let grow = self.parts.one_of(&[("inc", true), ("dec", false)]);
        for part in ["sync", "aligned", "u32"] {
            self.parts.flag(part);
        }
        Ok(PtxOp::SetMaxRegisters {
            grow: grow.ok_or_else(|| self.unsupported("the direction"))?,
            count: self.literal(0)? as u32,
        })
    }

    pub(super) fn mbarrier(&mut self) -> Result<PtxOp> {
        let kind = self.mbarrier_kind()?;
        let relaxed = self.parts.flag("relaxed");
        for part in ["release", "acquire", "cta", "cluster", "b64"] {
            self.parts.flag(part);
        }
        let (space, cluster) = self.space();
        let result = !matches!(self.operand(0)?, Operand::Memory { .. });
        let at = usize::from(result);
        let tests = matches!(
            kind,
            MbarrierKind::TestParity
                | MbarrierKind::TestState
                | MbarrierKind::TryParity
                | MbarrierKind::TryState
        );
        let d = match (result, tests, self.operand(0)?) {
            (false, ..) | (_, _, Operand::Sink) => NONE,
            (_, true, _) => self.predicate(0)?.0,
            _ if kind == MbarrierKind::PendingCount => self.word(0)?,
            _ => self.double(0)?,
        };
        if kind == MbarrierKind::PendingCount {
            return Err(self.unsupported("the operation"));
        }
        let state = matches!(kind, MbarrierKind::TestState | MbarrierKind::TryState);
        let a = if self.count() <= at + 1 {
            NONE
        } else if state {
            self.double(at + 1)?
        } else {
            self.word(at + 1)?
        };
        Ok(PtxOp::Mbarrier(Box::new(MbarrierOp {
            kind,
            address: self.address(at)?,
            space,
            cluster,
            d,
            a,
            relaxed,
        })))
    }

    fn mbarrier_kind(&mut self) -> Result<MbarrierKind> {
        let parity = self.parts.flag("parity");
        if self.parts.flag("noComplete") {
            return Err(self.unsupported("`.noComplete`"));
        }
        // An arrival may also announce bytes: `.arrive.expect_tx`.
        let expects = self.parts.flag("expect_tx");
        let names = [
            ("init", MbarrierKind::Init),
            ("inval", MbarrierKind::Invalidate),
            ("arrive", MbarrierKind::Arrive),
            ("arrive_drop", MbarrierKind::ArriveDrop),
            ("complete_tx", MbarrierKind::CompleteTx),
            ("test_wait", MbarrierKind::TestState),
            ("try_wait", MbarrierKind::TryState),
            ("pending_count", MbarrierKind::PendingCount),
        ];
        match (self.parts.one_of(&names), expects, parity) {
            (None, true, _) => Ok(MbarrierKind::ExpectTx),
            (Some(MbarrierKind::Arrive), true, _) => Ok(MbarrierKind::ArriveExpect),
            (Some(MbarrierKind::TestState), _, true) => Ok(MbarrierKind::TestParity),
            (Some(MbarrierKind::TryState), _, true) => Ok(MbarrierKind::TryParity),
            (Some(kind), false, _) => Ok(kind),
            _ => Err(self.unsupported("the operation")),
        }
    }
}
