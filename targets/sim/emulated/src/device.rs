//! An emulated CPU as a [`Device`].

use crate::machine::ProgramHost;
use crate::memory::Memory;
use crate::module::EmulatedModule;
use crate::state::DeviceState;
use moesaic_kernel::{CpuIsa, Entry, SimArch, Target};
use moesaic_target::{
    Artifact, Buffer, Device, DeviceError, DeviceInfo, Module, Ptr, SharedError, UnavailableReason,
};
use std::sync::{Arc, Mutex};

/// One core of a CPU with an instruction set that this machine lacks. New
/// memory holds NaN. A launch fails with [`DeviceError::Launch`] if it writes
/// behind the end of a buffer, or if the program ends because it reads unmapped
/// memory or executes an instruction that the CPU does not have. Launches are
/// synchronous.
pub struct EmulatedDevice {
    info: DeviceInfo,
    shared: Arc<DeviceState>,
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

#[doc(hidden)]
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
