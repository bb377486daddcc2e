//! Loading and launching.

use crate::{Artifact, DeviceError, KernelCounters, StreamDevice};
use moesaic_kernel::{CpuCaches, Entry, Target};
use std::any::Any;
use std::sync::Arc;

/// What a device says of itself.
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
    /// What it is.
    fn info(&self) -> &DeviceInfo;

    /// Streams, events and graphs, where the device has them.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] names the backend that has none.
    fn streams(&self) -> Result<&dyn StreamDevice, DeviceError> {
        Err(DeviceError::Unsupported {
            backend: self.info().target.to_string(),
            asked: "streams, events and graphs".to_string(),
        })
    }

    /// The graph that is being captured, if any: nothing may be compiled,
    /// loaded or allocated until its end. Those who compile ask first.
    fn capturing(&self) -> Option<String> {
        None
    }

    /// What launches of the graph that is being captured use: it is kept as long
    /// as the graph is. Nothing happens without a capture.
    fn keep(&self, used: Arc<Buffer>) {
        let _ = used;
    }

    /// Loads an artifact; `entries` are the symbols that will be launched.
    ///
    /// # Errors
    /// When the driver refuses the binary, a symbol is missing, or the
    /// binary's own signature disagrees with the entry's.
    fn load(&self, artifact: &Artifact, entries: &[Entry]) -> Result<Arc<dyn Module>, DeviceError>;

    /// Bytes that can be allocated now, where the system promises more than it
    /// has; `None` where an allocation that does not fit fails by itself.
    fn free_bytes(&self) -> Option<u64> {
        None
    }

    /// What is known of the caches of a core, where it is a CPU.
    fn caches(&self) -> CpuCaches {
        CpuCaches::default()
    }

    /// Launches of one pass follow, until [`Device::end_pass`]: a CPU's threads stay
    /// awake between them. Passes of several callers may overlap.
    fn begin_pass(&self) {}

    /// Ends what [`Device::begin_pass`] began.
    fn end_pass(&self) {}

    /// What this thread's launches and uploads write until [`Device::end_placing`]
    /// stays for later launches, which read a part of it with the same share of
    /// their blocks. On a CPU with several NUMA nodes the threads of each write
    /// their own share.
    fn begin_placing(&self) {}

    /// Ends what [`Device::begin_placing`] began.
    fn end_placing(&self) {}

    /// Whether placing needs a tensor written by one launch or upload: where there
    /// are several NUMA nodes, each gets its share of the whole.
    fn places_whole(&self) -> bool {
        false
    }

    /// Where kernels find bytes of the host, if they read them where they are. A
    /// kernel may do so as long as they stay there.
    fn host_ptr(&self, bytes: &[u8]) -> Option<Ptr> {
        let _ = bytes;
        None
    }

    /// Allocates at least `bytes` bytes, aligned to 64; contents undefined.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    fn alloc(&self, bytes: usize) -> Result<Buffer, DeviceError>;

    /// Copies host bytes to `buffer` at `offset` bytes, in stream order. The
    /// bytes may change or go when it returns.
    ///
    /// # Errors
    /// When the range does not fit, or the driver fails.
    fn upload(&self, bytes: &[u8], buffer: &Buffer, offset: usize) -> Result<(), DeviceError>;

    /// Copies from `buffer` at `offset` bytes to the host and waits for it.
    ///
    /// # Errors
    /// When the range does not fit, or the driver or an earlier launch fails.
    fn download(&self, buffer: &Buffer, offset: usize, bytes: &mut [u8])
    -> Result<(), DeviceError>;

    /// Copies rows between buffers that are not the same, in stream order: here by way of
    /// the host, a row at a time, for devices that do not do better.
    ///
    /// # Errors
    /// When a range does not fit, or the driver fails.
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
    /// When a launch failed.
    fn synchronize(&self) -> Result<(), DeviceError>;

    /// What a simulator has counted since the last call, by symbol in the
    /// order of the first launch; empty on hardware.
    fn take_counters(&self) -> Vec<KernelCounters> {
        Vec::new()
    }
}

