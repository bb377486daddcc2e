//! The driver's errors in words.

use crate::driver;
use cudarc::driver::result::DriverError;
use moesaic_target::DeviceError;

/// The device cannot be had, in the driver's words.
pub(super) fn unavailable(error: &DriverError) -> DeviceError {
    driver::unavailable(words(error))
}

/// The driver's name and words for an error: `CUDA_ERROR_NO_DEVICE: no …`.
pub(super) fn words(error: &DriverError) -> String {
    match error.error_string() {
        Ok(text) => format!("{:?}: {}", error.0, text.to_string_lossy()),
        Err(_) => format!("{:?}", error.0),
    }
}

/// Errors of a kernel's own doing, which every later call reports too.
pub(super) fn is_kernel_fault(error: &DriverError) -> bool {
    matches!(error.0 as u32, 700 | 702 | 710 | 714..=719)
}

/// For a refused module: `, and the driver is for CUDA 12.4`.
pub(super) fn driver_version() -> String {
    driver::version().map_or(String::new(), |(major, minor)| {
        format!(", and the driver is for CUDA {major}.{minor}")
    })
}
