//! The workspace pool of a mesh.

use crate::error::EngineError;
use moesaic_target::{Buffer, Device};
use std::sync::Arc;

/// Workspaces that the calls of all layers of a mesh use one after the other. The pool grows to the
/// largest need.
#[derive(Default)]
pub(super) struct WorkspacePool(Vec<Arc<Buffer>>);

impl WorkspacePool {
    /// Takes the smallest free buffer of at least `bytes` bytes, or allocates one.
    pub fn take(&mut self, device: &dyn Device, bytes: usize) -> Result<Arc<Buffer>, EngineError> {
        let fits = |buffer: &&Arc<Buffer>| buffer.bytes() >= bytes;
        // Best fit: a small request must not take the buffer that the next large one needs, or the
        // pool would grow.
        let least = self
            .0
            .iter()
            .filter(fits)
            .map(|buffer| buffer.bytes())
            .min();
        let at = self
            .0
            .iter()
            .position(|buffer| Some(buffer.bytes()) == least);
        match at {
            Some(at) => Ok(self.0.swap_remove(at)),
            // At least 64 bytes, so that no buffer is empty.
            None => Ok(Arc::new(device.alloc(bytes.max(64))?)),
        }
    }

    /// Returns buffers to the pool. Later launches of the same device may use them at once, because
    /// they run after those before.
    pub fn give(&mut self, buffers: impl IntoIterator<Item = Arc<Buffer>>) {
        self.0.extend(buffers);
    }

    /// Returns the free bytes.
    pub fn bytes(&self) -> usize {
        self.0.iter().map(|buffer| buffer.bytes()).sum()
    }
}

/// The bytes of zeros of one upload.
const CHUNK_BYTES: usize = 1 << 20;

pub(super) fn clear(device: &dyn Device, buffer: &Buffer, bytes: usize) -> Result<(), EngineError> {
    let zeros = vec![0; bytes.min(CHUNK_BYTES)];
    // Zeros are uploaded from the host, so a gradient of gigabytes must not need as many on the
    // host.
    for first in (0..bytes).step_by(CHUNK_BYTES) {
        let some = &zeros[..CHUNK_BYTES.min(bytes - first)];
        device.upload(some, buffer, first)?;
    }
    Ok(())
}
