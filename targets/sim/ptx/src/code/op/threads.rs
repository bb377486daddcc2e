//! Operands of shuffles, votes, barriers and fences.

use super::{Address, Int2, Row};
use crate::text::Space;

/// The way a shuffle names its source lane.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ShuffleMode {
    Up,
    Down,
    Butterfly,
    Index,
}

/// `shfl.sync`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shuffle {
    pub mode: ShuffleMode,
    pub d: Row,
    pub p: Row,
    pub a: Row,
    pub b: Row,
    pub c: Row,
    pub mask: Row,
}

/// The question of a vote.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum VoteKind {
    All,
    Any,
    Uniform,
    Ballot,
}

/// Instructions of a whole warp.
#[derive(Clone, Debug, PartialEq)]
pub enum WarpOp {
    Shuffle(Shuffle),
    Vote {
        kind: VoteKind,
        d: Row,
        a: Row,
        negate: bool,
        mask: Row,
    },
    MatchAny {
        d: Row,
        a: Row,
        wide: bool,
        mask: Row,
    },
    MatchAll {
        d: Row,
        p: Row,
        a: Row,
        wide: bool,
        mask: Row,
    },
    Reduce {
        op: Int2,
        d: Row,
        a: Row,
        mask: Row,
    },
    ActiveMask {
        d: Row,
    },
    Elect {
        d: Row,
        p: Row,
        mask: Row,
    },
    Barrier {
        mask: Row,
    },
}

/// Named barriers.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockBarrier {
    pub id: Row,
    /// Number of threads; [`NONE`] stands for every thread of the block.
    pub count: Row,
    /// The thread arrives and goes on.
    pub arrive: bool,
    /// Every thread of a warp takes part.
    pub aligned: bool,
    /// A reduction over the threads, if there is one.
    pub reduce: Option<BarrierReduce>,
}

/// A reduction over the threads of a barrier.
#[derive(Clone, Debug, PartialEq)]
pub struct BarrierReduce {
    pub kind: VoteKind,
    pub population: bool,
    pub d: Row,
    pub p: Row,
    pub negate: bool,
}

/// An `mbarrier.*` instruction.
#[derive(Clone, Debug, PartialEq)]
pub struct MbarrierOp {
    pub kind: MbarrierKind,
    pub address: Address,
    pub space: Space,
    pub cluster: bool,
    /// The state that an arrival returns, or the predicate of a test.
    pub d: Row,
    /// Count, bytes, parity or state.
    pub a: Row,
    /// `.relaxed`: the operation orders nothing.
    pub relaxed: bool,
}

/// The operation on an mbarrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MbarrierKind {
    Init,
    Invalidate,
    Arrive,
    ArriveExpect,
    ArriveDrop,
    ExpectTx,
    CompleteTx,
    TestParity,
    TestState,
    TryParity,
    TryState,
    PendingCount,
    /// `cp.async.mbarrier.arrive`, counted or not.
    CopyArrive {
        counted: bool,
    },
}

/// The kinds of fences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fence {
    /// Block, cluster, device or system scope.
    Memory,
    /// Between ordinary accesses and those of TMA and tensor cores.
    ProxyAsync,
    /// After `mbarrier.init`.
    MbarrierInit,
    /// Other proxies, which nothing here depends on.
    Other,
}

/// The two halves of the cluster barrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClusterBarrier {
    Arrive { release: bool, aligned: bool },
    Wait { acquire: bool, aligned: bool },
}
