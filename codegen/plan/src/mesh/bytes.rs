//! Bytes that a rank sends under an even load: every expert gets equally many rows.

use super::{Exchange, PartTensor, RankPlan, RankStep, ShardRegion};
use crate::TensorId;
use moesaic_dist::{
    Amount, Collective, CollectiveOp, Distance, NUMBER_BYTES, NodeShape, OpGroup, RankCoords,
    Sends, Sent,
};

impl RankPlan {
    /// Returns the bytes that this rank sends in an exchange when each rank has `tokens` tokens and
    /// every expert gets equally many rows, spread evenly over its replicas. `per_node` consecutive
    /// ranks share a node. [`OpRow::sent`](moesaic_dist::OpRow::sent) says how reductions count.
    pub fn bytes(&self, exchange: &Exchange, tokens: u64, per_node: usize) -> Sent {
        let (row, nodes) = (exchange.op.row(), self.nodes(per_node));
        // Shared experts keep the shards that the mesh stores, whatever degree the routed experts
        // run at.
        let place = match row.group {
            OpGroup::SharedTp => self.place,
            _ => self.by().place(self.own()),
        };
        row.sent(&Sends {
            rank: self.own(),
            group: &self.members(row.group),
            nodes,
            in_place: exchange.is_in_place(),
            is_root: place.tp == 0,
            bytes: &|rank| self.bytes_to(exchange, rank, tokens, nodes),
        })
    }

    /// Returns the bytes that this rank has in an exchange for one rank of the process group.
    fn bytes_to(&self, exchange: &Exchange, rank: usize, tokens: u64, nodes: NodeShape) -> u64 {
        let row = exchange.op.row();
        let of = |bytes: &dyn Fn(PartTensor) -> u64| exchange.reads().map_or(0, bytes);
        match row.amount {
            // An even load has no hot expert, so the shadow model chooses none.
            Amount::Nothing | Amount::ShadowRows | Amount::ShadowTensor => 0,
            Amount::Number => NUMBER_BYTES,
            Amount::NumberPerExpert => NUMBER_BYTES * self.tokens.spec.shape.experts as u64,
            Amount::NumberPerOwnExpert => {
                let ep = self.by().place(rank).ep;
                NUMBER_BYTES * self.row_placement().count(ep) as u64
            }
            Amount::ExpertRows => self.expert_row_bytes(exchange, rank, tokens, nodes),
            Amount::TokenRows => of(&|at| tokens * self.row_bytes(at.part, at.tensor) as u64),
            Amount::OneRow => of(&|at| self.row_bytes(at.part, at.tensor) as u64),
            Amount::Tensor => of(&|at| self.part(at.part)[at.tensor].bytes(tokens)),
            Amount::Region => {
                let first = self.by().block(self.own()).start;
                // Parts of a sum go to their owners, parts of a weight come from them.
                let owner = match row.collective {
                    Collective::ReduceScatter => rank - first,
                    _ => self.own() - first,
                };
                of(&|at| self.region_bytes(at.tensor, exchange.dim, owner))
            }
        }
    }

    /// Returns the bytes of rows of tokens that this rank has for a rank of the group.
    fn expert_row_bytes(
        &self,
        exchange: &Exchange,
        rank: usize,
        tokens: u64,
        nodes: NodeShape,
    ) -> u64 {
        let (by, own) = (self.by(), self.own());
        let Some(PartTensor { part, tensor }) = exchange.reads() else {
            return 0;
        };
        let row = match &exchange.packed {
            // Only between nodes have rows another size, where the exchange packs them.
            Some(packed) if !nodes.share(rank, own) => packed.row_bytes as u64,
            _ => self.row_bytes(part, tensor) as u64,
        };
        // The distance of a chunk counts from the tokens' rank to the experts', so both directions
        // need their own count.
        let rows = |from: usize, to: usize| {
            let ep = |rank: usize| by.place(rank).ep;
            self.even_rows(exchange, tokens, [ep(from), ep(to)])
        };
        match exchange.op {
            CollectiveOp::Dispatch => rows(own, rank) * row,
            // The shard with a rank's own number answers it.
            CollectiveOp::Combine if by.place(rank).tp != by.place(own).tp => 0,
            CollectiveOp::Combine => rows(rank, own) * row,
            _ => {
                let group = self.members(OpGroup::Ep);
                row * group.iter().map(|&from| rows(from, own)).sum::<u64>()
            }
        }
    }

    /// Returns the rows of an exchange between a rank of one group of experts' ranks and one of
    /// another, under an even load.
    fn even_rows(&self, exchange: &Exchange, tokens: u64, [from, to]: [usize; 2]) -> u64 {
        let shape = &self.tokens.spec.shape;
        let rows = tokens * shape.top_k as u64;
        // Replicas share an expert's rows, so a group with two halves of experts gets the rows of
        // one.
        let loads = self.row_placement().loads(&vec![1.0; shape.experts]);
        let all = (rows as f64 * loads[to] / shape.experts as f64) as u64;
        match exchange.chunk {
            None => all,
            Some(chunk) => {
                let distance = Distance::between(from, to, self.by().mesh().ep);
                chunk.rows(all as usize, distance).len() as u64
            }
        }
    }

