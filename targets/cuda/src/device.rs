//! The CUDA driver. All use of cudarc is in this module.

mod module;
mod words;

use crate::driver;
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{
    self, CUdevice_attribute as Attribute, CUfunction_attribute as FunctionAttribute, CUresult,
};
use cudarc::driver::{CudaContext, CudaStream};
use module::{CudaModule, Function, Handle};
use moesaic_kernel::{CudaArch, Entry, Target};
use moesaic_target::{Artifact, Buffer, Device, DeviceError, DeviceInfo, Module, Ptr};
use std::sync::{Arc, Mutex, PoisonError};
use words::{is_kernel_fault, unavailable, words};

/// Dynamic shared memory a kernel may have without asking for more, in bytes.
const SHARED_WITHOUT_ASKING: u32 = 48 << 10;

/// An NVIDIA GPU and one stream on it.
#[derive(Debug)]
pub struct CudaDevice {
    info: DeviceInfo,
    shared: Arc<Shared>,
    /// The most shared memory a block can have, in bytes.
    most_shared: u32,
}

/// What the device, its modules and its buffers all need.
#[derive(Debug)]
struct Shared {
    stream: Arc<CudaStream>,
    /// The kernel launched last, for errors that come to light later.
    recent: Mutex<String>,
}

impl CudaDevice {
    /// Opens the GPU with this number, with a new stream.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] when there is no driver, listing the
    /// names tried, or no such GPU.
    pub fn open(ordinal: usize) -> Result<CudaDevice, DeviceError> {
        // cudarc panics without a driver, or when it is too old to have a
        // function: nothing of it may be called before this.
        driver::probe()?;
        check_ordinal(ordinal)?;
        let context = CudaContext::new(ordinal).map_err(|error| unavailable(&error))?;
        let stream = context.new_stream().map_err(|error| unavailable(&error))?;
        CudaDevice::on(stream)
    }

    /// Uses a stream that others use too, such as candle's: launches are in
    /// order with theirs.
    ///
    /// # Errors
    /// When the device does not answer, or nothing can be compiled for it.
    pub fn on(stream: Arc<CudaStream>) -> Result<CudaDevice, DeviceError> {
        let context = stream.context();
        let info = info(context)?;
        let most_shared = attribute(
            context,
            Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
        )?;
        keep_freed_memory(context);
        let shared = Arc::new(Shared {
            stream,
            recent: Mutex::default(),
        });
        Ok(CudaDevice {
            info,
            shared,
            most_shared,
        })
    }

    /// The stream everything runs on.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.shared.stream
    }

    /// Free and total memory in bytes.
    ///
    /// # Errors
    /// When the driver fails.
    pub fn memory(&self) -> Result<(usize, usize), DeviceError> {
        let context = self.shared.stream.context();
        context
            .mem_get_info()
            .map_err(|error| self.shared.fault("memory query", &error))
    }

    /// How many GPUs the driver has.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`], as for [`CudaDevice::open`].
    pub fn count() -> Result<usize, DeviceError> {
        driver::probe()?;
        let count = CudaContext::device_count().map_err(|error| unavailable(&error))?;
        Ok(usize::try_from(count).unwrap_or(0))
    }
}

