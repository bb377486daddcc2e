//! Packing of replicated experts to ranks by their loads, as DeepSeek's EPLB does it.
//!
//! 1. Groups of experts are packed to nodes.
//! 2. Inside each node, the replicas that there are to give go one by one to the expert with
//!    the largest load a replica.
//! 3. Replicas are packed to the node's ranks.
//!
//! Where nodes do not divide the groups all is one node and one group. Loads are f32 as
//! there, so that ties fall alike; a tie goes to the lower number.

use super::{Placement, PlacementError, Split};

/// What there is to pack to.
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

/// What EPLB gives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replication {
    /// The expert of each replica, equally many replicas a rank, rank after rank.
    pub experts: Vec<usize>,
    /// The replicas of each expert: where `experts` names it, in the order in which they
    /// were made.
    pub replicas: Vec<Vec<usize>>,
}

impl Replication {
    /// As a placement on `ranks` groups. Replicas that came to lie on one rank are one; the
    /// owner is the first rank.
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

/// Packs experts of these loads.
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

/// The better of EPLB's packing and the placement there is, by the load of the busiest
/// rank; the present one where both are alike.
///
/// # Errors
/// As [`rebalance`].
pub fn balanced(
    loads: &[f64],
    eplb: &Eplb,
    present: &Placement,
) -> Result<Placement, PlacementError> {
    let packed = rebalance(loads, eplb)?.placement(eplb.ranks)?;
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

/// Items in packs of equally many: the heaviest first, each to the lightest pack with room.
/// One item a pack stays where it is.
fn pack(weights: &[f32], packs: usize) -> Vec<Vec<usize>> {
    let room = weights.len() / packs;
    if room == 1 {
        return (0..packs).map(|item| vec![item]).collect();
    }
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by(|&a, &b| weights[b].total_cmp(&weights[a]));
    let mut packed = vec![Vec::with_capacity(room); packs];
    let mut sums = vec![0f32; packs];
    for item in order {
        let with_room = (0..packs).filter(|&pack| packed[pack].len() < room);
        let lightest = with_room.min_by(|&a, &b| sums[a].total_cmp(&sums[b]));
        let pack = lightest.expect("there is room for as many as there are");
        packed[pack].push(item);
        sums[pack] += weights[item];
    }
    packed
}

/// The item of each of `replicas` replicas, and how many each item has. One each, then one
/// more for the heaviest a replica.
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
        let heaviest = (0..weights.len()).fold(0, heavier);
        items.push(heaviest);
        counts[heaviest] += 1;
    }
    (items, counts)
}