/// Artifacts loaded onto a device.
pub trait Module: Any + Send + Sync {
    /// The function of an entry, to be launched without another look-up.
    ///
    /// # Errors
    /// [`DeviceError::Launch`] when the symbol is unknown.
    fn function(&self, symbol: &str) -> Result<FunctionId, DeviceError>;

    /// Launches a function. Nothing is launched when a grid dimension is zero.
    ///
    /// # Safety
    /// `function` must be this module's. `args` must match the entry's
    /// parameters in number, kind and order, and each pointer must be valid
    /// for what the kernel does with it until the launch has finished.
    ///
    /// # Errors
    /// When the driver refuses the launch.
    unsafe fn run(
        &self,
        function: FunctionId,
        dims: LaunchDims,
        args: &[Arg],
    ) -> Result<(), DeviceError>;

    /// Looks `symbol` up and launches it.
    ///
    /// # Safety
    /// As [`Module::run`].
    ///
    /// # Errors
    /// As [`Module::function`] and [`Module::run`].
    unsafe fn launch(
        &self,
        symbol: &str,
        dims: LaunchDims,
        args: &[Arg],
    ) -> Result<(), DeviceError> {
        let function = self.function(symbol)?;
        // SAFETY: the function is this module's; the rest is the caller's promise.
        unsafe { self.run(function, dims, args) }
    }
}

/// The number of a function in its [`Module`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FunctionId(pub usize);

impl FunctionId {
    /// The place of `symbol` among those that a module has.
    ///
    /// # Errors
    /// [`DeviceError::Launch`] lists the module's, when it is none of them.
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
                reason: format!("it was not loaded; loaded are: {}", known.join(", ")),
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
    /// Adjacent blocks in x that form a cluster; 1 where there are none.
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
    /// A dense row-major tensor for a tensor map, which the device encodes.
    TensorMap {
        /// Its first element.
        base: Ptr,
        /// Its sizes, innermost first; 1 beyond the rank of the map.
        dims: [u64; 5],
    },
}

/// Rows of bytes, from one buffer to another.
#[derive(Clone, Copy, Debug)]
pub struct RowCopy<'a> {
    /// Where from.
    pub from: &'a Buffer,
    /// The first byte in `from`.
    pub from_offset: usize,
    /// Bytes from the start of a row in `from` to that of the next, not fewer than a row has.
    pub from_stride: usize,
    /// Where to.
    pub to: &'a Buffer,
    /// The first byte in `to`.
    pub to_offset: usize,
    /// Bytes from the start of a row in `to` to that of the next, not fewer than a row has.
    pub to_stride: usize,
    /// How many rows.
    pub rows: usize,
    /// Bytes of a row.
    pub row_bytes: usize,
}

/// Bytes of a buffer from the first row's start to the last one's end.
#[derive(Clone, Copy, Debug)]
pub struct RowSpan {
    /// Where it begins.
    pub start: Ptr,
    /// How many.
    pub bytes: usize,
}

impl RowCopy<'_> {
    /// Where rows come from and where they go; `None` if there are no bytes.
    ///
    /// # Errors
    /// [`DeviceError::Driver`] for rows that do not fit, or lie within each other.
    pub fn check(&self) -> Result<Option<[RowSpan; 2]>, DeviceError> {
        if self.rows == 0 || self.row_bytes == 0 {
            return Ok(None);
        }
        let failed = |reason: &str| DeviceError::Driver {
            operation: format!("a copy of {} rows", self.rows),
            reason: reason.to_string(),
        };
        if self.from_stride.min(self.to_stride) < self.row_bytes {
            return Err(failed("rows lie within each other"));
        }
        let span = |buffer: &Buffer, offset: usize, stride: usize| {
            let before = stride.checked_mul(self.rows - 1);
            let bytes = before.and_then(|before| before.checked_add(self.row_bytes));
            let bytes = bytes.ok_or_else(|| failed("there are too many"))?;
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

/// Device memory that is freed when the last owner lets go.
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

    /// The address of its first byte.
    pub fn ptr(&self) -> Ptr {
        self.ptr
    }

    /// Its size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The address of `offset`, if `length` bytes fit behind it. `operation`
    /// is for the error: `upload`.
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
            reason: format!("the buffer holds {} bytes", self.bytes),
        })
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({:#x}, {} bytes)", self.ptr.0, self.bytes)
    }
}
