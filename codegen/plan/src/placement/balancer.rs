//! When experts move: decided from counts, alike on every rank.

use super::{Eplb, Placement, PlacementError, balanced};

/// How easily experts move.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Balancing {
    /// What a step leaves of the average before it, from 0 to below 1.
    pub decay: f64,
    /// By how much the busiest rank's load must fall: 0.1 is a tenth.
    pub gain: f64,
    /// In how many proposals in a row it must, before experts move.
    pub patience: usize,
    /// Steps after a move, or from the start, in which none is proposed.
    pub rest: usize,
}

impl Default for Balancing {
    /// Averages over about ten steps, moves for a tenth, seen three times, at most once in
    /// fifty steps.
    fn default() -> Balancing {
        Balancing {
            decay: 0.9,
            gain: 0.1,
            patience: 3,
            rest: 50,
        }
    }
}

/// Follows the loads of a layer's experts and says when another placement is worth it. A
/// function of what it was told, so that ranks that are told the same numbers decide alike.
#[derive(Clone, Debug, PartialEq)]
pub struct Balancer {
    options: Balancing,
    eplb: Eplb,
    average: Vec<f64>,
    /// Steps since the last move.
    since: usize,
    /// Proposals in a row that were worth it.
    seen: usize,
}

impl Balancer {
    /// Of a layer of so many experts.
    pub fn new(experts: usize, eplb: Eplb, options: Balancing) -> Balancer {
        Balancer {
            options,
            eplb,
            average: vec![0.0; experts],
            since: 0,
            seen: 0,
        }
    }

    /// The share that each expert has of all rows, averaged over steps; zeros before the
    /// first one.
    pub fn average(&self) -> &[f64] {
        &self.average
    }

    /// Takes in the rows of a step for each expert, of all ranks together.
    ///
    /// # Errors
    /// [`PlacementError::Packing`] for another number of experts, or a negative count.
    pub fn observe(&mut self, counts: &[i64]) -> Result<(), PlacementError> {
        if counts.len() != self.average.len() || counts.iter().any(|count| *count < 0) {
            let (found, wanted) = (counts.len(), self.average.len());
            let message = format!("{found} counts, some negative perhaps, of {wanted} experts");
            return Err(PlacementError::Packing(message));
        }
        self.since += 1;
        let all: i64 = counts.iter().sum();
        let keep = if self.average.iter().all(|share| *share == 0.0) {
            0.0 // the first is no worse than any other
        } else {
            self.options.decay
        };
        for (average, &count) in self.average.iter_mut().zip(counts).filter(|_| all > 0) {
            *average = keep * *average + (1.0 - keep) * count as f64 / all as f64;
        }
        Ok(())
    }

    /// By how much another placement would lower the load of the busiest rank, from 0 on.
    pub fn gain(&self, present: &Placement, other: &Placement) -> f64 {
        let before = present.busiest(&self.average);
        if before > 0.0 {
            1.0 - other.busiest(&self.average) / before
        } else {
            0.0
        }
    }

    /// Another placement, if it has been worth it for long enough. Who moves the experts
    /// then says so: [`Balancer::moved`].
    ///
    /// # Errors
    /// As [`rebalance`](super::rebalance).
    pub fn propose(&mut self, present: &Placement) -> Result<Option<Placement>, PlacementError> {
        if self.since < self.options.rest {
            return Ok(None);
        }
        let other = balanced(&self.average, &self.eplb, present)?;
        let worth = self.gain(present, &other) > self.options.gain;
        self.seen = if worth { self.seen + 1 } else { 0 };
        Ok((self.seen >= self.options.patience.max(1) && worth).then_some(other))
    }

    /// Experts have moved, or could not: rests.
    pub fn moved(&mut self) {
        (self.since, self.seen) = (0, 0);
    }
}
