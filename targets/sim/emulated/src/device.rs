//! An emulated CPU as a [`Device`].

use crate::machine::ProgramHost;
use crate::memory::Memory;
use crate::module::EmulatedModule;
use crate::program::{Program, Request, RunError};
use moesaic_kernel::{CpuIsa, Entry, SimArch, Target};
use moesaic_target::{
    Artifact, Buffer, Device, DeviceError, DeviceInfo, Module, Ptr, SharedError, UnavailableReason,
};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// One core of a CPU with an instruction set that this machine lacks. New
/// memory holds NaN. A launch fails with [`DeviceError::Launch`] if it writes
/// behind the end of a buffer, or if the program ends because it reads unmapped
/// memory or executes an instruction that the CPU does not have. Launches are
/// synchronous.
pub struct EmulatedDevice {
    info: DeviceInfo,
    shared: Arc<DeviceState>,
}

/// The state that modules share with their device.
pub(crate) struct DeviceState {
    machine: ProgramHost,
    memory: Arc<Memory>,
    /// The running programs, the one launched last at the end.
    running: Mutex<Vec<(PathBuf, Program)>>,
}

/// Largest number of programs that wait for launches: each takes some ten
/// megabytes and starts in some milliseconds.
const MOST_RUNNING: usize = 12;

/// An allocation, freed on drop.
pub(crate) struct Owner {
    pub(crate) address: u64,
    memory: Arc<Memory>,
}

impl EmulatedDevice {
    /// Opens a CPU with this instruction set: [`CpuIsa::Neon`],
    /// [`CpuIsa::NeonBf16`] or [`CpuIsa::Amx`].
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] names the missing emulator to install, or
    /// the feature that this CPU lacks.
    pub fn new(isa: CpuIsa) -> Result<EmulatedDevice, DeviceError> {
        let unavailable = |reason| DeviceError::Unavailable {
            backend: "sim".to_string(),
            reason,
        };
        let machine = ProgramHost::find(isa)
            .map_err(|error| unavailable(UnavailableReason::Simulator(SharedError::new(error))))?;
        let memory = Memory::new().map_err(|error| {
            unavailable(UnavailableReason::System {
                attempted: "its memory cannot be made".to_string(),
                source: error.into(),
            })
        })?;
        let info = DeviceInfo {
            name: machine.name(),
            target: Target::Sim(SimArch::Cpu(isa)),
            units: 1,
            memory_bytes: Some(crate::memory::BYTES),
        };
        let memory = Arc::new(memory);
        let shared = Arc::new(DeviceState {
            machine,
            memory,
            running: Mutex::default(),
        });
        Ok(EmulatedDevice { info, shared })
    }
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

    fn alloc(&self, bytes: usize) -> Result<Owner, DeviceError> {
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

impl Device for EmulatedDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn load(&self, artifact: &Artifact, entries: &[Entry]) -> Result<Arc<dyn Module>, DeviceError> {
        let module = EmulatedModule::load(artifact, entries, Arc::clone(&self.shared))?;
        Ok(Arc::new(module))
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer, DeviceError> {
        let owner = self.shared.alloc(bytes)?;
        Ok(Buffer::new(Ptr(owner.address), bytes, Box::new(owner)))
    }

    fn upload(&self, bytes: &[u8], buffer: &Buffer, offset: usize) -> Result<(), DeviceError> {
        let to = buffer.range("upload", offset, bytes.len())?;
        self.shared.memory.write(to.0, bytes)
    }

    fn download(
        &self,
        buffer: &Buffer,
        offset: usize,
        bytes: &mut [u8],
    ) -> Result<(), DeviceError> {
        let from = buffer.range("download", offset, bytes.len())?;
        self.shared.memory.read(from.0, bytes)
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        Ok(())
    }
}
