//! Saving: the first rank writes the tensors of all ranks as those of one process.

use super::process_group::ProcessGroup;
use super::ranks::Ranks;
use super::shard;
use super::sharding::Sharding;
use crate::error::EngineError;
use crate::reason::SaveReason;
use moesaic_collectives::{Call, CommElement, Slice, Transfer};
use moesaic_plan::{Parallel, Placement, RankCoords};
use moesaic_tensor::{Described, SourceError, Tensor, Tensors, WeightSink};
use std::ops::Range;
use std::time::Duration;

/// The bytes of a fetch from each shard; at least one expert.
const CHUNK_BYTES: usize = 16 << 20;

/// The deadline of ranks that have nothing to write while the first rank writes.
const PATIENCE: Duration = Duration::from_secs(3600);

impl Ranks {
    /// Writes the tensors that all ranks hold to the first rank's sink, as one process would have
    /// them, in the order of their names. The first rank fetches other ranks' parts a few experts
    /// at a time, so it never holds a whole tensor. Other ranks' sinks are not used.
    ///
    /// # Errors
    /// [`EngineError::Save`] on all ranks when the sink fails; [`EngineError::Collective`].
    pub fn collect(&self, own: &Tensors<'_>, sink: &mut dyn WeightSink) -> Result<(), EngineError> {
        // Other `dp` groups hold the same tensors, so the first one alone takes part.
        let failure = match self.mesh().place().dp {
            0 => self.gathered(own, sink)?.err(),
            _ => None,
        };
        let failure = failure.map_or(String::new(), |error| error.to_string());
        // All ranks wait for the first one's disk, which may take far longer than the deadline of
        // an exchange.
        let call = Call::new("tensors of all are saved").within(PATIENCE);
        let all = self
            .mesh()
            .groups()
            .world
            .gather_bytes(failure.as_bytes(), &call)?;
        match all.into_iter().find(|failure| !failure.is_empty()) {
            None => Ok(()),
            Some(failure) => {
                // Errors do not travel between processes, their texts do; so all ranks get the text.
                let text = String::from_utf8_lossy(&failure).into_owned();
                Err(EngineError::Save(SaveReason::Sink(text)))
            }
        }
    }

    /// Gathers and writes all tensors. The outer result is that of the exchanges, which continue
    /// when the sink fails: other ranks would wait for them.
    fn gathered(
        &self,
        own: &Tensors<'_>,
        sink: &mut dyn WeightSink,
    ) -> Result<Result<(), SourceError>, EngineError> {
        let first = self.mesh().rank() == 0;
        let experts = self.experts(own)?;
        let mut written = Ok(());
        let mut then = |act: &mut dyn FnMut(&mut dyn WeightSink) -> Result<(), SourceError>| {
            if first && written.is_ok() {
                written = act(sink);
            }
        };
        let all: Vec<Described> = own
            .iter()
            .zip(&experts)
            .map(|((name, tensor), counts)| self.whole(name, tensor, counts))
            .collect();
        then(&mut |sink| sink.begin(&all));
        for ((name, tensor), counts) in own.iter().zip(&experts) {
            let share = Sharding::of(self.mesh().parallel(), name);
            // The first rank has the whole tensor itself, so the others need not even take part.
            if share.is_everywhere() {
                then(&mut |sink| sink.write(&tensor.data));
                continue;
            }
            let placed = (self.mesh().parallel(), self.mesh().placement());
            for chunk in chunks(placed, share, tensor, counts) {
                let chunk = self.chunk(name, tensor, chunk)?;
                then(&mut |sink| sink.write(&chunk));
            }
        }
        then(&mut |sink| sink.end());
        Ok(written)
    }

