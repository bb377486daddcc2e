//! The part of the device that only CUDA has.

use super::tensor_map;
use crate::driver::{Copy2d, DriverTable, LaunchAttribute, LaunchConfig, Side2d};
use cudarc::driver::CudaContext;
use moesaic_kernel::{Launch, TensorMap};
use moesaic_target::gpu::{
    AddressedRows, Fault, FunctionHandle, Functions, LaunchShape, StreamHandle, Vendor, VendorError,
};
use moesaic_target::{KernelReport, MapBytes, Ptr, SharedError};
use std::ffi::{c_int, c_void};
use std::sync::Arc;

/// Attributes of functions.
const SHARED_SIZE: c_int = 1;
const MOST_DYNAMIC_SHARED: c_int = 8;
const LARGE_CLUSTERS: c_int = 14;

/// The launch attributes for clusters, and for blocks that may start before the
/// previous launches have ended.
const CLUSTER: u32 = 4;
const DEPENDENT: u32 = 6;

/// Blocks of a cluster that every GPU with clusters grants; the next constant
/// is the number that some grant on request.
const PORTABLE_CLUSTER: u32 = 8;
const LARGEST_CLUSTER: u32 = 16;

/// The memory of a GPU, in copies of rows.
const DEVICE_MEMORY: u32 = 2;

/// The driver's code for missing functions.
const NOT_SUPPORTED: c_int = 801;

/// A GPU of the CUDA driver.
#[derive(Clone)]
pub struct Cuda {
    pub table: &'static DriverTable,
    pub context: Arc<CudaContext>,
    /// Whether the GPU has clusters and tensor maps: sm_90 and later.
    pub clusters: bool,
    /// Whether launches may overlap, captured ones too.
    pub overlaps: bool,
}

impl Vendor for Cuda {
    const BACKEND: &'static str = "cuda";
    const BLOCKING: &'static str = "CUDA_LAUNCH_BLOCKING";
    const FREE_SHARED: u32 = 48 << 10;

    fn functions(&self) -> &Functions {
        &self.table.functions
    }

    fn bind(&self) -> Result<(), Fault> {
        let bound = self.context.bind_to_thread();
        bound.map_err(|error| self.fault(error.0 as c_int))
    }

    fn words(&self, code: c_int) -> String {
        self.table.words(code)
    }

    fn check_binary(&self, binary: &[u8]) -> Result<(), VendorError> {
        crate::read_cubin(binary)
            .map(|_| ())
            .map_err(|error| VendorError::Binary(SharedError::new(error)))
    }

    unsafe fn static_shared(
        &self,
        function: FunctionHandle,
        _: Option<&KernelReport>,
    ) -> Result<u32, Fault> {
        let mut bytes = 0;
        // SAFETY: the pointer is valid for a write, the function by promise.
        let code = unsafe {
            self.table
                .own
                .function_get(&mut bytes, SHARED_SIZE, function)
        };
        self.outcome(code).map(|()| bytes.unsigned_abs())
    }

    unsafe fn allow(
        &self,
        function: FunctionHandle,
        launch: &Launch,
        fixed: u32,
    ) -> Result<(), VendorError> {
        // SAFETY: the caller's promise.
        let set = |attribute, value| unsafe {
            let code = self.table.own.function_set(function, attribute, value);
            self.outcome(code)
        };
        if launch.shared_bytes.saturating_add(fixed) > Self::FREE_SHARED {
            let bytes = c_int::try_from(launch.shared_bytes).unwrap_or(c_int::MAX);
            set(MOST_DYNAMIC_SHARED, bytes)
                .map_err(|fault| VendorError::SharedMemory { bytes, fault })?;
        }
        self.check_cluster(launch.cluster)?;
        if launch.cluster > PORTABLE_CLUSTER {
            set(LARGE_CLUSTERS, 1).map_err(|fault| VendorError::Clusters {
                blocks: launch.cluster,
                fault,
            })?;
        }
        Ok(())
    }

