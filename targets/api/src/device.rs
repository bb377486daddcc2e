//! The interface of devices: loading and launching kernels, on a GPU in streams.

use crate::{Arg, Artifact, Buffer, DeviceError, KernelCounters, LaunchDims, LaunchReason, Ptr};
use crate::{DeviceCopy, Event, GpuInfo, Graph, HostBuffer, RowCopy};
use moesaic_kernel::{CpuCaches, Entry, Target};
use std::any::Any;
use std::ffi::c_void;
use std::fmt;
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
    #[doc(hidden)]
    fn streams(&self) -> Result<&dyn StreamDevice, DeviceError> {
        Err(DeviceError::Unsupported {
            backend: self.info().target.to_string(),
            asked: "streams, events and graphs".to_string(),
        })
    }

    /// Returns the name of the graph being captured, if any. Until its end nothing may be compiled,
    /// loaded or allocated, so callers that compile ask first.
    #[doc(hidden)]
    fn capturing(&self) -> Option<String> {
        None
    }

    /// Keeps a buffer as long as the graph being captured, because launches of that graph use it.
    /// Does nothing without a capture.
    #[doc(hidden)]
    fn keep(&self, used: Arc<Buffer>) {
        let _ = used;
    }

    /// Loads an artifact; `entries` are the symbols that will be launched.
    ///
    /// # Errors
    /// If the driver refuses the binary, a symbol is missing, or the binary's own signature
    /// disagrees with the entry's.
    #[doc(hidden)]
    fn load(&self, artifact: &Artifact, entries: &[Entry]) -> Result<Arc<dyn Module>, DeviceError>;

    /// Returns the bytes that can be allocated now, on systems that promise more memory than they
    /// have; `None` where an oversized allocation simply fails.
    fn free_bytes(&self) -> Option<u64> {
        None
    }

    /// Returns the known cache sizes of a core, for a CPU.
    #[doc(hidden)]
    fn caches(&self) -> CpuCaches {
        CpuCaches::default()
    }

    /// Announces the launches of one pass, until [`Device::end_pass`]: a CPU's threads stay awake
    /// between them. Passes of several callers may overlap.
    #[doc(hidden)]
    fn begin_pass(&self) {}

    /// Ends a pass begun by [`Device::begin_pass`].
    #[doc(hidden)]
    fn end_pass(&self) {}

    /// Starts placing memory, until [`Device::end_placing`]: the data that this thread's launches
    /// and uploads write stays for later launches, which read each part with the same share of
    /// their blocks. On a CPU with several NUMA nodes, the threads of each node then write their
    /// own share.
    #[doc(hidden)]
    fn begin_placing(&self) {}

    /// Ends what [`Device::begin_placing`] began.
    #[doc(hidden)]
    fn end_placing(&self) {}

    /// Returns true if placing requires a tensor to be written by a single launch or upload, so
    /// that each of several NUMA nodes gets its share of the whole.
    #[doc(hidden)]
    fn places_whole(&self) -> bool {
        false
    }

    /// Returns the address at which kernels can read these host bytes in place, on devices that
    /// can. The bytes must outlive every launch that reads them.
    #[doc(hidden)]
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
    #[doc(hidden)]
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
    #[doc(hidden)]
    fn take_counters(&self) -> Vec<KernelCounters> {
        Vec::new()
    }
}

/// The device's properties: `Arc<dyn Device>` is a field of many structs that derive `Debug`.
impl fmt::Debug for dyn Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Device").field(self.info()).finish()
    }
}

/// A GPU and one stream on it. Allocations, copies and launches of this object run in the order of
/// its stream. [`StreamDevice::fork`] makes another object with another stream; both run side by
/// side until one waits for an [`Event`] of the other.
///
/// A buffer is freed in the order of the stream that allocated it. Before you drop it, that stream
/// must wait for every other stream that uses it.
pub trait StreamDevice: Device + Any {
    /// Returns the GPU's numbers.
    fn gpu_info(&self) -> &GpuInfo;

    /// Returns the driver's handle of the stream, for libraries that launch on it, and makes the
    /// GPU current on this thread, as they expect. The handle is valid as long as this object.
    ///
    /// # Errors
    /// If the driver fails.
    fn native_stream(&self) -> Result<*mut c_void, DeviceError>;

    /// Makes another stream on the same GPU.
    ///
    /// # Errors
    /// If the driver fails, or a graph is being captured.
    fn fork(&self) -> Result<Arc<dyn StreamDevice>, DeviceError>;

