//! The search for the fastest configurations on a machine.

use crate::error::PlannerError;
use crate::{Prediction, Scenario, Simulator};
use moesaic_dist::ALL_TO_ALLS;
use moesaic_plan::{
    AllToAll, Both, CommDtype, OverlapBy, Parallel, Placement, SharedExperts, Strategy,
};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The configurations to search.
#[derive(Clone, Debug, PartialEq)]
pub struct Space {
    /// Search this mesh only.
    pub mesh: Option<Parallel>,
    /// Search this strategy only.
    pub strategy: Option<Strategy>,
    /// The overlap degrees.
    pub overlap_degrees: Vec<usize>,
    /// The types of rows between nodes.
    pub comm_dtypes: Vec<CommDtype>,
    /// The numbers of experts that may have shadows.
    pub shadows: Vec<usize>,
}

impl Default for Space {
    /// Every mesh, parallelism degree and all-to-all algorithm, the overlap degrees of Tutel's
    /// search, uncast rows, and no or four shadows.
    fn default() -> Self {
        Space {
            mesh: None,
            strategy: None,
            overlap_degrees: vec![1, 2, 4, 8],
            comm_dtypes: vec![CommDtype::Unchanged],
            shadows: vec![0, 4],
        }
    }
}

/// The result of a search.
#[derive(Clone, Debug, Default)]
pub struct Ranked {
    /// The configurations that fit in memory, the fastest first. Ahead of them comes the simplest
    /// of those that are practically as fast ([`Strategy::simplest`], on the fastest mesh).
    pub best: Vec<Prediction>,
    /// The number of simulated configurations.
    pub simulated: usize,
    /// The number of those that do not fit in memory.
    pub too_large: usize,
}

/// Simulates every configuration of a space and ranks them. Of equally fast ones the simplest
/// comes first.
///
/// Overlap degrees and comm dtypes are chosen separately for forward and backward, from runs that
/// use the same in both; the best combination is simulated once more. Shadows are tried only
/// where some experts have more rows than others.
///
/// # Errors
/// [`PlannerError::Nothing`] where nothing fits in memory; the error of a mesh or strategy that
/// was requested alone and is impossible.
pub fn search(scenario: &Scenario, space: &Space) -> Result<Ranked, PlannerError> {
    if let Some(groups) = scenario.placement.as_ref().map(Placement::groups)
        && !scenario.world.is_multiple_of(groups)
    {
        let world = scenario.world;
        return Err(PlannerError::Groups { groups, world });
    }
    let mut ranked = Ranked::default();
    for found in of_each(scenario, space) {
        let found = found?;
        ranked.simulated += found.simulated;
        ranked.too_large += found.too_large;
        ranked.best.extend(found.best);
    }
    if ranked.best.is_empty() {
        return Err(PlannerError::Nothing {
            world: scenario.world,
            gib: scenario.machine.compute.memory_gib,
        });
    }
    // Round to a nanosecond, because a smaller gain does not justify complexity.
    let key = |p: &Prediction| {
        (
            (p.seconds * 1e9).round() as u64,
            p.mesh.expert_tp,
            p.strategy,
        )
    };
    // Mesh and strategy break ties, so that the ranking does not depend on thread timing.
    ranked.best.sort_by_key(key);
    // A combination of two passes may have been simulated as an ordinary strategy before.
    ranked.best.dedup_by_key(|p| (p.mesh, p.strategy));
    if let Some(simplest) = simplest(&ranked.best) {
        // Moves the simplest to the front and keeps the order of the others.
        ranked.best[..=simplest].rotate_right(1);
    }
    Ok(ranked)
}

