//! What an exchange takes: phases of messages over levels of links.

use crate::{Level, Machine};

/// Levels of links that a machine has at most.
pub const MOST_LEVELS: usize = 4;

/// What a rank sends and gets over one level in one phase.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// Messages that it sends.
    pub messages: f64,
    /// Ranks that it sends to.
    pub peers: f64,
    /// Bytes out.
    pub sent: f64,
    /// Bytes in.
    pub received: f64,
}

impl Load {
    /// So many equal messages each way.
    pub fn even(peers: f64, bytes: f64) -> Load {
        Load {
            messages: peers,
            peers,
            sent: bytes,
            received: bytes,
        }
    }

    /// Bytes of a message.
    pub fn each(&self) -> f64 {
        self.sent.max(self.received) / self.messages.max(1.0)
    }

    /// What goes out comes in.
    #[must_use]
    pub fn turned(self) -> Load {
        Load {
            sent: self.received,
            received: self.sent,
            ..self
        }
    }

    /// Other bytes, the same messages.
    #[must_use]
    pub fn times(self, by: f64) -> Load {
        Load {
            sent: self.sent * by,
            received: self.received * by,
            ..self
        }
    }

    /// The same bytes, in messages to a part of the ranks.
    #[must_use]
    pub fn to_part(self, part: f64) -> Load {
        Load {
            messages: self.messages * part,
            peers: self.peers * part,
            ..self
        }
    }

    /// Whether nothing moves.
    pub fn is_nothing(&self) -> bool {
        self.peers == 0.0 || (self.sent == 0.0 && self.received == 0.0)
    }
}

/// Messages that are under way at the same time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Phase {
    /// By level, the innermost first.
    pub loads: [Load; MOST_LEVELS],
    /// Bytes that a rank copies in its own memory beside them, read and written: what it
    /// has for itself.
    pub own: f64,
    /// Bytes of memory traffic of passes before or after them.
    pub copied: f64,
    /// Kernels of those passes.
    pub launches: f64,
    /// Levels do not wait for each other, whatever the machine's exchanges do.
    pub side_by_side: bool,
}

/// What a phase takes, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PhaseTime {
    /// All of it.
    pub seconds: f64,
    /// Fixed times and messages, whatever their size.
    pub fixed: f64,
    /// What of it is hidden where an exchange follows another at once: as it was measured, or
    /// a part of the shorter of its transfers and of all that has no size. Messages inside nodes
    /// beside those between them hide each other already.
    pub skipped: f64,
    /// Seconds of what goes out and of what comes in over the busiest level.
    pub directions: [f64; 2],
    /// Passes over memory, with what the rank has for itself.
    pub copies: f64,
    /// Transfers, by level; they may have been at the same time.
    pub levels: LevelTime,
}

impl PhaseTime {
    /// The same, so many times as long.
    #[must_use]
    pub fn times(self, by: f64) -> PhaseTime {
        PhaseTime {
            seconds: self.seconds * by,
            fixed: self.fixed * by,
            skipped: self.skipped * by,
            directions: self.directions.map(|seconds| seconds * by),
            copies: self.copies * by,
            levels: self.levels.map(|seconds| seconds * by),
        }
    }
}

/// Seconds by level.
pub type LevelTime = [f64; MOST_LEVELS];

impl Machine {
    /// What a phase takes a rank: the fixed time of its outermost level; the transfers of
    /// its levels, at the same time or in turn; passes over memory.
    pub fn phase(&self, phase: &Phase) -> PhaseTime {
        let mut time = PhaseTime::default();
        let (mut longest, mut sum) = (0.0f64, 0.0);
        let (mut messages, mut again) = (0.0f64, None);
        for (at, level) in self.levels.iter().enumerate() {
            let load = &phase.loads[at];
            if load.peers == 0.0 {
                continue;
            }
            let (each, moved, factor) = transfer(level, load);
            let fixed = level.alpha_us * 1e-6 * factor;
            time.levels[at] = moved;
            time.fixed = time.fixed.max(fixed);
            if each + moved > longest {
                let part = moved / load.sent.max(load.received).max(1.0);
                time.directions = [load.sent * part, load.received * part];
                again = level.again(load.peers, load.each());
            }
            messages += each;
            longest = longest.max(each + moved);
            sum += each + moved;
        }
        let own = phase.own / self.memory_rate();
        let moving = if self.overlap.side_by_side || phase.side_by_side {
            longest.max(own)
        } else {
            sum + own
        };
        time.copies = phase.copied / self.memory_rate() + phase.launches * self.launch();
        time.seconds = time.fixed + moving + time.copies;
        time.fixed += messages.min(moving);
        if !phase.side_by_side {
            let [out, inward] = time.directions;
            time.skipped = match again {
                Some(part) => (1.0 - part) * (time.seconds - time.copies),
                None => self.hidden() * time.fixed.min(out.max(inward)),
            };
        }
        time
    }
}

/// Seconds of messages as such, and of their bytes; and the factor that is in both.
fn transfer(level: &Level, load: &Load) -> (f64, f64, f64) {
    let bytes = load.sent.max(load.received);
    let factor = level.factor(load.peers, load.each());
    (
        load.messages * level.per_message() * factor,
        bytes / level.rate(load.peers) * factor,
        factor,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Factor, published};

    #[test]
    fn levels_move_together_or_in_turn() {
        let mut machine = published("h800").unwrap();
        for level in &mut machine.levels {
            (level.alpha_us, level.half_size_kib, level.half_peers) = (10.0, 0.0, 0.0);
            level.bandwidth_gbs = 10.0;
        }
        let mut phase = Phase::default();
        phase.loads[0] = Load::even(7.0, 1e7);
        phase.loads[1] = Load::even(8.0, 3e7);
        machine.overlap.side_by_side = true;
        assert!((machine.phase(&phase).seconds - 3.01e-3).abs() < 1e-9);
        machine.overlap.side_by_side = false;
        assert!((machine.phase(&phase).seconds - 4.01e-3).abs() < 1e-9);
        phase.side_by_side = true;
        assert!((machine.phase(&phase).seconds - 3.01e-3).abs() < 1e-9);
        phase.loads[1].received = 6e7;
        assert!((machine.phase(&phase).seconds - 6.01e-3).abs() < 1e-9);
        // What was measured counts for all of an exchange.
        machine.levels[1].factors = vec![Factor {
            peers: 8.0,
            kib: 1.0,
            by: 2.0,
            again: Some(0.75),
        }];
        let time = machine.phase(&phase);
        assert!((time.seconds - 12.02e-3).abs() < 1e-9, "{time:?}");
        assert_eq!(time.skipped, 0.0, "levels hide each other");
        phase.side_by_side = false;
        let time = machine.phase(&phase);
        let moved = 12.02e-3 + 1e-3;
        assert!((time.seconds - moved).abs() < 1e-9, "{time:?}");
        assert!((time.skipped - moved / 4.0).abs() < 1e-9, "{time:?}");
        let [out, inward] = time.directions;
        assert!(
            (out - 6e-3).abs() < 1e-9 && (inward - 12e-3).abs() < 1e-9,
            "{time:?}"
        );
        assert_eq!(machine.phase(&Phase::default()).seconds, 0.0);
    }
}
