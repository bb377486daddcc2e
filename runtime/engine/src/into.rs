//! Evaluation between slices of the caller, without an allocation.

use crate::call::{Given, RngKey, tokens_of};
use crate::device_layer::DeviceLayer;
use crate::error::EngineError;
use crate::memory::Workspaces;
use crate::pass::Pass;
use crate::reason::{InputReason, OutputReason};
use moesaic_kernel::DType;
use moesaic_plan::{TensorId, TensorPlan};
use moesaic_target::Ptr;
use moesaic_tensor::Element;

impl DeviceLayer {
    /// Evaluates the layer and writes `y` into a slice of the caller. On a CPU kernels read `x` and
    /// write `y` where they are. Once a call was as large, a call with rows allocates nothing.
    pub(crate) fn forward_into<E: Element>(
        &self,
        given: Given<'_>,
        y: &mut [E],
    ) -> Result<(), EngineError> {
        let output = self.id("y").expect("every layer has y");
        let [x_plan, y_plan] = [self.plan().tensor("x"), Some(&self.plan()[output])]
            .map(|tensor| tensor.expect("every layer has x and y"));
        let (tokens, factor) = match given {
            Given::Rows { dtype, bytes } => (tokens_of(x_plan, dtype, bytes)?, None),
            Given::Input(input) => (input.tokens, input.capacity_factor),
            Given::Raw(_) => return Err(raw_into()),
        };
        // Before the lock, and before memory grows: a refused call leaves the layer as it was and
        // waits for nobody.
        check_output(y_plan, E::DTYPE, y.len(), tokens)?;
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(y);

        let workspaces = &mut *self.lock_workspaces();
        let scalars = self.scalars(Pass::Evaluate, RngKey::default(), tokens, factor)?;
        self.reserve(workspaces, tokens)?;
        self.place_inputs(given, workspaces)?;
        let in_place = self.device.host_ptr(bytes).is_some();
        if in_place {
            // Of the exclusive borrow, because kernels write there: what `host_ptr` returns is for
            // reading alone.
            let address = Ptr(bytes.as_mut_ptr() as u64);
            workspaces.given.push((output, address));
        }
        self.lay_passing(workspaces);
        let Workspaces {
            addresses, given, ..
        } = &mut *workspaces;
        addresses.give(given);
        self.run(self.bound(Pass::Evaluate), &scalars, addresses, None)?;
        if in_place {
            // The slices are the caller's again when this returns.
            self.device.synchronize()?;
        } else {
            let buffer = workspaces.get(output).expect("outputs have memory");
            self.device.download(buffer, 0, bytes)?;
        }
        Ok(())
    }

    /// Lists the inputs that kernels can read where they are in `given`, and copies the others.
    fn place_inputs(
        &self,
        input: Given<'_>,
        workspaces: &mut Workspaces,
    ) -> Result<(), EngineError> {
        workspaces.given.clear();
        for &id in self.inputs(Pass::Evaluate) {
            let tensor = &self.plan()[id];
            match input {
                Given::Rows { bytes, .. } if tensor.name == "x" => {
                    self.place(id, bytes, true, workspaces)?;
                }
                Given::Rows { .. } => {
                    let reason = InputReason::NotBesideSlice;
                    return Err(EngineError::input(&tensor.name, reason));
                }
                Given::Raw(_) => return Err(raw_into()),
                Given::Input(input) => {
                    let host = self.checked_input(input, tensor)?;
                    // Kernels rescale an external router's weights where they lie, and these are
                    // the caller's.
                    self.place(id, &host.data, tensor.name == "x", workspaces)?;
                }
            }
        }
        Ok(())
    }

    /// Puts the bytes of an input where kernels read them.
    fn place(
        &self,
        id: TensorId,
        bytes: &[u8],
        may_stay: bool,
        workspaces: &mut Workspaces,
    ) -> Result<(), EngineError> {
        // Kernels take elements that lie as their type does. Those of a mapped file may lie
        // anywhere, and are copied.
        let size = self.plan()[id].dtype.size() as u64;
        let aligned = |address: &Ptr| may_stay && address.0.is_multiple_of(size);
        match self.device.host_ptr(bytes).filter(aligned) {
            Some(address) => workspaces.given.push((id, address)),
            None => {
                let buffer = workspaces.get(id).expect("inputs have memory");
                self.device.upload(bytes, buffer, 0)?;
            }
        }
        Ok(())
    }
}

/// Returns the error of a raw call whose `y` should go to a slice.
pub(crate) fn raw_into() -> EngineError {
    EngineError::output("y", OutputReason::SliceOfRawCall)
}

/// Checks the slice that a call writes.
pub(crate) fn check_output(
    y: &TensorPlan,
    dtype: DType,
    elements: usize,
    tokens: usize,
) -> Result<(), EngineError> {
    let expected = y.bytes(tokens as u64) as usize / y.dtype.size();
    if dtype == y.dtype && elements == expected {
        return Ok(());
    }
    let reason = OutputReason::Slice {
        elements,
        found: dtype,
        expected,
        wanted: y.dtype,
        tokens,
    };
    Err(EngineError::output("y", reason))
}
