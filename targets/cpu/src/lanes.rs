//! Lanes: the blocks of a run, divided among the NUMA nodes.

use crate::nodes::Nodes;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::{Duration, Instant};

/// Largest number of lanes of a run; more nodes share them.
const MOST: usize = 16;

/// The blocks with which each thread begins. The blocks of a launch lie in
/// lanes one after the other, so the threads of a lane work on the same part of
/// a grid each time and find near them the memory that they wrote first.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Lanes {
    /// Lane of each processor, ascending by processor.
    of: Vec<(usize, usize)>,
    /// Share of the blocks of each lane, not all 0.
    weights: Vec<usize>,
}

impl Lanes {
    /// Makes lanes for threads that the system moves: shares follow the
    /// processors of nodes.
    pub(crate) fn loose(nodes: &Nodes) -> Lanes {
        Lanes::new(nodes, nodes.processors().iter().flatten())
    }

    /// Makes lanes for threads that stay on these processors, one each.
    pub(crate) fn pinned<'a>(nodes: &Nodes, threads: impl Iterator<Item = &'a usize>) -> Lanes {
        Lanes::new(nodes, threads)
    }

    /// Makes lanes whose shares follow the number of `counted` processors on
    /// each.
    fn new<'a>(nodes: &Nodes, counted: impl Iterator<Item = &'a usize>) -> Lanes {
        let count = nodes.count().min(MOST);
        let each = nodes.processors().iter().enumerate();
        // Neighbours share a lane when there are more nodes than lanes.
        let each = each.flat_map(|(node, processors)| {
            let lane = node * count / nodes.count();
            processors.iter().map(move |&processor| (processor, lane))
        });
        let mut lanes = Lanes {
            of: each.collect(),
            weights: vec![0; count],
        };
        lanes.of.sort_unstable();
        for &processor in counted {
            let lane = lanes.lane(processor);
            lanes.weights[lane] += 1;
        }
        if lanes.weights.iter().all(|&weight| weight == 0) {
            lanes.weights[0] = 1;
        }
        lanes
    }

    pub(crate) fn count(&self) -> usize {
        self.weights.len()
    }

    /// Returns the lane of the calling thread, by its current processor.
    pub(crate) fn here(&self) -> usize {
        match self.count() {
            1 => 0,
            _ => crate::affinity::processor().map_or(0, |processor| self.lane(processor)),
        }
    }

    /// Returns the lane of a processor; the first lane, if no node names it.
    fn lane(&self, processor: usize) -> usize {
        let found = self.of.binary_search_by_key(&processor, |(p, _)| *p);
        found.map_or(0, |at| self.of[at].1)
    }

    /// Divides the blocks `0..blocks` among `threads` threads; lanes past
    /// `count` are empty.
    pub(crate) fn cut(&self, blocks: i64, threads: i64) -> [Lane; MOST] {
        let total = self.weights.iter().sum::<usize>() as u128;
        let (mut before, mut first) = (0, 0);
        std::array::from_fn(|lane| {
            let Some(&weight) = self.weights.get(lane) else {
                return Lane::new(blocks, blocks, 1);
            };
            before += weight;
            let last = (blocks as u128 * before as u128 / total) as i64;
            let own = (threads as usize * weight).div_ceil(total as usize);
            Lane::new(std::mem::replace(&mut first, last), last, own as i64)
        })
    }
}

/// A range of blocks that hands out shrinking parts: long ones first, so that
/// neighbours share a cache, single ones last, so that all threads finish
/// together whatever a block costs. Parts come from the end, because the last
/// blocks of a grid may have no rows; handed out last, they would leave long
/// ranges to the blocks that have rows. A lane has cache lines of its own, so
/// threads of one node do not slow down those of another.
#[repr(align(128))]
pub(crate) struct Lane {
    first: i64,
    /// The end of the blocks that are left.
    end: AtomicI64,
    threads: i64,
    /// Set once a thread of the lane has begun.
    visited: AtomicBool,
}

/// Number of parts that each thread's fair share of the rest is divided into.
const PARTS: i64 = 4;

impl Lane {
    /// Makes a lane of the blocks `first..last` for the given number of its own
    /// threads.
    pub(crate) fn new(first: i64, last: i64, threads: i64) -> Lane {
        Lane {
            first,
            end: AtomicI64::new(last),
            threads: threads.max(1),
            visited: AtomicBool::new(false),
        }
    }

