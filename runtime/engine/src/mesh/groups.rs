//! A mesh and its process groups.

use super::process_group::ProcessGroup;
use super::sharding::placement_of;
use super::workspace_pool::WorkspacePool;
use crate::error::EngineError;
use moesaic_collectives::topology::host_name;
use moesaic_collectives::{
    Call, Collectives, CommElement, ProgressThread, Slice, Topology, Transfer, with_heartbeat,
};
use moesaic_dist::OpGroup;
use moesaic_plan::{AdaptiveMesh, Parallel, Placement, PlanError, RankCoords, TokenScope};
use moesaic_target::{Buffer, Device};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

/// A rank's coordinates in a mesh, and the process groups in which it exchanges. Cheap to clone;
/// clones share everything, and the layers of one mesh take turns.
#[derive(Clone)]
pub struct Mesh {
    parallel: Parallel,
    place: RankCoords,
    /// `None` means contiguous ranges, as in [`Parallel::experts`].
    placement: Option<Placement>,
    groups: Arc<Mutex<Groups>>,
    /// The host of every rank: ranks of one host are a node for all-to-all schedules.
    hosts: Arc<[String]>,
    /// Whether layers store experts' weights unpacked, so that other ranks can gather them.
    unpacked: bool,
    scope: TokenScope,
}

impl fmt::Debug for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without its groups: a call of another thread may hold their lock for as long as it waits
        // for other ranks.
        f.debug_struct("Mesh")
            .field("parallel", &self.parallel)
            .field("place", &self.place)
            .field("placement", &self.placement)
            .field("scope", &self.scope)
            .finish_non_exhaustive()
    }
}

/// Process groups. All ranks of a group call its operations in the same order.
pub(super) struct Groups {
    /// The thread that progresses exchanges while this rank computes, once a call wants one.
    /// Declared first, so it is dropped before the groups that it drives.
    pub progress_thread: Option<Arc<ProgressThread>>,
    /// All ranks.
    pub world: Box<dyn Collectives>,
    /// Ranks that hold all experts once; these exchange rows.
    pub ep: Box<dyn Collectives>,
    /// Ranks with the shards of the same experts.
    pub expert_tp: Box<dyn Collectives>,
    /// Ranks with the same shards of the same experts.
    pub expert_dp: Box<dyn Collectives>,
    /// Ranks with shards of the same index; where there is one shard, all ranks.
    pub ep_dp: Option<Box<dyn Collectives>>,
    /// The groups of each adaptive parallelism degree in use other than the number of stored
    /// shards.
    by_r: BTreeMap<usize, AdaptiveGroups>,
    /// Memory that calls share.
    pub workspaces: WorkspacePool,
    /// The number of layers that were made on the mesh. All ranks make the same ones.
    layers: usize,
}

/// The process groups of one adaptive parallelism degree.
struct AdaptiveGroups {
    /// Ranks that exchange rows.
    ep: Box<dyn Collectives>,
    /// Ranks among these with the shards of the same experts.
    expert_tp: Box<dyn Collectives>,
    /// Ranks that gather each other's weights.
    gather: Box<dyn Collectives>,
}

impl Groups {
    /// Returns the communicator of a process group at an adaptive parallelism degree.
    pub fn group(&mut self, group: OpGroup, adaptive_r: usize) -> &mut dyn Collectives {
        match (group, self.by_r.get_mut(&adaptive_r)) {
            (OpGroup::World, _) => &mut *self.world,
            (OpGroup::Ep, Some(groups)) => &mut *groups.ep,
            (OpGroup::Ep, None) => &mut *self.ep,
            (OpGroup::ExpertTp, Some(groups)) => &mut *groups.expert_tp,
            (OpGroup::GatherGroup, Some(groups)) => &mut *groups.gather,
            // A degree without groups of its own equals the stored shards, whose groups serve for
            // it. What a rank does alone takes no communicator.
            _ => &mut *self.expert_tp,
        }
    }

    /// Returns the communicator of a process group.
    pub fn process_group(&mut self, in_group: ProcessGroup) -> &mut dyn Collectives {
        match in_group {
            ProcessGroup::World => &mut *self.world,
            ProcessGroup::Ep => &mut *self.ep,
            ProcessGroup::ExpertTp => &mut *self.expert_tp,
            ProcessGroup::ExpertDp => &mut *self.expert_dp,
            ProcessGroup::EpDp => &mut **self.ep_dp.as_mut().unwrap_or(&mut self.world),
        }
    }

    /// Counts a layer that all ranks make now. Returns its label in exchanges, by which ranks that
    /// call two layers in different orders notice it, even if both have the same name.
    pub fn label(&mut self, name: &str) -> String {
        self.layers += 1;
        match self.layers {
            1 => name.to_string(),
            number => format!("{name} #{number}"),
        }
    }