    /// Returns for each tensor the number of its experts that each group of ranks holds.
    fn experts(&self, own: &Tensors<'_>) -> Result<Vec<Vec<usize>>, EngineError> {
        let mesh = self.mesh().parallel();
        let count = |(name, tensor): (&String, &Tensor<'_>)| {
            if Sharding::of(mesh, name).counts_experts() {
                tensor.shape.first().copied().unwrap_or(0) as u64
            } else {
                0
            }
        };
        let counts: Vec<u8> = own
            .iter()
            .flat_map(|each| count(each).to_le_bytes())
            .collect();
        let all = self.gather_bytes(&counts, ProcessGroup::Ep, "experts of all")?;
        let of = |tensor: usize| {
            let firsts = all.iter().step_by(mesh.expert_tp);
            let number = |bytes: &Vec<u8>| {
                let bytes = bytes.get(8 * tensor..8 * tensor + 8).unwrap_or_default();
                u64::from_le_bytes(bytes.try_into().unwrap_or_default()) as usize
            };
            firsts.map(number).collect()
        };
        if let Some(other) = all.iter().position(|bytes| bytes.len() != counts.len()) {
            let (here, there) = (counts.len() / 8, all[other].len() / 8);
            return Err(EngineError::Save(SaveReason::Tensors {
                here,
                there,
                part: other,
            }));
        }
        let counts: Vec<Vec<usize>> = (0..own.len()).map(of).collect();
        self.check_placed(own, &counts)?;
        Ok(counts)
    }

    /// Refuses tensors with other experts than the placement's.
    fn check_placed(&self, own: &Tensors<'_>, counts: &[Vec<usize>]) -> Result<(), EngineError> {
        let (mesh, placement) = (self.mesh().parallel(), self.mesh().placement());
        let Some(placement) = placement else {
            return Ok(());
        };
        let wanted: Vec<usize> = (0..mesh.ep).map(|group| placement.count(group)).collect();
        let of_experts = |name: &str| Sharding::of(mesh, name).counts_experts();
        let mut named = own.keys().zip(counts);
        match named.find(|(name, counts)| of_experts(name) && **counts != wanted) {
            None => Ok(()),
            Some((name, counts)) => Err(EngineError::Save(SaveReason::Placement {
                name: name.clone(),
                found: counts.clone(),
                placed: wanted,
            })),
        }
    }

    /// Describes a tensor as one process has it.
    fn whole(&self, name: &str, tensor: &Tensor<'_>, counts: &[usize]) -> Described {
        let (mesh, placement) = (self.mesh().parallel(), self.mesh().placement());
        let (share, mut shape) = (Sharding::of(mesh, name), tensor.shape.clone());
        if let Some(experts) = shape.first_mut().filter(|_| share.counts_experts()) {
            *experts = placement.map_or(counts.iter().sum(), Placement::experts);
        }
        if let Some(width) = share.hidden.and_then(|at| shape.get_mut(at)) {
            *width *= mesh.expert_tp;
        }
        Described {
            name: name.to_string(),
            dtype: tensor.dtype,
            shape,
        }
    }

    /// Fetches some rows of a tensor and joins them on the first rank; other ranks get nothing.
    fn chunk(
        &self,
        name: &str,
        tensor: &Tensor<'_>,
        chunk: WeightRange,
    ) -> Result<Vec<u8>, EngineError> {
        let (mesh, RankCoords { ep, tp, .. }) = (self.mesh().parallel(), self.mesh().place());
        let WeightRange {
            ranks,
            rows,
            concat_dim,
        } = chunk;
        let bytes = row_bytes(tensor) * rows.len();
        let at = rows.start * row_bytes(tensor);
        let mut sends = Vec::new();
        if ranks.contains(&(ep * mesh.expert_tp + tp)) {
            let buffer = self.buffer(&tensor.data[at..at + bytes])?;
            let slice = Slice::new(&buffer, CommElement::U8, 0, bytes)?;
            sends.push(Transfer { peer: 0, slice });
        }
        let first = self.mesh().rank() == 0;
        let workspace = if first { ranks.len() * bytes } else { 0 };
        let buffer = self.buffer(&vec![0; workspace])?;
        let from = ranks.filter(|_| first).enumerate().map(|(at, peer)| {
            let slice = Slice::new(&buffer, CommElement::U8, at * bytes, bytes)?;
            Ok(Transfer { peer, slice })
        });
        let receives = from.collect::<Result<Vec<_>, EngineError>>()?;
        let call = Call::new(&format!("saving {name}"));
        let mut groups = self.mesh().groups();
        groups.ep.exchange(&sends, &receives, &call)?.wait()?;
        let mut all = vec![0; workspace];
        self.device().download(&buffer, 0, &mut all)?;
        let Some(dimension) = concat_dim.filter(|_| first) else {
            return Ok(all);
        };
        let mut shape = tensor.shape.clone();
        shape[0] = rows.len();
        let parts: Vec<Tensor<'_>> = all
            .chunks_exact(bytes.max(1))
            .map(|part| Tensor {
                dtype: tensor.dtype,
                shape: shape.clone(),
                data: part.into(),
            })
            .collect();
        Ok(shard::concat(&parts, dimension).data.to_vec())
    }
}