    fn check_shape(&self, shape: &LaunchShape) -> Result<(), VendorError> {
        self.check_cluster(shape.cluster)?;
        let ([x, _], blocks) = (shape.grid, shape.cluster);
        if !x.is_multiple_of(blocks) {
            return Err(VendorError::PartOfCluster { shape: *shape });
        }
        Ok(())
    }

    fn overlaps(&self) -> bool {
        self.overlaps
    }

    unsafe fn launch_with(
        &self,
        function: FunctionHandle,
        shape: &LaunchShape,
        params: &mut [*mut c_void],
        stream: StreamHandle,
    ) -> c_int {
        let Some(launch) = self.table.own.launch_ex else {
            return NOT_SUPPORTED;
        };
        let all = [cluster_of(shape.cluster), dependent()];
        let attributes = match (shape.cluster > 1, shape.dependent && self.overlaps) {
            (true, true) => &all[..],
            (true, false) => &all[..1],
            (false, true) => &all[1..],
            (false, false) => &[],
        };
        let config = LaunchConfig {
            grid: [shape.grid[0], shape.grid[1], 1],
            block: [shape.threads, 1, 1],
            shared_bytes: shape.shared_bytes,
            stream,
            attributes: attributes.as_ptr(),
            attribute_count: attributes.len() as u32,
        };
        let none = std::ptr::null_mut();
        // SAFETY: the caller's promise; structure and attributes live over the call.
        unsafe { launch(&config, function, params.as_mut_ptr(), none) }
    }

    unsafe fn copy_rows(&self, rows: &AddressedRows, stream: StreamHandle) -> c_int {
        let side = |start: Ptr, stride| Side2d {
            first_byte: 0,
            first_row: 0,
            memory: DEVICE_MEMORY,
            host: std::ptr::null(),
            device: start.0,
            array: std::ptr::null(),
            stride,
        };
        let copy = Copy2d {
            from: side(rows.from, rows.from_stride),
            to: side(rows.to, rows.to_stride),
            row_bytes: rows.bytes,
            rows: rows.count,
        };
        // SAFETY: the caller's promise; the structure lives over the call.
        unsafe { self.table.own.copy_rows(&copy, stream) }
    }

    fn encode(&self, map: &TensorMap, base: Ptr, dims: [u64; 5]) -> Result<MapBytes, VendorError> {
        // Tensor maps came with clusters, with sm_90.
        tensor_map::encode(self.clusters.then_some(self.table), map, base, dims)
    }
}

impl Cuda {
    pub fn outcome(&self, code: c_int) -> Result<(), Fault> {
        match code {
            0 => Ok(()),
            code => Err(self.fault(code)),
        }
    }

    fn fault(&self, code: c_int) -> Fault {
        Fault {
            code,
            words: self.table.words(code),
        }
    }

    fn check_cluster(&self, blocks: u32) -> Result<(), VendorError> {
        if blocks <= 1 {
            return Ok(());
        }
        if !self.clusters || self.table.own.launch_ex.is_none() {
            return Err(VendorError::NoClusters {
                blocks,
                lacking: "need sm_90 or later and a driver for CUDA 11.8 or later",
            });
        }
        if blocks > LARGEST_CLUSTER {
            return Err(VendorError::LargeCluster {
                blocks,
                most: LARGEST_CLUSTER,
            });
        }
        Ok(())
    }
}

fn cluster_of(blocks: u32) -> LaunchAttribute {
    let mut value = [0; 16];
    value[..3].copy_from_slice(&[blocks, 1, 1]);
    LaunchAttribute {
        id: CLUSTER,
        padding: 0,
        value,
    }
}

fn dependent() -> LaunchAttribute {
    let mut value = [0; 16];
    value[0] = 1;
    LaunchAttribute {
        id: DEPENDENT,
        padding: 0,
        value,
    }
}
