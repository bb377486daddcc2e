//! Named barriers of a block, barriers of a cluster, barriers in memory.

use super::Machine;
use super::clock::{Gathered, Known};
use super::run::Flow;
use super::warp::{Group, Wait, Warp};
use crate::code::op::{self, BlockBarrier, NONE, VoteKind};
use crate::finding::{Fault, FindingKind, Step};

/// One of the sixteen barriers of a block.
#[derive(Clone, Debug, Default)]
pub struct NamedBarrier {
    /// Threads that make it complete; 0 while nobody has come.
    pub expected: u32,
    pub arrived: u32,
    /// Times it has completed.
    pub generation: u32,
    /// Lanes that wait, by warp of the cluster.
    pub waiting: Vec<(u32, u32)>,
    /// Those that have not read the result of a reduction.
    pub unread: Vec<(u32, u32)>,
    /// What those that have come know.
    pub gathered: Gathered,
    /// A reduction under way: all, any and how many said yes.
    pub votes: (bool, u32),
    /// The result of the last reduction.
    pub result: (bool, u32),
}

/// The barrier of a cluster.
#[derive(Clone, Debug, Default)]
pub struct ClusterState {
    pub arrived: u32,
    pub generation: u32,
    /// Lanes that arrived and have not waited, by warp.
    pub pending: Vec<u32>,
    /// Lanes whose wait is over and that have not noticed.
    pub released: Vec<u32>,
    /// What those that have come know.
    pub gathered: Gathered,
    /// What those of the last round knew.
    pub complete: Option<Known>,
}

