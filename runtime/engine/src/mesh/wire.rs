//! Rows that are packed for the way to other nodes.

use super::route::Load;
use super::rows::Piece;
use super::run::{Moved, Run};
use super::under_way::Started;
use crate::call::Counters;
use crate::engine::Engine;
use crate::error::EngineError;
use crate::launch::{Bound, Scalars};
use crate::memory::{Addresses, Workspace};
use crate::texts::Texts;
use bytemuck::cast_slice;
use moesaic_collectives::{Call, Element, Slice, Transfer};
use moesaic_plan::{Both, Packed, RankPlan, RankStep, SATURATED, Side, TensorId, Tilings, Wire};
use moesaic_target::{Buffer, Device};
use moesaic_tensor::Tensor;
use std::collections::BTreeMap;
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
    memory: Mutex<Memory>,
}

#[derive(Default)]
struct Memory {
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
            memory: Mutex::default(),
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
        let memory = self.memory.lock();
        Ok(Hop {
            packing: self,
            // A panic can only have left memory that the next call lays anew.
            memory: memory.unwrap_or_else(PoisonError::into_inner),
            coming: None,
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

    /// Whether a backward pass counts what is too large.
    pub fn counts_backward(&self) -> bool {
        self.wire.backward == Wire::F16
    }
}

/// The kernels and their memory in one call.
pub(super) struct Hop<'l> {
    pub packing: &'l Packing,
    memory: MutexGuard<'l, Memory>,
    /// What the exchange that was begun last brings.
    coming: Option<Coming<'l>>,
}

/// Rows that come packed, and what they are unpacked to.
struct Coming<'l> {
    packed: &'l Packed,
    side: Side,
    tensor: TensorId,
    places: Vec<i32>,
}

impl Hop<'_> {
    /// Room for so many rows on the wire. What an exchange before has sent or got is there
    /// as long as that exchange needs it.
    pub fn reserve(&mut self, rows: usize) -> Result<(), EngineError> {
        let Some(tilings) = &self.packing.tilings else {
            return Ok(());
        };
        let plan = tilings.first();
        let elsewhere = |id: &TensorId| {
            let name = &*plan[*id].name;
            name == SATURATED || name.ends_with(".rows")
        };
        let all = (0..plan.tensors.len()).map(TensorId);
        let own = all.filter(|id| !elsewhere(id));
        let (workspace, device) = (&mut self.memory.workspace, &*self.packing.device);
        Ok(workspace.reserve(own, tilings, device, rows as u64)?)
    }

    /// Packs the rows of a tensor that go to other nodes.
    pub fn pack(
        &mut self,
        packed: &Packed,
        rows: &Buffer,
        places: &[i32],
    ) -> Result<(), EngineError> {
        self.launch(&packed.pack, (packed.sent.places, places), (packed, rows))
    }

    /// Makes rows of a tensor of those that came.
    pub fn unpack(
        &mut self,
        packed: &Packed,
        rows: &Buffer,
        places: &[i32],
    ) -> Result<(), EngineError> {
        self.launch(
            &[packed.unpack],
            (packed.came.places, places),
            (packed, rows),
        )
    }

    fn launch(
        &mut self,
        steps: &[usize],
        (list, places): (TensorId, &[i32]),
        (packed, rows): (&Packed, &Buffer),
    ) -> Result<(), EngineError> {
        let packing = self.packing;
        let Some(tilings) = packing.tilings.as_ref().filter(|_| !places.is_empty()) else {
            return Ok(());
        };
        let Memory {
            workspace,
            addresses,
        } = &mut *self.memory;
        let listed = workspace.get(list).expect(ROOM);
        packing.device.upload(cast_slice(places), listed, 0)?;
        addresses.clear(tilings.first().tensors.len());
        addresses.lay(&workspace.buffers);
        addresses.set(packed.rows, rows.ptr());
        if let Some(id) = tilings.first().id(SATURATED) {
            addresses.set(id, packing.saturated.ptr());
        }
        let scalars = Scalars::new(places.len(), Counters::default(), 0);
        for &step in steps {
            let bound = &packing.steps[step];
            bound.run(0, &*packing.device, &scalars, addresses, None, None)?;
        }
        Ok(())
    }

    /// Rows on the wire, of a tensor of the kernels' plan.
    pub fn transfers(
        &self,
        tensor: TensorId,
        row_bytes: usize,
        pieces: &[Piece],
    ) -> Result<Vec<Transfer>, EngineError> {
        let buffer = |piece: &Piece| {
            let held = self.memory.workspace.buffers.handle(tensor).expect(ROOM);
            let (first, size) = (piece.first * row_bytes, piece.rows * row_bytes);
            Ok(Transfer {
                peer: piece.peer,
                slice: Slice::new(held, Element::U8, first, size)?,
            })
        };
        pieces.iter().map(buffer).collect()
    }

    /// [`SATURATED`] of the call.
    pub fn saturated(&self) -> Result<Tensor<'static>, EngineError> {
        let mut bytes = [0; 8];
        let packing = self.packing;
        packing.device.download(&packing.saturated, 0, &mut bytes)?;
        Ok(counted(i64::from_le_bytes(bytes)))
    }
}

