//! The kernels that cast rows to the communication dtype and back, and their memory.

use super::rows::RowRange;
use super::transfers::transfers;
use crate::call::RngKey;
use crate::engine::Engine;
use crate::error::EngineError;
use crate::launch::{Bound, Scalars};
use crate::memory::{Addresses, Workspace};
use crate::texts::Texts;
use bytemuck::cast_slice;
use moesaic_collectives::Transfer;
use moesaic_plan::{LayerPlan, Packed, SATURATED, TensorId, Tilings};
use moesaic_target::{Buffer, Device};
use moesaic_tensor::Tensor;
use std::collections::BTreeSet;
use std::sync::Arc;

/// The cast kernels of a plan.
pub(crate) struct CastKernels {
    /// The plan of the cast kernels; `None` where no row is cast.
    tilings: Option<Tilings>,
    /// The bound steps of that plan.
    steps: Vec<Bound>,
    device: Arc<dyn Device>,
    saturated: Arc<Buffer>,
    /// The tensors of the cast kernels that get their addresses at the launch: the rows, which are
    /// the layer's, and the count, which is one for all exchanges of a call.
    elsewhere: BTreeSet<TensorId>,
}

/// The memory of one exchange for its cast rows. There are as many as exchanges in flight at once.
#[derive(Default)]
pub(crate) struct CastWorkspace {
    workspace: Workspace,
    addresses: Addresses,
}

impl CastKernels {
    /// # Errors
    /// As [`Engine::layer`].
    pub fn new<'p>(
        engine: &Engine,
        kernels: Option<&LayerPlan>,
        packed: impl Iterator<Item = &'p Packed>,
    ) -> Result<CastKernels, EngineError> {
        let (mut steps, mut tilings) = (Vec::new(), None);
        if let Some(kernels) = kernels {
            let texts = Texts::of(kernels.clone().into())?;
            let modules = engine.modules(&texts)?;
            for step in &kernels.steps {
                steps.push(Bound::new(&texts.tilings, &modules, [step])?);
            }
            tilings = Some(texts.tilings);
        }
        let device = engine.device().clone();
        let count = kernels.and_then(|kernels| kernels.id(SATURATED));
        Ok(CastKernels {
            elsewhere: packed.map(|packed| packed.rows).chain(count).collect(),
            saturated: Arc::new(device.alloc(64)?),
            device,
            tilings,
            steps,
        })
    }

    /// Sets the count of saturated values to zero.
    pub fn reset_saturated(&self) -> Result<(), EngineError> {
        let zero = 0i64.to_le_bytes();
        Ok(self.device.upload(&zero, &self.saturated, 0)?)
    }

    /// Returns the memory of the call's [`SATURATED`].
    pub fn saturated_memory(&self) -> &Arc<Buffer> {
        &self.saturated
    }

    /// Returns the call's [`SATURATED`].
    pub fn saturated(&self) -> Result<Tensor<'static>, EngineError> {
        let mut bytes = [0; 8];
        self.device.download(&self.saturated, 0, &mut bytes)?;
        Ok(counted(i64::from_le_bytes(bytes)))
    }

    /// Makes room for cast rows.
    pub fn reserve(&self, workspace: &mut CastWorkspace, rows: usize) -> Result<(), EngineError> {
        let Some(tilings) = &self.tilings else {
            return Ok(());
        };
        let all = (0..tilings.first().tensors.len()).map(TensorId);
        let own = all.filter(|id| !self.elsewhere.contains(id));
        let workspace = &mut workspace.workspace;
        Ok(workspace.reserve(own, tilings, &*self.device, rows as u64)?)
    }

    /// Casts rows that go to other nodes, at their places among `rows`.
    pub fn pack(
        &self,
        workspace: &mut CastWorkspace,
        packed: &Packed,
        rows: &Buffer,
        places: &[i32],
    ) -> Result<(), EngineError> {
        let list = (packed.sent.places, places);
        self.launch(workspace, &packed.pack, list, (packed, rows))
    }

    /// Casts arrived rows back to their places among `rows`.
    pub fn unpack(
        &self,
        workspace: &mut CastWorkspace,
        packed: &Packed,
        rows: &Buffer,
        places: &[i32],
    ) -> Result<(), EngineError> {
        let list = (packed.received.places, places);
        self.launch(workspace, &[packed.unpack], list, (packed, rows))
    }

    fn launch(
        &self,
        workspace: &mut CastWorkspace,
        steps: &[usize],
        (list, places): (TensorId, &[i32]),
        (packed, rows): (&Packed, &Buffer),
    ) -> Result<(), EngineError> {
        // A launch of no rows has no blocks, which some drivers refuse.
        let Some(tilings) = self.tilings.as_ref().filter(|_| !places.is_empty()) else {
            return Ok(());
        };
        let CastWorkspace {
            workspace,
            addresses,
        } = workspace;
        let listed = workspace.get(list).expect(HAS_WORKSPACE);
        self.device.upload(cast_slice(places), listed, 0)?;
        addresses.clear(tilings.first().tensors.len());
        addresses.lay(&workspace.buffers);
        addresses.set(packed.rows, rows.ptr());
        if let Some(id) = tilings.first().id(SATURATED) {
            addresses.set(id, self.saturated.ptr());
        }
        // To these kernels a cast row is what a token is to a layer's; they draw nothing.
        let scalars = Scalars::new(places.len(), RngKey::default(), 0);
        for &step in steps {
            let bound = &self.steps[step];
            bound.run(0, &*self.device, &scalars, addresses, None, None)?;
        }
        Ok(())
    }
}

impl CastWorkspace {
    /// Returns transfers of cast rows, of a tensor of the kernels' plan.
    pub(super) fn transfers(
        &self,
        tensor: TensorId,
        row_bytes: usize,
        chunks: &[RowRange],
    ) -> Result<Vec<Transfer>, EngineError> {
        transfers(self.buffer(tensor), row_bytes, chunks)
    }

    pub fn buffer(&self, tensor: TensorId) -> &Arc<Buffer> {
        self.workspace.buffers.handle(tensor).expect(HAS_WORKSPACE)
    }
}

/// The reason that a tensor of the cast kernels has memory.
pub(super) const HAS_WORKSPACE: &str = "there is workspace for the rows of an exchange before it";

/// Returns [`SATURATED`] as a tensor.
pub(crate) fn counted(saturated: i64) -> Tensor<'static> {
    Tensor::owned(&[1], vec![saturated])
}