/// Returns the results of each mesh in order; as many run at once as there are processors.
fn of_each(scenario: &Scenario, space: &Space) -> Vec<Result<Ranked, PlannerError>> {
    let meshes = meshes(scenario, space);
    let next = AtomicUsize::new(0);
    let work = || {
        // One simulator per thread: its caches are not shared, and meshes have little in common.
        let simulator = Simulator::new(scenario);
        let claimed = std::iter::from_fn(|| Some(next.fetch_add(1, Ordering::Relaxed)));
        let claimed = claimed.take_while(|at| *at < meshes.len());
        claimed
            .map(|at| (at, of_mesh(&simulator, space, meshes[at])))
            .collect::<Vec<_>>()
    };
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let mut found: Vec<(usize, _)> = std::thread::scope(|scope| {
        let others = processors.min(meshes.len()).saturating_sub(1);
        let others: Vec<_> = (0..others).map(|_| scope.spawn(work)).collect();
        let own = work();
        let others = others.into_iter().flat_map(|thread| {
            let found = thread.join();
            found.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        own.into_iter().chain(others).collect()
    });
    found.sort_by_key(|(at, _)| *at);
    found.into_iter().map(|(_, found)| found).collect()
}

/// Returns all configurations of a mesh, in no order.
fn of_mesh(simulator: &Simulator, space: &Space, mesh: Parallel) -> Result<Ranked, PlannerError> {
    // Before its strategies are listed: there are as many as `expert_tp` has divisors.
    simulator.check_mesh(mesh)?;
    let scenario = simulator.scenario();
    let limit = scenario.machine.compute.memory_gib * f64::from(1u32 << 30);
    let mut ranked = Ranked::default();
    let all = space.strategies(mesh, simulator.has_nodes(mesh));
    // With even rows no expert is worth a shadow, so those strategies would only double the
    // search.
    let asked = space.strategy.is_some() || !scenario.routing.is_even();
    for strategy in all.into_iter().filter(|s| asked || s.shadows == 0) {
        let prediction = simulator.brief(mesh, strategy)?;
        ranked.simulated += 1;
        // A strategy that was asked for by name is shown even if it does not fit.
        if prediction.memory.bytes() <= limit || space.strategy.is_some() {
            ranked.best.push(prediction)
        } else {
            ranked.too_large += 1
        }
    }
    combine(simulator, &mut ranked)?;
    Ok(ranked)
}

/// Returns the index of the simplest configuration of the best mesh.
fn simplest(ranked: &[Prediction]) -> Option<usize> {
    let mesh = ranked.first()?.mesh;
    let same = ranked.iter().filter(|p| p.mesh == mesh);
    let found = Strategy::simplest(same.map(|p| (p.strategy, p.seconds)))?;
    ranked
        .iter()
        .position(|p| p.mesh == mesh && p.strategy == found)
}

/// Combines, in training, the best forward and the best backward of strategies that agree in
/// everything else.
fn combine(simulator: &Simulator, ranked: &mut Ranked) -> Result<(), PlannerError> {
    if simulator.scenario().training.is_none() {
        return Ok(());
    }
    let best = |same: &[&Prediction], pass: usize| -> Option<Strategy> {
        let time = |p: &&&Prediction| p.passes[pass].seconds;
        same.iter()
            .min_by(|a, b| time(a).total_cmp(&time(b)))
            .map(|p| p.strategy)
    };
    let mut more = Vec::new();
    let kind = |p: &Prediction| (p.mesh, p.strategy.shared());
    for same in ranked.best.chunk_by(|a, b| kind(a) == kind(b)) {
        let same: Vec<&Prediction> = same.iter().collect();
        let (Some(forward), Some(backward)) = (best(&same, 0), best(&same, 1)) else {
            continue;
        };
        // Equal passes are already in the list.
        if forward != backward {
            more.push((same[0].mesh, forward.with_backward_of(backward)));
        }
    }
    ranked.simulated += more.len();
    for (mesh, strategy) in more {
        ranked.best.push(simulator.brief(mesh, strategy)?);
    }
    Ok(())
}

/// Returns every mesh of the job's ranks that the layer and its placement allow.
fn meshes(scenario: &Scenario, space: &Space) -> Vec<Parallel> {
    let (world, spec) = (scenario.world, &scenario.spec);
    let groups = scenario.placement.as_ref().map(Placement::groups);
    // A requested mesh is simulated even if the layer rejects it, so that its own error is
    // reported.
    if let Some(mesh) = space.mesh {
        return vec![mesh];
    }
    let divisors = |of: usize| (1..=of).filter(move |n| of.is_multiple_of(*n));
    let of = |ep: usize| {
        divisors(world / ep).map(move |expert_tp| Parallel {
            ep,
            expert_tp,
            dp: world / ep / expert_tp,
            shared: SharedExperts::Whole,
        })
    };
    let all = divisors(world).flat_map(of);
    all.filter(|mesh| groups.is_none_or(|groups| groups == mesh.ep))
        .filter(|mesh| mesh.check(spec).is_ok())
        .collect()
}

impl Space {
    /// Returns the strategies of a mesh, with equal chunks and comm dtype in both passes. `nodes`
    /// says whether the mesh has the nodes that two-dimensional algorithms need.
    pub fn strategies(&self, mesh: Parallel, nodes: bool) -> Vec<Strategy> {
        match self.strategy {
            Some(strategy) => vec![strategy],
            None => strategies(self, mesh, nodes),
        }
    }

    /// Returns the numbers of shadows. Only whole experts on several ranks may have any.
    fn shadows(&self, adaptive_r: Option<usize>, mesh: Parallel) -> Vec<usize> {
        let some = adaptive_r.is_none() && mesh.expert_tp == 1 && mesh.ep > 1;
        let most = self.shadows.iter().copied();
        most.filter(|most| some || *most == 0).collect()
    }
}

fn strategies(space: &Space, mesh: Parallel, nodes: bool) -> Vec<Strategy> {
    let algorithms = algorithms(nodes);
    let mut list = Vec::new();
    for adaptive_r in adaptive_r(mesh) {
        let algorithms = if adaptive_r == Some(0) {
            &[AllToAll::Linear][..]
        } else {
            &algorithms
        };
        for &all_to_all in algorithms {
            for &overlap_by in cuts(adaptive_r, all_to_all) {
                for shadows in space.shadows(adaptive_r, mesh) {
                    let overlap_degrees = space.overlap_degrees.iter().copied();
                    // With one chunk, the way to split makes no difference.
                    for overlap_degree in overlap_degrees.filter(|overlap_degree| {
                        overlap_by == OverlapBy::Rows || *overlap_degree > 1
                    }) {
                        list.extend(space.comm_dtypes.iter().map(|&comm_dtype| Strategy {
                            adaptive_r,
                            overlap_degree: Both::same(overlap_degree),
                            overlap_by,
                            all_to_all,
                            comm_dtype: Both::same(comm_dtype),
                            shadows,
                        }));
                    }
                }
            }
        }
    }
    list
}

/// Returns the simulated ways to split rows into chunks.
fn cuts(adaptive_r: Option<usize>, all_to_all: AllToAll) -> &'static [OverlapBy] {
    if all_to_all.row().is_direct() && adaptive_r != Some(0) {
        &[OverlapBy::Rows, OverlapBy::Peers]
    } else {
        &[OverlapBy::Rows]
    }
}

/// Returns all shards, by its short name; every divisor of their number; and none.
fn adaptive_r(mesh: Parallel) -> Vec<Option<usize>> {
    let fewer = (1..mesh.expert_tp).filter(|n| mesh.expert_tp.is_multiple_of(*n));
    // With one rank there is nothing to gather.
    let gathered = (mesh.group() > 1).then_some(Some(0));
    std::iter::once(None)
        .chain(fewer.map(Some))
        .chain(gathered)
        .collect()
}

fn algorithms(nodes: bool) -> Vec<AllToAll> {
    let rows = ALL_TO_ALLS.iter();
    let possible = rows.filter(|row| row.searched && (nodes || !row.needs_nodes()));
    possible.map(|row| row.all_to_all).collect()
}
