//! The changes of a machine by which another configuration would win.

use super::evaluate::predict_model;
use super::scenario::{ModelPrediction, ModelScenario};
use crate::Machine;

/// A part of the machine that would have to be faster.
#[derive(Clone, Debug, PartialEq)]
pub struct Faster {
    /// `arithmetic`, `memory`, or the name of a level of links.
    pub what: String,
    /// The factor; `None` where no factor up to [`MOST`] is enough.
    pub by: Option<f64>,
}

/// The largest factor that is tried.
const MOST: f64 = 16.0;

/// Returns, for each part of the machine, the least factor by which it would have to be faster for
/// `other` to be as fast as `best`.
pub fn faster(
    model: &ModelScenario,
    best: &ModelPrediction,
    other: &ModelPrediction,
) -> Vec<Faster> {
    let levels = model.machine.levels.len();
    let parts = (0..levels + 2).map(|part| Faster {
        what: match part {
            0 => "arithmetic".to_string(),
            1 => "memory".to_string(),
            level => model.machine.levels[level - 2].name.clone(),
        },
        by: factor(model, (best, other), part),
    });
    parts.collect()
}

fn factor(
    model: &ModelScenario,
    (best, other): (&ModelPrediction, &ModelPrediction),
    part: usize,
) -> Option<f64> {
    let wins = |by: f64| {
        let model = ModelScenario {
            machine: scaled(&model.machine, part, by),
            ..model.clone()
        };
        let seconds = |of: &ModelPrediction| {
            // With the strategies as they are: another machine would choose others, which changes
            // both sides.
            let found = predict_model(&model, of.mesh, of.schedule, Some(of.strategy));
            found.map_or(f64::INFINITY, |found| found.seconds)
        };
        seconds(other) <= seconds(best)
    };
    if !wins(MOST) {
        return None;
    }
    // Eight halvings of the logarithm find the factor to 1 %, closer than any prediction is.
    let (mut low, mut high) = (1.0f64, MOST);
    for _ in 0..8 {
        let middle = (low * high).sqrt();
        if wins(middle) {
            high = middle;
        } else {
            low = middle;
        }
    }
    Some(high)
}

fn scaled(machine: &Machine, part: usize, by: f64) -> Machine {
    let mut machine = machine.clone();
    match part {
        0 => {
            let rates = machine.compute.gemm_tflops.values_mut();
            rates.for_each(|rate| *rate *= by);
        }
        1 => machine.compute.memory_gbs *= by,
        level => {
            let level = &mut machine.levels[level - 2];
            level.bandwidth_gbs *= by;
            level.alpha_us /= by;
        }
    }
    machine
}
