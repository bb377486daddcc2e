//! The interface of devices: loading and launching kernels.

use crate::{Artifact, DeviceError, DriverReason, KernelCounters, LaunchReason, StreamDevice};
use moesaic_kernel::{CpuCaches, Entry, Target};
use std::any::Any;
use std::sync::Arc;

/// The properties of a device.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceInfo {
    /// The product name.
    pub name: String,
    /// The best target to generate for.
    pub target: Target,
    /// Multiprocessors, compute units or cores.
    pub units: u32,
    /// Bytes of memory, if known.
    pub memory_bytes: Option<u64>,
}

/// A device that loads artifacts and runs them on one stream, in order.
pub trait Device: Send + Sync {
    /// Returns the device's properties.
    fn info(&self) -> &DeviceInfo;

    /// Returns the device's streams, events and graphs.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] if the backend has none.
    fn streams(&self) -> Result<&dyn StreamDevice, DeviceError> {
        Err(DeviceError::Unsupported {
            backend: self.info().target.to_string(),
            asked: "streams, events and graphs".to_string(),
        })
    }

    /// Returns the name of the graph being captured, if any. Until its end nothing may be compiled,
    /// loaded or allocated, so callers that compile ask first.
    fn capturing(&self) -> Option<String> {
        None
    }

    /// Keeps a buffer as long as the graph being captured, because launches of that graph use it.
    /// Does nothing without a capture.
    fn keep(&self, used: Arc<Buffer>) {
        let _ = used;
    }

    /// Loads an artifact; `entries` are the symbols that will be launched.
    ///
    /// # Errors
    /// If the driver refuses the binary, a symbol is missing, or the binary's own signature
    /// disagrees with the entry's.
    fn load(&self, artifact: &Artifact, entries: &[Entry]) -> Result<Arc<dyn Module>, DeviceError>;

    /// Returns the bytes that can be allocated now, on systems that promise more memory than they
    /// have; `None` where an oversized allocation simply fails.
    fn free_bytes(&self) -> Option<u64> {
        None
    }

    /// Returns the known cache sizes of a core, for a CPU.
    fn caches(&self) -> CpuCaches {
        CpuCaches::default()
    }

    /// Announces the launches of one pass, until [`Device::end_pass`]: a CPU's threads stay awake
    /// between them. Passes of several callers may overlap.
    fn begin_pass(&self) {}

    /// Ends a pass begun by [`Device::begin_pass`].
    fn end_pass(&self) {}

    /// Starts placing memory, until [`Device::end_placing`]: the data that this thread's launches
    /// and uploads write stays for later launches, which read each part with the same share of
    /// their blocks. On a CPU with several NUMA nodes, the threads of each node then write their
    /// own share.
    fn begin_placing(&self) {}

    /// Ends what [`Device::begin_placing`] began.
    fn end_placing(&self) {}

    /// Returns true if placing requires a tensor to be written by a single launch or upload, so
    /// that each of several NUMA nodes gets its share of the whole.
    fn places_whole(&self) -> bool {
        false
    }

    /// Returns the address at which kernels can read these host bytes in place, on devices that
    /// can. The bytes must outlive every launch that reads them.
    fn host_ptr(&self, bytes: &[u8]) -> Option<Ptr> {
        let _ = bytes;
        None
    }

    /// Allocates at least `bytes` bytes, aligned to 64, with undefined contents.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    fn alloc(&self, bytes: usize) -> Result<Buffer, DeviceError>;

    /// Copies host bytes to `buffer` at `offset` bytes, in stream order. You may change or free the
    /// bytes when it returns.
    ///
    /// # Errors
    /// If the range does not fit, or the driver fails.
    fn upload(&self, bytes: &[u8], buffer: &Buffer, offset: usize) -> Result<(), DeviceError>;

    /// Copies from `buffer` at `offset` bytes to the host, and waits for the copy.
    ///
    /// # Errors
    /// If the range does not fit, or the driver or an earlier launch fails.
    fn download(&self, buffer: &Buffer, offset: usize, bytes: &mut [u8])
    -> Result<(), DeviceError>;

