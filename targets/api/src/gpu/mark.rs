//! Events as the driver has them.

use super::shared::Gpu;
use super::{EventHandle, StreamHandle, Vendor, functions};
use crate::DeviceError;
use std::sync::Arc;

/// A driver's event, destroyed on drop.
pub(super) struct Mark<V: Vendor> {
    pub handle: EventHandle,
    gpu: Arc<Gpu<V>>,
}

impl<V: Vendor> Mark<V> {
    /// Returns a new, recorded event.
    pub fn recorded(
        gpu: &Arc<Gpu<V>>,
        stream: StreamHandle,
        flags: u32,
    ) -> Result<Mark<V>, DeviceError> {
        let mut handle = EventHandle(functions::NULL);
        // SAFETY: the pointer is valid for a write.
        gpu.call("a new event", |f| unsafe {
            (f.event_create)(&mut handle, flags)
        })?;
        let gpu = gpu.clone();
        let mark = Mark { handle, gpu };
        mark.record(stream)?;
        Ok(mark)
    }

    /// Records the event after all work now in the stream.
    pub fn record(&self, stream: StreamHandle) -> Result<(), DeviceError> {
        // SAFETY: event and stream are live.
        self.gpu.call("record of an event", |f| unsafe {
            (f.event_record)(self.handle, stream)
        })
    }

    /// Waits on the host. `operation` is for the error.
    pub fn wait(&self, operation: &str) -> Result<(), DeviceError> {
        // SAFETY: the event is live.
        self.gpu
            .call(operation, |f| unsafe { (f.event_synchronize)(self.handle) })
    }

    /// Returns true if the stream has reached it.
    pub fn passed(&self) -> Result<bool, DeviceError> {
        const NOT_YET: i32 = 600;
        let operation = "query of an event";
        self.gpu.enter(operation)?;
        // SAFETY: the event is live.
        let code = unsafe { (self.gpu.vendor.functions().event_query)(self.handle) };
        match self.gpu.check(code) {
            Ok(()) => Ok(true),
            Err(fault) if fault.code == NOT_YET => Ok(false),
            Err(fault) => Err(self.gpu.error(operation, &fault)),
        }
    }
}

impl<V: Vendor> Drop for Mark<V> {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once; the driver keeps what streams
        // still wait for.
        self.gpu
            .call_quietly(|f| unsafe { (f.event_destroy)(self.handle) });
    }
}
