//! The cost of each collective operation of a plan, for one rank.

use crate::Machine;
use crate::chunks::ChunkShare;
use crate::cost::Costs;
use crate::exchange::{LevelLoad, LevelTime, MOST_LEVELS, Phase, PhaseTime, to_range};
use crate::geometry::{PhaseLoad, Rank};
use crate::shadows::times;
use crate::traffic;
use moesaic_dist::schedules::ONE_PHASE_BYTES;
use moesaic_dist::{
    Amount, Collective, CollectiveOp, NUMBER_BYTES, OpGroup, OpRow, Payload, PlanPart,
};
use moesaic_plan::{
    AllToAll, CommDtype, Exchange, LayerPlan, OverlapBy, Parallel, PartTensor, RankPlan, RankStep,
    TensorPlan, TensorRole,
};

/// The names of the gradient sums after a backward pass.
pub(crate) const SUMS: [&str; 4] = [
    "gradients of experts",
    "other gradients",
    "gradients of shards",
    "gradients of replicas",
];

/// The cost of an exchange for one rank, and its bytes by level.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct OpCost {
    pub time: PhaseTime,
    pub sent: LevelTime,
}

impl std::ops::AddAssign for OpCost {
    fn add_assign(&mut self, other: OpCost) {
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

/// The communication settings of one pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CommConfig<'a> {
    pub machine: &'a Machine,
    /// The plan of the simulated steps, for as many shards as rows go to.
    pub plan: &'a RankPlan,
    /// The costs of its launches that are known so far.
    pub costs: &'a Costs,
    /// The mesh itself.
    pub mesh: Parallel,
    /// The number of shards that a row goes to; 0 where rows stay.
    pub adaptive_r: usize,
    pub all_to_all: AllToAll,
    pub comm_dtype: CommDtype,
    /// The number of chunks.
    pub overlap_degree: usize,
    /// The number of chunks for which GEMMs are launched.
    pub launched: usize,
    pub overlap_by: OverlapBy,
    /// The mean number of chunks in which a token appears; multiplies inter-node rows under
    /// `dedup`, where a token crosses once per chunk.
    pub repeats: f64,
    /// The chunk that exchanges of rows belong to.
    pub chunk: ChunkShare,
}

impl CommConfig<'_> {
    /// Returns the chunks of the pass.
    pub fn chunk_shares(&self) -> Vec<ChunkShare> {
        ChunkShare::all(
            (self.overlap_degree, self.launched),
            self.overlap_by,
            self.mesh,
            self.adaptive_r,
        )
    }

    /// Returns the settings for one of the chunks.
    pub fn of_chunk(&self, chunk: ChunkShare) -> Self {
        CommConfig { chunk, ..*self }
    }

    /// Returns the part of an expert's rows that one of its shards gets.
    pub fn part(&self) -> f64 {
        match self.adaptive_r {
            0 => 0.0,
            adaptive_r => adaptive_r as f64 / self.mesh.expert_tp as f64,
        }
    }

    /// Returns the part of the experts' weights in the plan that the rank owns.
    pub fn owned_part(&self) -> f64 {
        match self.adaptive_r {
            0 => 1.0 / self.mesh.group() as f64,
            _ => self.part(),
        }
    }

    /// Returns the cost of exchanges that [go together](Exchange::goes_with): where rows go
    /// directly and uncast, one message carries those of all tensors.
    pub fn cost_of_grouped(&self, exchanges: &[&Exchange], rank: &Rank) -> OpCost {
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
        let there = first.op == CollectiveOp::Dispatch;
        self.rows(rank, (bytes, element), there, false)
    }

    /// Returns whether rows go directly to other ranks, uncast.
    pub fn is_straight(&self) -> bool {
        self.adaptive_r > 0
            && self.all_to_all.row().is_direct()
            && self.comm_dtype == CommDtype::Unchanged
    }

    fn sum_of(&self, exchanges: &[&Exchange], rank: &Rank) -> OpCost {
        let mut sum = OpCost::default();
        let each = exchanges.iter();
        each.for_each(|exchange| sum += self.cost_of(exchange, rank));
        sum
    }

    /// Returns the bytes of a row that goes to experts or back, and of one of its elements.
    fn row_of(&self, exchange: &Exchange) -> Option<(f64, usize)> {
        let rows = exchange.reads().filter(|_| exchange.op.exchanges_rows())?;
        let element = self.plan.part(rows.part)[rows.tensor].dtype.size();
        Some((self.plan.row_bytes(rows.part, rows.tensor) as f64, element))
    }

