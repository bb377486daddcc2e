//! The time of an exchange: phases of messages over levels of links.

use crate::{Level, Machine};

/// The most levels of links that a machine has.
pub const MOST_LEVELS: usize = 4;

/// The messages of a rank over one level in one phase.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LevelLoad {
    /// The messages that the rank sends.
    pub messages: f64,
    /// The ranks that it sends to.
    pub peers: f64,
    /// The bytes that it sends.
    pub sent: f64,
    /// The bytes that it receives.
    pub received: f64,
}

impl LevelLoad {
    /// Returns a load with equal messages in both directions.
    pub fn even(peers: f64, bytes: f64) -> LevelLoad {
        LevelLoad {
            messages: peers,
            peers,
            sent: bytes,
            received: bytes,
        }
    }

    /// Returns the bytes of a message.
    pub fn each(&self) -> f64 {
        self.sent.max(self.received) / self.messages.max(1.0)
    }

    /// Returns the load with sent and received bytes swapped.
    #[must_use]
    pub fn reversed(self) -> LevelLoad {
        LevelLoad {
            sent: self.received,
            received: self.sent,
            ..self
        }
    }

    /// Returns the load with scaled bytes and the same messages.
    #[must_use]
    pub fn times(self, by: f64) -> LevelLoad {
        LevelLoad {
            sent: self.sent * by,
            received: self.received * by,
            ..self
        }
    }

    /// Returns the load with the same bytes, in messages to a part of the ranks.
    #[must_use]
    pub fn to_part(self, part: f64) -> LevelLoad {
        LevelLoad {
            messages: self.messages * part,
            peers: self.peers * part,
            ..self
        }
    }

    /// Returns whether nothing moves.
    pub fn is_nothing(&self) -> bool {
        self.peers == 0.0 || (self.sent == 0.0 && self.received == 0.0)
    }
}

/// Messages that are in flight at the same time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Phase {
    /// The load by level, the innermost first.
    pub loads: [LevelLoad; MOST_LEVELS],
    /// The bytes that the rank copies in its own memory meanwhile (read and written): its rows
    /// for itself.
    pub own: f64,
    /// The bytes of memory traffic of passes before or after the messages.
    pub copied: f64,
    /// The kernels of those passes.
    pub launches: f64,
    /// Whether levels transfer concurrently, whatever the machine's `side_by_side` says.
    pub side_by_side: bool,
}

/// The seconds of a phase.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PhaseTime {
    /// The total.
    pub seconds: f64,
    /// Fixed times and per-message times, whatever the size.
    pub fixed: f64,
    /// The part that a back-to-back exchange hides: as measured, or a fraction of the shorter of
    /// its transfers and of everything independent of size. Messages inside nodes and between
    /// them that run concurrently already hide each other.
    pub skipped: f64,
    /// The seconds of sent and of received bytes over the busiest level.
    pub directions: [f64; 2],
    /// Passes over memory, including copies of the rank's own rows.
    pub copies: f64,
    /// Transfers by level; they may run concurrently.
    pub levels: LevelTime,
}

impl PhaseTime {
    /// Returns the time scaled.
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

#[doc(hidden)]
impl Machine {
    /// Returns the time of a phase for a rank: the fixed time of its outermost level, the
    /// transfers of its levels (concurrent or in turn), and passes over memory.
    pub fn phase(&self, phase: &Phase) -> PhaseTime {
        let mut time = PhaseTime::default();
        let (mut longest, mut sum) = (0.0f64, 0.0);
        let (mut messages, mut again) = (0.0f64, None);
        for (at, level) in self.levels.iter().enumerate() {
            let load = &phase.loads[at];
            if load.peers == 0.0 {
                continue;
            }
            let TransferTime {
                messages: each,
                bytes: moved,
                factor,
            } = transfer(level, load);
            let fixed = level.alpha_us * 1e-6 * factor;
            time.levels[at] = moved;
            // Messages of all levels start together, so fixed times do not add up.
            time.fixed = time.fixed.max(fixed);
            // Only the busiest level can hide anything behind the next exchange.
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
        // The rank's own copy shares the memory, not the links.
        let moving = if self.overlap.side_by_side || phase.side_by_side {
            longest.max(own)
        } else {
            sum + own
        };
        time.copies = phase.copied / self.memory_rate() + phase.launches * self.launch();
        time.seconds = time.fixed + moving + time.copies;
        time.fixed += messages.min(moving);
        // Levels that move side by side already hide each other; counting `hidden` as well would
        // count it twice.
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

/// The time of transfers at a level.
struct TransferTime {
    /// The seconds of messages as such.
    messages: f64,
    /// The seconds of their bytes.
    bytes: f64,
    /// The factor that both contain.
    factor: f64,
}

fn transfer(level: &Level, load: &LevelLoad) -> TransferTime {
    let bytes = load.sent.max(load.received);
    let factor = level.factor(load.peers, load.each());
    TransferTime {
        messages: load.messages * level.per_message() * factor,
        bytes: bytes / level.rate(load.peers) * factor,
        factor,
    }
}

/// Returns the load of equal bytes from a rank to each of some consecutive ranks, by level.
pub(crate) fn to_range(
    machine: &Machine,
    rank: usize,
    range: std::ops::Range<usize>,
    step: usize,
    bytes: f64,
) -> [LevelLoad; MOST_LEVELS] {
    let mut loads = [LevelLoad::default(); MOST_LEVELS];
    let units = machine.units();
    let count = |from: usize, to: usize| {
        // Counts the ranks `range.start + i * step` below a bound.
        let below = |bound: usize| bound.saturating_sub(range.start).div_ceil(step);
        let last = range.end.min(to);
        below(last).saturating_sub(below(from.max(range.start))) as f64
    };
    let mut inner = count(rank, rank + 1);
    for (load, unit) in loads.iter_mut().zip(&units) {
        let first = rank - rank % unit;
        let all = count(first, first.saturating_add(*unit));
        *load = LevelLoad::even(all - inner, (all - inner) * bytes);
        inner = all;
    }
    loads
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
        phase.loads[0] = LevelLoad::even(7.0, 1e7);
        phase.loads[1] = LevelLoad::even(8.0, 3e7);
        machine.overlap.side_by_side = true;
        assert!((machine.phase(&phase).seconds - 3.01e-3).abs() < 1e-9);
        machine.overlap.side_by_side = false;
        assert!((machine.phase(&phase).seconds - 4.01e-3).abs() < 1e-9);
        phase.side_by_side = true;
        assert!((machine.phase(&phase).seconds - 3.01e-3).abs() < 1e-9);
        phase.loads[1].received = 6e7;
        assert!((machine.phase(&phase).seconds - 6.01e-3).abs() < 1e-9);
        // A measured factor applies to all of an exchange.
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
