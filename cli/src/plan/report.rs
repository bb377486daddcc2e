//! The output of `plan`.

use crate::palette::Palette;
use crate::table::Table;
use crate::{mesh, units};
use moesaic::planner::{Bottleneck, Machine, PhaseOf, Prediction, Ranked, Scenario};
use serde_json::{Value, json};

/// Says how many configurations do not fit, after the number of all.
pub fn too_large(count: usize, machine: &Machine) -> String {
    match count {
        0 => String::new(),
        n => {
            let gib = machine.compute.memory_gib;
            format!(", of which {n} do not fit in {gib} GiB")
        }
    }
}

/// The scenario and the ranked predictions.
pub struct PlanReport<'a> {
    pub question: &'a Scenario,
    /// The tokens of each rank; `None` if the rows were counted.
    pub tokens: Option<u32>,
    pub ranked: &'a Ranked,
    /// The best prediction, with its phases.
    pub best: &'a Prediction,
}

impl PlanReport<'_> {
    pub fn text(&self, palette: &Palette) -> String {
        let Scenario { machine, world, .. } = self.question;
        let tokens = match self.tokens {
            Some(tokens) => format!("{tokens} tokens a rank"),
            None => "tokens as counted".to_string(),
        };
        let pass = match self.question.training {
            Some(_) => "forward and backward",
            None => "forward",
        };
        let mut text = format!(
            "{world} ranks of {}: {}\n{tokens}, {pass}\n",
            palette.bold(&machine.name),
            machine.about
        );
        text += &format!(
            "simulated, not measured: {}{}\n\n",
            units::count(self.ranked.simulated, "configuration"),
            too_large(self.ranked.too_large, &self.question.machine)
        );
        text += &self.legend(palette);
        text += &self.table(palette);
        text += &self.phases(palette);
        text += &self.band(palette);
        text += "\nthis is one layer alone: --layers N says what fits and takes least for a model of N such layers\n";
        text
    }

    fn levels(&self) -> impl Iterator<Item = &str> {
        self.question
            .machine
            .levels
            .iter()
            .map(|level| &*level.name)
    }

    /// Says what the columns hold.
    fn legend(&self, palette: &Palette) -> String {
        let levels: Vec<&str> = self.levels().collect();
        let lines = [
            ("STEP", "time of one call of the layer on the slowest rank".to_string()),
            ("MESH", "ranks that share the experts (ep), hold shards of each (expert_tp), hold copies (dp)".to_string()),
            (
                "STRATEGY",
                "r: adaptive parallelism degree; overlap_degree: chunks, forward/backward; all_to_all: \
                 its algorithm; docs/ADAPTIVE.md has the rest"
                    .to_string(),
            ),
            ("BOUND BY", "what takes most of the step, and its part".to_string()),
            ("MEMORY", "weights, rows and gradients of a rank".to_string()),
            (
                &*levels.join(", "),
                "bytes that a rank sends in a step over links of that kind".to_string(),
            ),
        ];
        let line = |(name, text): &(&str, String)| format!("  {name}: {text}\n");
        palette.dim(&lines.iter().map(line).collect::<String>()) + "\n"
    }

    fn table(&self, palette: &Palette) -> String {
        let levels: Vec<String> = self.levels().map(|name| format!(">{name}")).collect();
        let mut titles = vec![">", ">STEP", "MESH", "STRATEGY", "BOUND BY", ">MEMORY"];
        titles.extend(levels.iter().map(String::as_str));
        let mut table = Table::new(&titles);
        for (at, found) in self.ranked.best.iter().enumerate() {
            let mut row = vec![
                (at + 1).to_string(),
                units::seconds(found.seconds),
                mesh::words(found.mesh),
                found.strategy.to_string(),
                format!(
                    "{} {:.0} %",
                    self.bound(found.bound),
                    100.0 * found.bound_part
                ),
                units::bytes(found.memory.bytes() as u64),
            ];
            let sent = self.levels().zip(found.sent);
            row.extend(sent.map(|(_, bytes)| units::bytes(bytes as u64)));
            table.row(row);
        }
        table.render(palette)
    }

    fn phases(&self, palette: &Palette) -> String {
        let levels: Vec<String> = self.levels().map(|name| format!(">{name}")).collect();
        let mut titles = vec!["WHOSE", "WHAT", ">TIME"];
        titles.extend(levels.iter().map(String::as_str));
        let mut text =
            String::from("\nwhat the slowest rank does in the first of these, and sends\n");
        for pass in &self.best.passes {
            text += &format!(
                "\n{}, {}\n",
                palette.bold(pass.name),
                units::seconds(pass.seconds)
            );
            let mut table = Table::new(&titles);
            for phase in &pass.phases {
                table.row(self.phase(phase));
            }
            text += &table.render(palette);
        }
        text
    }

    fn phase(&self, phase: &PhaseOf) -> Vec<String> {
        let mut row = vec![
            phase.whose.to_string(),
            phase.name.clone(),
            units::seconds(phase.seconds),
        ];
        let sent = self.levels().zip(phase.sent);
        row.extend(sent.map(|(_, bytes)| match phase.whose {
            "ranks" => units::bytes(bytes as u64),
            _ => "-".to_string(),
        }));
        row
    }

    fn bound(&self, bound: Bottleneck) -> String {
        match bound {
            Bottleneck::Compute => "arithmetic".to_string(),
            Bottleneck::Memory => "memory traffic".to_string(),
            Bottleneck::Launches => "launches".to_string(),
            Bottleneck::Messages => "messages".to_string(),
            Bottleneck::Copies => "copies".to_string(),
            Bottleneck::Waiting => "waiting".to_string(),
            Bottleneck::Level(level) => self.levels().nth(level).unwrap_or("links").to_string(),
        }
    }

    fn beyond(&self) -> bool {
        self.question.world > self.question.machine.error.ranks
    }

    fn band(&self, palette: &Palette) -> String {
        let band = &self.question.machine.error;
        let (low, high) = self.range();
        let mut text = format!(
            "\nthe first of these may take {} to {}: {:.0} % to both sides, up to {} ranks\n  {}\n",
            units::seconds(low),
            units::seconds(high),
            100.0 * band.band,
            band.ranks,
            band.source
        );
        if self.beyond() {
            text += &format!(
                "{} {} ranks are more than that: no measurement is behind the band there, and \
                 exchanges with many peers may take several times as long (docs/SCALE.md)\n",
                palette.yellow("warning:"),
                self.question.world
            );
        }
        text
    }

    fn range(&self) -> (f64, f64) {
        let band = self.question.machine.error.band;
        let seconds = self.best.seconds;
        (seconds / (1.0 + band), seconds * (1.0 + band))
    }

    /// Returns the report as JSON, for scripts.
    pub fn json(&self) -> Value {
        let machine = &self.question.machine;
        let ranked = self.ranked.best.iter().map(|found| self.found(found));
        let pass = |pass: &moesaic::planner::PassEstimate| {
            let phases = pass.phases.iter().map(|phase| {
                json!({
                    "whose": phase.whose,
                    "name": phase.name,
                    "seconds": phase.seconds,
                    "sent": self.by_level(phase.sent),
                })
            });
            json!({
                "pass": pass.name,
                "seconds": pass.seconds,
                "phases": phases.collect::<Vec<_>>(),
            })
        };
        let (low, high) = self.range();
        json!({
            "simulated": true,
            "machine": machine,
            "world": self.question.world,
            "tokens": self.tokens,
            "training": self.question.training.is_some(),
            "configurations": self.ranked.simulated,
            "too_large": self.ranked.too_large,
            "ranked": ranked.collect::<Vec<_>>(),
            "best": {
                "configuration": self.found(self.best),
                "passes": self.best.passes.iter().map(pass).collect::<Vec<_>>(),
                "low": low,
                "high": high,
            },
            "beyond_measurements": self.beyond(),
        })
    }

    fn found(&self, found: &Prediction) -> Value {
        let memory = found.memory;
        json!({
            "mesh": found.mesh,
            "strategy": found.strategy.to_string(),
            "seconds": found.seconds,
            "passes": found.passes.iter().map(|pass| pass.seconds).collect::<Vec<_>>(),
            "bound": self.bound(found.bound),
            "bound_part": found.bound_part,
            "sent": self.by_level(found.sent),
            "memory": {
                "bytes": memory.bytes(),
                "weights": memory.weights,
                "gathered": memory.gathered,
                "rows": memory.rows,
                "passed": memory.passed,
            },
        })
    }

    fn by_level(&self, bytes: [f64; moesaic::planner::MOST_LEVELS]) -> Value {
        let pairs = self.levels().zip(bytes);
        pairs
            .map(|(name, bytes)| (name.to_string(), json!(bytes)))
            .collect()
    }
}
