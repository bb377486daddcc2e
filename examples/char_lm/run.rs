//! Training one model: pace, steps, and what is reported.

use super::common::feed_forward::FeedForward;
use super::common::ops::Module;
use super::common::optimizer;
use super::model::Model;
use super::text::Batch;
use moesaic::EngineError;
use moesaic::train::AdamW;
use std::error::Error;
use std::time::{Duration, Instant};

/// How long and how much at a time.
#[derive(Clone)]
pub struct Pace {
    /// Optimizer steps.
    pub steps: usize,
    /// Sequences of a batch.
    pub sequences: usize,
    /// Steps between two reports.
    pub report: usize,
    /// Held-out sequences of a report.
    pub held_out: usize,
    /// Whether the run is long enough to say which model is better.
    pub judged: bool,
}

const PEAK_RATE: f32 = 2e-3;
const WARM_UP: usize = 50;

impl Pace {
    /// A few minutes on two cores.
    pub fn full() -> Pace {
        Pace {
            steps: 800,
            sequences: 16,
            report: 50,
            held_out: 32,
            judged: true,
        }
    }

    /// Seconds: to see that it runs.
    pub fn quick() -> Pace {
        Pace {
            steps: 4,
            sequences: 2,
            report: 2,
            held_out: 2,
            judged: false,
        }
    }

    /// Another number of steps, reported about twenty times.
    pub fn with_steps(self, steps: usize) -> Pace {
        Pace {
            report: (steps / 20).clamp(1, 50),
            judged: steps >= 300,
            steps,
            ..self
        }
    }

    /// Linear warm-up, then a cosine to a tenth.
    pub fn rate(&self, step: usize) -> f32 {
        let warm = (step as f32 / WARM_UP as f32).min(1.0);
        let turn = std::f32::consts::PI * step as f32 / self.steps as f32;
        PEAK_RATE * warm * (0.55 + 0.45 * turn.cos())
    }
}

/// A model on its way.
pub struct Learner<F> {
    model: Model<F>,
    optimizer: AdamW,
    pace: Pace,
    step: usize,
    /// Sum of the training losses since the last report.
    sum: f64,
    since: usize,
    time: Duration,
}

/// One report.
#[derive(Clone, Copy)]
pub struct Point {
    /// Steps done.
    pub step: usize,
    /// Mean loss of the batches since the last report.
    pub training: f64,
    /// Loss on text that is never trained on.
    pub held_out: f64,
    /// Time spent in steps.
    pub seconds: f64,
}

impl<F: FeedForward> Learner<F> {
    /// Before the first step.
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

    /// Learned numbers.
    pub fn parameters(&mut self) -> usize {
        let mut count = 0;
        self.model
            .params("", &mut |_, param| count += param.value.len());
        count
    }

    /// One optimizer step.
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

    /// Where the model is.
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
