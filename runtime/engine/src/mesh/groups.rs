//! The ranks that a rank has to do with.

use super::workspace_pool::WorkspacePool;
use crate::error::EngineError;
use moesaic_collectives::topology::host_name;
use moesaic_collectives::{
    Call, Collectives, Element, ProgressThread, Slice, Topology, Transfer, with_heartbeat,
};
use moesaic_plan::{AdaptiveMesh, Parallel, Placement, PlanError, RankCoords, TokenScope};
use moesaic_target::{Buffer, Device};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

/// A rank's place in a mesh, and the groups of ranks that it exchanges with. Cheap to
/// clone; clones share everything, and the layers of one mesh take turns.
#[derive(Clone)]
pub struct Mesh {
    parallel: Parallel,
    place: RankCoords,
    /// `None`: as [`Parallel::experts`] says.
    placement: Option<Placement>,
    groups: Arc<Mutex<Groups>>,
    /// Of every rank, by which routes find their nodes.
    hosts: Arc<[String]>,
    /// Whether layers keep experts' weights as other ranks can gather them.
    unpacked: bool,
    scope: TokenScope,
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
    /// What makes exchanges go on while this rank computes, once it is wanted. It ends before
    /// the groups.
    pub progress_thread: Option<Arc<ProgressThread>>,
    /// Everybody.
    pub world: Box<dyn Collectives>,
    /// Those that hold all experts once: rows are exchanged among them.
    pub ep: Box<dyn Collectives>,
    /// Those with the shards of the same experts.
    pub expert_tp: Box<dyn Collectives>,
    /// Those with the same shards of the same experts.
    pub expert_dp: Box<dyn Collectives>,
    /// Those with shards of the same number; where there is one shard, everybody.
    pub ep_dp: Option<Box<dyn Collectives>>,
    /// For each adaptive parallelism degree that was asked for, but that of shards.
    by_r: BTreeMap<usize, AdaptiveGroups>,
    /// Memory that calls borrow.
    pub workspaces: WorkspacePool,
}

/// Groups of a adaptive parallelism degree.
struct AdaptiveGroups {
    /// Rows are exchanged among them.
    ep: Box<dyn Collectives>,
    /// Those of them with the shards of the same experts.
    expert_tp: Box<dyn Collectives>,
    /// Those that gather each other's weights.
    gather: Box<dyn Collectives>,
}

/// GroupId whom something of a pass goes.
#[derive(Clone, Copy, Debug)]
pub(super) enum GroupId {
    World,
    /// Those that rows are exchanged among at that degree.
    Ep(usize),
    /// Those of them whose rows are summed.
    ExpertTp(usize),
    /// Those that gather each other's weights.
    GatherGroup(usize),
    /// Those with shards of the same shared experts.
    SharedTp,
}

impl Groups {
    pub fn group(&mut self, group: GroupId) -> &mut dyn Collectives {
        let of_ways = match group {
            GroupId::Ep(adaptive_r)
            | GroupId::ExpertTp(adaptive_r)
            | GroupId::GatherGroup(adaptive_r) => self.by_r.get_mut(&adaptive_r),
            _ => None,
        };
        match (group, of_ways) {
            (GroupId::World, _) => &mut *self.world,
            (GroupId::Ep(_), Some(groups)) => &mut *groups.ep,
            (GroupId::ExpertTp(_), Some(groups)) => &mut *groups.expert_tp,
            (GroupId::GatherGroup(_), Some(groups)) => &mut *groups.gather,
            (GroupId::Ep(_), None) => &mut *self.ep,
            // Without groups of their own ranks multiply with what they have.
            (_, _) => &mut *self.expert_tp,
        }
    }

    /// Makes the groups of a adaptive parallelism degree, once. All ranks call it.
    pub fn add(&mut self, by: AdaptiveMesh) -> Result<(), EngineError> {
        if by.is_owner_only() || self.by_r.contains_key(&by.count()) {
            return Ok(());
        }
        let rank = self.world.rank();
        let (mesh, RankCoords { dp, ep, .. }) = (by.mesh(), by.place(rank));
        let mut group = |name: &str, color: usize| {
            let call = Call::new(&format!("{name} of {} adaptive_r", by.count()));
            let group = self.world.split(Some(color as u32), rank as i64, &call)?;
            Ok::<_, EngineError>(group.expect("every rank has a colour"))
        };
        let groups = AdaptiveGroups {
            ep: group("rows", dp)?,
            expert_tp: group("slices", dp * mesh.ep + ep)?,
            gather: group("blocks", by.block(rank).start)?,
        };
        self.by_r.insert(by.count(), groups);
        Ok(())
    }

