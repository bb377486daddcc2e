//! One rank's part of any tensors that are named like weights: a model's, their master copies, the
//! state of an optimizer.

use super::groups::Mesh;
use super::process_group::ProcessGroup;
use super::shard::{concat, sharded};
use super::sharding::{Sharding, placement_of, runs};
use crate::error::EngineError;
use crate::reason::WeightReason;
use moesaic_kernel::DType;
use moesaic_plan::{Parallel, Placement, RankCoords};
use moesaic_tensor::{SourceError, Tensor, WeightSource};
use std::ops::Range;

impl Mesh {
    /// Returns whether this rank updates a parameter. Only the first shard of an expert adds the
    /// last bias; the other shards hold zeros that must stay zero.
    pub fn holds(&self, name: &str) -> bool {
        holds(self.parallel(), self.place(), name)
    }

    /// Returns the group of ranks that hold the same values of a parameter: [`ProcessGroup::of`] on
    /// this mesh.
    pub fn process_group(&self, name: &str) -> ProcessGroup {
        ProcessGroup::of(self.parallel(), name)
    }

    /// Returns this rank's part of a tensor: its own experts, its shards of sharded shared experts,
    /// and everything else whole. Only that part is read from the source.
    ///
    /// # Errors
    /// As [`part_of`].
    pub fn part(
        &self,
        source: &dyn WeightSource,
        name: &str,
    ) -> Result<Tensor<'static>, EngineError> {
        let placed = (self.parallel(), self.placement());
        part_of_placed(placed, self.place(), source, name)
    }

    /// Returns the shape of this rank's part of a tensor, by the shape of the whole.
    ///
    /// # Errors
    /// [`EngineError::Weight`] for sizes that the mesh cannot share.
    pub fn part_shape(&self, name: &str, whole: &[usize]) -> Result<Vec<usize>, EngineError> {
        checked_part_shape(
            (self.parallel(), self.placement()),
            self.place(),
            name,
            whole,
        )
    }

    /// Returns the rows of this rank's part of a tensor to count where all ranks' parts are counted
    /// once: all rows, or the owned ones of replicated experts. `rows` is the part's first
    /// dimension.
    pub fn counted(&self, name: &str, rows: usize) -> Vec<Range<usize>> {
        let of_experts = Sharding::of(self.parallel(), name).counts_experts();
        let placement = self.placement().filter(|_| of_experts);
        let Some(placement) = placement else {
            return std::iter::once(0..rows).collect();
        };
        let own = self.place().ep;
        let owned = (0..rows.min(placement.count(own))).filter(|&slot| placement.owns(own, slot));
        owned.map(|slot| slot..slot + 1).collect()
    }
}

/// A rank's part of the weights, presented as a source of whole tensors. Weights of all experts and
/// of whole shared experts, a few of which a backward pass needs, arrive from other ranks later and
/// are zeros until then.
pub(super) struct ReplicatedWeights<'a> {
    pub part: &'a dyn WeightSource,
    pub mesh: Parallel,
    /// The number of experts of the whole layer.
    pub experts: usize,
}

impl WeightSource for ReplicatedWeights<'_> {
    fn describe(&self, name: &str) -> Option<(DType, Vec<usize>)> {
        let (dtype, mut shape) = self.part.describe(name)?;
        let of_experts = Sharding::of(self.mesh, name).counts_experts();
        if let Some(experts) = shape.first_mut().filter(|_| of_experts) {
            *experts = self.experts;
        }
        Some((dtype, shape))
    }

    fn rows(&self, name: &str, rows: Range<usize>) -> Result<Tensor<'_>, SourceError> {
        let described = self
            .describe(name)
            .filter(|_| !Sharding::of(self.mesh, name).is_everywhere());
        let Some((dtype, mut shape)) = described else {
            return self.part.rows(name, rows);
        };
        shape[0] = rows.len();
        Ok(Tensor::zeros(dtype, &shape))
    }
}

fn holds(mesh: Parallel, place: RankCoords, name: &str) -> bool {
    place.tp == 0 || !Sharding::of(mesh, name).once
}

/// Returns the shape of the part that the rank at some coordinates holds of a tensor; `None` if the
/// ranks cannot share it.
pub fn part_shape(
    mesh: Parallel,
    place: RankCoords,
    name: &str,
    whole: &[usize],
) -> Option<Vec<usize>> {
    part_shape_placed((mesh, None), place, name, whole)
}

