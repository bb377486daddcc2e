//! TMA: bulk copies of lines and boxes.

mod carry;
mod issue;

use super::ClusterRunner;
use super::state::bulk::{Action, BulkCopy};
use super::state::sync::Component;
use super::warp::{Flow, Wait, Warp, lanes_of};
use crate::finding::{Fault, FindingKind, Step};
use moesaic_hardware::tma::BoxPiece;

/// The two ends of a copy, for one thread.
struct Line {
    lane: usize,
    shared: u64,
    bytes: u32,
    moves: Vec<BoxPiece>,
    fill: [u8; 16],
    /// The copy is of a tensor's box, not of plain memory.
    is_box: bool,
}

impl ClusterRunner<'_> {
    fn enqueue(&mut self, warp: &Warp, line: Line, action: impl FnOnce(&Line) -> Action) {
        // Delays differ per copy, so copies overtake each other. TMA gives no
        // order between two bulk operations (PTX ISA, "cp.async.bulk": no
        // ordering guarantee).
        let delay = match self.launch.seed {
            0 => 0,
            _ => self.random.below(24),
        };
        let action = action(&line);
        self.bulk.jobs.push(BulkCopy {
            due: self.bulk.step + delay,
            pc: self.pc,
            thread: warp.number * 32 + line.lane as u32,
            moves: line.moves,
            action,
        });
    }

    pub fn bulk_commit(&mut self, warp: &Warp, mask: u32) {
        for lane in lanes_of(mask) {
            let thread = warp.number * 32 + lane as u32;
            let groups = self.bulk.threads.entry(thread).or_default();
            groups.committed += 1;
            groups.open = false;
        }
    }

    pub fn bulk_wait(&mut self, warp: &mut Warp, left: u32, read: bool, mask: u32) -> Step<Flow> {
        if !self.bulk_done(warp.number, mask, left, read) {
            return Ok(Flow::Again(Wait::Bulk { left, read }));
        }
        for lane in lanes_of(mask) {
            let thread = warp.number * 32 + lane as u32;
            let Some(groups) = self.bulk.threads.get_mut(&thread) else {
                continue;
            };
            // Waiting for fewer groups later on does not undo an earlier wait.
            groups.waited = groups.waited.max(groups.committed.saturating_sub(left));
            let waited = groups.waited;
            let component = self.component(Component::Bulk { thread });
            let seen = &mut warp.known[lane].seen;
            std::rc::Rc::make_mut(seen).add_engine(component, waited);
        }
        Ok(Flow::Next)
    }

    /// Returns true if all but the last `left` groups of these threads are
    /// complete.
    pub fn bulk_done(&self, warp: u32, mask: u32, left: u32, _read: bool) -> bool {
        lanes_of(mask).all(|lane| {
            let thread = warp * 32 + lane as u32;
            let committed = self
                .bulk
                .threads
                .get(&thread)
                .map_or(0, |own| own.committed);
            let due = committed.saturating_sub(left);
            // `.read` waits only for the reads of shared memory; here a store
            // reads and writes in one step, so both waits end together.
            !self.bulk.jobs.iter().any(|job| match job.action {
                Action::Store { group, .. } => job.thread == thread && group <= due,
                Action::Load { .. } => false,
            })
        })
    }

    /// Checks that threads which end have waited for their stores.
    pub fn end_bulk(&mut self, warp: &Warp, mask: u32) -> Step<()> {
        for lane in lanes_of(mask) {
            let thread = warp.number * 32 + lane as u32;
            let own = self.bulk.threads.get(&thread).copied().unwrap_or_default();
            // Shared memory is gone once its block ends, so a store that still
            // reads it would copy another block's bytes.
            if own.open || own.waited < own.committed {
                let text = "ends with bulk stores it has not waited for";
                return Err(Fault::new(FindingKind::PendingAtExit, 1 << lane, text));
            }
        }
        Ok(())
    }

    /// Executes the copies that are due; with `force`, the one that is due
    /// first.
    pub fn run_bulk(&mut self, force: bool) -> Step<bool> {
        self.bulk.step += 1;
        let mut done = false;
        loop {
            let jobs = self.bulk.jobs.iter().enumerate();
            let Some((at, job)) = jobs.min_by_key(|(_, job)| job.due) else {
                return Ok(done);
            };
            // With `force` one copy must run even before its time. Only one,
            // because it may already wake a thread, and the others can stay
            // late.
            if job.due > self.bulk.step && (done || !force) {
                return Ok(done);
            }
            let job = self.bulk.jobs.remove(at);
            self.changes += 1;
            self.carry_out(job)?;
            done = true;
        }
    }
}
