//! Simulation of a step's passes on the streams of ranks.

use crate::chunks::ChunkShare;
use crate::collective_ops::{CommConfig, OpCost, SUMS};
use crate::cost::Cost;
use crate::exchange::{LevelTime, MOST_LEVELS};
use crate::geometry::Rank;
use crate::memory::MemoryUse;
use crate::plan_parts::{PartCosts, PartStep, StepsOf, cost, name, part_costs, whose};
use crate::scenario::{Bottleneck, PassEstimate, PhaseOf, Prediction, Simulated};
use crate::schedule::{Chunk, Timeline, meet, pipeline};
use moesaic_dist::{CollectiveOp, OpGroup, PlanPart};
use moesaic_plan::{Exchange, Parallel, RankStep, Strategy};

/// The state of all ranks within a step.
pub(crate) struct Run<'r> {
    ranks: &'r [Rank],
    groups: Vec<usize>,
    world: Vec<usize>,
    now: Vec<f64>,
    /// The seconds of each rank by [`Bottleneck`].
    spent: Vec<[f64; BOUNDS]>,
    sent: Vec<LevelTime>,
    detail: bool,
    events: Vec<Event>,
    passes: Vec<(&'static str, f64, usize)>,
}

struct Event {
    at: usize,
    whose: &'static str,
    name: String,
    start: f64,
    end: f64,
    sent: LevelTime,
}

const BOUNDS: usize = 6 + MOST_LEVELS;

