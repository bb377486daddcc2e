//! Passes whose rows travel in chunks, so that one is multiplied while others are under way.
//!
//! ```text
//! exchanges   to experts 0, 1, .. d-1         answers 0      1           d-1
//! launches                   experts 0     1         ..           d-1
//! ```
//!
//! A chunk has a part of the rows of every rank for every expert, or all rows of some ranks
//! ([`OverlapBy`]), so that routing and capacity are as without chunks. Exchanges are queued as
//! soon as their rows exist, the order that ends first: all rows to experts, then the answer
//! of each chunk behind its products. Shadows, whose rows stay, are multiplied first.
//! Backward walks the chunks from the last to the first, whose rows were used last; where
//! the first are a rank's own rows, which wait for nobody, it begins with them, too.
//!
//! Rows lie at their experts by chunk, then by expert, then by rank. Backward reads them
//! where forward has put them, so that with other numbers of chunks in both, products are
//! launched for the chunks that both consist of ([`Overlap::common`]).

use super::{Both, CollectiveOp, Exchange, PlanPart, RankPlan, RankStep};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Range;

/// What makes a chunk.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum OverlapBy {
    /// An equal part of the rows that each rank has for each expert: as many messages in
    /// every chunk as there are without chunks.
    #[default]
    Rows,
    /// All rows between ranks of some distances: first those that a rank has for itself,
    /// then those for the next ranks, as in FasterMoE's schedule. Every message is in one
    /// chunk.
    Peers,
}

/// In how many chunks rows travel, and what makes one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overlap {
    /// How many in each pass.
    pub degree: Both<usize>,
    /// Of both passes.
    pub by: OverlapBy,
}

impl Overlap {
    /// The least number of chunks of which both a chunk in forward and one in backward
    /// consist.
    pub fn common(self) -> usize {
        let Both { forward, backward } = self.degree;
        match self.by {
            OverlapBy::Peers if forward > 1 && backward > 1 => {
                1 + multiple(forward - 1, backward - 1)
            }
            _ => multiple(forward, backward),
        }
    }
}

/// The least common multiple.
fn multiple(of: usize, and: usize) -> usize {
    let (mut a, mut b) = (of, and);
    while b > 0 {
        (a, b) = (b, a % b);
    }
    of / a.max(1) * and
}

/// How far it is from a rank to an expert: groups of ranks (`ep` of the mesh) that lie
/// between them, counted upwards and around.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Distance {
    /// 0 is the rank's own group.
    pub steps: usize,
    /// How many groups there are.
    pub groups: usize,
}

impl Distance {
    /// From one group to another.
    pub fn between(from: usize, to: usize, groups: usize) -> Distance {
        let steps = (to + groups - from) % groups;
        Distance { steps, groups }
    }
}

/// A part of the rows that ranks have for experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Chunk {
    /// From 0.
    pub number: usize,
    /// How many chunks there are.
    pub of: usize,
    /// What makes one.
    pub by: OverlapBy,
}

impl Chunk {
    /// Its part of the `n` rows that a rank has for an expert at a distance. By
    /// [`OverlapBy::Rows`] these are `[number * n / of, (number + 1) * n / of)`.
    pub fn rows(&self, n: usize, distance: Distance) -> Range<usize> {
        match self.by {
            OverlapBy::Rows => self.part(n),
            OverlapBy::Peers if self.distances(distance.groups).contains(&distance.steps) => 0..n,
            OverlapBy::Peers => 0..0,
        }
    }

    /// The distances whose rows it has by [`OverlapBy::Peers`], of so many groups: 0 alone is the
    /// first chunk, and the others have equally many as nearly as can be.
    pub fn distances(&self, groups: usize) -> Range<usize> {
        self.behind_first(groups)
    }

    /// The numbers of the chunks that it consists of, where there are `units` in all:
    /// [`Overlap::common`] of its own number and another.
    pub fn units(&self, units: usize) -> Range<usize> {
        match self.by {
            OverlapBy::Rows => self.part(units),
            OverlapBy::Peers => self.behind_first(units),
        }
    }

