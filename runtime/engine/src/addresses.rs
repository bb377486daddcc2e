//! Addresses that a caller gives, looked at before a kernel faults on them.

use crate::{EngineError, Layer};
use moesaic_kernel::Target;
use moesaic_plan::TensorPlan;
use moesaic_target::Ptr;

/// The most bytes that a GPU's kernels take at a time.
const PACK_BYTES: u64 = 16;

impl Layer {
    /// Whether the kernels can use these addresses.
    pub(crate) fn check_addresses(&self, given: &[(&str, Ptr)]) -> Result<(), EngineError> {
        let target = self.plan().target;
        for (name, address) in given {
            let tensor = self.plan().tensor(name);
            let alignment = tensor.map_or(1, |tensor| alignment(tensor, target));
            if !address.0.is_multiple_of(alignment) {
                return Err(EngineError::Misaligned {
                    name: (*name).to_string(),
                    address: address.0,
                    alignment,
                });
            }
        }
        Ok(())
    }
}

/// On GPUs the widest pack that divides a row, so that slices of whole rows are
/// aligned as the tensor is; kernels of CPUs take their vectors from anywhere.
fn alignment(tensor: &TensorPlan, target: Target) -> u64 {
    let element = tensor.dtype.size() as u64;
    match (target.hardware(), tensor.shape.as_slice()) {
        (Target::Cuda(_) | Target::Rocm(_), [_, .., width]) => {
            let row = (width.eval(0) * element) | PACK_BYTES;
            element.max(1 << row.trailing_zeros())
        }
        _ => element,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moesaic_kernel::{DType, Size};
    use moesaic_plan::Role;

    #[test]
    fn rows_are_aligned_to_the_packs_that_divide_them() {
        let check = |target: &str, dtype, width, expected| {
            let tensor = TensorPlan {
                name: "x".to_string(),
                dtype,
                shape: vec![Size::Tokens, Size::Const(width)],
                role: Role::Input,
            };
            let found = alignment(&tensor, target.parse().unwrap());
            assert_eq!(found, expected, "{target} {dtype} {width}");
        };
        for gpu in ["cuda:sm_80", "rocm:gfx942", "sim:sm_90a", "sim:gfx942"] {
            check(gpu, DType::Bf16, 4096, 16);
            check(gpu, DType::F32, 4, 16);
            check(gpu, DType::F32, 2, 8);
            check(gpu, DType::Bf16, 12, 8);
            check(gpu, DType::Bf16, 7, 2);
        }
        check("cpu:avx2", DType::Bf16, 4096, 2);
        check("sim:neon", DType::F32, 4096, 4);
    }
}