impl<'r> Run<'r> {
    pub fn new(ranks: &'r [Rank], detail: bool) -> Run<'r> {
        Run {
            groups: ranks.iter().map(|rank| rank.group).collect(),
            world: vec![0; ranks.len()],
            now: vec![0.0; ranks.len()],
            spent: vec![[0.0; BOUNDS]; ranks.len()],
            sent: vec![LevelTime::default(); ranks.len()],
            ranks,
            detail,
            events: Vec::new(),
            passes: Vec::new(),
        }
    }

    /// Simulates a forward pass; one that trains if a backward pass follows.
    pub fn forward(&mut self, comm: &CommConfig, trains: bool) {
        let of: StepsOf = if trains {
            |plan| &plan.steps
        } else {
            |plan| plan.evaluation_steps()
        };
        let steps = if trains {
            &*comm.plan.steps
        } else {
            comm.plan.evaluation_steps()
        };
        self.pass("forward", comm, steps, of);
    }

    /// Simulates a backward pass.
    pub fn backward(&mut self, comm: &CommConfig) {
        self.pass("backward", comm, &comm.plan.backward, |plan| &plan.backward);
    }

    /// Simulates the sums of gradients over ranks, between the backward pass and the optimizer.
    pub fn gradients(&mut self, comm: &CommConfig) {
        let world = self.world.clone();
        for (at, name) in SUMS.into_iter().enumerate() {
            let cost_of = |rank: &Rank| comm.gradients(rank)[at];
            if self
                .ranks
                .iter()
                .any(|rank| cost_of(rank).time.seconds > 0.0)
            {
                self.together(name, &world, cost_of);
            }
        }
        let end = self.now.iter().copied().fold(0.0, f64::max);
        self.passes.push(("gradients", end, self.events.len()));
    }

    fn pass(&mut self, name: &'static str, comm: &CommConfig, steps: &[RankStep], of: StepsOf) {
        let shares = comm.chunk_shares();
        let least = shares.iter().map(ChunkShare::launched).fold(1.0, f64::min);
        let parts = part_costs(self.ranks, comm, name, of, least);
        let (first, last) = chunked_range(steps);
        self.steps(comm, &parts, &steps[..first]);
        match shares[..] {
            [ChunkShare { launches: 1, .. }] => self.steps(comm, &parts, &steps[first..last]),
            _ => self.chunks(comm, &parts, &steps[first..last], &shares),
        }
        self.steps(comm, &parts, &steps[last..]);
        let end = self.now.iter().copied().fold(0.0, f64::max);
        self.passes.push((name, end, self.events.len()));
    }

    fn steps(&mut self, comm: &CommConfig, parts: &PartCosts, steps: &[RankStep]) {
        let together = |a: &RankStep, b: &RankStep| comm.is_straight() && a.goes_with(b);
        for steps in steps.chunk_by(together) {
            let exchanges: Vec<&Exchange> = steps.iter().filter_map(RankStep::exchange).collect();
            match exchanges[..] {
                [first, _, ..] => {
                    let groups = self.groups.clone();
                    let cost_of = |rank: &Rank| comm.cost_of_grouped(&exchanges, rank);
                    self.together(&first.name, &groups, cost_of);
                }
                _ => self.step(comm, parts, &steps[0]),
            }
        }
    }

    fn step(&mut self, comm: &CommConfig, parts: &PartCosts, step: &RankStep) {
        match step {
            RankStep::Launch { part, step, .. } => {
                for at in 0..self.ranks.len() {
                    self.now[at] = self.launch(
                        comm,
                        parts,
                        PartStep {
                            part: *part,
                            step: *step,
                        },
                        (at, self.now[at]),
                    );
                }
            }
            RankStep::Exchange(exchange) if stays(exchange) => {
                for at in 0..self.ranks.len() {
                    self.alone(&exchange.name, at, comm.cost_of(exchange, &self.ranks[at]));
                }
            }
            RankStep::Exchange(exchange) => {
                let over = match exchange.op.row().group {
                    OpGroup::World => self.world.clone(),
                    _ => self.groups.clone(),
                };
                self.together(&exchange.name, &over, |rank| comm.cost_of(exchange, rank));
            }
        }
    }

    /// Simulates a launch of a rank for all its rows, starting at a time; returns its end.
    fn launch(
        &mut self,
        comm: &CommConfig,
        parts: &PartCosts,
        launch: PartStep,
        (at, start): (usize, f64),
    ) -> f64 {
        let all = comm.machine.compute.multiprocessors as f64;
        let cost = cost(comm, parts, &self.ranks[at], launch, 1.0, all);
        self.spend(at, &cost, 1.0);
        let end = start + cost.seconds();
        let name = || name(parts, launch);
        self.note(
            at,
            whose(launch.part),
            name,
            (start, end),
            LevelTime::default(),
        );
        end
    }

    /// Simulates work on a rank's own rows, without other ranks.
    fn alone(&mut self, name: &str, at: usize, cost: OpCost) {
        let start = self.now[at];
        self.now[at] += cost.time.seconds;
        self.moved(at, &cost, 1.0);
        let end = self.now[at];
        self.note(at, "ranks", || name.to_string(), (start, end), cost.sent);
    }

    /// Simulates an exchange of a group, which begins when the last rank has arrived.
    fn together(&mut self, name: &str, over: &[usize], cost_of: impl Fn(&Rank) -> OpCost) {
        let came = self.now.clone();
        meet(&mut self.now, over, &came);
        for (at, came) in came.into_iter().enumerate() {
            self.spent[at][slot(Bottleneck::Waiting)] += self.now[at] - came;
            self.alone(name, at, cost_of(&self.ranks[at]));
        }
    }

    /// Simulates rows in chunks.
    fn chunks(
        &mut self,
        comm: &CommConfig,
        parts: &PartCosts,
        steps: &[RankStep],
        shares: &[ChunkShare],
    ) {
        let work = ChunkedWork::of(steps);
        // Shadow GEMMs come first on the compute stream, so they decide when it is free for the
        // first chunk.
        let free: Vec<f64> = (0..self.ranks.len())
            .map(|at| self.meanwhile(comm, parts, &work, at))
            .collect();
        let mut chunks = Vec::with_capacity(self.ranks.len());
        for at in 0..self.ranks.len() {
            let mut list: Vec<Chunk> = Vec::with_capacity(shares.len());
            // Consecutive equal chunks have equal costs.
            for alike in shares.chunk_by(|a, b| a == b) {
                let done = work.chunk(&comm.of_chunk(alike[0]), parts, &self.ranks[at]);
                let times = alike.len() as f64;
                // A chunk that the other pass splits further is launched once for each of those
                // pieces.
                let launched = times * alike[0].launches as f64;
                done.costs
                    .iter()
                    .for_each(|cost| self.spend(at, cost, launched));
                self.moved(at, &done.there, times);
                self.moved(at, &done.back, times);
                list.extend(alike.iter().map(|_| done.chunk));
            }
            chunks.push(list);
        }
        let slowdown = comm.machine.overlap.transfer_slowdown;
        let lines = pipeline((&self.now, &free), &self.groups, &chunks, slowdown);
        for (at, line) in lines.iter().enumerate() {
            self.now[at] = line.end();
            if self.detail {
                self.note_chunks(at, line, (comm, shares), &work);
            }
        }
    }

    /// Simulates the launches of a rank while the first rows are in flight: GEMMs of shadows.
    /// Returns their end.
    fn meanwhile(
        &mut self,
        comm: &CommConfig,
        parts: &PartCosts,
        work: &ChunkedWork,
        at: usize,
    ) -> f64 {
        let launches = work.meanwhile.iter();
        let end = launches.fold(self.now[at], |start, launch| {
            self.launch(comm, parts, *launch, (at, start))
        });
        let leave = total_cost(&work.stay, comm, &self.ranks[at]);
        self.moved(at, &leave, 1.0);
        end + leave.time.seconds
    }

    fn note_chunks(
        &mut self,
        at: usize,
        line: &Timeline,
        (comm, shares): (&CommConfig, &[ChunkShare]),
        work: &ChunkedWork,
    ) {
        let rank = &self.ranks[at];
        let (there, back) = (first_name(&work.there), first_name(&work.back));
        let lanes: [(_, _, _, &[&Exchange]); 3] = [
            ("ranks", there, &line.there, &work.there),
            ("experts", "products".to_string(), &line.product, &[]),
            ("ranks", back, &line.back, &work.back),
        ];
        for (whose, name, spans, list) in lanes {
            for (span, part) in spans.iter().zip(shares) {
                let times = (span.start, span.end);
                let sent = total_cost(list, &comm.of_chunk(*part), rank).sent;
                self.note(at, whose, || name.clone(), times, sent);
            }
        }
    }

    fn note(
        &mut self,
        at: usize,
        whose: &'static str,
        name: impl Fn() -> String,
        (start, end): (f64, f64),
        sent: LevelTime,
    ) {
        if self.detail && end > start {
            self.events.push(Event {
                at,
                whose,
                name: name(),
                start,
                end,
                sent,
            });
        }
    }

    fn spend(&mut self, at: usize, cost: &Cost, times: f64) {
        let spent = &mut self.spent[at];
        spent[slot(Bottleneck::Compute)] += cost.compute * times;
        spent[slot(Bottleneck::Memory)] += cost.memory * times;
        spent[slot(Bottleneck::Launches)] += cost.launch * times;
    }

    fn moved(&mut self, at: usize, cost: &OpCost, times: f64) {
        let spent = &mut self.spent[at];
        spent[slot(Bottleneck::Messages)] += cost.time.fixed * times;
        spent[slot(Bottleneck::Copies)] += cost.time.copies * times;
        for level in 0..MOST_LEVELS {
            spent[slot(Bottleneck::Level(level))] += cost.time.levels[level] * times;
            self.sent[at][level] += cost.sent[level] * times;
        }
    }

    pub fn finish(
        self,
        mesh: Parallel,
        strategy: Strategy,
        memory: MemoryUse,
    ) -> (Prediction, Vec<Simulated>) {
        // The bottleneck is that of the slowest rank, because all others wait for it.
        let slowest = (0..self.now.len()).max_by(|a, b| self.now[*a].total_cmp(&self.now[*b]));
        let slowest = slowest.unwrap_or(0);
        let seconds = self.now.get(slowest).copied().unwrap_or(0.0);
        let (bound, most) = self
            .spent
            .get(slowest)
            .map_or((Bottleneck::Compute, 0.0), largest);
        let mut sent = LevelTime::default();
        for rank in &self.sent {
            for (most, bytes) in sent.iter_mut().zip(rank) {
                *most = most.max(*bytes);
            }
        }
        let (mut passes, mut began, mut first) = (Vec::new(), 0.0, 0);
        for &(name, end, last) in &self.passes {
            passes.push(PassEstimate {
                name,
                seconds: end - began,
                phases: phases(&self.events[first..last], slowest),
            });
            (began, first) = (end, last);
        }
        let prediction = Prediction {
            mesh,
            strategy,
            seconds,
            passes,
            sent,
            memory,
            bound,
            bound_part: (most / seconds.max(f64::MIN_POSITIVE)).min(1.0),
        };
        let ranks = self.ranks;
        let timeline = self.events.into_iter().map(|event| Simulated {
            rank: ranks[event.at].rank,
            stream: if event.whose == "ranks" {
                "exchange"
            } else {
                "compute"
            },
            name: event.name,
            start: event.start,
            end: event.end,
        });
        (prediction, timeline.collect())
    }
}

/// The steps of a pass that run in chunks (exchanges to experts, expert GEMMs, and the way back),
/// and those in between that do not: GEMMs of shadows, and rows that stay.
struct ChunkedWork<'s> {
    there: Vec<&'s Exchange>,
    launches: Vec<PartStep>,
    back: Vec<&'s Exchange>,
    meanwhile: Vec<PartStep>,
    stay: Vec<&'s Exchange>,
}

