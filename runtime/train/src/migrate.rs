//! Moving experts between ranks between steps, with every tensor named after them: weights, master
//! copies, optimizer state.
//!
//! ```text
//! prepare   each rank copies what it keeps, sends what others need, gets what it needs
//! commit    all ranks say that they have it all
//! after     each lets go of what it had before
//! ```
//!
//! A rank keeps its earlier tensors until [`Prepared::commit`] has returned, and that returns only
//! when every rank has reported its new ones. So if a rank is lost at any point, the others still
//! hold every expert that was not on that rank alone: ranks whose `commit` failed have both states
//! ([`NotCommitted`]). [`resume`] turns the remaining tensors ([`both`], if a rank has both states)
//! into the state of another set of ranks, and takes lost experts from a checkpoint of the same
//! step.

use crate::TrainError;
use moesaic_engine::{EngineError, Mesh, ProcessGroup, Ranks};
use moesaic_plan::{Moves, Placement, PlanError, moves, moves_from};
use moesaic_tensor::{Tensor, Tensors, WeightSource};
use std::fmt;

/// A rank's tensors after experts have moved, not to be used yet: see [`Prepared::commit`].
pub struct Prepared {
    ranks: Ranks,
    mesh: Mesh,
    tensors: Tensors<'static>,
}

impl fmt::Debug for Prepared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prepared")
            .field("mesh", &self.mesh)
            .finish_non_exhaustive()
    }
}

/// The error of a commit in which not all ranks reported their new tensors. The caller still has
/// the tensors from before.
#[derive(Debug, thiserror::Error)]
#[error(
    "not all ranks have their experts: continue from the tensors before, or resume without the \
     lost rank: {error}"
)]
pub struct NotCommitted {
    /// The failure.
    pub error: TrainError,
    /// The tensors that this rank would have continued with. Other ranks may have done so.
    pub after: Tensors<'static>,
}

/// Moves experts to the placement `to`. `tensors` are this rank's part as [`Ranks::mesh`] has
/// placed it, and stay unchanged. All ranks call it.
///
/// # Errors
/// [`TrainError::Engine`] for a placement of other experts or groups, and for failures of the
/// exchange. [`TrainError::Tensor`] for a tensor that is not the rank's part.
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
    let held = HeldExperts {
        experts: &held,
        tensors,
    };
    let tensors = moved(ranks, &plan, held, to)?;
    let ranks = ranks.clone();
    Ok(Prepared {
        ranks,
        mesh,
        tensors,
    })
}

impl Prepared {
    /// Returns the mesh with the new placement.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Waits until all ranks have their new tensors, then returns this rank's. Keep the earlier
    /// ones until then, because a failed commit needs them.
    ///
    /// # Errors
    /// [`NotCommitted`], without any loss.
    pub fn commit(self) -> Result<Tensors<'static>, Box<NotCommitted>> {
        // The exchange is a barrier: it returns on a rank only after every rank has called it, and
        // so has its new tensors.
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

/// The experts that a rank holds, and its tensors.
#[derive(Clone, Copy, Debug)]
pub struct HeldExperts<'a> {
    /// The ids of the experts, in the order of their rows in `tensors`.
    pub experts: &'a [usize],
    /// Every tensor of the rank: weights, master copies, optimizer state.
    pub tensors: &'a Tensors<'a>,
}

