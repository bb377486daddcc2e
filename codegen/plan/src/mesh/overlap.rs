//! Overlap: passes whose rows are exchanged in chunks, so that the experts multiply one chunk while
//! others are in flight.
//!
//! ```text
//! exchanges   to experts 0, 1, .. d-1         answers 0      1           d-1
//! launches                   experts 0     1         ..           d-1
//! ```
//!
//! A chunk is a part of every rank's rows for every expert, or all rows between some ranks
//! ([`OverlapBy`]). Routing and capacity come before and do not depend on chunks. Every exchange is
//! queued as soon as its rows exist, because that order ends first: all chunks to experts, then the
//! answer of each chunk behind its GEMMs. Shadows, whose rows stay, are multiplied first. Backward
//! goes from the last chunk to the first, because forward used the last one's rows most recently.
//! With [`OverlapBy::Peers`] backward starts with the first chunk, too: its rows are the rank's own
//! and wait for nobody.
//!
//! On the expert part rows are ordered by chunk, then by expert, then by rank. Backward reads rows
//! where forward put them. Where the two degrees differ, GEMMs are therefore launched for the
//! common chunks, of which the chunks of both passes consist ([`Overlap::common`]).

use super::{Both, Exchange, RankPlan, RankStep};
use moesaic_dist::{CollectiveOp, PlanPart};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Range;

/// The rule by which rows are split into chunks.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum OverlapBy {
    /// An equal part of the rows that each rank has for each expert. Every chunk takes as many
    /// messages as an exchange without chunks.
    #[default]
    Rows,
    /// All rows between ranks at some distances: first the rows that a rank has for its own
    /// experts, then those for the next groups of ranks, as in FasterMoE's smart schedule. Every
    /// message belongs to one chunk.
    Peers,
}

/// The overlap of a pass: how many chunks, and what makes one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overlap {
    /// The number of chunks in each pass.
    pub degree: Both<usize>,
    /// The rule by which rows are split, in both passes.
    pub by: OverlapBy,
}

impl Overlap {
    /// Returns the least number of chunks that evenly divides into the chunks of both forward and
    /// backward.
    pub fn common(self) -> usize {
        let Both { forward, backward } = self.degree;
        match self.by {
            OverlapBy::Peers if forward > 1 && backward > 1 => {
                // The first chunk is a rank's own rows however many chunks there are, so only the
                // others have to agree.
                1 + multiple(forward - 1, backward - 1)
            }
            _ => multiple(forward, backward),
        }
    }
}

/// Returns the least common multiple.
fn multiple(of: usize, and: usize) -> usize {
    let (mut a, mut b) = (of, and);
    while b > 0 {
        (a, b) = (b, a % b);
    }
    // Divided first, so that the numbers that a user typed cannot overflow.
    of / a.max(1) * and
}

/// The distance from a rank to an expert: the number of `ep` groups from one to the other, counted
/// upwards and around.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Distance {
    /// The number of groups in between; 0 is the rank's own group.
    pub steps: usize,
    /// The number of groups.
    pub groups: usize,
}

impl Distance {
    /// Returns the distance from one group to another.
    pub fn between(from: usize, to: usize, groups: usize) -> Distance {
        let steps = (to + groups - from) % groups;
        Distance { steps, groups }
    }
}

/// One chunk of an exchange's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Chunk {
    /// The index of the chunk, from 0.
    pub number: usize,
    /// The number of chunks.
    pub of: usize,
    /// The rule by which rows are split.
    pub by: OverlapBy,
}

impl Chunk {
    /// Returns this chunk's range of the `n` rows that a rank has for an expert at a distance. With
    /// [`OverlapBy::Rows`] the range is `[number * n / of, (number + 1) * n / of)`.
    pub fn rows(&self, n: usize, distance: Distance) -> Range<usize> {
        match self.by {
            OverlapBy::Rows => self.part(n),
            OverlapBy::Peers if self.distances(distance.groups).contains(&distance.steps) => 0..n,
            OverlapBy::Peers => 0..0,
        }
    }

    /// Returns the distances whose rows this chunk has with [`OverlapBy::Peers`], among `groups`
    /// groups. The first chunk has distance 0 alone; the others share the rest as evenly as
    /// possible.
    pub fn distances(&self, groups: usize) -> Range<usize> {
        self.behind_first(groups)
    }

    /// Returns the indices of the common chunks that this chunk consists of, among `units` in all
    /// ([`Overlap::common`]).
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

