//! Layers in parts, and back.

use super::slices::{concat, gather};
use super::{Layout, check_spec};
use crate::TrainError;
use moesaic_spec::{LayerSpec, RouterKind};
use moesaic_tensor::{Tensor, Tensors};

/// Splits a layer into layers of its experts, `counts` of them each, with their
/// rows of the router. What all experts share is in every part.
///
/// # Errors
/// [`TrainError::NotPreserved`] when `counts` are not the layer's experts, a
/// part would have fewer experts than `top_k`, or the router names experts in
/// groups or a table; [`TrainError::Tensor`] for tensors that are not the layer's.
pub fn split_experts(
    spec: &LayerSpec,
    tensors: &Tensors<'_>,
    counts: &[usize],
) -> Result<Vec<(LayerSpec, Tensors<'static>)>, TrainError> {
    check_spec(spec)?;
    check_separable(spec)?;
    let layout = Layout::new(spec);
    layout.check(tensors)?;
    if counts.iter().sum::<usize>() != spec.shape.experts {
        let experts = spec.shape.experts;
        let reason = format!("{counts:?} are not the {experts} experts of the layer");
        return Err(TrainError::NotPreserved(reason));
    }
    let mut first = 0;
    let mut parts = Vec::with_capacity(counts.len());
    for &count in counts {
        let mut part = spec.clone();
        part.shape.experts = count;
        check_spec(&part)?;
        let own = first..first + count;
        let each = tensors.iter().map(|(name, tensor)| {
            let tensor = match layout.axis(name) {
                Some(axis) => {
                    let behind = spec.shape.experts..tensor.shape[axis];
                    let slices: Vec<usize> = own.clone().chain(behind).collect();
                    gather(tensor, axis, &slices)
                }
                None => tensor.clone().into_static(),
            };
            (name.clone(), tensor)
        });
        parts.push((part, each.collect()));
        first += count;
    }
    Ok(parts)
}