impl Device for CudaDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn load(&self, artifact: &Artifact, entries: &[Entry]) -> Result<Arc<dyn Module>, DeviceError> {
        let module = Handle::load(&self.shared, artifact, entries)?;
        let functions = entries
            .iter()
            .map(|entry| {
                Ok((
                    entry.symbol.clone(),
                    self.function(&module, artifact, entry)?,
                ))
            })
            .collect::<Result<_, DeviceError>>()?;
        Ok(Arc::new(CudaModule { functions, module }))
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer, DeviceError> {
        self.shared.bind("allocation")?;
        // Zero bytes get one, so that the address is always real.
        match allocate(&self.shared.stream, bytes.max(1)) {
            Ok(address) => {
                let owner = Allocation {
                    address,
                    shared: self.shared.clone(),
                };
                Ok(Buffer::new(Ptr(address), bytes, Box::new(owner)))
            }
            Err(DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => Err(self.out_of_memory(bytes)),
            Err(error) => Err(self
                .shared
                .fault(&format!("allocation of {bytes} bytes"), &error)),
        }
    }

    fn upload(&self, bytes: &[u8], buffer: &Buffer, offset: usize) -> Result<(), DeviceError> {
        let to = buffer.range("upload", offset, bytes.len())?;
        if bytes.is_empty() {
            return Ok(());
        }
        self.shared.bind("upload")?;
        let stream = &self.shared.stream;
        // SAFETY: the range lies in the buffer, which the caller keeps. The
        // driver has read pageable memory when the call returns; pinned
        // memory is waited for below.
        unsafe { result::memcpy_htod_async(to.0, bytes, stream.cu_stream()) }
            .map_err(|error| self.shared.fault("upload", &error))?;
        match is_pinned(bytes) {
            true => self.synchronize(),
            false => Ok(()),
        }
    }

    fn download(
        &self,
        buffer: &Buffer,
        offset: usize,
        bytes: &mut [u8],
    ) -> Result<(), DeviceError> {
        let from = buffer.range("download", offset, bytes.len())?;
        if !bytes.is_empty() {
            self.shared.bind("download")?;
            let stream = &self.shared.stream;
            // SAFETY: the range lies in the buffer, which the caller keeps;
            // `bytes` is borrowed until the copy has finished, below.
            unsafe { result::memcpy_dtoh_async(bytes, from.0, stream.cu_stream()) }
                .map_err(|error| self.shared.fault("download", &error))?;
        }
        self.synchronize()
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        let stream = &self.shared.stream;
        stream
            .synchronize()
            .map_err(|error| self.shared.fault("synchronize", &error))
    }
}

impl CudaDevice {
    fn function(
        &self,
        module: &Handle,
        artifact: &Artifact,
        entry: &Entry,
    ) -> Result<Function, DeviceError> {
        let refuse = |reason| DeviceError::Load {
            kernel: entry.symbol.clone(),
            reason,
        };
        let report = artifact.report.kernel(&entry.symbol);
        if let Some(reason) = report.and_then(|report| report.disagreement(entry)) {
            return Err(refuse(reason));
        }
        let handle = module.function(&entry.symbol).map_err(refuse)?;
        self.allow_shared(handle, entry).map_err(refuse)?;
        Ok(Function {
            handle,
            entry: entry.clone(),
        })
    }

    /// More than 48 KiB of dynamic shared memory must be asked for.
    fn allow_shared(&self, handle: sys::CUfunction, entry: &Entry) -> Result<(), String> {
        let dynamic = entry.launch.shared_bytes;
        // SAFETY: the function's module is loaded.
        let fixed = unsafe {
            result::function::get_function_attribute(
                handle,
                FunctionAttribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
            )
        };
        let fixed = fixed.map_err(|error| words(&error))?.unsigned_abs();
        let bytes = dynamic.saturating_add(fixed);
        if bytes > self.most_shared {
            return Err(format!(
                "it needs {bytes} bytes of shared memory per block, {} has {}",
                self.info.name, self.most_shared
            ));
        }
        if dynamic <= SHARED_WITHOUT_ASKING {
            return Ok(());
        }
        let attribute = FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: as above. The value was found to be small.
        unsafe { result::function::set_function_attribute(handle, attribute, dynamic as i32) }
            .map_err(|error| words(&error))
    }

    fn out_of_memory(&self, asked: usize) -> DeviceError {
        let free = self.shared.stream.context().mem_get_info();
        let free = free.map_or(String::new(), |(free, _)| {
            format!(" ({free} bytes are free)")
        });
        DeviceError::OutOfMemory { asked, free }
    }
}

impl Shared {
    /// Every driver call needs the context on its own thread.
    fn bind(&self, operation: &str) -> Result<(), DeviceError> {
        let bound = self.stream.context().bind_to_thread();
        bound.map_err(|error| self.fault(operation, &error))
    }

    /// The error of a call that may also report what an earlier launch did.
    fn fault(&self, operation: &str, error: &DriverError) -> DeviceError {
        if !is_kernel_fault(error) {
            return DeviceError::Driver {
                operation: operation.to_string(),
                reason: words(error),
            };
        }
        let recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        DeviceError::Launch {
            kernel: recent.clone(),
            reason: format!(
                "{}; it came to light at a later {operation}, so the kernel may be one \
                 launched before this one: set CUDA_LAUNCH_BLOCKING=1 to be told which",
                words(error)
            ),
        }
    }
}

/// Device memory that is freed, in stream order, on drop.
struct Allocation {
    address: u64,
    shared: Arc<Shared>,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let stream = &self.shared.stream;
        let context = stream.context();
        if context.bind_to_thread().is_err() {
            return;
        }
        // Errors have nowhere to go, and a broken context has lost it anyway.
        let _ = if context.has_async_alloc() {
            // SAFETY: allocated once, freed once; in stream order, so that
            // earlier launches finish first.
            unsafe { result::free_async(self.address, stream.cu_stream()) }
        } else {
            // SAFETY: allocated once, freed once; it waits for the device.
            unsafe { result::free_sync(self.address) }
        };
    }
}

