//! Bytes that a rank sends under an even load: every expert gets equally many rows.

use super::{CollectiveOp, Distance, Exchange, PlanPart, RankPlan, RankStep, ShardRegion};
use crate::TensorId;

/// Bytes that a rank sends in an exchange, by distance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// Bytes that a rank copies to itself.
    pub here: u64,
    /// Bytes to other ranks of the same node.
    pub node: u64,
    /// Bytes to other nodes.
    pub network: u64,
}

impl RankPlan {
    /// Returns the bytes that this rank sends in an exchange when each rank has `tokens` tokens and
    /// every expert gets equally many rows, spread evenly over its replicas. `per_node` consecutive
    /// ranks share a node. A reduction counts the bytes of its shortest form: every rank sends each
    /// foreign part to the part's owner and, where all ranks get the result, the owner sends it
    /// back.
    pub fn bytes(&self, exchange: &Exchange, tokens: u64, per_node: usize) -> Sent {
        let (group, among) = (self.members(), self.sharing_rows());
        let own = self.mesh.rank(self.place);
        let block: Vec<usize> = self.by().block(own).collect();
        let world: Vec<usize> = (0..self.mesh.ranks()).collect();
        let rows = tokens * self.tokens.spec.shape.top_k as u64;
        let (placement, experts) = (self.row_placement(), self.tokens.spec.shape.experts);
        // Replicas share an expert's rows, so a group with two halves of experts gets the rows of
        // one.
        let loads = placement.loads(&vec![1.0; experts]);
        let ep = |rank: usize| self.by().place(rank).ep;
        let part = |ep: usize| (rows as f64 * loads[ep] / experts as f64) as u64;
        let row = |part, id| self.row_bytes(part, id) as u64;
        // Only rows of tokens have another size between nodes, where the exchange packs them.
        let row_to = |rank: usize, part, id| match &exchange.packed {
            Some(packed) if self.distance(rank, per_node) > 1 => packed.row_bytes as u64,
            _ => row(part, id),
        };
        let owned = |rank: usize| placement.count(ep(rank)) as u64;
        let groups = self.by().mesh().ep;
        let of_chunk = |from: usize, to: usize| match exchange.chunk {
            None => part(to),
            Some(chunk) => {
                let distance = Distance::between(from, to, groups);
                chunk.rows(part(to) as usize, distance).len() as u64
            }
        };
        // The distance of a chunk counts from the sender for dispatch and from the expert for
        // combine, so both directions need their own count.
        let to = |rank: usize| of_chunk(ep(own), ep(rank));
        let from = |rank: usize| of_chunk(ep(rank), ep(own));
        let shards: Vec<usize> = (0..self.mesh.expert_tp).map(|s| self.shard(s)).collect();
        let each = |ranks: &[usize], bytes: &dyn Fn(usize) -> u64| {
            let mut sent = Sent::default();
            for &rank in ranks {
                let bytes = bytes(rank);
                match self.distance(rank, per_node) {
                    0 => sent.here += bytes,
                    1 => sent.node += bytes,
                    _ => sent.network += bytes,
                }
            }
            sent
        };
        let summed = |ranks: &[usize], bytes: u64| {
            // Every part goes to its owner once and comes back once. A rank's own part is summed
            // where it lies.
            let part = 2 * bytes / ranks.len().max(1) as u64;
            Sent {
                here: 0,
                ..each(ranks, &|_| part)
            }
        };
        match exchange.op {
            CollectiveOp::TokenCounts | CollectiveOp::CountLiveTokens { .. } => {
                each(&world, &|_| 8)
            }
            CollectiveOp::RowCounts => each(&group, &|rank| 8 * owned(rank)),
            CollectiveOp::TokensPerExpert => each(&group, &|_| 8 * experts as u64),
            // An even load has no hot expert, so the shadow model chooses none.
            CollectiveOp::KeepShadowRows { .. }
            | CollectiveOp::ReturnShadowRows { .. }
            | CollectiveOp::BroadcastShadowWeight { .. }
            | CollectiveOp::ReduceShadowGradient { .. } => Sent::default(),
            CollectiveOp::Dispatch { from, .. } => each(&group, &|rank| {
                to(rank) * row_to(rank, PlanPart::Dispatch, from)
            }),
            CollectiveOp::Combine { from: tensor, .. } => {
                let shard = |rank: usize| self.by().place(rank).tp;
                let same = |rank: usize| shard(rank) == shard(own);
                each(&group, &|rank| {
                    if same(rank) {
                        from(rank) * row_to(rank, PlanPart::Experts, tensor)
                    } else {
                        0
                    }
                })
            }
            CollectiveOp::AllReduceTp { tensor } => {
                let arriving: u64 = group.iter().map(|&rank| from(rank)).sum();
                summed(&among, arriving * row(PlanPart::Experts, tensor))
            }
            CollectiveOp::TpTokenCounts => each(&shards, &|_| 8),
            CollectiveOp::AllGatherTp { from, .. } => {
                each(&shards, &|_| tokens * row(PlanPart::Dispatch, from))
            }
            CollectiveOp::ReduceScatterTp { to, .. } => Sent {
                here: 0,
                ..each(&shards, &|_| tokens * row(PlanPart::Dispatch, to))
            },
            CollectiveOp::BroadcastTp { to, .. } if self.place.tp == 0 => {
                each(&shards, &|_| self.tokens[to].bytes(0))
            }
            CollectiveOp::BroadcastTp { .. } => Sent::default(),
            CollectiveOp::AllReduceSum { from, .. } => {
                summed(&world, self.tokens[from].bytes(tokens))
            }
            // Every rank gathered the router's inputs before the pass.
            CollectiveOp::GlobalRouting => Sent::default(),
            CollectiveOp::ReduceLossParts { tensor } => {
                summed(&world, row(PlanPart::Dispatch, tensor))
            }
            CollectiveOp::AllReduceMax { tensor } => {
                summed(&world, self.tokens[tensor].bytes(tokens))
            }
            CollectiveOp::AllGatherWeight { weight, dim } => {
                let bytes = self.region_bytes(weight, dim, own - block[0]);
                Sent {
                    here: 0,
                    ..each(&block, &|_| bytes)
                }
            }
            CollectiveOp::ReduceScatterGradient { gradient, dim } => Sent {
                here: 0,
                ..each(&block, &|rank| {
                    self.region_bytes(gradient, dim, rank - block[0])
                })
            },
            CollectiveOp::AllGatherExperts { from, .. } if self.by().place(own).tp == 0 => {
                each(&group, &|_| self.experts[from].bytes(0))
            }
            CollectiveOp::AllGatherExperts { .. } => Sent::default(),
        }
    }

