//! What GPUs have beyond a [`Device`]: streams, events and graphs.

use crate::{Buffer, Device, DeviceError, Module};
use std::any::Any;
use std::ffi::c_void;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

/// A GPU and one stream on it. Allocations, copies and launches of this
/// object are in the order of its stream; [`StreamDevice::fork`] gives
/// another object with another stream, and both go on side by side until one
/// waits for an [`Event`] of the other.
///
/// A buffer is freed in the order of the stream that allocated it: before it
/// is dropped, that stream has to wait for every other one that uses it.
pub trait StreamDevice: Device + Any {
    /// What the GPU has.
    fn gpu_info(&self) -> &GpuInfo;

    /// The driver's handle of the stream, for libraries that launch on it. Makes the GPU
    /// the one of this thread, as they expect. It is valid as long as this object.
    ///
    /// # Errors
    /// When the driver fails.
    fn native_stream(&self) -> Result<*mut c_void, DeviceError>;

    /// Another stream of the same GPU.
    ///
    /// # Errors
    /// When the driver fails, or a graph is being captured.
    fn fork(&self) -> Result<Arc<dyn StreamDevice>, DeviceError>;

    /// A module of another stream of this GPU, without loading it again: what
    /// is launched through the result goes to this stream.
    ///
    /// # Errors
    /// When the module is of another GPU or of another kind of device.
    fn adopt(&self, module: &dyn Module) -> Result<Arc<dyn Module>, DeviceError>;

    /// Blocks of a kernel that are on one multiprocessor at a time, with so
    /// many threads and bytes of dynamic shared memory per block.
    ///
    /// # Errors
    /// When the module has no such kernel, or the driver fails.
    fn occupancy(
        &self,
        module: &dyn Module,
        symbol: &str,
        threads: u32,
        shared_bytes: u32,
    ) -> Result<u32, DeviceError>;

    /// Marks this point of the stream.
    ///
    /// # Errors
    /// When the driver fails.
    fn record(&self) -> Result<Arc<dyn Event>, DeviceError>;

    /// What comes later in this stream waits for the event, which may be of
    /// another stream or GPU. While a graph is captured, waiting for one of
    /// its events makes this stream a part of the graph.
    ///
    /// # Errors
    /// When the event is of another kind of device, when one of the two is
    /// part of a graph and the other is not, or when the driver fails.
    fn wait(&self, event: &dyn Event) -> Result<(), DeviceError>;

    /// Copies `bytes` bytes between buffers of this GPU, in stream order.
    ///
    /// # Errors
    /// When a range does not fit, or the driver fails.
    fn copy(&self, copy: &DeviceCopy<'_>) -> Result<(), DeviceError>;

    /// Host memory that the GPU reaches by itself, for faster copies. Holds
    /// zeros.
    ///
    /// # Errors
    /// When the driver fails, or a graph is being captured.
    fn pinned(&self, bytes: usize) -> Result<HostBuffer, DeviceError>;

    /// Whether this GPU can reach the memory of the one with that number.
    ///
    /// # Errors
    /// When there is no such GPU.
    fn reaches(&self, peer: usize) -> Result<bool, DeviceError>;

    /// From here on what is launched on this stream is not run, but becomes
    /// part of a graph. Loading, allocating, synchronising and copying from
    /// and to the host are [`DeviceError::Capturing`] until
    /// [`StreamDevice::end_capture`]. `graph` is its name, for errors.
    ///
    /// # Errors
    /// When one is being captured already, or the driver fails.
    fn begin_capture(&self, graph: &str) -> Result<(), DeviceError>;

    /// Ends the capture. The graph keeps the modules it launches, the
    /// buffers that were dropped meanwhile, and those that it was given
    /// ([`Device::keep`]).
    ///
    /// # Errors
    /// When none was begun on this stream, or the driver cannot make a graph
    /// of what was launched; the capture is over all the same.
    fn end_capture(&self) -> Result<Arc<dyn Graph>, DeviceError>;
}

/// A GPU in numbers, beyond [`DeviceInfo`](crate::DeviceInfo). What the driver
/// does not say is `None`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GpuInfo {
    /// The number it was opened by.
    pub ordinal: usize,
    /// The most shared memory of a block in bytes, dynamic and static.
    pub shared_bytes: u32,
    /// Shared memory of a multiprocessor in bytes.
    pub shared_bytes_per_unit: Option<u32>,
    /// Threads that are on one multiprocessor at a time.
    pub threads_per_unit: Option<u32>,
    /// Threads of a warp or wave.
    pub lanes: Option<u32>,
    /// Bytes of L2 cache.
    pub l2_bytes: Option<u64>,
    /// The highest clock in kHz.
    pub clock_khz: Option<u32>,
    /// Whether memory comes from a pool, in stream order.
    pub pools: bool,
    /// The driver in words: `the driver is for CUDA 12.4`.
    pub driver: Option<String>,
    /// Its place on the bus: `0000:17:00`.
    pub bus: Option<String>,
}

/// A copy from one buffer to another.
#[derive(Clone, Copy, Debug)]
pub struct DeviceCopy<'a> {
    /// Where from.
    pub from: &'a Buffer,
    /// The first byte in `from`.
    pub from_offset: usize,
    /// Where to.
    pub to: &'a Buffer,
    /// The first byte in `to`.
    pub to_offset: usize,
    /// How many bytes.
    pub bytes: usize,
}

/// A point of a stream.
pub trait Event: Any + Send + Sync {
    /// Waits until the stream has come to it.
    ///
    /// # Errors
    /// When an earlier launch failed, or the event is part of a graph.
    fn synchronize(&self) -> Result<(), DeviceError>;

    /// Whether the stream has come to it. Does not wait.
    ///
    /// # Errors
    /// As [`Event::synchronize`].
    fn passed(&self) -> Result<bool, DeviceError>;

    /// Milliseconds from `start`, an event of the same GPU, to this one; waits
    /// for both.
    ///
    /// # Errors
    /// As [`Event::synchronize`].
    fn elapsed_ms(&self, start: &dyn Event) -> Result<f32, DeviceError>;
}

/// Captured launches that are launched again as one.
pub trait Graph: Any + Send + Sync {
    /// The name it was given.
    fn name(&self) -> &str;

    /// The kernels in it, in the order they were launched.
    fn kernels(&self) -> Vec<String>;

    /// Launches it on the stream that captured it.
    ///
    /// # Safety
    /// Every pointer in the captured launches must be valid until this launch
    /// of the graph has finished.
    ///
    /// # Errors
    /// When the driver refuses it, or that stream is capturing another graph.
    unsafe fn launch(&self) -> Result<(), DeviceError>;
}

/// Host memory that a GPU reaches by itself.
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
    /// `bytes` bytes from `start` are initialised, and nobody else's until
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
        // SAFETY: the promise of `new`; `self` is borrowed alone.
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
