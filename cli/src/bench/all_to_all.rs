//! What steps take by each all-to-all algorithm and in chunks: `moesaic bench --ranks` times real ones, since the
//! figures of links know nothing of what ranks do between their messages.

use crate::failure::{Failure, Result};
use crate::random;
use moesaic::collectives::{Call, Collectives, Topology};
use moesaic::plan::{AllToAll, Both, OverlapBy, ShadowModel};
use moesaic::planner::{AllToAllFactor, Machine, Routing, Scenario, all_to_all_factor};
use moesaic::{Engine, LayerSpec, Mesh, MeshLayer, Parallel, RngKey, Strategy, Tensors};
use moesaic::{Input, Tensor, Training};
use std::time::Instant;

/// Steps of each strategy, and one before them that compiles.
const ROUNDS: usize = 8;

/// Those that need nodes last.
const ALGORITHMS: [AllToAll; 5] = [
    AllToAll::Linear,
    AllToAll::TwoDh,
    AllToAll::TwoDhInterFirst,
    AllToAll::TwoDhConcurrent,
    AllToAll::Dedup,
];

/// In how many chunks: what lies between is interpolated.
const DEGREES: [usize; 3] = [1, 2, 4];

/// Steps of a layer whose experts are spread over all ranks.
pub struct Steps {
    mesh: Parallel,
    spec: LayerSpec,
    timed: Vec<Timed>,
}

/// Steps of so many tokens on each rank.
struct Timed {
    tokens: usize,
    /// Rows that each rank has for each expert.
    counts: Vec<Vec<u64>>,
    /// Seconds with each strategy.
    seconds: Vec<(Strategy, f64)>,
}

/// A step by a all-to-all algorithm, in so many chunks.
pub struct ByAllToAll {
    pub tokens: usize,
    pub strategy: Strategy,
    pub seconds: f64,
    /// How much longer rows took than links say.
    pub factor: AllToAllFactor,
}

