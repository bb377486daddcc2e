//! The threads of a block: those that run, those that wait, and the event each
//! waits for.

use crate::product::Shape;
use crate::stamp::Stamp;
use std::collections::VecDeque;

/// The order in which the threads of a block run. Results of a correct kernel
/// do not depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ThreadOrder {
    /// The lowest thread first.
    Ascending,
    /// The highest thread first.
    Descending,
    /// Any thread that can run, by a generator with this seed.
    Random(u64),
}

/// An operation of a whole wave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Collective {
    Sync,
    Shuffle,
    Ballot,
    MatchAny,
    Max,
    Product(Shape),
}

impl Collective {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Collective::Sync => "warp_sync",
            Collective::Shuffle => "shuffle",
            Collective::Ballot => "ballot",
            Collective::MatchAny => "match_any",
            Collective::Max => "warp_max",
            Collective::Product(_) => "a matrix product",
        }
    }
}

/// The state of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// The thread can run.
    Ready,
    /// The thread waits at `block_sync` on this line.
    Barrier(i32),
    /// The thread waits for the other lanes of its wave, on this line.
    Wave(Collective, i32),
    /// The thread has returned.
    Done,
}

/// A wave on its way to a collective.
pub(crate) struct Wave {
    /// Lanes that have arrived.
    pub(crate) arrived: u64,
    /// Collective and line of the first lane that arrived.
    pub(crate) meeting: (Collective, i32),
    /// Operand of each lane; `results` holds the result of each.
    pub(crate) values: [u64; 64],
    pub(crate) results: [u64; 64],
    /// Number of wave barriers so far, from 1.
    pub(crate) barriers: u32,
}

impl Wave {
    fn new() -> Wave {
        Wave {
            arrived: 0,
            meeting: (Collective::Sync, 0),
            values: [0; 64],
            results: [0; 64],
            barriers: 1,
        }
    }
}

/// A running block.
pub(crate) struct Block {
    pub(crate) x: i64,
    pub(crate) y: i64,
    /// Number of the block in the grid.
    pub(crate) number: u32,
    /// Number of the launch.
    launch: u32,
    /// Lanes of a wave, and the binary logarithm of that number.
    pub(crate) lanes: usize,
    pub(crate) shift: u32,
    pub(crate) current: usize,
    /// Stamp of accesses that the current thread makes now.
    pub(crate) now: Stamp,
    /// Threads that have not returned.
    pub(crate) live: usize,
    pub(crate) states: Vec<State>,
    pub(crate) waves: Vec<Wave>,
    /// Threads at the barrier, and number of barriers so far, from 1.
    pub(crate) arrived: usize,
    pub(crate) barriers: u32,
    ready: VecDeque<u16>,
    order: ThreadOrder,
    random: u64,
}

impl Block {
    pub(crate) fn new(lanes: usize) -> Block {
        Block {
            x: 0,
            y: 0,
            number: 0,
            launch: 0,
            lanes,
            shift: lanes.trailing_zeros(),
            current: 0,
            now: Stamp::default(),
            live: 0,
            states: Vec::new(),
            waves: Vec::new(),
            arrived: 0,
            barriers: 1,
            ready: VecDeque::new(),
            order: ThreadOrder::Ascending,
            random: 0,
        }
    }

    /// Prepares for the blocks of a launch.
    pub(crate) fn begin(&mut self, launch: u32, order: ThreadOrder) {
        (self.launch, self.order) = (launch, order);
    }

    /// Starts a block, with all threads ready.
    pub(crate) fn reset(&mut self, number: u32, [x, y]: [i64; 2], threads: usize) {
        (self.x, self.y, self.number) = (x, y, number);
        (self.live, self.arrived, self.barriers) = (threads, 0, 1);
        self.random = match self.order {
            ThreadOrder::Random(seed) => mix(seed ^ u64::from(number) << 32) | 1,
            _ => 1,
        };
        self.states.clear();
        self.states.resize(threads, State::Ready);
        self.waves.clear();
        self.waves
            .resize_with(threads.div_ceil(self.lanes), Wave::new);
        self.ready.clear();
        self.push(0..threads);
    }

    pub(crate) fn threads(&self) -> usize {
        self.states.len()
    }

    pub(crate) fn wave(&mut self) -> &mut Wave {
        &mut self.waves[self.current >> self.shift]
    }