    fn take(&self) -> Option<(i64, i64)> {
        let length = |end: i64| ((end - self.first) / (PARTS * self.threads)).max(1);
        let step = |end| (self.first < end).then(|| end - length(end));
        // Relaxed: the ranges are disjoint by the counter's own atomicity,
        // and the end of the run publishes the results.
        let end = self
            .end
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, step)
            .ok()?;
        Some((end - length(end), end))
    }

    /// Returns true if its own threads will empty it: one has begun, or does so
    /// until then.
    fn is_served(&self, until: Instant) -> bool {
        loop {
            if self.visited.load(Ordering::Relaxed) {
                return true;
            }
            let is_empty = self.end.load(Ordering::Relaxed) <= self.first;
            if is_empty || Instant::now() > until {
                return false;
            }
            std::thread::yield_now();
        }
    }
}

/// Time that the threads of all other lanes have to begin: some wake-ups of
/// one.
const PATIENCE: Duration = Duration::from_millis(20);

/// The time at which a thread whose lane is empty works for another lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Help {
    /// At once, because helping from far away is better than waiting.
    AtOnce,
    /// When that lane has no thread of its own. Written pages stay where they
    /// are written, so a helper would leave them far from their later readers.
    IfNobodyComes,
}

/// Calls `work(first, last)` with ranges of the lane `own` until it is empty,
/// then with ranges of the following lanes, around, as far as they want help.
pub(crate) fn drain(lanes: &[Lane], own: usize, help: Help, work: impl Fn(i64, i64)) {
    lanes[own].visited.store(true, Ordering::Relaxed);
    let mut until = None;
    let (before, from) = lanes.split_at(own);
    for (distance, lane) in from.iter().chain(before).enumerate() {
        if distance > 0 && help == Help::IfNobodyComes {
            let until = *until.get_or_insert_with(|| Instant::now() + PATIENCE);
            if lane.is_served(until) {
                continue;
            }
        }
        while let Some((first, last)) = lane.take() {
            work(first, last);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    fn nodes(processors: &[&[usize]]) -> Nodes {
        Nodes::new(processors.iter().map(|node| node.to_vec()))
    }

    /// Returns a machine of `count` nodes, with one, two and three processors
    /// in turns.
    fn machine(count: usize) -> Nodes {
        let mut next = 0..;
        let mut node = |i: usize| next.by_ref().take(i % 3 + 1).collect();
        Nodes::new((0..count).map(&mut node).collect::<Vec<_>>())
    }

    /// Returns the lanes of a run as `first..last, threads`.
    fn cut(lanes: &Lanes, blocks: i64, threads: i64) -> Vec<(i64, i64, i64)> {
        let cut = lanes.cut(blocks, threads);
        let cut = cut.into_iter().take(lanes.count());
        cut.map(|lane| (lane.first, lane.end.into_inner(), lane.threads))
            .collect()
    }

    fn taken(lane: &Lane) -> Vec<(i64, i64)> {
        std::iter::from_fn(|| lane.take()).collect()
    }

    #[test]
    fn ranges_are_few_and_end_small() {
        let ranges = taken(&Lane::new(0, 10_000, 8));
        assert!(ranges.len() < 300, "{}", ranges.len());
        assert!(ranges[0].1 - ranges[0].0 > 100);
        assert!(
            ranges[ranges.len() - 16..]
                .iter()
                .all(|(first, last)| last - first == 1)
        );
        // Ranges come from the end, without gaps, and are the same wherever a
        // lane begins.
        assert_eq!(ranges[0].1, 10_000);
        assert!(ranges.windows(2).all(|two| two[1].1 == two[0].0));
        let later = taken(&Lane::new(77, 10_077, 8)).into_iter();
        assert!(
            later
                .map(|(first, last)| (first - 77, last - 77))
                .eq(ranges)
        );
    }

    #[test]
    fn one_node_has_one_lane_of_everything() {
        let lanes = Lanes::loose(&Nodes::default());
        assert_eq!((lanes.count(), lanes.here(), lanes.lane(5)), (1, 0, 0));
        assert_eq!(cut(&lanes, 1001, 7), [(0, 1001, 7)]);
        let lanes = Lanes::pinned(&Nodes::default(), [3, 4].iter());
        assert_eq!(cut(&lanes, 1001, 2), [(0, 1001, 2)]);
    }

    #[test]
    fn shares_follow_processors_or_threads() {
        let nodes = nodes(&[&[0, 1], &[2, 3, 4, 5, 6, 7]]);
        let loose = Lanes::loose(&nodes);
        assert_eq!(cut(&loose, 100, 8), [(0, 25, 2), (25, 100, 6)]);
        assert_eq!(cut(&loose, 100, 2), [(0, 25, 1), (25, 100, 2)]);
        assert_eq!(cut(&loose, 1, 8), [(0, 0, 2), (0, 1, 6)]);
        let pinned = Lanes::pinned(&nodes, [0, 2, 1].iter());
        assert_eq!(cut(&pinned, 90, 3), [(0, 60, 2), (60, 90, 1)]);
        let alone = Lanes::pinned(&nodes, [6, 7].iter());
        assert_eq!(cut(&alone, 90, 2), [(0, 0, 1), (0, 90, 2)]);
        let huge = cut(&loose, i64::MAX, 8);
        assert_eq!((huge[0].1, huge[1].1), (i64::MAX / 4, i64::MAX));
    }

    #[test]
    fn more_nodes_than_lanes_share_them() {
        let lanes = Lanes::loose(&machine(2 * MOST));
        assert_eq!(lanes.count(), MOST);
        assert_eq!((lanes.lane(0), lanes.lane(2), lanes.lane(3)), (0, 0, 1));
        let last = 12 * MOST / 3 * 2;
        assert_eq!((lanes.lane(last), lanes.lane(9999)), (0, 0));
        for count in [1, 2, 3, MOST - 1, MOST, MOST + 1, 5 * MOST] {
            let lanes = Lanes::loose(&machine(count));
            let cut = cut(&lanes, 1_000_000, 64);
            assert!(cut.iter().all(|(first, last, _)| first < last), "{count}");
        }
    }

    #[test]
    fn every_block_is_handed_out_once() {
        for count in [1, 2, 3, 16, 17] {
            let lanes = Lanes::loose(&machine(count));
            for (threads, blocks) in [(1, 1), (2, 2), (3, 13), (4, 64), (3, 1001), (7, 5000)] {
                let cut = &lanes.cut(blocks, threads)[..lanes.count()];
                let seen = Mutex::new(Vec::new());
                std::thread::scope(|scope| {
                    for thread in 0..threads as usize {
                        let seen = &seen;
                        // With few threads some lanes have none of their own.
                        scope.spawn(move || {
                            let help = [Help::AtOnce, Help::IfNobodyComes][thread % 2];
                            drain(cut, (thread * 2 + 1) % cut.len(), help, |first, last| {
                                assert!(first < last);
                                seen.lock().unwrap().extend(first..last);
                            });
                        });
                    }
                });
                let mut seen = seen.into_inner().unwrap();
                seen.sort_unstable();
                let all = seen.into_iter().eq(0..blocks);
                assert!(all, "{count} nodes, {threads} threads, {blocks} blocks");
            }
        }
    }

    #[test]
    fn a_thread_drains_its_own_lane_first_and_then_helps_the_next() {
        let lanes = Lanes::loose(&nodes(&[&[0], &[1], &[2]]));
        for (own, expected) in [(0, [0, 1, 2]), (1, [1, 2, 0]), (2, [2, 0, 1])] {
            let order = Mutex::new(Vec::new());
            drain(&lanes.cut(300, 3)[..3], own, Help::AtOnce, |first, last| {
                order.lock().unwrap().extend(first..last);
            });
            let order = order.into_inner().unwrap();
            assert_eq!(order.len(), 300);
            let mut visited: Vec<i64> = order.into_iter().map(|block| block / 100).collect();
            visited.dedup();
            assert_eq!(visited, expected);
        }
    }

    /// Keeps the thread of lane 1 in its first block until the other one is
    /// done.
    #[test]
    fn what_is_placed_is_left_to_the_threads_of_its_lane() {
        let lanes = Lanes::loose(&nodes(&[&[0], &[1]]));
        let cut = &lanes.cut(100, 2)[..2];
        let (begun, done) = (AtomicBool::new(false), AtomicBool::new(false));
        let wait_for = |flag: &AtomicBool| {
            while !flag.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                drain(cut, 1, Help::IfNobodyComes, |first, _| {
                    assert!(first >= 50);
                    begun.store(true, Ordering::Release);
                    wait_for(&done);
                });
            });
            wait_for(&begun);
            let most = AtomicI64::new(0);
            drain(cut, 0, Help::IfNobodyComes, |_, last| {
                most.fetch_max(last, Ordering::Relaxed);
            });
            assert_eq!(most.into_inner(), 50);
            done.store(true, Ordering::Release);
        });
    }

    #[test]
    fn a_lane_without_threads_is_not_left_alone() {
        let lanes = Lanes::loose(&nodes(&[&[0], &[1], &[2]]));
        let count = AtomicI64::new(0);
        drain(
            &lanes.cut(99, 1)[..3],
            1,
            Help::IfNobodyComes,
            |first, last| {
                count.fetch_add(last - first, Ordering::Relaxed);
            },
        );
        assert_eq!(count.into_inner(), 99);
    }
}
