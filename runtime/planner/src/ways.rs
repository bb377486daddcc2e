//! What each exchange of a plan takes a rank.

use crate::Machine;
use crate::exchange::{LevelTime, Load, MOST_LEVELS, Phase, PhaseTime};
use crate::geometry::{Rank, Share};
use crate::pieces::Part;
use crate::shadows::times;
use crate::sides::Costs;
use crate::traffic::{self, to_range};
use moesaic_kernel::DType;
use moesaic_plan::{
    Cut, Exchange, LayerPlan, Parallel, RankPlan, RankStep, Role, Route, Side, TensorPlan, Way,
    Wire,
};
use moesaic_spec::WeightSite;

/// Sums of gradients after a backward pass.
pub(crate) const SUMS: [&str; 4] = [
    "gradients of experts",
    "other gradients",
    "gradients of slices",
    "gradients of replicas",
];

/// An exchange of one rank: what it takes, and what it sends by level.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Taken {
    pub time: PhaseTime,
    pub sent: LevelTime,
}

impl std::ops::AddAssign for Taken {
    fn add_assign(&mut self, other: Taken) {
        self.time.seconds += other.time.seconds;
        self.time.fixed += other.time.fixed;
        self.time.skipped += other.time.skipped;
        for at in 0..2 {
            self.time.directions[at] += other.time.directions[at];
        }
        self.time.copies += other.time.copies;
        for at in 0..MOST_LEVELS {
            self.time.levels[at] += other.time.levels[at];
            self.sent[at] += other.sent[at];
        }
    }
}

/// How rows travel in one pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Travel<'a> {
    pub machine: &'a Machine,
    /// The plan whose steps these are: of as many slices as rows go to.
    pub plan: &'a RankPlan,
    /// What its launches cost, as far as that is known.
    pub costs: &'a Costs,
    /// The mesh itself.
    pub mesh: Parallel,
    /// To how many slices a row goes; 0: it stays.
    pub ways: usize,
    pub route: Route,
    pub wire: Wire,
    /// Into how many pieces it is cut.
    pub degree: usize,
    /// For how many pieces products are launched.
    pub launched: usize,
    pub cut: Cut,
    /// How many times as many rows cross in pieces where a token crosses once: once in each
    /// piece that it has rows in.
    pub repeats: f64,
    /// Of which piece exchanges of rows are.
    pub piece: Part,
}

/// Sums of so many bytes go to everybody at once (see the plans of all-reduce).
const SMALL_SUM: f64 = 2048.0;

