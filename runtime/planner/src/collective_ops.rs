//! What each exchange of a plan takes a rank.

use crate::Machine;
use crate::chunks::ChunkShare;
use crate::exchange::{LevelTime, Load, MOST_LEVELS, Phase, PhaseTime};
use crate::geometry::{PhaseLoad, Rank};
use crate::plan_parts::Costs;
use crate::shadows::times;
use crate::traffic::{self, to_range};
use moesaic_kernel::DType;
use moesaic_plan::{
    AllToAll, CollectiveOp, CommDtype, Exchange, LayerPlan, OverlapBy, Parallel, PlanPart,
    RankPlan, RankStep, Role, TensorPlan,
};
use moesaic_spec::WeightSite;

/// Sums of gradients after a backward pass.
pub(crate) const SUMS: [&str; 4] = [
    "gradients of experts",
    "other gradients",
    "gradients of shards",
    "gradients of replicas",
];

/// An exchange of one rank: what it takes, and what it sends by level.
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

/// How rows comm in one pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CommConfig<'a> {
    pub machine: &'a Machine,
    /// The plan whose steps these are: of as many shards as rows go to.
    pub plan: &'a RankPlan,
    /// What its launches cost, as far as that is known.
    pub costs: &'a Costs,
    /// The mesh itself.
    pub mesh: Parallel,
    /// To how many shards a row goes; 0: it stays.
    pub adaptive_r: usize,
    pub all_to_all: AllToAll,
    pub comm_dtype: CommDtype,
    /// Into how many chunks it is cut.
    pub overlap_degree: usize,
    /// For how many chunks products are launched.
    pub launched: usize,
    pub overlap_by: OverlapBy,
    /// How many times as many rows cross in chunks where a token crosses once: once in each
    /// chunk that it has rows in.
    pub repeats: f64,
    /// Of which chunk exchanges of rows are.
    pub chunk: ChunkShare,
}

/// Sums of so many bytes go to everybody at once (see the plans of all-reduce).
const SMALL_SUM: f64 = 2048.0;

