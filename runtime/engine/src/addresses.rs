//! Addresses that a caller gives, looked at before a kernel faults on them.

use crate::device_layer::DeviceLayer;
use crate::error::EngineError;
use crate::place::TABLE;
use crate::reason::{InputReason, WeightReason};
use moesaic_kernel::Target;
use moesaic_plan::{TensorId, TensorPlan};
use moesaic_target::Ptr;

/// The most bytes that a GPU's kernels take at a time.
const PACK_BYTES: u64 = 16;

impl DeviceLayer {
    /// Finds the layer's tensors among those that a caller has for so many tokens, and
    /// puts them into `found` instead of what is there. All of `inputs` must be there, and
    /// kernels must be able to use the addresses.
    pub(crate) fn find_given(
        &self,
        tokens: usize,
        tensors: &[(&str, Ptr)],
        inputs: &[TensorId],
        found: &mut Vec<(TensorId, Ptr)>,
    ) -> Result<(), EngineError> {
        found.clear();
        let known = tensors.iter();
        found.extend(known.filter_map(|(name, address)| Some((self.id(name)?, *address))));
        for &input in inputs {
            if !found.iter().any(|(tensor, _)| *tensor == input) {
                let name = &self.plan()[input].name;
                return Err(EngineError::input(name, InputReason::NoAddress));
            }
        }
        for &(tensor, address) in &*found {
            let tensor = &self.plan()[tensor];
            if address == Ptr(0) && tensor.bytes(tokens as u64) > 0 {
                return Err(EngineError::input(&tensor.name, InputReason::Null));
            }
            self.check_alignment(tensor, address)?;
        }
        Ok(())
    }

    /// Makes this handle's calls read weights in memory of yours instead of the layer's, until the
    /// next `read_weights_at`: without a weight calls read the layer's own again. For another
    /// library's parameters, which change between calls without a copy.
    ///
    /// # Safety
    /// Each address must be valid on the layer's device for the weight's size, and unchanged during
    /// each call, as long as calls read it.
    ///
    /// # Errors
    /// [`EngineError::Weight`] for a name that is no weight, or one that kernels do not read as it
    /// is: packed ones, and `router.table`, whose ids are checked when they are copied.
    #[doc(hidden)]
    pub unsafe fn read_weights_at(&self, weights: &[(&str, Ptr)]) -> Result<(), EngineError> {
        // A packed weight has kernels that read the packed copy alone: they would not see the
        // values at the caller's address.
        for (name, _) in weights {
            if !self.reads_weight(name) {
                return Err(EngineError::weight(name, WeightReason::Packed));
            }
        }
        let workspaces = &mut *self.lock_workspaces();
        self.find_given(0, weights, &[], &mut workspaces.weights)
    }

    /// Returns true if kernels read this weight as it is, so that
    /// [`DeviceLayer::read_weights_at`] can have it.
    #[doc(hidden)]
    pub fn reads_weight(&self, name: &str) -> bool {
        name != TABLE && self.weight_ptr(name).is_some()
    }

    fn check_alignment(&self, tensor: &TensorPlan, address: Ptr) -> Result<(), EngineError> {
        let alignment = alignment(tensor, self.plan().target);
        if address.0.is_multiple_of(alignment) {
            Ok(())
        } else {
            Err(EngineError::Misaligned {
                name: tensor.name.clone(),
                address: address.0,
                alignment,
            })
        }
    }
}

/// On GPUs the widest pack that divides a row, so that slices of whole rows are
/// aligned as the tensor is; kernels of CPUs take their vectors from anywhere.
fn alignment(tensor: &TensorPlan, target: Target) -> u64 {
    let element = tensor.dtype.size() as u64;
    match (target.hardware(), tensor.shape.as_slice()) {
        (Target::Cuda(_) | Target::Rocm(_), [_, .., width]) => {
            // The bit of 16 ends the trailing zeros there, so the result is never more than a pack.
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
    use moesaic_plan::TensorRole;

    #[test]
    fn rows_are_aligned_to_the_packs_that_divide_them() {
        let check = |target: &str, dtype, width, expected| {
            let tensor = TensorPlan {
                name: "x".to_string(),
                dtype,
                shape: vec![Size::Tokens, Size::Const(width)],
                role: TensorRole::Input,
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