/// Assembles the state of `ranks` from what is left of a mesh with other ranks. `held` is what
/// this rank still holds. Experts that no rank has come from `checkpoint`,
/// which holds the whole layer at the same step. The number of shards is unchanged, and one group
/// holds all experts (`dp = 1`).
///
/// # Errors
/// [`TrainError::NotPreserved`] for other meshes, and for a checkpoint of another step, in which
/// replicated tensors (router, step count of the optimizer) differ; then restart all ranks from the
/// checkpoint. [`TrainError::Tensor`] for tensors that the checkpoint lacks.
pub fn resume(
    ranks: &Ranks,
    held: HeldExperts<'_>,
    checkpoint: &dyn WeightSource,
) -> Result<Tensors<'static>, TrainError> {
    let left_here = held;
    let HeldExperts {
        experts: held,
        tensors,
    } = held;
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
    // Every rank must know what all hold to compute the same moves.
    let all = ranks.gather_bytes(&told, ProcessGroup::Ep, "experts that are left")?;
    let numbers = |bytes: &Vec<u8>| {
        let each = bytes.as_chunks().0.iter();
        each.map(|&number| u64::from_le_bytes(number) as usize)
            .collect()
    };
    // Shards of one group hold the same experts, so read one rank per group.
    let left: Vec<Vec<usize>> = all
        .iter()
        .step_by(parallel.expert_tp)
        .map(numbers)
        .collect();
    let experts = experts_of(mesh, tensors, held.len(), checkpoint)?;
    let to = mesh.placement_of(experts);
    let to = to.ok_or_else(|| TrainError::NotPreserved(too_few(mesh, experts)))?;
    let plan = moves_from(&left, &to);
    // Mixing two steps would train on without an error, so compare before anything is taken from
    // the checkpoint.
    if !plan.missing.is_empty() {
        check_step(ranks, tensors, checkpoint)?;
    }
    let mut whole = moved(ranks, &plan, left_here, &to)?;
    let own = mesh.place().ep;
    let missing = plan.missing.iter().filter(|at| at.group == own);
    let slots: Vec<usize> = missing.map(|at| at.slot).collect();
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

/// Merges a rank's tensors from before and after a failed commit ([`NotCommitted`]) into the input
/// of [`resume`]: the ids of the experts in order, and the tensors.
///
/// # Errors
/// [`TrainError::Tensor`] for tensors with another number of experts.
pub fn both(
    mesh: &Mesh,
    before: HeldExperts<'_>,
    after: HeldExperts<'_>,
) -> Result<(Vec<usize>, Tensors<'static>), TrainError> {
    let held = [before.experts, after.experts].concat();
    let mut tensors = Tensors::new();
    for (name, own) in before.tensors {
        let mut whole = own.clone().into_static();
        if mesh.process_group(name) == ProcessGroup::ExpertDp {
            let missing = || TrainError::tensor(name, "is missing after experts have moved");
            let other = after.tensors.get(name).ok_or_else(missing)?;
            whole.shape[0] += other.shape.first().copied().unwrap_or(0);
            whole.data = [&*own.data, &*other.data].concat().into();
        }
        tensors.insert(name.as_str(), whole);
    }
    check_parts(mesh, &held, &tensors)?;
    Ok((held, tensors))
}

/// Refuses tensors that do not hold this rank's experts.
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

/// Returns this rank's tensors after moves, with zeros for missing experts.
fn moved(
    ranks: &Ranks,
    plan: &Moves,
    held: HeldExperts<'_>,
    to: &Placement,
) -> Result<Tensors<'static>, TrainError> {
    let (experts, tensors) = (held.experts, held.tensors);
    let (mesh, place) = (ranks.mesh().parallel(), ranks.mesh().place());
    let peer = |group: usize| group * mesh.expert_tp + place.tp;
    let of_experts = |name: &str| ranks.mesh().process_group(name) == ProcessGroup::ExpertDp;
    let parts = || tensors.iter().filter(|(name, _)| of_experts(name));
    check_parts(ranks.mesh(), experts, tensors)?;
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
        .map(|one| (peer(one.to.group), row(one.from.slot)));
    let receives = plan.got(place.ep).map(|one| (peer(one.from.group), size));
    // One message per expert carries its row of every tensor, in the order of names, which is the
    // same on all ranks.
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
    // Write stays and arrivals into new tensors: the old ones must survive a failed commit.
    let kept = plan.kept.iter().filter(|kept| kept.group == place.ep);
    let stays = kept.map(|kept| (kept.to, row(kept.from)));
    let comes = plan.got(place.ep).map(|one| one.to.slot).zip(arrived);
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

/// Refuses a checkpoint whose replicated tensors differ from the ranks'.
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
    // Share each rank's finding with all, so that all fail together and none waits for the others.
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

/// Returns the number of experts in the layer, read from any expert tensor of the checkpoint.
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

/// Returns the bytes of one expert.
fn row_bytes(tensor: &Tensor<'_>) -> usize {
    tensor.data.len() / tensor.shape.first().copied().unwrap_or(1).max(1)
}
