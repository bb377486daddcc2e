//! Casts of rows to the communication dtype between nodes.

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
use moesaic_dist::{CollectiveOp, PlanPart};
use moesaic_plan::{Both, Exchange, FromTo, Packed, RankPlan, RankStep, SATURATED};
use moesaic_plan::{CommDtype, TensorId, Tilings};
use moesaic_target::{Buffer, Device};
use moesaic_tensor::Tensor;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The cast kernels of one pair of dtypes, and their memory.
pub(super) struct Packing {
    /// The rank plan with casts in its exchanges.
    pub plan: RankPlan,
    comm_dtype: Both<CommDtype>,
    /// The plan of the cast kernels; `None` where no row is cast.
    tilings: Option<Tilings>,
    /// The bound steps of that plan.
    steps: Vec<Bound>,
    device: Arc<dyn Device>,
    saturated: Arc<Buffer>,
    /// The casts of exchanges, by operation and tensors.
    packed: BTreeMap<(CollectiveOp, FromTo), Packed>,
    /// The tensors of the cast kernels that get their addresses at the launch: the rows, which are
    /// the layer's, and the count, which is one for all exchanges of a call.
    elsewhere: BTreeSet<TensorId>,
    workspaces: Mutex<Vec<CastWorkspace>>,
}

/// The memory of one exchange for its cast rows. There are as many as exchanges in flight at once.
#[derive(Default)]
pub(super) struct CastWorkspace {
    workspace: Workspace,
    addresses: Addresses,
}

impl Packing {
    /// # Errors
    /// As [`Engine::layer`].
    pub fn new(
        engine: &Engine,
        plan: &RankPlan,
        comm_dtype: Both<CommDtype>,
    ) -> Result<Packing, EngineError> {
        let plan = plan.in_comm_dtype(comm_dtype);
        let (mut steps, mut tilings) = (Vec::new(), None);
        if let Some(kernels) = &plan.comm_cast {
            let texts = Texts::of(kernels.clone().into())?;
            let modules = engine.modules(&texts)?;
            for step in &kernels.steps {
                steps.push(Bound::new(&texts.tilings, &modules, [step])?);
            }
            tilings = Some(texts.tilings);
        }
        let device = engine.device().clone();
        let packed = packed_exchanges(&plan);
        let casts = plan.comm_cast.as_ref();
        let count = casts.and_then(|casts| casts.id(SATURATED));
        let rows = packed.values().map(|packed| packed.rows);
        Ok(Packing {
            elsewhere: rows.chain(count).collect(),
            packed,
            saturated: Arc::new(device.alloc(64)?),
            workspaces: Mutex::default(),
            device,
            tilings,
            steps,
            plan,
            comm_dtype,
        })
    }

    /// Begins a call and resets the count of saturated values.
    pub fn begin(&self) -> Result<CastCall<'_>, EngineError> {
        self.device
            .upload(&0i64.to_le_bytes(), &self.saturated, 0)?;
        let workspaces = self.workspaces.lock();
        Ok(CastCall {
            packing: self,
            // A panic can only leave memory that the next exchange lays out anew, so the poison is
            // ignored.
            workspaces: workspaces.unwrap_or_else(PoisonError::into_inner),
        })
    }

    /// Returns the cast of an exchange's rows.
    pub fn packed(&self, exchange: &Exchange) -> Option<&Packed> {
        self.packed.get(&(exchange.op, exchange.tensors?))
    }

    /// Returns the memory of the call's [`SATURATED`].
    pub fn saturated(&self) -> &Arc<Buffer> {
        &self.saturated
    }
}

/// Returns the casts of a plan's exchanges, by operation and tensors.
fn packed_exchanges(plan: &RankPlan) -> BTreeMap<(CollectiveOp, FromTo), Packed> {
    let steps = plan.steps.iter().chain(&plan.evaluation);
    let exchanges = steps.chain(&plan.backward).filter_map(RankStep::exchange);
    let packed = exchanges.filter_map(|exchange| {
        let key = (exchange.op, exchange.tensors?);
        Some((key, exchange.packed.clone()?))
    });
    packed.collect()
}

/// The cast kernels and their memory in one call.
pub(super) struct CastCall<'l> {
    pub packing: &'l Packing,
    /// Workspaces that no exchange uses.
    workspaces: MutexGuard<'l, Vec<CastWorkspace>>,
}

/// Cast rows that arrive, and the tensor that they are cast back to.
pub(super) struct IncomingRows {
    pub packed: Packed,
    pub part: PlanPart,
    pub tensor: TensorId,
    /// The index in the tensor of each row.
    pub places: Vec<i32>,
    /// The memory of the cast rows.
    pub workspace: CastWorkspace,
}

