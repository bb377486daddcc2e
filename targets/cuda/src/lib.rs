//! The CUDA target.
//!
//! The crate has two independent halves: [`NvrtcCompiler`] turns CUDA C++ text
//! into a CUBIN and needs no driver; `CudaDevice` (feature `driver`) loads and
//! launches CUBINs and needs no compiler. Neither links a vendor library.
//!
//! This crate is an internal part of `moesaic` and changes without notice.

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
