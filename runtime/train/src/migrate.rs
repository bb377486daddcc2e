//! Experts that move between steps, with all that is named as they are: weights, master
//! copies, an optimizer's state.
//!
//! ```text
//! prepare   each rank copies what it keeps, sends what others need, gets what it needs
//! commit    all ranks say that they have it all
//! after     each lets go of what it had before
//! ```
//!
//! Until [`Prepared::commit`] has returned, a rank still has what it had before, and it
//! returns only when every rank has told that it has what comes after. So if a rank is lost
//! on the way, at whatever point, the others have between them every expert that is not on
//! that rank alone: those for whom `commit` has failed have both states ([`NotCommitted`]).
//! [`resume`] makes of what is left ([`both`], if that is both), and of a checkpoint of the same step for what is not,
//! the state of other ranks.

use crate::TrainError;
use moesaic_engine::{EngineError, Mesh, ProcessGroup, Ranks};
use moesaic_plan::{Moves, Placement, PlanError, moves, moves_from};
use moesaic_tensor::{Tensor, Tensors, WeightSource};

/// What a rank has after experts have moved, and what it may not yet use: see
/// [`Prepared::commit`].
pub struct Prepared {
    ranks: Ranks,
    mesh: Mesh,
    tensors: Tensors<'static>,
}

/// Ranks have not all said that they have what comes after. What a rank had before is still
/// with who called.
#[derive(Debug, thiserror::Error)]
#[error(
    "not all ranks have their experts; go on from those before, or resume without the rank that \
     is lost: {error}"
)]
pub struct NotCommitted {
    /// What has failed.
    pub error: TrainError,
    /// What this rank would have gone on with. Another may have.
    pub after: Tensors<'static>,
}

/// Gives each rank what it has where experts are placed as `to` says. `tensors` are this
/// rank's part as [`Ranks::mesh`] has placed them, which stay as they are. All ranks call it.
///
/// # Errors
/// [`TrainError::Engine`] for a placement of other experts or groups, and for those of the
/// exchange; [`TrainError::Tensor`] for a tensor that is not the rank's part.
pub fn prepare(
    ranks: &Ranks,
    to: &Placement,
    tensors: &Tensors<'_>,
) -> Result<Prepared, TrainError> {
    let mesh = ranks.mesh().placed(to)?;
    let from = ranks.mesh().placement_of(to.experts());
    let from = from.ok_or_else(|| other_experts(ranks.mesh(), to))?;
    let plan = moves(&from, to).map_err(planned)?;
    let own = ranks.mesh().place().ep;
    let held = from.of(own).into_owned();
    let tensors = moved(ranks, &plan, (&held, to), tensors)?;
    let ranks = ranks.clone();
    Ok(Prepared {
        ranks,
        mesh,
        tensors,
    })
}

impl Prepared {
    /// The mesh with the new placement.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Waits until all ranks have what they need, and gives what this one has from now on.
    /// What it had before may then be forgotten, and not a moment sooner.
    ///
    /// # Errors
    /// [`NotCommitted`], with which nothing is lost.
    pub fn commit(self) -> Result<Tensors<'static>, Box<NotCommitted>> {
        let all = self
            .ranks
            .gather_bytes(&[1], ProcessGroup::World, "experts have moved");
        match all {
            Ok(_) => Ok(self.tensors),
            Err(error) => Err(Box::new(NotCommitted {
                error: error.into(),
                after: self.tensors,
            })),
        }
    }
}