impl CommConfig<'_> {
    /// The chunks of the pass.
    pub fn chunk_shares(&self) -> Vec<ChunkShare> {
        ChunkShare::all(
            (self.overlap_degree, self.launched),
            self.overlap_by,
            self.mesh,
            self.adaptive_r,
        )
    }

    /// The same for one of its chunks.
    pub fn of_chunk(&self, chunk: ChunkShare) -> Self {
        CommConfig { chunk, ..*self }
    }

    /// The part of the rows for an expert that one of its shards gets.
    pub fn part(&self) -> f64 {
        match self.adaptive_r {
            0 => 0.0,
            adaptive_r => adaptive_r as f64 / self.mesh.expert_tp as f64,
        }
    }

    /// Of the experts' weights in the plan what is a rank's own.
    pub fn owned(&self) -> f64 {
        match self.adaptive_r {
            0 => 1.0 / self.mesh.group() as f64,
            _ => self.part(),
        }
    }

    /// What exchanges that [go together](Exchange::goes_with) take a rank: where rows go straight
    /// and as they are, one message has those of all tensors.
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
        let there = matches!(first.op, CollectiveOp::Dispatch { .. });
        self.rows(rank, (bytes, element), there, false)
    }

    /// Whether rows go straight to other ranks, as they are.
    pub fn is_straight(&self) -> bool {
        self.adaptive_r > 0
            && self.all_to_all == AllToAll::Linear
            && self.comm_dtype == CommDtype::Unchanged
    }

    fn sum_of(&self, exchanges: &[&Exchange], rank: &Rank) -> OpCost {
        let mut sum = OpCost::default();
        let each = exchanges.iter();
        each.for_each(|exchange| sum += self.cost_of(exchange, rank));
        sum
    }

    /// Bytes of a row that goes to experts or back, and of an element of it.
    fn row_of(&self, exchange: &Exchange) -> Option<(f64, usize)> {
        let (part, tensor) = match exchange.op {
            CollectiveOp::Dispatch { from, .. } => (PlanPart::Dispatch, from),
            CollectiveOp::Combine { from, .. } => (PlanPart::Experts, from),
            _ => return None,
        };
        let element = self.plan.part(part)[tensor].dtype.size();
        Some((self.plan.row_bytes(part, tensor) as f64, element))
    }

    /// What an exchange takes a rank.
    pub fn cost_of(&self, exchange: &Exchange, rank: &Rank) -> OpCost {
        let world = 0..self.mesh.ranks();
        let group = rank.group * self.mesh.group()..(rank.group + 1) * self.mesh.group();
        let row = |part, id| self.plan.row_bytes(part, id) as f64;
        let tokens = &self.plan.tokens;
        let experts = &self.plan.experts;
        match exchange.op {
            CollectiveOp::TokenCounts | CollectiveOp::CountLiveTokens { .. } => {
                self.each(rank, world, 1, 8.0)
            }
            CollectiveOp::AllReduceMax { tensor } => {
                self.sum(rank, world, 1, tokens[tensor].bytes(0) as f64)
            }
            CollectiveOp::GlobalRouting => OpCost::default(),
            CollectiveOp::ReduceLossParts { tensor } => {
                self.sum(rank, world, 1, row(PlanPart::Dispatch, tensor))
            }
            CollectiveOp::AllReduceSum { from, .. } => {
                let bytes = tokens[from].bytes(rank.tokens.ceil() as u64);
                self.sum(rank, world, 1, bytes as f64)
            }
            CollectiveOp::RowCounts if self.adaptive_r == 0 => OpCost::default(),
            CollectiveOp::RowCounts => self.each(rank, group, 1, 8.0 * rank.arriving.len() as f64),
            CollectiveOp::Dispatch { .. } => {
                let wide = self.row_of(exchange).unwrap_or_default();
                let mut cost_of = self.rows(rank, wide, true, self.crosses_once(&exchange.name));
                if self.all_to_all == AllToAll::Dedup && exchange.name == "rows" {
                    // Which rows are of one token.
                    cost_of += self.rows(rank, (4.0, 4), true, false);
                }
                cost_of
            }
            CollectiveOp::Combine { .. } => {
                let wide = self.row_of(exchange).unwrap_or_default();
                self.rows(rank, wide, false, self.comes_summed(&exchange.name))
            }
            CollectiveOp::AllReduceTp { tensor } => {
                let arriving: f64 = rank.arriving.iter().sum();
                let rows = arriving * self.part() * self.chunk.products;
                let (shards, step) = self.shards(rank);
                self.sum(rank, shards, step, rows * row(PlanPart::Experts, tensor))
            }
            CollectiveOp::TpTokenCounts => self.neighbours(rank, 8.0),
            CollectiveOp::AllGatherTp { from, .. } => {
                self.neighbours(rank, rank.tokens * row(PlanPart::Dispatch, from))
            }
            CollectiveOp::ReduceScatterTp { to, .. } => {
                self.neighbours(rank, rank.tokens * row(PlanPart::Dispatch, to))
            }
            CollectiveOp::BroadcastTp { to, .. } => {
                self.neighbours(rank, tokens[to].bytes(0) as f64)
            }
            CollectiveOp::AllGatherWeight { weight, .. } => {
                self.block(rank, experts[weight].bytes(0) as f64)
            }
            CollectiveOp::ReduceScatterGradient { gradient, .. } => {
                self.block(rank, experts[gradient].bytes(0) as f64)
            }
            CollectiveOp::AllGatherExperts { from, .. } if self.adaptive_r > 0 => self.each(
                rank,
                group,
                self.mesh.expert_tp,
                experts[from].bytes(0) as f64,
            ),
            CollectiveOp::AllGatherExperts { .. } => OpCost::default(),
            CollectiveOp::TokensPerExpert => {
                let experts = tokens.spec.shape.experts as f64;
                self.each(rank, group, 1, 8.0 * experts)
            }
            CollectiveOp::KeepShadowRows { from, .. } => {
                self.stays(rank, row(PlanPart::Dispatch, from))
            }
            CollectiveOp::ReturnShadowRows { to, .. } => {
                self.stays(rank, row(PlanPart::Dispatch, to))
            }
            CollectiveOp::BroadcastShadowWeight { from, .. } => {
                let weight = &experts[from];
                self.spread(rank, of_expert(weight) * weight.dtype.size() as f64)
            }
            CollectiveOp::ReduceShadowGradient { to, .. } => {
                let bytes = of_expert(&experts[to]) * DType::F32.size() as f64;
                self.over(times(&rank.sums, bytes))
            }
        }
    }

    /// Rows that stay are copied beside, or back.
    fn stays(&self, rank: &Rank, row: f64) -> OpCost {
        self.own(rank.stay.iter().sum::<f64>() * row)
    }

    /// Weights of each shadow go to all ranks of the group, round after round of a tree; a
    /// round ends when its slowest rank is done.
    fn spread(&self, rank: &Rank, bytes: f64) -> OpCost {
        let mut all = OpCost::default();
        for round in rank.shadows.trees.iter().flatten() {
            let each = round.iter().map(|rows| self.over(times(rows, bytes)));
            let slowest = |a: &OpCost, b: &OpCost| a.time.seconds.total_cmp(&b.time.seconds);
            all += each.max_by(slowest).unwrap_or_default();
        }
        all
    }

    /// The ranks of a block gather the parts of a weight that each of them owns, or give them
    /// back as sums of gradients; `bytes` are all of it.
    fn block(&self, rank: &Rank, bytes: f64) -> OpCost {
        let own = bytes * self.owned();
        match self.adaptive_r {
            0 => {
                let first = rank.group * self.mesh.group();
                self.each(rank, first..first + self.mesh.group(), 1, own)
            }
            adaptive_r => {
                let block = traffic::block(self.mesh, adaptive_r);
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
    /// over the groups that hold all of them, others over all ranks, or those with shards of
    /// the same number, and those of replicas at the owners of their experts. [`SUMS`] has
    /// their names.
    pub fn gradients(&self, rank: &Rank) -> [OpCost; SUMS.len()] {
        let world = self.mesh.ranks();
        let group = self.mesh.group();
        let own = self.expert_gradients() * self.owned();
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

    /// Gradients of replicas go to the owners of their experts, and the sums back; `own` are the
    /// bytes of all that a rank has.
    fn of_replicas(&self, rank: &Rank, own: f64) -> OpCost {
        let experts = self.plan.experts.spec.shape.experts as f64;
        let there = times(&rank.replicas, own / experts);
        let mut both = self.over(there);
        both += self.over(there.map(Load::turned));
        both
    }

    fn neighbours(&self, rank: &Rank, bytes: f64) -> OpCost {
        let first = rank.rank - rank.rank % self.mesh.expert_tp;
        self.each(rank, first..first + self.mesh.expert_tp, 1, bytes)
    }

    /// The ranks that multiplied the same rows with the shards of an expert.
    fn shards(&self, rank: &Rank) -> (std::ops::Range<usize>, usize) {
        let block = traffic::block(self.mesh, self.adaptive_r);
        let first = rank.rank - rank.rank % self.mesh.expert_tp + rank.rank % block;
        (first..first + self.adaptive_r * block, block)
    }

    fn over(&self, loads: [Load; MOST_LEVELS]) -> OpCost {
        let phase = Phase {
            loads,
            ..Phase::default()
        };
        OpCost {
            time: self.machine.phase(&phase),
            sent: loads.map(|load| load.sent),
        }
    }

    /// The same to each of some ranks.
    fn each(&self, rank: &Rank, to: std::ops::Range<usize>, step: usize, bytes: f64) -> OpCost {
        self.over(to_range(self.machine, rank.rank, to, step, bytes))
    }

    /// Parts to their owners, and sums back; little goes to all at once.
    fn sum(&self, rank: &Rank, over: std::ops::Range<usize>, step: usize, bytes: f64) -> OpCost {
        let ranks = over.len().div_ceil(step).max(1) as f64;
        if bytes == 0.0 || ranks == 1.0 {
            return OpCost::default();
        }
        if bytes <= SMALL_SUM {
            return self.each(rank, over, step, bytes);
        }
        let mut both = self.each(rank, over.clone(), step, bytes / ranks);
        both += self.each(rank, over, step, bytes / ranks);
        both
    }

    /// Whether equal rows of a token are one on the way to a node (docs/adaptive/all-to-all algorithms.md).
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

    /// Rows go to experts, or back; `once`: those of a token to a node are one, by an all-to-all algorithm
    /// that has it so.
    fn rows(&self, rank: &Rank, wide: (f64, usize), there: bool, once: bool) -> OpCost {
        if self.adaptive_r == 0 {
            return self.own(rank.rows * wide.0 * self.chunk.own);
        }
        let carried = self.carried(rank, wide, there, once);
        let OpCost { time, sent } = carried.cost_of(self.machine, rank);
        if self.machine.all_to_all_factors.is_empty() {
            return OpCost { time, sent };
        }
        // Steps are timed as a whole: what is smaller beside rows is in their factor.
        let by = self.machine.all_to_all(
            self.all_to_all,
            self.overlap_by,
            self.overlap_degree,
            self.message(rank),
        );
        let time = time.times(by);
        OpCost { time, sent }
    }

    /// Bytes of a message that has rows of tokens on their way to experts, in forward; 0 where
    /// there is none.
    pub fn message(&self, rank: &Rank) -> f64 {
        let rows = self.plan.steps.iter().find_map(|step| match step {
            RankStep::Exchange(exchange) if exchange.name == "rows" => match exchange.op {
                CollectiveOp::Dispatch { from, .. } => Some(from),
                _ => None,
            },
            _ => None,
        });
        rows.map_or(0.0, |from| {
            let row = self.plan.row_bytes(PlanPart::Dispatch, from) as f64;
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
        let rows = part * self.chunk.others;
        // What crosses once does so however many shards get it inside the node, or have a part
        // of the answer there, of which one is what `back` has.
        let dedup_indices = match (once && !rank.each.is_empty(), there) {
            (false, _) => rows * row,
            (true, true) => self.repeats * row * self.chunk.others,
            (true, false) => self.repeats * self.mesh.expert_tp as f64 * row * self.chunk.others,
        };
        Carried {
            row: rows * row,
            own: part * self.chunk.own * row,
            peers: self.chunk.peers,
            dedup_indices,
            comm_dtype: wire_part(self.comm_dtype, row, element),
            there,
            once,
            side_by_side: self.all_to_all == AllToAll::TwoDhConcurrent,
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

/// Numbers of one expert in a tensor that has those of all.
fn of_expert(tensor: &TensorPlan) -> f64 {
    let each = tensor.shape.iter().skip(1).map(|size| size.eval(0) as f64);
    each.product()
}

/// Bytes of the gradients of weights that a part leaves.
fn gradient_bytes(plan: &LayerPlan) -> f64 {
    let tensors = plan.tensors.iter();
    let gradients = tensors.filter(|tensor| tensor.role == Role::WeightGradient);
    gradients.map(|tensor| tensor.bytes(0) as f64).sum()
}

/// Rows that go to experts or back, by the messages of an all-to-all algorithm.
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
    pub comm_dtype: f64,
    /// To experts.
    pub there: bool,
    /// Equal rows of a token to a node are one, by an all-to-all algorithm that has it so.
    pub once: bool,
    /// Levels move at the same time.
    pub side_by_side: bool,
}

impl Carried {
    fn phases<'r>(&self, rank: &'r Rank) -> &'r [PhaseLoad] {
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

    pub fn cost_of(&self, machine: &Machine, rank: &Rank) -> OpCost {
        let mut cost_of = OpCost::default();
        let phases = self.phases(rank);
        for (at, share) in phases.iter().enumerate() {
            let phase = self.phase(rank, share, at + 1 == phases.len());
            cost_of += OpCost {
                time: machine.phase(&phase),
                sent: phase.loads.map(|load| load.sent),
            };
        }
        cost_of
    }

    /// One of the phases. What is packed otherwise between nodes is read and written twice,
    /// by a kernel before and one after.
    fn phase(&self, rank: &Rank, share: &PhaseLoad, last: bool) -> Phase {
        let own = if self.there { rank.own } else { rank.own_back };
        let share = PhaseLoad {
            loads: share.loads.map(|load| load.to_part(self.peers)),
            ..*share
        };
        let mut loads = share.loads.map(|load| load.times(self.row));
        for (load, rows) in loads.iter_mut().zip(&share.loads).skip(1) {
            *load = rows.times(self.dedup_indices * self.comm_dtype);
        }
        let outer = share.loads[1..].iter();
        let dedup_indices: f64 = outer.map(|load| load.sent + load.received).sum();
        let packed = self.comm_dtype < 1.0 && dedup_indices > 0.0;
        let converted = if packed {
            dedup_indices * self.dedup_indices * (1.0 + self.comm_dtype)
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
pub(crate) fn wire_part(comm_dtype: CommDtype, row: f64, element: usize) -> f64 {
    let element = element as f64;
    let width = row / element;
    if width < 2.0 {
        return 1.0;
    }
    let part = match comm_dtype {
        CommDtype::Unchanged => 1.0,
        CommDtype::F16 | CommDtype::Bf16 => 2.0 / element,
        CommDtype::Fp8 => (width + 4.0 * (width / 128.0).ceil()) / row,
    };
    part.min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_as_wide_on_the_wire_as_their_format_says() {
        assert_eq!(wire_part(CommDtype::Unchanged, 14336.0, 2), 1.0);
        assert_eq!(wire_part(CommDtype::Bf16, 14336.0, 2), 1.0);
        assert_eq!(wire_part(CommDtype::F16, 28672.0, 4), 0.5);
        // 7168 numbers and 56 scales, as DeepEP sends them.
        assert_eq!(wire_part(CommDtype::Fp8, 14336.0, 2) * 14336.0, 7392.0);
        assert_eq!(wire_part(CommDtype::Fp8, 4.0, 4), 1.0);
    }
}