    /// Returns the cost of an exchange for a rank.
    pub fn cost_of(&self, exchange: &Exchange, rank: &Rank) -> OpCost {
        let row = exchange.op.row();
        let bytes = self.bytes_of(exchange, rank);
        match (row.amount, row.collective) {
            (Amount::Nothing, _) => OpCost::default(),
            (Amount::ExpertRows, Collective::AllToAll) => self.expert_rows(exchange, rank),
            // Both directions copy the rows that stay.
            (Amount::ShadowRows, _) => self.own(rank.stay.iter().sum::<f64>() * bytes),
            (Amount::ShadowTensor, Collective::Broadcast) => self.spread(rank, bytes),
            (Amount::ShadowTensor, _) => self.over(times(&rank.sums, bytes)),
            (_, Collective::AllReduce) => {
                let Peers { ranks, step } = self.peers(row, rank);
                self.sum(rank, ranks, step, bytes)
            }
            _ => {
                let Peers { ranks, step } = self.peers(row, rank);
                self.each(rank, ranks, step, bytes)
            }
        }
    }

    /// Returns the bytes that a rank has in an exchange for each other rank, or adds to a sum; of
    /// shadows those of one row or of one expert.
    fn bytes_of(&self, exchange: &Exchange, rank: &Rank) -> f64 {
        let row = exchange.op.row();
        let of = |tensor: Option<PartTensor>, bytes: &dyn Fn(PartTensor) -> f64| {
            tensor.map_or(0.0, bytes)
        };
        let row_bytes = |at: PartTensor| self.plan.row_bytes(at.part, at.tensor) as f64;
        let tensor = |at: PartTensor| &self.plan.part(at.part)[at.tensor];
        let (reads, number) = (exchange.reads(), NUMBER_BYTES as f64);
        match row.amount {
            Amount::Nothing => 0.0,
            Amount::Number => number,
            Amount::NumberPerExpert => number * self.plan.tokens.spec.shape.experts as f64,
            Amount::NumberPerOwnExpert => number * rank.arriving.len() as f64,
            Amount::ExpertRows => {
                let arriving: f64 = rank.arriving.iter().sum();
                // The sum over shards covers the rows of one chunk, since ranks sum each chunk by
                // itself.
                arriving * self.part() * self.chunk.products * of(reads, &row_bytes)
            }
            Amount::ShadowRows | Amount::OneRow => of(reads, &row_bytes),
            // The shadow part's tensor has room for more experts than have shadows.
            Amount::ShadowTensor => {
                let ends = [reads, exchange.writes()].into_iter().flatten();
                let mut owned = ends.filter(|at| at.part == PlanPart::Experts);
                of(owned.next(), &|at| {
                    of_expert(tensor(at)) * tensor(at).dtype.size() as f64
                })
            }
            Amount::TokenRows => rank.tokens * of(reads, &row_bytes),
            Amount::Tensor => of(reads, &|at| {
                tensor(at).bytes(rank.tokens.ceil() as u64) as f64
            }),
            // Each rank contributes only what it owns, and receives the rest.
            Amount::Region => of(reads, &|at| tensor(at).bytes(0) as f64 * self.owned_part()),
        }
    }

    /// Returns the ranks that a rank exchanges with in an operation.
    fn peers(&self, row: &OpRow, rank: &Rank) -> Peers {
        let (own, expert_tp) = (rank.rank, self.mesh.expert_tp);
        let from = |first: usize, ranks: usize, step: usize| Peers {
            ranks: first..first + ranks,
            step,
        };
        // The shards of an expert are on consecutive ranks.
        let first_shard = own - own % expert_tp;
        let group = self.mesh.group();
        match row.group {
            OpGroup::World => from(0, self.mesh.ranks(), 1),
            // Where rows stay, a rank is a group of its own.
            OpGroup::Own => from(own, 1, 1),
            OpGroup::Ep if self.adaptive_r == 0 => from(own, 1, 1),
            OpGroup::Ep => {
                // Of the shards of an expert only the first sends in a broadcast.
                let is_broadcast = row.collective == Collective::Broadcast;
                let step = if is_broadcast { expert_tp } else { 1 };
                from(rank.group * group, group, step)
            }
            OpGroup::ExpertTp => {
                let block = traffic::block(self.mesh, self.adaptive_r);
                from(first_shard + own % block, self.adaptive_r * block, block)
            }
            OpGroup::GatherGroup if self.adaptive_r == 0 => from(rank.group * group, group, 1),
            OpGroup::GatherGroup => {
                let block = traffic::block(self.mesh, self.adaptive_r);
                from(own - own % block, block, 1)
            }
            OpGroup::SharedTp => from(first_shard, expert_tp, 1),
        }
    }

