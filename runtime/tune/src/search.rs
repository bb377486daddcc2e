//! Which strategies are tried, in which order.

use crate::measured::Measured;
use moesaic_plan::{Both, Parallel, Route, Strategy};

/// What a strategy is predicted to take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    /// Which.
    pub strategy: Strategy,
    /// Of a step: both passes.
    pub seconds: f64,
}

/// Predictions within this share of the best are measured,
const NEAR: f64 = 0.3;
/// but not more of them than these. A sixth candidate is what they suggest.
const MOST: usize = 5;

/// What is worth a measurement: what is done now, and the best predictions; the simplest of
/// those first. Strategies that differ in pieces and wire alone are predicted too long or too
/// short alike, so that of each kind the simplest of the best ([`Strategy::simplest`]) comes
/// before others of any.
pub fn shortlist(predictions: &[Prediction], current: Strategy) -> Vec<Strategy> {
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

/// Next to what is the fastest so far: the same with half or twice as many pieces, of those that
/// are predicted the one that is predicted less, or the fewer where hardly more. Predictions
/// have the best number of pieces wrong by one step more often than the rest.
pub(crate) fn neighbour(
    predictions: &[Prediction],
    fastest: Strategy,
    measured: impl Fn(Strategy) -> bool,
) -> Option<Strategy> {
    let pieces = |strategy: Strategy| [strategy.degree.forward, strategy.degree.backward];
    let own = pieces(fastest);
    let next = |other: Strategy| {
        let other = pieces(other);
        other == own.map(|n| 2 * n) || other.map(|n| 2 * n) == own
    };
    let mut others: Vec<&Prediction> = predictions.iter().collect();
    others.retain(|p| p.strategy.shared() == fastest.shared() && next(p.strategy));
    others.retain(|p| !measured(p.strategy));
    Strategy::simplest(others.iter().map(|p| (p.strategy, p.seconds)))
}

/// All that Tutel's search chooses from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Space {
    /// Numbers of ways, ascending.
    pub ways: Vec<usize>,
    /// Numbers of pieces.
    pub degrees: Vec<usize>,
    /// Routes.
    pub routes: Vec<Route>,
}

impl Space {
    /// Tutel's: every number of ways that a mesh can have, 1, 2, 4 or 8 pieces, direct or in
    /// two dimensions where ranks lie on several nodes.
    pub fn of(mesh: Parallel, per_node: usize) -> Space {
        let divisors = (1..=mesh.shards).filter(|n| mesh.shards.is_multiple_of(*n));
        let ranks = mesh.group();
        let nodes = ranks.is_multiple_of(per_node.max(1)) && (2..ranks).contains(&per_node);
        Space {
            ways: std::iter::once(0).chain(divisors).collect(),
            degrees: vec![1, 2, 4, 8],
            routes: if nodes {
                vec![Route::Linear, Route::InterFirst]
            } else {
                vec![Route::Linear]
            },
        }
    }

    /// What is measured next, if anything is left: a ternary search over numbers of ways,
    /// each with all degrees and routes, and both ends, since neither 0 nor all ways lie on
    /// the curve of those between.
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

    /// Numbers of ways between the ends.
    fn inner(&self) -> &[usize] {
        let last = self.ways.len().saturating_sub(1);
        let first = usize::from(self.ways.first() == Some(&0)).min(last);
        &self.ways[first..last]
    }

    fn ends(&self) -> Vec<usize> {
        let none = self.ways.first().filter(|ways| **ways == 0);
        none.into_iter().chain(self.ways.last()).copied().collect()
    }

    /// All strategies with a number of ways.
    fn at(&self, ways: usize) -> impl Iterator<Item = Strategy> {
        let routes = self.routes.iter().copied();
        let each = routes.flat_map(|route| self.degrees.iter().map(move |degree| (route, *degree)));
        each.map(move |(route, degree)| Strategy {
            ways: Some(ways),
            degree: Both::same(degree),
            route,
            ..Strategy::default()
        })
    }

    fn missing(&self, points: &[usize], measured: &Measured, wanted: usize) -> Option<Strategy> {
        let all = points.iter().flat_map(|ways| self.at(*ways));
        let mut missing = all.filter(|s| measured.seconds(*s, wanted).is_none());
        missing.next()
    }

