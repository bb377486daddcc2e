//! The HIP runtime as a [`Device`].

mod module;

use crate::hip::{Hip, HipError, Properties, Stream};
use module::HipModule;
use moesaic_dl::DlError;
use moesaic_kernel::{Entry, Target};
use moesaic_target::{Artifact, Buffer, Device, DeviceError, DeviceInfo, Module, Ptr};
use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// The runtime's code for memory that ran out.
const OUT_OF_MEMORY: i32 = 2;

/// An AMD GPU and one stream on it.
pub struct HipDevice {
    info: DeviceInfo,
    shared: Arc<Shared>,
}

/// What the device, its modules and its buffers all need.
struct Shared {
    hip: Hip,
    ordinal: i32,
    stream: Stream,
    /// Shared memory a block can have, in bytes.
    most_shared: u64,
    /// The kernel launched last, for errors that come to light later.
    recent: Mutex<String>,
}

impl HipDevice {
    /// Opens the GPU with this number, with a new stream.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] when there is no HIP runtime of ROCm 6 or
    /// later, listing the names tried, or no such GPU.
    pub fn open(ordinal: usize) -> Result<HipDevice, DeviceError> {
        HipDevice::new(Hip::open(None), ordinal)
    }

    /// The same, with the runtime library at `path`.
    ///
    /// # Errors
    /// As [`HipDevice::open`].
    pub fn open_with(path: &Path, ordinal: usize) -> Result<HipDevice, DeviceError> {
        HipDevice::new(Hip::open(Some(path)), ordinal)
    }

    /// How many GPUs the runtime has.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`], as for [`HipDevice::open`].
    pub fn count() -> Result<usize, DeviceError> {
        let hip = Hip::open(None).map_err(|error| no_runtime(&error))?;
        hip.count().map_err(|error| unavailable(error.words))
    }

    /// Free and total memory in bytes.
    ///
    /// # Errors
    /// When the runtime fails.
    pub fn memory(&self) -> Result<(usize, usize), DeviceError> {
        self.shared.bind("memory query")?;
        self.shared
            .hip
            .memory()
            .map_err(|error| self.shared.fault("memory query", error))
    }

    fn new(hip: Result<Hip, DlError>, ordinal: usize) -> Result<HipDevice, DeviceError> {
        let hip = hip.map_err(|error| no_runtime(&error))?;
        let ordinal = check_ordinal(&hip, ordinal)?;
        let failed = |error: HipError| unavailable(error.words);
        hip.bind(ordinal).map_err(failed)?;
        let properties = hip.properties(ordinal).map_err(failed)?;
        let most_shared = properties.shared_bytes;
        let info = info(properties)?;
        let stream = hip.stream().map_err(failed)?;
        let shared = Shared {
            hip,
            ordinal,
            stream,
            most_shared,
            recent: Mutex::default(),
        };
        Ok(HipDevice {
            info,
            shared: Arc::new(shared),
        })
    }
}

impl fmt::Debug for HipDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("HipDevice").field(&self.info).finish()
    }
}

impl Device for HipDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn load(&self, artifact: &Artifact, entries: &[Entry]) -> Result<Arc<dyn Module>, DeviceError> {
        Ok(Arc::new(HipModule::load(&self.shared, artifact, entries)?))
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer, DeviceError> {
        let shared = &self.shared;
        shared.bind("allocation")?;
        // Zero bytes get one, so that the address is always real.
        // SAFETY: the stream lives as long as `shared`.
        match unsafe { shared.hip.alloc(bytes.max(1), shared.stream) } {
            Ok(address) => {
                let owner = Allocation {
                    address,
                    shared: shared.clone(),
                };
                Ok(Buffer::new(Ptr(address), bytes, Box::new(owner)))
            }
            Err(HipError {
                code: OUT_OF_MEMORY,
                ..
            }) => Err(self.out_of_memory(bytes)),
            Err(error) => Err(shared.fault(&format!("allocation of {bytes} bytes"), error)),
        }
    }

    fn upload(&self, bytes: &[u8], buffer: &Buffer, offset: usize) -> Result<(), DeviceError> {
        let to = buffer.range("upload", offset, bytes.len())?;
        if bytes.is_empty() {
            return Ok(());
        }
        let shared = &self.shared;
        shared.bind("upload")?;
        // SAFETY: the range lies in the buffer, which the caller keeps. HIP
        // does not promise to have read `bytes` when it returns, so they are
        // borrowed until the stream has been waited for.
        unsafe { shared.hip.upload(to.0, bytes, shared.stream) }
            .map_err(|error| shared.fault("upload", error))?;
        self.synchronize()
    }

