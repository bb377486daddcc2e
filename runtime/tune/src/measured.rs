//! Measured times of strategies.

use moesaic_plan::{MAX_CHUNKS, Strategy};
use std::collections::BTreeMap;

/// The seconds of both passes of a step, of the slowest rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Times {
    /// The seconds of the forward pass.
    pub forward: f64,
    /// The seconds of the backward pass; 0 where there is none.
    pub backward: f64,
}

impl Times {
    /// Returns the seconds of the step.
    pub fn sum(self) -> f64 {
        self.forward + self.backward
    }

    /// Returns the end of each pass, counted from the start of the step.
    pub fn ends(self) -> [f64; 2] {
        [self.forward, self.sum()]
    }

    /// Returns times from the largest [`Times::ends`] of all ranks. Ranks do not synchronize
    /// between the passes: a rank that finishes one early needs longer for the other. So the
    /// longest time of each pass would not add up to the step.
    pub fn of_last([forward, end]: [f64; 2]) -> Times {
        Times {
            forward,
            backward: end - forward,
        }
    }
}

/// The times of steps, by strategy.
#[derive(Clone, Debug, Default)]
pub(crate) struct Measured(BTreeMap<Strategy, Samples>);

/// The times of steps and their number. The first step's time is excluded, because it may have
/// compiled kernels or allocated memory.
#[derive(Clone, Debug, Default)]
struct Samples {
    runs: usize,
    times: Vec<Times>,
}

impl Samples {
    fn median(&self, of: impl Fn(&Times) -> f64, wanted: usize) -> Option<f64> {
        median(self.times.iter().map(of), wanted.max(1))
    }
}

/// Returns the median of at least `least` values.
pub(crate) fn median(seconds: impl Iterator<Item = f64>, least: usize) -> Option<f64> {
    let mut sorted: Vec<f64> = seconds.collect();
    if sorted.len() < least {
        return None;
    }
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied()
}

impl Measured {
    pub fn add(&mut self, strategy: Strategy, times: Times) {
        let samples = self.0.entry(strategy).or_default();
        if samples.runs > 0 {
            samples.times.push(times);
        }
        samples.runs += 1;
    }

    /// Returns the number of strategies with steps.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether a strategy has had a step.
    pub fn is_tried(&self, strategy: Strategy) -> bool {
        self.0.contains_key(&strategy)
    }

    /// Returns the median step of a strategy that was measured `wanted` times.
    pub fn seconds(&self, strategy: Strategy, wanted: usize) -> Option<f64> {
        let samples = self.0.get(&strategy)?;
        samples.median(|times| times.sum(), wanted)
    }

    /// Returns the fastest strategy that was measured `wanted` times, and its seconds.
    pub fn best(&self, wanted: usize) -> Option<(Strategy, f64)> {
        self.all(wanted).min_by(|a, b| a.1.total_cmp(&b.1))
    }

    fn all(&self, wanted: usize) -> impl Iterator<Item = (Strategy, f64)> {
        let each = self.0.iter();
        each.filter_map(move |(strategy, samples)| {
            Some((*strategy, samples.median(|times| times.sum(), wanted)?))
        })
    }

    /// Returns the forward pass of one strategy combined with the backward pass of another that
    /// agrees in the rest, if the sum is below every measurement. The combination may take
    /// longer, because passes with different chunks launch more kernels.
    pub fn together(&self, wanted: usize) -> Option<Strategy> {
        let timed = self.0.iter().filter_map(|(strategy, samples)| {
            let forward = samples.median(|times| times.forward, wanted)?;
            Some((
                *strategy,
                [forward, samples.median(|times| times.backward, wanted)?],
            ))
        });
        let timed: Vec<(Strategy, [f64; 2])> = timed.collect();
        let pairs = timed
            .iter()
            .flat_map(|one| timed.iter().map(move |other| (one, other)));
        let alike = pairs.filter(|(one, other)| one.0.shared() == other.0.shared());
        let sums =
            alike.map(|(one, other)| (one.0.with_backward_of(other.0), one.1[0] + other.1[1]));
        let possible = sums.filter(|(both, _)| both.chunks().common() <= MAX_CHUNKS);
        let (both, seconds) = possible.min_by(|a, b| a.1.total_cmp(&b.1))?;
        let best = self.best(wanted)?.1;
        (seconds < best && self.seconds(both, wanted).is_none()).then_some(both)
    }