/// The work of a rank in one chunk.
struct ChunkCosts {
    chunk: Chunk,
    /// The costs of its launches, each for a part of the chunk, without overlap.
    costs: Vec<Cost>,
    there: OpCost,
    back: OpCost,
}

impl ChunkedWork<'_> {
    fn of(steps: &[RankStep]) -> ChunkedWork<'_> {
        let mut work = ChunkedWork {
            there: Vec::new(),
            launches: Vec::new(),
            back: Vec::new(),
            meanwhile: Vec::new(),
            stay: Vec::new(),
        };
        for step in steps {
            match step {
                RankStep::Launch { part, step, .. } => match part {
                    // Rows of shadows stay local, so their GEMMs need no exchange and fill the
                    // wait for the first chunk.
                    PlanPart::Shadows => work.meanwhile.push(PartStep {
                        part: *part,
                        step: *step,
                    }),
                    _ => work.launches.push(PartStep {
                        part: *part,
                        step: *step,
                    }),
                },
                RankStep::Exchange(exchange) => match exchange.op {
                    CollectiveOp::Dispatch => work.there.push(exchange),
                    _ if stays(exchange) => work.stay.push(exchange),
                    _ => work.back.push(exchange),
                },
            }
        }
        work
    }

    fn chunk(&self, comm: &CommConfig, parts: &PartCosts, rank: &Rank) -> ChunkCosts {
        let machine = comm.machine;
        let all = machine.compute.multiprocessors as f64;
        // An exchange kernel occupies multiprocessors for as long as it runs.
        let left = all - machine.overlap.multiprocessors as f64;
        let (there, back) = (
            total_cost(&self.there, comm, rank),
            total_cost(&self.back, comm, rank),
        );
        // Sums over shards are in `back` too, but they cannot begin before GEMMs end, so they
        // hide nothing.
        let rows_back: Vec<&Exchange> = self
            .back
            .iter()
            .copied()
            .filter(|exchange| goes_back(exchange))
            .collect();
        let rows_back = total_cost(&rows_back, comm, rank).time;
        let costs = |processors: f64| -> Vec<Cost> {
            let each = self.launches.iter();
            let part = comm.chunk.launched();
            each.map(|launch| cost(comm, parts, rank, *launch, part, processors))
                .collect()
        };
        let (free, fewer) = (costs(all), costs(left));
        let launches = comm.chunk.launches as f64;
        let sum = |costs: &[Cost]| launches * costs.iter().map(Cost::seconds).sum::<f64>();
        let product = sum(&free);
        let slowed = product * (1.0 + machine.overlap.compute_slowdown);
        let chunk = Chunk {
            there: there.time.seconds,
            skipped: [there.time.skipped, rows_back.skipped],
            overlapped: machine.hidden() * both_ways(there.time.directions, rows_back.directions),
            product,
            // Passes over memory compete with GEMMs, so their time is added.
            hindered: sum(&fewer).max(slowed) + there.time.copies + back.time.copies,
            back: back.time.seconds,
        };
        ChunkCosts {
            chunk,
            costs: free,
            there,
            back,
        }
    }
}

