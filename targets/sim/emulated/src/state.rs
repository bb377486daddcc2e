//! The state that modules share with their device.

use crate::machine::ProgramHost;
use crate::memory::Memory;
use crate::program::{Program, Request, RunError};
use moesaic_target::DeviceError;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The state that modules share with their device.
pub(crate) struct DeviceState {
    pub(crate) machine: ProgramHost,
    pub(crate) memory: Arc<Memory>,
    /// The running programs, the one launched last at the end.
    pub(crate) running: Mutex<Vec<(PathBuf, Program)>>,
}

/// Largest number of programs that wait for launches: each takes some ten
/// megabytes and starts in some milliseconds.
const MOST_RUNNING: usize = 12;

/// An allocation, freed on drop.
pub(crate) struct Owner {
    pub(crate) address: u64,
    memory: Arc<Memory>,
}

impl DeviceState {
    /// Runs a request. Launches run one after the other, as on a stream. A
    /// program that failed is gone, and its next launch starts it again.
    pub(crate) fn run(&self, file: &Path, request: &Request<'_>) -> Result<(), RunError> {
        let mut running = self.running();
        let mut program = match take(&mut running, file) {
            Some(program) => program,
            None => self.start(file)?,
        };
        // The program goes back into the list only after a good run: one that
        // ended, or that did not answer in time, is dropped here, which kills
        // it.
        program.run(request)?;
        if running.len() == MOST_RUNNING {
            // The one that was launched longest ago: layers launch their
            // kernels in turn, so the last ones come again soon.
            running.remove(0);
        }
        running.push((file.to_path_buf(), program));
        // The fences of all allocations are checked, because a wild write may
        // hit any of them, not only those of this launch's arguments.
        self.memory.check_fences()
    }

    /// Allocates a block's scratch memory for a launch, if it needs any. The
    /// first line is zero, as a thread of a real CPU finds it.
    pub(crate) fn scratch(&self, bytes: usize) -> Result<Option<Owner>, DeviceError> {
        if bytes == 0 {
            return Ok(None);
        }
        let owner = self.alloc(bytes)?;
        self.memory
            .write(owner.address, &[0; 64][..bytes.min(64)])?;
        Ok(Some(owner))
    }

    pub(crate) fn alloc(&self, bytes: usize) -> Result<Owner, DeviceError> {
        let address = self.memory.alloc(bytes)?;
        let memory = Arc::clone(&self.memory);
        Ok(Owner { address, memory })
    }

    /// Ends the program if it runs.
    pub(crate) fn stop(&self, file: &Path) {
        drop(take(&mut self.running(), file));
    }

    fn start(&self, file: &Path) -> Result<Program, RunError> {
        Program::start(&self.machine, file, self.memory.file()).map_err(|source| {
            RunError::NotStarted {
                host: self.machine.name(),
                source,
            }
        })
    }

    fn running(&self) -> MutexGuard<'_, Vec<(PathBuf, Program)>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn take(running: &mut Vec<(PathBuf, Program)>, file: &Path) -> Option<Program> {
    let at = running.iter().position(|(path, _)| path == file)?;
    Some(running.remove(at).1)
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.memory.free(self.address);
    }
}
