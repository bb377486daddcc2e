//! Measures how fast ranks exchange data: in pairs, all at once, and inside nodes against between
//! them.

mod levels;

pub use levels::{Exchanged, LevelOptions, over_levels};

use crate::{
    Algorithm, Call, CollectiveError, Collectives, CommElement, InvalidReason, Slice, Topology,
    Transfer,
};
use moesaic_target::Device;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The options of [`measure`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MeasureOptions {
    /// The size of large messages in bytes.
    pub large: usize,
    /// The number of timed exchanges of each kind, after a few that are not timed. The median
    /// counts.
    pub rounds: usize,
    /// The most pairs measured for each kind of link: same node, different nodes. If there are
    /// more, an evenly spaced subset is measured.
    pub pairs: usize,
}

impl Default for MeasureOptions {
    fn default() -> MeasureOptions {
        MeasureOptions {
            large: 4 << 20,
            rounds: 20,
            pairs: 32,
        }
    }
}

/// The speed between two ranks that send in turns.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PairLink {
    /// The lower rank.
    pub from: usize,
    /// The higher rank.
    pub to: usize,
    /// Whether both are on one host.
    pub same_node: bool,
    /// The one-way time of 8 bytes.
    pub latency: Duration,
    /// The bandwidth of large messages from the lower rank to the higher.
    pub bytes_per_second: f64,
}

/// The speed of an all-to-all of all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AllToAllSpeed {
    /// The bytes from each rank to each rank.
    pub bytes_per_pair: usize,
    /// The time of the slowest rank.
    pub time: Duration,
    /// The bytes that a rank sends to others, per second of that time.
    pub bytes_per_second: f64,
}

/// The result of [`measure`], equal on every rank.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MeasuredLinks {
    /// Pairs of ranks.
    pub links: Vec<PairLink>,
    /// One with 8 bytes per pair, one with large messages.
    pub all_to_all: Vec<AllToAllSpeed>,
}

/// The size of small messages in bytes.
const SMALL: usize = 8;
/// The number of exchanges before timing starts.
const WARM: usize = 3;

/// Measures pairs of ranks one after the other, then all ranks at once. It checks that received
/// data equal what was sent. All ranks call it; it waits.
///
/// # Errors
/// [`CollectiveError::Invalid`] when data arrive changed or buffers cannot be allocated; else the
/// errors of the operations.
pub fn measure(
    world: &mut dyn Collectives,
    device: &Arc<dyn Device>,
    topology: &Topology,
    options: &MeasureOptions,
) -> Result<MeasuredLinks, CollectiveError> {
    let mut gauge = PairProbe::new(world, device, options)?;
    let mut links = Vec::new();
    for same_node in [true, false] {
        for (from, to) in chosen(&topology.hosts, same_node, options.pairs) {
            let own = gauge.pair(from, to)?;
            links.push((from, to, same_node, own));
        }
    }
    let part = options.large.div_ceil(gauge.world.size()).max(SMALL);
    let all_to_all = [
        (SMALL, gauge.all_to_all(SMALL)?),
        (part, gauge.all_to_all(part)?),
    ];
    gauge.share(&links, all_to_all)
}

/// Returns the pairs of one kind of link: all of them, or `most` evenly spaced ones.
fn chosen(hosts: &[String], same_node: bool, most: usize) -> Vec<(usize, usize)> {
    let all: Vec<(usize, usize)> = (0..hosts.len())
        .flat_map(|from| (from + 1..hosts.len()).map(move |to| (from, to)))
        .filter(|(from, to)| (hosts[*from] == hosts[*to]) == same_node)
        .collect();
    let count = all.len().min(most);
    (0..count).map(|i| all[i * all.len() / count]).collect()
}

struct PairProbe<'a> {
    world: &'a mut dyn Collectives,
    device: &'a Arc<dyn Device>,
    rounds: usize,
    large: usize,
    /// Bytes that name this rank, and memory for received data.
    from: Slice,
    to: Slice,
}

/// The one-way times of small and large messages; zero on ranks that did not measure.
type Times = [Duration; 2];