    /// Returns the next strategy to measure again: of the fastest `most` within the fraction
    /// `near` of the best, the one with the fewest measurements, until each has `wanted`.
    pub fn closest(&self, wanted: usize, near: f64, most: usize) -> Option<Strategy> {
        let (_, best) = self.best(1)?;
        let mut near: Vec<(Strategy, f64)> = self
            .all(1)
            .filter(|(_, seconds)| *seconds <= best * (1.0 + near))
            .collect();
        near.sort_by(|a, b| a.1.total_cmp(&b.1));
        near.truncate(most);
        let count = |strategy: &Strategy| self.0.get(strategy).map_or(0, |s| s.times.len());
        let fewest = near
            .iter()
            .map(|(strategy, _)| *strategy)
            .min_by_key(count)?;
        (near.len() > 1 && count(&fewest) < wanted).then_some(fewest)
    }
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
    fn a_step_takes_until_its_last_rank_is_done() {
        let of = |forward, backward| Times { forward, backward }.ends();
        let (a, b) = (of(1.0, 3.0), of(2.0, 2.5));
        let last = Times::of_last([a[0].max(b[0]), a[1].max(b[1])]);
        // The longest of each pass would add up to 5.
        assert_eq!((last.forward, last.sum()), (2.0, 4.5));
    }

    #[test]
    fn the_first_run_is_no_time() {
        let mut measured = Measured::default();
        add(&mut measured, "overlap_degree=2", 9.0, 9.0);
        assert_eq!(measured.seconds(strategy("overlap_degree=2"), 1), None);
        for (forward, backward) in [(1.0, 2.0), (3.0, 2.5), (1.5, 4.0)] {
            add(&mut measured, "overlap_degree=2", forward, backward);
        }
        assert_eq!(measured.seconds(strategy("overlap_degree=2"), 3), Some(5.5));
        assert_eq!(measured.seconds(strategy("overlap_degree=2"), 4), None);
    }

    #[test]
    fn two_passes_that_look_best_together_are_worth_a_step() {
        let mut measured = Measured::default();
        for _ in 0..2 {
            add(&mut measured, "overlap_degree=1", 4.0, 5.0);
            add(&mut measured, "overlap_degree=4", 3.0, 7.0);
            // The backward pass of another algorithm is not combined with this forward pass.
            add(&mut measured, "all_to_all=2dh-inter-first", 8.5, 0.1);
        }
        assert_eq!(
            measured.best(1),
            Some((strategy("all_to_all=2dh-inter-first"), 8.6))
        );
        assert_eq!(measured.together(1), Some(strategy("overlap_degree=4/1")));
        // The measured combination counts, not the estimate.
        for _ in 0..2 {
            add(&mut measured, "overlap_degree=4/1", 3.9, 5.0);
        }
        assert_eq!(measured.together(1), None);
        assert_eq!(
            measured.best(1),
            Some((strategy("all_to_all=2dh-inter-first"), 8.6))
        );
    }

    #[test]
    fn those_that_are_close_are_measured_in_turns() {
        let mut measured = Measured::default();
        for (text, seconds) in [
            ("overlap_degree=1", 1.0),
            ("overlap_degree=2", 1.05),
            ("overlap_degree=4", 2.0),
        ] {
            for _ in 0..2 {
                add(&mut measured, text, seconds, 0.0);
            }
        }
        let mut turns = Vec::new();
        while let Some(next) = measured.closest(3, 0.1, 3) {
            turns.push(next.to_string());
            let seconds = if next == strategy("overlap_degree=2") {
                1.05
            } else {
                1.0
            };
            measured.add(
                next,
                Times {
                    forward: seconds,
                    backward: 0.0,
                },
            );
        }
        assert_eq!(
            turns,
            ["default", "overlap_degree=2", "default", "overlap_degree=2"]
        );
        assert_eq!(measured.closest(9, 0.01, 3), None);
    }
}
