//! Which configurations a machine would do best.

use crate::scenario::PlannerError;
use crate::{Prediction, Scenario, Simulator};
use moesaic_plan::{
    AllToAll, Both, CommDtype, OverlapBy, Parallel, Placement, SharedExperts, Strategy,
};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Which configurations are looked at.
#[derive(Clone, Debug, PartialEq)]
pub struct Space {
    /// One mesh alone.
    pub mesh: Option<Parallel>,
    /// One strategy alone.
    pub strategy: Option<Strategy>,
    /// Pieces.
    pub overlap_degrees: Vec<usize>,
    /// What rows are between nodes.
    pub comm_dtypes: Vec<CommDtype>,
    /// How many experts may have shadows.
    pub shadows: Vec<usize>,
}

impl Default for Space {
    /// Every mesh, way and all-to-all, the degrees of Tutel's search, rows as they are, no shadows
    /// or four of them.
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

/// What a search found.
#[derive(Clone, Debug, Default)]
pub struct Ranked {
    /// Those that fit into memory, the fastest first; before them the simplest of those that
    /// are as good as equal ([`Strategy::simplest`], of the mesh that is the fastest).
    pub best: Vec<Prediction>,
    /// Configurations that were simulated.
    pub simulated: usize,
    /// Of these, those that do not fit into memory.
    pub too_large: usize,
}

/// Simulates every configuration of a space, and ranks them. Of those that take equally
/// long the simplest comes first.
///
/// Degrees and wire types of forward and of backward are chosen apart, from passes that have
/// the same in both; the two best together are simulated once more. Shadows are looked at
/// where some experts have more rows than others.
///
/// # Errors
/// [`PlannerError::Nothing`] where nothing fits into memory, and what a mesh or strategy
/// that was asked for by itself cannot be.
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
    // A nanosecond is no reason to be complicated.
    let key = |p: &Prediction| {
        (
            (p.seconds * 1e9).round() as u64,
            p.mesh.expert_tp,
            p.strategy,
        )
    };
    ranked.best.sort_by_key(key);
    ranked.best.dedup_by_key(|p| (p.mesh, p.strategy));
    if let Some(simplest) = simplest(&ranked.best) {
        ranked.best[..=simplest].rotate_right(1);
    }
    Ok(ranked)
}

/// What is found of each mesh, in their order: as many at once as there are processors.
fn of_each(scenario: &Scenario, space: &Space) -> Vec<Result<Ranked, PlannerError>> {
    let meshes = meshes(scenario, space);
    let next = AtomicUsize::new(0);
    let work = || {
        let simulator = Simulator::new(scenario);
        let cost_of = std::iter::from_fn(|| Some(next.fetch_add(1, Ordering::Relaxed)));
        let cost_of = cost_of.take_while(|at| *at < meshes.len());
        cost_of
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

/// All configurations of a mesh, in no order.
fn of_mesh(simulator: &Simulator, space: &Space, mesh: Parallel) -> Result<Ranked, PlannerError> {
    let scenario = simulator.scenario();
    let limit = scenario.machine.compute.memory_gib * f64::from(1u32 << 30);
    let mut ranked = Ranked::default();
    let all = space.strategies(mesh, simulator.has_nodes(mesh));
    let asked = space.strategy.is_some() || !scenario.routing.is_even();
    for strategy in all.into_iter().filter(|s| asked || s.shadows == 0) {
        let prediction = simulator.brief(mesh, strategy)?;
        ranked.simulated += 1;
        if prediction.memory.bytes() <= limit || space.strategy.is_some() {
            ranked.best.push(prediction)
        } else {
            ranked.too_large += 1
        }
    }
    combine(simulator, &mut ranked)?;
    Ok(ranked)
}

/// Where the simplest of the best mesh is.
fn simplest(ranked: &[Prediction]) -> Option<usize> {
    let mesh = ranked.first()?.mesh;
    let same = ranked.iter().filter(|p| p.mesh == mesh);
    let found = Strategy::simplest(same.map(|p| (p.strategy, p.seconds)))?;
    ranked
        .iter()
        .position(|p| p.mesh == mesh && p.strategy == found)
}

/// In training, of strategies that have the same in common: the best forward with the best backward.
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

/// Every mesh of so many ranks that the layer and its placement can have.
fn meshes(scenario: &Scenario, space: &Space) -> Vec<Parallel> {
    let (world, spec) = (scenario.world, &scenario.spec);
    let groups = scenario.placement.as_ref().map(Placement::groups);
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
    /// What ranks of a mesh may do, chunks and wire alike in both passes; `nodes`: whether
    /// there are those that all-to-all algorithms in two dimensions need.
    pub fn strategies(&self, mesh: Parallel, nodes: bool) -> Vec<Strategy> {
        match self.strategy {
            Some(strategy) => vec![strategy],
            None => strategies(self, mesh, nodes),
        }
    }

    /// Numbers of shadows, of which whole experts on several ranks have more than none.
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
                    // One chunk is one however it is cut.
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

/// How rows that comm may be cut, as far as it is simulated.
fn cuts(adaptive_r: Option<usize>, all_to_all: AllToAll) -> &'static [OverlapBy] {
    if all_to_all == AllToAll::Linear && adaptive_r != Some(0) {
        &[OverlapBy::Rows, OverlapBy::Peers]
    } else {
        &[OverlapBy::Rows]
    }
}

/// All shards, by its short name; every divisor of their number; none.
fn adaptive_r(mesh: Parallel) -> Vec<Option<usize>> {
    let fewer = (1..mesh.expert_tp).filter(|n| mesh.expert_tp.is_multiple_of(*n));
    let gathered = (mesh.group() > 1).then_some(Some(0));
    std::iter::once(None)
        .chain(fewer.map(Some))
        .chain(gathered)
        .collect()
}

fn algorithms(nodes: bool) -> Vec<AllToAll> {
    let mut list = vec![AllToAll::Linear];
    if nodes {
        list.extend([AllToAll::TwoDh, AllToAll::TwoDhInterFirst]);
        list.extend([AllToAll::TwoDhConcurrent, AllToAll::Dedup]);
    }
    list
}
