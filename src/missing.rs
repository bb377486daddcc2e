//! Errors for targets that this build left out.

use moesaic_target::{DeviceError, UnavailableReason};

/// Returns the error of a device whose backend is also the name of the missing feature.
pub(crate) fn device(backend: &str) -> DeviceError {
    DeviceError::Unavailable {
        backend: backend.to_string(),
        reason: UnavailableReason::NotBuilt {
            feature: backend.to_string(),
        },
    }
}

/// Stand-ins for the simulators, which this build lacks.
#[cfg(not(feature = "sim"))]
pub(crate) mod simulators {
    use moesaic_kernel::SimArch;
    use moesaic_target::{CompileError, Compiler, Device, DeviceError};
    use moesaic_toolchain::Registry;
    use std::sync::Arc;

    pub(crate) fn device(_: SimArch, _: Option<usize>) -> Result<Arc<dyn Device>, DeviceError> {
        Err(super::device("sim"))
    }

    pub(crate) fn compiler(_: SimArch, _: &Registry) -> Result<Arc<dyn Compiler>, CompileError> {
        Err(CompileError::NoCompiler {
            backend: "sim".to_string(),
            tried: "none, moesaic was built without its feature `sim`".to_string(),
            advice: "add it to the dependency in Cargo.toml: features = [\"sim\"]".to_string(),
        })
    }
}
