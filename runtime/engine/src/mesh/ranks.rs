//! Host memory group the ranks of a mesh: what training sums, gathers and hands out.

use super::groups::{Groups, Mesh};
use super::sharding::Sharding;
use crate::engine::Engine;
use crate::error::EngineError;
use bytemuck::{cast_slice, cast_slice_mut};
use moesaic_collectives::{
    Algorithm, Call, CollectiveError, Collectives, Element, Reduction, Slice, Transfer,
};
use moesaic_plan::Parallel;
use moesaic_target::{Buffer, Device};
use std::sync::Arc;

/// Which ranks of a mesh do something together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ProcessGroup {
    /// All. They have the same of what is no expert's: router, whole shared experts, and all
    /// that a model has around its layers.
    World,
    /// Those that hold all experts once.
    Ep,
    /// Those with the shards of the same experts.
    ExpertTp,
    /// Those with the same shards of the same experts. They have the same weights of
    /// experts.
    ExpertDp,
    /// Those with shards of the same number, of whatever experts. They have the same of
    /// shared experts that are sliced.
    EpDp,
}

impl ProcessGroup {
    /// Who has the same of a parameter on a mesh, by its name: `experts.` and what follows,
    /// with anything in front, is of experts; `shared.0.` and what follows, but for its
    /// `router.`, of shards of a shared expert where the mesh has such
    /// ([`SharedExperts`](moesaic_plan::SharedExperts)); all else is everybody's.
    pub fn of(mesh: Parallel, name: &str) -> ProcessGroup {
        Sharding::of(mesh, name).among
    }
}

/// What a rank exchanges with others from its own memory. Every call is made by all
/// ranks that it is among, in the same order and with the same words for `what` it is,
/// which errors give back. Cheap to clone.
#[derive(Clone)]
pub struct Ranks {
    mesh: Mesh,
    device: Arc<dyn Device>,
}

impl Engine {
    /// The ranks of a mesh, to exchange what lies in host memory. It goes over this
    /// engine's device, which has to be that of the mesh.
    pub fn ranks(&self, mesh: &Mesh) -> Ranks {
        Ranks::new(mesh, self.device())
    }
}

impl Groups {
    pub fn among(&mut self, among: ProcessGroup) -> &mut dyn Collectives {
        match among {
            ProcessGroup::World => &mut *self.world,
            ProcessGroup::Ep => &mut *self.ep,
            ProcessGroup::ExpertTp => &mut *self.expert_tp,
            ProcessGroup::ExpertDp => &mut *self.expert_dp,
            ProcessGroup::EpDp => &mut **self.ep_dp.as_mut().unwrap_or(&mut self.world),
        }
    }
}

impl Ranks {
    pub(super) fn new(mesh: &Mesh, device: &Arc<dyn Device>) -> Ranks {
        Ranks {
            mesh: mesh.clone(),
            device: Arc::clone(device),
        }
    }

    /// Their mesh.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// The ranks of a group that this one is in, and its own place among them.
    pub fn among(&self, among: ProcessGroup) -> (usize, usize) {
        let mut groups = self.mesh.groups();
        let group = groups.among(among);
        (group.rank(), group.size())
    }

    /// Adds up what all have, in the order of ranks: the same bytes on each.
    ///
    /// # Errors
    /// [`EngineError::Collective`], also for other numbers of values elsewhere.
    pub fn sum(
        &self,
        values: &mut [f32],
        among: ProcessGroup,
        what: &str,
    ) -> Result<(), EngineError> {
        let mut groups = self.mesh.groups();
        let group = groups.among(among);
        if group.size() == 1 {
            return Ok(());
        }
        let buffer = self.buffer(cast_slice(values))?;
        let data = Slice::new(&buffer, Element::F32, 0, values.len())?;
        let sum = group.all_reduce(&data, &data, Reduction::Sum, &Call::new(what))?;
        sum.wait()?;
        Ok(self.device.download(&buffer, 0, cast_slice_mut(values))?)
    }

    /// The same of a few numbers in double precision.
    ///
    /// # Errors
    /// As [`Ranks::sum`].
    pub fn sum_f64(
        &self,
        values: &[f64],
        among: ProcessGroup,
        what: &str,
    ) -> Result<Vec<f64>, EngineError> {
        self.fold_f64(values, among, what, (0.0, |sum, value| sum + value))
    }

    /// The largest of all ranks, of each number.
    ///
    /// # Errors
    /// As [`Ranks::sum`].
    pub fn max_f64(
        &self,
        values: &[f64],
        among: ProcessGroup,
        what: &str,
    ) -> Result<Vec<f64>, EngineError> {
        self.fold_f64(values, among, what, (f64::NEG_INFINITY, f64::max))
    }