    fn part(&self, n: usize) -> Range<usize> {
        let edge = |number: usize| (number as u128 * n as u128 / self.of as u128) as usize;
        edge(self.number)..edge(self.number + 1)
    }

    /// The first of `n` is a chunk, and the others are cut into the chunks that are left.
    fn behind_first(&self, n: usize) -> Range<usize> {
        match (self.number, self.of) {
            (_, 1) => 0..n,
            (0, _) => 0..1,
            (number, of) => {
                let edge = |number: usize| 1 + number * n.saturating_sub(1) / (of - 1);
                edge(number - 1)..edge(number)
            }
        }
    }
}

impl fmt::Display for Chunk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.number + 1, self.of)
    }
}

impl RankPlan {
    /// The same passes with rows that travel in chunks; with one chunk the plan itself.
    #[must_use]
    pub fn in_chunks(&self, chunks: Overlap) -> RankPlan {
        let Overlap { degree, by } = chunks;
        let (forward, backward, common) = (degree.forward, degree.backward, chunks.common());
        let launched = match self.tokens.training {
            Some(_) => common,
            None => forward, // there is no backward pass
        };
        let backwards = match by {
            OverlapBy::Rows => Order::Down,
            OverlapBy::Peers => Order::Up,
        };
        let of = |steps: &[RankStep], of: usize, launched: usize, order: Order| {
            in_chunks(steps, (of, launched), (by, order))
        };
        RankPlan {
            steps: of(&self.steps, forward, launched, Order::Up),
            evaluation: of(&self.evaluation, forward, forward, Order::Up),
            backward: of(&self.backward, backward, common, backwards),
            ..self.clone()
        }
    }

    /// The number of chunks for which a pass launches the experts' products.
    pub fn launched_chunks(steps: &[RankStep]) -> usize {
        let launched = |step: &RankStep| match step {
            RankStep::Launch {
                part: PlanPart::Experts,
                chunk,
                ..
            } => chunk.map(|chunk| chunk.of),
            _ => None,
        };
        steps.iter().find_map(launched).unwrap_or(1)
    }
}

/// What is done with rows at their experts, and how they come and go.
#[derive(Default)]
struct Travel {
    sends: Vec<Exchange>,
    /// What is done while rows travel: products of shadows.
    meanwhile: Vec<RankStep>,
    launches: Vec<usize>,
    /// Sums over shards.
    sums: Vec<Exchange>,
    answers: Vec<Exchange>,
    /// Where the first of it is in the list of steps.
    first: usize,
}

impl Travel {
    /// Takes it out of a pass; the steps that are left.
    fn of(steps: &[RankStep]) -> (Travel, Vec<RankStep>) {
        let (mut travel, mut left) = (Travel::default(), Vec::new());
        travel.first = usize::MAX;
        for step in steps {
            match step {
                RankStep::Launch {
                    part: PlanPart::Experts,
                    step,
                    ..
                } => travel.launches.push(*step),
                RankStep::Launch {
                    part: PlanPart::Shadows,
                    ..
                } => travel.meanwhile.push(step.clone()),
                RankStep::Exchange(exchange) => match exchange.op {
                    CollectiveOp::ReturnShadowRows { .. } => travel.meanwhile.push(step.clone()),
                    CollectiveOp::Dispatch { .. } => {
                        travel.first = travel.first.min(left.len());
                        travel.sends.push(exchange.clone());
                    }
                    CollectiveOp::AllReduceTp { .. } => travel.sums.push(exchange.clone()),
                    CollectiveOp::Combine { .. } => travel.answers.push(exchange.clone()),
                    _ => left.push(step.clone()),
                },
                RankStep::Launch { .. } => left.push(step.clone()),
            }
        }
        travel.first = travel.first.min(left.len());
        (travel, left)
    }
}

/// From which end chunks are walked.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    Up,
    Down,
}

