//! Exchanges of host memory between the ranks of a mesh: sums, gathers and broadcasts for training.

use super::groups::Mesh;
use super::process_group::ProcessGroup;
use crate::engine::Engine;
use crate::error::EngineError;
use bytemuck::{cast_slice, cast_slice_mut};
use moesaic_collectives::{
    Algorithm, Call, CollectiveError, CommElement, Handle, Reduction, Slice, Transfer,
};
use moesaic_target::{Buffer, Device};
use std::sync::Arc;

/// A handle to exchange host memory with other ranks. All ranks of the group make every call, in
/// the same order and with the same text for `what`, which errors repeat. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Ranks {
    mesh: Mesh,
    device: Arc<dyn Device>,
}

impl Engine {
    /// Returns a handle to exchange host memory between the ranks of a mesh. It uses this engine's
    /// device, which must be the mesh's.
    pub fn ranks(&self, mesh: &Mesh) -> Ranks {
        Ranks::new(mesh, self.device())
    }
}

impl Ranks {
    pub(super) fn new(mesh: &Mesh, device: &Arc<dyn Device>) -> Ranks {
        Ranks {
            mesh: mesh.clone(),
            device: Arc::clone(device),
        }
    }

    /// Returns the mesh.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Returns this rank's index in a group, and the size of the group.
    pub fn rank_and_size(&self, in_group: ProcessGroup) -> (usize, usize) {
        let mut groups = self.mesh.groups();
        let group = groups.process_group(in_group);
        (group.rank(), group.size())
    }

    /// Sums the values of all ranks in rank order: every rank gets the same bytes.
    ///
    /// # Errors
    /// [`EngineError::Collective`], also for other numbers of values elsewhere.
    pub fn sum(
        &self,
        values: &mut [f32],
        in_group: ProcessGroup,
        what: &str,
    ) -> Result<(), EngineError> {
        let mut groups = self.mesh.groups();
        let group = groups.process_group(in_group);
        if group.size() == 1 {
            return Ok(());
        }
        let buffer = self.buffer(cast_slice(values))?;
        let data = Slice::new(&buffer, CommElement::F32, 0, values.len())?;
        let sum = group.all_reduce(&data, &data, Reduction::Sum, &Call::new(what))?;
        sum.wait()?;
        Ok(self.device.download(&buffer, 0, cast_slice_mut(values))?)
    }

    /// Sums a few numbers in double precision.
    ///
    /// # Errors
    /// As [`Ranks::sum`].
    pub fn sum_f64(
        &self,
        values: &[f64],
        in_group: ProcessGroup,
        what: &str,
    ) -> Result<Vec<f64>, EngineError> {
        self.fold_f64(values, in_group, what, (0.0, |sum, value| sum + value))
    }

    /// Returns the maximum over ranks of each number.
    ///
    /// # Errors
    /// As [`Ranks::sum`].
    pub fn max_f64(
        &self,
        values: &[f64],
        in_group: ProcessGroup,
        what: &str,
    ) -> Result<Vec<f64>, EngineError> {
        self.fold_f64(values, in_group, what, (f64::NEG_INFINITY, f64::max))
    }