impl<'a> PairProbe<'a> {
    fn new(
        world: &'a mut dyn Collectives,
        device: &'a Arc<dyn Device>,
        options: &MeasureOptions,
    ) -> Result<PairProbe<'a>, CollectiveError> {
        // An all-to-all has a part for each rank, rounded up.
        let bytes = options.large.max(SMALL) + SMALL * world.size();
        let own = vec![pattern(world.rank()); bytes];
        let memory = || -> Result<Slice, CollectiveError> {
            let buffer = device.alloc(bytes).map_err(trouble)?;
            // Upload to the receive buffer too, so that its pages exist before timing starts.
            device.upload(&own, &buffer, 0).map_err(trouble)?;
            Ok(Slice::whole(&Arc::new(buffer), CommElement::U8))
        };
        let (from, to) = (memory()?, memory()?);
        Ok(PairProbe {
            world,
            device,
            rounds: options.rounds.max(1),
            large: options.large.max(SMALL),
            from,
            to,
        })
    }

    /// Times a pair of ranks, as seen by the lower one.
    fn pair(&mut self, from: usize, to: usize) -> Result<Times, CollectiveError> {
        let large = self.large;
        self.world.barrier(&Call::new("measure"))?.wait()?;
        let both = self.medians(from, to, SMALL, SMALL)?;
        let there = self.medians(from, to, large, SMALL)?;
        if self.world.rank() == to {
            self.arrived(from, 0, large)?;
        }
        // Half a small round trip is subtracted: the small reply is no part of the large
        // message's time.
        Ok([both / 2, there.saturating_sub(both / 2)])
    }

    /// Returns the median time of a message there and one back.
    fn medians(
        &mut self,
        from: usize,
        to: usize,
        there: usize,
        back: usize,
    ) -> Result<Duration, CollectiveError> {
        let mut times = Vec::new();
        for _ in 0..self.rounds + WARM {
            let start = Instant::now();
            self.message(from, to, there)?;
            self.message(to, from, back)?;
            times.push(start.elapsed());
        }
        Ok(median(times.split_off(WARM)))
    }

    /// Sends one message; ranks that are neither end take part with nothing.
    fn message(&mut self, from: usize, to: usize, bytes: usize) -> Result<(), CollectiveError> {
        let rank = self.world.rank();
        let one =
            |here: usize, peer: usize, slice: &Slice| -> Result<Vec<Transfer>, CollectiveError> {
                let slice = Slice::new(slice.buffer(), CommElement::U8, 0, bytes)?;
                Ok(if rank == here {
                    vec![Transfer { peer, slice }]
                } else {
                    Vec::new()
                })
            };
        let (sends, receives) = (one(from, to, &self.from)?, one(to, from, &self.to)?);
        let call = Call::new("measure");
        self.world.exchange(&sends, &receives, &call)?.wait()
    }

    fn all_to_all(&mut self, bytes: usize) -> Result<Duration, CollectiveError> {
        let all = bytes * self.world.size();
        let input = Slice::new(self.from.buffer(), CommElement::U8, 0, all)?;
        let output = Slice::new(self.to.buffer(), CommElement::U8, 0, all)?;
        let call = Call::new("measure");
        let mut times = Vec::new();
        for _ in 0..self.rounds + WARM {
            self.world.barrier(&call)?.wait()?;
            let start = Instant::now();
            let handle = self
                .world
                .all_to_all(&input, &output, Algorithm::Direct, &call);
            handle?.wait()?;
            times.push(start.elapsed());
        }
        for peer in 0..self.world.size() {
            self.arrived(peer, peer * bytes, bytes)?;
        }
        Ok(median(times.split_off(WARM)))
    }

    fn arrived(&self, from: usize, at: usize, bytes: usize) -> Result<(), CollectiveError> {
        let mut came = vec![0; bytes];
        let read = self.device.download(self.to.buffer(), at, &mut came);
        read.map_err(trouble)?;
        if came.iter().all(|byte| *byte == pattern(from)) {
            return Ok(());
        }
        Err(CollectiveError::Invalid {
            operation: "measure".to_string(),
            reason: InvalidReason::Changed {
                from,
                to: self.world.rank(),
            },
        })
    }

    /// Gathers the times that each rank measured.
    fn share(
        &mut self,
        links: &[(usize, usize, bool, Times)],
        all_to_all: [(usize, Duration); 2],
    ) -> Result<MeasuredLinks, CollectiveError> {
        let own = links.iter().flat_map(|(_, _, _, times)| times);
        let own = own.chain(all_to_all.iter().map(|(_, time)| time));
        let bytes: Vec<u8> = own
            .flat_map(|t| (t.as_nanos() as u64).to_le_bytes())
            .collect();
        let all = self.world.gather_bytes(&bytes, &Call::new("measured"))?;
        let number = |rank: usize, index: usize| {
            let words = all[rank].as_chunks::<8>().0;
            Duration::from_nanos(words.get(index).map_or(0, |w| u64::from_le_bytes(*w)))
        };
        let link =
            |(i, (from, to, same_node, _)): (usize, &(usize, usize, bool, Times))| PairLink {
                from: *from,
                to: *to,
                same_node: *same_node,
                latency: number(*from, 2 * i),
                bytes_per_second: rate(self.large, number(*from, 2 * i + 1)),
            };
        let ranks = self.world.size();
        let whole = |(i, (bytes, _)): (usize, &(usize, Duration))| {
            let times = (0..ranks).map(|rank| number(rank, 2 * links.len() + i));
            let time = times.max().unwrap_or_default();
            AllToAllSpeed {
                bytes_per_pair: *bytes,
                time,
                bytes_per_second: rate(bytes * (ranks - 1), time),
            }
        };
        Ok(MeasuredLinks {
            links: links.iter().enumerate().map(link).collect(),
            all_to_all: all_to_all.iter().enumerate().map(whole).collect(),
        })
    }
}

/// Returns a byte that differs between ranks close to each other.
fn pattern(rank: usize) -> u8 {
    (rank % 251) as u8 + 1
}

fn rate(bytes: usize, time: Duration) -> f64 {
    bytes as f64 / time.as_secs_f64().max(1e-9)
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

fn trouble(error: moesaic_target::DeviceError) -> CollectiveError {
    CollectiveError::Invalid {
        operation: "measure".to_string(),
        reason: error.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(hosts: &str, same: bool, most: usize) -> Vec<(usize, usize)> {
        let hosts: Vec<String> = hosts.chars().map(String::from).collect();
        chosen(&hosts, same, most)
    }

    #[test]
    fn pairs_are_chosen_by_where_ranks_are() {
        assert_eq!(pairs("aabb", true, 9), [(0, 1), (2, 3)]);
        assert_eq!(pairs("aabb", false, 9), [(0, 2), (0, 3), (1, 2), (1, 3)]);
        assert_eq!(pairs("aabb", false, 2), [(0, 2), (1, 2)]);
        assert_eq!(pairs("a", true, 9), []);
        assert_eq!(pairs(&"a".repeat(64), true, 32).len(), 32);
    }
}
