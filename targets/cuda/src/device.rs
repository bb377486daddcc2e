//! The CUDA driver.

/// A CUDA device.
pub struct CudaDevice;
