//! Simulators behind the targets `sim:*`: one per GPU vendor, and one for instruction sets of other
//! CPUs.

use moesaic_emulated::{EmulatedCompiler, EmulatedDevice};
use moesaic_fibers::{FiberCompiler, FiberDevice, FiberOptions};
use moesaic_kernel::SimArch;
use moesaic_ptx::{PtxCompiler, PtxDevice, PtxOptions};
use moesaic_target::{CompileError, Compiler, Device, DeviceError};
use moesaic_toolchain::{Registry, ToolKind};
use std::num::NonZeroUsize;
use std::sync::Arc;

/// Opens a simulated device of this architecture on `threads` host threads.
pub(crate) fn device(
    arch: SimArch,
    threads: Option<usize>,
) -> Result<Arc<dyn Device>, DeviceError> {
    let threads = threads.and_then(NonZeroUsize::new);
    match arch {
        SimArch::Cuda(arch) => {
            let options = PtxOptions {
                threads,
                ..PtxOptions::default()
            };
            Ok(Arc::new(PtxDevice::new(arch, options)))
        }
        SimArch::Rocm(arch) => {
            let options = FiberOptions {
                threads,
                ..FiberOptions::default()
            };
            Ok(Arc::new(FiberDevice::new(arch, options)?))
        }
        SimArch::Cpu(isa) => Ok(Arc::new(EmulatedDevice::new(isa)?)),
    }
}

/// Returns the compiler of a simulator.
pub(crate) fn compiler(
    arch: SimArch,
    registry: &Registry,
) -> Result<Arc<dyn Compiler>, CompileError> {
    match arch {
        SimArch::Cuda(_) => Ok(Arc::new(PtxCompiler::new(moesaic_toolchain::nvrtc(
            registry,
        )?))),
        SimArch::Rocm(_) => {
            let zig = registry.get(ToolKind::C).map(|tool| registry.path(tool));
            Ok(Arc::new(FiberCompiler::find(zig.as_deref())?))
        }
        SimArch::Cpu(isa) => {
            let zig = registry
                .get(ToolKind::C)
                .or_else(|| registry.get(ToolKind::Rocm));
            let zig = zig.map(|tool| registry.path(tool));
            Ok(Arc::new(EmulatedCompiler::find(isa, zig.as_deref())?))
        }
    }
}
