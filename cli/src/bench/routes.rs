//! What steps take by each route: `moesaic bench --ranks` times real ones, since the figures of
//! links know nothing of what ranks do between their messages.

use crate::failure::{Failure, Result};
use crate::random;
use moesaic::collectives::{Call, Collectives};
use moesaic::plan::{Route, ShadowModel};
use moesaic::planner::{Machine, Question, RouteFactor, Routing, route_factor};
use moesaic::{Counters, Engine, LayerSpec, Mesh, MeshLayer, Parallel, Strategy, Tensors};
use moesaic::{Input, Tensor, Training};
use std::time::Instant;

/// Steps by each route, and one before them that compiles.
const ROUNDS: usize = 12;

const ROUTES: [Route; 5] = [
    Route::Linear,
    Route::IntraFirst,
    Route::InterFirst,
    Route::Concurrent,
    Route::Once,
];

/// A layer whose experts are spread over all ranks.
pub struct Steps {
    mesh: Parallel,
    layer: MeshLayer,
}

/// What steps of so many tokens took.
pub struct Timed {
    pub tokens: usize,
    /// Rows that each rank has for each expert.
    counts: Vec<Vec<u64>>,
    /// Seconds by each route that the ranks' nodes allow: the lower quartile of the slowest
    /// rank's.
    pub seconds: Vec<(Route, f64)>,
}

impl Steps {
    /// `None` where experts cannot be spread evenly.
    pub fn new(
        engine: &Engine,
        spec: &LayerSpec,
        weights: &Tensors<'_>,
        world: &mut dyn Collectives,
    ) -> Result<Option<Steps>> {
        let mesh = Parallel {
            ep: world.size(),
            ..Parallel::default()
        };
        if world.size() < 2 || mesh.check(spec).is_err() {
            return Ok(None);
        }
        let ranks = Mesh::new(world, mesh)?;
        let layer = engine.mesh_layer(&ranks, spec, weights, Some(Training::default()))?;
        Ok(Some(Steps { mesh, layer }))
    }

    /// Steps of so many tokens on each rank, all routes in turns.
    pub fn timed(&mut self, tokens: usize, world: &mut dyn Collectives) -> Result<Timed> {
        let of = |route| Strategy {
            route,
            ..Strategy::default()
        };
        let spec = self.layer.plan().tokens.spec.clone();
        let input = own_input(&spec, tokens, world.rank());
        let dy = random::output_gradient(&spec, tokens);
        let can = |route: &Route| self.layer.check_strategy(of(*route)).is_ok();
        let routes: Vec<Route> = ROUTES.into_iter().filter(can).collect();
        let mut own = vec![Vec::new(); routes.len()];
        for round in 0..=ROUNDS {
            for turn in 0..routes.len() {
                // Whoever comes first finds other queues than those after.
                let at = (round + turn) % routes.len();
                self.layer.set_strategy(of(routes[at]))?;
                let seconds = self.step(&input, &dy, world)?;
                if round > 0 {
                    own[at].push(seconds);
                }
            }
        }
        let seconds = routes.into_iter().zip(own);
        let seconds = seconds.map(|(route, own)| Ok((route, slowest(world, &own)?)));
        Ok(Timed {
            tokens,
            seconds: seconds.collect::<Result<_>>()?,
            counts: self.counts(&input, world)?,
        })
    }

    fn step(&self, input: &Input<'_>, dy: &Tensor<'_>, world: &mut dyn Collectives) -> Result<f64> {
        // Who comes late to the first meeting is awake at the second.
        for _ in 0..2 {
            let meet = world.barrier(&Call::new("begin of a step"));
            let meet = meet.map_err(Failure::work)?;
            meet.wait().map_err(Failure::work)?;
        }
        let start = Instant::now();
        let counters = Counters::default();
        let (_, saved) = self.layer.forward_train(input, &["y"], counters)?;
        self.layer.backward(&saved, dy, false)?;
        Ok(start.elapsed().as_secs_f64())
    }

    fn counts(&self, input: &Input<'_>, world: &mut dyn Collectives) -> Result<Vec<Vec<u64>>> {
        let counters = Counters::default();
        let (output, _) = self.layer.forward_train(input, &["counts"], counters)?;
        let own: Vec<i64> = output
            .get("counts")
            .and_then(|counts| counts.to_vec())
            .unwrap_or_default();
        let bytes: Vec<u8> = own.iter().flat_map(|n| n.to_le_bytes()).collect();
        let all = world.gather_bytes(&bytes, &Call::new("rows for experts"));
        let of = |rank: Vec<u8>| {
            let each = rank.as_chunks::<8>().0.iter().copied();
            each.map(u64::from_le_bytes).collect()
        };
        Ok(all.map_err(Failure::work)?.into_iter().map(of).collect())
    }

    /// How much longer rows take by each route than a machine with such links says.
    pub fn factors(&self, machine: &Machine, timed: &Timed) -> Result<Vec<RouteFactor>> {
        let spec = self.layer.plan().tokens.spec.clone();
        let (shape, ranks) = (&spec.shape, self.mesh.ranks());
        let width = spec.expert_input_dim() * spec.precision.activations.size();
        let kib = (timed.tokens * shape.top_k * width) as f64 / 1024.0;
        let routing = Routing::counted(ranks, shape.experts, shape.top_k, &timed.counts);
        let question = Question {
            routing: routing.map_err(Failure::work)?,
            shadow_model: ShadowModel::of(&spec),
            spec,
            machine: machine.clone(),
            world: ranks,
            training: Some(Training::default()),
        };
        let each = timed.seconds.iter().map(|(name, seconds)| {
            let by = route_factor(&question, self.mesh, *name, *seconds);
            Ok(RouteFactor {
                name: *name,
                kib,
                by: by.map_err(Failure::work)?,
            })
        });
        each.collect()
    }
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