    /// From now on exchanges go on while this rank computes, where ranks have no streams.
    pub fn help(&mut self) {
        if self.progress_thread.is_none() {
            self.progress_thread = self.ep.progress_thread();
        }
    }
}

impl Mesh {
    /// Makes the groups of a mesh. Every rank of `world` calls it with the same mesh.
    ///
    /// # Errors
    /// [`EngineError::Plan`] when the mesh is for another number of ranks;
    /// [`EngineError::Collective`].
    pub fn new(world: &mut dyn Collectives, parallel: Parallel) -> Result<Mesh, EngineError> {
        Mesh::on_host(world, parallel, &host_name())
    }

    /// As [`Mesh::new`], with another name for this rank's host: ranks of one name are a node
    /// to routes.
    ///
    /// # Errors
    /// As [`Mesh::new`].
    pub fn on_host(
        world: &mut dyn Collectives,
        parallel: Parallel,
        host: &str,
    ) -> Result<Mesh, EngineError> {
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
        let RankCoords { dp, ep, tp } = place;
        let mut group = |name: &str, color: usize| {
            let call = Call::new(&format!("{name} of a mesh"));
            let (color, key) = (Some(color as u32), world.rank() as i64);
            let group = world.split(color, key, &call)?;
            Ok::<_, EngineError>(group.expect("every rank has a colour"))
        };
        let groups = Groups {
            progress_thread: None,
            world: group("world", 0)?,
            ep: group("rows", dp)?,
            expert_tp: group("slices", dp * parallel.ep + ep)?,
            expert_dp: group("replicas", ep * parallel.expert_tp + tp)?,
            ep_dp: match parallel.expert_tp {
                1 => None,
                _ => Some(group("same slices", tp)?),
            },
            by_r: BTreeMap::new(),
            workspaces: WorkspacePool::default(),
        };
        let hosts = Topology::of(world, host, &Call::new("hosts of a mesh"))?.hosts;
        Ok(Mesh {
            parallel,
            place,
            placement: None,
            groups: Arc::new(Mutex::new(groups)),
            hosts: hosts.into(),
            unpacked: false,
            scope: TokenScope::Rank,
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

    /// The same mesh for layers that may go any adaptive parallelism degree
    /// ([`Strategy`](moesaic_plan::Strategy)): a CPU has experts' weights packed otherwise,
    /// where a layer does not train, and ranks cannot gather those.
    pub fn for_any_r(&self) -> Mesh {
        Mesh {
            unpacked: true,
            ..self.clone()
        }
    }

    /// The same mesh for layers whose losses, capacities, and selections over tokens look at
    /// these tokens. All ranks choose alike.
    #[must_use]
    pub fn over(&self, scope: TokenScope) -> Mesh {
        Mesh {
            scope,
            ..self.clone()
        }
    }

    /// Whose tokens losses, capacities, and selections over tokens look at.
    pub fn scope(&self) -> TokenScope {
        self.scope
    }

    /// Whether weights of experts stay as they are.
    pub(super) fn keeps_unpacked(&self) -> bool {
        self.unpacked
    }

    /// How ranks share layers.
    pub fn parallel(&self) -> Parallel {
        self.parallel
    }

    /// Where this rank is.
    pub fn place(&self) -> RankCoords {
        self.place
    }

    /// The number of this rank.
    pub fn rank(&self) -> usize {
        self.parallel.rank(self.place)
    }

    /// The hosts of all ranks.
    pub fn hosts(&self) -> &[String] {
        &self.hosts
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
        let sizes = world.gather_numbers(&[own.len() as u64], &call)?.concat();
        let sizes: Vec<usize> = sizes.into_iter().map(|size| size as usize).collect();
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

    /// Runs work of each rank's own time, such as compiling, at whose end all ranks meet. Ranks
    /// that are done wait as long as the others are alive, whatever their deadline is.
    pub(super) fn with_heartbeat<T>(
        &self,
        call: &Call,
        work: impl FnOnce() -> Result<T, EngineError>,
    ) -> Result<T, EngineError> {
        with_heartbeat(&mut *self.groups().world, call, work)
    }

    /// A panic in an exchange has ended the groups, which say so themselves.
    pub(super) fn groups(&self) -> MutexGuard<'_, Groups> {
        self.groups
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
