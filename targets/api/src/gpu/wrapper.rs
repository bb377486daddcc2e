//! Devices that are a [`GpuDevice`](super::GpuDevice) and more.

use crate::{Artifact, Buffer, Device, DeviceError, DeviceInfo, Module, RowCopy, StreamDevice};
use moesaic_kernel::Entry;
use std::sync::Arc;

/// A vendor's own type of device around a [`GpuDevice`](super::GpuDevice), with the ways to open
/// it. It is a [`Device`] by this.
pub trait GpuWrapper: Send + Sync {
    /// Returns the device inside.
    fn gpu(&self) -> &dyn Device;
}

#[doc(hidden)]
impl<D: GpuWrapper> Device for D {
    fn info(&self) -> &DeviceInfo {
        self.gpu().info()
    }

    fn streams(&self) -> Result<&dyn StreamDevice, DeviceError> {
        self.gpu().streams()
    }

    fn capturing(&self) -> Option<String> {
        self.gpu().capturing()
    }

    fn keep(&self, used: Arc<Buffer>) {
        self.gpu().keep(used);
    }

    fn load(&self, artifact: &Artifact, entries: &[Entry]) -> Result<Arc<dyn Module>, DeviceError> {
        self.gpu().load(artifact, entries)
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer, DeviceError> {
        self.gpu().alloc(bytes)
    }

    fn upload(&self, bytes: &[u8], buffer: &Buffer, offset: usize) -> Result<(), DeviceError> {
        self.gpu().upload(bytes, buffer, offset)
    }

    fn download(
        &self,
        buffer: &Buffer,
        offset: usize,
        bytes: &mut [u8],
    ) -> Result<(), DeviceError> {
        self.gpu().download(buffer, offset, bytes)
    }

    fn copy_rows(&self, copy: &RowCopy<'_>) -> Result<(), DeviceError> {
        self.gpu().copy_rows(copy)
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        self.gpu().synchronize()
    }
}
