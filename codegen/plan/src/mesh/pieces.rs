//! Passes whose rows travel in pieces, so that one is multiplied while others are under way.
//!
//! ```text
//! exchanges   to experts 0, 1, .. d-1         answers 0      1           d-1
//! launches                   experts 0     1         ..           d-1
//! ```
//!
//! A piece has a part of the rows of every rank for every expert, so that routing and
//! capacity are as without pieces. Exchanges are queued as soon as their rows exist, the
//! order that ends first: all rows to experts, then the answer of each piece behind its
//! products. Backward walks the pieces from the last to the first, whose rows were used last.
//!
//! Rows lie at their experts by piece, then by expert, then by rank. Backward reads them
//! where forward has put them, so that with other numbers of pieces in both, products are
//! launched for the pieces that both consist of ([`Both::common`]).

use super::{Both, Exchange, RankPlan, RankStep, Side, Way};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Range;

/// A part of the rows that each rank has for each expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Piece {
    /// From 0.
    pub number: usize,
    /// How many pieces there are.
    pub of: usize,
}

impl Piece {
    /// Its rows of `n` rows: `[number * n / of, (number + 1) * n / of)`.
    pub fn rows(&self, n: usize) -> Range<usize> {
        let edge = |number: usize| (number as u128 * n as u128 / self.of as u128) as usize;
        edge(self.number)..edge(self.number + 1)
    }

    /// The numbers of the pieces that it consists of, where there are `units` in all, a
    /// multiple of its own number.
    pub fn units(&self, units: usize) -> Range<usize> {
        self.rows(units)
    }
}

impl fmt::Display for Piece {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.number + 1, self.of)
    }
}

impl RankPlan {
    /// The same passes with rows that travel in `degree` pieces; with one piece the plan
    /// itself.
    #[must_use]
    pub fn in_pieces(&self, degree: Both<usize>) -> RankPlan {
        let (forward, backward, common) = (degree.forward, degree.backward, degree.common());
        let launched = match self.tokens.training {
            Some(_) => common,
            None => forward, // there is no backward pass
        };
        RankPlan {
            steps: pieces(&self.steps, forward, launched, Order::Up),
            evaluation: pieces(&self.evaluation, forward, forward, Order::Up),
            backward: pieces(&self.backward, backward, common, Order::Down),
            ..self.clone()
        }
    }

    /// The number of pieces for which a pass launches the experts' products.
    pub fn launched_pieces(steps: &[RankStep]) -> usize {
        let launched = |step: &RankStep| match step {
            RankStep::Launch {
                side: Side::Experts,
                piece,
                ..
            } => piece.map(|piece| piece.of),
            _ => None,
        };
        steps.iter().find_map(launched).unwrap_or(1)
    }
}

/// What is done with rows at their experts, and how they come and go.
#[derive(Default)]
struct Travel {
    sends: Vec<Exchange>,
    launches: Vec<usize>,
    /// Sums over slices.
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
                    side: Side::Experts,
                    step,
                    ..
                } => travel.launches.push(*step),
                RankStep::Exchange(exchange) => match exchange.way {
                    Way::ToExperts { .. } => {
                        travel.first = travel.first.min(left.len());
                        travel.sends.push(exchange.clone());
                    }
                    Way::OverShards { .. } => travel.sums.push(exchange.clone()),
                    Way::ToTokens { .. } => travel.answers.push(exchange.clone()),
                    _ => left.push(step.clone()),
                },
                RankStep::Launch { .. } => left.push(step.clone()),
            }
        }
        travel.first = travel.first.min(left.len());
        (travel, left)
    }
}

/// From which end pieces are walked.
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

/// A pass whose exchanges are in `of` pieces, and whose products are launched for `launched`.
fn pieces(steps: &[RankStep], of: usize, launched: usize, order: Order) -> Vec<RankStep> {
    if launched == 1 || steps.is_empty() {
        return steps.to_vec();
    }
    let (travel, mut list) = Travel::of(steps);
    let numbers = order.walk(0..of);
    let after = list.split_off(travel.first);
    let exchange = |exchanges: &[Exchange], number: usize| -> Vec<RankStep> {
        let piece = (of > 1).then_some(Piece { number, of });
        let of_piece = |exchange: &Exchange| Exchange {
            piece,
            ..exchange.clone()
        };
        let exchanges = exchanges.iter().map(of_piece);
        exchanges.map(RankStep::Exchange).collect()
    };
    for &number in &numbers {
        list.extend(exchange(&travel.sends, number));
    }
    // What slices have to sum is answered one piece later, while the next is multiplied.
    let mut summed = None;
    for &number in &numbers {
        let units = order.walk(Piece { number, of }.units(launched));
        list.extend(launches(&travel.launches, units, launched));
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

/// The products of pieces of these numbers.
fn launches(steps: &[usize], numbers: Vec<usize>, of: usize) -> Vec<RankStep> {
    let launch = |number: usize| {
        steps.iter().map(move |&step| RankStep::Launch {
            side: Side::Experts,
            step,
            piece: Some(Piece { number, of }),
        })
    };
    numbers.into_iter().flat_map(launch).collect()
}