    /// Returns the cost of rows that go to experts or back.
    fn expert_rows(&self, exchange: &Exchange, rank: &Rank) -> OpCost {
        let wide = self.row_of(exchange).unwrap_or_default();
        let there = exchange.op == CollectiveOp::Dispatch;
        let mut cost = self.rows(rank, wide, there, deduplicates(exchange));
        let is_first = self
            .first_dispatch()
            .is_some_and(|first| first.tensors == exchange.tensors);
        if self.all_to_all.row().deduplicates && there && is_first {
            // The indices that say which rows belong to one token go once, before forward's rows.
            cost += self.rows(rank, (4.0, 4), true, false);
        }
        cost
    }

    /// Returns the exchange that brings the rows of tokens to experts in forward.
    fn first_dispatch(&self) -> Option<&Exchange> {
        let mut exchanges = self.plan.steps.iter().filter_map(RankStep::exchange);
        exchanges.find(|exchange| exchange.op == CollectiveOp::Dispatch)
    }

    /// Returns the cost of a shadow's weights, broadcast to all ranks of the group over a tree; a
    /// round ends when its slowest rank is done.
    fn spread(&self, rank: &Rank, bytes: f64) -> OpCost {
        let mut all = OpCost::default();
        for round in rank.shadows.trees.iter().flatten() {
            let each = round.iter().map(|rows| self.over(times(rows, bytes)));
            // A rank forwards weights only after it has them, so rounds do not overlap.
            let slowest = |a: &OpCost, b: &OpCost| a.time.seconds.total_cmp(&b.time.seconds);
            all += each.max_by(slowest).unwrap_or_default();
        }
        all
    }

    /// Returns the bytes of the gradients of all expert weights of the plan.
    pub fn expert_gradients(&self) -> f64 {
        gradient_bytes(&self.plan.experts)
    }

    /// Returns the costs of summing gradients over the ranks that hold the same weight: expert
    /// weights over the groups that hold all experts, other weights over all ranks or over the
    /// ranks with equal shard number, replicas at the owners of their experts. [`SUMS`] has the
    /// names.
    pub fn gradients(&self, rank: &Rank) -> [OpCost; SUMS.len()] {
        let world = self.mesh.ranks();
        let group = self.mesh.group();
        let own = self.expert_gradients() * self.owned_part();
        let replicas = rank.rank % group..world;
        let whole = gradient_bytes(&self.plan.tokens);
        let shared = self.plan.shared.as_ref().map_or(0.0, gradient_bytes);
        let shards = rank.rank % self.mesh.expert_tp..world;
        [
            self.sum(rank, replicas, group, own),
            self.sum(rank, 0..world, 1, whole),
            self.sum(rank, shards, self.mesh.expert_tp, shared),
            self.of_replicas(rank, own),
        ]
    }

    /// Returns the cost of sending gradients of replicas to the owners of their experts, and the
    /// sums back; `own` is the bytes of all replicas of a rank.
    fn of_replicas(&self, rank: &Rank, own: f64) -> OpCost {
        let experts = self.plan.experts.spec.shape.experts as f64;
        // Loads of replicas count one expert's gradients as one byte.
        let there = times(&rank.replicas, own / experts);
        let mut both = self.over(there);
        both += self.over(there.map(LevelLoad::reversed));
        both
    }

    fn over(&self, loads: [LevelLoad; MOST_LEVELS]) -> OpCost {
        let phase = Phase {
            loads,
            ..Phase::default()
        };
        OpCost {
            time: self.machine.phase(&phase),
            sent: loads.map(|load| load.sent),
        }
    }

    /// Returns the cost of sending equal bytes to each of some ranks.
    fn each(&self, rank: &Rank, to: std::ops::Range<usize>, step: usize, bytes: f64) -> OpCost {
        self.over(to_range(self.machine, rank.rank, to, step, bytes))
    }