/// What a rank is left with, and what it is to have: the state of `ranks`, of which each has
/// kept some experts from a mesh with others. `held` are the experts of this rank's
/// `tensors`, in their order; what no rank has comes from a checkpoint of the same step, in
/// which the layer is whole. Slices are as many as they were, and one group holds all
/// experts (`dp = 1`).
///
/// # Errors
/// [`TrainError::NotPreserved`] for other meshes, and for a checkpoint of another step: what
/// every rank has (router, step count of the optimizer) is not the same in it. Then all goes
/// back to the checkpoint. [`TrainError::Tensor`] for what the checkpoint has not.
pub fn resume(
    ranks: &Ranks,
    (held, tensors): (&[usize], &Tensors<'_>),
    checkpoint: &dyn WeightSource,
) -> Result<Tensors<'static>, TrainError> {
    let (mesh, parallel) = (ranks.mesh(), ranks.mesh().parallel());
    if parallel.dp != 1 || parallel.shards_shared() {
        let reason = "what is left can be resumed where one group holds all experts and shared \
                      experts are whole; read the checkpoint instead";
        return Err(TrainError::NotPreserved(reason.to_string()));
    }
    let told: Vec<u8> = held
        .iter()
        .flat_map(|e| (*e as u64).to_le_bytes())
        .collect();
    let all = ranks.gather_bytes(&told, ProcessGroup::Ep, "experts that are left")?;
    let numbers = |bytes: &Vec<u8>| {
        let each = bytes.as_chunks().0.iter();
        each.map(|&number| u64::from_le_bytes(number) as usize)
            .collect()
    };
    let left: Vec<Vec<usize>> = all
        .iter()
        .step_by(parallel.expert_tp)
        .map(numbers)
        .collect();
    let experts = experts_of(mesh, tensors, held.len(), checkpoint)?;
    let to = mesh.placement_of(experts);
    let to = to.ok_or_else(|| TrainError::NotPreserved(too_few(mesh, experts)))?;
    let plan = moves_from(&left, &to);
    if !plan.missing.is_empty() {
        check_step(ranks, tensors, checkpoint)?;
    }
    let mut whole = moved(ranks, &plan, (held, &to), tensors)?;
    let own = mesh.place().ep;
    let missing = plan.missing.iter().filter(|(group, _)| *group == own);
    let slots: Vec<usize> = missing.map(|(_, slot)| *slot).collect();
    for (name, tensor) in whole.iter_mut() {
        if mesh.process_group(name) != ProcessGroup::ExpertDp || slots.is_empty() {
            continue;
        }
        let part = mesh.part(checkpoint, name)?;
        let row = row_bytes(tensor);
        for slot in &slots {
            let bytes = part.data.get(slot * row..(slot + 1) * row);
            let bytes =
                bytes.ok_or_else(|| TrainError::tensor(name, "is smaller in the checkpoint"))?;
            tensor.data.to_mut()[slot * row..(slot + 1) * row].copy_from_slice(bytes);
        }
    }
    Ok(whole)
}

