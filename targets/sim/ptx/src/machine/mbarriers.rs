//! Instructions on mbarriers.

use super::ClusterRunner;
use super::access::{SpacePart, addresses, little};
use super::warp::{Flow, Wait, Warp, lanes_of};
use crate::code::op::{self, MbarrierKind, NONE};
use crate::finding::{Fault, FindingKind, Step};
use crate::text::StateSpace;
use moesaic_hardware::mbarrier::{Mbarrier, MbarrierError};

/// Returns the fault of a barrier at an offset.
fn misuse(error: MbarrierError, offset: usize, lane: usize) -> Box<Fault> {
    let text = format!("mbarrier at {offset:#x}: {error}");
    Fault::new(FindingKind::Mbarrier, 1 << lane, text)
}

impl ClusterRunner<'_> {
    pub fn mbarrier(&mut self, warp: &mut Warp, op: &op::MbarrierOp, mask: u32) -> Step<Flow> {
        let list = self.resolve(
            match op.space {
                StateSpace::Generic => StateSpace::Generic,
                _ => StateSpace::Shared,
            },
            &addresses(warp, &op.address),
            mask,
        );
        for SpacePart {
            space,
            addresses: list,
            mask,
        } in list
        {
            if space != StateSpace::Shared {
                let text = "an mbarrier has to be in shared memory";
                return Err(Fault::new(FindingKind::Mbarrier, mask, text));
            }
            // Lanes act one after the other, as 32 arrivals on hardware do: an
            // elected lane and a whole warp use the same instruction.
            for lane in lanes_of(mask) {
                let (block, offset) = self.shared_at("uses", warp.block, list[lane], 8, lane)?;
                if let Some(wait) = self.mbarrier_lane(warp, op, (block, offset), lane)? {
                    return Ok(Flow::Again(wait));
                }
            }
        }
        Ok(Flow::Next)
    }

    fn mbarrier_lane(
        &mut self,
        warp: &mut Warp,
        op: &op::MbarrierOp,
        at: (usize, usize),
        lane: usize,
    ) -> Step<Option<Wait>> {
        let a = match (op.a, op.kind) {
            (NONE, _) => 1,
            // The 64-bit state is opaque to programs; here it is the parity of
            // the phase that the thread arrived at.
            (row, MbarrierKind::TestState | MbarrierKind::TryState) => {
                warp.double(row)[lane] as u32
            }
            (row, _) => warp.word(row)[lane],
        };
        if matches!(op.kind, MbarrierKind::Init | MbarrierKind::Invalidate) {
            return self.set_up(warp, op.kind, at, a, lane).map(|()| None);
        }
        let (block, offset) = at;
        self.use_mbarrier(warp, block, offset, lane)?;
        let word = little(&self.blocks[block].shared[offset..offset + 8]);
        let mut barrier = Mbarrier::load(word).map_err(|error| misuse(error, offset, lane))?;
        match op.kind {
            MbarrierKind::TestParity
            | MbarrierKind::TryParity
            | MbarrierKind::TestState
            | MbarrierKind::TryState => self.test(warp, op, at, barrier, a & 1 == 1, lane),
            MbarrierKind::CopyArrive { counted } => {
                // Without `.noinc` the pending count grows by one for the
                // arrival to come (PTX ISA, "cp.async.mbarrier.arrive"); with
                // it, init has to count these arrivals.
                if counted {
                    barrier.pending += 1;
                    self.put_mbarrier(block, offset, barrier.store());
                }
                self.arrive_after_copies(warp, block, offset, lane)?;
                Ok(None)
            }
            _ => self.change(warp, op, at, barrier, a, lane).map(|()| None),
        }
    }

    /// Executes `init` and `inval`.
    fn set_up(
        &mut self,
        warp: &mut Warp,
        kind: MbarrierKind,
        (block, offset): (usize, usize),
        count: u32,
        lane: usize,
    ) -> Step<()> {
        let word = little(&self.blocks[block].shared[offset..offset + 8]);
        let new = match kind {
            // Memory that nothing has written holds no barrier, whatever its
            // bits.
            MbarrierKind::Init if self.is_mbarrier(block, offset) => Mbarrier::init(word, count),
            MbarrierKind::Init => Mbarrier::init(0, count),
            _ => Mbarrier::inval(word),
        };
        let new = new.map_err(|error| misuse(error, offset, lane))?;
        if kind == MbarrierKind::Init {
            self.begin_mbarrier(warp, block, offset, lane)?;
        }
        self.put_mbarrier(block, offset, new);
        Ok(())
    }

    /// Executes arrivals and announcements.
    fn change(
        &mut self,
        warp: &mut Warp,
        op: &op::MbarrierOp,
        (block, offset): (usize, usize),
        mut barrier: Mbarrier,
        a: u32,
        lane: usize,
    ) -> Step<()> {
        // The returned state is that of the phase before the arrival; the
        // arrival itself may complete it.
        let before = barrier.phase;
        let completed = match op.kind {
            MbarrierKind::Arrive => barrier.arrive(a),
            MbarrierKind::ArriveDrop => barrier.arrive_drop(a),
            MbarrierKind::ArriveExpect => barrier.arrive_expect_tx(a),
            MbarrierKind::ExpectTx => barrier.expect_tx(a).map(|()| false),
            MbarrierKind::CompleteTx => barrier.complete_tx(a),
            _ => Ok(false),
        };
        let completed = completed.map_err(|error| misuse(error, offset, lane))?;
        let arrives = !matches!(op.kind, MbarrierKind::ExpectTx | MbarrierKind::CompleteTx);
        if arrives && !op.relaxed {
            // The release comes before the phase can complete, so that the
            // completing thread's own writes are part of what the phase hands
            // on.
            self.mbarrier_release(warp, block, offset, lane);
        }
        self.put_mbarrier(block, offset, barrier.store());
        if completed {
            self.mbarrier_phase(block, offset)?;
        }
        if op.d != NONE {
            warp.doubles[op.d as usize][lane] = u64::from(before);
        }
        Ok(())
    }

    fn test(
        &mut self,
        warp: &mut Warp,
        op: &op::MbarrierOp,
        (block, offset): (usize, usize),
        barrier: Mbarrier,
        parity: bool,
        lane: usize,
    ) -> Step<Option<Wait>> {
        let done = barrier.test_parity(parity);
        let tries = matches!(op.kind, MbarrierKind::TryParity | MbarrierKind::TryState);
        // `try_wait` suspends the thread and `test_wait` returns at once.
        // Suspending it here spares the scheduler the spinning, and a deadlock
        // names the barrier.
        if !done && tries {
            let rank = (block as u32 + 1) << crate::code::layout::RANK_SHIFT;
            return Ok(Some(Wait::Mbarrier {
                address: rank | offset as u32,
                parity,
            }));
        }
        if done && !op.relaxed {
            self.mbarrier_acquire(warp, block, offset, lane);
        }
        warp.put_predicate(op.d, u32::from(done) << lane, 1 << lane);
        Ok(None)
    }

    /// Counts one arrival on behalf of a copy.
    pub fn arrive_once(
        &mut self,
        warp: &mut Warp,
        block: usize,
        offset: usize,
        lane: usize,
    ) -> Step<()> {
        let word = little(&self.blocks[block].shared[offset..offset + 8]);
        let result = Mbarrier::load(word).and_then(|mut barrier| {
            let completed = barrier.arrive(1)?;
            Ok((barrier, completed))
        });
        let (barrier, completed) = result.map_err(|error| {
            let text = format!("mbarrier at {offset:#x}: {error}");
            Fault::new(FindingKind::Mbarrier, 1 << lane, text)
        })?;
        self.mbarrier_release(warp, block, offset, lane);
        self.put_mbarrier(block, offset, barrier.store());
        if completed {
            self.mbarrier_phase(block, offset)?;
        }
        Ok(())
    }

    pub fn put_mbarrier(&mut self, block: usize, offset: usize, word: u64) {
        self.changes += 1;
        self.blocks[block].shared[offset..offset + 8].copy_from_slice(&word.to_le_bytes());
    }

    pub fn phase_done(&self, block: u32, address: u32, parity: bool) -> bool {
        let at = self.shared_at("waits on", block, u64::from(address), 8, 0);
        let Ok((block, offset)) = at else {
            return true;
        };
        let word = little(&self.blocks[block].shared[offset..offset + 8]);
        // A barrier that was invalidated meanwhile wakes its waiters, and the
        // instruction, executed again, reports the misuse.
        Mbarrier::load(word).map_or(true, |barrier| barrier.test_parity(parity))
    }

    pub fn mbarrier_state(&self, block: u32, address: u32, parity: bool) -> String {
        let at = self.shared_at("waits on", block, u64::from(address), 8, 0);
        let Ok((block, offset)) = at else {
            return format!("wait on the mbarrier at {address:#x}");
        };
        let word = little(&self.blocks[block].shared[offset..offset + 8]);
        match Mbarrier::load(word) {
            Ok(barrier) => format!(
                "wait for the phase of parity {} of the mbarrier at {address:#x}, \
                 which misses {} of {} arrivals and {} bytes",
                u8::from(parity),
                barrier.pending,
                barrier.expected,
                barrier.tx
            ),
            Err(error) => format!("wait on the mbarrier at {address:#x}: {error}"),
        }
    }
}