    /// What all have, folded in the order of ranks.
    fn fold_f64(
        &self,
        values: &[f64],
        among: ProcessGroup,
        what: &str,
        (first, fold): (f64, fn(f64, f64) -> f64),
    ) -> Result<Vec<f64>, EngineError> {
        let all = self.gather_bytes(cast_slice(values), among, what)?;
        let mut folded = vec![first; values.len()];
        for (rank, part) in all.iter().enumerate() {
            let (theirs, rest) = part.as_chunks::<8>();
            if theirs.len() != values.len() || !rest.is_empty() {
                let (ours, theirs) = (8 * values.len(), part.len());
                let difference =
                    format!("{what}: {ours} bytes here and {theirs} of rank {rank} of these");
                let differences = vec![difference];
                return Err(CollectiveError::Disagreement { differences }.into());
            }
            for (folded, value) in folded.iter_mut().zip(theirs) {
                *folded = fold(*folded, f64::from_ne_bytes(*value));
            }
        }
        Ok(folded)
    }

    /// The values of all, as many of each, in the order of ranks.
    ///
    /// # Errors
    /// As [`Ranks::sum`].
    pub fn gather(
        &self,
        own: &[f32],
        among: ProcessGroup,
        what: &str,
    ) -> Result<Vec<f32>, EngineError> {
        let mut groups = self.mesh.groups();
        let group = groups.among(among);
        if group.size() == 1 {
            return Ok(own.to_vec());
        }
        let mut all = vec![0.0f32; own.len() * group.size()];
        let first = group.rank() * own.len();
        all[first..first + own.len()].copy_from_slice(own);
        let buffer = self.buffer(cast_slice(&all))?;
        let input = Slice::new(&buffer, Element::F32, first, own.len())?;
        let output = Slice::new(&buffer, Element::F32, 0, all.len())?;
        group
            .all_gather(&input, &output, &Call::new(what))?
            .wait()?;
        self.device.download(&buffer, 0, cast_slice_mut(&mut all))?;
        Ok(all)
    }

