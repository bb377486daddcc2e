//! This machine's CPU as a [`Device`].

use crate::executor::Executor;
use crate::memory::Memory;
use crate::module::CpuModule;
use crate::nodes::{Nodes, host_nodes};
use moesaic_kernel::{CpuCaches, Entry, Target};
use moesaic_target::{
    Artifact, Buffer, Device, DeviceError, DeviceInfo, DriverReason, Module, Ptr, RowCopy,
    UnavailableReason,
};
use std::sync::Arc;

/// The most threads of a device, more than any machine has processors. Linux gives a process some
/// 65000 mappings, of which a thread takes several; a thread that finds none ends the process.
const MOST_THREADS: usize = 8192;

/// This machine's CPU. Launches are synchronous: they have finished when the
/// call returns.
pub struct CpuDevice {
    info: DeviceInfo,
    executor: Arc<Executor>,
    poisoned: bool,
}

impl CpuDevice {
    /// Opens the CPU with a thread per processor that this process may use, the
    /// launching thread included. Devices opened in this way share their
    /// threads. The first launch starts the threads; they sleep between calls
    /// and end with the last of the devices. Launches from several threads run
    /// side by side.
    pub fn new() -> CpuDevice {
        CpuDevice::from(Executor::shared())
    }

    /// Opens the CPU with exactly `threads` threads, the launching one
    /// included; 0 counts as 1.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] when the threads cannot be started.
    pub fn with_threads(threads: usize) -> Result<CpuDevice, DeviceError> {
        CpuDevice::with_nodes(threads, host_nodes().clone())
    }

    /// Opens the CPU with NUMA nodes other than the machine's own: for tests,
    /// and for systems that report wrong ones. Results are the same bytes for
    /// any nodes.
    ///
    /// # Errors
    /// As [`CpuDevice::with_threads`].
    pub fn with_nodes(threads: usize, nodes: Nodes) -> Result<CpuDevice, DeviceError> {
        let executor = match threads {
            0..=MOST_THREADS => Executor::of(threads, nodes),
            _ => Err(std::io::Error::other(format!(
                "a device has at most {MOST_THREADS}"
            ))),
        };
        executor
            .map(CpuDevice::from)
            .map_err(|error| DeviceError::Unavailable {
                backend: "cpu".to_string(),
                reason: UnavailableReason::System {
                    attempted: format!("{threads} threads cannot be started"),
                    source: error.into(),
                },
            })
    }

    /// Returns the same device with each of its own threads kept on one
    /// processor that this process may use. Processors are taken one of each
    /// NUMA node in turn and ascending on a node, so that few threads are
    /// spread over all nodes; more threads than processors go round. The first
    /// processor is left for the launching thread, which the caller has to keep
    /// in place. Threads that devices share stay where the system puts them.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] when the system refuses, or is not Linux.
    pub fn pinned(self) -> Result<CpuDevice, DeviceError> {
        let refused = |error: std::io::Error| DeviceError::Unavailable {
            backend: "cpu".to_string(),
            reason: UnavailableReason::System {
                attempted: "threads cannot be pinned".to_string(),
                source: error.into(),
            },
        };
        self.executor.pin().map_err(refused)?;
        Ok(self)
    }

    /// Returns the same device, which fills new buffers with 0xFF (NaN as
    /// floats, -1 as integers), so that reads of unwritten bytes show.
    #[must_use]
    pub fn poisoned(self) -> CpuDevice {
        CpuDevice {
            poisoned: true,
            ..self
        }
    }

    /// Returns the number of threads that a launch from here would use.
    pub fn threads(&self) -> usize {
        self.executor.threads()
    }
}

impl Default for CpuDevice {
    fn default() -> CpuDevice {
        CpuDevice::new()
    }
}

impl From<Executor> for CpuDevice {
    fn from(executor: Executor) -> CpuDevice {
        let info = DeviceInfo {
            name: field("/proc/cpuinfo", "model name")
                .unwrap_or_else(|| format!("{} CPU", std::env::consts::ARCH)),
            target: Target::Cpu(crate::host_isa()),
            units: executor.threads() as u32,
            memory_bytes: field("/proc/meminfo", "MemTotal").and_then(|text| kilobytes(&text)),
        };
        CpuDevice {
            info,
            executor: Arc::new(executor),
            poisoned: false,
        }
    }
}

