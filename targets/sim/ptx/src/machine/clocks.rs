//! Race detection: every synchronising instruction moves knowledge between
//! threads, and every access to shared memory is compared with it.

use super::ClusterRunner;
use super::clock::{Gathered, Known};
use super::shadow::{Accessor, Clash};
use super::state::global::GlobalShadow;
use super::state::sync::{CompletionStep, Component, Phases, Sync};
use super::warp::{Doubles, Warp, WarpLanes, Words, lanes_of};
use crate::code::op::{Fence, MemoryOrder};
use crate::finding::{Fault, FindingKind, Step};
use crate::text::StateSpace;

impl ClusterRunner<'_> {
    /// Forgets the last cluster.
    pub fn begin_clocks(&mut self) {
        self.sync = Sync::default();
        // The counter is far from wrapping: a block steps it a few thousand
        // times.
        if self.time > u32::MAX / 2 {
            // Shadows keep their stamps from cluster to cluster, because older
            // times count as known. When time starts again they have to go.
            self.time = 1;
            self.blocks.clear();
            self.global = GlobalShadow::default();
        }
    }

    /// Returns the number of a component, which it gets on first use.
    pub fn component(&mut self, component: Component) -> u32 {
        let list = &mut self.sync.components;
        let known = list.iter().position(|own| *own == component);
        known.unwrap_or_else(|| {
            list.push(component);
            list.len() - 1
        }) as u32
    }

    fn gather(&mut self, into: &mut Gathered, warp: &Warp, mask: u32) {
        // Lanes that have ended cannot act any more, so the others stand for
        // the whole warp.
        let whole = mask | warp.ended == u32::MAX;
        into.add(&warp.known, warp.number, mask, whole, self.time);
    }

    /// Records that threads come to a barrier of the block.
    pub fn clock_arrive(
        &mut self,
        warp: &mut Warp,
        block: usize,
        id: u32,
        mask: u32,
        goes_on: bool,
    ) {
        if !self.launch.full {
            return;
        }
        let own = &mut self.blocks[block].barriers[id as usize].gathered;
        let mut gathered = std::mem::take(own);
        self.gather(&mut gathered, warp, mask);
        // Threads that only arrive go on at once and need a new time. Threads
        // that wait do nothing until the barrier is complete.
        self.time += u32::from(goes_on);
        self.blocks[block].barriers[id as usize].gathered = gathered;
    }

    /// Completes a barrier of the block: its waiting threads learn what all
    /// knew.
    pub fn clock_complete(
        &mut self,
        warp: &mut Warp,
        block: usize,
        id: u32,
        waiting: &[WarpLanes],
    ) {
        let gathered = self.blocks[block].barriers[id as usize].gathered.take();
        let Some(mut known) = gathered else {
            return;
        };
        let seen = std::rc::Rc::make_mut(&mut known.seen);
        for &WarpLanes {
            warp: number,
            lanes,
        } in waiting
        {
            let ended = if number == warp.number {
                warp.ended
            } else {
                self.warps[number as usize].ended
            };
            // All lanes of a warp waited, so one entry for the warp replaces
            // 32. The time is that of now, not of their arrival: a waiting
            // thread does nothing in between.
            if lanes | ended == u32::MAX {
                seen.add_warp(number, self.time);
            }
        }
        self.time += 1;
        for &WarpLanes {
            warp: number,
            lanes,
        } in waiting
        {
            let own = if number == warp.number {
                &mut *warp
            } else {
                &mut self.warps[number as usize]
            };
            for lane in lanes_of(lanes) {
                // `bar.sync` and `barrier.sync` order all earlier accesses of
                // all participating threads (PTX ISA, "barrier": memory
                // ordering of sync and red). Threads that only arrived release,
                // and do not learn.
                own.known[lane] = known.clone();
            }
        }
    }

    /// Joins the knowledge of lanes that met at a warp barrier.
    pub fn warp_barrier(&mut self, warp: &mut Warp, mask: u32, named: &Words) {
        if !self.launch.full {
            return;
        }
        // `bar.warp.sync` orders memory among the lanes of its mask; shuffles
        // and votes do not, so only this instruction comes here (PTX ISA,
        // "bar.warp.sync").
        let all = named[mask.trailing_zeros() as usize] & warp.alive();
        let mut gathered = Gathered::default();
        self.gather(&mut gathered, warp, all);
        self.time += 1;
        if let Some(known) = gathered.take() {
            for lane in lanes_of(all) {
                warp.known[lane] = known.clone();
            }
        }
    }

    pub fn cluster_arrive(&mut self, warp: &mut Warp, mask: u32) {
        if !self.launch.full {
            return;
        }
        let mut gathered = std::mem::take(&mut self.cluster_barrier.gathered);
        self.gather(&mut gathered, warp, mask);
        self.time += 1;
        self.cluster_barrier.gathered = gathered;
    }

    pub fn cluster_acquire(&mut self, warp: &mut Warp, mask: u32) {
        if let Some(known) = &self.cluster_barrier.complete {
            for lane in lanes_of(mask) {
                warp.known[lane].join(known);
            }
        }
    }

    /// Returns true if an mbarrier was initialised at this place.
    pub fn is_mbarrier(&self, block: usize, offset: usize) -> bool {
        self.sync.mbarriers.contains_key(&(block, offset))
    }

    /// Records `mbarrier.init`: a write, and a new history.
    pub fn begin_mbarrier(
        &mut self,
        warp: &mut Warp,
        block: usize,
        offset: usize,
        lane: usize,
    ) -> Step<()> {
        let component = self.component(Component::Phases { block, offset });
        self.sync
            .mbarriers
            .entry((block, offset))
            .or_insert(Phases {
                component,
                ..Phases::default()
            });
        // The init is a plain write: another thread that uses the barrier races
        // with it unless a barrier or fence comes between. One of the planted
        // mistakes of docs/SIMULATOR.md is just this.
        self.shared_write(warp, block, offset, &[0; 8], lane, MemoryOrder::Weak)
    }

    /// Checks that the thread knows the initialisation, as every use must.
    pub fn use_mbarrier(
        &mut self,
        warp: &mut Warp,
        block: usize,
        offset: usize,
        lane: usize,
    ) -> Step<()> {
        if !self.is_mbarrier(block, offset) {
            let text = format!("uses the mbarrier at {offset:#x}, which was not initialised");
            return Err(Fault::new(FindingKind::Mbarrier, 1 << lane, text));
        }
        // Relaxed order: barrier operations are atomic among themselves and
        // never race with each other, only with plain accesses to the word.
        self.shared_read(warp, block, offset, 8, 1 << lane, MemoryOrder::Relaxed)
    }

    pub fn mbarrier_release(&mut self, warp: &mut Warp, block: usize, offset: usize, lane: usize) {
        if !self.launch.full {
            return;
        }
        let time = self.time;
        // An arrival has release semantics at block scope by default (PTX ISA,
        // "mbarrier.arrive"), so what this thread did reaches the threads that
        // wait for the phase.
        if let Some(own) = self.sync.mbarriers.get_mut(&(block, offset)) {
            own.gathered
                .add(&warp.known, warp.number, 1 << lane, false, time);
        }
        self.time += 1;
    }

    pub fn mbarrier_acquire(&mut self, warp: &mut Warp, block: usize, offset: usize, lane: usize) {
        // Only completed phases are acquired: what arrivals of the phase in
        // flight brought must stay invisible until it ends.
        let own = self.sync.mbarriers.get(&(block, offset));
        if let Some(known) = own.and_then(|own| own.complete.as_ref()) {
            warp.known[lane].join(known);
        }
    }

    /// Completes a phase.
    pub fn mbarrier_phase(&mut self, block: usize, offset: usize) -> Step<()> {
        let warps = self.warps.len();
        let Some(own) = self.sync.mbarriers.get_mut(&(block, offset)) else {
            return Ok(());
        };
        own.count += 1;
        self.bulk.check_phase(block, offset, own.count)?;
        if !self.launch.full {
            return Ok(());
        }
        // Knowledge adds up over the phases: a thread that waits for phase n
        // has also everything of the phases before, by the order of the
        // barrier.
        let mut known = own
            .complete
            .take()
            .unwrap_or_else(|| Known::start(warps, 0));
        if let Some(gathered) = own.gathered.take() {
            known.join(&gathered);
        }
        // Bytes that TMA wrote for this phase become known with the phase and
        // in no other way. They carry the component's number instead of a
        // thread's.
        std::rc::Rc::make_mut(&mut known.seen).add_engine(own.component, own.count);
        own.complete = Some(known);
        Ok(())
    }

    /// Returns the component of an mbarrier, and the number of the current
    /// phase.
    pub fn phase_under_way(&self, block: usize, offset: usize) -> Option<CompletionStep> {
        let own = self.sync.mbarriers.get(&(block, offset))?;
        Some(CompletionStep {
            component: own.component,
            step: own.count + 1,
        })
    }

    /// Releases a thread's knowledge before a store or an atomic that others
    /// may wait for.
    pub fn order_before(
        &mut self,
        warp: &mut Warp,
        order: MemoryOrder,
        space: StateSpace,
        addresses: &Doubles,
        mask: u32,
    ) {
        let lanes = match order {
            MemoryOrder::Weak | MemoryOrder::Acquire => 0,
            // A relaxed store after `fence.acq_rel` releases as a pattern (PTX
            // ISA, "Release and Acquire Patterns"); a relaxed store without a
            // fence releases nothing.
            MemoryOrder::Relaxed => mask & warp.fences,
            _ => mask,
        };
        if lanes == 0 || !self.launch.full {
            return;
        }
        for lane in lanes_of(lanes) {
            let mut own = std::mem::take(
                self.sync
                    .locations
                    .entry((space, addresses[lane]))
                    .or_default(),
            );
            self.gather(&mut own, warp, 1 << lane);
            self.sync.locations.insert((space, addresses[lane]), own);
        }
        self.time += 1;
    }

    /// Acquires the knowledge that a load or an atomic brings.
    pub fn order_after(
        &mut self,
        warp: &mut Warp,
        order: MemoryOrder,
        space: StateSpace,
        addresses: &Doubles,
        mask: u32,
    ) {
        // Relaxed loads acquire as well. The strict rule wants a fence after
        // them, but spin loops place that fence behind the loop, so the
        // simulator is lenient here instead of reporting races in correct
        // kernels.
        if matches!(order, MemoryOrder::Weak | MemoryOrder::Release)
            || self.sync.locations.is_empty()
        {
            return;
        }
        for lane in lanes_of(mask) {
            let own = self.sync.locations.get(&(space, addresses[lane]));
            if let Some(known) = own.and_then(Gathered::known) {
                warp.known[lane].join(known);
            }
        }
    }

    pub fn fence(&mut self, warp: &mut Warp, fence: Fence, mask: u32) {
        match fence {
            Fence::Memory => warp.fences |= mask,
            // `fence.mbarrier_init` makes the init visible to the async proxy
            // in the same way, although it orders that one write alone.
            Fence::ProxyAsync | Fence::MbarrierInit if self.launch.full => {
                for lane in lanes_of(mask) {
                    let thread = warp.number * 32 + lane as u32;
                    warp.known[lane].fence(thread, self.time);
                }
                self.time += 1;
            }
            _ => {}
        }
    }

    fn accessor<'w>(&self, warp: &'w Warp, lanes: u32, order: MemoryOrder) -> Accessor<'w> {
        Accessor {
            warp: warp.number,
            lanes,
            time: self.time,
            known: &warp.known[lanes.trailing_zeros() as usize],
            atomic: order != MemoryOrder::Weak,
            pc: self.pc,
        }
    }

    /// Checks and records a read by lanes that know the same.
    #[inline]
    pub fn shared_read(
        &mut self,
        warp: &Warp,
        block: usize,
        offset: usize,
        bytes: usize,
        lanes: u32,
        order: MemoryOrder,
    ) -> Step<()> {
        if !self.launch.full {
            return Ok(());
        }
        let by = self.accessor(warp, lanes, order);
        let result = self.blocks[block].shadow.read(&by, offset, bytes);
        result.map_err(|clash| self.clash(warp, lanes, ("reads", offset, bytes), clash))
    }

    /// Checks and records a write of these bytes.
    #[inline]
    pub fn shared_write(
        &mut self,
        warp: &Warp,
        block: usize,
        offset: usize,
        new: &[u8],
        lane: usize,
        order: MemoryOrder,
    ) -> Step<()> {
        if !self.launch.full {
            return Ok(());
        }
        let by = self.accessor(warp, 1 << lane, order);
        let own = &mut self.blocks[block];
        match own.shadow.check_write(&by, offset, new.len()) {
            Ok(()) => {}
            // Lanes of one instruction may write the same value to one place.
            // PTX leaves the winner open, so equal values are the only safe
            // case.
            Err(Clash::Write { thread, pc })
                if thread / 32 == warp.number
                    && pc == self.pc
                    && own.shared[offset..offset + new.len()] == *new => {}
            Err(clash) => {
                return Err(self.clash(warp, 1 << lane, ("writes", offset, new.len()), clash));
            }
        }
        self.blocks[block].shadow.write(&by, offset, new.len());
        Ok(())
    }

    /// Checks and records an atomic update.
    pub fn shared_mark(
        &mut self,
        warp: &Warp,
        block: usize,
        offset: usize,
        bytes: usize,
        lane: usize,
    ) -> Step<()> {
        if !self.launch.full {
            return Ok(());
        }
        let by = self.accessor(warp, 1 << lane, MemoryOrder::Relaxed);
        let shadow = &mut self.blocks[block].shadow;
        let result = shadow.check_write(&by, offset, bytes);
        if result.is_ok() {
            shadow.write(&by, offset, bytes);
        }
        result.map_err(|clash| self.clash(warp, 1 << lane, ("updates", offset, bytes), clash))
    }

    /// Checks and records that a `cp.async` begins to write.
    pub fn copy_starts(
        &mut self,
        warp: &Warp,
        block: usize,
        offset: usize,
        bytes: usize,
        lane: usize,
    ) -> Step<()> {
        if !self.launch.full {
            return Ok(());
        }
        let by = self.accessor(warp, 1 << lane, MemoryOrder::Weak);
        let shadow = &mut self.blocks[block].shadow;
        let result = shadow.check_write(&by, offset, bytes);
        if result.is_ok() {
            // A `cp.async` writes at an unknown time until its wait, so its
            // stamp is one that nobody can know; even the issuing thread may
            // not read yet.
            shadow.copy(&by, offset, bytes);
        }
        result.map_err(|clash| self.clash(warp, 1 << lane, ("copies to", offset, bytes), clash))
    }

    /// Records that the thread knows its `cp.async` to have written.
    pub fn copy_ends(
        &mut self,
        warp: &Warp,
        block: usize,
        offset: usize,
        bytes: usize,
        lane: usize,
        pc: u32,
    ) {
        if !self.launch.full {
            return;
        }
        let by = Accessor {
            pc,
            ..self.accessor(warp, 1 << lane, MemoryOrder::Weak)
        };
        self.blocks[block].shadow.write(&by, offset, bytes);
    }
}
