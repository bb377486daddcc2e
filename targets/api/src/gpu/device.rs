//! A GPU as a [`Device`] with streams.

use super::event::GpuEvent;
use super::graph::GpuGraph;
use super::lane::{Capture, Lane};
use super::module::GpuModule;
use super::shared::Gpu;
use super::{
    AddressedRows, PoolAccess, PoolHandle, StreamHandle, Vendor, functions, memory, upload,
};
use crate::{
    Artifact, Buffer, Device, DeviceCopy, DeviceError, DeviceInfo, DriverReason, Event, GpuInfo,
    Graph, HostBuffer, Module, RowCopy, StreamDevice,
};
use moesaic_kernel::Entry;
use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

/// The pool attribute for the number of bytes kept at a synchronization.
const RELEASE_THRESHOLD: i32 = 4;

/// A GPU and one stream on it, through a driver.
pub struct GpuDevice<V: Vendor> {
    lane: Arc<Lane<V>>,
}

/// The starting state of a [`GpuDevice`].
pub struct Setup {
    /// The device's properties.
    pub info: DeviceInfo,
    /// The device's numbers; [`GpuInfo::pools`] is the driver's claim to have memory pools.
    pub gpu_info: GpuInfo,
    /// The stream to use, with the owner that destroys it; without one, a new stream is made.
    pub stream: Option<(StreamHandle, Box<dyn Any + Send + Sync>)>,
}

impl<V: Vendor> GpuDevice<V> {
    /// Makes a device of the vendor's GPU.
    ///
    /// # Errors
    /// If the driver cannot make a stream.
    pub fn new(vendor: V, mut setup: Setup) -> Result<GpuDevice<V>, DeviceError> {
        setup.gpu_info.pools = setup.gpu_info.pools && keeps_memory(&vendor, &setup.gpu_info);
        let gpu = Arc::new(Gpu::new(vendor, setup.info, setup.gpu_info));
        let lane = match setup.stream {
            Some((stream, owner)) => Lane::over(gpu, stream, Some(owner)),
            None => Lane::new(&gpu)?,
        };
        Ok(GpuDevice {
            lane: Arc::new(lane),
        })
    }

    /// Returns free and total memory in bytes.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn memory(&self) -> Result<(usize, usize), DeviceError> {
        memory::free_and_total(&self.lane.gpu)
    }

    fn foreign(asked: &str) -> DeviceError {
        DeviceError::Unsupported {
            backend: V::BACKEND.to_string(),
            asked: asked.to_string(),
        }
    }

    /// Returns the module, if it belongs to this GPU.
    fn own<'a>(
        &self,
        module: &'a dyn Module,
        asked: &str,
    ) -> Result<&'a GpuModule<V>, DeviceError> {
        let module: &dyn Any = module;
        let own = module
            .downcast_ref::<GpuModule<V>>()
            .filter(|module| Arc::ptr_eq(&module.loaded.gpu, &self.lane.gpu));
        own.ok_or_else(|| Self::foreign(&format!("{asked} a module of another device")))
    }
}

#[doc(hidden)]
impl<V: Vendor> Device for GpuDevice<V> {
    fn info(&self) -> &DeviceInfo {
        &self.lane.gpu.info
    }

    fn streams(&self) -> Result<&dyn StreamDevice, DeviceError> {
        Ok(self)
    }

    fn capturing(&self) -> Option<String> {
        self.lane.capturing().map(|capture| capture.name.clone())
    }

    fn keep(&self, used: Arc<Buffer>) {
        if let Some(capture) = self.lane.capturing() {
            capture.keep_buffer(used);
        }
    }