impl Machine<'_> {
    pub fn block_barrier(
        &mut self,
        warp: &mut Warp,
        barrier: &BlockBarrier,
        mask: u32,
    ) -> Step<Flow> {
        let whole = |own: &Self| {
            barrier
                .aligned
                .then(|| own.whole_warp(warp, mask))
                .flatten()
        };
        if let Some(flow) = whole(self) {
            return Ok(flow);
        }
        let first = mask.trailing_zeros() as usize;
        let id = warp.word(barrier.id)[first];
        if id >= 16 {
            let text = format!("barrier {id}: a block has barriers 0 to 15");
            return Err(Fault::new(FindingKind::Barrier, mask, text));
        }
        if let Some(result) = self.finished_reduction(warp, barrier, mask, id) {
            return Ok(result);
        }
        let count = self.barrier_count(warp, barrier, first)?;
        let generation = self.come(warp, barrier, mask, (id, count))?;
        if barrier.arrive {
            return Ok(Flow::Next);
        }
        let wait = Wait::Barrier {
            id,
            count: generation,
        };
        let own = &self.blocks[warp.block as usize].barriers[id as usize];
        Ok(
            match (barrier.reduce.is_some(), own.generation != generation) {
                (false, true) => Flow::Next,
                (false, false) => Flow::After(wait),
                // The result is read when the instruction is executed again.
                (true, true) => self
                    .finished_reduction(warp, barrier, mask, id)
                    .unwrap_or(Flow::Next),
                (true, false) => Flow::Again(wait),
            },
        )
    }

    /// Counts the threads of a mask in; returns the round they came for.
    fn come(
        &mut self,
        warp: &mut Warp,
        barrier: &BlockBarrier,
        mask: u32,
        (id, count): (u32, u32),
    ) -> Step<u32> {
        let block = warp.block as usize;
        self.changes += 1;
        self.clock_arrive(warp, block, id, mask, barrier.arrive);
        let own = &mut self.blocks[block].barriers[id as usize];
        if own.expected != 0 && own.expected != count {
            let text = format!(
                "barrier {id} is used with {count} threads while {} have come to wait for {}",
                own.arrived, own.expected
            );
            return Err(Fault::new(FindingKind::Barrier, mask, text));
        }
        // The hardware counts warps: lanes that have ended count with theirs.
        let here = if barrier.aligned { warp.lanes } else { mask };
        let votes = barrier.reduce.as_ref().map(|reduce| {
            let yes = warp.predicate(reduce.p, reduce.negate) & mask;
            (yes == mask, yes.count_ones())
        });
        own.add(count, here.count_ones(), votes);
        if !barrier.arrive {
            own.waiting.push((warp.number, mask));
        }
        let generation = own.generation;
        if own.arrived >= own.expected {
            let waiting = own.complete();
            self.clock_complete(warp, block, id, &waiting);
            if barrier.reduce.is_some() {
                self.blocks[block].barriers[id as usize].unread = waiting;
            }
        }
        Ok(generation)
    }

    fn barrier_count(&self, warp: &Warp, barrier: &BlockBarrier, lane: usize) -> Step<u32> {
        if barrier.count == NONE {
            return Ok(self.launch.threads);
        }
        let count = warp.word(barrier.count)[lane];
        if count == 0
            || !count.is_multiple_of(32)
            || count > self.launch.threads.next_multiple_of(32)
        {
            let text = format!(
                "a barrier for {count} threads in a block of {}: \
                 the number must be a multiple of 32 and no larger than the block",
                self.launch.threads
            );
            return Err(Fault::new(FindingKind::Barrier, 1 << lane, text));
        }
        Ok(count)
    }

    /// The result of a reduction this warp has waited for.
    fn finished_reduction(
        &mut self,
        warp: &mut Warp,
        barrier: &BlockBarrier,
        mask: u32,
        id: u32,
    ) -> Option<Flow> {
        let reduce = barrier.reduce.as_ref()?;
        let own = &mut self.blocks[warp.block as usize].barriers[id as usize];
        let done = |entry: &(u32, u32)| entry.0 == warp.number && entry.1 == mask;
        let at = own.unread.iter().position(done)?;
        own.unread.remove(at);
        let (all, yes) = own.result;
        let holds = match reduce.kind {
            VoteKind::All => all,
            _ => yes > 0,
        };
        if reduce.population {
            warp.put(reduce.d, &[yes; 32], mask)
        } else {
            warp.put_predicate(reduce.d, if holds { u32::MAX } else { 0 }, mask)
        }
        Some(Flow::Next)
    }

    /// Whether what a group waits for has happened.
    pub fn has_come(&self, number: usize, group: &Group) -> bool {
        let block = self.warps[number].block.max(self.current_block(number));
        match group.wait {
            Wait::Barrier { id, count } => {
                self.blocks[block as usize].barriers[id as usize].generation != count
            }
            Wait::Mbarrier { address, parity } => self.phase_done(block, address, parity),
            Wait::Cluster => true,
            _ => self.engine_done(number, group),
        }
    }

    /// The block of a warp, which may be out of the list while it runs.
    fn current_block(&self, number: usize) -> u32 {
        let owner = self
            .blocks
            .iter()
            .position(|block| block.warps.contains(&number));
        owner.unwrap_or(0) as u32
    }

    pub fn barrier_state(&self, block: u32, id: u32) -> String {
        let own = &self.blocks[block as usize].barriers[id as usize];
        format!(
            "wait at barrier {id}, where {} of {} threads have come",
            own.arrived, own.expected
        )
    }

    pub fn cluster_step(
        &mut self,
        warp: &mut Warp,
        barrier: op::ClusterBarrier,
        mask: u32,
    ) -> Step<Flow> {
        let (op::ClusterBarrier::Arrive { aligned, .. } | op::ClusterBarrier::Wait { aligned, .. }) =
            barrier;
        if let Some(flow) = aligned.then(|| self.whole_warp(warp, mask)).flatten() {
            return Ok(flow);
        }
        let warps = self.warps.len();
        let state = &mut self.cluster_barrier;
        state.pending.resize(warps, 0);
        let pending = &mut state.pending[warp.number as usize];
        match barrier {
            op::ClusterBarrier::Arrive { .. } => {
                if *pending & mask != 0 {
                    let text = "arrives at the cluster barrier twice without a wait";
                    return Err(Fault::new(FindingKind::Barrier, *pending & mask, text));
                }
                *pending |= mask;
                state.arrived += mask.count_ones();
                self.changes += 1;
                self.cluster_arrive(warp, mask);
                Ok(Flow::Next)
            }
            op::ClusterBarrier::Wait { .. } => {
                let _ = pending;
                self.cluster_wait(warp, mask)
            }
        }
    }

    fn cluster_wait(&mut self, warp: &mut Warp, mask: u32) -> Step<Flow> {
        let total: u32 = self.launch.threads * self.launch.cluster;
        let ended: u32 = self
            .warps
            .iter()
            .map(|own| (own.ended & own.lanes).count_ones())
            .sum::<u32>()
            + (warp.ended & warp.lanes).count_ones();
        let state = &mut self.cluster_barrier;
        let own = state.pending[warp.number as usize];
        let passed = state.passed(warp.number, mask);
        if own & mask != mask && !passed {
            let text = "waits at the cluster barrier without having arrived";
            return Err(Fault::new(FindingKind::Barrier, mask & !own, text));
        }
        if !passed && state.arrived + ended >= total {
            state.release();
            self.changes += 1;
        }
        if self.cluster_barrier.passed(warp.number, mask) {
            self.cluster_barrier.take(warp.number, mask);
            self.cluster_acquire(warp, mask);
            Ok(Flow::Next)
        } else {
            Ok(Flow::Again(Wait::Cluster))
        }
    }
}

impl NamedBarrier {
    fn add(&mut self, expected: u32, threads: u32, votes: Option<(bool, u32)>) {
        if self.arrived == 0 {
            self.votes = (true, 0);
        }
        self.expected = expected;
        self.arrived += threads;
        if let Some((all, yes)) = votes {
            self.votes = (self.votes.0 && all, self.votes.1 + yes);
        }
    }

    /// Starts the next round; returns who waited.
    fn complete(&mut self) -> Vec<(u32, u32)> {
        self.arrived = 0;
        self.expected = 0;
        self.generation += 1;
        self.result = self.votes;
        std::mem::take(&mut self.waiting)
    }
}

impl ClusterState {
    fn passed(&self, warp: u32, mask: u32) -> bool {
        self.released(warp) & mask == mask
    }

    fn released(&self, warp: u32) -> u32 {
        self.released.get(warp as usize).copied().unwrap_or(0)
    }

    fn release(&mut self) {
        self.released.resize(self.pending.len(), 0);
        for (released, pending) in self.released.iter_mut().zip(&mut self.pending) {
            *released |= std::mem::take(pending);
        }
        self.arrived = 0;
        self.generation += 1;
        self.complete = self.gathered.take();
    }

    fn take(&mut self, warp: u32, mask: u32) {
        if let Some(released) = self.released.get_mut(warp as usize) {
            *released &= !mask;
        }
    }
}
