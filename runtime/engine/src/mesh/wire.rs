//! Rows that are packed for the way to other nodes.

use super::route::Load;
use super::rows::Piece;
use super::run::{Moved, Run, transfers};
use super::under_way::Started;
use crate::call::RngKey;
use crate::engine::Engine;
use crate::error::EngineError;
use crate::launch::{Bound, Scalars};
use crate::memory::{Addresses, Workspace};
use crate::texts::Texts;
use bytemuck::cast_slice;
use moesaic_collectives::plan::{RowBytes, Sums};
use moesaic_collectives::{Call, Transfer};
use moesaic_plan::{Both, Packed, Place, RankPlan, RankStep, SATURATED, Side};
use moesaic_plan::{TensorId, Tilings, Wire};
use moesaic_target::{Buffer, Device};
use moesaic_tensor::Tensor;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The kernels that pack rows in one way, and their memory.
pub(super) struct Packing {
    /// What a rank does with them.
    pub plan: RankPlan,
    wire: Both<Wire>,
    /// The plan of the kernels alone; `None` where no row is packed.
    tilings: Option<Tilings>,
    /// Each of its steps.
    steps: Vec<Bound>,
    device: Arc<dyn Device>,
    saturated: Arc<Buffer>,
    rooms: Mutex<Vec<Room>>,
}

/// Memory of one exchange for its rows on the wire; as many as are under way at once.
#[derive(Default)]
pub(super) struct Room {
    workspace: Workspace,
    addresses: Addresses,
}

