//! The functions of the CUDA driver. This module looks them up without cudarc,
//! which panics where there is no driver or a function is missing, and which
//! calls other versions of some functions than older drivers have.

use moesaic_dl::{DlError, Library, dl_table};
use moesaic_target::gpu::{FunctionHandle, FunctionNames, Functions, StreamHandle};
use moesaic_target::{DeviceError, SharedError, UnavailableReason};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

/// The driver's names, in the order in which the system's loader is asked for
/// them.
#[cfg(not(windows))]
const LIBRARIES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];
#[cfg(windows)]
const LIBRARIES: [&str; 1] = ["nvcuda.dll"];

/// Every function that is called through cudarc, for contexts and streams.
const CUDARC: [&str; 12] = [
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceTotalMem_v2",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
];

/// CUDA's names of the functions that GPU drivers share. Drivers for CUDA 11.4
/// and later have them all.
const NAMES: FunctionNames = FunctionNames {
    memory_info: "cuMemGetInfo_v2",
    default_pool: "cuDeviceGetDefaultMemPool",
    pool_set: "cuMemPoolSetAttribute",
    pool_access: "cuMemPoolSetAccess",
    can_access_peer: "cuDeviceCanAccessPeer",
    stream_create: "cuStreamCreate",
    stream_destroy: "cuStreamDestroy_v2",
    stream_synchronize: "cuStreamSynchronize",
    stream_wait: "cuStreamWaitEvent",
    alloc_async: "cuMemAllocAsync",
    free_async: "cuMemFreeAsync",
    alloc: "cuMemAlloc_v2",
    free: "cuMemFree_v2",
    host_alloc: "cuMemHostAlloc",
    host_free: "cuMemFreeHost",
    upload: "cuMemcpyHtoDAsync_v2",
    download: "cuMemcpyDtoHAsync_v2",
    copy: "cuMemcpyDtoDAsync_v2",
    module_load: "cuModuleLoadData",
    module_unload: "cuModuleUnload",
    module_function: "cuModuleGetFunction",
    launch: "cuLaunchKernel",
    occupancy: "cuOccupancyMaxActiveBlocksPerMultiprocessor",
    event_create: "cuEventCreate",
    event_record: "cuEventRecord",
    event_query: "cuEventQuery",
    event_synchronize: "cuEventSynchronize",
    event_elapsed: "cuEventElapsedTime",
    event_destroy: "cuEventDestroy_v2",
    capture_begin: "cuStreamBeginCapture_v2",
    capture_end: "cuStreamEndCapture",
    graph_instantiate: "cuGraphInstantiateWithFlags",
    graph_launch: "cuGraphLaunch",
    graph_destroy: "cuGraphDestroy",
    exec_destroy: "cuGraphExecDestroy",
};

dl_table! {
    /// The functions that only CUDA has.
    pub struct Own {
        init: fn(flags: c_uint) -> c_int = "cuInit";
        version: fn(version: *mut c_int) -> c_int = "cuDriverGetVersion";
        error_name: fn(code: c_int, name: *mut *const c_char) -> c_int = "cuGetErrorName";
        error_string: fn(code: c_int, text: *mut *const c_char) -> c_int = "cuGetErrorString";
        function_get: fn(value: *mut c_int, attribute: c_int, function: FunctionHandle) -> c_int
            = "cuFuncGetAttribute";
        function_set: fn(function: FunctionHandle, attribute: c_int, value: c_int) -> c_int
            = "cuFuncSetAttribute";
        copy_rows: fn(copy: *const Copy2d, stream: StreamHandle) -> c_int
            = "cuMemcpy2DAsync_v2";
    }
    optional {
        launch_ex: fn(
            config: *const LaunchConfig,
            function: FunctionHandle,
            params: *mut *mut c_void,
            extra: *mut *mut c_void,
        ) -> c_int = "cuLaunchKernelEx";
        encode_tiled: fn(
            map: *mut c_void,
            data_type: c_uint,
            rank: c_uint,
            address: *mut c_void,
            sizes: *const u64,
            strides: *const u64,
            tile: *const c_uint,
            element_strides: *const c_uint,
            interleave: c_uint,
            swizzle: c_uint,
            l2_promotion: c_uint,
            fill: c_uint,
        ) -> c_int = "cuTensorMapEncodeTiled";
    }
}

/// A copy of rows in the driver's form: `CUDA_MEMCPY2D`.
#[repr(C)]
pub struct Copy2d {
    pub from: Side2d,
    pub to: Side2d,
    pub row_bytes: usize,
    pub rows: usize,
}