    /// Returns the cost of a sum: parts go to their owners, and sums back; few bytes go to all
    /// ranks at once.
    fn sum(&self, rank: &Rank, over: std::ops::Range<usize>, step: usize, bytes: f64) -> OpCost {
        let ranks = over.len().div_ceil(step).max(1) as f64;
        // A collective of nothing is not run, so it must not cost its fixed time.
        if bytes == 0.0 || ranks == 1.0 {
            return OpCost::default();
        }
        if bytes <= ONE_PHASE_BYTES as f64 {
            return self.each(rank, over, step, bytes);
        }
        let mut both = self.each(rank, over.clone(), step, bytes / ranks);
        both += self.each(rank, over, step, bytes / ranks);
        both
    }

    /// Returns the cost of rows that go to experts or back. With `once`, an algorithm that
    /// deduplicates sends one row per token and node.
    fn rows(&self, rank: &Rank, wide: (f64, usize), there: bool, once: bool) -> OpCost {
        if self.adaptive_r == 0 {
            return self.own(rank.rows * wide.0 * self.chunk.own);
        }
        let carried = self.carried(rank, wide, there, once);
        let OpCost { time, sent } = carried.cost_of(self.machine, rank);
        if self.machine.all_to_all_factors.is_empty() {
            return OpCost { time, sent };
        }
        // Factors come from whole steps, so smaller exchanges alongside rows are covered by the
        // factor of rows.
        let by = self.machine.all_to_all(
            self.all_to_all,
            self.overlap_by,
            self.overlap_degree,
            self.message(rank),
        );
        let time = time.times(by);
        OpCost { time, sent }
    }

    /// Returns the bytes of a message with token rows to experts in forward; 0 where there is
    /// none.
    pub fn message(&self, rank: &Rank) -> f64 {
        let Some(first) = self.first_dispatch() else {
            return 0.0;
        };
        let wide = self.row_of(first).unwrap_or_default();
        let carried = self.carried(rank, wide, true, deduplicates(first));
        carried.message(rank)
    }

    fn carried(
        &self,
        rank: &Rank,
        (row, element): (f64, usize),
        there: bool,
        once: bool,
    ) -> ExchangedRows {
        let part = if there { self.part() } else { 1.0 };
        let rows = part * self.chunk.others;
        // A deduplicated row crosses once however many shards get it inside the node. On the way
        // back one row crosses too, however many shards contributed; `back` counts that one.
        let ranks = self.all_to_all.row().deduplicates_ranks();
        let crossing = match (once && !rank.each.is_empty(), there) {
            (false, _) => rows * row,
            (true, _) if ranks => self.repeats * rows * row,
            (true, true) => self.repeats * row * self.chunk.others,
            (true, false) => self.repeats * self.mesh.expert_tp as f64 * row * self.chunk.others,
        };
        ExchangedRows {
            // Between ranks, a token goes once over links inside nodes, too.
            row: if ranks { crossing } else { rows * row },
            own: part * self.chunk.own * row,
            peers: self.chunk.peers,
            crossing,
            cast_ratio: comm_dtype_part(self.comm_dtype, row, element),
            there,
            dedup: once,
            side_by_side: self.all_to_all.row().shares() > 1,
        }
    }

    fn own(&self, bytes: f64) -> OpCost {
        let phase = Phase {
            own: 2.0 * bytes,
            ..Phase::default()
        };
        OpCost {
            time: self.machine.phase(&phase),
            sent: LevelTime::default(),
        }
    }
}

/// Ranks at equal distances.
struct Peers {
    ranks: std::ops::Range<usize>,
    step: usize,
}

/// Returns whether an algorithm that deduplicates sends one row for each token and node: equal rows
/// cross once, and a node adds up the rows that are only read as a sum
/// (docs/adaptive/all_to_all.md).
fn deduplicates(exchange: &Exchange) -> bool {
    matches!(
        exchange.payload,
        Some(Payload::PerToken | Payload::PartialSums)
    )
}

/// Returns the elements of one expert in a tensor of all experts.
fn of_expert(tensor: &TensorPlan) -> f64 {
    let each = tensor.shape.iter().skip(1).map(|size| size.eval(0) as f64);
    each.product()
}

/// Returns the bytes of the weight gradients that a part of the plan produces.
fn gradient_bytes(plan: &LayerPlan) -> f64 {
    let tensors = plan.tensors.iter();
    let gradients = tensors.filter(|tensor| tensor.role == TensorRole::WeightGradient);
    gradients.map(|tensor| tensor.bytes(0) as f64).sum()
}