/// Joins layers into one with the experts of all: what [`split_experts`] gave
/// comes back to the byte.
///
/// # Errors
/// [`TrainError::NotPreserved`] when the specs differ in more than the number of
/// experts; [`TrainError::Tensor`] when a tensor is missing in a part, or one
/// that all experts share is not the same in all.
pub fn merge_experts(
    parts: &[(LayerSpec, Tensors<'static>)],
) -> Result<(LayerSpec, Tensors<'static>), TrainError> {
    let (first, rest) = parts
        .split_first()
        .ok_or_else(|| TrainError::NotPreserved("there is nothing to merge".to_string()))?;
    let mut whole = first.0.clone();
    for (spec, _) in rest {
        let mut same = spec.clone();
        same.shape.experts = first.0.shape.experts;
        if same != first.0 {
            let reason = "the parts differ in more than their number of experts";
            return Err(TrainError::NotPreserved(reason.to_string()));
        }
        whole.shape.experts += spec.shape.experts;
    }
    check_spec(&whole)?;
    check_separable(&whole)?;
    let layouts: Vec<Layout> = parts.iter().map(|(spec, _)| Layout::new(spec)).collect();
    for (layout, (_, tensors)) in layouts.iter().zip(parts) {
        layout.check(tensors)?;
    }
    let sets: Vec<&Tensors<'_>> = parts.iter().map(|(_, tensors)| tensors).collect();
    let joined = each_name(&sets, |name, list| match layouts[0].axis(name) {
        Some(axis) => {
            let experts = layouts.iter().map(|layout| layout.experts);
            join(name, list, axis, &experts.collect::<Vec<_>>())
        }
        None => same(name, list),
    })?;
    Ok((whole, joined))
}

/// What each rank of expert parallelism holds: its experts of the whole, in
/// order, `E / ranks` each, and all that is not an expert's.
///
/// # Errors
/// [`TrainError::NotPreserved`] when the ranks cannot share the experts evenly;
/// [`TrainError::Tensor`] for tensors that are not the layer's.
pub fn shard_experts(
    spec: &LayerSpec,
    tensors: &Tensors<'_>,
    ranks: usize,
) -> Result<Vec<Tensors<'static>>, TrainError> {
    check_spec(spec)?;
    let layout = Layout::new(spec);
    layout.check(tensors)?;
    let share = share(spec, ranks)?;
    let shard = |rank: usize| {
        let own: Vec<usize> = (rank * share..(rank + 1) * share).collect();
        let each = tensors.iter().map(|(name, tensor)| {
            let tensor = match held_by_rank(&layout, name) {
                Some(axis) => gather(tensor, axis, &own),
                None => tensor.clone().into_static(),
            };
            (name.clone(), tensor)
        });
        each.collect()
    };
    Ok((0..ranks).map(shard).collect())
}

/// The whole layer again from what all ranks hold, in their order; `spec` is
/// that of the whole.
///
/// # Errors
/// As [`merge_experts`].
pub fn unshard_experts(
    spec: &LayerSpec,
    shards: &[Tensors<'_>],
) -> Result<Tensors<'static>, TrainError> {
    check_spec(spec)?;
    let layout = Layout::new(spec);
    let share = share(spec, shards.len())?;
    let sets: Vec<&Tensors<'_>> = shards.iter().collect();
    let whole = each_name(&sets, |name, list| match held_by_rank(&layout, name) {
        Some(axis) => match list
            .iter()
            .find(|tensor| tensor.shape.get(axis) != Some(&share))
        {
            None => join(name, list, axis, &vec![share; shards.len()]),
            Some(odd) => {
                let problem = format!("has shape {:?}, a rank has {share} experts", odd.shape);
                Err(TrainError::tensor(name, problem))
            }
        },
        None => same(name, list),
    })?;
    layout.check(&whole)?;
    Ok(whole)
}

/// The dimension of a tensor along which ranks share it.
fn held_by_rank(layout: &Layout, name: &str) -> Option<usize> {
    let expert = super::weight_of(name)?.starts_with("experts.");
    layout.axis(name).filter(|_| expert)
}

fn share(spec: &LayerSpec, ranks: usize) -> Result<usize, TrainError> {
    let experts = spec.shape.experts;
    match experts.checked_rem(ranks) {
        Some(0) => Ok(experts / ranks),
        _ => {
            let reason = format!("{experts} experts cannot be shared evenly by {ranks} ranks");
            Err(TrainError::NotPreserved(reason))
        }
    }
}

/// Refuses routers that name experts of other parts.
fn check_separable(spec: &LayerSpec) -> Result<(), TrainError> {
    let reason = if spec.router.kind == RouterKind::Table {
        "a routing table names experts of all parts"
    } else if spec.router.groups.is_some() {
        "groups of experts would be cut differently in parts"
    } else {
        return Ok(());
    };
    Err(TrainError::NotPreserved(reason.to_string()))
}

/// Makes one tensor of those that all sets have under a name.
fn each_name(
    sets: &[&Tensors<'_>],
    make: impl Fn(&str, &[&Tensor<'_>]) -> Result<Tensor<'static>, TrainError>,
) -> Result<Tensors<'static>, TrainError> {
    let mut made = Tensors::new();
    let names: std::collections::BTreeSet<&String> =
        sets.iter().flat_map(|set| set.keys()).collect();
    for name in names {
        let list: Option<Vec<&Tensor<'_>>> = sets.iter().map(|set| set.get(name)).collect();
        let list = list.ok_or_else(|| TrainError::tensor(name, "is missing in some parts"))?;
        made.insert(name.clone(), make(name, &list)?);
    }
    Ok(made)
}

/// The experts of all tensors, then what lies behind them, which is the same
/// in all.
fn join(
    name: &str,
    list: &[&Tensor<'_>],
    axis: usize,
    experts: &[usize],
) -> Result<Tensor<'static>, TrainError> {
    let alike = |tensor: &&Tensor<'_>| {
        let mut shape = tensor.shape.clone();
        shape[axis] = list[0].shape[axis];
        tensor.dtype == list[0].dtype && shape == list[0].shape
    };
    if !list.iter().all(alike) {
        return Err(TrainError::tensor(
            name,
            "has another type or shape in some parts",
        ));
    }
    let behind = |tensor: &Tensor<'_>, count: usize| {
        let indices: Vec<usize> = (count..tensor.shape[axis]).collect();
        gather(tensor, axis, &indices)
    };
    let pairs = || list.iter().zip(experts);
    let tails: Vec<Tensor<'static>> = pairs().map(|(t, &count)| behind(t, count)).collect();
    let tail = same(name, &tails.iter().collect::<Vec<_>>())?;
    let own = |tensor: &Tensor<'_>, count: usize| {
        let indices: Vec<usize> = (0..count).collect();
        gather(tensor, axis, &indices)
    };
    let mut all: Vec<Tensor<'static>> = pairs().map(|(t, &count)| own(t, count)).collect();
    all.push(tail);
    Ok(concat(&all, axis))
}

/// The tensor that all parts have.
fn same(name: &str, list: &[&Tensor<'_>]) -> Result<Tensor<'static>, TrainError> {
    match list.iter().all(|tensor| *tensor == list[0]) {
        true => Ok(list[0].clone().into_static()),
        false => Err(TrainError::tensor(name, "is not the same in all parts")),
    }
}
