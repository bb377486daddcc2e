//! The comparison of operations across ranks, over eager messages.

use super::group::{Nccl, Task};
use super::options::Checks;
use crate::communicator::OperationDraft;
use crate::{CollectiveError, Handle, schedules};

impl Nccl {
    /// Starts the comparison of an operation with the other ranks.
    pub(super) fn agree(&mut self, task: &Task<'_>) -> Result<Option<Handle>, CollectiveError> {
        let (rank, size) = (self.group.rank, self.group.members.len());
        let Some(control) = &mut self.control else {
            return Ok(None);
        };
        if self.world.checks == Checks::Off {
            return Ok(None);
        }
        let plan = task.agreement.clone();
        let draft = OperationDraft {
            signature: task.signature.clone(),
            inputs: Ok(Vec::new()),
            outputs: Ok(Vec::new()),
            plan: plan.unwrap_or_else(|| schedules::agreement(schedules::barrier(rank, size))),
            next: None,
        };
        let started = control.start(task.kind, task.call, draft);
        started
            .map(Some)
            .inspect_err(|error| self.world.board.fail(None, error.clone()))
    }
}
