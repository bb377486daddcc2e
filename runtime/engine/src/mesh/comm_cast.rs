//! Rows that are packed for the way to other nodes.

use super::all_to_all::Payload;
use super::in_flight::Request;
use super::rows::RowRange;
use super::run::{Moved, Run, transfers};
use crate::call::RngKey;
use crate::engine::Engine;
use crate::error::EngineError;
use crate::launch::{Bound, Scalars};
use crate::memory::{Addresses, Workspace};
use crate::texts::Texts;
use bytemuck::cast_slice;
use moesaic_collectives::plan::{DedupCombine, RowBytes};
use moesaic_collectives::{Call, Transfer};
use moesaic_plan::{Both, Packed, PlanPart, RankCoords, RankPlan, RankStep, SATURATED};
use moesaic_plan::{CommDtype, TensorId, Tilings};
use moesaic_target::{Buffer, Device};
use moesaic_tensor::Tensor;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The kernels that pack rows in one way, and their memory.
pub(super) struct Packing {
    /// What a rank does with them.
    pub plan: RankPlan,
    comm_dtype: Both<CommDtype>,
    /// The plan of the kernels alone; `None` where no row is packed.
    tilings: Option<Tilings>,
    /// Each of its steps.
    steps: Vec<Bound>,
    device: Arc<dyn Device>,
    saturated: Arc<Buffer>,
    workspaces: Mutex<Vec<CastWorkspace>>,
}

/// Memory of one exchange for its rows on the wire; as many as are in flight at once.
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
        Ok(Packing {
            saturated: Arc::new(device.alloc(64)?),
            workspaces: Mutex::default(),
            device,
            tilings,
            steps,
            plan,
            comm_dtype,
        })
    }

    /// Begins a call: nothing is too large so far.
    pub fn begin(&self) -> Result<CastCall<'_>, EngineError> {
        self.device
            .upload(&0i64.to_le_bytes(), &self.saturated, 0)?;
        let workspaces = self.workspaces.lock();
        Ok(CastCall {
            packing: self,
            // A panic can only have left memory that the next exchange lays anew.
            workspaces: workspaces.unwrap_or_else(PoisonError::into_inner),
        })
    }

    /// How the rows of an exchange are packed.
    pub fn packed(&self, name: &str) -> Option<&Packed> {
        let steps = self.plan.steps.iter();
        let mut steps = steps
            .chain(&self.plan.evaluation)
            .chain(&self.plan.backward);
        steps.find_map(|step| match step {
            RankStep::Exchange(exchange) if exchange.name == name => exchange.packed.as_ref(),
            _ => None,
        })
    }

    /// Where [`SATURATED`] of the call lies.
    pub fn saturated(&self) -> &Arc<Buffer> {
        &self.saturated
    }
}

/// The kernels and their memory in one call.
pub(super) struct CastCall<'l> {
    pub packing: &'l Packing,
    /// Those that no exchange has.
    workspaces: MutexGuard<'l, Vec<CastWorkspace>>,
}

/// Rows that come packed, and what they are unpacked to.
pub(super) struct IncomingRows {
    pub packed: Packed,
    pub part: PlanPart,
    pub tensor: TensorId,
    /// Which row of the tensor each is.
    pub places: Vec<i32>,
    /// Their memory.
    pub workspace: CastWorkspace,
}

impl CastCall<'_> {
    /// Whether a backward pass counts what is too large.
    pub fn counts_backward(&self) -> bool {
        self.packing.comm_dtype.backward == CommDtype::F16
    }

    /// Memory for so many rows on the wire, which nothing in flight has.
    pub fn workspace(&mut self, rows: usize) -> Result<CastWorkspace, EngineError> {
        let mut workspace = self.workspaces.pop().unwrap_or_default();
        let Some(tilings) = &self.packing.tilings else {
            return Ok(workspace);
        };
        let plan = tilings.first();
        let elsewhere = |id: &TensorId| {
            let name = &*plan[*id].name;
            name == SATURATED || name.ends_with(".rows")
        };
        let all = (0..plan.tensors.len()).map(TensorId);
        let own = all.filter(|id| !elsewhere(id));
        let device = &*self.packing.device;
        workspace
            .workspace
            .reserve(own, tilings, device, rows as u64)?;
        Ok(workspace)
    }

    /// Packs the rows of a tensor that go to other nodes.
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

    /// Makes rows of a tensor of those that came. What used their memory has been launched
    /// then.
    fn unpack(&mut self, mut incoming: IncomingRows, rows: &Buffer) -> Result<(), EngineError> {
        let packed = &incoming.packed;
        let list = (packed.came.places, &*incoming.places);
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

    /// [`SATURATED`] of the call.
    pub fn saturated(&self) -> Result<Tensor<'static>, EngineError> {
        let mut bytes = [0; 8];
        let packing = self.packing;
        packing.device.download(&packing.saturated, 0, &mut bytes)?;
        Ok(counted(i64::from_le_bytes(bytes)))
    }
}

impl CastWorkspace {
    /// Rows on the wire, of a tensor of the kernels' plan.
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

impl<'l> Run<'l> {
    /// How rows of an exchange are packed for other nodes, if they are.
    pub(super) fn packed(&self, name: &str) -> Option<&'l Packed> {
        self.cast.as_ref()?.packing.packed(name)
    }

