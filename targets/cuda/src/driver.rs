//! Is there a driver? Asked by our own means: cudarc panics when there is
//! none, and when a function is missing.

use moesaic_dl::{DlError, Library, dl_table};
use moesaic_target::DeviceError;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::OnceLock;

/// The driver's names, in the order the system's loader is asked for them.
#[cfg(not(windows))]
const NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];
#[cfg(windows)]
const NAMES: [&str; 1] = ["nvcuda.dll"];

/// Every driver function that the device calls through cudarc. All are in
/// drivers for CUDA 11.2 and later.
const FUNCTIONS: [&str; 30] = [
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetDefaultMemPool",
    "cuDeviceGetName",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceTotalMem_v2",
    "cuFuncGetAttribute",
    "cuFuncSetAttribute",
    "cuGetErrorString",
    "cuLaunchKernel",
    "cuMemAllocAsync",
    "cuMemAlloc_v2",
    "cuMemFreeAsync",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemPoolSetAttribute",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuPointerGetAttribute",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
];

dl_table! {
    /// What is asked of a driver before cudarc is.
    struct Functions {
        init: fn(flags: c_uint) -> c_int = "cuInit";
        version: fn(version: *mut c_int) -> c_int = "cuDriverGetVersion";
    }
}

/// Whether cudarc may be called.
///
/// # Errors
/// [`DeviceError::Unavailable`] lists the names tried, or names the function
/// that is missing.
pub fn probe() -> Result<(), DeviceError> {
    static PROBED: OnceLock<Result<(), DlError>> = OnceLock::new();
    let probed = PROBED.get_or_init(|| functions().map(|_| ()));
    probed.clone().map_err(|error| unavailable(reason(&error)))
}

/// The CUDA version the driver is for.
pub fn version() -> Option<(u32, u32)> {
    let functions = functions().ok()?;
    let mut version = 0;
    // SAFETY: the pointer is valid for a write. It works without `cuInit`.
    let code = unsafe { functions.version(&mut version) };
    let version = version.unsigned_abs();
    (code == 0).then_some((version / 1000, version % 1000 / 10))
}

/// A [`DeviceError::Unavailable`] of this backend.
pub fn unavailable(reason: String) -> DeviceError {
    DeviceError::Unavailable {
        backend: "cuda".to_string(),
        reason,
    }
}

fn functions() -> Result<Functions, DlError> {
    let library = Library::open("the CUDA driver", &NAMES)?;
    for name in FUNCTIONS {
        // SAFETY: the address is only looked at, by its being there.
        unsafe { library.symbol::<*const c_void>(name)? };
    }
    // SAFETY: both signatures are those of cuda.h, where they have not
    // changed since CUDA 2.
    unsafe { Functions::load(library) }
}

fn reason(error: &DlError) -> String {
    match error {
        DlError::MissingSymbol { .. } => format!("{error}; update the NVIDIA driver"),
        _ => format!("{error}; install the NVIDIA driver"),
    }
}
