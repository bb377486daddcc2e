//! The CUDA target.
//!
//! Two halves that never meet: [`NvrtcCompiler`] turns CUDA C++ text into a
//! CUBIN and needs no driver, [`CudaDevice`] loads CUBINs and launches them
//! and needs no compiler. Neither links a vendor library.

mod cubin;
mod device;
mod driver;
mod nvrtc;

pub use cubin::{CubinError, read_cubin};
pub use device::CudaDevice;
pub use nvrtc::NvrtcCompiler;
