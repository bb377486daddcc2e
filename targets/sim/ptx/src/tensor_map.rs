//! Tensor maps of a launch.

use moesaic_hardware::swizzle;
use moesaic_hardware::tensor_map::{ElementType, TensorMap as Map};
use moesaic_kernel::{DType, Swizzle, TensorMap};
use moesaic_target::{DeviceError, LaunchReason, MapBytes, Ptr, SharedError};

/// A tensor map that hardware would refuse.
#[derive(Debug, thiserror::Error)]
#[error("a tensor map of {sizes:?} elements cannot be made: {source}")]
struct RefusedMap {
    sizes: Vec<u64>,
    source: moesaic_hardware::tensor_map::TensorMapFault,
}

/// Encodes the map of a dense row-major tensor, dimensions innermost first.
/// Dimensions beyond the rank of the map are folded into its outermost one.
pub fn encode(
    kernel: &str,
    map: &TensorMap,
    base: Ptr,
    dims: [u64; 5],
) -> Result<MapBytes, DeviceError> {
    let rank = usize::from(map.rank).clamp(1, 5);
    let mut sizes = dims;
    sizes[rank - 1] = dims[rank - 1..].iter().product();
    let element = element(map.dtype);
    let full = Map::dense(
        element,
        base.0,
        &sizes[..rank],
        &map.tile[..rank],
        swizzle_of(map.swizzle),
    );
    full.encode().map_err(|error| DeviceError::Launch {
        kernel: kernel.to_string(),
        reason: LaunchReason::Simulator(SharedError::new(RefusedMap {
            sizes: sizes[..rank].to_vec(),
            source: error,
        })),
    })
}

fn element(dtype: DType) -> ElementType {
    match dtype {
        DType::F32 => ElementType::F32,
        DType::F16 => ElementType::F16,
        DType::Bf16 => ElementType::Bf16,
        DType::I32 => ElementType::S32,
        DType::I64 => ElementType::S64,
    }
}

fn swizzle_of(swizzle: Swizzle) -> swizzle::Swizzle {
    match swizzle {
        Swizzle::None => swizzle::Swizzle::None,
        Swizzle::B32 => swizzle::Swizzle::B32,
        Swizzle::B64 => swizzle::Swizzle::B64,
        Swizzle::B128 => swizzle::Swizzle::B128,
    }
}