impl Order {
    fn walk(self, numbers: Range<usize>) -> Vec<usize> {
        match self {
            Order::Up => numbers.collect(),
            Order::Down => numbers.rev().collect(),
        }
    }
}

/// A pass whose exchanges are in `of` chunks, and whose products are launched for `launched`.
fn in_chunks(
    steps: &[RankStep],
    (of, launched): (usize, usize),
    (by, order): (OverlapBy, Order),
) -> Vec<RankStep> {
    let chunk = |number: usize, of: usize| Chunk { number, of, by };
    if launched == 1 || steps.is_empty() {
        return steps.to_vec();
    }
    let (travel, mut list) = Travel::of(steps);
    let numbers = order.walk(0..of);
    let after = list.split_off(travel.first);
    let exchange = |exchanges: &[Exchange], number: usize| -> Vec<RankStep> {
        let of_chunk = |exchange: &Exchange| Exchange {
            chunk: (of > 1).then_some(chunk(number, of)),
            ..exchange.clone()
        };
        let exchanges = exchanges.iter().map(of_chunk);
        exchanges.map(RankStep::Exchange).collect()
    };
    for &number in &numbers {
        list.extend(exchange(&travel.sends, number));
    }
    list.extend(travel.meanwhile);
    // What shards have to sum is answered one chunk later, while the next is multiplied.
    let mut summed = None;
    for &number in &numbers {
        let units = order.walk(chunk(number, of).units(launched));
        let units = units.into_iter().map(|number| chunk(number, launched));
        list.extend(launches(&travel.launches, units));
        if let Some(before) = summed.take() {
            list.extend(exchange(&travel.answers, before));
        }
        list.extend(exchange(&travel.sums, number));
        if travel.sums.is_empty() {
            list.extend(exchange(&travel.answers, number))
        } else {
            summed = Some(number)
        }
    }
    if let Some(last) = summed {
        list.extend(exchange(&travel.answers, last));
    }
    list.extend(after);
    list
}

/// The products of some chunks.
fn launches(steps: &[usize], chunks: impl Iterator<Item = Chunk>) -> Vec<RankStep> {
    let launch = |chunk: Chunk| {
        steps.iter().map(move |&step| RankStep::Launch {
            part: PlanPart::Experts,
            step,
            chunk: Some(chunk),
        })
    };
    chunks.flat_map(launch).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every distance is in one chunk, and chunks of both passes are made of common ones.
    #[test]
    fn pieces_by_ranks_have_every_distance_once_and_nest() {
        for (forward, backward) in [(1, 1), (1, 4), (2, 2), (2, 4), (3, 4), (8, 2), (5, 3)] {
            let degree = Both { forward, backward };
            let by = OverlapBy::Peers;
            let common = Overlap { degree, by }.common();
            for groups in [1, 2, 3, 7, 16] {
                let distances = |number, of| Chunk { number, of, by }.distances(groups);
                for of in [forward, backward] {
                    let all: Vec<usize> = (0..of).flat_map(|n| distances(n, of)).collect();
                    assert!(all.into_iter().eq(0..groups), "{of} chunks of {groups}");
                    for number in 0..of {
                        let units = Chunk { number, of, by }.units(common);
                        let parts = units.flat_map(|unit| distances(unit, common));
                        assert!(parts.eq(distances(number, of)));
                    }
                }
            }
        }
    }

    #[test]
    fn distances_are_counted_upwards_and_around() {
        let steps = |from, to| Distance::between(from, to, 4).steps;
        assert_eq!((steps(1, 1), steps(3, 0), steps(0, 3)), (0, 1, 3));
        let own = Chunk {
            number: 0,
            of: 3,
            by: OverlapBy::Peers,
        };
        let rows = |chunk: Chunk, to| chunk.rows(10, Distance::between(1, to, 4));
        assert_eq!((rows(own, 1), rows(own, 2)), (0..10, 0..0));
        let far = Chunk { number: 2, ..own };
        assert_eq!(
            (rows(far, 1), rows(far, 2), rows(far, 0)),
            (0..0, 0..0, 0..10)
        );
    }
}
