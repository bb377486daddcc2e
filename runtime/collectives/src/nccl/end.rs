//! The orderly end of a world.

use super::group::Nccl;
use super::watch::Board;
use crate::api::{Call, Collectives};
use crate::{CollectiveError, InvalidReason, SetupError};
use std::time::Instant;

impl Nccl {
    /// Closes the world once all ranks have called it and nothing is in flight. Groups that were
    /// split off are unusable afterwards.
    ///
    /// # Errors
    /// As [`Communicator::finish`](crate::Communicator::finish).
    pub fn finish(mut self, call: &Call) -> Result<(), CollectiveError> {
        self.barrier(call)?.wait()?;
        let deadline = call.deadline.unwrap_or(self.deadline);
        let start = Instant::now();
        while self.world.board.abandoned_only() && start.elapsed() < deadline {
            std::thread::yield_now();
        }
        let busy = self.world.board.in_flight().unwrap_or_default();
        let all = self.gather_bytes(busy.as_bytes(), call)?;
        if let Some(busy) = all.iter().find(|busy| !busy.is_empty()) {
            return Err(CollectiveError::Invalid {
                operation: "finish".to_string(),
                reason: InvalidReason::InFlight {
                    operation: String::from_utf8_lossy(busy).into_owned(),
                    meanwhile: false,
                },
            });
        }
        let until = Instant::now() + deadline;
        for comm in self.world.board.comms() {
            comm.close(until).map_err(CollectiveError::setup)?;
        }
        let board: &Board = &self.world.board;
        board.close(Some(CollectiveError::setup(SetupError::Finished)));
        match self.control.take() {
            Some(control) => control.finish(call),
            None => Ok(()),
        }
    }
}
