//! A rank's part of any tensors that are named as weights are: those of a model, their
//! master copies, what an optimizer keeps beside them.

use super::groups::Mesh;
use super::ranks::{Among, expert_weight};
use super::shard::{beside, hidden_dimension, sliced};
use crate::error::EngineError;
use moesaic_kernel::DType;
use moesaic_plan::{Parallel, Place};
use moesaic_tensor::{SourceError, Tensor, WeightSource};
use std::ops::Range;

impl Mesh {
    /// Whether a parameter is this rank's to move. Of slices of an expert the first alone
    /// adds the last bias; the others hold zeros, which have to stay.
    pub fn holds(&self, name: &str) -> bool {
        holds(self.place(), name)
    }

    /// This rank's part of a tensor: of experts its own, of all else everything. Only
    /// that is asked of the source.
    ///
    /// # Errors
    /// As [`part_of`].
    pub fn part(
        &self,
        source: &dyn WeightSource,
        name: &str,
    ) -> Result<Tensor<'static>, EngineError> {
        part_of(self.parallel(), self.place(), source, name)
    }
}

/// A rank's part as the source of what every rank has. Weights of all experts, of which a
/// backward pass wants a few, come from the other ranks then, and are zeros before.
pub(super) struct Around<'a> {
    pub part: &'a dyn WeightSource,
    /// Of the whole layer.
    pub experts: usize,
}

impl WeightSource for Around<'_> {
    fn describe(&self, name: &str) -> Option<(DType, Vec<usize>)> {
        let (dtype, mut shape) = self.part.describe(name)?;
        let of_experts = Among::of(name) != Among::World;
        if let Some(experts) = shape.first_mut().filter(|_| of_experts) {
            *experts = self.experts;
        }
        Some((dtype, shape))
    }

    fn rows(&self, name: &str, rows: Range<usize>) -> Result<Tensor<'_>, SourceError> {
        let described = self
            .describe(name)
            .filter(|_| Among::of(name) != Among::World);
        let Some((dtype, mut shape)) = described else {
            return self.part.rows(name, rows);
        };
        shape[0] = rows.len();
        Ok(Tensor::zeros(dtype, &shape))
    }
}

fn holds(place: Place, name: &str) -> bool {
    place.shard == 0 || expert_weight(name) != Some("experts.down.bias")
}

/// The shape of what the rank at a place of a mesh has of a tensor of a shape; `None` if
/// they cannot share it.
pub fn part_shape(mesh: Parallel, place: Place, name: &str, whole: &[usize]) -> Option<Vec<usize>> {
    let mut shape = whole.to_vec();
    if Among::of(name) == Among::World {
        return Some(shape);
    }
    let experts = shape.first_mut().filter(|experts| **experts >= mesh.ep)?;
    *experts = mesh.experts(place.ep, *experts).len();
    if let Some(dimension) = hidden_dimension(name) {
        let width = shape.get_mut(dimension)?;
        if !width.is_multiple_of(mesh.shards) {
            return None;
        }
        *width /= mesh.shards;
    }
    Some(shape)
}

/// What the rank at a place of a mesh has of a tensor of the whole, by the tensor's name:
/// [`Among::of`] says whether it is of experts.
///
/// # Errors
/// [`EngineError::Weight`] for a tensor that is not there, or whose sizes the mesh cannot
/// share; [`EngineError::Source`].
pub fn part_of(
    mesh: Parallel,
    place: Place,
    source: &dyn WeightSource,
    name: &str,
) -> Result<Tensor<'static>, EngineError> {
    let problem = |problem: String| EngineError::Weight {
        name: name.to_string(),
        problem,
    };
    let described = source.describe(name);
    let (dtype, shape) = described.ok_or_else(|| problem("is missing".to_string()))?;
    let rows = shape.first().copied().unwrap_or(1);
    if Among::of(name) == Among::World {
        return read(source, name, 0..rows);
    }
    let Some(own) = part_shape(mesh, place, name, &shape) else {
        let Parallel { ep, shards, .. } = mesh;
        let message = format!("of shape {shape:?} cannot be shared by {ep} x {shards} ranks");
        return Err(problem(message));
    };
    if !holds(place, name) {
        return Ok(Tensor::zeros(dtype, &own)); // the first slice has it
    }
    let part = read(source, name, mesh.experts(place.ep, rows))?;
    Ok(match hidden_dimension(name).filter(|_| mesh.shards > 1) {
        Some(dimension) => {
            let range = mesh.hidden(place.shard, shape[dimension]);
            sliced(&part, dimension, &range)
        }
        None => part,
    })
}

/// Rows of a tensor, put together if they come in pieces.
fn read(
    source: &dyn WeightSource,
    name: &str,
    rows: Range<usize>,
) -> Result<Tensor<'static>, EngineError> {
    let failed = |source| EngineError::Source {
        name: name.to_string(),
        source,
    };
    let mut pieces: Vec<Tensor<'_>> = Vec::new();
    let mut first = rows.start;
    while first < rows.end || pieces.is_empty() {
        let piece = source.rows(name, first..rows.end).map_err(failed)?;
        first += piece.shape.first().copied().unwrap_or(1).max(1);
        pieces.push(piece);
    }
    Ok(match pieces.len() {
        1 => pieces.remove(0).into_static(),
        _ => beside(&pieces, 0),
    })
}
