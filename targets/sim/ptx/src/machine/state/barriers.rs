//! The barriers of a block, and that of a cluster.

use crate::machine::clock::{Gathered, Known};
use crate::machine::warp::WarpLanes;

/// The votes of a barrier reduction.
#[derive(Clone, Copy, Debug, Default)]
pub struct Votes {
    /// All threads said yes.
    pub all: bool,
    /// Number of threads that said yes.
    pub yes: u32,
}

/// One of the sixteen barriers of a block.
#[derive(Clone, Debug, Default)]
pub struct NamedBarrier {
    /// Threads that complete the barrier; 0 before the first arrives.
    pub expected: u32,
    pub arrived: u32,
    /// Number of completions so far.
    pub generation: u32,
    /// Waiting lanes, per warp of the cluster.
    pub waiting: Vec<WarpLanes>,
    /// Lanes that have not read the result of a reduction.
    pub unread: Vec<WarpLanes>,
    /// Joint knowledge of the threads that have come.
    pub gathered: Gathered,
    /// The reduction so far: whether all said yes, and how many did.
    pub votes: Votes,
    /// The result of the last reduction.
    pub result: Votes,
}

/// The barrier of a cluster.
#[derive(Clone, Debug, Default)]
pub struct ClusterState {
    pub arrived: u32,
    pub generation: u32,
    /// Lanes that arrived and have not waited, per warp.
    pub pending: Vec<u32>,
    /// Lanes whose wait is over and that have not noticed, per warp.
    pub released: Vec<u32>,
    /// Joint knowledge of the threads that have come.
    pub gathered: Gathered,
    /// Joint knowledge of the last round's threads.
    pub complete: Option<Known>,
}

impl NamedBarrier {
    pub fn add(&mut self, expected: u32, threads: u32, votes: Option<Votes>) {
        if self.arrived == 0 {
            self.votes = Votes { all: true, yes: 0 };
        }
        self.expected = expected;
        self.arrived += threads;
        if let Some(votes) = votes {
            self.votes.all &= votes.all;
            self.votes.yes += votes.yes;
        }
    }

    /// Starts the next round; returns the lanes that waited.
    pub fn complete(&mut self) -> Vec<WarpLanes> {
        self.arrived = 0;
        self.expected = 0;
        self.generation += 1;
        self.result = self.votes;
        std::mem::take(&mut self.waiting)
    }
}

impl ClusterState {
    pub fn passed(&self, warp: u32, mask: u32) -> bool {
        self.released(warp) & mask == mask
    }

    pub fn released(&self, warp: u32) -> u32 {
        self.released.get(warp as usize).copied().unwrap_or(0)
    }

    pub fn release(&mut self) {
        self.released.resize(self.pending.len(), 0);
        for (released, pending) in self.released.iter_mut().zip(&mut self.pending) {
            *released |= std::mem::take(pending);
        }
        self.arrived = 0;
        self.generation += 1;
        self.complete = self.gathered.take();
    }

    pub fn take(&mut self, warp: u32, mask: u32) {
        if let Some(released) = self.released.get_mut(warp as usize) {
            *released &= !mask;
        }
    }
}