/// Rows that go to experts or back, by the messages of an all-to-all algorithm.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExchangedRows {
    /// The bytes of a row, scaled down where only a part of the rows goes.
    pub row: f64,
    /// The same for rows that a rank keeps.
    pub own: f64,
    /// The part of the messages.
    pub peers: f64,
    /// The same for rows that cross between nodes.
    pub crossing: f64,
    /// The bytes between nodes for each byte in memory.
    pub cast_ratio: f64,
    /// Whether the rows go to experts.
    pub there: bool,
    /// Whether an algorithm that deduplicates sends one row per token and node.
    pub dedup: bool,
    /// Whether levels transfer concurrently.
    pub side_by_side: bool,
}

impl ExchangedRows {
    fn phases<'r>(&self, rank: &'r Rank) -> &'r [PhaseLoad] {
        let each = !self.dedup && !rank.each.is_empty();
        match (self.there, each) {
            (true, false) => &rank.phases,
            (true, true) => &rank.each,
            (false, false) => &rank.back,
            (false, true) => &rank.each_back,
        }
    }

    /// Returns the mean bytes of a message between nodes, or inside the node where all ranks
    /// share one.
    pub fn message(&self, rank: &Rank) -> f64 {
        let phases = self.phases(rank).iter();
        let phases: Vec<Phase> = phases.map(|share| self.phase(rank, share, false)).collect();
        let mean = |levels: std::ops::Range<usize>| {
            let loads = phases.iter().flat_map(|phase| &phase.loads[levels.clone()]);
            let of = |load: &LevelLoad| [load.messages, load.sent.max(load.received)];
            let [messages, bytes] = loads
                .map(of)
                .fold([0.0; 2], |a, b| [a[0] + b[0], a[1] + b[1]]);
            (messages > 0.0).then(|| bytes / messages)
        };
        mean(1..MOST_LEVELS).or_else(|| mean(0..1)).unwrap_or(0.0)
    }

    pub fn cost_of(&self, machine: &Machine, rank: &Rank) -> OpCost {
        let mut cost = OpCost::default();
        let phases = self.phases(rank);
        for (at, share) in phases.iter().enumerate() {
            let phase = self.phase(rank, share, at + 1 == phases.len());
            cost += OpCost {
                time: machine.phase(&phase),
                sent: phase.loads.map(|load| load.sent),
            };
        }
        cost
    }

    /// Returns one of the phases. Rows that are cast between nodes are read and written twice
    /// more: by a kernel before and one after.
    fn phase(&self, rank: &Rank, share: &PhaseLoad, last: bool) -> Phase {
        let own = if self.there { rank.own } else { rank.own_back };
        let share = PhaseLoad {
            loads: share.loads.map(|load| load.to_part(self.peers)),
            ..*share
        };
        let mut loads = share.loads.map(|load| load.times(self.row));
        for (load, rows) in loads.iter_mut().zip(&share.loads).skip(1) {
            *load = rows.times(self.crossing * self.cast_ratio);
        }
        // Level 0 is inside the node, where rows are never cast.
        let outer = share.loads[1..].iter();
        let outside: f64 = outer.map(|load| load.sent + load.received).sum();
        let packed = self.cast_ratio < 1.0 && outside > 0.0;
        let converted = if packed {
            outside * self.crossing * (1.0 + self.cast_ratio)
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

/// Returns the bytes between nodes for each byte of a row of `row` bytes in memory. A single
/// element, such as a weight, is not cast.
pub(crate) fn comm_dtype_part(comm_dtype: CommDtype, row: f64, element: usize) -> f64 {
    let width = row / element as f64;
    if width < 2.0 {
        return 1.0;
    }
    let (table, width) = (comm_dtype.row(), width as usize);
    let packed = table.values(width, element) + table.scale_bytes(width);
    (packed as f64 / row).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_as_wide_between_nodes_as_their_format_says() {
        assert_eq!(comm_dtype_part(CommDtype::Unchanged, 14336.0, 2), 1.0);
        assert_eq!(comm_dtype_part(CommDtype::Bf16, 14336.0, 2), 1.0);
        assert_eq!(comm_dtype_part(CommDtype::F16, 28672.0, 4), 0.5);
        // 7168 elements and 56 scales, as DeepEP sends them.
        assert_eq!(
            comm_dtype_part(CommDtype::Fp8, 14336.0, 2) * 14336.0,
            7392.0
        );
        assert_eq!(comm_dtype_part(CommDtype::Fp8, 4.0, 4), 1.0);
        // 7168 elements and 224 scales of one byte.
        assert_eq!(
            comm_dtype_part(CommDtype::Mxfp8, 14336.0, 2) * 14336.0,
            7392.0
        );
    }
}
