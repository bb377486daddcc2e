//! Casts of rows to the communication dtype between nodes.

use super::cast_kernels::{CastKernels, CastWorkspace};
use super::rows::RowRange;
use crate::engine::Engine;
use crate::error::EngineError;
use moesaic_dist::{CollectiveOp, PlanPart};
use moesaic_plan::{Both, CommDtype, Exchange, FromTo, Packed, RankPlan, RankStep, TensorId};
use moesaic_target::Buffer;
use moesaic_tensor::Tensor;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The casts of a layer's exchanges by one pair of dtypes, and their memory.
pub(super) struct Packing {
    /// The rank plan with casts in its exchanges.
    pub plan: RankPlan,
    pub kernels: CastKernels,
    comm_dtype: Both<CommDtype>,
    /// The casts of exchanges, by operation and tensors.
    packed: BTreeMap<(CollectiveOp, FromTo), Packed>,
    workspaces: Mutex<Vec<CastWorkspace>>,
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
        let packed = packed_exchanges(&plan);
        Ok(Packing {
            kernels: CastKernels::new(engine, plan.comm_cast.as_ref(), packed.values())?,
            packed,
            workspaces: Mutex::default(),
            plan,
            comm_dtype,
        })
    }

    /// Begins a call and resets the count of saturated values.
    pub fn begin(&self) -> Result<CastCall<'_>, EngineError> {
        self.kernels.reset_saturated()?;
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
        self.packing.kernels.reserve(&mut workspace, rows)?;
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
        self.packing.kernels.pack(workspace, packed, rows, places)
    }

    /// Casts arrived rows back into a tensor. Their memory is free afterwards, because everything
    /// that uses it has been launched.
    pub fn unpack(&mut self, mut incoming: IncomingRows, rows: &Buffer) -> Result<(), EngineError> {
        let workspace = &mut incoming.workspace;
        let kernels = &self.packing.kernels;
        kernels.unpack(workspace, &incoming.packed, rows, &incoming.places)?;
        self.workspaces.push(incoming.workspace);
        Ok(())
    }

    /// Returns the call's [`SATURATED`](moesaic_plan::SATURATED).
    pub fn saturated(&self) -> Result<Tensor<'static>, EngineError> {
        self.packing.kernels.saturated()
    }
}

/// The reason that a call has cast kernels.
pub(super) const MAY_CAST: &str = "rows are cast in a call with cast kernels";

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
