//! The `cp.async` copies of a warp.

use crate::machine::warp::{Doubles, Words};

/// The copies of a warp that no thread has waited for.
#[derive(Debug, Default)]
pub struct Copies {
    pub jobs: Vec<AsyncCopy>,
    /// Number of groups that each lane has committed.
    pub committed: Words,
}

/// The copies of one instruction.
#[derive(Debug)]
pub struct AsyncCopy {
    pub lanes: u32,
    /// Number of the group; `None` before commit.
    pub group: Option<u32>,
    pub to: Doubles,
    pub from: Doubles,
    pub bytes: usize,
    pub source_bytes: Words,
    pub moved: bool,
    pub pc: u32,
}

impl Copies {
    pub fn reset(&mut self) {
        self.jobs.clear();
        self.committed = [0; 32];
    }

    /// Lanes with copies they have not waited for.
    pub fn pending(&self) -> u32 {
        self.jobs.iter().fold(0, |lanes, job| lanes | job.lanes)
    }
}
