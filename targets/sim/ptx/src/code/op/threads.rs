//! Operands of shuffles, votes, barriers and fences.

use super::{Address, Int2, RowIndex};
use crate::text::StateSpace;

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
    pub d: RowIndex,
    pub p: RowIndex,
    pub a: RowIndex,
    pub b: RowIndex,
    pub c: RowIndex,
    pub mask: RowIndex,
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
        d: RowIndex,
        a: RowIndex,
        negate: bool,
        mask: RowIndex,
    },
    MatchAny {
        d: RowIndex,
        a: RowIndex,
        wide: bool,
        mask: RowIndex,
    },
    MatchAll {
        d: RowIndex,
        p: RowIndex,
        a: RowIndex,
        wide: bool,
        mask: RowIndex,
    },
    Reduce {
        op: Int2,
        d: RowIndex,
        a: RowIndex,
        mask: RowIndex,
    },
    ActiveMask {
        d: RowIndex,
    },
    Elect {
        d: RowIndex,
        p: RowIndex,
        mask: RowIndex,
    },
    Barrier {
        mask: RowIndex,
    },
}

/// Named barriers.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockBarrier {
    pub id: RowIndex,
    /// Number of threads; [`NONE`] stands for every thread of the block.
    pub count: RowIndex,
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
    pub d: RowIndex,
    pub p: RowIndex,
    pub negate: bool,
}

/// An `mbarrier.*` instruction.
#[derive(Clone, Debug, PartialEq)]
pub struct MbarrierOp {
    pub kind: MbarrierKind,
    pub address: Address,
    pub space: StateSpace,
    pub cluster: bool,
    /// The state that an arrival returns, or the predicate of a test.
    pub d: RowIndex,
    /// Count, bytes, parity or state.
    pub a: RowIndex,
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
