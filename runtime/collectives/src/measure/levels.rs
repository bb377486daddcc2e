//! Exchanges of all ranks at once that stay inside nodes, or all go between them: what a
//! model of the machine's links is made of.

use super::{pattern, trouble};
use crate::{Call, CollectiveError, Collectives, Element, NodeShape, Slice, Topology, Transfer};
use moesaic_target::Device;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LevelOptions {
    /// Bytes of the smallest messages. Each size after it is twice the one before.
    pub smallest: usize,
    /// Bytes of all messages of a rank in an exchange, at most.
    pub largest: usize,
    /// No larger messages are tried once an exchange takes as long as this.
    pub patience: Duration,
    /// Exchanges of each kind, after one that is not counted.
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

/// An exchange that all ranks were in at once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Exchanged {
    /// Whether messages stayed inside nodes, or all went between them.
    pub same_node: bool,
    /// Ranks to which each sends, and from which it gets.
    pub peers: usize,
    /// To each of them.
    pub bytes: usize,
    /// Of the slowest rank: the lower quartile over rounds, since others may use the machine.
    pub time: Duration,
    /// The same where it follows another at once, as pieces of rows do: ranks do not wait for
    /// each other before it. Of small ones alone.
    pub again: Option<Duration>,
}

/// Exchanges that follow each other at once.
const ROW: usize = 8;

/// Measures exchanges inside nodes and between them, by number of peers and size. All ranks
/// call it; it waits. The same on every rank.
///
/// # Errors
/// [`CollectiveError::Invalid`] where nodes have unequally many ranks, when data arrive
/// changed or buffers cannot be had; else those of the operations.
pub fn over_levels(
    world: &mut dyn Collectives,
    device: &Arc<dyn Device>,
    topology: &Topology,
    options: &LevelOptions,
) -> Result<Vec<Exchanged>, CollectiveError> {
    let shape = topology.shape.ok_or_else(|| CollectiveError::Invalid {
        operation: "measure".to_string(),
        reason: "nodes have unequally many ranks, or ranks that are not in a row; start as many \
                 on each, one node's after the other's"
            .to_string(),
    })?;
    let mut list = Vec::new();
    for (same_node, peers) in kinds(shape) {
        let mut bytes = options.smallest.max(1);
        while bytes * peers <= options.largest {
            let place = Place::new(shape, world.rank(), same_node, peers);
            let mut gauge = Gauge::new(world, device, &place, bytes)?;
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

/// Inside nodes and between them: one peer, those of equal place, all.
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

/// Who a rank sends to, and who sends to it.
struct Place {
    to: Vec<usize>,
    from: Vec<usize>,
}

impl Place {
    fn new(shape: NodeShape, rank: usize, same_node: bool, peers: usize) -> Place {
        let (node, place) = shape.split(rank);
        let NodeShape { nodes, per_node } = shape;
        // The i-th peer: forwards for those who get, backwards for those who send.
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
                let (far, overlapped) = (i % (nodes - 1) + 1, i / (nodes - 1));
                shape.rank(step(node, far, nodes), step(place, overlapped, per_node))
            }
        };
        Place {
            to: (0..peers).map(|i| peer(i, true)).collect(),
            from: (0..peers).map(|i| peer(i, false)).collect(),
        }
    }
}

struct Gauge<'a> {
    world: &'a mut dyn Collectives,
    device: &'a Arc<dyn Device>,
    sends: Vec<Transfer>,
    receives: Vec<Transfer>,
}

impl<'a> Gauge<'a> {
    fn new(
        world: &'a mut dyn Collectives,
        device: &'a Arc<dyn Device>,
        place: &Place,
        bytes: usize,
    ) -> Result<Gauge<'a>, CollectiveError> {
        let own = vec![pattern(world.rank()); bytes * place.to.len()];
        let transfers = |peers: &[usize]| -> Result<Vec<Transfer>, CollectiveError> {
            let buffer = device.alloc(own.len()).map_err(trouble)?;
            // Also what is received into, so that its pages are there.
            device.upload(&own, &buffer, 0).map_err(trouble)?;
            let buffer = Arc::new(buffer);
            let each = peers.iter().enumerate().map(|(i, peer)| {
                Ok(Transfer {
                    peer: *peer,
                    slice: Slice::new(&buffer, Element::U8, i * bytes, bytes)?,
                })
            });
            each.collect()
        };
        let (sends, receives) = (transfers(&place.to)?, transfers(&place.from)?);
        Ok(Gauge {
            world,
            device,
            sends,
            receives,
        })
    }

    /// One exchange of `row` that follow each other at once.
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
                    reason: format!(
                        "what rank {peer} has sent arrived changed on rank {}",
                        self.world.rank()
                    ),
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whoever is sent to gets it from there, and nobody is met on the wrong side of a node.
    #[test]
    fn peers_are_of_the_kind_that_is_measured() {
        for (nodes, per_node) in [(1, 1), (1, 4), (4, 1), (2, 3), (4, 4)] {
            let shape = NodeShape { nodes, per_node };
            for (same_node, peers) in kinds(shape) {
                let of = |rank| Place::new(shape, rank, same_node, peers);
                for rank in 0..shape.ranks() {
                    let mut to = of(rank).to;
                    for peer in &to {
                        let same = shape.split(*peer).0 == shape.split(rank).0;
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