/// Returns the total cost of a rank's exchanges, one after the other.
fn total_cost(list: &[&Exchange], comm: &CommConfig, rank: &Rank) -> OpCost {
    let mut sum = OpCost::default();
    for together in list.chunk_by(|a, b| a.goes_with(b)) {
        sum += comm.cost_of_grouped(together, rank);
    }
    sum
}

/// Returns whether rows stay on their rank.
fn stays(exchange: &Exchange) -> bool {
    exchange.op.row().group == OpGroup::Own
}

/// Returns whether rows go back to their tokens; sums over shards are excluded.
fn goes_back(exchange: &Exchange) -> bool {
    exchange.op == CollectiveOp::Combine
}

/// Returns the seconds saved where rows return while others arrive, because links carry both
/// directions.
fn both_ways(there: [f64; 2], back: [f64; 2]) -> f64 {
    let longer = |pass: [f64; 2]| pass[0].max(pass[1]);
    let together = [there[0] + back[0], there[1] + back[1]];
    longer(there) + longer(back) - longer(together)
}

/// Merges consecutive events of one name on one rank.
fn phases(events: &[Event], of: usize) -> Vec<PhaseOf> {
    let mut list: Vec<PhaseOf> = Vec::new();
    for event in events.iter().filter(|event| event.at == of) {
        let seconds = event.end - event.start;
        match list.last_mut() {
            Some(last) if last.name == event.name && last.whose == event.whose => {
                last.seconds += seconds;
                last.sent
                    .iter_mut()
                    .zip(event.sent)
                    .for_each(|(sum, n)| *sum += n);
            }
            _ => list.push(PhaseOf {
                name: event.name.clone(),
                whose: event.whose,
                seconds,
                sent: event.sent,
            }),
        }
    }
    list
}

