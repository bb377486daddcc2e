//! GPUs by a driver, for the targets that have one: CUDA and HIP.
//!
//! The two drivers declare the same functions under other names
//! ([`Functions`]), so that streams, memory, modules, events, graphs and the
//! errors of all of them are here once. A target brings a [`Vendor`]: its
//! library, what differs, and the words for its codes.
//!
//! Three rules hold everywhere. Whatever a launch may still use outlives it:
//! modules are unloaded and streams destroyed when their work has finished,
//! memory is freed in stream order, and a graph keeps what it launches. While
//! a graph is captured, what the driver would refuse or, worse, record is
//! refused before it reaches the driver. After a kernel has broken the
//! driver's context, every call says so and names the kernel.

mod capture;
mod device;
mod event;
mod functions;
mod graph;
mod journal;
mod lane;
mod memory;
mod module;
mod shared;
mod staging;

use crate::{KernelReport, MapBytes, Ptr};
pub use device::{GpuDevice, Setup};
pub use functions::{
    EventHandle, ExecHandle, FunctionHandle, Functions, GraphHandle, ModuleHandle, Names,
    PoolHandle, StreamHandle,
};
use moesaic_kernel::{Launch, TensorMap};
use std::ffi::{c_int, c_void};
use std::fmt;

/// What differs between GPU drivers.
pub trait Vendor: Send + Sync + 'static {
    /// The backend: `cuda`.
    const BACKEND: &'static str;

    /// The variable that makes launches wait for their end.
    const BLOCKING: &'static str;

    /// Bytes of shared memory, static and dynamic, that need no
    /// [`Vendor::allow`].
    const FREE_SHARED: u32;

    /// The driver's functions.
    fn functions(&self) -> &Functions;

    /// Makes the GPU the one of this thread.
    ///
    /// # Errors
    /// As the driver says.
    fn bind(&self) -> Result<(), Fault>;

    /// The driver's name and words for a code: `CUDA_ERROR_NO_DEVICE: no …`.
    fn words(&self, code: c_int) -> String;

    /// Whether the bytes are a complete binary: drivers trust its headers.
    ///
    /// # Errors
    /// What is wrong with it.
    fn check_binary(&self, binary: &[u8]) -> Result<(), String>;

    /// Static shared memory of a kernel in bytes.
    ///
    /// # Safety
    /// The function's module is loaded.
    ///
    /// # Errors
    /// As the driver says.
    unsafe fn static_shared(
        &self,
        function: FunctionHandle,
        report: Option<&KernelReport>,
    ) -> Result<u32, Fault>;

    /// Asks for what the launches of a kernel will need that has `fixed` bytes
    /// of static shared memory.
    ///
    /// # Safety
    /// The function's module is loaded.
    ///
    /// # Errors
    /// What cannot be had.
    unsafe fn allow(
        &self,
        function: FunctionHandle,
        launch: &Launch,
        fixed: u32,
    ) -> Result<(), String>;

    /// Whether the driver can launch this shape at all.
    ///
    /// # Errors
    /// The limit that is exceeded.
    fn check_shape(&self, shape: &Shape) -> Result<(), String>;

    /// Whether blocks of a dependent launch may start before the launches before have ended.
    fn overlaps(&self) -> bool {
        false
    }

    /// Launches with attributes: clusters of more than one block, which
    /// [`Vendor::check_shape`] has allowed, or as dependent, where
    /// [`Vendor::overlaps`]; returns the driver's code.
    ///
    /// # Safety
    /// The function's module is loaded, the stream is live, and `params` hold
    /// a pointer to each of the kernel's parameters.
    unsafe fn launch_with(
        &self,
        function: FunctionHandle,
        shape: &Shape,
        params: &mut [*mut c_void],
        stream: StreamHandle,
    ) -> c_int;

    /// Copies rows of bytes in stream order; returns the driver's code.
    ///
    /// # Safety
    /// The rows lie in memory of the GPU, and the stream is live.
    unsafe fn copy_rows(&self, rows: &Rows, stream: StreamHandle) -> c_int;

    /// Writes a tensor map for a tensor at `base` with `dims`, innermost
    /// first.
    ///
    /// # Errors
    /// The rule that is broken, with what was asked for.
    fn encode(&self, map: &TensorMap, base: Ptr, dims: [u64; 5]) -> Result<MapBytes, String>;
}

/// Rows of bytes that are copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Where the first comes from.
    pub from: Ptr,
    /// Bytes from its start to that of the next.
    pub from_stride: usize,
    /// Where it goes.
    pub to: Ptr,
    /// Bytes from its start to that of the next, there.
    pub to_stride: usize,
    /// How many rows.
    pub count: usize,
    /// Bytes of one.
    pub bytes: usize,
}

/// A driver's code, in its own words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The code; CUDA and HIP have the same ones.
    pub code: c_int,
    /// Name and description.
    pub words: String,
}

/// The shape of a launch, in a driver's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Blocks in x and y.
    pub grid: [u32; 2],
    /// Threads per block.
    pub threads: u32,
    /// Dynamic shared memory in bytes.
    pub shared_bytes: u32,
    /// Blocks of a cluster, in x.
    pub cluster: u32,
    /// Blocks may start before the launches before have ended.
    pub dependent: bool,
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [x, y] = self.grid;
        write!(
            f,
            "grid {x} x {y}, {} threads, {} bytes of dynamic shared memory",
            self.threads, self.shared_bytes
        )?;
        match self.cluster {
            1 => Ok(()),
            blocks => write!(f, ", clusters of {blocks}"),
        }
    }
}