    /// Folds the numbers of all ranks in rank order.
    fn fold_f64(
        &self,
        values: &[f64],
        in_group: ProcessGroup,
        what: &str,
        (first, fold): (f64, fn(f64, f64) -> f64),
    ) -> Result<Vec<f64>, EngineError> {
        // Gathered and folded here instead of reduced: collectives have no f64, and a fold in rank
        // order gives every rank the same bits.
        let all = self.gather_bytes(cast_slice(values), in_group, what)?;
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

    /// Gathers the values of all ranks, the same number from each, in rank order.
    ///
    /// # Errors
    /// As [`Ranks::sum`].
    pub fn gather(
        &self,
        own: &[f32],
        in_group: ProcessGroup,
        what: &str,
    ) -> Result<Vec<f32>, EngineError> {
        let mut groups = self.mesh.groups();
        let group = groups.process_group(in_group);
        if group.size() == 1 {
            return Ok(own.to_vec());
        }
        let mut all = vec![0.0f32; own.len() * group.size()];
        let first = group.rank() * own.len();
        all[first..first + own.len()].copy_from_slice(own);
        let buffer = self.buffer(cast_slice(&all))?;
        let input = Slice::new(&buffer, CommElement::F32, first, own.len())?;
        let output = Slice::new(&buffer, CommElement::F32, 0, all.len())?;
        group
            .all_gather(&input, &output, &Call::new(what))?
            .wait()?;
        self.device.download(&buffer, 0, cast_slice_mut(&mut all))?;
        Ok(all)
    }

    /// Returns this rank's part of values that all ranks have. Parts are as equal as possible, in
    /// rank order. This is the inverse of [`Ranks::gather`] where the parts are equal.
    pub fn scattered<'v, T>(&self, values: &'v [T], in_group: ProcessGroup) -> &'v [T] {
        let (rank, size) = self.rank_and_size(in_group);
        let edge = |rank: usize| rank * values.len() / size;
        &values[edge(rank)..edge(rank + 1)]
    }

    /// Reduce-scatters values: rank `q` gets the sum, in rank order, of part `q`. All ranks pass
    /// the same number of values, a multiple of the number of ranks.
    ///
    /// # Errors
    /// As [`Ranks::sum`].
    pub fn sum_scattered(
        &self,
        own: &[f32],
        in_group: ProcessGroup,
        what: &str,
    ) -> Result<Vec<f32>, EngineError> {
        let mut groups = self.mesh.groups();
        let group = groups.process_group(in_group);
        let mut part = vec![0.0f32; own.len() / group.size()];
        let from = self.buffer(cast_slice(own))?;
        let to = self.buffer(cast_slice(&part))?;
        let input = Slice::new(&from, CommElement::F32, 0, own.len())?;
        let output = Slice::new(&to, CommElement::F32, 0, part.len())?;
        group
            .reduce_scatter(&input, &output, Reduction::Sum, &Call::new(what))?
            .wait()?;
        self.device.download(&to, 0, cast_slice_mut(&mut part))?;
        Ok(part)
    }

    /// Sends `parts[q]` to rank `q` and returns the parts for this rank, in rank order. Parts may
    /// have any size; their sizes are exchanged first.
    ///
    /// # Errors
    /// As [`Ranks::sum`]; also when there is not a part for each.
    pub fn all_to_all(
        &self,
        parts: &[Vec<f32>],
        in_group: ProcessGroup,
        what: &str,
    ) -> Result<Vec<Vec<f32>>, EngineError> {
        let sizes: Vec<u64> = parts.iter().map(|part| part.len() as u64).collect();
        // In a block of its own: the exchange itself takes the groups again.
        let sizes = {
            let mut groups = self.mesh.groups();
            let group = groups.process_group(in_group);
            let sizes = group.gather_numbers(&sizes, &Call::new(what))?;
            let here = |to: &Vec<u64>| to.get(group.rank()).map_or(0, |size| *size as usize);
            sizes.iter().map(here).collect::<Vec<_>>()
        };
        let parts: Vec<&[u8]> = parts.iter().map(|part| cast_slice(part)).collect();
        let bytes = sizes.iter().map(|size| size * size_of::<f32>()).collect();
        let request = self.start_all_to_all(Algorithm::Direct, &parts, bytes, in_group, what)?;
        let all = request.wait()?;
        Ok(all.iter().map(|part| floats(part)).collect())
    }

    /// Starts to send `parts[q]` to rank `q` by an algorithm; `sizes` are the bytes that every rank
    /// sends here.
    pub(crate) fn start_all_to_all(
        &self,
        algorithm: Algorithm,
        parts: &[&[u8]],
        sizes: Vec<usize>,
        in_group: ProcessGroup,
        what: &str,
    ) -> Result<PartsInFlight, EngineError> {
        let sends: Vec<usize> = parts.iter().map(|part| part.len()).collect();
        let (sent, arriving) = (parts.concat(), sizes.iter().sum::<usize>());
        let from = self.buffer(&sent)?;
        let to = Arc::new(self.device.alloc(arriving.max(4))?);
        let input = Slice::new(&from, CommElement::U8, 0, sent.len())?;
        let output = Slice::new(&to, CommElement::U8, 0, arriving)?;
        let mut groups = self.mesh.groups();
        let group = groups.process_group(in_group);
        let call = Call::new(what);
        let request = group.all_to_all_v(&input, &sends, &output, &sizes, algorithm, &call)?;
        Ok(PartsInFlight {
            request,
            device: Arc::clone(&self.device),
            arrived: to,
            sizes,
        })
    }

    /// Starts the thread that progresses exchanges while this rank computes.
    pub(crate) fn start_progress_thread(&self) {
        self.mesh.groups().start_progress_thread();
    }

    /// Sends bytes to some ranks of a group and receives from some: `(peer, bytes)` pairs to send,
    /// and `(peer, length)` pairs to receive. Several messages between two ranks must have the same
    /// order on both. Returns the received bytes.
    ///
    /// # Errors
    /// [`EngineError::Collective`], also where both parts expect other sizes.
    pub fn trade(
        &self,
        sends: &[(usize, Vec<u8>)],
        receives: &[(usize, usize)],
        in_group: ProcessGroup,
        what: &str,
    ) -> Result<Vec<Vec<u8>>, EngineError> {
        let sent: Vec<&[u8]> = sends.iter().map(|(_, bytes)| &**bytes).collect();
        let from = self.buffer(&sent.concat())?;
        let to = self.buffer(&vec![0; receives.iter().map(|(_, size)| size).sum()])?;
        let sizes = sends.iter().map(|(peer, bytes)| (*peer, bytes.len()));
        let sends = transfers(&from, sizes)?;
        let receives = transfers(&to, receives.iter().copied())?;
        let mut groups = self.mesh.groups();
        let group = groups.process_group(in_group);
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

    /// Gathers bytes of all ranks, of any sizes, in rank order.
    ///
    /// # Errors
    /// As [`Ranks::sum`].
    pub fn gather_bytes(
        &self,
        own: &[u8],
        in_group: ProcessGroup,
        what: &str,
    ) -> Result<Vec<Vec<u8>>, EngineError> {
        Ok(self
            .mesh
            .groups()
            .process_group(in_group)
            .gather_bytes(own, &Call::new(what))?)
    }

    /// Broadcasts the values of the group's first rank.
    ///
    /// # Errors
    /// As [`Ranks::sum`].
    pub fn broadcast(
        &self,
        bytes: &mut [u8],
        in_group: ProcessGroup,
        what: &str,
    ) -> Result<(), EngineError> {
        let mut groups = self.mesh.groups();
        let group = groups.process_group(in_group);
        if group.size() == 1 {
            return Ok(());
        }
        let buffer = self.buffer(bytes)?;
        let data = Slice::new(&buffer, CommElement::U8, 0, bytes.len())?;
        group.broadcast(&data, 0, &Call::new(what))?.wait()?;
        Ok(self.device.download(&buffer, 0, bytes)?)
    }

    /// Waits until all ranks of the mesh have called it.
    ///
    /// # Errors
    /// [`EngineError::Collective`].
    pub fn barrier(&self, what: &str) -> Result<(), EngineError> {
        let mut groups = self.mesh.groups();
        Ok(groups.world.barrier(&Call::new(what))?.wait()?)
    }

    /// Uploads bytes into new device memory.
    pub(super) fn buffer(&self, bytes: &[u8]) -> Result<Arc<Buffer>, EngineError> {
        let buffer = Arc::new(self.device.alloc(bytes.len().max(4))?);
        self.device.upload(bytes, &buffer, 0)?;
        Ok(buffer)
    }

    pub(super) fn device(&self) -> &dyn Device {
        &*self.device
    }
}

