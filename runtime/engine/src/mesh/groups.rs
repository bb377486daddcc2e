//! The ranks that a rank has to do with.

use crate::error::EngineError;
use moesaic_collectives::{Call, Collectives, Element, Slice, Transfer};
use moesaic_plan::{Parallel, Place, Placement, PlanError};
use moesaic_target::{Buffer, Device};
use std::sync::{Arc, Mutex, MutexGuard};

/// A rank's place in a mesh, and the groups of ranks that it exchanges with. Cheap to
/// clone; clones share everything, and the layers of one mesh take turns.
#[derive(Clone)]
pub struct Mesh {
    parallel: Parallel,
    place: Place,
    /// `None`: as [`Parallel::experts`] says.
    placement: Option<Placement>,
    groups: Arc<Mutex<Groups>>,
}

/// Which groups of a mesh have which of so many experts, if they can.
pub(super) fn placement_of(
    mesh: Parallel,
    placement: Option<&Placement>,
    experts: usize,
) -> Option<Placement> {
    match placement {
        Some(placement) => (placement.experts() == experts).then(|| placement.clone()),
        None => (experts >= mesh.ep).then(|| Placement::contiguous(mesh.ep, experts)),
    }
}

/// Each is called by all of its ranks, in the same order.
pub(super) struct Groups {
    /// Everybody.
    pub world: Box<dyn Collectives>,
    /// Those that hold all experts once: rows are exchanged among them.
    pub rows: Box<dyn Collectives>,
    /// Those with the slices of the same experts.
    pub slices: Box<dyn Collectives>,
    /// Those with the same slices of the same experts.
    pub replicas: Box<dyn Collectives>,
    /// Those with slices of the same number; where there is one slice, everybody.
    pub same_slice: Option<Box<dyn Collectives>>,
}

impl Mesh {
    /// Makes the groups of a mesh. Every rank of `world` calls it with the same mesh.
    ///
    /// # Errors
    /// [`EngineError::Plan`] when the mesh is for another number of ranks;
    /// [`EngineError::Collective`].
    pub fn new(world: &mut dyn Collectives, parallel: Parallel) -> Result<Mesh, EngineError> {
        let (wanted, ranks) = (parallel.ranks(), world.size());
        if wanted != ranks {
            let mesh = parallel;
            let error = moesaic_plan::MeshError::OtherSize {
                mesh,
                wanted,
                ranks,
            };
            return Err(EngineError::Plan(error.into()));
        }
        let place = parallel.place(world.rank()).map_err(PlanError::from)?;
        let Place { dp, ep, shard } = place;
        let mut group = |name: &str, color: usize| {
            let call = Call::new(&format!("{name} of a mesh"));
            let (color, key) = (Some(color as u32), world.rank() as i64);
            let group = world.split(color, key, &call)?;
            Ok::<_, EngineError>(group.expect("every rank has a colour"))
        };
        let groups = Groups {
            world: group("world", 0)?,
            rows: group("rows", dp)?,
            slices: group("slices", dp * parallel.ep + ep)?,
            replicas: group("replicas", ep * parallel.shards + shard)?,
            same_slice: match parallel.shards {
                1 => None,
                _ => Some(group("same slices", shard)?),
            },
        };
        Ok(Mesh {
            parallel,
            place,
            placement: None,
            groups: Arc::new(Mutex::new(groups)),
        })
    }

    /// The same ranks where experts are placed otherwise. Layers that are made on it have
    /// their experts so, and parts of tensors, sums and checkpoints follow ([`Mesh::part`],
    /// [`Ranks`](crate::Ranks)). Layers with other placements take one each. All ranks place
    /// alike.
    ///
    /// # Errors
    /// [`EngineError::Plan`] for a placement on another number of groups.
    pub fn placed(&self, placement: &Placement) -> Result<Mesh, EngineError> {
        let checked = placement.check(&self.parallel, placement.experts());
        checked.map_err(PlanError::from)?;
        Ok(Mesh {
            placement: Some(placement.clone()),
            ..self.clone()
        })
    }

    /// Which groups have which experts; `None`: as [`Parallel::experts`] says.
    pub fn placement(&self) -> Option<&Placement> {
        self.placement.as_ref()
    }

    /// The same of a layer of so many experts; `None` if it cannot be placed so.
    pub fn placement_of(&self, experts: usize) -> Option<Placement> {
        placement_of(self.parallel, self.placement(), experts)
    }

    /// How ranks share layers.
    pub fn parallel(&self) -> Parallel {
        self.parallel
    }

    /// Where this rank is.
    pub fn place(&self) -> Place {
        self.place
    }

    /// The number of this rank.
    pub fn rank(&self) -> usize {
        self.parallel.rank(self.place)
    }

    /// Bytes of every rank, of any sizes, in the order of ranks: on the first rank, `None` on
    /// the others.
    ///
    /// # Errors
    /// [`EngineError::Collective`], [`EngineError::Device`] when memory runs out.
    pub fn collect(
        &self,
        device: &dyn Device,
        own: &[u8],
    ) -> Result<Option<Vec<Vec<u8>>>, EngineError> {
        let world = &mut self.groups().world;
        let call = Call::new("collected by the first rank");
        let sizes = world.gather_bytes(&(own.len() as u64).to_le_bytes(), &call)?;
        let size = |bytes: &Vec<u8>| bytes.as_slice().try_into().map_or(0, u64::from_le_bytes);
        let sizes: Vec<usize> = sizes.iter().map(|bytes| size(bytes) as usize).collect();
        let buffer = |bytes: usize| Ok::<_, EngineError>(Arc::new(device.alloc(bytes.max(64))?));
        let slice =
            |buffer: &Arc<Buffer>, first, bytes| Slice::new(buffer, Element::U8, first, bytes);
        let sent = buffer(own.len())?;
        device.upload(own, &sent, 0)?;
        let to_first = Transfer {
            peer: 0,
            slice: slice(&sent, 0, own.len())?,
        };
        let all = match world.rank() {
            0 => buffer(sizes.iter().sum())?,
            _ => buffer(0)?,
        };
        let (mut first, mut receives) = (0, Vec::new());
        for (peer, &bytes) in sizes.iter().enumerate().filter(|_| world.rank() == 0) {
            let slice = slice(&all, first, bytes)?;
            receives.push(Transfer { peer, slice });
            first += bytes;
        }
        world.exchange(&[to_first], &receives, &call)?.wait()?;
        if world.rank() > 0 {
            return Ok(None);
        }
        let part = |received: &Transfer| {
            let mut bytes = vec![0; received.slice.bytes()];
            device.download(&all, received.slice.offset(), &mut bytes)?;
            Ok(bytes)
        };
        receives
            .iter()
            .map(part)
            .collect::<Result<_, _>>()
            .map(Some)
    }

    /// A panic in an exchange has ended the groups, which say so themselves.
    pub(super) fn groups(&self) -> MutexGuard<'_, Groups> {
        self.groups
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