/// Does the same as [`part_shape`], with a placement of experts; `None` means contiguous ranges.
pub fn part_shape_placed(
    (mesh, placement): (Parallel, Option<&Placement>),
    place: RankCoords,
    name: &str,
    whole: &[usize],
) -> Option<Vec<usize>> {
    let share = Sharding::of(mesh, name);
    let mut shape = whole.to_vec();
    if share.counts_experts() {
        let experts = shape.first_mut()?;
        *experts = placement_of(mesh, placement, *experts)?.count(place.ep);
    }
    if let Some(dimension) = share.hidden {
        let width = shape.get_mut(dimension)?;
        // Any tensor with a weight's name comes here, an optimizer's state too, and nobody has
        // checked its sizes against the mesh.
        if !width.is_multiple_of(mesh.expert_tp) {
            return None;
        }
        *width /= mesh.expert_tp;
    }
    Some(shape)
}

/// Does the same as [`part_shape_placed`], with the reason as an error.
fn checked_part_shape(
    (mesh, placement): (Parallel, Option<&Placement>),
    place: RankCoords,
    name: &str,
    whole: &[usize],
) -> Result<Vec<usize>, EngineError> {
    let own = part_shape_placed((mesh, placement), place, name, whole);
    own.ok_or_else(|| {
        let Parallel { ep, expert_tp, .. } = mesh;
        let reason = WeightReason::NotShareable {
            shape: whole.to_vec(),
            ep,
            expert_tp,
        };
        EngineError::weight(name, reason)
    })
}

/// Returns the part that the rank at some coordinates holds of a whole tensor, by the tensor's
/// name: [`ProcessGroup::of`] returns the group that shares it.
///
/// # Errors
/// [`EngineError::Weight`] for a tensor that is not there, or whose sizes the mesh cannot
/// share; [`EngineError::Source`].
pub fn part_of(
    mesh: Parallel,
    place: RankCoords,
    source: &dyn WeightSource,
    name: &str,
) -> Result<Tensor<'static>, EngineError> {
    part_of_placed((mesh, None), place, source, name)
}

/// Does the same as [`part_of`], with a placement of experts; `None` means contiguous ranges.
///
/// # Errors
/// As [`part_of`].
pub fn part_of_placed(
    (mesh, placement): (Parallel, Option<&Placement>),
    place: RankCoords,
    source: &dyn WeightSource,
    name: &str,
) -> Result<Tensor<'static>, EngineError> {
    let described = source.describe(name);
    let (dtype, shape) =
        described.ok_or_else(|| EngineError::weight(name, WeightReason::PartMissing))?;
    let share = Sharding::of(mesh, name);
    let own = checked_part_shape((mesh, placement), place, name, &shape)?;
    if !holds(mesh, place, name) {
        return Ok(Tensor::zeros(dtype, &own)); // the first shard has it
    }
    let slice = |dimension: usize| mesh.hidden(place.tp, shape[dimension]);
    let rows = shape.first().copied().unwrap_or(1);
    let placement = placement_of(mesh, placement, rows).filter(|_| share.counts_experts());
    let rows = match (&placement, share.hidden) {
        (Some(placement), _) => runs(&placement.of(place.ep)),
        (None, Some(0)) => vec![slice(0)],
        (None, _) => std::iter::once(0..rows).collect(),
    };
    let part = read(source, name, &rows)?;
    Ok(match share.hidden.filter(|_| mesh.expert_tp > 1) {
        Some(dimension) if dimension > 0 => sharded(&part, dimension, &slice(dimension)),
        _ => part,
    })
}

/// Reads rows of a tensor, joining them if they come in several runs.
fn read(
    source: &dyn WeightSource,
    name: &str,
    runs: &[Range<usize>],
) -> Result<Tensor<'static>, EngineError> {
    let failed = |source| EngineError::Source {
        name: name.to_string(),
        source,
    };
    let mut chunks: Vec<Tensor<'_>> = Vec::new();
    for rows in runs {
        let mut first = rows.start;
        while first < rows.end || chunks.is_empty() {
            let chunk = source.rows(name, first..rows.end).map_err(failed)?;
            // A source may return fewer rows than asked for. One that returns none must not keep
            // this loop going.
            first += chunk.shape.first().copied().unwrap_or(1).max(1);
            chunks.push(chunk);
        }
    }
    Ok(match chunks.len() {
        1 => chunks.remove(0).into_static(),
        _ => concat(&chunks, 0),
    })
}
