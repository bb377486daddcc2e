//! When the parts of a pass in pieces begin and end, by a model, and how many pieces end first.
//!
//! Two resources, each of which does one thing at a time in the order of
//! [`RankPlan::in_pieces`](super::RankPlan::in_pieces): exchanges, and products.

use super::MOST_PIECES;
use std::ops::Range;

/// How long the parts of a pass take, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PieceTimes {
    /// What an exchange takes whatever its size: α of each message's start, times messages.
    pub exchange_start: f64,
    /// What the rows of all pieces take in one direction.
    pub transfer: f64,
    /// What the launches of a piece take whatever its rows, and what is lost in tiles that
    /// are not full.
    pub launch: f64,
    /// What the products of all pieces take.
    pub compute: f64,
}

/// When something begins and ends, in seconds from the first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// When it begins.
    pub begin: f64,
    /// When it ends.
    pub end: f64,
}

/// When rows of each of `degree` pieces go, are multiplied, and come back.
pub fn timeline(times: &PieceTimes, degree: usize) -> Vec<[Span; 3]> {
    let pieces = degree.max(1);
    let exchange = times.exchange_start + times.transfer / pieces as f64;
    let compute = times.launch + times.compute / pieces as f64;
    let after = |free: &mut f64, ready: f64, lasts: f64| {
        let begin = free.max(ready);
        *free = begin + lasts;
        Span { begin, end: *free }
    };
    let (mut wire, mut cores) = (0.0, 0.0);
    let sent: Vec<Span> = (0..pieces)
        .map(|_| after(&mut wire, 0.0, exchange))
        .collect();
    let piece = |sent: Span| {
        let multiplied = after(&mut cores, sent.end, compute);
        let answered = after(&mut wire, multiplied.end, exchange);
        [sent, multiplied, answered]
    };
    sent.into_iter().map(piece).collect()
}

impl PieceTimes {
    /// When the last piece is back, in seconds.
    pub fn total(&self, degree: usize) -> f64 {
        let pieces = timeline(self, degree);
        pieces.last().map_or(0.0, |[.., answered]| answered.end)
    }

    /// The number of pieces of the least total where exchanges never rest but at the end: of
    /// `2·d·α + 2·A + F/d` that is `sqrt(F / 2α)`. Of [`timeline`] it is a bound from above:
    /// there the last products run beside answers of pieces before.
    pub fn bound_by_exchange(&self) -> f64 {
        (self.compute / (2.0 * self.exchange_start)).sqrt()
    }

    /// The same where products never rest: of `2·A/d + d·λ + F` that is `sqrt(2·A / λ)`.
    pub fn bound_by_compute(&self) -> f64 {
        (2.0 * self.transfer / self.launch).sqrt()
    }
}

/// The number of pieces among `degrees`, none of them above [`MOST_PIECES`], that ends first;
/// the least of equals. The range must have one.
pub fn best_degree(times: &PieceTimes, degrees: Range<usize>) -> usize {
    let degrees = degrees.start.max(1)..degrees.end.min(MOST_PIECES + 1);
    let first = degrees.start;
    degrees.fold(first, |best, degree| {
        match times.total(degree) < times.total(best) {
            true => degree,
            false => best,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(exchange_start: f64, transfer: f64, launch: f64, compute: f64) -> PieceTimes {
        PieceTimes {
            exchange_start,
            transfer,
            launch,
            compute,
        }
    }

    #[test]
    fn one_piece_is_one_after_the_other() {
        let times = times(1.0, 10.0, 0.5, 20.0);
        assert_eq!(times.total(1), 2.0 * 11.0 + 20.5);
    }

    /// A twin that moves through time in small steps, with the rules and no formula.
    fn stepped(times: &PieceTimes, degree: usize) -> f64 {
        let each = 1e-2;
        let ticks = |seconds: f64| (seconds / each).round() as usize;
        let exchange = ticks(times.exchange_start + times.transfer / degree as f64);
        let compute = ticks(times.launch + times.compute / degree as f64);
        let (mut sent, mut multiplied, mut answered) = (0, 0, 0);
        let (mut wire, mut cores, mut now) = (None, None, 0);
        while answered < degree {
            if wire.is_none() && sent < degree {
                wire = Some((now + exchange, true));
            } else if wire.is_none() && answered < multiplied {
                wire = Some((now + exchange, false));
            }
            if cores.is_none() && multiplied < sent {
                cores = Some(now + compute);
            }
            now += 1;
            if let Some((end, goes)) = wire.filter(|(end, _)| *end <= now) {
                let _ = end;
                match goes {
                    true => sent += 1,
                    false => answered += 1,
                }
                wire = None;
            }
            if cores.is_some_and(|end| end <= now) {
                multiplied += 1;
                cores = None;
            }
        }
        now as f64 * each
    }

    #[test]
    fn the_timeline_is_that_of_a_twin_in_small_steps() {
        for (start, transfer, launch, compute) in [
            (0.1, 8.0, 0.1, 16.0),
            (0.5, 16.0, 0.1, 8.0),
            (1.0, 12.0, 1.0, 12.0),
            (0.1, 0.5, 0.1, 24.0),
            (0.3, 24.0, 0.2, 0.5),
        ] {
            let times = times(start, transfer, launch, compute);
            for degree in [1, 2, 4, 5, 8] {
                let (found, want) = (times.total(degree), stepped(&times, degree));
                // A part of a tick for each of 3d parts, and a tick for the order of starts.
                let off = (found - want).abs();
                assert!(
                    off < 0.03 * (degree + 1) as f64,
                    "{times:?} in {degree}: {found}, {want}"
                );
            }
        }
    }

    #[test]
    fn the_closed_forms_find_the_best_where_one_resource_never_rests() {
        let wire = times(0.02, 100.0, 0.0, 10.0);
        let best = best_degree(&wire, 1..65);
        let closed = wire.bound_by_exchange();
        let formula = 2.0 * closed * 0.02 + 200.0 + 10.0 / closed;
        assert!(best as f64 <= closed.ceil(), "{best}, {closed}");
        assert!(wire.total(best) <= formula);
        let cores = times(0.0, 10.0, 0.2, 100.0);
        let best = best_degree(&cores, 1..65);
        let closed = cores.bound_by_compute();
        assert!((best as f64 - closed).abs() <= 1.0, "{best}, {closed}");
    }

    #[test]
    fn pieces_do_not_pay_where_starts_cost_all() {
        assert_eq!(best_degree(&times(5.0, 1.0, 1.0, 1.0), 1..9), 1);
        assert!(best_degree(&times(0.01, 5.0, 0.01, 10.0), 1..9) > 4);
    }
}
