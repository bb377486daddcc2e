//! The copy engine: bulk copies of lines and boxes.

mod carry;
mod issue;

use super::Machine;
use super::access::lanes_of;
use super::clocks::Component;
use super::run::Flow;
use super::warp::{Wait, Warp};
use crate::finding::{Fault, FindingKind, Step};
use moesaic_hardware::tensor_map::ElementType;
use moesaic_hardware::tma::{Move, Reduction};
use std::collections::HashMap;

/// Copies under way, and the groups of each thread.
#[derive(Default)]
pub struct Bulks {
    jobs: Vec<Job>,
    threads: HashMap<u32, Groups>,
    step: u64,
}

/// The bulk groups of a thread.
#[derive(Clone, Copy, Debug, Default)]
struct Groups {
    /// Copies were issued since the last commit.
    open: bool,
    committed: u32,
    /// Groups the thread has waited for.
    waited: u32,
}

/// One copy.
pub struct Job {
    due: u64,
    pub pc: u32,
    pub thread: u32,
    moves: Vec<Move>,
    action: Action,
}

/// What a copy does with its moves.
enum Action {
    /// Global memory, or another block, to these blocks; each signals the
    /// mbarrier at this offset.
    Load {
        from: Option<usize>,
        blocks: Vec<usize>,
        mbarrier: usize,
        phases: Vec<u32>,
        bytes: u32,
        fill: [u8; 16],
    },
    /// A block's shared memory to global memory, in this group.
    Store {
        block: usize,
        group: u32,
        reduction: Option<(Reduction, ElementType)>,
    },
}

impl Bulks {
    pub fn is_idle(&self) -> bool {
        self.jobs.is_empty()
    }

    pub fn first(&self) -> Option<&Job> {
        self.jobs.first()
    }

    /// A phase is over: nothing that signals it may be under way.
    pub fn check_phase(&self, block: usize, offset: usize, phase: u32) -> Step<()> {
        let late = |job: &&Job| match &job.action {
            Action::Load {
                blocks,
                mbarrier,
                phases,
                ..
            } => {
                *mbarrier == offset && blocks.iter().zip(phases).any(|own| own == (&block, &phase))
            }
            Action::Store { .. } => false,
        };
        match self.jobs.iter().find(late) {
            None => Ok(()),
            Some(job) => {
                let text = format!(
                    "a phase of the mbarrier at {offset:#x} is over while a bulk copy for it is \
                     under way: expect_tx announced too few bytes"
                );
                let mut fault = Fault::new(FindingKind::Mbarrier, 0, text);
                fault.other = Some(job.pc);
                Err(fault)
            }
        }
    }
}

/// Where a copy goes and comes from, for one thread.
struct Line {
    lane: usize,
    shared: u64,
    bytes: u32,
    moves: Vec<Move>,
    fill: [u8; 16],
    /// Of a tensor, not of plain memory.
    is_box: bool,
}

impl Machine<'_> {
    fn enqueue(&mut self, warp: &Warp, line: Line, action: impl FnOnce(&Line) -> Action) {
        let delay = match self.launch.seed {
            0 => 0,
            _ => self.random.below(24),
        };
        let action = action(&line);
        self.bulk.jobs.push(Job {
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
            groups.waited = groups.waited.max(groups.committed.saturating_sub(left));
            let waited = groups.waited;
            let component = self.component(Component::Bulk { thread });
            let seen = &mut warp.known[lane].seen;
            std::rc::Rc::make_mut(seen).add_engine(component, waited);
        }
        Ok(Flow::Next)
    }

    /// Whether all but the last `left` groups of these threads are through.
    pub fn bulk_done(&self, warp: u32, mask: u32, left: u32, _read: bool) -> bool {
        lanes_of(mask).all(|lane| {
            let thread = warp * 32 + lane as u32;
            let committed = self
                .bulk
                .threads
                .get(&thread)
                .map_or(0, |own| own.committed);
            let due = committed.saturating_sub(left);
            !self.bulk.jobs.iter().any(|job| match job.action {
                Action::Store { group, .. } => job.thread == thread && group <= due,
                Action::Load { .. } => false,
            })
        })
    }

    /// Threads that end must have waited for their stores.
    pub fn end_bulk(&mut self, warp: &Warp, mask: u32) -> Step<()> {
        for lane in lanes_of(mask) {
            let thread = warp.number * 32 + lane as u32;
            let own = self.bulk.threads.get(&thread).copied().unwrap_or_default();
            if own.open || own.waited < own.committed {
                let text = "ends with bulk stores it has not waited for";
                return Err(Fault::new(FindingKind::PendingAtExit, 1 << lane, text));
            }
        }
        Ok(())
    }

    /// Carries out what is due; with `force` the copy that is due first.
    pub fn run_bulk(&mut self, force: bool) -> Step<bool> {
        self.bulk.step += 1;
        let mut done = false;
        loop {
            let jobs = self.bulk.jobs.iter().enumerate();
            let Some((at, job)) = jobs.min_by_key(|(_, job)| job.due) else {
                return Ok(done);
            };
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
