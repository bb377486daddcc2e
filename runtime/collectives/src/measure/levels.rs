//! Exchanges of all ranks at once, either inside nodes or between them. The planner fits its
//! model of a machine's links to them.

use super::{pattern, trouble};
use crate::{
    Call, CollectiveError, Collectives, CommElement, InvalidReason, NodeRank, NodeShape, Slice,
    Topology, Transfer,
};
use moesaic_target::Device;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The options of [`over_levels`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LevelOptions {
    /// The size of the smallest messages in bytes. Each further size doubles.
    pub smallest: usize,
    /// The most bytes that a rank sends in one exchange, over all peers.
    pub largest: usize,
    /// The time after which no larger size is tried.
    pub patience: Duration,
    /// The number of timed exchanges of each kind, after one that is not timed.
    pub rounds: usize,
}

impl Default for LevelOptions {
    fn default() -> LevelOptions {
        LevelOptions {
            smallest: 8,
            largest: 64 << 20,
            patience: Duration::from_millis(250),
            rounds: 12,
        }
    }
}

/// An exchange with all ranks taking part at once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Exchanged {
    /// Whether messages stayed inside nodes or all crossed between nodes.
    pub same_node: bool,
    /// The number of ranks that each rank sends to and receives from.
    pub peers: usize,
    /// The bytes to each of them.
    pub bytes: usize,
    /// The time of the slowest rank: the lower quartile over rounds, because others may use the
    /// machine.
    pub time: Duration,
    /// The time per exchange in a back-to-back row, as overlapped chunks are sent: ranks do not
    /// synchronize in between. Measured for short exchanges alone.
    pub again: Option<Duration>,
}

/// The number of exchanges in a back-to-back row.
const ROW: usize = 8;

/// Measures exchanges inside nodes and between them, by number of peers and size. All ranks call
/// it and get the same result; it waits.
///
/// # Errors
/// [`CollectiveError::Invalid`] where nodes have unequal numbers of ranks, when data arrive
/// changed or buffers cannot be allocated; else the errors of the operations.
pub fn over_levels(
    world: &mut dyn Collectives,
    device: &Arc<dyn Device>,
    topology: &Topology,
    options: &LevelOptions,
) -> Result<Vec<Exchanged>, CollectiveError> {
    let shape = topology.shape.ok_or_else(|| CollectiveError::Invalid {
        operation: "measure".to_string(),
        reason: InvalidReason::UnequalNodes,
    })?;
    let mut list = Vec::new();
    for (same_node, peers) in kinds(shape) {
        let mut bytes = options.smallest.max(1);
        while bytes * peers <= options.largest {
            let own_peers = Peers::new(shape, world.rank(), same_node, peers);
            let mut gauge = LevelProbe::new(world, device, &own_peers, bytes)?;
            let time = gauge.time(options.rounds, 1)?;
            let short = time < options.patience / ROW as u32;
            let again = short.then(|| gauge.time(options.rounds, ROW)).transpose()?;
            list.push(Exchanged {
                same_node,
                peers,
                bytes,
                time,
                again,
            });
            if time >= options.patience {
                break;
            }
            bytes *= 2;
        }
    }
    Ok(list)
}

/// Returns the patterns to measure, inside nodes and between them: one peer, all peers of equal
/// local rank, all peers.
fn kinds(shape: NodeShape) -> Vec<(bool, usize)> {
    let NodeShape { nodes, per_node } = shape;
    let between = [1, nodes - 1, (nodes - 1) * per_node];
    let inside = [1, per_node - 1].map(|peers| (true, peers));
    let all = inside
        .into_iter()
        .chain(between.map(|peers| (false, peers)));
    let least = |(same_node, peers): &(bool, usize)| {
        if *same_node {
            *peers > 0 && per_node > 1
        } else {
            *peers > 0 && nodes > 1
        }
    };
    let mut list: Vec<(bool, usize)> = all.filter(least).collect();
    list.dedup();
    list
}

/// The peers of a rank in one pattern.
struct Peers {
    to: Vec<usize>,
    from: Vec<usize>,
}

impl Peers {
    fn new(shape: NodeShape, rank: usize, same_node: bool, peers: usize) -> Peers {
        let NodeRank { node, place } = shape.split(rank);
        let NodeShape { nodes, per_node } = shape;
        // The i-th peer counts forwards for receivers and backwards for senders, so that the two
        // lists match across ranks.
        let peer = |i: usize, forwards: bool| {
            let step = |at: usize, by: usize, of: usize| {
                if forwards {
                    (at + by) % of
                } else {
                    (at + of - by) % of
                }
            };
            if same_node {
                shape.rank(node, step(place, i + 1, per_node))
            } else {
                let (far, beyond) = (i % (nodes - 1) + 1, i / (nodes - 1));
                shape.rank(step(node, far, nodes), step(place, beyond, per_node))
            }
        };
        Peers {
            to: (0..peers).map(|i| peer(i, true)).collect(),
            from: (0..peers).map(|i| peer(i, false)).collect(),
        }
    }
}

