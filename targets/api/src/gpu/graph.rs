//! Captured launches that can be launched again.

use super::journal::Launched;
use super::lane::{Capture, Kept, Lane};
use super::shared::Gpu;
use super::{ExecHandle, GraphHandle, Vendor, functions};
use crate::{DeviceError, Graph};
use std::sync::{Arc, Mutex, PoisonError};

/// A graph as its owner sees it.
pub(super) struct GpuGraph<V: Vendor> {
    name: String,
    launched: Launched,
    /// The executable graph, behind a lock because drivers allow one launch of it at a time.
    exec: Mutex<ExecHandle>,
    lane: Arc<Lane<V>>,
    /// The resources that it uses, itself included.
    kept: Kept<V>,
}

/// An executable graph, destroyed on drop.
pub(super) struct Exec<V: Vendor> {
    gpu: Arc<Gpu<V>>,
    handle: ExecHandle,
}

impl<V: Vendor> Drop for Exec<V> {
    fn drop(&mut self) {
        // SAFETY: instantiated once, destroyed once; its launches have
        // finished.
        self.gpu
            .call_quietly(|f| unsafe { (f.exec_destroy)(self.handle) });
    }
}

impl<V: Vendor> GpuGraph<V> {
    pub fn end(lane: &Arc<Lane<V>>, capture: &Capture<V>) -> Result<GpuGraph<V>, DeviceError> {
        let (graph, mut kept) = capture.end(lane)?;
        let exec = instantiate(lane, &capture.name, graph);
        // SAFETY: captured once, destroyed once; the instance is its own.
        lane.gpu
            .call_quietly(|f| unsafe { (f.graph_destroy)(graph) });
        let handle = match exec {
            Ok(handle) => handle,
            Err(error) => {
                kept.release(lane);
                return Err(error);
            }
        };
        let gpu = lane.gpu.clone();
        kept.execs.push(Box::new(Exec { gpu, handle }));
        Ok(GpuGraph {
            name: capture.name.clone(),
            launched: described(&capture.name, &kept),
            exec: Mutex::new(handle),
            lane: lane.clone(),
            kept,
        })
    }
}

fn instantiate<V: Vendor>(
    lane: &Lane<V>,
    name: &str,
    graph: GraphHandle,
) -> Result<ExecHandle, DeviceError> {
    let mut exec = ExecHandle(functions::NULL);
    let operation = format!("instantiation of graph `{name}`");
    // SAFETY: the pointer is valid for a write, and the graph is live.
    lane.gpu.call(&operation, |f| unsafe {
        (f.graph_instantiate)(&mut exec, graph, 0)
    })?;
    Ok(exec)
}

/// Returns the graph's description for errors: `` `decode` with `gate_topk`, `dispatch` ``.
fn described<V: Vendor>(name: &str, kept: &Kept<V>) -> Launched {
    let kernels: Vec<String> = kept.launches.iter().map(Launched::to_string).collect();
    let name = if kernels.is_empty() {
        format!("`{name}` with no kernels")
    } else {
        format!("`{name}` with {}", kernels.join(", "))
    };
    Launched::Graph { name: name.into() }
}

impl<V: Vendor> Graph for GpuGraph<V> {
    fn name(&self) -> &str {
        &self.name
    }

    fn kernels(&self) -> Vec<String> {
        let symbol = |launched: &Launched| match launched {
            Launched::Kernel { symbol, .. } => Some(symbol.to_string()),
            Launched::Graph { .. } => None,
        };
        self.kept.launches.iter().filter_map(symbol).collect()
    }

    unsafe fn launch(&self) -> Result<(), DeviceError> {
        let operation = format!("launch of graph `{}`", self.name);
        self.lane.forbid(|| format!("the {operation}"))?;
        let exec = self.exec.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: graph and stream are live; the caller vouches for the memory that its launches
        // use.
        self.lane.gpu.call(&operation, |f| unsafe {
            (f.graph_launch)(*exec, self.lane.stream)
        })?;
        self.lane.journal().note(&self.launched);
        Ok(())
    }
}

impl<V: Vendor> Drop for GpuGraph<V> {
    fn drop(&mut self) {
        let kept = std::mem::take(&mut self.kept);
        match self.lane.capturing() {
            Some(capture) => capture.absorb(kept),
            None => kept.release(&self.lane),
        }
    }
}
