//! A stream, and the capture that it is part of.

use super::capture::Capture;
use super::journal::{Journal, SharedJournal};
use super::shared::{Gpu, lock};
use super::staging::Staging;
use super::{StreamHandle, Vendor, functions};
use crate::DeviceError;
use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard};

/// The flag of a stream that does not wait for the default stream.
const NON_BLOCKING: u32 = 1;

/// A stream, destroyed when nothing uses it any more.
pub(super) struct Lane<V: Vendor> {
    pub gpu: Arc<Gpu<V>>,
    pub stream: StreamHandle,
    /// Its number on this GPU.
    pub id: u64,
    /// The journal of its launches.
    journal: SharedJournal,
    /// The owner that destroys the stream, if it is not this.
    owner: Option<Box<dyn Any + Send + Sync>>,
    capture: Mutex<Option<Arc<Capture<V>>>>,
    /// The staging memory of small uploads, after the first one.
    staging: Mutex<Option<Staging<V>>>,
}

impl<V: Vendor> Lane<V> {
    /// Wraps a stream. It is destroyed on drop unless it has an owner.
    pub fn over(
        gpu: Arc<Gpu<V>>,
        stream: StreamHandle,
        owner: Option<Box<dyn Any + Send + Sync>>,
    ) -> Lane<V> {
        Lane {
            id: gpu.next_lane(),
            journal: gpu.journals.open(),
            gpu,
            stream,
            owner,
            capture: Mutex::new(None),
            staging: Mutex::new(None),
        }
    }

    pub fn new(gpu: &Arc<Gpu<V>>) -> Result<Lane<V>, DeviceError> {
        let mut stream = StreamHandle(functions::NULL);
        // SAFETY: the pointer is valid for a write.
        gpu.call("a new stream", |f| unsafe {
            (f.stream_create)(&mut stream, NON_BLOCKING)
        })?;
        Ok(Lane::over(gpu.clone(), stream, None))
    }

    /// Waits for everything launched. `operation` is for the error.
    pub fn synchronize(&self, operation: &str) -> Result<(), DeviceError> {
        self.forbid(|| operation.to_string())?;
        // SAFETY: the stream lives as long as this.
        self.gpu.call(operation, |f| unsafe {
            (f.stream_synchronize)(self.stream)
        })?;
        self.journal().settle();
        Ok(())
    }

    /// Returns the capture that this stream is part of.
    pub fn capturing(&self) -> Option<Arc<Capture<V>>> {
        let mut capture = self.capture();
        if capture.as_ref().is_some_and(|capture| !capture.is_open()) {
            *capture = None;
        }
        capture.clone()
    }

    pub fn join(&self, capture: &Arc<Capture<V>>) {
        *self.capture() = Some(capture.clone());
    }

    /// Refuses an operation that cannot be part of a graph.
    pub fn forbid(&self, attempted: impl FnOnce() -> String) -> Result<(), DeviceError> {
        match self.capturing() {
            None => Ok(()),
            Some(capture) => Err(DeviceError::Capturing {
                graph: capture.name.clone(),
                attempted: attempted(),
            }),
        }
    }

    pub fn staging(&self) -> MutexGuard<'_, Option<Staging<V>>> {
        lock(&self.staging)
    }

    pub fn journal(&self) -> MutexGuard<'_, Journal> {
        lock(&self.journal)
    }

    fn capture(&self) -> MutexGuard<'_, Option<Arc<Capture<V>>>> {
        lock(&self.capture)
    }
}

impl<V: Vendor> Drop for Lane<V> {
    fn drop(&mut self) {
        // Dropping the staging memory waits for its uploads.
        drop(self.staging().take());
        if self.owner.is_none() {
            // SAFETY: everything that uses the stream shares ownership of this, so nothing is left.
            // The driver finishes the work still in it.
            self.gpu
                .call_quietly(|f| unsafe { (f.stream_destroy)(self.stream) });
        }
    }
}