    fn load(&self, artifact: &Artifact, entries: &[Entry]) -> Result<Arc<dyn Module>, DeviceError> {
        Ok(Arc::new(GpuModule::load(&self.lane, artifact, entries)?))
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer, DeviceError> {
        memory::allocate(&self.lane, bytes)
    }

    fn upload(&self, bytes: &[u8], buffer: &Buffer, offset: usize) -> Result<(), DeviceError> {
        let to = buffer.range("upload", offset, bytes.len())?;
        let lane = &self.lane;
        lane.forbid(|| format!("a copy of {} bytes from the host", bytes.len()))?;
        if bytes.is_empty() {
            Ok(())
        } else {
            upload::upload(lane, bytes, to)
        }
    }

    fn download(
        &self,
        buffer: &Buffer,
        offset: usize,
        bytes: &mut [u8],
    ) -> Result<(), DeviceError> {
        let from = buffer.range("download", offset, bytes.len())?;
        let lane = &self.lane;
        lane.forbid(|| format!("a copy of {} bytes to the host", bytes.len()))?;
        if !bytes.is_empty() {
            // SAFETY: the range lies in the buffer, which the caller keeps; `bytes` is borrowed
            // until the copy has finished, below.
            lane.gpu.call("download", |f| unsafe {
                (f.download)(bytes.as_mut_ptr().cast(), from.0, bytes.len(), lane.stream)
            })?;
        }
        lane.synchronize("download")
    }

    fn copy_rows(&self, copy: &RowCopy<'_>) -> Result<(), DeviceError> {
        let Some([from, to]) = copy.check()? else {
            return Ok(());
        };
        let rows = AddressedRows {
            from: from.start,
            from_stride: copy.from_stride,
            to: to.start,
            to_stride: copy.to_stride,
            count: copy.rows,
            bytes: copy.row_bytes,
        };
        let lane = &self.lane;
        // SAFETY: all rows lie in buffers, which the caller keeps.
        lane.gpu.call("copy of rows", |_| unsafe {
            lane.gpu.vendor.copy_rows(&rows, lane.stream)
        })
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        self.lane.synchronize("synchronize")
    }
}

impl<V: Vendor> StreamDevice for GpuDevice<V> {
    fn gpu_info(&self) -> &GpuInfo {
        &self.lane.gpu.gpu_info
    }

    fn native_stream(&self) -> Result<*mut c_void, DeviceError> {
        self.lane.gpu.enter("a call of another library")?;
        Ok(self.lane.stream.0)
    }

    fn fork(&self) -> Result<Arc<dyn StreamDevice>, DeviceError> {
        self.lane.forbid(|| "a new stream".to_string())?;
        Ok(Arc::new(GpuDevice {
            lane: Arc::new(Lane::new(&self.lane.gpu)?),
        }))
    }

    fn adopt(&self, module: &dyn Module) -> Result<Arc<dyn Module>, DeviceError> {
        let own = self.own(module, "launching")?;
        Ok(Arc::new(GpuModule::on(&own.loaded, &self.lane)))
    }

    fn occupancy(
        &self,
        module: &dyn Module,
        symbol: &str,
        threads: u32,
        shared_bytes: u32,
    ) -> Result<u32, DeviceError> {
        let operation = format!("occupancy of kernel `{symbol}`");
        let loaded = &self.own(module, "the occupancy of")?.loaded;
        let function = loaded.function(symbol).map_err(|error| match error {
            DeviceError::Launch { reason, .. } => DeviceError::Driver {
                operation: operation.clone(),
                reason: reason.into(),
            },
            other => other,
        })?;
        let mut blocks = 0;
        let threads = i32::try_from(threads).unwrap_or(i32::MAX);
        // SAFETY: the pointer is valid for a write, the module is loaded.
        self.lane.gpu.call(&operation, |f| unsafe {
            (f.occupancy)(&mut blocks, function.handle, threads, shared_bytes as usize)
        })?;
        Ok(blocks.unsigned_abs())
    }

    fn record(&self) -> Result<Arc<dyn Event>, DeviceError> {
        Ok(Arc::new(GpuEvent::record(&self.lane)?))
    }

    fn wait(&self, event: &dyn Event) -> Result<(), DeviceError> {
        GpuEvent::<V>::of(event, "waiting for")?.hold(&self.lane)
    }

