//! The strategies to try, in order.

use crate::measured::Measured;
use moesaic_plan::{AllToAll, Both, Parallel, Strategy};

/// The predicted time of a strategy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PredictedTime {
    /// The strategy.
    pub strategy: Strategy,
    /// The seconds of a step: both passes.
    pub seconds: f64,
}

/// The distance from the best prediction, as a fraction, within which strategies are measured.
const NEAR: f64 = 0.3;
/// The most strategies on the shortlist. A sixth candidate follows from their measurements.
const MOST: usize = 5;

/// Returns the strategies worth measuring: the current one and the best predictions, simple ones
/// first. Prediction errors of strategies that differ only in chunks and comm dtype are
/// correlated. So the simplest of the best of each kind ([`Strategy::simplest`]) comes before a
/// second one of any kind.
pub fn shortlist(predictions: &[PredictedTime], current: Strategy) -> Vec<Strategy> {
    let mut sorted: Vec<(Strategy, f64)> = predictions
        .iter()
        .map(|p| (p.strategy, p.seconds))
        .collect();
    sorted.sort_by(|a, b| a.1.total_cmp(&b.1));
    let simplest = Strategy::simplest(sorted.iter().copied());
    let best = sorted.first().map_or(0.0, |(_, seconds)| *seconds);
    sorted.retain(|(_, seconds)| *seconds <= best * (1.0 + NEAR));
    let place = |(at, &(strategy, _)): (usize, &(Strategy, f64))| {
        let alike = |(other, _): &&(Strategy, f64)| other.shared() == strategy.shared();
        let first = Strategy::simplest(sorted.iter().filter(alike).copied());
        let before = sorted[..at].iter().filter(alike);
        let before = before.filter(|(other, _)| Some(*other) != first).count();
        let place = if first == Some(strategy) {
            0
        } else {
            1 + before
        };
        (place, strategy)
    };
    let mut others: Vec<(usize, Strategy)> = sorted.iter().enumerate().map(place).collect();
    others.sort_by_key(|(place, _)| *place);
    let others = others.into_iter().map(|(_, strategy)| strategy);
    let others = others.filter(|s| Some(*s) != simplest);
    let others = simplest.into_iter().chain(others).filter(|s| *s != current);
    std::iter::once(current).chain(others).take(MOST).collect()
}

/// Returns the strategy next to the fastest so far: with half or twice as many chunks, whichever
/// is predicted to be faster, or the one with fewer chunks where that costs hardly more.
/// Predictions are wrong about the best number of chunks, by one step, more often than about
/// anything else.
pub(crate) fn adjacent_degree(
    predictions: &[PredictedTime],
    fastest: Strategy,
    measured: impl Fn(Strategy) -> bool,
) -> Option<Strategy> {
    let chunks = |strategy: Strategy| {
        [
            strategy.overlap_degree.forward,
            strategy.overlap_degree.backward,
        ]
    };
    let own = chunks(fastest);
    let next = |other: Strategy| {
        let other = chunks(other);
        other == own.map(|n| 2 * n) || other.map(|n| 2 * n) == own
    };
    let mut others: Vec<&PredictedTime> = predictions.iter().collect();
    others.retain(|p| p.strategy.shared() == fastest.shared() && next(p.strategy));
    others.retain(|p| !measured(p.strategy));
    Strategy::simplest(others.iter().map(|p| (p.strategy, p.seconds)))
}

/// The strategies that Tutel's search chooses from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StrategySpace {
    /// The parallelism degrees, ascending.
    pub adaptive_r: Vec<usize>,
    /// The overlap degrees.
    pub overlap_degrees: Vec<usize>,
    /// The all-to-all algorithms.
    pub algorithms: Vec<AllToAll>,
}

impl StrategySpace {
    /// Returns Tutel's space: every parallelism degree of a mesh, 1, 2, 4 or 8 chunks, linear
    /// exchanges, and two-dimensional ones where ranks lie on several nodes.
    pub fn of(mesh: Parallel, per_node: usize) -> StrategySpace {
        let divisors = (1..=mesh.expert_tp).filter(|n| mesh.expert_tp.is_multiple_of(*n));
        let ranks = mesh.group();
        let nodes = ranks.is_multiple_of(per_node.max(1)) && (2..ranks).contains(&per_node);
        StrategySpace {
            adaptive_r: std::iter::once(0).chain(divisors).collect(),
            overlap_degrees: vec![1, 2, 4, 8],
            algorithms: if nodes {
                vec![AllToAll::Linear, AllToAll::TwoDhInterFirst]
            } else {
                vec![AllToAll::Linear]
            },
        }
    }

