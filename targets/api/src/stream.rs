//! Streams, events and graphs of GPUs, beyond a [`Device`].

use crate::{Buffer, Device, DeviceError, Module};
use std::any::Any;
use std::ffi::c_void;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

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

/// A GPU's numbers, beyond [`DeviceInfo`](crate::DeviceInfo). Unknown ones are `None`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GpuInfo {
    /// The number by which it was opened.
    pub ordinal: usize,
    /// The largest shared memory of a block in bytes, dynamic and static together.
    pub shared_bytes: u32,
    /// Shared memory of a multiprocessor in bytes.
    pub shared_bytes_per_unit: Option<u32>,
    /// The largest number of resident threads per multiprocessor.
    pub threads_per_unit: Option<u32>,
    /// Threads of a warp or wave.
    pub lanes: Option<u32>,
    /// Bytes of L2 cache.
    pub l2_bytes: Option<u64>,
    /// The highest clock in kHz.
    pub clock_khz: Option<u32>,
    /// Whether memory comes from a pool, in stream order.
    pub pools: bool,
    /// The driver's description: `the driver is for CUDA 12.4`.
    pub driver: Option<String>,
    /// The PCI address: `0000:17:00`.
    pub bus: Option<String>,
}

/// A copy from one buffer to another.
#[derive(Clone, Copy, Debug)]
pub struct DeviceCopy<'a> {
    /// The source.
    pub from: &'a Buffer,
    /// The first byte in `from`.
    pub from_offset: usize,
    /// The destination.
    pub to: &'a Buffer,
    /// The first byte in `to`.
    pub to_offset: usize,
    /// The number of bytes.
    pub bytes: usize,
}

/// A point of a stream.
pub trait Event: Any + Send + Sync {
    /// Waits until the stream has reached it.
    ///
    /// # Errors
    /// If an earlier launch failed, or the event is part of a graph.
    fn synchronize(&self) -> Result<(), DeviceError>;

    /// Returns true if the stream has reached it, without waiting.
    ///
    /// # Errors
    /// The same as [`Event::synchronize`].
    fn passed(&self) -> Result<bool, DeviceError>;

    /// Returns the milliseconds from `start`, an event of the same GPU, to this one. Waits for
    /// both.
    ///
    /// # Errors
    /// The same as [`Event::synchronize`].
    fn elapsed_ms(&self, start: &dyn Event) -> Result<f32, DeviceError>;
}

/// Captured launches that are launched again together.
pub trait Graph: Any + Send + Sync {
    /// Returns its name.
    fn name(&self) -> &str;

    /// Returns its kernels, in launch order.
    fn kernels(&self) -> Vec<String>;

    /// Launches the graph on the stream that captured it.
    ///
    /// # Safety
    /// Every pointer in the captured launches must stay valid until this launch of the graph has
    /// finished.
    ///
    /// # Errors
    /// If the driver refuses it, or that stream is capturing another graph.
    unsafe fn launch(&self) -> Result<(), DeviceError>;
}

/// Pinned host memory, which a GPU can access directly.
pub struct HostBuffer {
    start: NonNull<u8>,
    bytes: usize,
    _owner: Box<dyn Send + Sync>,
}

// SAFETY: it owns the memory, and shares it only by Rust's rules.
unsafe impl Send for HostBuffer {}
// SAFETY: as above.
unsafe impl Sync for HostBuffer {}

impl HostBuffer {
    /// Wraps an allocation, which `owner` frees on drop.
    ///
    /// # Safety
    /// The `bytes` bytes from `start` must be initialized, and must belong to nobody else until
    /// `owner` is dropped.
    pub unsafe fn new(start: NonNull<u8>, bytes: usize, owner: Box<dyn Send + Sync>) -> HostBuffer {
        HostBuffer {
            start,
            bytes,
            _owner: owner,
        }
    }
}

impl Deref for HostBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the promise of `new`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }
}

impl DerefMut for HostBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: the promise of `new`; `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }
}

impl std::fmt::Debug for HostBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HostBuffer({} bytes)", self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Artifact, DeviceInfo};
    use moesaic_kernel::Entry;

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