fn slot(bound: Bottleneck) -> usize {
    match bound {
        Bottleneck::Compute => 0,
        Bottleneck::Memory => 1,
        Bottleneck::Launches => 2,
        Bottleneck::Messages => 3,
        Bottleneck::Copies => 4,
        Bottleneck::Waiting => 5,
        Bottleneck::Level(level) => 6 + level,
    }
}

fn largest(spent: &[f64; BOUNDS]) -> (Bottleneck, f64) {
    let named = [
        Bottleneck::Compute,
        Bottleneck::Memory,
        Bottleneck::Launches,
        Bottleneck::Messages,
        Bottleneck::Copies,
        Bottleneck::Waiting,
    ];
    let all = named
        .into_iter()
        .chain((0..MOST_LEVELS).map(Bottleneck::Level));
    let with = all.map(|bound| (bound, spent[slot(bound)]));
    with.fold((Bottleneck::Compute, 0.0), |most, one| {
        if one.1 > most.1 { one } else { most }
    })
}

/// Returns the range of steps from the first that brings rows to the last that returns them.
fn chunked_range(steps: &[RankStep]) -> (usize, usize) {
    let of = |step: &RankStep, there: bool| match step {
        RankStep::Exchange(exchange) => match exchange.op {
            CollectiveOp::Dispatch => there,
            CollectiveOp::Combine => !there,
            _ => false,
        },
        RankStep::Launch { .. } => false,
    };
    let first = steps.iter().position(|step| of(step, true)).unwrap_or(0);
    let last = steps
        .iter()
        .rposition(|step| of(step, false))
        .map_or(first, |at| at + 1);
    (first, last.max(first))
}

fn first_name(list: &[&Exchange]) -> String {
    let last = list
        .iter()
        .find(|exchange| exchange.op != CollectiveOp::AllReduceTp);
    last.or(list.first())
        .map_or_else(String::new, |exchange| exchange.name.clone())
}