    /// Copies rows between two different buffers, in stream order. This default copies row by row
    /// through the host; devices override it.
    ///
    /// # Errors
    /// If a range does not fit, or the driver fails.
    fn copy_rows(&self, copy: &RowCopy<'_>) -> Result<(), DeviceError> {
        let Some([from, _]) = copy.check()? else {
            return Ok(());
        };
        let mut bytes = vec![0; from.bytes];
        self.download(copy.from, copy.from_offset, &mut bytes)?;
        for (row, from) in bytes.chunks(copy.from_stride).enumerate() {
            let to = copy.to_offset + row * copy.to_stride;
            self.upload(&from[..copy.row_bytes], copy.to, to)?;
        }
        Ok(())
    }

    /// Waits until everything launched so far has finished.
    ///
    /// # Errors
    /// If a launch failed.
    fn synchronize(&self) -> Result<(), DeviceError>;

    /// Returns a simulator's counters since the last call, by symbol in the order of the first
    /// launch; empty on hardware.
    fn take_counters(&self) -> Vec<KernelCounters> {
        Vec::new()
    }
}

/// Artifacts loaded onto a device.
pub trait Module: Any + Send + Sync {
    /// Returns the function of an entry, for launches without another lookup.
    ///
    /// # Errors
    /// [`DeviceError::Launch`] if the symbol is unknown.
    fn function(&self, symbol: &str) -> Result<FunctionId, DeviceError>;

    /// Launches a function, or nothing if a grid dimension is zero.
    ///
    /// # Safety
    /// `function` must be this module's. `args` must match the entry's parameters in number, kind
    /// and order, and each pointer must stay valid for the kernel's accesses until the launch has
    /// finished.
    ///
    /// # Errors
    /// If the driver refuses the launch.
    unsafe fn run(
        &self,
        function: FunctionId,
        dims: LaunchDims,
        args: &[Arg],
    ) -> Result<(), DeviceError>;

    /// Looks `symbol` up and launches it.
    ///
    /// # Safety
    /// The same as [`Module::run`].
    ///
    /// # Errors
    /// The errors of [`Module::function`] and [`Module::run`].
    unsafe fn launch(
        &self,
        symbol: &str,
        dims: LaunchDims,
        args: &[Arg],
    ) -> Result<(), DeviceError> {
        let function = self.function(symbol)?;
        // SAFETY: the function is this module's; the caller promises the rest.
        unsafe { self.run(function, dims, args) }
    }
}

/// The number of a function in its [`Module`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FunctionId(pub usize);

impl FunctionId {
    /// Returns the position of `symbol` among those of a module.
    ///
    /// # Errors
    /// [`DeviceError::Launch`] lists the module's symbols if `symbol` is not one of them.
    pub fn find<'a>(
        symbols: impl Iterator<Item = &'a str> + Clone,
        symbol: &str,
    ) -> Result<FunctionId, DeviceError> {
        let found = symbols.clone().position(|known| known == symbol);
        found.map(FunctionId).ok_or_else(|| {
            let mut known: Vec<&str> = symbols.collect();
            known.sort_unstable();
            DeviceError::Launch {
                kernel: symbol.to_string(),
                reason: LaunchReason::NotLoaded {
                    known: known.into_iter().map(str::to_string).collect(),
                },
            }
        })
    }
}

/// Launch geometry, evaluated for one token count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchDims {
    /// Blocks in x and y.
    pub grid: [u64; 2],
    /// Threads per block.
    pub threads: u32,
    /// Dynamic shared memory in bytes.
    pub shared_bytes: u32,
    /// Adjacent blocks in x that form a cluster; 1 without clusters.
    pub cluster: u32,
}