    pub(crate) fn lane(&self) -> usize {
        self.current & (self.lanes - 1)
    }

    /// Updates the stamp after a barrier, or when another thread runs.
    pub(crate) fn stamp(&mut self) {
        let wave = self.waves[self.current >> self.shift].barriers;
        let thread = self.current as u32;
        self.now = Stamp::new(self.launch, self.number, thread, self.barriers, wave);
    }

    fn push(&mut self, threads: std::ops::Range<usize>) {
        let threads = threads.map(|thread| thread as u16);
        match self.order {
            ThreadOrder::Descending => self.ready.extend(threads.rev()),
            _ => self.ready.extend(threads),
        }
    }

    /// Wakes the waiting ones of `threads`, because the current thread
    /// completed the event that they wait for.
    pub(crate) fn wake(&mut self, threads: std::ops::Range<usize>) {
        self.states[threads.clone()].fill(State::Ready);
        let current = self.current;
        self.push(threads.start..current);
        self.push(current + 1..threads.end);
    }

    /// Makes the next thread the current one and returns it.
    pub(crate) fn next(&mut self) -> Option<usize> {
        let next = match self.order {
            ThreadOrder::Random(_) if self.ready.len() > 1 => {
                self.random ^= self.random << 13;
                self.random ^= self.random >> 7;
                self.random ^= self.random << 17;
                let at = (self.random % self.ready.len() as u64) as usize;
                // The order of the queue carries no meaning under a random
                // order, so a swap is good enough and costs nothing.
                self.ready.swap_remove_back(at)
            }
            _ => self.ready.pop_front(),
        };
        self.current = usize::from(next?);
        self.stamp();
        Some(self.current)
    }

    /// Describes what the threads wait for in one sentence: `threads 0-63 wait
    /// at block_sync (line 70), threads 64-255 have returned`.
    pub(crate) fn waiting(&self) -> String {
        let mut parts = Vec::new();
        let mut first = 0;
        while first < self.threads() {
            let state = self.states[first];
            let same = self.states[first..].iter().take_while(|s| **s == state);
            let last = first + same.count() - 1;
            parts.push(format!("{} {}", range(first, last), place(state)));
            first = last + 1;
        }
        const SHOWN: usize = 12;
        if parts.len() > SHOWN {
            let more = parts.len() - SHOWN;
            parts.truncate(SHOWN);
            parts.push(format!("and {more} more groups"));
        }
        parts.join(", ")
    }
}

/// Formats `thread 5` or `threads 5-9`.
fn range(first: usize, last: usize) -> String {
    if first == last {
        format!("thread {first}")
    } else {
        format!("threads {first}-{last}")
    }
}

fn place(state: State) -> String {
    match state {
        State::Ready => "can run".to_string(),
        State::Barrier(line) => format!("wait at block_sync (line {line})"),
        State::Wave(what, line) => format!("wait at {} (line {line})", what.name()),
        State::Done => "have returned".to_string(),
    }
}

/// Computes the splitmix64 output function.
fn mix(mut z: u64) -> u64 {
    z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drained(order: ThreadOrder) -> Vec<usize> {
        let mut block = Block::new(64);
        block.begin(1, order);
        block.reset(7, [7, 0], 9);
        std::iter::from_fn(|| block.next()).collect()
    }

    #[test]
    fn every_order_runs_every_thread_once() {
        assert!(drained(ThreadOrder::Ascending).into_iter().eq(0..9));
        assert!(
            drained(ThreadOrder::Descending)
                .into_iter()
                .eq((0..9).rev())
        );
        let random = drained(ThreadOrder::Random(3));
        assert_eq!(random, drained(ThreadOrder::Random(3)));
        assert_ne!(random, drained(ThreadOrder::Random(4)));
        let mut sorted = random;
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(0..9));
    }

    #[test]
    fn waiting_threads_are_grouped() {
        let mut block = Block::new(64);
        block.reset(0, [0, 0], 6);
        block.states[..3].fill(State::Barrier(70));
        block.states[3] = State::Wave(Collective::Ballot, 9);
        block.states[4..].fill(State::Done);
        assert_eq!(
            block.waiting(),
            "threads 0-2 wait at block_sync (line 70), thread 3 wait at ballot (line 9), \
             threads 4-5 have returned"
        );
    }
}
