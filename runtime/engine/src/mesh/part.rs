//! A rank's part of any tensors that are named as weights are: those of a model, their
//! master copies, what an optimizer keeps beside them.

use super::groups::{Mesh, placement_of};
use super::ranks::ProcessGroup;
use super::shard::{beside, sharded};
use super::sharding::Sharding;
use crate::error::EngineError;
use moesaic_kernel::DType;
use moesaic_plan::{Parallel, Placement, RankCoords};
use moesaic_tensor::{SourceError, Tensor, WeightSource};
use std::ops::Range;

impl Mesh {
    /// Whether a parameter is this rank's to move. Of shards of an expert the first alone
    /// adds the last bias; the others hold zeros, which have to stay.
    pub fn holds(&self, name: &str) -> bool {
        holds(self.parallel(), self.place(), name)
    }

    /// Who has the same of a parameter: [`ProcessGroup::of`] on this mesh.
    pub fn among(&self, name: &str) -> ProcessGroup {
        ProcessGroup::of(self.parallel(), name)
    }

    /// This rank's part of a tensor: of experts its own, of sliced shared experts its shards,
    /// of all else everything. Only that is asked of the source.
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

    /// Which rows of this rank's part of a tensor count where all ranks' parts are counted
    /// once: all, but of experts with replicas those that it owns. `rows` is the part's
    /// first dimension.
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

/// A rank's part as the source of what every rank has. Weights of all experts and of whole
/// shared ones, of which a backward pass wants a few, come from the other ranks then, and
/// are zeros before.
pub(super) struct Around<'a> {
    pub part: &'a dyn WeightSource,
    pub mesh: Parallel,
    /// Of the whole layer.
    pub experts: usize,
}

impl WeightSource for Around<'_> {
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

/// The shape of what the rank at a place of a mesh has of a tensor of a shape; `None` if
/// they cannot share it.
pub fn part_shape(
    mesh: Parallel,
    place: RankCoords,
    name: &str,
    whole: &[usize],
) -> Option<Vec<usize>> {
    part_shape_placed((mesh, None), place, name, whole)
}

/// The same where experts are placed as the caller says; `None`: as [`part_shape`].
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
        if !width.is_multiple_of(mesh.expert_tp) {
            return None;
        }
        *width /= mesh.expert_tp;
    }
    Some(shape)
}

/// What the rank at a place of a mesh has of a tensor of the whole, by the tensor's name:
/// [`ProcessGroup::of`] says whose it is.
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

/// The same where experts are placed as the caller says; `None`: as [`part_of`].
///
/// # Errors
/// As [`part_of`].
pub fn part_of_placed(
    (mesh, placement): (Parallel, Option<&Placement>),
    place: RankCoords,
    source: &dyn WeightSource,
    name: &str,
) -> Result<Tensor<'static>, EngineError> {
    let problem = |problem: String| EngineError::Weight {
        name: name.to_string(),
        problem,
    };
    let described = source.describe(name);
    let (dtype, shape) = described.ok_or_else(|| problem("is missing".to_string()))?;
    let share = Sharding::of(mesh, name);
    let Some(own) = part_shape_placed((mesh, placement), place, name, &shape) else {
        let Parallel { ep, expert_tp, .. } = mesh;
        let message = format!("of shape {shape:?} cannot be shared by {ep} x {expert_tp} ranks");
        return Err(problem(message));
    };
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

/// Numbers that follow each other together.
pub(super) fn runs(numbers: &[usize]) -> Vec<Range<usize>> {
    let next = |a: &usize, b: &usize| a + 1 == *b;
    let runs = numbers.chunk_by(next);
    runs.map(|run| run[0]..run[0] + run.len()).collect()
}

/// Rows of a tensor, put together if they come in chunks.
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
            first += chunk.shape.first().copied().unwrap_or(1).max(1);
            chunks.push(chunk);
        }
    }
    Ok(match chunks.len() {
        1 => chunks.remove(0).into_static(),
        _ => beside(&chunks, 0),
    })
}
