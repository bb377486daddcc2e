//! Splitting layers into parts, and joining them.

use super::slices::{concat, gather};
use super::{Layout, check_spec};
use crate::TrainError;
use moesaic_engine::{ProcessGroup, joined_placed, part_of_placed, part_shape_placed};
use moesaic_kernel::DType;
use moesaic_plan::{MeshError, Parallel, Placement, RankCoords};
use moesaic_spec::{Chooser, LayerSpec, Select};
use moesaic_tensor::{Tensor, Tensors};

/// Splits a layer into layers with `counts` of its experts each, and their rows of the router. Each
/// part gets all tensors that are not an expert's.
///
/// # Errors
/// [`TrainError::NotPreserved`] if `counts` do not add up to the layer's experts, a part would have
/// fewer experts than `top_k`, or the router has groups or a table. [`TrainError::Tensor`] for
/// tensors that are not the layer's.
pub fn split_experts(
    spec: &LayerSpec,
    tensors: &Tensors<'_>,
    counts: &[usize],
) -> Result<Vec<(LayerSpec, Tensors<'static>)>, TrainError> {
    check_spec(spec)?;
    check_separable(spec)?;
    let layout = Layout::new(spec);
    layout.check(tensors)?;
    layout.complete(tensors)?;
    let experts = spec.shape.experts;
    let all = counts.iter().try_fold(0usize, |sum, n| sum.checked_add(*n));
    if all != Some(experts) {
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
                    // Router tensors have rows for experts without weights after the others. Every
                    // part gets those too.
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

/// Joins layers into one with the experts of all. It restores the input of [`split_experts`] to the
/// byte.
///
/// # Errors
/// [`TrainError::NotPreserved`] if the specs differ in more than the number of experts.
/// [`TrainError::Tensor`] if a tensor is missing in a part, or a shared one differs between parts.
pub fn merge_experts(
    parts: &[(LayerSpec, Tensors<'static>)],
) -> Result<(LayerSpec, Tensors<'static>), TrainError> {
    let (first, rest) = parts
        .split_first()
        .ok_or_else(|| TrainError::NotPreserved("there is nothing to merge".to_string()))?;
    let mut whole = first.0.clone();
    for (spec, _) in rest {
        let mut same = spec.clone();
        // Specs may differ in their number of experts and in nothing else.
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
        layout.complete(tensors)?;
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

/// Returns the part of each rank in a group that holds all experts, in rank order: its shards of
/// its experts, and all tensors that are not an expert's. Further groups (`dp`) have the same.
///
/// # Errors
/// [`TrainError::NotPreserved`] if the ranks cannot share the experts so. [`TrainError::Tensor`]
/// for tensors that are not the layer's.
pub fn shard_experts(
    spec: &LayerSpec,
    tensors: &Tensors<'_>,
    mesh: Parallel,
) -> Result<Vec<Tensors<'static>>, TrainError> {
    shard_placed(spec, tensors, mesh, None)
}

/// Returns each rank's part as [`shard_experts`] does, with experts placed by `placement`; `None`
/// is the default placement.
///
/// # Errors
/// The same as [`shard_experts`].
pub fn shard_placed(
    spec: &LayerSpec,
    tensors: &Tensors<'_>,
    mesh: Parallel,
    placement: Option<&Placement>,
) -> Result<Vec<Tensors<'static>>, TrainError> {
    let mesh = one_group(spec, mesh, placement)?;
    let layout = Layout::new(spec);
    layout.check(tensors)?;
    layout.complete(tensors)?;
    let shard = |rank: usize| {
        let place = place(mesh, rank)?;
        let part = |name: &String| {
            let part = part_of_placed((mesh, placement), place, tensors, name)?;
            Ok((name.clone(), part))
        };
        tensors.keys().map(part).collect()
    };
    (0..mesh.ranks()).map(shard).collect()
}

/// Joins the parts of a group's ranks, in rank order, into the whole layer; `spec` is that of the
/// whole.
///
/// # Errors
/// The same as [`merge_experts`].
pub fn unshard_experts(
    spec: &LayerSpec,
    shards: &[Tensors<'_>],
    mesh: Parallel,
) -> Result<Tensors<'static>, TrainError> {
    unshard_placed(spec, shards, mesh, None)
}

/// Joins parts as [`unshard_experts`] does, with experts placed by `placement`; `None` is the
/// default placement. Of several replicas it takes the owner's.
///
/// # Errors
/// The same as [`unshard_experts`], or [`TrainError::Tensor`] if a replica differs from its owner.
pub fn unshard_placed(
    spec: &LayerSpec,
    shards: &[Tensors<'_>],
    mesh: Parallel,
    placement: Option<&Placement>,
) -> Result<Tensors<'static>, TrainError> {
    let mesh = one_group(spec, mesh, placement)?;
    if shards.len() != mesh.ranks() {
        let (wanted, given) = (mesh.ranks(), shards.len());
        let reason = format!("parts of {wanted} ranks make the layer, {given} are given");
        return Err(TrainError::NotPreserved(reason));
    }
    let layout = Layout::new(spec);
    let sets: Vec<&Tensors<'_>> = shards.iter().collect();
    let whole = each_name(&sets, |name, list| match ProcessGroup::of(mesh, name) {
        ProcessGroup::World => same(name, list),
        _ => {
            let wanted = layout.shape(name);
            let wanted = wanted.ok_or_else(|| TrainError::tensor(name, "is of no layer"))?;
            for (rank, tensor) in list.iter().enumerate() {
                let at = place(mesh, rank)?;
                let shape = part_shape_placed((mesh, placement), at, name, &wanted.shape);
                if tensor.dtype != list[0].dtype || shape.as_deref() != Some(&tensor.shape) {
                    let ranks = mesh.ranks();
                    let problem = wrong_part(tensor, rank, ranks, list[0].dtype, shape);
                    return Err(TrainError::tensor(name, problem));
                }
            }
            if let Some(placement) =
                placement.filter(|_| ProcessGroup::of(mesh, name) == ProcessGroup::ExpertDp)
            {
                check_replicas(name, list, mesh, placement)?;
            }
            let part = |place| list[mesh.rank(place)].lend();
            Ok(joined_placed(name, (mesh, placement), part))
        }
    })?;
    layout.check(&whole)?;
    Ok(whole)
}

/// Says how a tensor differs from a rank's part, which has `shape`, or does not exist.
fn wrong_part(
    tensor: &Tensor<'_>,
    rank: usize,
    ranks: usize,
    dtype: DType,
    shape: Option<Vec<usize>>,
) -> String {
    let expected = shape.map_or("no part of it".to_string(), |shape| {
        format!("{dtype} of shape {shape:?}")
    });
    format!(
        "is {} of shape {:?} in the part of rank {rank} of {ranks}, expected {expected}",
        tensor.dtype, tensor.shape
    )
}

/// Refuses replicas that differ from their owners.
fn check_replicas(
    name: &str,
    list: &[&Tensor<'_>],
    mesh: Parallel,
    placement: &Placement,
) -> Result<(), TrainError> {
    let of = |expert: usize, ep: usize, shard: usize| {
        let tensor = list[mesh.rank(RankCoords {
            dp: 0,
            ep,
            tp: shard,
        })];
        let (slot, row) = (
            placement.slot(ep, expert)?,
            tensor.data.len() / placement.count(ep),
        );
        tensor.data.get(slot * row..(slot + 1) * row)
    };
    // Taking the owner's silently would hide a replica that training let drift apart.
    for expert in placement.replicated() {
        let owner = placement.owner(expert);
        for (&ep, shard) in placement
            .holders(expert)
            .iter()
            .flat_map(|ep| (0..mesh.expert_tp).map(move |shard| (ep, shard)))
        {
            if of(expert, ep, shard) != of(expert, owner, shard) {
                let problem =
                    format!("of expert {expert} is not the same on groups {owner} and {ep}");
                return Err(TrainError::tensor(name, problem));
            }
        }
    }
    Ok(())
}

/// Returns the mesh of one of its groups, if the layer can be shared so.
fn one_group(
    spec: &LayerSpec,
    mesh: Parallel,
    placement: Option<&Placement>,
) -> Result<Parallel, TrainError> {
    check_spec(spec)?;
    // Further groups hold the same parts, so one group is enough.
    let mesh = Parallel { dp: 1, ..mesh };
    let refused = |error: MeshError| TrainError::NotPreserved(error.to_string());
    mesh.check(spec).map_err(refused)?;
    if let (Some(format), 2..) = (spec.precision.experts, mesh.expert_tp) {
        let shards = mesh.expert_tp;
        let reason = format!(
            "`precision.experts` = {format} and expert_tp = {shards} do not go together: codes of \
             an expert stay on one rank"
        );
        return Err(TrainError::NotPreserved(reason));
    }
    if let Some(placement) = placement {
        let checked = placement.check(&mesh, spec.shape.experts);
        checked.map_err(|error| TrainError::NotPreserved(error.to_string()))?;
    }
    Ok(mesh)
}

fn place(mesh: Parallel, rank: usize) -> Result<RankCoords, TrainError> {
    let refused = |error: MeshError| TrainError::NotPreserved(error.to_string());
    mesh.place(rank).map_err(refused)
}

/// Refuses routers that refer to experts of other parts.
fn check_separable(spec: &LayerSpec) -> Result<(), TrainError> {
    let reason = if spec.router.kind.chooser() == Chooser::Table {
        "a routing table names experts of all parts"
    } else if spec.router.groups.is_some() {
        "groups of experts would be cut differently in parts"
    } else if matches!(spec.router.select, Select::PerGroup(_)) {
        "each group of experts gives as many, and parts would cut groups differently"
    } else if spec.router.always_chosen > 0 {
        "the last experts of every part would be chosen by all tokens"
    } else if spec.router.blocks.is_some() {
        "blocks of tokens would agree on experts of one part alone"
    } else {
        return Ok(());
    };
    Err(TrainError::NotPreserved(reason.to_string()))
}

/// Makes one tensor from those of all sets under each name.
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

/// Joins the experts of all tensors, followed by the tail that is the same in all.
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
    // The rows after the experts belong to experts without weights, so they must agree and appear
    // once.
    let tail = same(name, &tails.iter().collect::<Vec<_>>())?;
    let own = |tensor: &Tensor<'_>, count: usize| {
        let indices: Vec<usize> = (0..count).collect();
        gather(tensor, axis, &indices)
    };
    let mut all: Vec<Tensor<'static>> = pairs().map(|(t, &count)| own(t, count)).collect();
    all.push(tail);
    Ok(concat(&all, axis))
}

/// Returns the tensor, which must be equal in all parts.
fn same(name: &str, list: &[&Tensor<'_>]) -> Result<Tensor<'static>, TrainError> {
    if list.iter().all(|tensor| *tensor == list[0]) {
        Ok(list[0].clone().into_static())
    } else {
        Err(TrainError::tensor(name, "is not the same in all parts"))
    }
}
