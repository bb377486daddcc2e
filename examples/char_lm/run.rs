//! Training of one model: pace, steps and reports.

use super::common::feed_forward::FeedForward;
use super::common::ops::Module;
use super::common::optimizer;
use super::model::Model;
use super::text::Batch;
use moesaic::EngineError;
use moesaic::train::AdamW;
use std::error::Error;
use std::time::{Duration, Instant};

/// The length of a run, and its sizes.
#[derive(Clone)]
pub struct Pace {
    /// Optimizer steps.
    pub steps: usize,
    /// Sequences per batch.
    pub sequences: usize,
    /// Steps between reports.
    pub report: usize,
    /// Held-out sequences per report.
    pub held_out: usize,
    /// Whether the run is long enough to decide which model is better.
    pub judged: bool,
}

const PEAK_RATE: f32 = 2e-3;
const WARM_UP: usize = 50;

impl Pace {
    /// Returns a run of a few minutes on two cores.
    pub fn full() -> Pace {
        Pace {
            steps: 800,
            sequences: 16,
            report: 50,
            held_out: 32,
            judged: true,
        }
    }

    /// Returns a run of seconds, to see that everything works.
    pub fn quick() -> Pace {
        Pace {
            steps: 4,
            sequences: 2,
            report: 2,
            held_out: 2,
            judged: false,
        }
    }

    /// Sets the number of steps, with about twenty reports.
    pub fn with_steps(self, steps: usize) -> Pace {
        Pace {
            report: (steps / 20).clamp(1, 50),
            judged: steps >= 300,
            steps,
            ..self
        }
    }

    /// Returns the learning rate: a linear warm-up, then a cosine down to a tenth.
    pub fn rate(&self, step: usize) -> f32 {
        let warm = (step as f32 / WARM_UP as f32).min(1.0);
        let turn = std::f32::consts::PI * step as f32 / self.steps as f32;
        PEAK_RATE * warm * (0.55 + 0.45 * turn.cos())
    }
}

/// A model in training.
pub struct Learner<F> {
    model: Model<F>,
    optimizer: AdamW,
    pace: Pace,
    step: usize,
    /// The sum of the training losses since the last report.
    sum: f64,
    since: usize,
    time: Duration,
}

/// The numbers of one report.
#[derive(Clone, Copy)]
pub struct Point {
    /// Steps done.
    pub step: usize,
    /// Mean loss of the batches since the last report.
    pub training: f64,
    /// The loss on text that is never trained on.
    pub held_out: f64,
    /// The time spent in steps.
    pub seconds: f64,
}

impl<F: FeedForward> Learner<F> {
    /// Returns the state before the first step.
    pub fn new(model: Model<F>, pace: &Pace) -> Learner<F> {
        Learner {
            model,
            optimizer: optimizer::adamw(0.01),
            pace: pace.clone(),
            step: 0,
            sum: 0.0,
            since: 0,
            time: Duration::ZERO,
        }
    }

    /// Returns the number of learned numbers.
    pub fn parameters(&mut self) -> usize {
        let mut count = 0;
        self.model
            .params("", &mut |_, param| count += param.value.len());
        count
    }

    /// Takes one optimizer step.
    pub fn step(&mut self, batch: &Batch) -> Result<(), Box<dyn Error>> {
        let start = Instant::now();
        self.sum += self.model.gradients(batch)?;
        self.step += 1;
        self.since += 1;
        let rate = self.pace.rate(self.step);
        optimizer::step(&mut self.optimizer, &mut self.model, rate)?;
        self.time += start.elapsed();
        Ok(())
    }

    /// Returns the numbers of a report.
    pub fn report(&mut self, held_out: &Batch) -> Result<Point, EngineError> {
        let training = self.sum / self.since as f64;
        (self.sum, self.since) = (0.0, 0);
        Ok(Point {
            step: self.step,
            training,
            held_out: self.model.loss(held_out)?,
            seconds: self.time.as_secs_f64(),
        })
    }
}