    fn download(
        &self,
        buffer: &Buffer,
        offset: usize,
        bytes: &mut [u8],
    ) -> Result<(), DeviceError> {
        let from = buffer.range("download", offset, bytes.len())?;
        let shared = &self.shared;
        if !bytes.is_empty() {
            shared.bind("download")?;
            // SAFETY: the range lies in the buffer, which the caller keeps;
            // `bytes` is borrowed until the copy has finished, below.
            unsafe { shared.hip.download(bytes, from.0, shared.stream) }
                .map_err(|error| shared.fault("download", error))?;
        }
        self.synchronize()
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        let shared = &self.shared;
        shared.bind("synchronize")?;
        // SAFETY: the stream lives as long as `shared`.
        unsafe { shared.hip.synchronize(shared.stream) }
            .map_err(|error| shared.fault("synchronize", error))
    }
}

impl HipDevice {
    fn out_of_memory(&self, asked: usize) -> DeviceError {
        let free = self.shared.hip.memory();
        let free = free.map_or(String::new(), |(free, _)| {
            format!(" ({free} bytes are free)")
        });
        DeviceError::OutOfMemory { asked, free }
    }
}

impl Shared {
    /// The runtime keeps one current device per thread.
    fn bind(&self, operation: &str) -> Result<(), DeviceError> {
        self.hip
            .bind(self.ordinal)
            .map_err(|error| self.fault(operation, error))
    }

    /// The error of a call that may also report what an earlier launch did.
    fn fault(&self, operation: &str, error: HipError) -> DeviceError {
        if !is_kernel_fault(error.code) {
            return DeviceError::Driver {
                operation: operation.to_string(),
                reason: error.words,
            };
        }
        let recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        DeviceError::Launch {
            kernel: recent.clone(),
            reason: format!(
                "{}; it came to light at a later {operation}, so the kernel may be one launched \
                 before this one: set HIP_LAUNCH_BLOCKING=1 to be told which",
                error.words
            ),
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Errors have nowhere to go, and the process may go on without it.
        let _ = self.hip.bind(self.ordinal);
        // SAFETY: nothing that uses the stream is left, since all of it
        // shares this.
        let _ = unsafe { self.hip.destroy_stream(self.stream) };
    }
}

/// Device memory that is freed, in stream order, on drop.
struct Allocation {
    address: u64,
    shared: Arc<Shared>,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let _ = self.shared.hip.bind(self.shared.ordinal);
        // SAFETY: allocated once, freed once; in stream order, so that
        // earlier launches finish first.
        let _ = unsafe { self.shared.hip.free(self.address, self.shared.stream) };
    }
}

fn check_ordinal(hip: &Hip, ordinal: usize) -> Result<i32, DeviceError> {
    let count = hip.count().map_err(|error| unavailable(error.words))?;
    match i32::try_from(ordinal) {
        Ok(number) if ordinal < count => Ok(number),
        _ => Err(unavailable(format!(
            "GPU {ordinal} was asked for; the runtime has {count}, counted from 0"
        ))),
    }
}

fn info(properties: Properties) -> Result<DeviceInfo, DeviceError> {
    // `gfx90a:sramecc+:xnack-`: our code objects leave the features open.
    let arch = properties.arch.split(':').next().unwrap_or_default();
    let target = Target::all()
        .into_iter()
        .find(|target| matches!(target, Target::Rocm(known) if known.name == arch));
    let target = target.ok_or_else(|| {
        unavailable(format!(
            "{} is of architecture `{arch}`, which is not supported",
            properties.name
        ))
    })?;
    Ok(DeviceInfo {
        target,
        units: properties.units,
        memory_bytes: Some(properties.memory_bytes),
        name: properties.name,
    })
}

fn no_runtime(error: &DlError) -> DeviceError {
    let advice = match error {
        DlError::MissingSymbol { .. } => "ROCm 6.0 or later is needed",
        _ => "install ROCm, or set ROCM_PATH to it",
    };
    unavailable(format!("{error}; {advice}"))
}

fn unavailable(reason: String) -> DeviceError {
    DeviceError::Unavailable {
        backend: "rocm".to_string(),
        reason,
    }
}

/// Errors of a kernel's own doing, which every later call reports too.
fn is_kernel_fault(code: i32) -> bool {
    matches!(code, 700 | 702 | 710 | 719)
}