/// Returns the value of `name: value` in one of the kernel's text files.
fn field(file: &str, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(file).ok()?;
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim().to_string())
}

/// Returns the bytes left of the limit of this process's control group, if it
/// has one of its own: containers and batch systems set it. Cached files count
/// as left, because the system gives them up for requested memory.
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

#[doc(hidden)]
impl Device for CpuDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn load(&self, artifact: &Artifact, entries: &[Entry]) -> Result<Arc<dyn Module>, DeviceError> {
        Ok(Arc::new(CpuModule::load(
            artifact,
            entries,
            Arc::clone(&self.executor),
        )?))
    }

    fn free_bytes(&self) -> Option<u64> {
        let machine = field("/proc/meminfo", "MemAvailable").and_then(|text| kilobytes(&text));
        machine.into_iter().chain(group_bytes()).min()
    }

    fn caches(&self) -> CpuCaches {
        crate::host_caches()
    }

    fn begin_pass(&self) {
        self.executor.begin_pass();
    }

    fn end_pass(&self) {
        self.executor.end_pass();
    }

    fn begin_placing(&self) {
        crate::executor::begin_placing();
    }

    fn end_placing(&self) {
        crate::executor::end_placing();
    }

    fn places_whole(&self) -> bool {
        self.executor.nodes().count() > 1
    }

    fn host_ptr(&self, bytes: &[u8]) -> Option<Ptr> {
        Some(Ptr(bytes.as_ptr() as u64))
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
        let start = Start(start);
        self.executor.run(parts(bytes.len()), |first, last| {
            let (from, to) = (
                part_start(first, bytes.len()),
                part_start(last, bytes.len()),
            );
            let part = &bytes[from..to];
            // SAFETY: the range lies in the buffer, which its owner keeps alive;
            // launches are synchronous, so no kernel of this thread is using it;
            // parts are disjoint.
            unsafe { std::ptr::copy(part.as_ptr(), start.at(from), part.len()) };
        });
        Ok(())
    }

    fn download(
        &self,
        buffer: &Buffer,
        offset: usize,
        bytes: &mut [u8],
    ) -> Result<(), DeviceError> {
        let start = place("download", buffer, offset, bytes.len())?;
        // SAFETY: the range lies in the buffer, and as in `upload`.
        unsafe { std::ptr::copy(start, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    fn copy_rows(&self, copy: &RowCopy<'_>) -> Result<(), DeviceError> {
        let Some(spans) = copy.check()? else {
            return Ok(());
        };
        let [from, to] = spans.map(|span| span.start.0 as usize as *mut u8);
        for row in 0..copy.rows {
            // SAFETY: `check` has seen that all rows lie in their buffers, which their owners
            // keep alive; as in `upload`, no kernel of this thread is using them.
            unsafe {
                let from = from.add(row * copy.from_stride);
                std::ptr::copy(from, to.add(row * copy.to_stride), copy.row_bytes);
            }
        }
        Ok(())
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        Ok(())
    }
}

/// Bytes that one thread uploads at a time: some huge pages. A page is placed
/// on the NUMA node of the thread that writes it first. Parts are blocks of a
/// run like others, so that each node gets one contiguous share of them.
const PART: usize = 8 << 20;

fn parts(bytes: usize) -> i64 {
    bytes.div_ceil(PART) as i64
}

/// Returns the start of a part of `bytes` bytes; the part after the last starts
/// at their end.
fn part_start(part: i64, bytes: usize) -> usize {
    (part as usize).saturating_mul(PART).min(bytes)
}

/// The start of a buffer that several threads write.
#[derive(Clone, Copy)]
struct Start(*mut u8);

// SAFETY: only an address; each use says why it is sound.
unsafe impl Sync for Start {}

impl Start {
    /// # Safety
    /// `offset` must lie within the buffer or be its end.
    unsafe fn at(&self, offset: usize) -> *mut u8 {
        // SAFETY: passed on.
        unsafe { self.0.add(offset) }
    }
}

/// Returns the address of `offset` in `buffer`, if `length` bytes fit behind
/// it.
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
        reason: DriverReason::OutOfRange {
            bytes: buffer.bytes(),
        },
    })
}