impl Travel<'_> {
    /// The pieces of the pass.
    pub fn parts(&self) -> Vec<Part> {
        Part::all((self.degree, self.launched), self.cut, self.mesh, self.ways)
    }

    /// The same for one of its pieces.
    pub fn of_piece(&self, piece: Part) -> Self {
        Travel { piece, ..*self }
    }

    /// The part of the rows for an expert that one of its slices gets.
    pub fn part(&self) -> f64 {
        match self.ways {
            0 => 0.0,
            ways => ways as f64 / self.mesh.shards as f64,
        }
    }

    /// Of the experts' weights in the plan what is a rank's own.
    pub fn owned(&self) -> f64 {
        match self.ways {
            0 => 1.0 / self.mesh.group() as f64,
            _ => self.part(),
        }
    }

    /// What exchanges that [go together](Exchange::goes_with) take a rank: where rows go straight
    /// and as they are, one message has those of all tensors.
    pub fn taken_together(&self, exchanges: &[&Exchange], rank: &Rank) -> Taken {
        let first = match exchanges {
            [first, _, ..] if self.is_straight() => first,
            _ => return self.sum_of(exchanges, rank),
        };
        let rows = exchanges
            .iter()
            .filter_map(|exchange| self.row_of(exchange));
        let (bytes, element) = rows.fold((0.0, 0), |(bytes, element), (row, size)| {
            (bytes + row, element.max(size))
        });
        let there = matches!(first.way, Way::ToExperts { .. });
        self.rows(rank, (bytes, element), there, false)
    }

    /// Whether rows go straight to other ranks, as they are.
    pub fn is_straight(&self) -> bool {
        self.ways > 0 && self.route == Route::Linear && self.wire == Wire::Exact
    }

    fn sum_of(&self, exchanges: &[&Exchange], rank: &Rank) -> Taken {
        let mut sum = Taken::default();
        let each = exchanges.iter();
        each.for_each(|exchange| sum += self.taken(exchange, rank));
        sum
    }

    /// Bytes of a row that goes to experts or back, and of an element of it.
    fn row_of(&self, exchange: &Exchange) -> Option<(f64, usize)> {
        let (side, tensor) = match exchange.way {
            Way::ToExperts { from, .. } => (Side::Tokens, from),
            Way::ToTokens { from, .. } => (Side::Experts, from),
            _ => return None,
        };
        let element = self.plan.side(side)[tensor].dtype.size();
        Some((self.plan.row_bytes(side, tensor) as f64, element))
    }

    /// What an exchange takes a rank.
    pub fn taken(&self, exchange: &Exchange, rank: &Rank) -> Taken {
        let world = 0..self.mesh.ranks();
        let group = rank.group * self.mesh.group()..(rank.group + 1) * self.mesh.group();
        let row = |side, id| self.plan.row_bytes(side, id) as f64;
        let tokens = &self.plan.tokens;
        let experts = &self.plan.experts;
        match exchange.way {
            Way::Tokens | Way::Live { .. } => self.each(rank, world, 1, 8.0),
            Way::Most { tensor } => self.sum(rank, world, 1, tokens[tensor].bytes(0) as f64),
            Way::Placed => Taken::default(),
            Way::LossParts { tensor } => self.sum(rank, world, 1, row(Side::Tokens, tensor)),
            Way::Sum { from, .. } => {
                let bytes = tokens[from].bytes(rank.tokens.ceil() as u64);
                self.sum(rank, world, 1, bytes as f64)
            }
            Way::Counts if self.ways == 0 => Taken::default(),
            Way::Counts => self.each(rank, group, 1, 8.0 * rank.arriving.len() as f64),
            Way::ToExperts { .. } => {
                let wide = self.row_of(exchange).unwrap_or_default();
                let mut taken = self.rows(rank, wide, true, self.crosses_once(&exchange.name));
                if self.route == Route::Once && exchange.name == "rows" {
                    // Which rows are of one token.
                    taken += self.rows(rank, (4.0, 4), true, false);
                }
                taken
            }
            Way::ToTokens { .. } => {
                let wide = self.row_of(exchange).unwrap_or_default();
                self.rows(rank, wide, false, self.comes_summed(&exchange.name))
            }
            Way::OverShards { tensor } => {
                let arriving: f64 = rank.arriving.iter().sum();
                let rows = arriving * self.part() * self.piece.products;
                let (slices, step) = self.slices(rank);
                self.sum(rank, slices, step, rows * row(Side::Experts, tensor))
            }
            Way::Neighbours => self.neighbours(rank, 8.0),
            Way::ToSlices { from, .. } => {
                self.neighbours(rank, rank.tokens * row(Side::Tokens, from))
            }
            Way::FromSlices { to, .. } => {
                self.neighbours(rank, rank.tokens * row(Side::Tokens, to))
            }
            Way::OfFirst { to, .. } => self.neighbours(rank, tokens[to].bytes(0) as f64),
            Way::GatherWeight { weight, .. } => self.block(rank, experts[weight].bytes(0) as f64),
            Way::ScatterGradient { gradient, .. } => {
                self.block(rank, experts[gradient].bytes(0) as f64)
            }
            Way::Gather { from, .. } if self.ways > 0 => {
                self.each(rank, group, self.mesh.shards, experts[from].bytes(0) as f64)
            }
            Way::Gather { .. } => Taken::default(),
            Way::Loads => {
                let experts = tokens.spec.shape.experts as f64;
                self.each(rank, group, 1, 8.0 * experts)
            }
            Way::ToShadows { from, .. } => self.stays(rank, row(Side::Tokens, from)),
            Way::FromShadows { to, .. } => self.stays(rank, row(Side::Tokens, to)),
            Way::ShadowWeight { from, .. } => {
                let weight = &experts[from];
                self.spread(rank, of_expert(weight) * weight.dtype.size() as f64)
            }
            Way::ShadowGradient { to, .. } => {
                let bytes = of_expert(&experts[to]) * DType::F32.size() as f64;
                self.over(times(&rank.sums, bytes))
            }
        }
    }

    /// Rows that stay are copied beside, or back.
    fn stays(&self, rank: &Rank, row: f64) -> Taken {
        self.own(rank.stay.iter().sum::<f64>() * row)
    }

    /// Weights of each shadow go to all ranks of the group, round after round of a tree; a
    /// round ends when its slowest rank is done.
    fn spread(&self, rank: &Rank, bytes: f64) -> Taken {
        let mut all = Taken::default();
        for round in rank.shadows.trees.iter().flatten() {
            let each = round.iter().map(|rows| self.over(times(rows, bytes)));
            let slowest = |a: &Taken, b: &Taken| a.time.seconds.total_cmp(&b.time.seconds);
            all += each.max_by(slowest).unwrap_or_default();
        }
        all
    }

    /// The ranks of a block gather the parts of a weight that each of them owns, or give them
    /// back as sums of gradients; `bytes` are all of it.
    fn block(&self, rank: &Rank, bytes: f64) -> Taken {
        let own = bytes * self.owned();
        match self.ways {
            0 => {
                let first = rank.group * self.mesh.group();
                self.each(rank, first..first + self.mesh.group(), 1, own)
            }
            ways => {
                let block = traffic::block(self.mesh, ways);
                let first = rank.rank - rank.rank % block;
                self.each(rank, first..first + block, 1, own)
            }
        }
    }

    /// Bytes of the gradients of all weights that the plan's experts have.
    pub fn expert_gradients(&self) -> f64 {
        gradient_bytes(&self.plan.experts)
    }

    /// Gradients are added up over the ranks that have the same of a weight: those of experts
    /// over the groups that hold all of them, others over all ranks, or those with slices of
    /// the same number, and those of replicas at the owners of their experts. [`SUMS`] has
    /// their names.
    pub fn gradients(&self, rank: &Rank) -> [Taken; SUMS.len()] {
        let world = self.mesh.ranks();
        let group = self.mesh.group();
        let own = self.expert_gradients() * self.owned();
        let replicas = rank.rank % group..world;
        let whole = gradient_bytes(&self.plan.tokens);
        let shared = self.plan.shared.as_ref().map_or(0.0, gradient_bytes);
        let slices = rank.rank % self.mesh.shards..world;
        [
            self.sum(rank, replicas, group, own),
            self.sum(rank, 0..world, 1, whole),
            self.sum(rank, slices, self.mesh.shards, shared),
            self.of_replicas(rank, own),
        ]
    }

    /// Gradients of replicas go to the owners of their experts, and the sums back; `own` are the
    /// bytes of all that a rank has.
    fn of_replicas(&self, rank: &Rank, own: f64) -> Taken {
        let experts = self.plan.experts.spec.shape.experts as f64;
        let there = times(&rank.replicas, own / experts);
        let mut both = self.over(there);
        both += self.over(there.map(Load::turned));
        both
    }

    fn neighbours(&self, rank: &Rank, bytes: f64) -> Taken {
        let first = rank.rank - rank.rank % self.mesh.shards;
        self.each(rank, first..first + self.mesh.shards, 1, bytes)
    }

    /// The ranks that multiplied the same rows with the slices of an expert.
    fn slices(&self, rank: &Rank) -> (std::ops::Range<usize>, usize) {
        let block = traffic::block(self.mesh, self.ways);
        let first = rank.rank - rank.rank % self.mesh.shards + rank.rank % block;
        (first..first + self.ways * block, block)
    }

    fn over(&self, loads: [Load; MOST_LEVELS]) -> Taken {
        let phase = Phase {
            loads,
            ..Phase::default()
        };
        Taken {
            time: self.machine.phase(&phase),
            sent: loads.map(|load| load.sent),
        }
    }

    /// The same to each of some ranks.
    fn each(&self, rank: &Rank, to: std::ops::Range<usize>, step: usize, bytes: f64) -> Taken {
        self.over(to_range(self.machine, rank.rank, to, step, bytes))
    }

    /// Parts to their owners, and sums back; little goes to all at once.
    fn sum(&self, rank: &Rank, over: std::ops::Range<usize>, step: usize, bytes: f64) -> Taken {
        let ranks = over.len().div_ceil(step).max(1) as f64;
        if bytes == 0.0 || ranks == 1.0 {
            return Taken::default();
        }
        if bytes <= SMALL_SUM {
            return self.each(rank, over, step, bytes);
        }
        let mut both = self.each(rank, over.clone(), step, bytes / ranks);
        both += self.each(rank, over, step, bytes / ranks);
        both
    }

    /// Whether equal rows of a token are one on the way to a node (docs/adaptive/routes.md).
    fn crosses_once(&self, name: &str) -> bool {
        let weighted = self.plan.tokens.spec.router.weight_on == WeightSite::Input;
        (name == "rows" && !weighted) || name == "dout"
    }

    /// Whether a node sums what its experts have made of a token.
    fn comes_summed(&self, name: &str) -> bool {
        match self.plan.tokens.spec.router.weight_on {
            WeightSite::Input => name == "out",
            WeightSite::Output => name == "drows",
            WeightSite::Activation => name == "drows" || name == "out",
        }
    }

    /// Rows go to experts, or back; `once`: those of a token to a node are one, by a route
    /// that has it so.
    fn rows(&self, rank: &Rank, wide: (f64, usize), there: bool, once: bool) -> Taken {
        if self.ways == 0 {
            return self.own(rank.rows * wide.0 * self.piece.own);
        }
        let carried = self.carried(rank, wide, there, once);
        let Taken { time, sent } = carried.taken(self.machine, rank);
        if self.machine.routes.is_empty() {
            return Taken { time, sent };
        }
        // Steps are timed as a whole: what is smaller beside rows is in their factor.
        let by = self
            .machine
            .route(self.route, self.cut, self.degree, self.message(rank));
        let time = time.times(by);
        Taken { time, sent }
    }

    /// Bytes of a message that has rows of tokens on their way to experts, in forward; 0 where
    /// there is none.
    pub fn message(&self, rank: &Rank) -> f64 {
        let rows = self.plan.steps.iter().find_map(|step| match step {
            RankStep::Exchange(exchange) if exchange.name == "rows" => match exchange.way {
                Way::ToExperts { from, .. } => Some(from),
                _ => None,
            },
            _ => None,
        });
        rows.map_or(0.0, |from| {
            let row = self.plan.row_bytes(Side::Tokens, from) as f64;
            let wide = (row, self.plan.tokens[from].dtype.size());
            let carried = self.carried(rank, wide, true, self.crosses_once("rows"));
            carried.message(rank)
        })
    }

    fn carried(
        &self,
        rank: &Rank,
        (row, element): (f64, usize),
        there: bool,
        once: bool,
    ) -> Carried {
        let part = if there { self.part() } else { 1.0 };
        let rows = part * self.piece.others;
        // What crosses once does so however many slices get it inside the node, or have a part
        // of the answer there, of which one is what `back` has.
        let dedup_indices = match (once && !rank.each.is_empty(), there) {
            (false, _) => rows * row,
            (true, true) => self.repeats * row * self.piece.others,
            (true, false) => self.repeats * self.mesh.shards as f64 * row * self.piece.others,
        };
        Carried {
            row: rows * row,
            own: part * self.piece.own * row,
            peers: self.piece.peers,
            dedup_indices,
            wire: wire_part(self.wire, row, element),
            there,
            once,
            side_by_side: self.route == Route::Concurrent,
        }
    }

    fn own(&self, bytes: f64) -> Taken {
        let phase = Phase {
            own: 2.0 * bytes,
            ..Phase::default()
        };
        Taken {
            time: self.machine.phase(&phase),
            sent: LevelTime::default(),
        }
    }
}