    fn cost(&self, ways: usize, measured: &Measured, wanted: usize) -> f64 {
        let seconds = self.at(ways).filter_map(|s| measured.seconds(s, wanted));
        seconds.min_by(f64::total_cmp).unwrap_or(f64::INFINITY)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Times;

    fn space(shards: usize) -> Space {
        let mesh = Parallel {
            shards,
            ..Parallel::default()
        };
        Space::of(mesh, 1)
    }

    /// Runs the search over times that a function gives; how many strategies it tried.
    fn tried(space: &Space, seconds: impl Fn(Strategy) -> f64) -> (usize, Strategy) {
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
    fn of_two_neighbours_the_one_with_fewer_pieces_is_tried_where_it_takes_hardly_more() {
        let next = |seconds: [f64; 3], tried: &str| {
            let texts = ["default", "degree=2", "degree=4"];
            let predictions: Vec<Prediction> = (texts.iter().zip(seconds))
                .map(|(text, seconds)| Prediction {
                    strategy: text.parse().unwrap(),
                    seconds,
                })
                .collect();
            let fastest: Strategy = "degree=2".parse().unwrap();
            neighbour(&predictions, fastest, |s| s.to_string() == tried)
                .map(|s: Strategy| s.to_string())
        };
        assert_eq!(next([1.01, 0.9, 1.0], "").as_deref(), Some("default"));
        assert_eq!(next([1.1, 0.9, 1.0], "").as_deref(), Some("degree=4"));
        assert_eq!(
            next([1.0, 0.9, 1.0], "default").as_deref(),
            Some("degree=4")
        );
    }

    /// The curve of ways is r A + P / r between the ends, and less at both ends.
    #[test]
    fn the_best_is_found_with_few_trials() {
        for shards in [1usize, 2, 6, 16, 64, 256, 1024, 2048] {
            let space = space(shards);
            for best in &space.ways {
                let curve = |s: Strategy| {
                    let ways = s.ways.unwrap_or(0) as f64;
                    let distance = (ways.max(0.5) / (*best as f64).max(0.5)).log2().abs();
                    1.0 + distance + 0.1 * (s.degree.forward as f64 - 4.0).abs()
                };
                let (count, found) = tried(&space, curve);
                assert_eq!(found.ways, Some(*best), "of {shards}");
                assert_eq!(found.degree, Both::same(4));
                // Tutel's bound, with one more point at each end.
                let thirds = (shards as f64).log(1.5).ceil() as usize;
                assert!(count <= (thirds + 3) * 4, "{count} trials of {shards}");
            }
        }
    }

    #[test]
    fn ends_are_tried_although_they_lie_off_the_curve() {
        let space = space(64);
        let curve = |s: Strategy| match s.ways {
            Some(0) => 0.5,
            Some(ways) => 1.0 + ways as f64,
            None => unreachable!("the search names ways"),
        };
        assert_eq!(tried(&space, curve).1.ways, Some(0));
        let curve = |s: Strategy| match s.ways {
            Some(64) => 0.5,
            Some(ways) => 1.0 + ways as f64,
            None => unreachable!("the search names ways"),
        };
        assert_eq!(tried(&space, curve).1.ways, Some(64));
    }

    #[test]
    fn routes_in_two_dimensions_are_for_several_nodes() {
        let mesh = Parallel {
            ep: 16,
            ..Parallel::default()
        };
        assert_eq!(
            Space::of(mesh, 8).routes,
            [Route::Linear, Route::InterFirst]
        );
        for per_node in [0, 1, 3, 16, 32] {
            assert_eq!(
                Space::of(mesh, per_node).routes,
                [Route::Linear],
                "{per_node}"
            );
        }
    }

    #[test]
    fn a_short_list_has_the_best_and_what_is_done_now() {
        let strategy = |degree| Strategy {
            degree: Both::same(degree),
            ..Strategy::default()
        };
        let of = |degree, seconds| Prediction {
            strategy: strategy(degree),
            seconds,
        };
        let all = [of(1, 2.0), of(2, 1.1), of(3, 1.0), of(4, 1.31)];
        let list = shortlist(&all, strategy(1));
        assert_eq!(list, [strategy(1), strategy(3), strategy(2)]);
        assert_eq!(shortlist(&[], strategy(2)), [strategy(2)]);
        // Another route comes before a second number of pieces.
        let once = Strategy {
            route: Route::Once,
            ..strategy(1)
        };
        let other = Prediction {
            strategy: once,
            seconds: 1.2,
        };
        let list = shortlist(&[of(2, 1.1), of(3, 1.0), other], strategy(1));
        assert_eq!(list, [strategy(1), strategy(3), once, strategy(2)]);
        // So does one piece before two that are predicted hardly less.
        let twice = Prediction {
            strategy: Strategy {
                degree: Both::same(2),
                ..once
            },
            seconds: 1.18,
        };
        let list = shortlist(&[of(2, 1.1), of(3, 1.0), other, twice], strategy(1));
        let wanted = [strategy(1), strategy(3), once, strategy(2), twice.strategy];
        assert_eq!(list, wanted);
        let next = neighbour(&all, strategy(2), |s| s == strategy(1));
        assert_eq!(next, Some(strategy(4)));
        assert_eq!(neighbour(&all, strategy(2), |_| true), None);
        assert_eq!(neighbour(&all, strategy(3), |_| false), None);
        let many: Vec<Prediction> = (1..=20).map(|degree| of(degree, 1.0)).collect();
        assert_eq!(shortlist(&many, strategy(20)).len(), MOST);
    }
}