    /// Returns the strategy to measure next, if any is left. It is a ternary search over the
    /// parallelism degree, with all overlap degrees and algorithms for each. Both ends are
    /// measured too, because neither 0 nor all shards lie on the curve of the degrees in between.
    pub(crate) fn next(&self, measured: &Measured, wanted: usize) -> Option<Strategy> {
        let inner = self.inner();
        let mut points: Vec<usize> = self.ends();
        let (mut low, mut high) = (0, inner.len());
        loop {
            let few = high - low <= 3;
            let third = (high - low) / 3;
            let (left, right) = (low + third, high.saturating_sub(third + 1));
            if few {
                points.extend(&inner[low..high])
            } else {
                points.extend([inner[left], inner[right]])
            }
            if let Some(strategy) = self.missing(&points, measured, wanted) {
                return Some(strategy);
            }
            if few {
                return None;
            }
            if self.cost(inner[left], measured, wanted) <= self.cost(inner[right], measured, wanted)
            {
                high = right
            } else {
                low = left + 1
            }
        }
    }

    /// Returns the parallelism degrees between the ends.
    fn inner(&self) -> &[usize] {
        let last = self.adaptive_r.len().saturating_sub(1);
        let first = usize::from(self.adaptive_r.first() == Some(&0)).min(last);
        &self.adaptive_r[first..last]
    }

    fn ends(&self) -> Vec<usize> {
        let none = self
            .adaptive_r
            .first()
            .filter(|adaptive_r| **adaptive_r == 0);
        none.into_iter()
            .chain(self.adaptive_r.last())
            .copied()
            .collect()
    }

    /// Returns all strategies with one parallelism degree.
    fn at(&self, adaptive_r: usize) -> impl Iterator<Item = Strategy> {
        let algorithms = self.algorithms.iter().copied();
        let each = algorithms.flat_map(|all_to_all| {
            self.overlap_degrees
                .iter()
                .map(move |overlap_degree| (all_to_all, *overlap_degree))
        });
        each.map(move |(all_to_all, overlap_degree)| Strategy {
            adaptive_r: Some(adaptive_r),
            overlap_degree: Both::same(overlap_degree),
            all_to_all,
            ..Strategy::default()
        })
    }

    fn missing(&self, points: &[usize], measured: &Measured, wanted: usize) -> Option<Strategy> {
        let all = points.iter().flat_map(|adaptive_r| self.at(*adaptive_r));
        let mut missing = all.filter(|s| measured.seconds(*s, wanted).is_none());
        missing.next()
    }