/// A kernel argument.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arg {
    /// An address in device memory.
    Ptr(Ptr),
    /// A 64-bit integer.
    I64(i64),
    /// A float.
    F32(f32),
    /// A dense row-major tensor, which the device encodes into a tensor map.
    TensorMap {
        /// The address of its first element.
        base: Ptr,
        /// Its sizes, innermost first; 1 beyond the rank of the map.
        dims: [u64; 5],
    },
}

/// A copy of rows of bytes from one buffer to another.
#[derive(Clone, Copy, Debug)]
pub struct RowCopy<'a> {
    /// The source.
    pub from: &'a Buffer,
    /// The first byte in `from`.
    pub from_offset: usize,
    /// The distance between row starts in `from` in bytes, at least a row.
    pub from_stride: usize,
    /// The destination.
    pub to: &'a Buffer,
    /// The first byte in `to`.
    pub to_offset: usize,
    /// The distance between row starts in `to` in bytes, at least a row.
    pub to_stride: usize,
    /// The number of rows.
    pub rows: usize,
    /// The size of a row in bytes.
    pub row_bytes: usize,
}

/// The bytes of a buffer from the start of the first row to the end of the last.
#[derive(Clone, Copy, Debug)]
pub struct RowSpan {
    /// The address of the first byte.
    pub start: Ptr,
    /// The length in bytes.
    pub bytes: usize,
}

impl RowCopy<'_> {
    /// Returns the source and destination spans, or `None` if there are no bytes.
    ///
    /// # Errors
    /// [`DeviceError::Driver`] if rows do not fit or overlap each other.
    pub fn check(&self) -> Result<Option<[RowSpan; 2]>, DeviceError> {
        if self.rows == 0 || self.row_bytes == 0 {
            return Ok(None);
        }
        let failed = |reason| DeviceError::Driver {
            operation: format!("a copy of {} rows", self.rows),
            reason,
        };
        if self.from_stride.min(self.to_stride) < self.row_bytes {
            return Err(failed(DriverReason::Overlap));
        }
        let span = |buffer: &Buffer, offset: usize, stride: usize| {
            let before = stride.checked_mul(self.rows - 1);
            let bytes = before.and_then(|before| before.checked_add(self.row_bytes));
            let bytes = bytes.ok_or_else(|| failed(DriverReason::TooManyRows))?;
            let start = buffer.range("a copy of rows", offset, bytes)?;
            Ok(RowSpan { start, bytes })
        };
        let from = span(self.from, self.from_offset, self.from_stride)?;
        let to = span(self.to, self.to_offset, self.to_stride)?;
        Ok(Some([from, to]))
    }
}

/// An address in device memory. For the CPU it is an ordinary address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ptr(pub u64);

/// Device memory that is freed when its last owner drops it.
pub struct Buffer {
    ptr: Ptr,
    bytes: usize,
    _owner: Box<dyn Send + Sync>,
}

impl Buffer {
    /// Wraps an allocation: `owner` frees it on drop.
    pub fn new(ptr: Ptr, bytes: usize, owner: Box<dyn Send + Sync>) -> Buffer {
        Buffer {
            ptr,
            bytes,
            _owner: owner,
        }
    }

    /// Returns the address of its first byte.
    pub fn ptr(&self) -> Ptr {
        self.ptr
    }

    /// Returns its size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the address at `offset`, if `length` bytes fit there. `operation`, such as `upload`,
    /// is for the error.
    ///
    /// # Errors
    /// [`DeviceError::Driver`] with the sizes.
    pub fn range(&self, operation: &str, offset: usize, length: usize) -> Result<Ptr, DeviceError> {
        let end = offset.checked_add(length);
        if end.is_some_and(|end| end <= self.bytes) {
            return Ok(Ptr(self.ptr.0 + offset as u64));
        }
        Err(DeviceError::Driver {
            operation: format!("{operation} of {length} bytes at byte {offset}"),
            reason: DriverReason::OutOfRange { bytes: self.bytes },
        })
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({:#x}, {} bytes)", self.ptr.0, self.bytes)
    }
}
