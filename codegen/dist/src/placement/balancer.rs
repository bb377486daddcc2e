//! The balancer: decides from counts when experts move, alike on every rank.

use super::{Eplb, Placement, PlacementError, balanced};

/// The thresholds of the balancer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Balancing {
    /// The weight of the previous average at each step, from 0 to below 1.
    pub decay: f64,
    /// The fraction by which the busiest rank's load must fall: 0.1 is a tenth.
    pub gain: f64,
    /// The number of consecutive proposals that must reach that gain before experts move.
    pub patience: usize,
    /// Steps without a proposal after a move or the start.
    pub rest: usize,
}

impl Default for Balancing {
    /// Returns the default: averages over about ten steps; moves for a gain of a tenth, seen three
    /// times, at most once in fifty steps.
    fn default() -> Balancing {
        Balancing {
            decay: 0.9,
            gain: 0.1,
            patience: 3,
            rest: 50,
        }
    }
}

/// Tracks the loads of a layer's experts and proposes a better placement. Its decisions depend on
/// the observed counts alone, so ranks that observe the same counts decide alike.
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
    /// Makes a balancer for a layer with `experts` experts.
    pub fn new(experts: usize, eplb: Eplb, options: Balancing) -> Balancer {
        Balancer {
            options,
            eplb,
            average: vec![0.0; experts],
            since: 0,
            seen: 0,
        }
    }

    /// Returns each expert's share of all rows, averaged over steps; zeros before the first step.
    pub fn average(&self) -> &[f64] {
        &self.average
    }

    /// Observes the rows of each expert in one step, summed over all ranks.
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
            0.0 // no average yet: the first step counts in full
        } else {
            self.options.decay
        };
        // Shares instead of counts, because batches differ in size. A step without rows says
        // nothing about the loads.
        for (average, &count) in self.average.iter_mut().zip(counts).filter(|_| all > 0) {
            *average = keep * *average + (1.0 - keep) * count as f64 / all as f64;
        }
        Ok(())
    }

    /// Returns the fraction by which another placement would lower the load of the busiest rank.
    pub fn gain(&self, present: &Placement, other: &Placement) -> f64 {
        let before = present.busiest(&self.average);
        if before > 0.0 {
            1.0 - other.busiest(&self.average) / before
        } else {
            0.0
        }
    }

    /// Proposes another placement, if it has been better for long enough. Call [`Balancer::moved`]
    /// when the experts have moved.
    ///
    /// # Errors
    /// As [`rebalance`](super::rebalance).
    pub fn propose(&mut self, present: &Placement) -> Result<Option<Placement>, PlacementError> {
        // A move exchanges weights and the state of optimizers, so there is a limit to how often,
        // however the loads swing.
        if self.since < self.options.rest {
            return Ok(None);
        }
        let other = balanced(&self.average, &self.eplb, present)?;
        let worth = self.gain(present, &other) > self.options.gain;
        self.seen = if worth { self.seen + 1 } else { 0 };
        // Loads fluctuate from step to step; a move pays only if the gain persists.
        Ok((self.seen >= self.options.patience.max(1) && worth).then_some(other))
    }

    /// Records that experts have moved, or could not: no proposals for a while.
    pub fn moved(&mut self) {
        (self.since, self.seen) = (0, 0);
    }
}
