//! Compares measurements with the predictions of the planner.

use crate::drawn::{Drawn, RANKS};
use crate::measured::Passes;
use crate::{Result, quartile};
use moesaic::plan::{Both, CommDtype, Placement, ShadowModel};
use moesaic::planner::{Machine, RoutedRows, Scenario, Simulator};
use moesaic::{LayerSpec, Strategy, Training};
use serde::Deserialize;
use std::collections::BTreeMap;

#[derive(Deserialize)]
struct Line {
    layer: u64,
    strategy: Option<String>,
    /// Measured again, with the fastest of the others in turns.
    #[serde(rename = "final")]
    again: Option<String>,
    /// Choice of the layer, and the number of steps that it took.
    adaptive: Option<String>,
    steps: Option<usize>,
    #[serde(default)]
    rounds: Vec<Passes>,
}

/// A strategy of a layer: measured and predicted seconds of a step.
struct Point {
    strategy: String,
    measured: f64,
    predicted: f64,
    /// See [`Drawn::exchanged`].
    exchanged: usize,
}

impl Point {
    fn error(&self) -> f64 {
        self.predicted / self.measured - 1.0
    }
}

/// The measurements of a layer.
#[derive(Default)]
struct Layer {
    points: Vec<Point>,
    /// Seconds by strategy, of the finals.
    finals: Vec<(String, f64)>,
    adaptive: Option<(String, usize)>,
}

impl Layer {
    /// The fastest, and its seconds: of the finals where there were some.
    fn best(&self) -> Option<(&str, f64)> {
        let finals = self.finals.iter().map(|(strategy, s)| (&**strategy, *s));
        let points = self.points.iter().map(|p| (&*p.strategy, p.measured));
        let least = |a: &(&str, f64), b: &(&str, f64)| a.1.total_cmp(&b.1);
        finals.min_by(least).or_else(|| points.min_by(least))
    }

    /// Returns the seconds of a strategy, in the finals if it was there.
    fn again(&self, strategy: &str) -> f64 {
        let finals = self.finals.iter().map(|(name, s)| (&**name, *s));
        let points = self.points.iter().map(|p| (&*p.strategy, p.measured));
        let mut all = finals.chain(points).filter(|(name, _)| *name == strategy);
        all.next().map_or(f64::NAN, |(_, seconds)| seconds)
    }

    /// Returns the strategy that the planner would take.
    fn chosen(&self) -> Option<&Point> {
        let timed = self.points.iter().filter_map(|point| {
            let strategy: Strategy = point.strategy.parse().ok()?;
            Some((strategy, point.predicted))
        });
        let simplest = Strategy::simplest(timed)?.to_string();
        self.points.iter().find(|point| point.strategy == simplest)
    }
}

pub fn run(lines: &str, machine: &Machine) -> Result {
    let mut layers: BTreeMap<u64, Layer> = BTreeMap::new();
    for line in read(lines) {
        let line = line?;
        let measured = step(&line.rounds);
        let layer = layers.entry(line.layer).or_default();
        if let Some(strategy) = line.strategy {
            let drawn = Drawn::new(line.layer);
            let parsed = strategy.parse()?;
            layer.points.push(Point {
                strategy,
                measured,
                predicted: predict(&drawn, parsed, machine)?,
                exchanged: drawn.exchanged(&parsed),
            });
        } else if let Some(strategy) = line.again {
            layer.finals.push((strategy, measured));
        } else if let Some(strategy) = line.adaptive {
            layer.adaptive = Some((strategy, line.steps.unwrap_or_default()));
        }
    }
    for (number, layer) in &layers {
        println!("# {}", Drawn::new(*number));
        for Point {
            strategy,
            measured,
            predicted,
            ..
        } in &layer.points
        {
            let off = 100.0 * (predicted / measured - 1.0);
            let ms = [measured, predicted].map(|seconds| seconds * 1e3);
            println!(
                "{:>9.1} ms, predicted {:>9.1} ms {off:>+6.1} %  {strategy}",
                ms[0], ms[1]
            );
        }
    }
    summary(&layers);
    Ok(())
}

fn read(lines: &str) -> impl Iterator<Item = serde_json::Result<Line>> {
    let json = lines.lines().filter(|line| line.starts_with('{'));
    json.map(serde_json::from_str)
}

/// Seconds of a step, both passes: the lower quartile.
pub fn step(rounds: &[Passes]) -> f64 {
    quartile(rounds.iter().map(|[a, b]| a + b).collect())
}

/// Seconds by strategy of each layer in lines of JSON.
pub fn measured(lines: &str) -> Result<BTreeMap<u64, Vec<(Strategy, f64)>>> {
    let mut layers: BTreeMap<u64, Vec<(Strategy, f64)>> = BTreeMap::new();
    for line in read(lines) {
        let line = line?;
        if let Some(strategy) = line.strategy {
            let timed = (strategy.parse()?, step(&line.rounds));
            layers.entry(line.layer).or_default().push(timed);
        }
    }
    Ok(layers)
}

/// Forward and backward, of the rows that ranks have.
pub fn predict(drawn: &Drawn, strategy: Strategy, machine: &Machine) -> Result<f64> {
    let question = question(drawn, machine)?;
    let found = Simulator::new(&question).predict(drawn.mesh, strategy)?;
    Ok(found.both_passes())
}

/// The same with the sums of gradients, of experts where a placement has them, of which those
/// with shadows are chosen by another model.
pub fn predict_placed(
    drawn: &Drawn,
    strategy: Strategy,
    machine: &Machine,
    (placement, model): (&Placement, fn(&LayerSpec) -> ShadowModel),
) -> Result<f64> {
    let mut question = question(drawn, machine)?;
    question.placement = Some(placement.clone());
    question.shadow_model = model(&question.spec);
    let found = Simulator::new(&question).predict(drawn.mesh, strategy)?;
    Ok(found.seconds)
}

