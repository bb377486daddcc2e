//! Packing of replicated experts to ranks by load, as in DeepSeek's EPLB.
//!
//! 1. Groups of experts are packed to nodes.
//! 2. Inside each node, the replicas that there are to give go one by one to the expert with
//!    the largest load a replica.
//! 3. Replicas are packed to the node's ranks.
//!
//! If the nodes do not divide the groups, all ranks count as one node and all experts as one group.
//! Loads are f32 as in EPLB, so ties break alike; a tie goes to the lower index.

use super::{Placement, PlacementError, Split};

/// The sizes of a packing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Eplb {
    /// Replicas of all experts together, a multiple of `ranks`.
    pub replicas: usize,
    /// Groups of experts that are chosen together (a router's `groups`), 1 for none.
    pub expert_groups: usize,
    /// Nodes, of equally many ranks.
    pub nodes: usize,
    /// Groups of ranks: `ep` of the mesh.
    pub ranks: usize,
}

/// The result of EPLB.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replication {
    /// The expert of each replica, equally many replicas per rank, rank after rank.
    pub experts: Vec<usize>,
    /// The replicas of each expert: where `experts` names it, in the order in which they
    /// were made.
    pub replicas: Vec<Vec<usize>>,
}

impl Replication {
    /// Returns the result as a placement on `ranks` groups. Several replicas on one rank become
    /// one; the first rank with an expert owns it.
    ///
    /// # Errors
    /// [`PlacementError`] for a number of ranks that does not divide the replicas.
    pub fn placement(&self, ranks: usize) -> Result<Placement, PlacementError> {
        let (all, experts) = (self.experts.len(), self.replicas.len());
        if ranks == 0 || !all.is_multiple_of(ranks) || all == 0 {
            return Err(packing(format!(
                "{all} replicas cannot lie evenly on {ranks} ranks"
            )));
        }
        let once = |rank: &[usize]| {
            let mut list = Vec::with_capacity(rank.len());
            for &expert in rank {
                // A rank with two replicas of an expert multiplies their rows in one GEMM anyway,
                // so the second would only take memory.
                if !list.contains(&expert) {
                    list.push(expert);
                }
            }
            list
        };
        let groups = self.experts.chunks(all / ranks).map(once).collect();
        Placement::new(experts, groups, None, Split::Even)
    }
}

/// Packs experts by their loads.
///
/// # Errors
/// [`PlacementError::Packing`] for numbers that do not divide each other as they must, and
/// for loads that are negative or not finite.
pub fn rebalance(loads: &[f64], eplb: &Eplb) -> Result<Replication, PlacementError> {
    check(loads, eplb)?;
    let hierarchical = eplb.expert_groups.is_multiple_of(eplb.nodes);
    let (groups, nodes) = if hierarchical {
        (eplb.expert_groups, eplb.nodes)
    } else {
        (1, 1)
    };
    // EPLB computes in f32; f64 would break ties differently and give another placement.
    let loads: Vec<f32> = loads.iter().map(|load| *load as f32).collect();
    let size = loads.len() / groups;
    let of_groups: Vec<f32> = loads.chunks(size).map(|group| group.iter().sum()).collect();
    let mut packed = Replication {
        experts: Vec::with_capacity(eplb.replicas),
        replicas: vec![Vec::new(); loads.len()],
    };
    for groups in pack(&of_groups, nodes) {
        let of_group = |group: usize| group * size..(group + 1) * size;
        let experts: Vec<usize> = groups.into_iter().flat_map(of_group).collect();
        let own: Vec<f32> = experts.iter().map(|&expert| loads[expert]).collect();
        let (replicas, counts) = replicate(&own, eplb.replicas / nodes);
        let weight = |&at: &usize| own[at] / counts[at] as f32;
        let weights: Vec<f32> = replicas.iter().map(weight).collect();
        let mut places = vec![0; replicas.len()];
        for replica in pack(&weights, eplb.ranks / nodes).into_iter().flatten() {
            places[replica] = packed.experts.len();
            packed.experts.push(experts[replicas[replica]]);
        }
        for (&at, place) in replicas.iter().zip(places) {
            packed.replicas[experts[at]].push(place);
        }
    }
    Ok(packed)
}

