//! The timeline of a whole step: the order in which stages run micro-batches.

use super::scenario::{ModelPrediction, ModelScenario};
use crate::Simulated;

/// A pass of one micro-batch through one part of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct StagePass {
    micro_batch: usize,
    /// The part of the stage; parts of all stages in turns make the model.
    part: usize,
    backward: bool,
}

/// Returns what one rank of each stage does in a step, by 1F1B or, with several parts a stage,
/// by its interleaved form.
pub fn model_timeline(model: &ModelScenario, found: &ModelPrediction) -> Vec<Simulated> {
    let stages = found.stages.len();
    let parts = found.schedule.virtual_stages;
    let trained = model.training.is_some();
    let order: Vec<Vec<StagePass>> = (0..stages)
        .map(|stage| turns(stage, stages, (parts, found.micro_batches), trained))
        .collect();
    let mut run = Pipeline {
        found,
        parts,
        ends: vec![vec![[None; 2]; found.micro_batches]; stages * parts],
        now: vec![0.0; stages],
        at: vec![0; stages],
        events: Vec::new(),
        distance: model.world / stages.max(1),
    };
    while run.advance(&order) {}
    run.finish(trained)
}

struct Pipeline<'a> {
    found: &'a ModelPrediction,
    parts: usize,
    /// The end of forward and backward, by part of the model and micro-batch.
    ends: Vec<Vec<[Option<f64>; 2]>>,
    now: Vec<f64>,
    at: Vec<usize>,
    events: Vec<Simulated>,
    /// The ranks of a stage.
    distance: usize,
}

impl Pipeline<'_> {
    /// Runs what can run; returns whether anything did.
    fn advance(&mut self, order: &[Vec<StagePass>]) -> bool {
        let mut moved = false;
        for (stage, turns) in order.iter().enumerate() {
            // A stage keeps its order: a pass that could run later must not overtake, because its
            // activations would need memory that 1F1B does not count.
            while let Some(turn) = turns.get(self.at[stage]) {
                let Some(ready) = self.ready(stage, *turn) else {
                    break;
                };
                self.run(stage, *turn, ready);
                moved = true;
            }
        }
        moved
    }

    /// Returns the time at which the input of a turn is there, if it is known.
    fn ready(&self, stage: usize, turn: StagePass) -> Option<f64> {
        let stages = self.found.stages.len();
        let own = turn.part * stages + stage;
        let end =
            |part: usize, backward: bool| self.ends[part][turn.micro_batch][usize::from(backward)];
        match (turn.backward, own) {
            (false, 0) => Some(0.0),
            (false, _) => end(own - 1, false),
            // The last part has the loss, so its backward pass waits for its own forward pass.
            (true, _) if own + 1 == self.ends.len() => end(own, false),
            (true, _) => end(own + 1, true),
        }
    }

    fn run(&mut self, stage: usize, turn: StagePass, ready: f64) {
        let pass = usize::from(turn.backward);
        let seconds = self.found.stages[stage][pass] / self.parts as f64;
        let start = self.now[stage].max(ready);
        let own = turn.part * self.found.stages.len() + stage;
        self.ends[own][turn.micro_batch][pass] = Some(start + seconds);
        self.now[stage] = start + seconds;
        self.at[stage] += 1;
        let pass = if turn.backward { "backward" } else { "forward" };
        let part = match self.parts {
            1 => String::new(),
            _ => format!(", part {}", turn.part),
        };
        let name = format!("{pass} {}{part}", turn.micro_batch);
        self.event(stage, "compute", name, (start, start + seconds));
    }

    fn event(&mut self, stage: usize, stream: &'static str, name: String, times: (f64, f64)) {
        if times.1 > times.0 {
            self.events.push(Simulated {
                rank: stage * self.distance,
                stream,
                name,
                start: times.0,
                end: times.1,
            });
        }
    }

    /// Adds what happens once a step: gathers beside the first forward pass, sums beside the last
    /// backward pass, and the optimizer.
    fn finish(mut self, trained: bool) -> Vec<Simulated> {
        let [sums, gather, optimizer] = self.found.once;
        for stage in 0..self.found.stages.len() {
            if !trained {
                break;
            }
            self.event(stage, "exchange", "gathering weights".into(), (0.0, gather));
            let end = self.now[stage];
            // Gradients are whole only in the last backward pass, so sums cannot begin earlier.
            let start = end - self.found.stages[stage][1] / self.parts as f64;
            let summed = (start + sums).max(end);
            self.event(
                stage,
                "exchange",
                "sums of gradients".into(),
                (start, start + sums),
            );
            self.event(
                stage,
                "compute",
                "optimizer".into(),
                (summed, summed + optimizer),
            );
        }
        self.events
    }
}

/// Returns the order of a stage's turns.
fn turns(
    stage: usize,
    stages: usize,
    (parts, micro_batches): (usize, usize),
    trained: bool,
) -> Vec<StagePass> {
    let all = parts * micro_batches;
    // Micro-batches pass in rounds of as many as there are stages, part after part.
    let turn = |number: usize, backward: bool| {
        let round = stages * parts;
        let (before, within) = (number / round * stages, number % round);
        let part = match parts {
            1 => 0,
            _ => within / stages,
        };
        StagePass {
            micro_batch: match parts {
                1 => number,
                _ => before + within % stages,
            },
            // Backward begins with the part that forward ended with.
            part: if backward { parts - 1 - part } else { part },
            backward,
        }
    };
    if !trained {
        return (0..all).map(|number| turn(number, false)).collect();
    }
    let behind = stages - 1 - stage;
    let warm = match parts {
        1 => behind,
        _ => 2 * behind + (parts - 1) * stages,
    };
    let warm = warm.min(all);
    let mut list: Vec<StagePass> = (0..warm).map(|number| turn(number, false)).collect();
    for number in warm..all {
        list.push(turn(number, false));
        list.push(turn(number - warm, true));
    }
    list.extend((all - warm..all).map(|number| turn(number, true)));
    list
}
