//! Modules that outlive their users.

use super::shared::Gpu;
use super::{ModuleHandle, Vendor};
use std::sync::Arc;

/// A module that only a graph uses.
pub(super) struct Orphan<V: Vendor> {
    gpu: Arc<Gpu<V>>,
    handle: Option<ModuleHandle>,
    image: Box<[u8]>,
}

impl<V: Vendor> Orphan<V> {
    /// Takes over a module from its last user, with the binary that it was loaded from.
    pub fn new(gpu: Arc<Gpu<V>>, handle: ModuleHandle, image: Box<[u8]>) -> Orphan<V> {
        Orphan {
            gpu,
            handle: Some(handle),
            image,
        }
    }

    /// Leaves the module loaded forever, because it may still be running.
    pub fn abandon(mut self) {
        self.handle = None;
        std::mem::forget(std::mem::take(&mut self.image));
    }
}

impl<V: Vendor> Drop for Orphan<V> {
    fn drop(&mut self) {
        if let Some(handle) = self.handle {
            // SAFETY: loaded once and unloaded once, after its launches have finished.
            self.gpu
                .call_quietly(|f| unsafe { (f.module_unload)(handle) });
        }
    }
}
