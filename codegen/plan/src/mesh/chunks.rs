//! Passes whose rows are exchanged in chunks, so that the experts multiply one chunk while
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

use super::{Exchange, RankPlan, RankStep};
use moesaic_dist::{Chunk, CollectiveOp, Overlap, OverlapBy, PlanPart};
use std::ops::Range;

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
