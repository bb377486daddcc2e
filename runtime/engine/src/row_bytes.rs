//! Rows of experts in Rust as bytes between ranks, cast if they go to another node.

use crate::engine::Engine;
use crate::error::EngineError;
use crate::mesh::{CastKernels, CastWorkspace};
use bytemuck::{cast_slice, cast_slice_mut};
use moesaic_kernel::DType;
use moesaic_plan::{Both, CastRows, CommDtype, LayerPlan, Packed, RowCasts};
use moesaic_target::Device;
use moesaic_tensor::Tensor;
use std::sync::{Arc, Mutex, PoisonError};

/// The two directions of rows in a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    ToExperts,
    ToTokens,
}

/// The kernels that cast the rows of both passes.
pub(crate) struct RowCaster {
    kernels: CastKernels,
    /// To the experts and back.
    packed: Both<[Option<Packed>; 2]>,
    device: Arc<dyn Device>,
    workspace: Mutex<CastWorkspace>,
}

impl RowCaster {
    /// Makes the kernels for the rows of a layer whose plan this is; `None` if no row is cast.
    ///
    /// # Errors
    /// As [`Engine::layer`].
    pub fn new(
        engine: &Engine,
        plan: &LayerPlan,
        comm_dtype: Both<CommDtype>,
    ) -> Result<Option<RowCaster>, EngineError> {
        let (input, output) = (plan.spec.expert_input_dim(), plan.spec.expert_output_dim());
        let rows = |name, width, comm_dtype| CastRows {
            name,
            // Experts in Rust have rows of f32, whatever the layer's own dtype.
            dtype: DType::F32,
            width,
            comm_dtype,
        };
        let Both { forward, backward } = comm_dtype;
        let casts = RowCasts::new(
            plan,
            &[
                rows("rows", input, forward),
                rows("out", output, forward),
                rows("dout", output, backward),
                rows("drows", input, backward),
            ],
        );
        if casts.kernels.is_none() {
            return Ok(None);
        }
        let packed = casts.packed.iter().flatten();
        let kernels = CastKernels::new(engine, casts.kernels.as_ref(), packed)?;
        let mut each = casts.packed.into_iter();
        let mut next = || each.next().expect("four kinds of rows were asked for");
        Ok(Some(RowCaster {
            packed: Both {
                forward: [next(), next()],
                backward: [next(), next()],
            },
            kernels,
            device: engine.device().clone(),
            workspace: Mutex::default(),
        }))
    }

    /// Returns the cast of rows; `None` where they travel as they are.
    pub fn packed(&self, backward: bool, direction: Direction) -> Option<&Packed> {
        let Both {
            forward,
            backward: back,
        } = &self.packed;
        let pass = if backward { back } else { forward };
        pass[direction as usize].as_ref()
    }

    /// Returns whether a backward pass counts values that are too large for the dtype.
    pub fn counts_backward(&self) -> bool {
        let saturates = |packed: &Packed| packed.comm_dtype.row().saturates;
        self.packed.backward.iter().flatten().any(saturates)
    }

    /// Begins a pass: no value has been too large yet.
    pub fn reset_saturated(&self) -> Result<(), EngineError> {
        self.kernels.reset_saturated()
    }

    /// Returns the number of values of the last pass that were too large, as an output.
    pub fn saturated(&self) -> Result<Tensor<'static>, EngineError> {
        self.kernels.saturated()
    }

    /// Returns rows as bytes for other nodes.
    pub fn pack(
        &self,
        packed: &Packed,
        rows: &[f32],
        width: usize,
    ) -> Result<Vec<u8>, EngineError> {
        let count = rows.len() / width.max(1);
        // One workspace serves all exchanges: a cast ends in host memory before the next begins, so
        // chunks in flight hold bytes of their own.
        let mut workspace = self
            .workspace
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        self.kernels.reserve(&mut workspace, count)?;
        // A chunk may have no row for a rank, and not every device allocates nothing.
        let buffer = self.device.alloc(size_of_val(rows).max(4))?;
        self.device.upload(cast_slice(rows), &buffer, 0)?;
        (self.kernels).pack(&mut workspace, packed, &buffer, &places(count))?;
        let mut bytes = vec![0; count * packed.row_bytes];
        let sent = workspace.buffer(packed.sent.bytes);
        self.device.download(sent, 0, &mut bytes)?;
        Ok(bytes)
    }

    /// Returns rows that came as bytes from another node.
    pub fn unpack(
        &self,
        packed: &Packed,
        bytes: &[u8],
        width: usize,
    ) -> Result<Vec<f32>, EngineError> {
        // A row's bytes are padded, so the width says nothing of how many rows there are.
        let count = bytes.len() / packed.row_bytes;
        let mut workspace = self
            .workspace
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        self.kernels.reserve(&mut workspace, count)?;
        let received = workspace.buffer(packed.received.bytes);
        self.device.upload(bytes, received, 0)?;
        let mut rows = vec![0f32; count * width];
        let buffer = self.device.alloc(size_of_val(&rows[..]).max(4))?;
        (self.kernels).unpack(&mut workspace, packed, &buffer, &places(count))?;
        self.device
            .download(&buffer, 0, cast_slice_mut(&mut rows))?;
        Ok(rows)
    }
}

/// Returns the places of rows that lie one behind the other.
fn places(count: usize) -> Vec<i32> {
    (0..count as i32).collect()
}
