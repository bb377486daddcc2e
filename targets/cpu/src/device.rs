//! This machine's CPU as a [`Device`].

use crate::crew::Crew;
use crate::memory::Memory;
use crate::module::CpuModule;
use moesaic_kernel::{Entry, Target};
use moesaic_target::{Artifact, Buffer, Device, DeviceError, DeviceInfo, Module, Ptr};
use std::sync::Arc;

/// This machine's CPU. Launches are synchronous: a launch has finished when
/// it returns.
pub struct CpuDevice {
    info: DeviceInfo,
    crew: Arc<Crew>,
    poisoned: bool,
}

impl CpuDevice {
    /// All threads of the rayon pool the caller is in, or of the global one.
    pub fn new() -> CpuDevice {
        CpuDevice::from(Crew::Shared)
    }

    /// Exactly `threads` threads, the launching one included; 0 counts as 1.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] when the threads cannot be started.
    pub fn with_threads(threads: usize) -> Result<CpuDevice, DeviceError> {
        Crew::of(threads)
            .map(CpuDevice::from)
            .map_err(|error| DeviceError::Unavailable {
                backend: "cpu".to_string(),
                reason: format!("{threads} threads cannot be started: {error}"),
            })
    }

    /// The same device, but new buffers are filled with 0xFF (NaN as floats,
    /// -1 as integers), so that reading what was never written shows.
    #[must_use]
    pub fn poisoned(self) -> CpuDevice {
        CpuDevice {
            poisoned: true,
            ..self
        }
    }

    /// Threads a launch from here would use.
    pub fn threads(&self) -> usize {
        self.crew.threads()
    }
}

impl Default for CpuDevice {
    fn default() -> CpuDevice {
        CpuDevice::new()
    }
}

impl From<Crew> for CpuDevice {
    fn from(crew: Crew) -> CpuDevice {
        let info = DeviceInfo {
            name: field("/proc/cpuinfo", "model name")
                .unwrap_or_else(|| format!("{} CPU", std::env::consts::ARCH)),
            target: Target::Cpu(crate::host_isa()),
            units: crew.threads() as u32,
            memory_bytes: field("/proc/meminfo", "MemTotal").and_then(|text| kilobytes(&text)),
        };
        CpuDevice {
            info,
            crew: Arc::new(crew),
            poisoned: false,
        }
    }
}

/// The value of `name: value` in one of the kernel's text files.
fn field(file: &str, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(file).ok()?;
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim().to_string())
}

/// What is left of the limit of this process's control group, if it has one
/// of its own: containers and batch systems set it. Cached files count as
/// left, since the system gives them up for memory that is asked for.
fn group_bytes() -> Option<u64> {
    let read = |file: &str| std::fs::read_to_string(format!("/sys/fs/cgroup/{file}")).ok();
    let number = |text: &str| text.trim().parse::<u64>().ok();
    let stat = read("memory.stat")?;
    let cached = stat
        .lines()
        .find_map(|line| number(line.strip_prefix("file ")?))?;
    let used = number(&read("memory.current")?)?.saturating_sub(cached);
    Some(number(&read("memory.max")?)?.saturating_sub(used))
}

fn kilobytes(text: &str) -> Option<u64> {
    Some(text.strip_suffix(" kB")?.trim().parse::<u64>().ok()? * 1024)
}

impl Device for CpuDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn load(&self, artifact: &Artifact, entries: &[Entry]) -> Result<Arc<dyn Module>, DeviceError> {
        Ok(Arc::new(CpuModule::load(
            artifact,
            entries,
            Arc::clone(&self.crew),
        )?))
    }

    fn free_bytes(&self) -> Option<u64> {
        let machine = field("/proc/meminfo", "MemAvailable").and_then(|text| kilobytes(&text));
        machine.into_iter().chain(group_bytes()).min()
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer, DeviceError> {
        let memory = Memory::new(bytes)?;
        if self.poisoned {
            memory.poison();
        }
        Ok(Buffer::new(Ptr(memory.address()), bytes, Box::new(memory)))
    }

    fn upload(&self, bytes: &[u8], buffer: &Buffer, offset: usize) -> Result<(), DeviceError> {
        let start = place("upload", buffer, offset, bytes.len())?;
        // SAFETY: the range lies in the buffer, which its owner keeps alive;
        // launches are synchronous, so no kernel of this thread is using it.
        unsafe { std::ptr::copy(bytes.as_ptr(), start, bytes.len()) };
        Ok(())
    }

    fn download(
        &self,
        buffer: &Buffer,
        offset: usize,
        bytes: &mut [u8],
    ) -> Result<(), DeviceError> {
        let start = place("download", buffer, offset, bytes.len())?;
        // SAFETY: as in `upload`.
        unsafe { std::ptr::copy(start, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        Ok(())
    }
}

/// The address of `offset` in `buffer`, if `length` bytes fit behind it.
fn place(
    what: &str,
    buffer: &Buffer,
    offset: usize,
    length: usize,
) -> Result<*mut u8, DeviceError> {
    let end = offset.checked_add(length);
    if end.is_some_and(|end| end <= buffer.bytes()) {
        return Ok((buffer.ptr().0 as usize + offset) as *mut u8);
    }
    Err(DeviceError::Driver {
        operation: format!("{what} of {length} bytes at byte {offset}"),
        reason: format!("the buffer holds {} bytes", buffer.bytes()),
    })
}
