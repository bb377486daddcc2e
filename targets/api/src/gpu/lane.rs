//! A stream, the capture that it is part of, and the resources that the captured graph will keep.

use super::journal::{Journal, Launched, SharedJournal};
use super::lock::lock;
use super::orphan::Orphan;
use super::shared::Gpu;
use super::staging::Staging;
use super::{GraphHandle, StreamHandle, Vendor, functions};
use crate::{Buffer, DeviceError, DriverReason};
use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};
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

/// The relaxed capture mode, which does not restrict other threads. That is safe because a
/// capture's streams belong to this process alone and this module enforces the rules of a graph.
const RELAXED: i32 = 2;

/// A capture, which began on one stream and may have spread to others.
pub(super) struct Capture<V: Vendor> {
    pub name: String,
    origin: u64,
    open: AtomicBool,
    kept: Mutex<Kept<V>>,
}

/// The resources that a graph's launches use. Fields drop in this order. A graph only drops most of
/// them, so it need not know their types.
pub(super) struct Kept<V: Vendor> {
    pub launches: Vec<Launched>,
    pub execs: Vec<Box<dyn Send + Sync>>,
    /// Modules that others use too.
    pub modules: Vec<Arc<dyn Send + Sync>>,
    /// Modules that nothing else uses.
    pub orphans: Vec<Orphan<V>>,
    /// Memory that nothing else uses.
    pub blocks: Vec<Box<dyn Send + Sync>>,
    /// Memory that others use too.
    pub buffers: Vec<Arc<Buffer>>,
    pub lanes: Vec<Arc<Lane<V>>>,
}

impl<V: Vendor> Default for Kept<V> {
    fn default() -> Kept<V> {
        Kept {
            launches: Vec::new(),
            execs: Vec::new(),
            modules: Vec::new(),
            orphans: Vec::new(),
            blocks: Vec::new(),
            buffers: Vec::new(),
            lanes: Vec::new(),
        }
    }
}

impl<V: Vendor> Kept<V> {
    /// Releases everything once the graphs launched on `lane` have finished. Before an orphan is
    /// unloaded, work that other streams of the capture had before they joined it has finished too.
    pub fn release(mut self, lane: &Lane<V>) {
        let finished = |lane: &Lane<V>| lane.synchronize("end of a graph").is_ok();
        let others = || self.orphans.is_empty() || self.lanes.iter().all(|lane| finished(lane));
        if !(finished(lane) && others()) {
            self.orphans.drain(..).for_each(Orphan::abandon);
        }
    }
}

impl<V: Vendor> Capture<V> {
    pub fn begin(lane: &Arc<Lane<V>>, name: &str) -> Result<(), DeviceError> {
        lane.forbid(|| format!("the beginning of graph `{name}`"))?;
        let operation = format!("the beginning of graph `{name}`");
        // SAFETY: the stream is live.
        lane.gpu.call(&operation, |f| unsafe {
            (f.capture_begin)(lane.stream, RELAXED)
        })?;
        lane.join(&Arc::new(Capture {
            name: name.to_string(),
            origin: lane.id,
            open: AtomicBool::new(true),
            kept: Mutex::default(),
        }));
        Ok(())
    }

    /// Ends the capture of `lane`, on which it must have begun. It is over even after an error, and
    /// its streams are free again.
    pub fn end(&self, lane: &Lane<V>) -> Result<(GraphHandle, Kept<V>), DeviceError> {
        let operation = format!("the capture of graph `{}`", self.name);
        if self.origin != lane.id {
            return Err(DeviceError::Driver {
                operation,
                reason: DriverReason::OtherStream,
            });
        }
        let mut graph = GraphHandle(functions::NULL);
        // SAFETY: the stream is live and capturing; the pointer is valid for
        // a write.
        let ended = lane.gpu.call(&operation, |f| unsafe {
            (f.capture_end)(lane.stream, &mut graph)
        });
        self.open.store(false, Ordering::Release);
        let kept = std::mem::take(&mut *self.kept());
        match ended {
            Ok(()) => Ok((graph, kept)),
            Err(error) => {
                kept.release(lane);
                Err(error)
            }
        }
    }

    pub fn begun_on(&self, lane: &Lane<V>) -> bool {
        self.origin == lane.id
    }

    pub fn is_open(&self) -> bool {
        self.open.load(Ordering::Acquire)
    }

    pub fn launched(&self, module: Arc<dyn Send + Sync>, launched: Launched) {
        let mut kept = self.kept();
        kept.launches.push(launched);
        if !kept.modules.iter().any(|other| Arc::ptr_eq(other, &module)) {
            kept.modules.push(module);
        }
    }

    pub fn keep_lane(&self, lane: &Arc<Lane<V>>) {
        self.kept().lanes.push(lane.clone());
    }

    pub fn keep_block(&self, block: Box<dyn Send + Sync>) {
        self.kept().blocks.push(block);
    }

    pub fn keep_buffer(&self, buffer: Arc<Buffer>) {
        let mut kept = self.kept();
        if !kept.buffers.iter().any(|other| Arc::ptr_eq(other, &buffer)) {
            kept.buffers.push(buffer);
        }
    }

    pub fn keep_orphan(&self, orphan: Orphan<V>) {
        self.kept().orphans.push(orphan);
    }

    /// Keeps the resources of another graph, whose last launch may still be running.
    pub fn absorb(&self, other: Kept<V>) {
        let mut kept = self.kept();
        kept.execs.extend(other.execs);
        kept.modules.extend(other.modules);
        kept.orphans.extend(other.orphans);
        kept.blocks.extend(other.blocks);
        kept.buffers.extend(other.buffers);
        kept.lanes.extend(other.lanes);
    }

    fn kept(&self) -> MutexGuard<'_, Kept<V>> {
        lock(&self.kept)
    }
}