impl Packing {
    /// # Errors
    /// As [`Engine::layer`].
    pub fn new(engine: &Engine, plan: &RankPlan, wire: Both<Wire>) -> Result<Packing, EngineError> {
        let plan = plan.in_wire(wire);
        let (mut steps, mut tilings) = (Vec::new(), None);
        if let Some(kernels) = &plan.wire {
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
            rooms: Mutex::default(),
            device,
            tilings,
            steps,
            plan,
            wire,
        })
    }

    /// Begins a call: nothing is too large so far.
    pub fn begin(&self) -> Result<Hop<'_>, EngineError> {
        self.device
            .upload(&0i64.to_le_bytes(), &self.saturated, 0)?;
        let rooms = self.rooms.lock();
        Ok(Hop {
            packing: self,
            // A panic can only have left memory that the next exchange lays anew.
            rooms: rooms.unwrap_or_else(PoisonError::into_inner),
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
pub(super) struct Hop<'l> {
    pub packing: &'l Packing,
    /// Those that no exchange has.
    rooms: MutexGuard<'l, Vec<Room>>,
}

/// Rows that come packed, and what they are unpacked to.
pub(super) struct Coming {
    pub packed: Packed,
    pub side: Side,
    pub tensor: TensorId,
    /// Which row of the tensor each is.
    pub places: Vec<i32>,
    /// Their memory.
    pub room: Room,
}

impl Hop<'_> {
    /// Whether a backward pass counts what is too large.
    pub fn counts_backward(&self) -> bool {
        self.packing.wire.backward == Wire::F16
    }

    /// Memory for so many rows on the wire, which nothing under way has.
    pub fn room(&mut self, rows: usize) -> Result<Room, EngineError> {
        let mut room = self.rooms.pop().unwrap_or_default();
        let Some(tilings) = &self.packing.tilings else {
            return Ok(room);
        };
        let plan = tilings.first();
        let elsewhere = |id: &TensorId| {
            let name = &*plan[*id].name;
            name == SATURATED || name.ends_with(".rows")
        };
        let all = (0..plan.tensors.len()).map(TensorId);
        let own = all.filter(|id| !elsewhere(id));
        let device = &*self.packing.device;
        room.workspace.reserve(own, tilings, device, rows as u64)?;
        Ok(room)
    }

    /// Packs the rows of a tensor that go to other nodes.
    pub fn pack(
        &self,
        room: &mut Room,
        packed: &Packed,
        rows: &Buffer,
        places: &[i32],
    ) -> Result<(), EngineError> {
        let list = (packed.sent.places, places);
        self.launch(room, &packed.pack, list, (packed, rows))
    }

    /// Makes rows of a tensor of those that came. What used their memory has been launched
    /// then.
    fn unpack(&mut self, mut coming: Coming, rows: &Buffer) -> Result<(), EngineError> {
        let packed = &coming.packed;
        let list = (packed.came.places, &*coming.places);
        self.launch(&mut coming.room, &[packed.unpack], list, (packed, rows))?;
        self.rooms.push(coming.room);
        Ok(())
    }

    fn launch(
        &self,
        room: &mut Room,
        steps: &[usize],
        (list, places): (TensorId, &[i32]),
        (packed, rows): (&Packed, &Buffer),
    ) -> Result<(), EngineError> {
        let packing = self.packing;
        let Some(tilings) = packing.tilings.as_ref().filter(|_| !places.is_empty()) else {
            return Ok(());
        };
        let Room {
            workspace,
            addresses,
        } = room;
        let listed = workspace.get(list).expect(ROOM);
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

impl Room {
    /// Rows on the wire, of a tensor of the kernels' plan.
    pub fn transfers(
        &self,
        tensor: TensorId,
        row_bytes: usize,
        pieces: &[Piece],
    ) -> Result<Vec<Transfer>, EngineError> {
        transfers(self.buffer(tensor), row_bytes, pieces)
    }

    pub fn buffer(&self, tensor: TensorId) -> &Arc<Buffer> {
        self.workspace.buffers.handle(tensor).expect(ROOM)
    }
}

impl<'l> Run<'l> {
    /// How rows of an exchange are packed for other nodes, if they are.
    pub(super) fn packed(&self, name: &str) -> Option<&'l Packed> {
        self.hop.as_ref()?.packing.packed(name)
    }

    /// As [`Run::send_rows`], with rows for other nodes packed, and unpacked when they came.
    pub(super) fn send_packed(
        &mut self,
        packed: &'l Packed,
        (load, pieces): (Load, Range<usize>),
        sent: Moved,
        came: Moved,
        call: &Call,
    ) -> Result<Started, EngineError> {
        let near = self.plan.row_bytes(sent.0, sent.1);
        if let (Load::Addends(element), Some(fan)) = (load, &self.rows().fan) {
            let shape = fan.shape();
            let sums = self
                .rows()
                .sums(&pieces, (element, near))
                .map(Sums::inside_nodes);
            let sums = sums.expect("rows have tokens where each crosses once");
            return self.send_sums(packed, (&sums, shape), sent, came, call);
        }
        let hosts = self.hosts();
        let crosses = |from: usize, to: usize| hosts[from] != hosts[to];
        let far = packed.row_bytes;
        let path = (self.rows()).itinerary(load, &pieces, (RowBytes { near, far }, &crosses));
        let own = self.own_member();
        let out = Crossing::of(&sent.2, |peer| crosses(own, peer));
        let back = Crossing::of(&came.2, |peer| crosses(own, peer));
        let rows = out.places.len().max(back.places.len());
        let hop = self.hop.as_mut().expect(MAY);
        let mut room = hop.room(rows)?;
        let hop = self.hop.as_ref().expect(MAY);
        hop.pack(
            &mut room,
            packed,
            self.side(sent.0).buffer(sent.1),
            &out.places,
        )?;
        let near = self.transfers(sent.0, sent.1, &out.near)?;
        let far = room.transfers(packed.sent.bytes, packed.row_bytes, &out.far)?;
        let sends = by_peer(near, far);
        let near = self.transfers(came.0, came.1, &back.near)?;
        let far = room.transfers(packed.came.bytes, packed.row_bytes, &back.far)?;
        let receives = by_peer(near, far);
        let started = self.send_by(path, &sends, &receives, call)?;
        let coming = Coming {
            packed: packed.clone(),
            side: came.0,
            tensor: came.1,
            places: back.places,
            room,
        };
        Ok(Started {
            coming: Some(coming),
            ..started
        })
    }

    /// Unpacks rows that came, where they go.
    pub(super) fn unpack(&mut self, coming: Option<Coming>) -> Result<(), EngineError> {
        let Some(coming) = coming else {
            return Ok(());
        };
        let rows = Arc::clone(self.side(coming.side).buffer(coming.tensor));
        let hop = self.hop.as_mut().expect(MAY);
        hop.unpack(coming, &rows)
    }

    /// The hosts of the ranks that exchange rows, in their order.
    fn hosts(&self) -> Vec<&'l str> {
        let (mesh, (travels, place)) = (self.mesh, self.travels());
        let host = |member: usize| {
            let (ep, shard) = (member / travels.shards, member % travels.shards);
            let rank = self.plan.by().rank(Place { ep, shard, ..place });
            &*mesh.hosts()[rank]
        };
        (0..travels.group()).map(host).collect()
    }

    /// The number of this rank among them.
    pub(super) fn own_member(&self) -> usize {
        let (travels, place) = self.travels();
        place.ep * travels.shards + place.shard
    }
}