/// Returns numbers that came as bytes.
pub(crate) fn floats(bytes: &[u8]) -> Vec<f32> {
    let mut numbers = vec![0.0; bytes.len() / size_of::<f32>()];
    cast_slice_mut(&mut numbers).copy_from_slice(bytes);
    numbers
}

/// Parts of host memory on their way to this rank.
pub(crate) struct PartsInFlight {
    request: Handle,
    device: Arc<dyn Device>,
    arrived: Arc<Buffer>,
    /// The bytes of each rank.
    sizes: Vec<usize>,
}

impl PartsInFlight {
    /// Waits for the parts and returns them in rank order.
    pub fn wait(self) -> Result<Vec<Vec<u8>>, EngineError> {
        // First: only what the device does after the wait sees what has arrived.
        self.request.wait()?;
        let mut first = 0;
        let part = |&size: &usize| {
            let mut bytes = vec![0; size];
            self.device.download(&self.arrived, first, &mut bytes)?;
            first += size;
            Ok(bytes)
        };
        self.sizes.iter().map(part).collect()
    }
}

/// Returns transfers of consecutive bytes of a buffer, peer after peer.
fn transfers(
    buffer: &Arc<Buffer>,
    sizes: impl Iterator<Item = (usize, usize)>,
) -> Result<Vec<Transfer>, EngineError> {
    let mut first = 0;
    let transfer = |(peer, bytes)| {
        first += bytes;
        let slice = Slice::new(buffer, CommElement::U8, first - bytes, bytes)?;
        Ok(Transfer { peer, slice })
    };
    sizes.map(transfer).collect()
}