/// Returns the better of EPLB's packing and the present placement, by the load of the busiest rank;
/// of equal ones the present placement.
///
/// # Errors
/// As [`rebalance`].
pub fn balanced(
    loads: &[f64],
    eplb: &Eplb,
    present: &Placement,
) -> Result<Placement, PlacementError> {
    let packed = rebalance(loads, eplb)?.placement(eplb.ranks)?;
    // EPLB packs greedily and can do worse than the placement that is there, even without the cost
    // of a move.
    let better = packed.busiest(loads) < present.busiest(loads);
    Ok(if better { packed } else { present.clone() })
}

fn check(loads: &[f64], eplb: &Eplb) -> Result<(), PlacementError> {
    let Eplb {
        replicas,
        expert_groups,
        nodes,
        ranks,
    } = *eplb;
    let experts = loads.len();
    let wrong = |message: String| Err(packing(message));
    let not_a_load = |load: &f64| !load.is_finite() || *load < 0.0;
    if [experts, expert_groups, nodes, ranks].contains(&0) {
        wrong(format!(
            "{experts} experts in {expert_groups} groups on {ranks} ranks of {nodes} nodes: none \
             of them may be 0"
        ))
    } else if replicas < experts {
        wrong(format!(
            "{replicas} replicas are fewer than {experts} experts; each needs one"
        ))
    } else if !replicas.is_multiple_of(ranks) {
        wrong(format!(
            "{replicas} replicas do not lie evenly on {ranks} ranks; {} would",
            replicas.next_multiple_of(ranks)
        ))
    } else if !ranks.is_multiple_of(nodes) {
        wrong(format!("{ranks} ranks do not lie evenly on {nodes} nodes"))
    } else if !experts.is_multiple_of(expert_groups) {
        wrong(format!(
            "{experts} experts are not {expert_groups} equal groups"
        ))
    } else if let Some(expert) = loads.iter().position(not_a_load) {
        wrong(format!(
            "the load of expert {expert} is {}, not a number from 0 on",
            loads[expert]
        ))
    } else {
        Ok(())
    }
}

fn packing(message: String) -> PlacementError {
    PlacementError::Packing(message)
}

/// Packs items into packs of equal size: the heaviest item first, each to the lightest pack with
/// free capacity. With one item per pack, item `i` goes to pack `i`.
fn pack(weights: &[f32], packs: usize) -> Vec<Vec<usize>> {
    let capacity = weights.len() / packs;
    if capacity == 1 {
        return (0..packs).map(|item| vec![item]).collect();
    }
    let mut order: Vec<usize> = (0..weights.len()).collect();
    // Stable, so that a tie goes to the lower index; `min_by` below also takes the first of equal
    // packs.
    order.sort_by(|&a, &b| weights[b].total_cmp(&weights[a]));
    let mut packed = vec![Vec::with_capacity(capacity); packs];
    let mut sums = vec![0f32; packs];
    for item in order {
        let open = (0..packs).filter(|&pack| packed[pack].len() < capacity);
        let lightest = open.min_by(|&a, &b| sums[a].total_cmp(&sums[b]));
        let pack = lightest.expect("the packs have capacity for all items");
        packed[pack].push(item);
        sums[pack] += weights[item];
    }
    packed
}

/// Returns the item of each replica, and the number of replicas of each item. Each item gets one;
/// every further replica goes to the item with the largest weight per replica.
fn replicate(weights: &[f32], replicas: usize) -> (Vec<usize>, Vec<usize>) {
    let mut items: Vec<usize> = (0..weights.len()).collect();
    let mut counts = vec![1; weights.len()];
    while items.len() < replicas {
        let share = |item: usize| weights[item] / counts[item] as f32;
        let heavier = |best: usize, item: usize| {
            if share(item) > share(best) {
                item
            } else {
                best
            }
        };
        // `fold` with a strict comparison keeps the first of equal items, as EPLB's `argmax` does.
        let heaviest = (0..weights.len()).fold(0, heavier);
        items.push(heaviest);
        counts[heaviest] += 1;
    }
    (items, counts)
}