    /// This rank's part of values that all have, as equal as can be, in the order of
    /// ranks; the inverse of [`Ranks::gather`] where they share evenly.
    pub fn scattered<'v, T>(&self, values: &'v [T], among: ProcessGroup) -> &'v [T] {
        let (rank, size) = self.among(among);
        let edge = |rank: usize| rank * values.len() / size;
        &values[edge(rank)..edge(rank + 1)]
    }

    /// Part `q` of what all have, added up in the order of ranks, for rank `q`: as many
    /// values everywhere, which the number of ranks divides.
    ///
    /// # Errors
    /// As [`Ranks::sum`].
    pub fn sum_scattered(
        &self,
        own: &[f32],
        among: ProcessGroup,
        what: &str,
    ) -> Result<Vec<f32>, EngineError> {
        let mut groups = self.mesh.groups();
        let group = groups.among(among);
        let mut part = vec![0.0f32; own.len() / group.size()];
        let from = self.buffer(cast_slice(own))?;
        let to = self.buffer(cast_slice(&part))?;
        let input = Slice::new(&from, Element::F32, 0, own.len())?;
        let output = Slice::new(&to, Element::F32, 0, part.len())?;
        group
            .reduce_scatter(&input, &output, Reduction::Sum, &Call::new(what))?
            .wait()?;
        self.device.download(&to, 0, cast_slice_mut(&mut part))?;
        Ok(part)
    }

    /// Hands a part of any size to each: `parts[q]` to rank `q`. Returns what they have
    /// for this one, in the order of ranks. Sizes are exchanged first.
    ///
    /// # Errors
    /// As [`Ranks::sum`]; also when there is not a part for each.
    pub fn all_to_all(
        &self,
        parts: &[Vec<f32>],
        among: ProcessGroup,
        what: &str,
    ) -> Result<Vec<Vec<f32>>, EngineError> {
        let sends: Vec<usize> = parts.iter().map(Vec::len).collect();
        let told: Vec<u64> = sends.iter().map(|&size| size as u64).collect();
        let mut groups = self.mesh.groups();
        let group = groups.among(among);
        let told = group.gather_numbers(&told, &Call::new(what))?;
        let here = |to: &Vec<u64>| to.get(group.rank()).map_or(0, |size| *size as usize);
        let receives: Vec<usize> = told.iter().map(here).collect();
        let mut all = vec![0.0f32; receives.iter().sum()];
        let sent = parts.concat();
        let (from, to) = (
            self.buffer(cast_slice(&sent))?,
            self.buffer(cast_slice(&all))?,
        );
        let input = Slice::new(&from, Element::F32, 0, sent.len())?;
        let output = Slice::new(&to, Element::F32, 0, all.len())?;
        let call = Call::new(what);
        group
            .all_to_all_v(&input, &sends, &output, &receives, Algorithm::Direct, &call)?
            .wait()?;
        self.device.download(&to, 0, cast_slice_mut(&mut all))?;
        let mut rest = all.into_iter();
        let part = |size: usize| rest.by_ref().take(size).collect();
        Ok(receives.into_iter().map(part).collect())
    }

    /// Hands bytes to some of a group, and gets some: peers with bytes, and peers with the
    /// number of bytes that they have for this rank, several of one in the same order on
    /// both parts. Returns what arrives.
    ///
    /// # Errors
    /// [`EngineError::Collective`], also where both parts expect other sizes.
    pub fn trade(
        &self,
        sends: &[(usize, Vec<u8>)],
        receives: &[(usize, usize)],
        among: ProcessGroup,
        what: &str,
    ) -> Result<Vec<Vec<u8>>, EngineError> {
        let sent: Vec<&[u8]> = sends.iter().map(|(_, bytes)| &**bytes).collect();
        let from = self.buffer(&sent.concat())?;
        let to = self.buffer(&vec![0; receives.iter().map(|(_, size)| size).sum()])?;
        let sizes = sends.iter().map(|(peer, bytes)| (*peer, bytes.len()));
        let sends = transfers(&from, sizes)?;
        let receives = transfers(&to, receives.iter().copied())?;
        let mut groups = self.mesh.groups();
        let group = groups.among(among);
        group
            .exchange(&sends, &receives, &Call::new(what))?
            .wait()?;
        let arrived = |one: &Transfer| {
            let mut bytes = vec![0; one.slice.bytes()];
            self.device.download(&to, one.slice.offset(), &mut bytes)?;
            Ok(bytes)
        };
        receives.iter().map(arrived).collect()
    }

    /// Bytes of all, of any sizes, in the order of ranks.
    ///
    /// # Errors
    /// As [`Ranks::sum`].
    pub fn gather_bytes(
        &self,
        own: &[u8],
        among: ProcessGroup,
        what: &str,
    ) -> Result<Vec<Vec<u8>>, EngineError> {
        Ok(self
            .mesh
            .groups()
            .among(among)
            .gather_bytes(own, &Call::new(what))?)
    }

    /// What the first of them has becomes everybody's.
    ///
    /// # Errors
    /// As [`Ranks::sum`].
    pub fn broadcast(
        &self,
        bytes: &mut [u8],
        among: ProcessGroup,
        what: &str,
    ) -> Result<(), EngineError> {
        let mut groups = self.mesh.groups();
        let group = groups.among(among);
        if group.size() == 1 {
            return Ok(());
        }
        let buffer = self.buffer(bytes)?;
        let data = Slice::new(&buffer, Element::U8, 0, bytes.len())?;
        group.broadcast(&data, 0, &Call::new(what))?.wait()?;
        Ok(self.device.download(&buffer, 0, bytes)?)
    }

    /// Waits for all.
    ///
    /// # Errors
    /// [`EngineError::Collective`].
    pub fn barrier(&self, what: &str) -> Result<(), EngineError> {
        let mut groups = self.mesh.groups();
        Ok(groups.world.barrier(&Call::new(what))?.wait()?)
    }

    /// Memory of the device with these bytes.
    pub(super) fn buffer(&self, bytes: &[u8]) -> Result<Arc<Buffer>, EngineError> {
        let buffer = Arc::new(self.device.alloc(bytes.len().max(4))?);
        self.device.upload(bytes, &buffer, 0)?;
        Ok(buffer)
    }

    pub(super) fn device(&self) -> &dyn Device {
        &*self.device
    }
}

/// Bytes of a buffer, one peer's after the other's.
fn transfers(
    buffer: &Arc<Buffer>,
    sizes: impl Iterator<Item = (usize, usize)>,
) -> Result<Vec<Transfer>, EngineError> {
    let mut first = 0;
    let transfer = |(peer, bytes)| {
        first += bytes;
        let slice = Slice::new(buffer, Element::U8, first - bytes, bytes)?;
        Ok(Transfer { peer, slice })
    };
    sizes.map(transfer).collect()
}
