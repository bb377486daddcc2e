//! The emulated CPU as a [`Device`].

use crate::emulator::{self, Emulator, Request};
use crate::memory::Memory;
use crate::module::QemuModule;
use moesaic_kernel::{CpuIsa, Entry, SimArch, Target};
use moesaic_target::{Artifact, Buffer, Device, DeviceError, DeviceInfo, Module, Ptr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// One core of an aarch64 CPU, emulated instruction by instruction. New
/// memory holds NaN, and a launch that wrote behind the end of a buffer is a
/// [`DeviceError::Launch`]; so is one that ended the program, by reading what
/// is not mapped or by an instruction that the CPU does not have. Launches
/// are synchronous.
pub struct QemuDevice {
    info: DeviceInfo,
    shared: Arc<Shared>,
}

/// What modules need of their device.
pub(crate) struct Shared {
    qemu: PathBuf,
    isa: CpuIsa,
    memory: Arc<Memory>,
    /// The programs that run, the one that was launched last at the end.
    running: Mutex<Vec<(PathBuf, Emulator)>>,
}

/// Programs that wait for launches, of all that are loaded: each takes some
/// ten megabytes and starts in some milliseconds.
const MOST_RUNNING: usize = 12;

/// An allocation, freed on drop.
pub(crate) struct Owner {
    pub(crate) address: u64,
    memory: Arc<Memory>,
}

impl QemuDevice {
    /// A CPU with this instruction set: [`CpuIsa::Neon`] or
    /// [`CpuIsa::NeonBf16`].
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] names what to install where there is no
    /// emulator.
    pub fn new(isa: CpuIsa) -> Result<QemuDevice, DeviceError> {
        let unavailable = |reason| DeviceError::Unavailable {
            backend: "sim".to_string(),
            reason,
        };
        if Target::Cpu(isa).simulated().is_none() {
            let reason = format!("`{}` is of no emulated machine", isa.name());
            return Err(unavailable(reason));
        }
        let qemu = emulator::find().map_err(unavailable)?;
        let memory = Memory::new().map_err(|error| unavailable(error.to_string()))?;
        let program = qemu.file_name().unwrap_or(qemu.as_os_str());
        let info = DeviceInfo {
            name: format!("aarch64 under {}", program.to_string_lossy()),
            target: Target::Sim(SimArch::Cpu(isa)),
            units: 1,
            memory_bytes: Some(crate::memory::BYTES),
        };
        let memory = Arc::new(memory);
        let shared = Arc::new(Shared {
            qemu,
            isa,
            memory,
            running: Mutex::default(),
        });
        Ok(QemuDevice { info, shared })
    }
}

impl Shared {
    /// Launches are one after the other, as on a stream. A program that failed
    /// is gone, and its next launch starts it again.
    pub(crate) fn run(&self, program: &Path, request: &Request<'_>) -> Result<(), String> {
        let mut running = self.running();
        let mut emulator = match take(&mut running, program) {
            Some(emulator) => emulator,
            None => self.start(program)?,
        };
        emulator.run(request)?;
        if running.len() == MOST_RUNNING {
            running.remove(0);
        }
        running.push((program.to_path_buf(), emulator));
        self.memory.check_fences()
    }

    /// A block's own memory for a launch, if it wants any: its first line is
    /// zero, as a thread of a real CPU finds it.
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

    /// Ends the program, if it runs.
    pub(crate) fn stop(&self, program: &Path) {
        drop(take(&mut self.running(), program));
    }

    fn start(&self, program: &Path) -> Result<Emulator, String> {
        Emulator::start(&self.qemu, self.isa, program, self.memory.file())
            .map_err(|error| format!("{} cannot be started: {error}", self.qemu.display()))
    }

    fn running(&self) -> MutexGuard<'_, Vec<(PathBuf, Emulator)>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn take(running: &mut Vec<(PathBuf, Emulator)>, program: &Path) -> Option<Emulator> {
    let at = running.iter().position(|(path, _)| path == program)?;
    Some(running.remove(at).1)
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.memory.free(self.address);
    }
}

impl Device for QemuDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn load(&self, artifact: &Artifact, entries: &[Entry]) -> Result<Arc<dyn Module>, DeviceError> {
        let module = QemuModule::load(artifact, entries, Arc::clone(&self.shared))?;
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