    /// Returns the bytes of all exchanges of a pass.
    pub fn bytes_of(&self, steps: &[RankStep], tokens: u64, per_node: usize) -> Sent {
        let mut all = Sent::default();
        for exchange in steps.iter().filter_map(RankStep::exchange) {
            all += self.bytes(exchange, tokens, per_node);
        }
        all
    }

    /// Returns the ranks of a process group of this rank, by their numbers in the world.
    pub(super) fn members(&self, group: OpGroup) -> Vec<usize> {
        let (by, own, world) = (self.by(), self.own(), 0..self.mesh.ranks());
        let place = by.place(own);
        let exchange_rows = |rank: &usize| by.place(*rank).dp == place.dp;
        match group {
            OpGroup::Own => vec![own],
            OpGroup::World => world.collect(),
            OpGroup::Ep => world.filter(exchange_rows).collect(),
            OpGroup::ExpertTp => {
                let same_experts = |rank: &usize| by.place(*rank).ep == place.ep;
                world.filter(exchange_rows).filter(same_experts).collect()
            }
            OpGroup::GatherGroup => by.block(own).collect(),
            OpGroup::SharedTp => (0..self.mesh.expert_tp)
                .map(|tp| self.mesh.rank(RankCoords { tp, ..self.place }))
                .collect(),
        }
    }

    /// Returns the bytes of a tensor of the expert part that one rank of the block owns.
    fn region_bytes(&self, tensor: TensorId, dim: Option<usize>, owner: usize) -> u64 {
        let regions = self.regions(tensor, dim);
        let own = regions.iter().filter(|region| region.owner == owner);
        let elements: usize = own.map(ShardRegion::elements).sum();
        (elements * self.experts[tensor].dtype.size()) as u64
    }

    /// Returns the nodes of all ranks; the last one may lack some.
    fn nodes(&self, per_node: usize) -> NodeShape {
        let per_node = per_node.max(1);
        NodeShape {
            nodes: self.mesh.ranks().div_ceil(per_node),
            per_node,
        }
    }

    fn own(&self) -> usize {
        self.mesh.rank(self.place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::plan_rank;
    use crate::{PlanOptions, Training};
    use moesaic_dist::{Parallel, SharedExperts};
    use moesaic_spec::LayerSpec;

    #[test]
    fn tokens_go_to_the_other_shards_and_sums_come_back() {
        let text = "shape = { model_dim = 8, hidden_dim = 16, experts = 8, top_k = 2 }
             shared = [{ hidden_dim = 6, gate = 'sigmoid', bias = true }]";
        let spec = LayerSpec::from_toml(text).unwrap();
        let mesh = Parallel {
            ep: 2,
            expert_tp: 2,
            shared: SharedExperts::Sharded,
            ..Parallel::default()
        };
        let options = PlanOptions::training(Training::default());
        let target = "cpu:avx2".parse().unwrap();
        let sent = |rank: usize, name: &str| {
            let plan = plan_rank(&spec, target, &options, mesh, rank).unwrap();
            let steps = plan.steps.iter().chain(&plan.backward);
            let mut named = steps.filter_map(|step| match step {
                RankStep::Exchange(exchange) if exchange.name == name => Some(exchange),
                _ => None,
            });
            plan.bytes(named.next().unwrap(), 100, 1)
        };
        let of = |here, network| Sent {
            here,
            node: 0,
            network,
        };
        // 100 rows of 32 bytes, or of a weight of 4, to each of two shards.
        assert_eq!(sent(3, "x"), of(3200, 3200));
        assert_eq!(sent(3, "shared.0.weight"), of(400, 400));
        assert_eq!(sent(3, "tokens of shards"), of(8, 8));
        // A sum sends the other rank's rows alone.
        assert_eq!(sent(3, "shared.0.out"), of(0, 3200));
        assert_eq!(sent(3, "shared.0.down.bias"), Sent::default());
        assert_eq!(sent(2, "shared.0.down.bias"), of(32, 32));
    }

    #[test]
    fn rows_go_to_other_ranks_in_equal_parts() {
        let text = "shape = { model_dim = 8, hidden_dim = 16, experts = 8, top_k = 2 }";
        let spec = LayerSpec::from_toml(text).unwrap();
        let mesh = Parallel {
            ep: 4,
            ..Parallel::default()
        };
        let options = PlanOptions::training(Training::default());
        let target = "cpu:avx2".parse().unwrap();
        let plan = plan_rank(&spec, target, &options, mesh, 1).unwrap();
        let named = |name: &str| {
            let find = |step: &RankStep| match step {
                RankStep::Exchange(exchange) if exchange.name == name => Some(exchange.clone()),
                _ => None,
            };
            plan.steps.iter().find_map(find).unwrap()
        };
        // 100 tokens, two experts each: 50 rows of 32 bytes for each of four ranks.
        let sent = plan.bytes(&named("rows"), 100, 2);
        let expected = Sent {
            here: 1600,
            node: 1600,
            network: 3200,
        };
        assert_eq!(sent, expected);
        assert_eq!(plan.bytes(&named("out"), 100, 2), expected);
        assert_eq!(plan.bytes(&named("counts"), 100, 4).node, 48);
        let all = plan.bytes_of(&plan.steps, 100, 2);
        assert_eq!(all.network, 2 * 3200 + 2 * 200 + 2 * 16);
    }
}