/// What a rank has that has not forgotten its experts before, nor those after, when a commit
/// has failed ([`NotCommitted`]): those of both, which [`resume`] takes. `before` and `after`
/// are experts in their order, and tensors.
///
/// # Errors
/// [`TrainError::Tensor`] for tensors that are not of so many experts.
pub fn both(
    mesh: &Mesh,
    before: (&[usize], &Tensors<'_>),
    after: (&[usize], &Tensors<'_>),
) -> Result<(Vec<usize>, Tensors<'static>), TrainError> {
    let held = [before.0, after.0].concat();
    let mut tensors = Tensors::new();
    for (name, own) in before.1 {
        let mut whole = own.clone().into_static();
        if mesh.process_group(name) == ProcessGroup::ExpertDp {
            let missing = || TrainError::tensor(name, "is missing after experts have moved");
            let other = after.1.get(name).ok_or_else(missing)?;
            whole.shape[0] += other.shape.first().copied().unwrap_or(0);
            whole.data = [&*own.data, &*other.data].concat().into();
        }
        tensors.insert(name.as_str(), whole);
    }
    check_parts(mesh, &held, &tensors)?;
    Ok((held, tensors))
}

/// Refuses tensors that are not of this rank's experts.
fn check_parts(mesh: &Mesh, held: &[usize], tensors: &Tensors<'_>) -> Result<(), TrainError> {
    let mut parts = tensors
        .iter()
        .filter(|(name, _)| mesh.process_group(name) == ProcessGroup::ExpertDp);
    match parts.find(|(_, tensor)| tensor.shape.first() != Some(&held.len())) {
        None => Ok(()),
        Some((name, tensor)) => {
            let (shape, experts) = (&tensor.shape, held.len());
            let problem = format!("has shape {shape:?}, this rank has {experts} experts");
            Err(TrainError::tensor(name, problem))
        }
    }
}

/// The tensors of this rank after moves; zeros where something is missing.
fn moved(
    ranks: &Ranks,
    plan: &Moves,
    (held, to): (&[usize], &Placement),
    tensors: &Tensors<'_>,
) -> Result<Tensors<'static>, TrainError> {
    let (mesh, place) = (ranks.mesh().parallel(), ranks.mesh().place());
    let peer = |group: usize| group * mesh.expert_tp + place.tp;
    let of_experts = |name: &str| ranks.mesh().process_group(name) == ProcessGroup::ExpertDp;
    let parts = || tensors.iter().filter(|(name, _)| of_experts(name));
    check_parts(ranks.mesh(), held, tensors)?;
    let row = |slot: usize| {
        let of = |(_, tensor): (_, &Tensor<'_>)| {
            let bytes = row_bytes(tensor);
            tensor.data[slot * bytes..(slot + 1) * bytes].to_vec()
        };
        parts().map(of).collect::<Vec<_>>().concat()
    };
    let size: usize = parts().map(|(_, tensor)| row_bytes(tensor)).sum();
    let sends = plan
        .sent(place.ep)
        .map(|one| (peer(one.to.0), row(one.from.1)));
    let receives = plan.got(place.ep).map(|one| (peer(one.from.0), size));
    let (sends, receives): (Vec<_>, Vec<_>) = (sends.collect(), receives.collect());
    let arrived = ranks.trade(&sends, &receives, ProcessGroup::Ep, "experts that move")?;
    let mut after = Tensors::new();
    for (name, tensor) in tensors {
        after.insert(
            name.as_str(),
            if of_experts(name) {
                let mut shape = tensor.shape.clone();
                shape[0] = to.count(place.ep);
                Tensor::zeros(tensor.dtype, &shape)
            } else {
                tensor.clone().into_static()
            },
        );
    }
    let kept = plan.kept.iter().filter(|kept| kept.group == place.ep);
    let stays = kept.map(|kept| (kept.to, row(kept.from)));
    let comes = plan.got(place.ep).map(|one| one.to.1).zip(arrived);
    for (slot, bytes) in stays.chain(comes) {
        let mut rest = &bytes[..];
        for (_, tensor) in after.iter_mut().filter(|(name, _)| of_experts(name)) {
            let row = row_bytes(tensor);
            let (own, behind) = rest.split_at(row);
            tensor.data.to_mut()[slot * row..(slot + 1) * row].copy_from_slice(own);
            rest = behind;
        }
    }
    Ok(after)
}

/// Refuses a checkpoint in which what every rank has is not the same.
fn check_step(
    ranks: &Ranks,
    tensors: &Tensors<'_>,
    checkpoint: &dyn WeightSource,
) -> Result<(), TrainError> {
    let mesh = ranks.mesh();
    let mut differs = String::new();
    let everywhere = tensors
        .iter()
        .filter(|(name, _)| mesh.process_group(name) == ProcessGroup::World);
    for (name, tensor) in everywhere {
        if mesh.part(checkpoint, name)?.data != tensor.data && differs.is_empty() {
            differs = name.clone();
        }
    }
    // One rank's finding is everybody's, so that none waits for the others.
    let all = ranks.gather_bytes(
        differs.as_bytes(),
        ProcessGroup::World,
        "steps of a checkpoint",
    )?;
    match all.into_iter().find(|name| !name.is_empty()) {
        None => Ok(()),
        Some(name) => Err(TrainError::NotPreserved(format!(
            "the checkpoint is of another step than what is left: `{}` is not the same; resume \
             all of it from the checkpoint",
            String::from_utf8_lossy(&name)
        ))),
    }
}

/// Experts of the layer: in the checkpoint, of any tensor of experts.
fn experts_of(
    mesh: &Mesh,
    tensors: &Tensors<'_>,
    held: usize,
    checkpoint: &dyn WeightSource,
) -> Result<usize, TrainError> {
    let of_experts = |name: &&String| mesh.process_group(name) == ProcessGroup::ExpertDp;
    let described = tensors.keys().find(of_experts);
    let described = described.and_then(|name| checkpoint.describe(name));
    let found = described.and_then(|(_, shape)| shape.first().copied());
    let reason = || format!("no tensor of {held} experts is in the checkpoint");
    found.ok_or_else(|| TrainError::NotPreserved(reason()))
}

fn too_few(mesh: &Mesh, experts: usize) -> String {
    let ep = mesh.parallel().ep;
    format!("{experts} experts cannot be placed so on {ep} groups of ranks")
}

fn other_experts(mesh: &Mesh, to: &Placement) -> TrainError {
    TrainError::NotPreserved(too_few(mesh, to.experts()))
}

fn planned(error: moesaic_plan::PlacementError) -> TrainError {
    EngineError::Plan(PlanError::from(error)).into()
}

/// Bytes of an expert.
fn row_bytes(tensor: &Tensor<'_>) -> usize {
    tensor.data.len() / tensor.shape.first().copied().unwrap_or(1).max(1)
}
