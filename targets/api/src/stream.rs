//! The numbers of GPUs, and events and graphs of their streams.

use crate::DeviceError;
use std::any::Any;

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