/// Numbers of one expert in a tensor that has those of all.
fn of_expert(tensor: &TensorPlan) -> f64 {
    let each = tensor.shape.iter().skip(1).map(|size| size.eval(0) as f64);
    each.product()
}

/// Bytes of the gradients of weights that a side leaves.
fn gradient_bytes(plan: &LayerPlan) -> f64 {
    let tensors = plan.tensors.iter();
    let gradients = tensors.filter(|tensor| tensor.role == Role::WeightGradient);
    gradients.map(|tensor| tensor.bytes(0) as f64).sum()
}

/// Rows that go to experts or back, by the messages of a route.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Carried {
    /// Bytes of a row; of a part of a row where not all of it goes.
    pub row: f64,
    /// The same of rows that a rank has for itself.
    pub own: f64,
    /// Part of the messages.
    pub peers: f64,
    /// The same of rows that cross between nodes.
    pub dedup_indices: f64,
    /// Bytes between nodes for each byte in memory.
    pub wire: f64,
    /// To experts.
    pub there: bool,
    /// Equal rows of a token to a node are one, by a route that has it so.
    pub once: bool,
    /// Levels move at the same time.
    pub side_by_side: bool,
}

impl Carried {
    fn phases<'r>(&self, rank: &'r Rank) -> &'r [Share] {
        let each = !self.once && !rank.each.is_empty();
        match (self.there, each) {
            (true, false) => &rank.phases,
            (true, true) => &rank.each,
            (false, false) => &rank.back,
            (false, true) => &rank.each_back,
        }
    }

    /// Bytes of a message between nodes, or inside one where all ranks are in it: the mean.
    pub fn message(&self, rank: &Rank) -> f64 {
        let phases = self.phases(rank).iter();
        let phases: Vec<Phase> = phases.map(|share| self.phase(rank, share, false)).collect();
        let mean = |levels: std::ops::Range<usize>| {
            let loads = phases.iter().flat_map(|phase| &phase.loads[levels.clone()]);
            let of = |load: &Load| [load.messages, load.sent.max(load.received)];
            let [messages, bytes] = loads
                .map(of)
                .fold([0.0; 2], |a, b| [a[0] + b[0], a[1] + b[1]]);
            (messages > 0.0).then(|| bytes / messages)
        };
        mean(1..MOST_LEVELS).or_else(|| mean(0..1)).unwrap_or(0.0)
    }

    pub fn taken(&self, machine: &Machine, rank: &Rank) -> Taken {
        let mut taken = Taken::default();
        let phases = self.phases(rank);
        for (at, share) in phases.iter().enumerate() {
            let phase = self.phase(rank, share, at + 1 == phases.len());
            taken += Taken {
                time: machine.phase(&phase),
                sent: phase.loads.map(|load| load.sent),
            };
        }
        taken
    }

    /// One of the phases. What is packed otherwise between nodes is read and written twice,
    /// by a kernel before and one after.
    fn phase(&self, rank: &Rank, share: &Share, last: bool) -> Phase {
        let own = if self.there { rank.own } else { rank.own_back };
        let share = Share {
            loads: share.loads.map(|load| load.to_part(self.peers)),
            ..*share
        };
        let mut loads = share.loads.map(|load| load.times(self.row));
        for (load, rows) in loads.iter_mut().zip(&share.loads).skip(1) {
            *load = rows.times(self.dedup_indices * self.wire);
        }
        let outer = share.loads[1..].iter();
        let dedup_indices: f64 = outer.map(|load| load.sent + load.received).sum();
        let packed = self.wire < 1.0 && dedup_indices > 0.0;
        let converted = if packed {
            dedup_indices * self.dedup_indices * (1.0 + self.wire)
        } else {
            0.0
        };
        Phase {
            loads,
            own: if last { 2.0 * own * self.own } else { 0.0 },
            copied: 2.0 * share.copied * self.row + converted,
            launches: share.passes + if packed { 2.0 } else { 0.0 },
            side_by_side: self.side_by_side,
        }
    }
}

/// Bytes between nodes for each byte of a row of `row` bytes in memory. A number alone, such
/// as a weight, is not made smaller.
pub(crate) fn wire_part(wire: Wire, row: f64, element: usize) -> f64 {
    let element = element as f64;
    let width = row / element;
    if width < 2.0 {
        return 1.0;
    }
    let part = match wire {
        Wire::Exact => 1.0,
        Wire::F16 | Wire::Bf16 => 2.0 / element,
        Wire::Fp8 => (width + 4.0 * (width / 128.0).ceil()) / row,
    };
    part.min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_as_wide_on_the_wire_as_their_format_says() {
        assert_eq!(wire_part(Wire::Exact, 14336.0, 2), 1.0);
        assert_eq!(wire_part(Wire::Bf16, 14336.0, 2), 1.0);
        assert_eq!(wire_part(Wire::F16, 28672.0, 4), 0.5);
        // 7168 numbers and 56 scales, as DeepEP sends them.
        assert_eq!(wire_part(Wire::Fp8, 14336.0, 2) * 14336.0, 7392.0);
        assert_eq!(wire_part(Wire::Fp8, 4.0, 4), 1.0);
    }
}
