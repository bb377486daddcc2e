//! Named barriers of a block and the barrier of a cluster.

use super::ClusterRunner;
use super::state::barriers::Votes;
use super::warp::{Flow, Group, Wait, Warp, WarpLanes};
use crate::code::op::{self, BlockBarrier, NONE, VoteKind};
use crate::finding::{Fault, FindingKind, Step};

impl ClusterRunner<'_> {
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
        // A block has barriers 0 to 15 (PTX ISA, "barrier"). Hardware takes the
        // number from a register, so ptxas cannot check it.
        if id >= 16 {
            let text = format!("barrier {id}: a block has barriers 0 to 15");
            return Err(Fault::new(FindingKind::Barrier, mask, text));
        }
        if let Some(result) = self.finished_reduction(warp, barrier, mask, id) {
            return Ok(result);
        }
        let count = self.barrier_count(warp, barrier, first)?;
        let generation = self.come(warp, barrier, mask, id, count)?;
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
                // The instruction is executed again and then reads the result.
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
        id: u32,
        count: u32,
    ) -> Step<u32> {
        let block = warp.block as usize;
        self.changes += 1;
        self.clock_arrive(warp, block, id, mask, barrier.arrive);
        let own = &mut self.blocks[block].barriers[id as usize];
        // All threads of one round must name the same count, or the barrier's
        // behaviour is undefined (PTX ISA, "barrier": operand b).
        if own.expected != 0 && own.expected != count {
            let text = format!(
                "barrier {id} is used with {count} threads while {} have come to wait for {}",
                own.arrived, own.expected
            );
            return Err(Fault::new(FindingKind::Barrier, mask, text));
        }
        // Hardware counts warps, so lanes that have ended count with theirs.
        // Only the unaligned form counts lanes.
        let here = if barrier.aligned { warp.lanes } else { mask };
        let votes = barrier.reduce.as_ref().map(|reduce| {
            let yes = warp.predicate(reduce.p, reduce.negate) & mask;
            Votes {
                all: yes == mask,
                yes: yes.count_ones(),
            }
        });
        own.add(count, here.count_ones(), votes);
        if !barrier.arrive {
            own.waiting.push(WarpLanes {
                warp: warp.number,
                lanes: mask,
            });
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
        // The thread count must be a multiple of the warp size (PTX ISA,
        // "barrier": operand b). A larger count than the block has would wait
        // for ever.
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

    /// Returns the result of a reduction that this warp has waited for.
    fn finished_reduction(
        &mut self,
        warp: &mut Warp,
        barrier: &BlockBarrier,
        mask: u32,
        id: u32,
    ) -> Option<Flow> {
        let reduce = barrier.reduce.as_ref()?;
        let own = &mut self.blocks[warp.block as usize].barriers[id as usize];
        // Warp and mask identify the waiter: a diverged warp may have two
        // groups in the same reduction.
        let done = |entry: &WarpLanes| entry.warp == warp.number && entry.lanes == mask;
        let at = own.unread.iter().position(done)?;
        own.unread.remove(at);
        let Votes { all, yes } = own.result;
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

    /// Returns true if the event that a group waits for has happened.
    pub fn has_come(&self, number: usize, group: &Group) -> bool {
        let block = self.warps[number].block.max(self.current_block(number));
        match group.wait {
            Wait::Barrier { id, count } => {
                self.blocks[block as usize].barriers[id as usize].generation != count
            }
            Wait::Mbarrier { address, parity } => self.phase_done(block, address, parity),
            Wait::Registers(count) => self.blocks[block as usize].has_registers(count),
            Wait::Cluster => true,
            _ => self.engine_done(number, group),
        }
    }

    /// Returns the block of a warp, which may be out of the list while it runs.
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
                // PTX ISA, "barrier.cluster": a thread must not arrive again before
                // it has waited; hardware would count the second arrival for the
                // next phase.
            }
            op::ClusterBarrier::Wait { .. } => {
                let _ = pending;
                self.cluster_wait(warp, mask)
            }
        }
    }

    fn cluster_wait(&mut self, warp: &mut Warp, mask: u32) -> Step<Flow> {
        // Threads that exited count as arrived for the cluster barrier. The
        // running warp is not in the list, so its ended lanes are added apart.
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
        // PTX ISA, "barrier.cluster": `wait` without an `arrive` before it is
        // undefined.
        if own & mask != mask && !passed {
            let text = "waits at the cluster barrier without having arrived";
            return Err(Fault::new(FindingKind::Barrier, mask & !own, text));
        }
        if !passed && state.arrived + ended >= total {
            state.release();
            self.changes += 1;
        }
        if self.cluster_barrier.passed(warp.number, mask) {
            // The release flag is taken lane by lane, because lanes of a warp
            // may wait at different instructions; a round cannot be told from
            // its generation alone.
            self.cluster_barrier.take(warp.number, mask);
            self.cluster_acquire(warp, mask);
            Ok(Flow::Next)
        } else {
            Ok(Flow::Again(Wait::Cluster))
        }
    }
}