/// The messages of both, those of a rank together.
fn by_peer(near: Vec<Transfer>, far: Vec<Transfer>) -> Vec<Transfer> {
    let mut all = [near, far].concat();
    all.sort_by_key(|transfer| transfer.peer);
    all
}

/// Why a tensor of the kernels has memory.
pub(super) const ROOM: &str = "there is room for the rows of an exchange before it";

/// Why there are kernels.
pub(super) const MAY: &str = "rows are packed in a call that may";

/// [`SATURATED`], a number.
pub(super) fn counted(saturated: i64) -> Tensor<'static> {
    Tensor::owned(&[1], vec![saturated])
}

/// The pieces of an exchange: those on this node as they are, and those of other nodes in
/// rows of the wire.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Crossing {
    /// To ranks of this node, or from them.
    pub near: Vec<Piece>,
    /// To others: their first row is one of the wire.
    pub far: Vec<Piece>,
    /// Which row of the tensor each row of the wire is.
    pub places: Vec<i32>,
}

impl Crossing {
    /// Rows that go to several ranks are on the wire once.
    pub fn of(pieces: &[Piece], is_far: impl Fn(usize) -> bool) -> Crossing {
        let mut crossing = Crossing::default();
        let mut known = BTreeMap::new();
        for piece in pieces {
            if !is_far(piece.peer) {
                crossing.near.push(*piece);
                continue;
            }
            let places = &mut crossing.places;
            let first = *known.entry((piece.first, piece.rows)).or_insert_with(|| {
                let next = places.len();
                let rows = piece.first..piece.first + piece.rows;
                places.extend(rows.map(|row| row as i32));
                next
            });
            crossing.far.push(Piece { first, ..*piece });
        }
        crossing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_for_several_ranks_are_on_the_wire_once() {
        let piece = |peer, first, rows| Piece { peer, first, rows };
        let pieces = [
            piece(0, 0, 2),
            piece(1, 0, 2),
            piece(2, 5, 3),
            piece(2, 9, 1),
            piece(3, 5, 3),
            piece(3, 9, 1),
        ];
        let crossing = Crossing::of(&pieces, |peer| peer > 1);
        assert_eq!(crossing.near, pieces[..2]);
        assert_eq!(crossing.places, [5, 6, 7, 9]);
        let far = [
            piece(2, 0, 3),
            piece(2, 3, 1),
            piece(3, 0, 3),
            piece(3, 3, 1),
        ];
        assert_eq!(crossing.far, far);
        assert_eq!(Crossing::of(&pieces, |_| false).places, [0i32; 0]);
    }
}