impl<'l> Run<'l> {
    /// As [`Run::send_rows`], with rows for other nodes packed; [`Run::unpack`] follows.
    pub(super) fn send_packed(
        &mut self,
        packed: &'l Packed,
        load: Load,
        (out_of, from, sent): Moved,
        (side, tensor, came): Moved,
        call: &Call,
    ) -> Result<Started, EngineError> {
        let bytes = self.plan.row_bytes(out_of, from);
        let path = self.rows().itinerary(load, &|from, to| {
            if self.crosses(from, to) {
                packed.row_bytes
            } else {
                bytes
            }
        });
        let own = self.mesh.rank() - self.first_of_group();
        let sent = Crossing::of(&sent, |peer| self.crosses(own, peer));
        let came = Crossing::of(&came, |peer| self.crosses(own, peer));
        let mut hop = self.hop.take().expect("rows are packed in a call that may");
        hop.reserve(sent.places.len().max(came.places.len()))?;
        hop.pack(packed, self.side(out_of).buffer(from), &sent.places)?;
        let near = self.transfers(out_of, from, &sent.near)?;
        let far = hop.transfers(packed.sent.bytes, packed.row_bytes, &sent.far)?;
        let sends = by_peer(near, far);
        let near = self.transfers(side, tensor, &came.near)?;
        let far = hop.transfers(packed.came.bytes, packed.row_bytes, &came.far)?;
        let receives = by_peer(near, far);
        let started = self.send_by(path, &sends, &receives, call)?;
        hop.coming = Some(Coming {
            packed,
            side,
            tensor,
            places: came.places,
        });
        self.hop = Some(hop);
        Ok(started)
    }

    /// Unpacks the rows of an exchange that launches see the result of, if they came packed.
    pub(super) fn unpack(&mut self) -> Result<(), EngineError> {
        let Some(mut hop) = self.hop.take() else {
            return Ok(());
        };
        if let Some(coming) = hop.coming.take() {
            let rows = self.side(coming.side).buffer(coming.tensor);
            hop.unpack(coming.packed, rows, &coming.places)?;
        }
        self.hop = Some(hop);
        Ok(())
    }

    /// Whether two ranks of the group are on different nodes.
    fn crosses(&self, from: usize, to: usize) -> bool {
        let hosts = &self.mesh.hosts()[self.first_of_group()..];
        hosts[from] != hosts[to]
    }

    fn first_of_group(&self) -> usize {
        self.mesh.place().dp * self.mesh.parallel().group()
    }
}

/// The messages of both, those of a rank together.
fn by_peer(near: Vec<Transfer>, far: Vec<Transfer>) -> Vec<Transfer> {
    let mut all = [near, far].concat();
    all.sort_by_key(|transfer| transfer.peer);
    all
}

/// Why a tensor of the kernels has memory.
const ROOM: &str = "there is room for the rows of an exchange before it";

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