    /// As [`Run::send_rows`], with rows for other nodes packed, and unpacked when they came.
    pub(super) fn send_packed(
        &mut self,
        packed: &'l Packed,
        (load, chunks): (Payload, Range<usize>),
        sent: Moved,
        came: Moved,
        call: &Call,
    ) -> Result<Request, EngineError> {
        let near = self.plan.row_bytes(sent.0, sent.1);
        if let (Payload::Addends(element), Some(dedup)) = (load, &self.rows().dedup) {
            let shape = dedup.shape();
            let sums = self
                .rows()
                .sums(&chunks, (element, near))
                .map(DedupCombine::inside_nodes);
            let sums = sums.expect("rows have tokens where each crosses once");
            return self.send_sums(packed, (&sums, shape), sent, came, call);
        }
        let hosts = self.hosts();
        let crosses = |from: usize, to: usize| hosts[from] != hosts[to];
        let far = packed.row_bytes;
        let path = (self.rows()).schedule(load, &chunks, (RowBytes { near, far }, &crosses));
        let own = self.own_member();
        let out = Crossing::of(&sent.2, |peer| crosses(own, peer));
        let back = Crossing::of(&came.2, |peer| crosses(own, peer));
        let rows = out.places.len().max(back.places.len());
        let cast = self.cast.as_mut().expect(MAY_CAST);
        let mut workspace = cast.workspace(rows)?;
        let cast = self.cast.as_ref().expect(MAY_CAST);
        cast.pack(
            &mut workspace,
            packed,
            self.part(sent.0).buffer(sent.1),
            &out.places,
        )?;
        let near = self.transfers(sent.0, sent.1, &out.near)?;
        let far = workspace.transfers(packed.sent.bytes, packed.row_bytes, &out.far)?;
        let sends = by_peer(near, far);
        let near = self.transfers(came.0, came.1, &back.near)?;
        let far = workspace.transfers(packed.came.bytes, packed.row_bytes, &back.far)?;
        let receives = by_peer(near, far);
        let request = self.send_by(path, &sends, &receives, call)?;
        let incoming = IncomingRows {
            packed: packed.clone(),
            part: came.0,
            tensor: came.1,
            places: back.places,
            workspace,
        };
        Ok(Request {
            incoming: Some(incoming),
            ..request
        })
    }

    /// Unpacks rows that came, where they go.
    pub(super) fn unpack(&mut self, incoming: Option<IncomingRows>) -> Result<(), EngineError> {
        let Some(incoming) = incoming else {
            return Ok(());
        };
        let rows = Arc::clone(self.part(incoming.part).buffer(incoming.tensor));
        let cast = self.cast.as_mut().expect(MAY_CAST);
        cast.unpack(incoming, &rows)
    }

    /// The hosts of the ranks that exchange rows, in their order.
    fn hosts(&self) -> Vec<&'l str> {
        let (mesh, (travels, place)) = (self.mesh, self.travels());
        let host = |member: usize| {
            let (ep, tp) = (member / travels.expert_tp, member % travels.expert_tp);
            let rank = self.plan.by().rank(RankCoords { ep, tp, ..place });
            &*mesh.hosts()[rank]
        };
        (0..travels.group()).map(host).collect()
    }

    /// The number of this rank among them.
    pub(super) fn own_member(&self) -> usize {
        let (travels, place) = self.travels();
        place.ep * travels.expert_tp + place.tp
    }
}

/// The messages of both, those of a rank together.
fn by_peer(near: Vec<Transfer>, far: Vec<Transfer>) -> Vec<Transfer> {
    let mut all = [near, far].concat();
    all.sort_by_key(|transfer| transfer.peer);
    all
}

/// Why a tensor of the kernels has memory.
pub(super) const HAS_WORKSPACE: &str = "there is workspace for the rows of an exchange before it";

/// Why there are kernels.
pub(super) const MAY_CAST: &str = "rows are packed in a call that may";

/// [`SATURATED`], a number.
pub(super) fn counted(saturated: i64) -> Tensor<'static> {
    Tensor::owned(&[1], vec![saturated])
}

/// The chunks of an exchange: those on this node as they are, and those of other nodes in
/// rows of the wire.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Crossing {
    /// To ranks of this node, or from them.
    pub near: Vec<RowRange>,
    /// To others: their first row is one of the wire.
    pub far: Vec<RowRange>,
    /// Which row of the tensor each row of the wire is.
    pub places: Vec<i32>,
}

impl Crossing {
    /// Rows that go to several ranks are on the wire once.
    pub fn of(chunks: &[RowRange], is_far: impl Fn(usize) -> bool) -> Crossing {
        let mut dedup_indices = Crossing::default();
        let mut known = BTreeMap::new();
        for chunk in chunks {
            if !is_far(chunk.peer) {
                dedup_indices.near.push(*chunk);
                continue;
            }
            let places = &mut dedup_indices.places;
            let first = *known.entry((chunk.first, chunk.rows)).or_insert_with(|| {
                let next = places.len();
                let rows = chunk.first..chunk.first + chunk.rows;
                places.extend(rows.map(|row| row as i32));
                next
            });
            dedup_indices.far.push(RowRange { first, ..*chunk });
        }
        dedup_indices
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_for_several_ranks_are_on_the_wire_once() {
        let chunk = |peer, first, rows| RowRange { peer, first, rows };
        let chunks = [
            chunk(0, 0, 2),
            chunk(1, 0, 2),
            chunk(2, 5, 3),
            chunk(2, 9, 1),
            chunk(3, 5, 3),
            chunk(3, 9, 1),
        ];
        let dedup_indices = Crossing::of(&chunks, |peer| peer > 1);
        assert_eq!(dedup_indices.near, chunks[..2]);
        assert_eq!(dedup_indices.places, [5, 6, 7, 9]);
        let far = [
            chunk(2, 0, 3),
            chunk(2, 3, 1),
            chunk(3, 0, 3),
            chunk(3, 3, 1),
        ];
        assert_eq!(dedup_indices.far, far);
        assert_eq!(Crossing::of(&chunks, |_| false).places, [0i32; 0]);
    }
}