/// Rows of a tensor that are fetched together.
struct WeightRange {
    /// The ranks of a group that hold the rows.
    ranks: Range<usize>,
    /// The rows within each of these ranks' part.
    rows: Range<usize>,
    /// The dimension along which parts of several ranks are concatenated.
    concat_dim: Option<usize>,
}

/// Returns the bytes of a row: an expert, or a row of a shared expert's matrix.
fn row_bytes(tensor: &Tensor<'_>) -> usize {
    tensor.data.len() / tensor.shape.first().copied().unwrap_or(1).max(1)
}

/// Returns the fetches of a tensor in the order of the whole: a few experts of each group of ranks,
/// or rows of a shared expert.
fn chunks(
    (mesh, placement): (Parallel, Option<&Placement>),
    share: Sharding,
    tensor: &Tensor<'_>,
    counts: &[usize],
) -> Vec<WeightRange> {
    let cut = share.hidden.filter(|_| mesh.expert_tp > 1);
    let slices_of = |ep: usize| {
        let first = ep * mesh.expert_tp;
        first..first + cut.map_or(1, |_| mesh.expert_tp)
    };
    // The ranks that hold the next rows, and those rows within their parts.
    let own_rows = tensor.shape.first().copied().unwrap_or(1);
    let holders: Vec<(Range<usize>, Range<usize>)> = match (share.hidden, placement) {
        (_, Some(placement)) if share.counts_experts() => {
            let owned = owned_runs(placement).into_iter();
            owned.map(|(ep, slots)| (slices_of(ep), slots)).collect()
        }
        _ if share.counts_experts() => {
            let groups = counts.iter().enumerate();
            groups
                .map(|(ep, &count)| (slices_of(ep), 0..count))
                .collect()
        }
        // Shards of the outermost dimension follow each other in the whole tensor, so they are
        // written one after the other without a join.
        (Some(0), _) => slices_of(0)
            .map(|rank| (rank..rank + 1, 0..own_rows))
            .collect(),
        _ => vec![(slices_of(0), 0..own_rows)],
    };
    let step = (CHUNK_BYTES / row_bytes(tensor).max(1)).max(1);
    let of = |(ranks, rows): (Range<usize>, Range<usize>)| {
        let end = rows.end;
        rows.step_by(step).map(move |first| WeightRange {
            ranks: ranks.clone(),
            rows: first..end.min(first + step),
            concat_dim: cut.filter(|dimension| *dimension > 0),
        })
    };
    holders.into_iter().flat_map(of).collect()
}

/// Returns runs of experts in the order of their ids: the group that owns a run, and its slots
/// there.
fn owned_runs(placement: &Placement) -> Vec<(usize, Range<usize>)> {
    let mut runs: Vec<(usize, Range<usize>)> = Vec::new();
    for expert in 0..placement.experts() {
        let group = placement.owner(expert);
        let slot = placement.slot(group, expert);
        let slot = slot.expect("an owner has its expert");
        match runs.last_mut() {
            Some((last, slots)) if *last == group && slots.end == slot => slots.end += 1,
            _ => runs.push((group, slot..slot + 1)),
        }
    }
    runs
}
