//! A kernel by itself: its device, its compiler, and launches marked as a plan marks them.

use moesaic_harness::{cpu, fibers, ptx};
use moesaic_kernel::{Entry, KernelSource, SimArch, Target};
use moesaic_target::{Artifact, Device};
use std::sync::Arc;

type Compile = fn(&KernelSource) -> Artifact;

/// Where kernels of a target run, and what compiles them.
pub fn machine(target: Target) -> (Arc<dyn Device>, Compile) {
    match target {
        Target::Cpu(_) => (Arc::new(cpu::device(2)), cpu::compiled),
        Target::Sim(SimArch::Rocm(_)) => (Arc::new(fibers::device(target)), fibers::compiled),
        Target::Sim(SimArch::Cuda(_)) => (Arc::new(ptx::device(target, 1)), ptx::compiled),
        other => panic!("nothing here runs {other}"),
    }
}

/// Marks entries as in a plan: what does not wait for the launches before is found.
pub fn waiting(mut entries: Vec<Entry>, target: Target) -> Vec<Entry> {
    let waits = matches!(target.hardware(), Target::Cuda(arch) if arch.capability >= 90);
    for entry in &mut entries {
        entry.launch.dependent = waits;
    }
    entries
}