    fn copy(&self, copy: &DeviceCopy<'_>) -> Result<(), DeviceError> {
        let from = copy.from.range("copy", copy.from_offset, copy.bytes)?;
        let to = copy.to.range("copy", copy.to_offset, copy.bytes)?;
        if copy.bytes == 0 {
            return Ok(());
        }
        // SAFETY: both ranges lie in buffers, which the caller keeps.
        self.lane.gpu.call("copy", |f| unsafe {
            (f.copy)(to.0, from.0, copy.bytes, self.lane.stream)
        })
    }

    fn pinned(&self, bytes: usize) -> Result<HostBuffer, DeviceError> {
        memory::pinned(&self.lane, bytes)
    }

    fn reaches(&self, peer: usize) -> Result<bool, DeviceError> {
        let own = self.gpu_info().ordinal;
        if own == peer {
            return Ok(true);
        }
        let mut reaches = 0;
        let operation = format!("peer query for GPU {peer}");
        // SAFETY: the pointer is valid for a write; an unknown GPU is a code.
        self.lane.gpu.call(&operation, |f| unsafe {
            (f.can_access_peer)(&mut reaches, number(own), number(peer))
        })?;
        Ok(reaches != 0)
    }

    fn admit(&self, peer: usize) -> Result<(), DeviceError> {
        let GpuInfo { ordinal, pools, .. } = *self.gpu_info();
        if !pools || ordinal == peer || !self.reaches(peer)? {
            return Ok(());
        }
        let (mut pool, access) = (PoolHandle(functions::NULL), PoolAccess::of(number(peer)));
        let operation = format!("access of GPU {peer} to the memory pool");
        // SAFETY: the pointers are valid for a write, and a read of one element.
        self.lane.gpu.call(&operation, |f| unsafe {
            match (f.default_pool)(&mut pool, number(ordinal)) {
                0 => (f.pool_access)(pool, &access, 1),
                failed => failed,
            }
        })
    }

    fn begin_capture(&self, graph: &str) -> Result<(), DeviceError> {
        Capture::begin(&self.lane, graph)
    }

    fn end_capture(&self) -> Result<Arc<dyn Graph>, DeviceError> {
        let capture = self.lane.capturing().ok_or_else(|| DeviceError::Driver {
            operation: "the end of a capture".to_string(),
            reason: DriverReason::NoCapture,
        })?;
        Ok(Arc::new(GpuGraph::end(&self.lane, &capture)?))
    }
}

impl<V: Vendor> fmt::Debug for GpuDevice<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("GpuDevice").field(self.info()).finish()
    }
}

impl<V: Vendor> Drop for GpuDevice<V> {
    fn drop(&mut self) {
        // A capture that nobody can end would keep its streams and modules, which keep it in turn,
        // so end it here.
        let capture = self.lane.capturing();
        if let Some(capture) = capture.filter(|capture| capture.begun_on(&self.lane)) {
            let _ = GpuGraph::end(&self.lane, &capture);
        }
        // A module that ran here keeps the stream, which takes no uploads any more, so free its
        // staging memory.
        drop(self.lane.staging().take());
    }
}

/// Returns a GPU's number in the form of drivers, which refuse one that is too large.
fn number(ordinal: usize) -> i32 {
    i32::try_from(ordinal).unwrap_or(i32::MAX)
}

/// Configures the memory pool, and returns true if there is one. By default a pool returns freed
/// memory to the system at every synchronization, and each layer would map it anew, so it is told
/// to keep it. If that fails, results are the same but allocation is slower.
fn keeps_memory<V: Vendor>(vendor: &V, gpu_info: &GpuInfo) -> bool {
    let functions = vendor.functions();
    let ordinal = number(gpu_info.ordinal);
    let mut pool = PoolHandle(functions::NULL);
    let mut threshold = u64::MAX;
    // SAFETY: the pointers are valid for a write and a read; the attribute is
    // a 64-bit integer.
    unsafe {
        if (functions.default_pool)(&mut pool, ordinal) != 0 {
            return false;
        }
        (functions.pool_set)(pool, RELEASE_THRESHOLD, (&raw mut threshold).cast());
    }
    true
}