fn allocate(stream: &CudaStream, bytes: usize) -> Result<u64, DriverError> {
    if stream.context().has_async_alloc() {
        // SAFETY: the context is bound, and Allocation frees the memory.
        unsafe { result::malloc_async(stream.cu_stream(), bytes) }
    } else {
        // SAFETY: as above.
        unsafe { result::malloc_sync(bytes) }
    }
}

/// By default the driver gives freed memory back to the system at every
/// synchronisation, and each layer would map it anew. Where it cannot be set
/// things are slower and no less right.
fn keep_freed_memory(context: &CudaContext) {
    if !context.has_async_alloc() {
        return;
    }
    let mut threshold = u64::MAX;
    // SAFETY: the device is open; the attribute's type is a 64-bit integer.
    unsafe {
        if let Ok(pool) = result::device::get_default_mem_pool(context.cu_device()) {
            let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
            let _ = result::mem_pool::set_attribute(pool, attribute, (&raw mut threshold).cast());
        }
    }
}

/// Whether a copy from `bytes` may still be reading them when it returns.
fn is_pinned(bytes: &[u8]) -> bool {
    let mut kind = 0u32;
    let attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
    // SAFETY: the attribute's type is a 32-bit integer; the address is only
    // looked up.
    let found = unsafe {
        sys::cuPointerGetAttribute((&raw mut kind).cast(), attribute, bytes.as_ptr() as u64)
    };
    found == CUresult::CUDA_SUCCESS && kind != 0
}

fn check_ordinal(ordinal: usize) -> Result<(), DeviceError> {
    let count = CudaContext::device_count().map_err(|error| unavailable(&error))?;
    if i32::try_from(ordinal).is_ok_and(|ordinal| ordinal < count) {
        return Ok(());
    }
    Err(driver::unavailable(format!(
        "GPU {ordinal} was asked for; the driver has {count}, counted from 0"
    )))
}

fn info(context: &CudaContext) -> Result<DeviceInfo, DeviceError> {
    let failed = |error| unavailable(&error);
    let name = context.name().map_err(failed)?;
    let (major, minor) = context.compute_capability().map_err(failed)?;
    let capability = u16::try_from(major * 10 + minor).unwrap_or(0);
    let target = best_target(capability).ok_or_else(|| {
        driver::unavailable(format!(
            "{name} has compute capability {major}.{minor}, which is not supported"
        ))
    })?;
    Ok(DeviceInfo {
        target,
        units: attribute(context, Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        memory_bytes: context.total_mem().ok().map(|bytes| bytes as u64),
        name,
    })
}

fn attribute(context: &CudaContext, attribute: Attribute) -> Result<u32, DeviceError> {
    let value = context
        .attribute(attribute)
        .map_err(|error| unavailable(&error))?;
    Ok(value.unsigned_abs())
}

/// The target that uses the most of a GPU: the architecture's own (`sm_90a`),
/// else the newest of its family that it runs.
fn best_target(capability: u16) -> Option<Target> {
    let own = CudaArch {
        capability,
        suffix: None,
    };
    let known = Target::all().into_iter().filter_map(|target| match target {
        Target::Cuda(arch) if own.runs(arch) && arch.suffix != Some('f') => Some(arch),
        _ => None,
    });
    known
        .max_by_key(|arch| (arch.capability, arch.suffix))
        .map(Target::Cuda)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_target_uses_the_most_of_a_gpu() {
        let check = |capability, expected: Option<&str>| {
            let target = best_target(capability).map(|target| target.to_string());
            assert_eq!(target.as_deref(), expected, "{capability}");
        };
        check(75, Some("cuda:sm_75"));
        check(80, Some("cuda:sm_80"));
        check(86, Some("cuda:sm_86"));
        check(90, Some("cuda:sm_90a"));
        check(100, Some("cuda:sm_100a"));
        check(103, Some("cuda:sm_103a"));
        check(107, Some("cuda:sm_103"));
        check(120, Some("cuda:sm_120a"));
        check(61, None);
    }
}