struct LevelProbe<'a> {
    world: &'a mut dyn Collectives,
    device: &'a Arc<dyn Device>,
    sends: Vec<Transfer>,
    receives: Vec<Transfer>,
}

impl<'a> LevelProbe<'a> {
    fn new(
        world: &'a mut dyn Collectives,
        device: &'a Arc<dyn Device>,
        own_peers: &Peers,
        bytes: usize,
    ) -> Result<LevelProbe<'a>, CollectiveError> {
        let own = vec![pattern(world.rank()); bytes * own_peers.to.len()];
        let transfers = |peers: &[usize]| -> Result<Vec<Transfer>, CollectiveError> {
            let buffer = device.alloc(own.len()).map_err(trouble)?;
            // Upload to the receive buffer too, so that its pages exist before timing starts.
            device.upload(&own, &buffer, 0).map_err(trouble)?;
            let buffer = Arc::new(buffer);
            let each = peers.iter().enumerate().map(|(i, peer)| {
                Ok(Transfer {
                    peer: *peer,
                    slice: Slice::new(&buffer, CommElement::U8, i * bytes, bytes)?,
                })
            });
            each.collect()
        };
        let (sends, receives) = (transfers(&own_peers.to)?, transfers(&own_peers.from)?);
        Ok(LevelProbe {
            world,
            device,
            sends,
            receives,
        })
    }

    /// Times `row` back-to-back exchanges.
    fn time(&mut self, rounds: usize, row: usize) -> Result<Duration, CollectiveError> {
        let call = Call::new("measure");
        let mut own = Vec::new();
        for _ in 0..=rounds.max(1) {
            self.world.barrier(&call)?.wait()?;
            let start = Instant::now();
            for _ in 0..row {
                let handle = self.world.exchange(&self.sends, &self.receives, &call);
                handle?.wait()?;
            }
            own.extend((start.elapsed().as_nanos() as u64).to_le_bytes());
        }
        self.arrived()?;
        let all = self.world.gather_bytes(&own, &call)?;
        let slowest = |round: usize| {
            let of = |times: &Vec<u8>| times.as_chunks::<8>().0.get(round).copied();
            let nanos = all.iter().filter_map(of).map(u64::from_le_bytes);
            nanos.max().unwrap_or_default()
        };
        let mut times: Vec<u64> = (1..=rounds.max(1)).map(slowest).collect();
        times.sort_unstable();
        Ok(Duration::from_nanos(times[times.len() / 4]) / row as u32)
    }

    fn arrived(&self) -> Result<(), CollectiveError> {
        for Transfer { peer, slice } in &self.receives {
            let mut came = vec![0; slice.bytes()];
            let read = self
                .device
                .download(slice.buffer(), slice.offset(), &mut came);
            read.map_err(trouble)?;
            if came.iter().any(|byte| *byte != pattern(*peer)) {
                return Err(CollectiveError::Invalid {
                    operation: "measure".to_string(),
                    reason: InvalidReason::Changed {
                        from: *peer,
                        to: self.world.rank(),
                    },
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every receiver lists the sender too, and no peer is on the wrong side of a node boundary.
    #[test]
    fn peers_are_of_the_kind_that_is_measured() {
        for (nodes, per_node) in [(1, 1), (1, 4), (4, 1), (2, 3), (4, 4)] {
            let shape = NodeShape { nodes, per_node };
            for (same_node, peers) in kinds(shape) {
                let of = |rank| Peers::new(shape, rank, same_node, peers);
                for rank in 0..shape.ranks() {
                    let mut to = of(rank).to;
                    for peer in &to {
                        let same = shape.split(*peer).node == shape.split(rank).node;
                        assert!(
                            same == same_node && *peer != rank,
                            "{shape:?} {rank} {peer}"
                        );
                        assert!(of(*peer).from.contains(&rank), "{shape:?} {rank} {peer}");
                    }
                    to.sort_unstable();
                    to.dedup();
                    assert_eq!(to.len(), peers);
                }
            }
        }
        let shape = NodeShape {
            nodes: 4,
            per_node: 4,
        };
        let all = [(true, 1), (true, 3), (false, 1), (false, 3), (false, 12)];
        assert_eq!(kinds(shape), all);
    }
}
