//! The bulk copies of a cluster.

use crate::finding::{Fault, FindingKind, Step};
use moesaic_hardware::tensor_map::ElementType;
use moesaic_hardware::tma::{BoxPiece, BulkReduction};
use std::collections::HashMap;

/// The copies in flight and the groups of each thread.
#[derive(Default)]
pub struct Bulks {
    pub jobs: Vec<BulkCopy>,
    pub threads: HashMap<u32, BulkGroups>,
    pub step: u64,
}

/// The bulk groups of a thread.
#[derive(Clone, Copy, Debug, Default)]
pub struct BulkGroups {
    /// Copies were issued since the last commit.
    pub open: bool,
    pub committed: u32,
    /// Number of groups the thread has waited for.
    pub waited: u32,
}

/// A copy in flight.
pub struct BulkCopy {
    pub due: u64,
    pub pc: u32,
    pub thread: u32,
    pub moves: Vec<BoxPiece>,
    pub action: Action,
}

/// The direction and the completion of a copy.
pub enum Action {
    /// Copies global memory, or the shared memory of another block, to these
    /// blocks. Each signals the mbarrier at this offset.
    Load {
        from: Option<usize>,
        blocks: Vec<usize>,
        mbarrier: usize,
        phases: Vec<u32>,
        bytes: u32,
        fill: [u8; 16],
    },
    /// Copies a block's shared memory to global memory, in this group.
    Store {
        block: usize,
        group: u32,
        reduction: Option<(BulkReduction, ElementType)>,
    },
}

impl Bulks {
    pub fn is_idle(&self) -> bool {
        self.jobs.is_empty()
    }

    pub fn first(&self) -> Option<&BulkCopy> {
        self.jobs.first()
    }

    /// Checks that a phase which completes has no copy in flight that signals
    /// it.
    pub fn check_phase(&self, block: usize, offset: usize, phase: u32) -> Step<()> {
        let late = |job: &&BulkCopy| match &job.action {
            Action::Load {
                blocks,
                mbarrier,
                phases,
                ..
            } => {
                // A phase that completes with a copy outstanding means that the
                // announced bytes were fewer than the copied ones. Hardware
                // shows that as rare wrong tiles, since the late bytes are
                // taken for the next phase.
                *mbarrier == offset && blocks.iter().zip(phases).any(|own| own == (&block, &phase))
            }
            Action::Store { .. } => false,
        };
        match self.jobs.iter().find(late) {
            None => Ok(()),
            Some(job) => {
                let text = format!(
                    "a phase of the mbarrier at {offset:#x} is over while a bulk copy for it is \
                     in flight: expect_tx announced too few bytes"
                );
                let mut fault = Fault::new(FindingKind::Mbarrier, 0, text);
                fault.other = Some(job.pc);
                Err(fault)
            }
        }
    }
}
