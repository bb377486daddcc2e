//! The CUDA target.
//!
//! Two halves that never meet: [`NvrtcCompiler`] turns CUDA C++ text into a
//! CUBIN and needs no driver, `CudaDevice` (feature `driver`) loads CUBINs and launches them
//! and needs no compiler. Neither links a vendor library.
//!
//! As a crate of its own this is an internal part of `moesaic` and changes without
//! notice.

mod cubin;
#[cfg(feature = "driver")]
mod device;
#[cfg(feature = "driver")]
mod driver;
mod nvrtc;

pub use cubin::{CubinError, read_cubin};
#[cfg(feature = "driver")]
pub use device::CudaDevice;
pub use nvrtc::NvrtcCompiler;