fn question(drawn: &Drawn, machine: &Machine) -> Result<Scenario> {
    let spec = drawn.spec()?;
    Ok(Scenario {
        routing: RoutedRows::counted(RANKS, drawn.experts, drawn.top_k, &drawn.counts())?,
        placement: None,
        shadow_model: ShadowModel::of(&spec),
        spec,
        machine: machine.clone(),
        world: RANKS,
        training: Some(Training::default()),
    })
}

/// Returns the name of a part of a step: a collective op, or a launch.
pub fn part(together: bool, name: &str) -> String {
    let whose = if together { "ranks" } else { "launch" };
    format!("{whose} {name}")
}

/// Seconds of each [`part`] of both passes of the slowest rank, and of the passes.
pub fn phases(drawn: &Drawn, strategy: Strategy, machine: &Machine) -> Result<Vec<(String, f64)>> {
    let question = question(drawn, machine)?;
    let found = Simulator::new(&question).predict(drawn.mesh, strategy)?;
    let mut all = Vec::new();
    for pass in &found.passes {
        all.push((pass.name.to_string(), pass.seconds));
        let parts = pass.phases.iter();
        all.extend(parts.map(|it| (part(it.whose == "ranks", &it.name), it.seconds)));
    }
    Ok(all)
}

fn least(points: &[Point], of: impl Fn(&Point) -> f64) -> Option<&Point> {
    points.iter().min_by(|a, b| of(a).total_cmp(&of(b)))
}

fn summary(layers: &BTreeMap<u64, Layer>) {
    println!(
        "\nlayer  strategies  error mean  worst  best measured              planner's choice           behind  adaptive behind"
    );
    let (mut errors, mut right, mut worst_adaptive) = (Vec::new(), 0, f64::NEG_INFINITY);
    for (number, layer) in layers {
        let (Some(best), Some(chosen)) = (layer.best(), layer.chosen()) else {
            continue;
        };
        let own: Vec<f64> = layer
            .points
            .iter()
            .map(|point| point.error().abs())
            .collect();
        let mean = own.iter().sum::<f64>() / own.len() as f64;
        let worst = own.iter().copied().fold(0.0, f64::max);
        let behind = layer.again(&chosen.strategy) / best.1 - 1.0;
        right += usize::from(behind <= 0.05);
        let adaptive = layer.adaptive.as_ref().map(|(strategy, steps)| {
            let far = layer.again(strategy) / best.1 - 1.0;
            worst_adaptive = worst_adaptive.max(far);
            format!("{:.1} % ({strategy}, {steps} steps)", 100.0 * far)
        });
        println!(
            "{number:>5}  {:>10}  {:>8.1} %  {:>4.0} %  {:<25}  {:<25}  {:>4.1} %  {}",
            own.len(),
            100.0 * mean,
            100.0 * worst,
            best.0,
            chosen.strategy,
            100.0 * behind,
            adaptive.unwrap_or_default()
        );
        errors.extend(own);
    }
    let mean = errors.iter().sum::<f64>() / errors.len().max(1) as f64;
    println!(
        "\n{} steps, mean error {:.1} %; the measured best or within 5 % of it: {right} of {}",
        errors.len(),
        100.0 * mean,
        layers.len()
    );
    by_size(layers);
    statics(layers);
    if worst_adaptive.is_finite() {
        println!(
            "adaptive, at most behind the best: {:.1} %",
            100.0 * worst_adaptive
        );
    }
}

/// Exchanges of more bytes per rank than this are bound by links, and smaller
/// ones by their fixed cost.
const BOUND_BY_LINKS: usize = 64 << 10;

/// The mean errors of steps with exchanges that links bound, and of the others.
fn by_size(layers: &BTreeMap<u64, Layer>) {
    let points = layers.values().flat_map(|layer| &layer.points);
    let (large, small): (Vec<&Point>, Vec<&Point>) =
        points.partition(|point| point.exchanged >= BOUND_BY_LINKS);
    for (points, which) in [(large, "from"), (small, "below")] {
        let sum: f64 = points.iter().map(|point| point.error().abs()).sum();
        let mean = 100.0 * sum / points.len().max(1) as f64;
        let kib = BOUND_BY_LINKS >> 10;
        println!(
            "{} with exchanges {which} {kib} KiB a rank: {mean:.1} %",
            points.len()
        );
    }
}

/// Prints by how much each strategy that all layers could have is slower than
/// the best of each layer.
fn statics(layers: &BTreeMap<u64, Layer>) {
    let mut each: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for layer in layers.values() {
        let Some(best) = least(&layer.points, |point| point.measured) else {
            continue;
        };
        for point in &layer.points {
            let behind = point.measured / best.measured - 1.0;
            each.entry(unpacked(&point.strategy))
                .or_default()
                .push(behind);
        }
    }
    println!("\nstatic choice              layers  behind the best of each: mean  most");
    for (name, behind) in each {
        let mean = behind.iter().sum::<f64>() / behind.len() as f64;
        let most = behind.iter().copied().fold(0.0, f64::max);
        println!(
            "{name:<25}  {:>6}  {:>28.1} %  {:>4.0} %",
            behind.len(),
            100.0 * mean,
            100.0 * most
        );
    }
}

/// The strategy as it would be where nothing is packed between nodes.
fn unpacked(strategy: &str) -> String {
    let comm_dtype = Both::same(CommDtype::Unchanged);
    let parsed = strategy.parse();
    parsed.map_or_else(
        |_| strategy.to_string(),
        |parsed: Strategy| {
            Strategy {
                comm_dtype,
                ..parsed
            }
            .to_string()
        },
    )
}
