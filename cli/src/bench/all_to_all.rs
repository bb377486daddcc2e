//! Timing of whole steps by each all-to-all algorithm and overlap degree, for `moesaic bench
//! --ranks`. It measures real steps because the figures of links do not include what ranks do
//! between messages.

use crate::failure::{Failure, Result};
use crate::random;
use moesaic::collectives::{Call, Collectives, Topology};
use moesaic::plan::{ALL_TO_ALLS, AllToAll, AllToAllRow, Both, OverlapBy, ShadowModel};
use moesaic::planner::{AllToAllFactor, Machine, RoutedRows, Scenario, all_to_all_factor};
use moesaic::{Engine, Layer, LayerOptions, LayerSpec, Mesh, Parallel, RngKey, Strategy, Tensors};
use moesaic::{Input, Tensor, Training};
use std::time::Instant;

/// Timed steps of each strategy. One more step comes first, which compiles.
const ROUNDS: usize = 8;

/// The overlap degrees that are timed. The planner interpolates between them.
const DEGREES: [usize; 3] = [1, 2, 4];

/// Timed steps of a layer whose experts are spread over all ranks.
pub struct Steps {
    mesh: Parallel,
    spec: LayerSpec,
    timed: Vec<Timed>,
}

/// Timed steps with one number of tokens on each rank.
struct Timed {
    tokens: usize,
    /// The number of rows that each rank has for each expert.
    counts: Vec<Vec<u64>>,
    /// The seconds of a step with each strategy.
    seconds: Vec<(Strategy, f64)>,
}

/// A step with one strategy, compared with the prediction.
pub struct ByAllToAll {
    pub tokens: usize,
    pub strategy: Strategy,
    pub seconds: f64,
    /// The ratio of the rows' time to the time that links predict.
    pub factor: AllToAllFactor,
}

impl Steps {
    /// Times steps with each of these numbers of tokens. Two-dimensional algorithms are timed only
    /// if several nodes have several ranks each. Returns `None` if the experts cannot be spread
    /// evenly.
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
        let mut layer = engine.layer_with(
            spec,
            weights,
            LayerOptions::over(&ranks).training(Training::default()),
        )?;
        let nodes = topology.shape.filter(|it| it.nodes > 1 && it.per_node > 1);
        let mut strategies = strategies(nodes.is_some());
        strategies.retain(|strategy| layer.check_strategy(*strategy).is_ok());
        let each = tokens.iter().map(|tokens| {
            let input = own_input(spec, *tokens, world.rank());
            Ok(Timed {
                tokens: *tokens,
                seconds: by_strategy(&mut layer, &strategies, &input, world)?,
                counts: {
                    let call = input.reading(&[]).in_training(RngKey::default());
                    layer.tokens_per_expert(call)?
                },
            })
        });
        Ok(Some(Steps {
            mesh,
            spec: spec.clone(),
            timed: each.collect::<Result<_>>()?,
        }))
    }

    /// Compares each step with the prediction for a machine with such links.
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
        let routing = RoutedRows::counted(ranks, shape.experts, shape.top_k, &timed.counts);
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

/// Returns every algorithm that is searched with each overlap degree, then chunks by peers. `nodes`
/// says whether algorithms that need several nodes can run.
fn strategies(nodes: bool) -> Vec<Strategy> {
    let of = |all_to_all, overlap_degree, overlap_by| Strategy {
        all_to_all,
        overlap_degree: Both::same(overlap_degree),
        overlap_by,
        ..Strategy::default()
    };
    let algorithms = ALL_TO_ALLS
        .iter()
        .filter(|row| row.searched && (nodes || !row.needs_nodes()));
    let each = |row: &AllToAllRow| {
        DEGREES.map(|overlap_degree| of(row.all_to_all, overlap_degree, OverlapBy::Rows))
    };
    let chunks = DEGREES
        .into_iter()
        .filter(|overlap_degree| *overlap_degree > 1);
    let by_ranks =
        chunks.map(|overlap_degree| of(AllToAll::Linear, overlap_degree, OverlapBy::Peers));
    algorithms.flat_map(each).chain(by_ranks).collect()
}

/// Times a step with every strategy, in turns. Each time is the lower quartile of the slowest
/// rank's times.
fn by_strategy(
    layer: &mut Layer,
    strategies: &[Strategy],
    input: &Input<'_>,
    world: &mut dyn Collectives,
) -> Result<Vec<(Strategy, f64)>> {
    let dy = random::output_gradient(&layer.plan().spec, input.tokens);
    let mut own = vec![Vec::new(); strategies.len()];
    for round in 0..=ROUNDS {
        for turn in 0..strategies.len() {
            // Rotate the order: the first strategy of a round finds other queues than those after
            // it.
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
    layer: &Layer,
    (input, dy): (&Input<'_>, &Tensor<'_>),
    world: &mut dyn Collectives,
) -> Result<f64> {
    // A rank that arrives late at the first barrier is awake at the second.
    for _ in 0..2 {
        let meet = world.barrier(&Call::new("begin of a step"));
        let meet = meet.map_err(Failure::work)?;
        meet.wait().map_err(Failure::work)?;
    }
    let start = Instant::now();
    let (_, saved) = layer.forward_train(input.reading(&["y"]), RngKey::default())?;
    layer.backward(&saved, dy, false)?;
    Ok(start.elapsed().as_secs_f64())
}

/// Returns random tokens that differ from rank to rank, and so choose other experts.
fn own_input(spec: &LayerSpec, tokens: usize, rank: usize) -> Input<'static> {
    let mut input = random::input(spec, tokens);
    let flips = |at: usize| (at ^ rank << 20).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 63 == 1;
    if let Some(x) = input.tensors.get("x") {
        let x = random::changed(x, |at, value| if flips(at) { -value } else { value });
        input.insert("x", x);
    }
    input
}

/// Returns the lower quartile, over the steps, of the slowest rank's time.
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