    /// Returns the bytes of all exchanges of a pass.
    pub fn bytes_of(&self, steps: &[RankStep], tokens: u64, per_node: usize) -> Sent {
        let mut all = Sent::default();
        for exchange in steps.iter().filter_map(RankStep::exchange) {
            let sent = self.bytes(exchange, tokens, per_node);
            all.here += sent.here;
            all.node += sent.node;
            all.network += sent.network;
        }
        all
    }

    /// Returns the ranks that exchange rows with this rank, by their numbers in the world.
    fn members(&self) -> Vec<usize> {
        let (by, own) = (self.by(), self.mesh.rank(self.place));
        let same = |rank: &usize| by.place(*rank).dp == by.place(own).dp;
        (0..self.mesh.ranks()).filter(same).collect()
    }

    /// Returns the members that hold a shard of the same experts.
    fn sharing_rows(&self) -> Vec<usize> {
        let (by, own) = (self.by(), self.mesh.rank(self.place));
        let same = |rank: &usize| by.place(*rank).ep == by.place(own).ep;
        self.members().into_iter().filter(same).collect()
    }

    /// Returns the bytes of a tensor of the expert part that one rank of the block owns.
    fn region_bytes(&self, tensor: TensorId, dim: Option<usize>, owner: usize) -> u64 {
        let regions = self.regions(tensor, dim);
        let own = regions.iter().filter(|region| region.owner == owner);
        let elements: usize = own.map(ShardRegion::elements).sum();
        (elements * self.experts[tensor].dtype.size()) as u64
    }

    /// Returns the rank that holds another shard of the same experts.
    fn shard(&self, tp: usize) -> usize {
        self.mesh.rank(super::RankCoords { tp, ..self.place })
    }

    /// Returns 0 for this rank, 1 for its node, 2 for other nodes.
    fn distance(&self, rank: usize, per_node: usize) -> usize {
        let own = self.mesh.rank(self.place);
        match rank {
            _ if rank == own => 0,
            _ if rank / per_node.max(1) == own / per_node.max(1) => 1,
            _ => 2,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::{Parallel, SharedExperts, plan_rank};
    use crate::{PlanOptions, Training};
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
