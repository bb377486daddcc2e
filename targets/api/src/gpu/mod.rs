//! GPUs through a driver, for CUDA and HIP.
//!
//! The two drivers declare the same functions under different names ([`Functions`]), so streams,
//! memory, modules, events, graphs and their errors are written once, here. A target implements
//! [`Vendor`]: its library, the differences, and the text of its error codes.
//!
//! Three rules hold everywhere:
//! * Everything that a launch may still use outlives it. Modules are unloaded and streams destroyed
//!   after their work has finished, memory is freed in stream order, and a graph keeps everything
//!   that it launches.
//! * During a capture, an operation that the driver would refuse, or would wrongly record, is
//!   refused before it reaches the driver.
//! * After a kernel has broken the driver's context, every call reports that and names the kernel.

mod device;
mod error;
mod event;
mod functions;
mod graph;
mod journal;
mod lane;
mod lock;
mod mark;
mod memory;
mod module;
mod orphan;
mod pinned;
mod shape;
mod shared;
mod staging;
mod upload;
mod wrapper;

pub use crate::Fault;
use crate::{KernelReport, MapBytes, Ptr};
pub use device::{GpuDevice, Setup};
pub use error::{TensorMapError, VendorError};
pub use functions::{
    EventHandle, ExecHandle, FunctionHandle, FunctionNames, Functions, GraphHandle, ModuleHandle,
    PoolAccess, PoolHandle, StreamHandle,
};
use moesaic_kernel::{Launch, TensorMap};
pub use shape::LaunchShape;
use std::ffi::{c_int, c_void};
pub use wrapper::GpuWrapper;

/// The differences between GPU drivers.
pub trait Vendor: Send + Sync + 'static {
    /// The backend: `cuda`.
    const BACKEND: &'static str;

    /// The environment variable that makes launches synchronous.
    const BLOCKING: &'static str;

    /// Bytes of shared memory, static and dynamic, that need no [`Vendor::allow`].
    const FREE_SHARED: u32;

    /// Returns the driver's functions.
    fn functions(&self) -> &Functions;

    /// Makes the GPU current on this thread.
    ///
    /// # Errors
    /// The driver's error.
    fn bind(&self) -> Result<(), Fault>;

    /// Returns the driver's name and description of a code: `CUDA_ERROR_NO_DEVICE: no …`.
    fn words(&self, code: c_int) -> String;

    /// Checks that the bytes are a complete binary, because drivers trust its headers.
    ///
    /// # Errors
    /// The defect.
    fn check_binary(&self, binary: &[u8]) -> Result<(), VendorError>;

    /// Returns the static shared memory of a kernel in bytes.
    ///
    /// # Safety
    /// The function's module must be loaded.
    ///
    /// # Errors
    /// The driver's error.
    unsafe fn static_shared(
        &self,
        function: FunctionHandle,
        report: Option<&KernelReport>,
    ) -> Result<u32, Fault>;

    /// Requests the resources for launches of a kernel with `fixed` bytes of static shared memory.
    ///
    /// # Safety
    /// The function's module must be loaded.
    ///
    /// # Errors
    /// The resource that is not available.
    unsafe fn allow(
        &self,
        function: FunctionHandle,
        launch: &Launch,
        fixed: u32,
    ) -> Result<(), VendorError>;

    /// Checks that the driver can launch this shape.
    ///
    /// # Errors
    /// The exceeded limit.
    fn check_shape(&self, shape: &LaunchShape) -> Result<(), VendorError>;

    /// Returns true if blocks of a dependent launch may start before the earlier launches have
    /// ended.
    fn overlaps(&self) -> bool {
        false
    }

    /// Launches with attributes: with clusters that [`Vendor::check_shape`] has allowed, or as a
    /// dependent launch where [`Vendor::overlaps`] returns true. Returns the driver's code.
    ///
    /// # Safety
    /// The function's module must be loaded, the stream live, and `params` must hold a pointer to
    /// each of the kernel's parameters.
    unsafe fn launch_with(
        &self,
        function: FunctionHandle,
        shape: &LaunchShape,
        params: &mut [*mut c_void],
        stream: StreamHandle,
    ) -> c_int;

    /// Copies rows of bytes in stream order. Returns the driver's code.
    ///
    /// # Safety
    /// The rows must lie in memory of the GPU, and the stream must be live.
    unsafe fn copy_rows(&self, rows: &AddressedRows, stream: StreamHandle) -> c_int;

    /// Encodes a tensor map for a tensor at `base` with `dims`, innermost first.
    ///
    /// # Errors
    /// The violated rule, with the requested values.
    fn encode(&self, map: &TensorMap, base: Ptr, dims: [u64; 5]) -> Result<MapBytes, VendorError>;
}

/// A copy of rows of bytes by address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressedRows {
    /// The address of the first source row.
    pub from: Ptr,
    /// The distance between source rows in bytes.
    pub from_stride: usize,
    /// The address of the first destination row.
    pub to: Ptr,
    /// The distance between destination rows in bytes.
    pub to_stride: usize,
    /// The number of rows.
    pub count: usize,
    /// The size of a row in bytes.
    pub bytes: usize,
}