    /// Makes the groups of an adaptive parallelism degree, once. All ranks call it.
    pub fn add(&mut self, by: AdaptiveMesh) -> Result<(), EngineError> {
        if by.is_owner_only() || self.by_r.contains_key(&by.adaptive_r()) {
            return Ok(());
        }
        let rank = self.world.rank();
        let (mesh, RankCoords { dp, ep, .. }) = (by.mesh(), by.place(rank));
        let mut group = |name: &str, color: usize| {
            let call = Call::new(&format!("{name} at r = {}", by.adaptive_r()));
            let group = self.world.split(Some(color as u32), rank as i64, &call)?;
            Ok::<_, EngineError>(group.expect("every rank has a colour"))
        };
        let groups = AdaptiveGroups {
            ep: group("rows", dp)?,
            expert_tp: group("expert_tp", dp * mesh.ep + ep)?,
            gather: group("blocks", by.block(rank).start)?,
        };
        self.by_r.insert(by.adaptive_r(), groups);
        Ok(())
    }

    /// Starts the progress thread, so exchanges continue while this rank computes, where the device
    /// has no streams.
    pub fn start_progress_thread(&mut self) {
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

    /// Does the same as [`Mesh::new`], with another name for this rank's host: ranks with the same
    /// name count as one node.
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
            // A copy of the caller's communicator: messages of the mesh cannot match messages that
            // the caller sends in its own.
            world: group("world", 0)?,
            ep: group("rows", dp)?,
            expert_tp: group("expert_tp", dp * parallel.ep + ep)?,
            expert_dp: group("replicas", ep * parallel.expert_tp + tp)?,
            ep_dp: match parallel.expert_tp {
                // The world has the same ranks then, and a split costs a round over all of them.
                1 => None,
                _ => Some(group("ep_dp", tp)?),
            },
            by_r: BTreeMap::new(),
            workspaces: WorkspacePool::default(),
            layers: 0,
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

    /// Returns the same mesh with another placement of experts. Layers made on it place their
    /// experts so, and parts of tensors, sums and checkpoints follow ([`Mesh::part`],
    /// [`Ranks`](crate::Ranks)). Give each layer with another placement its own mesh. All ranks
    /// pass the same placement.
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

    /// Returns the placement; `None` means contiguous ranges, as in [`Parallel::experts`].
    pub fn placement(&self) -> Option<&Placement> {
        self.placement.as_ref()
    }

    /// Returns the placement of `experts` experts; `None` if they cannot be placed on this mesh.
    pub fn placement_of(&self, experts: usize) -> Option<Placement> {
        placement_of(self.parallel, self.placement(), experts)
    }

    /// Returns the experts that this rank holds of a layer of `experts` experts, in the order in
    /// which it holds them; none if they cannot be placed on this mesh.
    pub fn experts(&self, experts: usize) -> Vec<usize> {
        let placement = self.placement_of(experts);
        placement.map_or(Vec::new(), |all| all.of(self.place.ep).into_owned())
    }

    /// Returns the same mesh for layers that may use any adaptive parallelism degree
    /// ([`Strategy`](moesaic_plan::Strategy)). A layer for inference otherwise packs experts'
    /// weights for a CPU, and ranks cannot gather packed weights.
    pub fn for_any_r(&self) -> Mesh {
        Mesh {
            unpacked: true,
            ..self.clone()
        }
    }

    /// Returns the same mesh with another scope of losses, capacities and selections over tokens.
    /// All ranks pass the same scope.
    #[must_use]
    pub fn over(&self, scope: TokenScope) -> Mesh {
        Mesh {
            scope,
            ..self.clone()
        }
    }

    /// Returns the tokens that losses, capacities and selections over tokens look at.
    pub fn scope(&self) -> TokenScope {
        self.scope
    }

    /// Returns whether layers store experts' weights unpacked.
    pub(super) fn keeps_unpacked(&self) -> bool {
        self.unpacked
    }

    /// Returns how ranks share layers.
    pub fn parallel(&self) -> Parallel {
        self.parallel
    }

    /// Returns the coordinates of this rank.
    pub fn place(&self) -> RankCoords {
        self.place
    }

    /// Returns the number of this rank.
    pub fn rank(&self) -> usize {
        self.parallel.rank(self.place)
    }

    /// Returns the hosts of all ranks.
    pub fn hosts(&self) -> &[String] {
        &self.hosts
    }

    /// Collects bytes of every rank, of any sizes, in the order of ranks: `Some` on the first rank,
    /// `None` on the others.
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
            |buffer: &Arc<Buffer>, first, bytes| Slice::new(buffer, CommElement::U8, first, bytes);
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

    /// Runs work that takes each rank its own time, such as compiling; all ranks meet at its end.
    /// Ranks that are done wait as long as the others are alive, whatever the deadline.
    pub(crate) fn with_heartbeat<T>(
        &self,
        call: &Call,
        work: impl FnOnce() -> Result<T, EngineError>,
    ) -> Result<T, EngineError> {
        with_heartbeat(&mut *self.groups().world, call, work)
    }

    /// Locks the groups. A panic inside an exchange ends them, and their next operation reports
    /// that, so a poisoned lock needs no error of its own.
    pub(super) fn groups(&self) -> MutexGuard<'_, Groups> {
        self.groups
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
