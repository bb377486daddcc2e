//! The part of the device that only HIP has.

use crate::hip::Hip;
use crate::read_code_object;
use moesaic_kernel::{Launch, TensorMap};
use moesaic_target::gpu::{
    AddressedRows, Fault, FunctionHandle, Functions, LaunchShape, StreamHandle, Vendor, VendorError,
};
use moesaic_target::{KernelReport, MapBytes, Ptr, SharedError};
use std::ffi::{c_int, c_void};

/// The runtime's code for missing functions.
const NOT_SUPPORTED: c_int = 801;

/// A GPU of the HIP runtime.
pub struct Rocm {
    pub hip: Hip,
    pub ordinal: i32,
}

impl Vendor for Rocm {
    const BACKEND: &'static str = "rocm";
    const BLOCKING: &'static str = "HIP_LAUNCH_BLOCKING";

    /// Kernels may use all of a block's memory without asking.
    const FREE_SHARED: u32 = u32::MAX;

    fn functions(&self) -> &Functions {
        &self.hip.functions
    }

    /// Makes the GPU current for this thread: the runtime keeps one current
    /// device per thread.
    fn bind(&self) -> Result<(), Fault> {
        self.hip.bind(self.ordinal)
    }

    fn words(&self, code: c_int) -> String {
        self.hip.words(code)
    }

    fn check_binary(&self, binary: &[u8]) -> Result<(), VendorError> {
        read_code_object(binary)
            .map(|_| ())
            .map_err(|error| VendorError::Binary(SharedError::new(error)))
    }

    unsafe fn static_shared(
        &self,
        _: FunctionHandle,
        report: Option<&KernelReport>,
    ) -> Result<u32, Fault> {
        Ok(report.and_then(|report| report.shared_bytes).unwrap_or(0))
    }

    unsafe fn allow(&self, _: FunctionHandle, launch: &Launch, _: u32) -> Result<(), VendorError> {
        no_clusters(launch.cluster)
    }

    /// Checks the shape: HIP counts the threads of a dimension in 32 bits.
    fn check_shape(&self, shape: &LaunchShape) -> Result<(), VendorError> {
        no_clusters(shape.cluster)?;
        let ([x, _], threads) = (shape.grid, shape.threads);
        match x.checked_mul(threads) {
            Some(_) => Ok(()),
            None => Err(VendorError::LargeGrid { blocks: x, threads }),
        }
    }

    unsafe fn launch_with(
        &self,
        _: FunctionHandle,
        _: &LaunchShape,
        _: &mut [*mut c_void],
        _: StreamHandle,
    ) -> c_int {
        NOT_SUPPORTED
    }

    unsafe fn copy_rows(&self, rows: &AddressedRows, stream: StreamHandle) -> c_int {
        // SAFETY: passed on.
        unsafe { self.hip.copy_rows(rows, stream) }
    }

    fn encode(&self, _: &TensorMap, _: Ptr, _: [u64; 5]) -> Result<MapBytes, VendorError> {
        Err(VendorError::NoTensorMaps)
    }
}

fn no_clusters(blocks: u32) -> Result<(), VendorError> {
    match blocks {
        0 | 1 => Ok(()),
        _ => Err(VendorError::NoClusters {
            blocks,
            lacking: "AMD GPUs do not have",
        }),
    }
}
