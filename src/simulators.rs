//! Simulators of GPUs: the targets `sim:*`, one simulator per vendor.

use moesaic_kernel::SimArch;
use moesaic_target::{CompileError, Compiler, Device, DeviceError};
use moesaic_toolchain::Registry;
use std::sync::Arc;

/// A simulated GPU of this architecture.
pub(crate) fn device(arch: SimArch) -> Result<Arc<dyn Device>, DeviceError> {
    Err(DeviceError::Unavailable {
        backend: "sim".to_string(),
        reason: format!("{arch:?} has no simulator yet"),
    })
}

/// The compiler of a simulator.
pub(crate) fn compiler(
    arch: SimArch,
    registry: &Registry,
) -> Result<Arc<dyn Compiler>, CompileError> {
    match arch {
        SimArch::Cuda(_) => Ok(Arc::new(moesaic_toolchain::nvrtc(registry)?)),
        SimArch::Rocm(_) => Ok(Arc::new(moesaic_toolchain::rocm(registry)?)),
    }
}