impl CastCall<'_> {
    /// Returns whether a backward pass counts saturated values.
    pub fn counts_backward(&self) -> bool {
        self.packing.comm_dtype.backward.row().saturates
    }

    /// Returns memory for cast rows that nothing in flight uses.
    pub fn workspace(&mut self, rows: usize) -> Result<CastWorkspace, EngineError> {
        let mut workspace = self.workspaces.pop().unwrap_or_default();
        let Some(tilings) = &self.packing.tilings else {
            return Ok(workspace);
        };
        let plan = tilings.first();
        let all = (0..plan.tensors.len()).map(TensorId);
        let own = all.filter(|id| !self.packing.elsewhere.contains(id));
        let device = &*self.packing.device;
        workspace
            .workspace
            .reserve(own, tilings, device, rows as u64)?;
        Ok(workspace)
    }

    /// Casts the rows of a tensor that go to other nodes.
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

    /// Casts arrived rows back into a tensor. Their memory is free afterwards, because everything
    /// that uses it has been launched.
    pub fn unpack(&mut self, mut incoming: IncomingRows, rows: &Buffer) -> Result<(), EngineError> {
        let packed = &incoming.packed;
        let list = (packed.received.places, &*incoming.places);
        self.launch(
            &mut incoming.workspace,
            &[packed.unpack],
            list,
            (packed, rows),
        )?;
        self.workspaces.push(incoming.workspace);
        Ok(())
    }

    fn launch(
        &self,
        workspace: &mut CastWorkspace,
        steps: &[usize],
        (list, places): (TensorId, &[i32]),
        (packed, rows): (&Packed, &Buffer),
    ) -> Result<(), EngineError> {
        let packing = self.packing;
        let Some(tilings) = packing.tilings.as_ref().filter(|_| !places.is_empty()) else {
            return Ok(());
        };
        let CastWorkspace {
            workspace,
            addresses,
        } = workspace;
        let listed = workspace.get(list).expect(HAS_WORKSPACE);
        packing.device.upload(cast_slice(places), listed, 0)?;
        addresses.clear(tilings.first().tensors.len());
        addresses.lay(&workspace.buffers);
        addresses.set(packed.rows, rows.ptr());
        if let Some(id) = tilings.first().id(SATURATED) {
            addresses.set(id, packing.saturated.ptr());
        }
        let scalars = Scalars::new(places.len(), RngKey::default(), 0);
        for &step in steps {
            let bound = &packing.steps[step];
            bound.run(0, &*packing.device, &scalars, addresses, None, None)?;
        }
        Ok(())
    }

    /// Returns the call's [`SATURATED`].
    pub fn saturated(&self) -> Result<Tensor<'static>, EngineError> {
        let mut bytes = [0; 8];
        let packing = self.packing;
        packing.device.download(&packing.saturated, 0, &mut bytes)?;
        Ok(counted(i64::from_le_bytes(bytes)))
    }
}

impl CastWorkspace {
    /// Returns transfers of cast rows, of a tensor of the kernels' plan.
    pub fn transfers(
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

/// The reason that a call has cast kernels.
pub(super) const MAY_CAST: &str = "rows are cast in a call with cast kernels";

/// Returns [`SATURATED`] as a tensor.
pub(super) fn counted(saturated: i64) -> Tensor<'static> {
    Tensor::owned(&[1], vec![saturated])
}

/// The ranges of an exchange, split by node: ranges on this node as they are, ranges of other nodes
/// in cast rows.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct NodeSplit {
    /// Ranges to or from ranks of this node.
    pub near: Vec<RowRange>,
    /// Ranges to or from other nodes; `first` counts cast rows.
    pub far: Vec<RowRange>,
    /// The index in the tensor of each cast row.
    pub places: Vec<i32>,
}

impl NodeSplit {
    /// Splits ranges by node. Rows that go to several ranks are cast once.
    pub fn of(chunks: &[RowRange], is_far: impl Fn(usize) -> bool) -> NodeSplit {
        let mut split = NodeSplit::default();
        let mut known = BTreeMap::new();
        for chunk in chunks {
            if !is_far(chunk.peer) {
                split.near.push(*chunk);
                continue;
            }
            let places = &mut split.places;
            // Every shard of an expert gets the same rows; casting a row once for all of them keeps
            // the cast as cheap as without shards.
            let first = *known.entry((chunk.first, chunk.rows)).or_insert_with(|| {
                let next = places.len();
                let rows = chunk.first..chunk.first + chunk.rows;
                places.extend(rows.map(|row| row as i32));
                next
            });
            split.far.push(RowRange { first, ..*chunk });
        }
        split
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_for_several_ranks_are_cast_once() {
        let chunk = |peer, first, rows| RowRange { peer, first, rows };
        let chunks = [
            chunk(0, 0, 2),
            chunk(1, 0, 2),
            chunk(2, 5, 3),
            chunk(2, 9, 1),
            chunk(3, 5, 3),
            chunk(3, 9, 1),
        ];
        let split = NodeSplit::of(&chunks, |peer| peer > 1);
        assert_eq!(split.near, chunks[..2]);
        assert_eq!(split.places, [5, 6, 7, 9]);
        let far = [
            chunk(2, 0, 3),
            chunk(2, 3, 1),
            chunk(3, 0, 3),
            chunk(3, 3, 1),
        ];
        assert_eq!(split.far, far);
        assert_eq!(NodeSplit::of(&chunks, |_| false).places, [0i32; 0]);
    }
}