    /// Returns a module of another stream on this GPU without loading it again; launches through
    /// the result go to this stream.
    ///
    /// # Errors
    /// If the module belongs to another GPU or another kind of device.
    fn adopt(&self, module: &dyn Module) -> Result<Arc<dyn Module>, DeviceError>;

    /// Returns the number of a kernel's blocks that fit on one multiprocessor, with this many
    /// threads and bytes of dynamic shared memory per block.
    ///
    /// # Errors
    /// If the module has no such kernel, or the driver fails.
    fn occupancy(
        &self,
        module: &dyn Module,
        symbol: &str,
        threads: u32,
        shared_bytes: u32,
    ) -> Result<u32, DeviceError>;

    /// Records an event at this point of the stream.
    ///
    /// # Errors
    /// If the driver fails.
    fn record(&self) -> Result<Arc<dyn Event>, DeviceError>;

    /// Makes later work in this stream wait for the event, which may be of another stream or GPU.
    /// During a capture, waiting for one of its events makes this stream a part of the graph.
    ///
    /// # Errors
    /// If the event belongs to another kind of device, if one of the two is part of a graph and the
    /// other is not, or if the driver fails.
    fn wait(&self, event: &dyn Event) -> Result<(), DeviceError>;

    /// Copies `bytes` bytes between buffers of this GPU, in stream order.
    ///
    /// # Errors
    /// If a range does not fit, or the driver fails.
    fn copy(&self, copy: &DeviceCopy<'_>) -> Result<(), DeviceError>;

    /// Allocates pinned host memory, filled with zeros, for faster copies.
    ///
    /// # Errors
    /// If the driver fails, or a graph is being captured.
    fn pinned(&self, bytes: usize) -> Result<HostBuffer, DeviceError>;

    /// Returns true if this GPU can access the memory of GPU number `peer`.
    ///
    /// # Errors
    /// If there is no such GPU.
    fn reaches(&self, peer: usize) -> Result<bool, DeviceError>;

    /// Lets GPU number `peer` read and write what this GPU allocates, if the two reach each other.
    /// NCCL does so between ranks of one process, and enables the access itself, but not for memory
    /// of a pool.
    ///
    /// # Errors
    /// If there is no such GPU, or the driver fails.
    fn admit(&self, peer: usize) -> Result<(), DeviceError>;

    /// Starts a capture: launches on this stream do not run, but become part of a graph. Loading,
    /// allocating, synchronizing and copies from and to the host fail with
    /// [`DeviceError::Capturing`] until [`StreamDevice::end_capture`]. `graph` is a name for
    /// errors.
    ///
    /// # Errors
    /// If a capture is already running, or the driver fails.
    fn begin_capture(&self, graph: &str) -> Result<(), DeviceError>;

    /// Ends the capture. The graph keeps the modules that it launches, the buffers dropped during
    /// the capture, and those passed to [`Device::keep`].
    ///
    /// # Errors
    /// If no capture began on this stream, or the driver cannot make a graph of the launches. The
    /// capture is over in any case.
    fn end_capture(&self) -> Result<Arc<dyn Graph>, DeviceError>;
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

#[cfg(test)]
mod tests {
    use super::*;

    struct Plain(DeviceInfo);

    impl Device for Plain {
        fn info(&self) -> &DeviceInfo {
            &self.0
        }

        fn load(&self, _: &Artifact, _: &[Entry]) -> Result<Arc<dyn Module>, DeviceError> {
            unreachable!()
        }

        fn alloc(&self, _: usize) -> Result<Buffer, DeviceError> {
            unreachable!()
        }

        fn upload(&self, _: &[u8], _: &Buffer, _: usize) -> Result<(), DeviceError> {
            unreachable!()
        }

        fn download(&self, _: &Buffer, _: usize, _: &mut [u8]) -> Result<(), DeviceError> {
            unreachable!()
        }

        fn synchronize(&self) -> Result<(), DeviceError> {
            unreachable!()
        }
    }

    #[test]
    fn a_device_without_streams_names_itself() {
        let device = Plain(DeviceInfo {
            name: String::new(),
            target: "sim:sm_80".parse().unwrap(),
            units: 1,
            memory_bytes: None,
        });
        assert_eq!(device.capturing(), None);
        assert_eq!(
            device.streams().err().unwrap().to_string(),
            "`sim:sm_80` does not support streams, events and graphs"
        );
    }
}