impl Steps {
    /// Times steps with each of these numbers of tokens; by all-to-all algorithms in two dimensions where
    /// several nodes have several ranks each. `None` where experts cannot be spread evenly.
    pub fn time(
        engine: &Engine,
        spec: &LayerSpec,
        (weights, tokens): (&Tensors<'_>, &[usize]),
        (world, topology): (&mut dyn Collectives, &Topology),
    ) -> Result<Option<Steps>> {
        let mesh = Parallel {
            ep: world.size(),
            ..Parallel::default()
        };
        if world.size() < 2 || mesh.check(spec).is_err() {
            return Ok(None);
        }
        let ranks = Mesh::new(world, mesh)?;
        let mut layer = engine.mesh_layer(&ranks, spec, weights, Some(Training::default()))?;
        let nodes = topology.shape.filter(|it| it.nodes > 1 && it.per_node > 1);
        let algorithms = match nodes {
            Some(_) => &ALGORITHMS[..],
            None => &ALGORITHMS[..1],
        };
        let mut strategies = strategies(algorithms);
        strategies.retain(|strategy| layer.check_strategy(*strategy).is_ok());
        let each = tokens.iter().map(|tokens| {
            let input = own_input(spec, *tokens, world.rank());
            Ok(Timed {
                tokens: *tokens,
                seconds: by_strategy(&mut layer, &strategies, &input, world)?,
                counts: layer.tokens_per_expert(&input, RngKey::default())?,
            })
        });
        Ok(Some(Steps {
            mesh,
            spec: spec.clone(),
            timed: each.collect::<Result<_>>()?,
        }))
    }

    /// Each step beside what a machine with such links is predicted to take.
    pub fn on(&self, machine: &Machine) -> Result<Vec<ByAllToAll>> {
        let mut list = Vec::new();
        for timed in &self.timed {
            let question = self.question(machine, timed)?;
            for &(strategy, seconds) in &timed.seconds {
                let factor = all_to_all_factor(&question, self.mesh, strategy, seconds);
                list.push(ByAllToAll {
                    tokens: timed.tokens,
                    strategy,
                    seconds,
                    factor: factor.map_err(Failure::work)?,
                });
            }
        }
        Ok(list)
    }

    fn question(&self, machine: &Machine, timed: &Timed) -> Result<Scenario> {
        let (shape, ranks) = (&self.spec.shape, self.mesh.ranks());
        let routing = Routing::counted(ranks, shape.experts, shape.top_k, &timed.counts);
        Ok(Scenario {
            routing: routing.map_err(Failure::work)?,
            placement: None,
            shadow_model: ShadowModel::of(&self.spec),
            spec: self.spec.clone(),
            machine: machine.clone(),
            world: ranks,
            training: Some(Training::default()),
        })
    }
}

/// Each all-to-all algorithm in one chunk and in several, and chunks by ranks.
fn strategies(algorithms: &[AllToAll]) -> Vec<Strategy> {
    let of = |all_to_all, overlap_degree, overlap_by| Strategy {
        all_to_all,
        overlap_degree: Both::same(overlap_degree),
        overlap_by,
        ..Strategy::default()
    };
    let each = |&all_to_all: &AllToAll| {
        DEGREES.map(|overlap_degree| of(all_to_all, overlap_degree, OverlapBy::Rows))
    };
    let chunks = DEGREES
        .into_iter()
        .filter(|overlap_degree| *overlap_degree > 1);
    let by_ranks =
        chunks.map(|overlap_degree| of(AllToAll::Linear, overlap_degree, OverlapBy::Peers));
    algorithms.iter().flat_map(each).chain(by_ranks).collect()
}

/// Seconds of a step with each strategy, all in turns: the lower quartile of the slowest rank's.
fn by_strategy(
    layer: &mut MeshLayer,
    strategies: &[Strategy],
    input: &Input<'_>,
    world: &mut dyn Collectives,
) -> Result<Vec<(Strategy, f64)>> {
    let dy = random::output_gradient(&layer.plan().tokens.spec, input.tokens);
    let mut own = vec![Vec::new(); strategies.len()];
    for round in 0..=ROUNDS {
        for turn in 0..strategies.len() {
            // Whoever comes first finds other queues than those after.
            let at = (round + turn) % strategies.len();
            layer.set_strategy(strategies[at])?;
            let seconds = step(layer, (input, &dy), world)?;
            if round > 0 {
                own[at].push(seconds);
            }
        }
    }
    let each = strategies.iter().zip(own);
    each.map(|(strategy, own)| Ok((*strategy, slowest(world, &own)?)))
        .collect()
}

fn step(
    layer: &MeshLayer,
    (input, dy): (&Input<'_>, &Tensor<'_>),
    world: &mut dyn Collectives,
) -> Result<f64> {
    // Who comes late to the first meeting is awake at the second.
    for _ in 0..2 {
        let meet = world.barrier(&Call::new("begin of a step"));
        let meet = meet.map_err(Failure::work)?;
        meet.wait().map_err(Failure::work)?;
    }
    let start = Instant::now();
    let (_, saved) = layer.forward_train(input, &["y"], RngKey::default())?;
    layer.backward(&saved, dy, false)?;
    Ok(start.elapsed().as_secs_f64())
}

/// Random tokens, others on every rank, so that they have other experts, too.
fn own_input(spec: &LayerSpec, tokens: usize, rank: usize) -> Input<'static> {
    let mut input = random::input(spec, tokens);
    let flips = |at: usize| (at ^ rank << 20).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 63 == 1;
    if let Some(x) = input.tensors.get("x") {
        let x = random::changed(x, |at, value| if flips(at) { -value } else { value });
        input.insert("x", x);
    }
    input
}

/// Of each of a rank's times the largest of any rank; of these the lower quartile.
fn slowest(world: &mut dyn Collectives, own: &[f64]) -> Result<f64> {
    let bytes: Vec<u8> = own.iter().flat_map(|n| n.to_le_bytes()).collect();
    let all = world.gather_bytes(&bytes, &Call::new("times of steps"));
    let all = all.map_err(Failure::work)?;
    let of = |rank: &Vec<u8>, at: usize| rank.as_chunks::<8>().0.get(at).copied();
    let most = |at: usize| {
        let each = all.iter().filter_map(|rank| of(rank, at));
        each.map(f64::from_le_bytes).fold(0.0, f64::max)
    };
    let mut times: Vec<f64> = (0..own.len()).map(most).collect();
    times.sort_by(f64::total_cmp);
    Ok(times.get(times.len() / 4).copied().unwrap_or_default())
}
