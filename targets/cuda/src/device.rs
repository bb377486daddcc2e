//! The CUDA driver as a [`Device`]. Only this module uses cudarc, whose
//! contexts and streams other libraries share.

mod tensor_map;
mod vendor;

use crate::driver::{self, DriverTable};
use cudarc::driver::result::DriverError;
use cudarc::driver::sys::CUdevice_attribute as Attribute;
use cudarc::driver::{CudaContext, CudaStream};
use moesaic_kernel::{CudaArch, Target};
use moesaic_target::gpu::{GpuDevice, GpuWrapper, Setup, StreamHandle};
use moesaic_target::{Device, DeviceError, DeviceInfo, Fault, GpuInfo, UnavailableReason};
use std::ffi::c_void;
use std::sync::Arc;
use vendor::Cuda;

/// An NVIDIA GPU and one stream on it.
#[derive(Debug)]
pub struct CudaDevice {
    gpu: GpuDevice<Cuda>,
    stream: Arc<CudaStream>,
}

impl CudaDevice {
    /// Opens the GPU with this number, with a new stream.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] when there is no driver, listing the
    /// names tried, or no such GPU.
    pub fn open(ordinal: usize) -> Result<CudaDevice, DeviceError> {
        // cudarc panics without a driver, or when the driver is too old to have
        // a function, so no function of cudarc may be called before this.
        let table = driver::table()?;
        check_ordinal(table, ordinal)?;
        let context = CudaContext::new(ordinal).map_err(|error| unavailable(table, &error))?;
        let stream = context.new_stream();
        CudaDevice::on(stream.map_err(|error| unavailable(table, &error))?)
    }

    /// Uses a stream that others use too, such as candle's; launches are in
    /// order with theirs.
    ///
    /// # Errors
    /// The device does not answer, or no target can be compiled for it.
    pub fn on(stream: Arc<CudaStream>) -> Result<CudaDevice, DeviceError> {
        let table = driver::table()?;
        let context = stream.context().clone();
        let facts = Facts {
            table,
            context: &context,
        };
        let (info, gpu_info) = (facts.info()?, facts.gpu_info()?);
        let setup = Setup {
            info,
            gpu_info,
            stream: Some((
                StreamHandle(stream.cu_stream().cast()),
                Box::new(stream.clone()),
            )),
        };
        let caps = CudaArch {
            capability: facts.capability()?,
            suffix: None,
        }
        .caps();
        let vendor = Cuda {
            table,
            context,
            clusters: caps.clusters,
            overlaps: caps.dependent_launches && table.overlaps(),
        };
        let gpu = GpuDevice::new(vendor, setup)?;
        Ok(CudaDevice { gpu, stream })
    }

    /// Uses a stream of a library that has the driver's handle alone, such as PyTorch; launches are
    /// in order with that library's. Null is the default stream. The stream is not destroyed.
    ///
    /// # Safety
    /// The handle is null or a stream of the GPU's primary context, and lives as long as this device
    /// and what it makes. Nobody captures the stream while this device loads, allocates or copies.
    ///
    /// # Errors
    /// As [`CudaDevice::open`].
    pub unsafe fn on_handle(
        ordinal: usize,
        stream: *mut c_void,
    ) -> Result<CudaDevice, DeviceError> {
        let table = driver::table()?;
        check_ordinal(table, ordinal)?;
        let context = CudaContext::new(ordinal).map_err(|error| unavailable(table, &error))?;
        // SAFETY: the caller vouches for the stream; the context is the primary one.
        CudaDevice::on(unsafe { context.wrap_borrowed_stream(stream.cast()) })
    }

    /// Returns the stream on which everything runs.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Returns free and total memory in bytes.
    ///
    /// # Errors
    /// The driver fails.
    pub fn memory(&self) -> Result<(usize, usize), DeviceError> {
        self.gpu.memory()
    }

    /// Returns the number of GPUs of the driver.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`], as for [`CudaDevice::open`].
    pub fn count() -> Result<usize, DeviceError> {
        count(driver::table()?)
    }
}

impl GpuWrapper for CudaDevice {
    fn gpu(&self) -> &dyn Device {
        &self.gpu
    }
}

fn unavailable(table: &DriverTable, error: &DriverError) -> DeviceError {
    let code = error.0 as i32;
    let words = table.words(code);
    driver::unavailable(Fault { code, words }.into())
}

fn count(table: &DriverTable) -> Result<usize, DeviceError> {
    let count = CudaContext::device_count().map_err(|error| unavailable(table, &error))?;
    Ok(usize::try_from(count).unwrap_or(0))
}

fn check_ordinal(table: &DriverTable, ordinal: usize) -> Result<(), DeviceError> {
    let count = count(table)?;
    if ordinal < count {
        return Ok(());
    }
    Err(driver::unavailable(UnavailableReason::NoSuchGpu {
        ordinal,
        count,
        driver: "driver",
    }))
}

/// The driver's answers about a GPU.
struct Facts<'a> {
    table: &'a DriverTable,
    context: &'a CudaContext,
}

impl Facts<'_> {
    fn info(&self) -> Result<DeviceInfo, DeviceError> {
        let name = self.context.name();
        let name = name.map_err(|error| unavailable(self.table, &error))?;
        let capability = self.capability()?;
        let target = best_target(capability).ok_or_else(|| {
            let (major, minor) = (capability / 10, capability % 10);
            driver::unavailable(UnavailableReason::UnknownGpu {
                name: name.clone(),
                architecture: format!("has compute capability {major}.{minor}"),
            })
        })?;
        Ok(DeviceInfo {
            target,
            units: self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            memory_bytes: self.context.total_mem().ok().map(|bytes| bytes as u64),
            name,
        })
    }

    fn gpu_info(&self) -> Result<GpuInfo, DeviceError> {
        // Zero is the driver's way to say that it does not know.
        let known = |attribute| self.attribute(attribute).ok().filter(|value| *value != 0);
        let most = Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
        Ok(GpuInfo {
            ordinal: self.context.ordinal(),
            shared_bytes: self.attribute(most)?,
            shared_bytes_per_unit: known(
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
            ),
            threads_per_unit: known(Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR),
            lanes: known(Attribute::CU_DEVICE_ATTRIBUTE_WARP_SIZE),
            l2_bytes: known(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE).map(u64::from),
            clock_khz: known(Attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE),
            pools: self.context.has_async_alloc(),
            driver: self.table.version(),
            bus: self.bus(),
        })
    }

    /// Returns `0000:17:00`: domain, bus and device.
    fn bus(&self) -> Option<String> {
        let part = |attribute| self.attribute(attribute).ok();
        let domain = part(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?;
        let bus = part(Attribute::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?;
        let device = part(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?;
        Some(format!("{domain:04x}:{bus:02x}:{device:02x}"))
    }

    fn capability(&self) -> Result<u16, DeviceError> {
        let version = self.context.compute_capability();
        let (major, minor) = version.map_err(|error| unavailable(self.table, &error))?;
        Ok(u16::try_from(major * 10 + minor).unwrap_or(0))
    }

    fn attribute(&self, attribute: Attribute) -> Result<u32, DeviceError> {
        let value = self.context.attribute(attribute);
        let value = value.map_err(|error| unavailable(self.table, &error))?;
        Ok(value.unsigned_abs())
    }
}

/// Returns the target that uses the most of a GPU: the architecture's own
/// (`sm_90a`), else the newest of its family that it runs.
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