    fn cost(&self, adaptive_r: usize, measured: &Measured, wanted: usize) -> f64 {
        let seconds = self
            .at(adaptive_r)
            .filter_map(|s| measured.seconds(s, wanted));
        seconds.min_by(f64::total_cmp).unwrap_or(f64::INFINITY)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Times;

    fn space(expert_tp: usize) -> StrategySpace {
        let mesh = Parallel {
            expert_tp,
            ..Parallel::default()
        };
        StrategySpace::of(mesh, 1)
    }

    /// Runs the search over the times of a function; returns the number of trials and the result.
    fn tried(space: &StrategySpace, seconds: impl Fn(Strategy) -> f64) -> (usize, Strategy) {
        let mut measured = Measured::default();
        let mut count = 0;
        while let Some(strategy) = space.next(&measured, 1) {
            count += 1;
            for _ in 0..2 {
                let forward = seconds(strategy);
                measured.add(
                    strategy,
                    Times {
                        forward,
                        backward: forward,
                    },
                );
            }
        }
        (count, measured.best(1).expect("something was tried").0)
    }

    #[test]
    fn of_two_adjacent_degrees_the_smaller_is_tried_where_it_takes_hardly_more() {
        let next = |seconds: [f64; 3], tried: &str| {
            let texts = ["default", "overlap_degree=2", "overlap_degree=4"];
            let predictions: Vec<PredictedTime> = (texts.iter().zip(seconds))
                .map(|(text, seconds)| PredictedTime {
                    strategy: text.parse().unwrap(),
                    seconds,
                })
                .collect();
            let fastest: Strategy = "overlap_degree=2".parse().unwrap();
            adjacent_degree(&predictions, fastest, |s| s.to_string() == tried)
                .map(|s: Strategy| s.to_string())
        };
        assert_eq!(next([1.01, 0.9, 1.0], "").as_deref(), Some("default"));
        assert_eq!(
            next([1.1, 0.9, 1.0], "").as_deref(),
            Some("overlap_degree=4")
        );
        assert_eq!(
            next([1.0, 0.9, 1.0], "default").as_deref(),
            Some("overlap_degree=4")
        );
    }

    /// The curve over r is r A + P / r between the ends, and lower at both ends.
    #[test]
    fn the_best_is_found_with_few_trials() {
        for expert_tp in [1usize, 2, 6, 16, 64, 256, 1024, 2048] {
            let space = space(expert_tp);
            for best in &space.adaptive_r {
                let curve = |s: Strategy| {
                    let adaptive_r = s.adaptive_r.unwrap_or(0) as f64;
                    let distance = (adaptive_r.max(0.5) / (*best as f64).max(0.5)).log2().abs();
                    1.0 + distance + 0.1 * (s.overlap_degree.forward as f64 - 4.0).abs()
                };
                let (count, found) = tried(&space, curve);
                assert_eq!(found.adaptive_r, Some(*best), "of {expert_tp}");
                assert_eq!(found.overlap_degree, Both::same(4));
                // Tutel's bound, with one more point at each end.
                let thirds = (expert_tp as f64).log(1.5).ceil() as usize;
                assert!(count <= (thirds + 3) * 4, "{count} trials of {expert_tp}");
            }
        }
    }

    #[test]
    fn ends_are_tried_although_they_lie_off_the_curve() {
        let space = space(64);
        let curve = |s: Strategy| match s.adaptive_r {
            Some(0) => 0.5,
            Some(adaptive_r) => 1.0 + adaptive_r as f64,
            None => unreachable!("the search names adaptive_r"),
        };
        assert_eq!(tried(&space, curve).1.adaptive_r, Some(0));
        let curve = |s: Strategy| match s.adaptive_r {
            Some(64) => 0.5,
            Some(adaptive_r) => 1.0 + adaptive_r as f64,
            None => unreachable!("the search names adaptive_r"),
        };
        assert_eq!(tried(&space, curve).1.adaptive_r, Some(64));
    }

    #[test]
    fn algorithms_in_two_dimensions_are_for_several_nodes() {
        let mesh = Parallel {
            ep: 16,
            ..Parallel::default()
        };
        assert_eq!(
            StrategySpace::of(mesh, 8).algorithms,
            [AllToAll::Linear, AllToAll::TwoDhInterFirst]
        );
        for per_node in [0, 1, 3, 16, 32] {
            assert_eq!(
                StrategySpace::of(mesh, per_node).algorithms,
                [AllToAll::Linear],
                "{per_node}"
            );
        }
    }

    #[test]
    fn a_short_list_has_the_best_and_what_is_done_now() {
        let strategy = |overlap_degree| Strategy {
            overlap_degree: Both::same(overlap_degree),
            ..Strategy::default()
        };
        let of = |overlap_degree, seconds| PredictedTime {
            strategy: strategy(overlap_degree),
            seconds,
        };
        let all = [of(1, 2.0), of(2, 1.1), of(3, 1.0), of(4, 1.31)];
        let list = shortlist(&all, strategy(1));
        assert_eq!(list, [strategy(1), strategy(3), strategy(2)]);
        assert_eq!(shortlist(&[], strategy(2)), [strategy(2)]);
        // Another algorithm comes before a second overlap degree.
        let once = Strategy {
            all_to_all: AllToAll::Dedup,
            ..strategy(1)
        };
        let other = PredictedTime {
            strategy: once,
            seconds: 1.2,
        };
        let list = shortlist(&[of(2, 1.1), of(3, 1.0), other], strategy(1));
        assert_eq!(list, [strategy(1), strategy(3), once, strategy(2)]);
        // So does one chunk before two that are predicted to be hardly faster.
        let twice = PredictedTime {
            strategy: Strategy {
                overlap_degree: Both::same(2),
                ..once
            },
            seconds: 1.18,
        };
        let list = shortlist(&[of(2, 1.1), of(3, 1.0), other, twice], strategy(1));
        let wanted = [strategy(1), strategy(3), once, strategy(2), twice.strategy];
        assert_eq!(list, wanted);
        let next = adjacent_degree(&all, strategy(2), |s| s == strategy(1));
        assert_eq!(next, Some(strategy(4)));
        assert_eq!(adjacent_degree(&all, strategy(2), |_| true), None);
        assert_eq!(adjacent_degree(&all, strategy(3), |_| false), None);
        let many: Vec<PredictedTime> = (1..=20)
            .map(|overlap_degree| of(overlap_degree, 1.0))
            .collect();
        assert_eq!(shortlist(&many, strategy(20)).len(), MOST);
    }
}
