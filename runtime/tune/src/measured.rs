//! What strategies took.

use moesaic_plan::{Both, Strategy, Wire};
use std::collections::BTreeMap;

/// Seconds of the two passes of a step, of the rank that took longest.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Times {
    /// Of the forward pass.
    pub forward: f64,
    /// Of the backward pass; 0 where there is none.
    pub backward: f64,
}

impl Times {
    /// Of the step.
    pub fn sum(self) -> f64 {
        self.forward + self.backward
    }
}

/// What both passes of a strategy have in common: [`Strategy::shared`].
type Shared = Strategy;
/// What a pass has of its own.
type Own = (usize, Wire);

/// Times of passes. The passes of a step are measured apart, and pieces and wire may differ
/// between them, so that strategies that were never run as a whole can be compared.
#[derive(Clone, Debug, Default)]
pub(crate) struct Measured {
    forward: BTreeMap<Shared, BTreeMap<Own, Samples>>,
    backward: BTreeMap<Shared, BTreeMap<Own, Samples>>,
}

/// What a pass took, and how often it was run: the first run is not among the times, since
/// it may have compiled or made room.
#[derive(Clone, Debug, Default)]
struct Samples {
    runs: usize,
    seconds: Vec<f64>,
}

impl Samples {
    fn add(&mut self, seconds: f64) {
        if self.runs > 0 {
            self.seconds.push(seconds);
        }
        self.runs += 1;
    }

    fn median(&self, wanted: usize) -> Option<f64> {
        median(self.seconds.iter().copied(), wanted.max(1))
    }
}

/// The one in the middle, of at least so many.
pub(crate) fn median(seconds: impl Iterator<Item = f64>, least: usize) -> Option<f64> {
    let mut sorted: Vec<f64> = seconds.collect();
    if sorted.len() < least {
        return None;
    }
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied()
}

fn own(strategy: Strategy) -> Both<Own> {
    Both {
        forward: (strategy.degree.forward, strategy.wire.forward),
        backward: (strategy.degree.backward, strategy.wire.backward),
    }
}

impl Measured {
    pub fn add(&mut self, strategy: Strategy, times: Times) {
        let (shared, own) = (strategy.shared(), own(strategy));
        let forward = self.forward.entry(shared).or_default();
        forward.entry(own.forward).or_default().add(times.forward);
        let backward = self.backward.entry(shared).or_default();
        let samples = backward.entry(own.backward).or_default();
        samples.add(times.backward);
    }

    /// The median step of a strategy whose passes were measured `wanted` times.
    pub fn seconds(&self, strategy: Strategy, wanted: usize) -> Option<f64> {
        let (shared, own) = (strategy.shared(), own(strategy));
        let pass = |of: &BTreeMap<Shared, BTreeMap<Own, Samples>>, own| {
            of.get(&shared)?.get(&own)?.median(wanted)
        };
        Some(pass(&self.forward, own.forward)? + pass(&self.backward, own.backward)?)
    }

    /// The fastest of all that follow from what was measured, and its seconds.
    pub fn best(&self, wanted: usize) -> Option<(Strategy, f64)> {
        let each = self.forward.keys().filter_map(|shared| {
            let forward = fastest(self.forward.get(shared)?, wanted)?;
            let backward = fastest(self.backward.get(shared)?, wanted)?;
            let strategy = Strategy {
                degree: Both {
                    forward: forward.0.0,
                    backward: backward.0.0,
                },
                wire: Both {
                    forward: forward.0.1,
                    backward: backward.0.1,
                },
                ..*shared
            };
            Some((strategy, forward.1 + backward.1))
        });
        each.min_by(|a, b| a.1.total_cmp(&b.1))
    }
}

fn fastest(passes: &BTreeMap<Own, Samples>, wanted: usize) -> Option<(Own, f64)> {
    let timed = passes.iter();
    let timed = timed.filter_map(|(own, samples)| Some((*own, samples.median(wanted)?)));
    timed.min_by(|a, b| a.1.total_cmp(&b.1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strategy(text: &str) -> Strategy {
        text.parse().expect("a strategy")
    }

    fn add(measured: &mut Measured, text: &str, forward: f64, backward: f64) {
        let times = Times { forward, backward };
        measured.add(strategy(text), times);
    }

    #[test]
    fn the_first_run_is_no_time() {
        let mut measured = Measured::default();
        add(&mut measured, "degree=2", 9.0, 9.0);
        assert_eq!(measured.seconds(strategy("degree=2"), 1), None);
        for (forward, backward) in [(1.0, 2.0), (3.0, 2.5), (1.5, 4.0)] {
            add(&mut measured, "degree=2", forward, backward);
        }
        assert_eq!(measured.seconds(strategy("degree=2"), 3), Some(1.5 + 2.5));
        assert_eq!(measured.seconds(strategy("degree=2"), 4), None);
    }

    /// Passes are compared apart: the best step need not have been run.
    #[test]
    fn the_best_is_put_together() {
        let mut measured = Measured::default();
        for _ in 0..2 {
            add(&mut measured, "degree=1", 4.0, 5.0);
            add(&mut measured, "degree=4", 3.0, 7.0);
            // Another route's backward pass is not put to this forward pass.
            add(&mut measured, "route=inter-first", 8.5, 0.1);
        }
        assert_eq!(measured.seconds(strategy("degree=4/1"), 1), Some(8.0));
        assert_eq!(measured.best(1), Some((strategy("degree=4/1"), 8.0)));
        add(&mut measured, "route=inter-first,degree=2", 6.5, 1.0);
        add(&mut measured, "route=inter-first,degree=2", 6.5, 1.0);
        let best = strategy("route=inter-first,degree=2/1");
        assert_eq!(measured.best(1), Some((best, 6.6)));
    }
}
