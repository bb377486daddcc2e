//! The HIP runtime as a [`Device`].

mod vendor;

use crate::hip::{Hip, Properties};
use moesaic_dl::DlError;
use moesaic_kernel::Target;
use moesaic_target::gpu::{Fault, GpuDevice, GpuWrapper, Setup, StreamHandle};
use moesaic_target::{Device, DeviceError, DeviceInfo, GpuInfo, SharedError, UnavailableReason};
use std::any::Any;
use std::ffi::c_void;
use std::path::Path;
use vendor::Rocm;

/// An AMD GPU and one stream on it.
#[derive(Debug)]
pub struct HipDevice {
    gpu: GpuDevice<Rocm>,
}

impl HipDevice {
    /// Opens the GPU with this number, with a new stream.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] when there is no HIP runtime of ROCm 6 or
    /// later, listing the names tried, or no such GPU.
    pub fn open(ordinal: usize) -> Result<HipDevice, DeviceError> {
        HipDevice::new(Hip::open(None), ordinal, None)
    }

    /// Uses a stream of another library, such as PyTorch, by the runtime's handle; launches are in
    /// order with that library's. Null is the default stream. The stream is not destroyed.
    ///
    /// # Safety
    /// The handle is null or a stream of this GPU, and lives as long as this device and what it
    /// makes. Nobody captures the stream while this device loads, allocates or copies.
    ///
    /// # Errors
    /// As [`HipDevice::open`].
    pub unsafe fn on_handle(ordinal: usize, stream: *mut c_void) -> Result<HipDevice, DeviceError> {
        HipDevice::new(Hip::open(None), ordinal, Some(StreamHandle(stream)))
    }

    /// Opens the GPU with the runtime library at `path`.
    ///
    /// # Errors
    /// As [`HipDevice::open`].
    pub fn open_with(path: &Path, ordinal: usize) -> Result<HipDevice, DeviceError> {
        HipDevice::new(Hip::open(Some(path)), ordinal, None)
    }

    /// Returns the number of GPUs of the runtime.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`], as for [`HipDevice::open`].
    pub fn count() -> Result<usize, DeviceError> {
        let hip = Hip::open(None).map_err(|error| no_runtime(&error))?;
        hip.count().map_err(|fault| unavailable(fault.into()))
    }

    /// Returns free and total memory in bytes.
    ///
    /// # Errors
    /// The runtime fails.
    pub fn memory(&self) -> Result<(usize, usize), DeviceError> {
        self.gpu.memory()
    }

    /// Opens a GPU on a stream of somebody else's, or on a new one.
    fn new(
        hip: Result<Hip, DlError>,
        ordinal: usize,
        stream: Option<StreamHandle>,
    ) -> Result<HipDevice, DeviceError> {
        let hip = hip.map_err(|error| no_runtime(&error))?;
        let number = check_ordinal(&hip, ordinal)?;
        let failed = |fault: Fault| unavailable(fault.into());
        hip.bind(number).map_err(failed)?;
        let properties = hip.properties(number).map_err(failed)?;
        let setup = Setup {
            info: info(&properties)?,
            gpu_info: gpu_info(&hip, ordinal, &properties),
            // An owner with nothing to destroy: the stream is another library's.
            stream: stream.map(|stream| (stream, Box::new(()) as Box<dyn Any + Send + Sync>)),
        };
        let vendor = Rocm {
            hip,
            ordinal: number,
        };
        let gpu = GpuDevice::new(vendor, setup)?;
        Ok(HipDevice { gpu })
    }
}

impl GpuWrapper for HipDevice {
    fn gpu(&self) -> &dyn Device {
        &self.gpu
    }
}

fn check_ordinal(hip: &Hip, ordinal: usize) -> Result<i32, DeviceError> {
    let count = hip.count().map_err(|fault| unavailable(fault.into()))?;
    match i32::try_from(ordinal) {
        Ok(number) if ordinal < count => Ok(number),
        _ => Err(unavailable(UnavailableReason::NoSuchGpu {
            ordinal,
            count,
            driver: "runtime",
        })),
    }
}

fn info(properties: &Properties) -> Result<DeviceInfo, DeviceError> {
    // `gfx90a:sramecc+:xnack-`: this project's code objects leave the features
    // open.
    let arch = properties.arch.split(':').next().unwrap_or_default();
    let target = Target::all()
        .into_iter()
        .find(|target| matches!(target, Target::Rocm(known) if known.name == arch));
    let target = target.ok_or_else(|| {
        unavailable(UnavailableReason::UnknownGpu {
            name: properties.name.clone(),
            architecture: format!("is of architecture `{arch}`"),
        })
    })?;
    Ok(DeviceInfo {
        target,
        units: properties.units,
        memory_bytes: Some(properties.memory_bytes),
        name: properties.name.clone(),
    })
}

fn gpu_info(hip: &Hip, ordinal: usize, properties: &Properties) -> GpuInfo {
    // Zero is the runtime's way to say that it does not know.
    let known = |value: u32| Some(value).filter(|value| *value != 0);
    let small = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
    GpuInfo {
        ordinal,
        shared_bytes: small(properties.shared_bytes),
        shared_bytes_per_unit: known(small(properties.shared_bytes_per_unit)),
        threads_per_unit: known(properties.threads_per_unit),
        lanes: known(properties.wave),
        l2_bytes: known(properties.l2_bytes).map(u64::from),
        clock_khz: known(properties.clock_khz),
        // A pool exists where the runtime returns one.
        pools: true,
        driver: hip.version(),
        bus: hip.bus(i32::try_from(ordinal).unwrap_or(i32::MAX)),
    }
}

fn no_runtime(error: &DlError) -> DeviceError {
    let advice = match error {
        DlError::MissingSymbol { .. } => "ROCm 6.0 or later is needed",
        _ => "install ROCm, or set ROCM_PATH to it",
    };
    unavailable(UnavailableReason::NoDriver {
        library: SharedError::new(error.clone()),
        advice,
    })
}

fn unavailable(reason: UnavailableReason) -> DeviceError {
    DeviceError::Unavailable {
        backend: "rocm".to_string(),
        reason,
    }
}