/// One side of a copy.
#[repr(C)]
pub struct Side2d {
    pub first_byte: usize,
    pub first_row: usize,
    pub memory: c_uint,
    pub host: *const c_void,
    pub device: u64,
    pub array: *const c_void,
    pub stride: usize,
}

/// A launch with attributes in the driver's form.
#[repr(C)]
pub struct LaunchConfig {
    pub grid: [c_uint; 3],
    pub block: [c_uint; 3],
    pub shared_bytes: c_uint,
    pub stream: StreamHandle,
    pub attributes: *const LaunchAttribute,
    pub attribute_count: c_uint,
}

/// An attribute of a launch; its value is a union of 64 bytes.
#[repr(C, align(8))]
pub struct LaunchAttribute {
    pub id: c_uint,
    pub padding: c_uint,
    pub value: [c_uint; 16],
}

/// The driver's functions.
pub struct DriverTable {
    pub functions: Functions,
    pub own: Own,
}

/// Returns the driver, once every function is found that this crate calls, here
/// or through cudarc.
///
/// # Errors
/// [`DeviceError::Unavailable`] lists the names tried, or names the missing
/// function.
pub fn table() -> Result<&'static DriverTable, DeviceError> {
    static TABLE: OnceLock<Result<DriverTable, DlError>> = OnceLock::new();
    let table = TABLE.get_or_init(load).as_ref();
    table.map_err(|error| unavailable(reason(error)))
}

fn load() -> Result<DriverTable, DlError> {
    let library = Library::open("the CUDA driver", &LIBRARIES)?;
    // SAFETY: the addresses are only looked at, or are of functions with
    // these signatures in cuda.h; the library is kept loaded.
    unsafe {
        for name in CUDARC {
            library.symbol::<*const c_void>(name)?;
        }
        let functions = Functions::load(&NAMES, |name| library.symbol(name))?;
        let own = Own::load(library)?;
        Ok(DriverTable { functions, own })
    }
}

impl DriverTable {
    /// Returns a sentence for errors: `the driver is for CUDA 12.4`.
    pub fn version(&self) -> Option<String> {
        let (major, minor) = self.cuda()?;
        Some(format!("the driver is for CUDA {major}.{minor}"))
    }

    /// Returns true if launches may overlap, in graphs too: drivers for CUDA
    /// 12.3 and later.
    pub fn overlaps(&self) -> bool {
        self.own.launch_ex.is_some() && self.cuda() >= Some((12, 3))
    }

    /// Returns the release of CUDA that the driver is for.
    fn cuda(&self) -> Option<(c_int, c_int)> {
        let mut version = 0;
        // SAFETY: the pointer is valid for a write. It works without `cuInit`.
        let code = unsafe { self.own.version(&mut version) };
        (code == 0).then_some((version / 1000, version % 1000 / 10))
    }

    /// Returns the driver's name and text for a code: `CUDA_ERROR_NO_DEVICE: no
    /// …`.
    pub fn words(&self, code: c_int) -> String {
        let (mut name, mut text) = (std::ptr::null(), std::ptr::null());
        // SAFETY: the pointers are valid for a write; an unknown code leaves
        // null.
        unsafe {
            self.own.error_name(code, &mut name);
            self.own.error_string(code, &mut text);
        }
        // SAFETY: the driver's strings are static.
        match unsafe { (static_text(name), static_text(text)) } {
            (Some(name), Some(text)) => format!("{name}: {text}"),
            (Some(name), None) => name,
            _ => format!("CUDA error {code}"),
        }
    }
}

/// # Safety
/// Null, or a NUL-terminated string that is never freed.
unsafe fn static_text(text: *const c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(text) };
    Some(text.to_string_lossy().into_owned())
}

/// Returns a [`DeviceError::Unavailable`] of this backend.
pub fn unavailable(reason: UnavailableReason) -> DeviceError {
    DeviceError::Unavailable {
        backend: "cuda".to_string(),
        reason,
    }
}

fn reason(error: &DlError) -> UnavailableReason {
    UnavailableReason::NoDriver {
        library: SharedError::new(error.clone()),
        advice: match error {
            DlError::MissingSymbol { .. } => {
                "update the NVIDIA driver to one for CUDA 11.4 or later"
            }
            _ => "install the NVIDIA driver",
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{offset_of, size_of};

    #[test]
    fn launch_structures_lie_as_in_the_header() {
        assert_eq!(size_of::<LaunchAttribute>(), 72);
        assert_eq!(offset_of!(LaunchAttribute, value), 8);
        assert_eq!(offset_of!(LaunchConfig, stream), 32);
        assert_eq!(offset_of!(LaunchConfig, attribute_count), 48);
        assert_eq!(size_of::<LaunchConfig>(), 56);
    }
}