    /// Returns this chunk's range of `n` items when the first chunk takes the first item alone and
    /// the others split the rest.
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
    /// Returns the same passes with rows in chunks; with one chunk the plan itself.
    #[must_use]
    pub fn in_chunks(&self, chunks: Overlap) -> RankPlan {
        let Overlap { degree, by } = chunks;
        let (forward, backward, common) = (degree.forward, degree.backward, chunks.common());
        // Forward lays rows out for backward as well, so a pass that trains launches for the common
        // chunks. An evaluation has no backward pass to agree with.
        let launched = match self.tokens.training {
            Some(_) => common,
            None => forward, // there is no backward pass
        };
        let backwards = match by {
            OverlapBy::Rows => Order::Down,
            // The first chunk by peers is the rank's own rows, which need no exchange, in either
            // direction.
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

    /// Returns the number of chunks for which a pass launches the experts' GEMMs.
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

/// The steps of a pass that depend on a chunk of rows: sends, GEMMs, sums, answers.
#[derive(Default)]
struct RowSteps {
    sends: Vec<Exchange>,
    /// Steps that run while rows are in flight: those of shadows.
    meanwhile: Vec<RankStep>,
    launches: Vec<usize>,
    /// Sums over expert tensor-parallel shards.
    sums: Vec<Exchange>,
    answers: Vec<Exchange>,
    /// The index in the remaining steps where these steps go.
    first: usize,
}

impl RowSteps {
    /// Splits a pass into its row steps and the remaining steps.
    fn of(steps: &[RankStep]) -> (RowSteps, Vec<RankStep>) {
        let (mut row_steps, mut left) = (RowSteps::default(), Vec::new());
        row_steps.first = usize::MAX;
        for step in steps {
            match step {
                RankStep::Launch {
                    part: PlanPart::Experts,
                    step,
                    ..
                } => row_steps.launches.push(*step),
                RankStep::Launch {
                    part: PlanPart::Shadows,
                    ..
                } => row_steps.meanwhile.push(step.clone()),
                RankStep::Exchange(exchange) => match exchange.op {
                    CollectiveOp::ReturnShadowRows => row_steps.meanwhile.push(step.clone()),
                    CollectiveOp::Dispatch => {
                        row_steps.first = row_steps.first.min(left.len());
                        row_steps.sends.push(exchange.clone());
                    }
                    CollectiveOp::AllReduceTp => row_steps.sums.push(exchange.clone()),
                    CollectiveOp::Combine => row_steps.answers.push(exchange.clone()),
                    _ => left.push(step.clone()),
                },
                RankStep::Launch { .. } => left.push(step.clone()),
            }
        }
        row_steps.first = row_steps.first.min(left.len());
        (row_steps, left)
    }
}

/// The order in which a pass goes through its chunks.
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

/// Returns a pass whose exchanges have `of` chunks and whose GEMMs are launched for `launched`.
fn in_chunks(
    steps: &[RankStep],
    (of, launched): (usize, usize),
    (by, order): (OverlapBy, Order),
) -> Vec<RankStep> {
    let chunk = |number: usize, of: usize| Chunk { number, of, by };
    if launched == 1 || steps.is_empty() {
        return steps.to_vec();
    }
    let (row_steps, mut list) = RowSteps::of(steps);
    let numbers = order.walk(0..of);
    let after = list.split_off(row_steps.first);
    let exchange = |exchanges: &[Exchange], number: usize| -> Vec<RankStep> {
        let of_chunk = |exchange: &Exchange| Exchange {
            // An exchange as a whole has no chunk, even where the other pass's chunks are launched:
            // it waits for nothing to overlap with.
            chunk: (of > 1).then_some(chunk(number, of)),
            ..exchange.clone()
        };
        let exchanges = exchanges.iter().map(of_chunk);
        exchanges.map(RankStep::Exchange).collect()
    };
    for &number in &numbers {
        list.extend(exchange(&row_steps.sends, number));
    }
    // Shadows have their rows already, so they fill the time in which the first chunk travels.
    list.extend(row_steps.meanwhile);
    // The answer of a chunk waits for the sum over its shards. Queueing that answer one chunk later
    // lets the sum run while the next chunk is multiplied.
    let mut summed = None;
    for &number in &numbers {
        let units = order.walk(chunk(number, of).units(launched));
        let units = units.into_iter().map(|number| chunk(number, launched));
        list.extend(launches(&row_steps.launches, units));
        if let Some(before) = summed.take() {
            list.extend(exchange(&row_steps.answers, before));
        }
        list.extend(exchange(&row_steps.sums, number));
        if row_steps.sums.is_empty() {
            list.extend(exchange(&row_steps.answers, number))
        } else {
            summed = Some(number)
        }
    }
    if let Some(last) = summed {
        list.extend(exchange(&row_steps.answers, last));
    }
    list.extend(after);
    list
}

/// Returns the GEMM launches of some chunks.
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

    /// Checks that every distance is in one chunk and that the chunks of both passes consist of
    /// common ones.
    #[test]
    fn chunks_by_peers_have_every_distance_once_and_nest() {
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
