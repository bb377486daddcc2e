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
    let parts = parts(&model.machine).map(|(part, what)| Faster {
        what,
        by: factor(model, (best, other), part),
    });
    parts.collect()
}

/// The step of a configuration on a machine of which one part is twice as fast.
#[derive(Clone, Debug, PartialEq)]
pub struct Doubled {
    /// `arithmetic`, `memory`, or the name of a level of links.
    pub what: String,
    /// The seconds of the step.
    pub seconds: f64,
}

/// Returns the step of a configuration with each part of the machine twice as fast.
pub fn doubled(model: &ModelScenario, found: &ModelPrediction) -> Vec<Doubled> {
    let parts = parts(&model.machine).filter_map(|(part, what)| {
        let seconds = seconds(model, found, (part, 2.0))?;
        Some(Doubled { what, seconds })
    });
    parts.collect()
}

/// Returns the parts of a machine, with their names.
fn parts(machine: &Machine) -> impl Iterator<Item = (usize, String)> {
    let levels = machine.levels.iter().map(|level| level.name.clone());
    let own = ["arithmetic", "memory"].map(str::to_string);
    own.into_iter().chain(levels).enumerate()
}

/// Returns the seconds of a configuration's step with a part of the machine faster.
fn seconds(model: &ModelScenario, of: &ModelPrediction, (part, by): (usize, f64)) -> Option<f64> {
    let model = ModelScenario {
        machine: scaled(&model.machine, part, by),
        ..model.clone()
    };
    // With the strategy as it is: another machine would choose others, which changes all.
    let found = predict_model(&model, of.mesh, of.schedule, Some(of.strategy));
    found.map(|found| found.seconds)
}

fn factor(
    model: &ModelScenario,
    (best, other): (&ModelPrediction, &ModelPrediction),
    part: usize,
) -> Option<f64> {
    let wins = |by: f64| {
        let seconds = |of| seconds(model, of, (part, by)).unwrap_or(f64::INFINITY);
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

/// A part of a machine that has no such name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{machine} has no part `{part}`: its parts are {parts}")]
pub struct NoSuchPart {
    machine: String,
    part: String,
    parts: String,
}

/// Returns the machine with a part `by` times as fast: `arithmetic`, `memory` or a level of links,
/// whose fixed time changes with its bandwidth.
///
/// # Errors
/// [`NoSuchPart`] lists the parts.
pub fn at_speed(machine: &Machine, part: &str, by: f64) -> Result<Machine, NoSuchPart> {
    let found = parts(machine).find(|(_, name)| name == part);
    let Some((index, _)) = found else {
        let names: Vec<String> = parts(machine).map(|(_, name)| name).collect();
        return Err(NoSuchPart {
            machine: machine.name.clone(),
            part: part.to_string(),
            parts: names.join(", "),
        });
    };
    let mut machine = scaled(machine, index, by);
    // A report prints `about`, so nobody takes the plan for one of the machine as it is.
    machine.about += &format!("; {part} {by} times as fast as that");
    Ok(machine)
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
