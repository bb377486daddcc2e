//! A graph under capture, and the resources that it will keep.

use super::graph::Exec;
use super::journal::Launched;
use super::lane::Lane;
use super::memory::Block;
use super::module::{Loaded, Orphan};
use super::{GraphHandle, Vendor, functions};
use crate::{Buffer, DeviceError, DriverReason};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

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

/// The resources that a graph's launches use. Fields drop in this order.
pub(super) struct Kept<V: Vendor> {
    pub launches: Vec<Launched>,
    pub execs: Vec<Exec<V>>,
    /// Modules that others use too.
    pub modules: Vec<Arc<Loaded<V>>>,
    /// Modules that nothing else uses.
    pub orphans: Vec<Orphan<V>>,
    /// Memory that nothing else uses.
    pub blocks: Vec<Block<V>>,
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

    pub fn launched(&self, module: &Arc<Loaded<V>>, launched: Launched) {
        let mut kept = self.kept();
        kept.launches.push(launched);
        if !kept.modules.iter().any(|other| Arc::ptr_eq(other, module)) {
            kept.modules.push(module.clone());
        }
    }

    pub fn keep_lane(&self, lane: &Arc<Lane<V>>) {
        self.kept().lanes.push(lane.clone());
    }

    pub fn keep_block(&self, block: Block<V>) {
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
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
