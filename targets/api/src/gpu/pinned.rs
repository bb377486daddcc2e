//! Pinned host memory.

use super::shared::Gpu;
use super::{Vendor, functions};
use crate::{DeviceError, DriverReason};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

/// The flag that pins memory for every GPU of the process.
const PORTABLE: u32 = 1;

/// Pinned host memory, freed on drop. Copies from and to it have ended by then.
pub(super) struct Pinned<V: Vendor> {
    start: NonNull<u8>,
    gpu: Arc<Gpu<V>>,
}

// SAFETY: it owns the memory and does nothing but free it.
unsafe impl<V: Vendor> Send for Pinned<V> {}
// SAFETY: as above.
unsafe impl<V: Vendor> Sync for Pinned<V> {}

impl<V: Vendor> Drop for Pinned<V> {
    fn drop(&mut self) {
        let start = self.start.as_ptr().cast();
        // SAFETY: allocated once, freed once; copies of borrowed memory are
        // waited for, and so does [`Staging`](super::staging::Staging).
        self.gpu.call_quietly(|f| unsafe { (f.host_free)(start) });
    }
}

impl<V: Vendor> Pinned<V> {
    /// Allocates at least one byte, so that the address is always real, with undefined contents.
    pub fn new(gpu: &Arc<Gpu<V>>, bytes: usize, operation: &str) -> Result<Pinned<V>, DeviceError> {
        let mut start: *mut c_void = functions::NULL;
        // SAFETY: the pointer is valid for a write.
        gpu.call(operation, |f| unsafe {
            (f.host_alloc)(&mut start, bytes.max(1), PORTABLE)
        })?;
        let start = NonNull::new(start.cast::<u8>()).ok_or_else(|| DeviceError::Driver {
            operation: operation.to_string(),
            reason: DriverReason::NoAddress,
        })?;
        let gpu = gpu.clone();
        Ok(Pinned { start, gpu })
    }

    pub fn gpu(&self) -> &Arc<Gpu<V>> {
        &self.gpu
    }

    pub fn start(&self) -> NonNull<u8> {
        self.start
    }
}
