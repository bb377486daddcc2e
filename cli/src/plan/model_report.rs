//! The output of `plan` for a model.

use super::report::too_large;
use crate::palette::Palette;
use crate::table::Table;
use crate::units;
use moesaic::planner::model::{
    Doubled, Faster, ModelMesh, ModelPrediction, ModelRanked, ModelScenario, StageMemory,
};
use serde_json::{Value, json};

/// The scenario and the ranked predictions.
pub struct ModelReport<'a> {
    pub scenario: &'a ModelScenario,
    pub ranked: &'a ModelRanked,
    /// The number of configurations to show.
    pub top: usize,
    pub best: &'a ModelPrediction,
    /// The changes by which the second would win.
    pub faster: Vec<Faster>,
    /// The step of the first with each part of the machine twice as fast.
    pub doubled: Vec<Doubled>,
    /// The mesh that is shown beside the first, if one is asked for.
    pub compared: Option<Compared>,
}

/// A mesh beside the first.
pub struct Compared {
    /// Its place among all that fit, from one; `None` for a mesh that a search does not try.
    pub place: Option<usize>,
    /// Its place by time alone, where another rule ranks.
    pub by_time: Option<usize>,
    pub found: ModelPrediction,
}

/// The columns of the ranked configurations, with what they hold.
const COLUMNS: [(&str, &str); 9] = [
    (
        "=",
        "tied for the first place; below is why the first leads",
    ),
    ("STEP", "time of one step of the whole model"),
    (
        "MESH",
        "stages (pp), ranks that share attention (tp), the experts (ep), each expert (expert_tp); \
         those of 1 are left out",
    ),
    ("DP", "copies of attention, and of each expert"),
    (
        "BATCH",
        "sequences of a micro-batch x micro-batches of a step, virtual stages",
    ),
    ("AGAIN", "what backward computes again"),
    ("TOKENS/S", "of one rank"),
    (
        "TFLOP/S",
        "of one rank, as the model needs them; in brackets of the machine's peak",
    ),
    (
        "MEMORY",
        "of the rank that needs most, without the reserve; in brackets of the machine's",
    ),
];

impl ModelReport<'_> {
    pub fn text(&self, palette: &Palette) -> String {
        let machine = &self.scenario.machine;
        let mut text = format!(
            "{} ranks of {}: {}\n{}\n{}\nsimulated and counted, not measured: {}{}\n\n",
            self.scenario.world,
            palette.bold(&machine.name),
            machine.about,
            self.batch(),
            self.model(),
            units::count(self.ranked.predicted, "configuration"),
            too_large(self.ranked.too_large, &self.scenario.machine)
        );
        let line = |(name, about): &(&str, &str)| format!("  {name}: {about}\n");
        let columns = COLUMNS.iter().skip(usize::from(self.ranked.ties.is_none()));
        text += &palette.dim(&columns.map(line).collect::<String>());
        text += "\n";
        text += &self.table().render(palette);
        text += &self.ties();
        text += &self.all_ranks();
        text += "\nwhat a rank of the slowest stage does in a step of the first\n\n";
        text += &self.phases().render(palette);
        text += &self.strategies();
        text += &format!(
            "\nmemory of a rank of stage {}, of {} GiB\n\n",
            self.best.memory.stage, machine.compute.memory_gib
        );
        text += &self.memory().render(palette);
        text += "\nthe step of the first with a part of the machine twice as fast\n\n";
        text += &self.doubled().render(palette);
        if let Some(compared) = &self.compared {
            text += &self.beside(compared);
            let mut table = Table::new(&["WHAT", ">FIRST", ">THIS"]);
            for row in self.comparison(&compared.found) {
                table.row(row);
            }
            text += &table.render(palette);
        }
        text += &self.sensitivity();
        text += "\nno error band is known for models: docs/SCALE.md compares published ones\n";
        text
    }

    /// Says how many tokens all ranks take.
    fn all_ranks(&self) -> String {
        let rate = self.best.tokens_per_second * self.scenario.world as f64;
        let days = 1e12 / rate / 86_400.0;
        format!(
            "\nby the first all ranks take {} tokens a second, and a trillion tokens {days:.1} days\n",
            count(rate)
        )
    }

    /// Says how the layers with experts of the first share their work.
    pub fn strategies(&self) -> String {
        let mut text = format!(
            "\nthe strategy of its layers with experts: {}",
            self.best.strategy
        );
        if self.scenario.training.is_none() {
            text += "; a step is a prefill, and decode is planned a layer at a time: \
                     --layer N --tokens N";
        }
        text + "\n"
    }

    fn doubled(&self) -> Table {
        let mut table = Table::new(&["WHAT", ">STEP", ">CHANGE"]);
        for part in &self.doubled {
            let change = 100.0 * (part.seconds / self.best.seconds - 1.0);
            table.row([
                part.what.clone(),
                units::seconds(part.seconds),
                format!("{change:+.1} %"),
            ]);
        }
        table
    }

    /// Says where a mesh stands among all.
    pub fn beside(&self, compared: &Compared) -> String {
        let found = &compared.found;
        let place = match compared.place {
            Some(place) => {
                let by_time = compared.by_time.filter(|by_time| *by_time != place);
                let by_time = by_time.map(|at| format!(" ({at} by time alone)"));
                let all = self.ranked.best.len();
                format!("place {place} of {all}{}", by_time.unwrap_or_default())
            }
            None => "no mesh that the search tries".to_string(),
        };
        let behind = 100.0 * (found.seconds / self.best.seconds - 1.0);
        let again = found.schedule.recompute;
        format!(
            "\n{} is {place}, {behind:+.1} % to the first; its best micro-batch is {}, virtual stages \
             {}, computed again: {again}, layers with experts by {}\n\n",
            words(found.mesh),
            found.schedule.micro_batch,
            found.schedule.virtual_stages,
            found.strategy
        )
    }

    /// Returns what the steps of the first and of another mesh are made of: the time of each phase in
    /// the open, and the memory.
    pub fn comparison(&self, other: &ModelPrediction) -> Vec<[String; 3]> {
        let mut rows = Vec::new();
        let phases = self.best.phases.iter().chain(&other.phases);
        let mut names: Vec<&str> = Vec::new();
        phases.for_each(|phase| {
            if !names.contains(&phase.name) {
                names.push(phase.name);
            }
        });
        let open = |of: &ModelPrediction, name: &str| {
            let phase = of.phases.iter().find(|phase| phase.name == name);
            phase.map_or("-".to_string(), |phase| units::seconds(phase.exposed))
        };
        for name in names {
            rows.push([name.to_string(), open(self.best, name), open(other, name)]);
        }
        let [first, second] = [self.best, other].map(|found| units::seconds(found.seconds));
        rows.push(["step".to_string(), first, second]);
        let memory = parts(&self.best.memory)
            .into_iter()
            .zip(parts(&other.memory));
        for ((name, first), (_, second)) in memory {
            let name = if name == "all" { "memory" } else { name };
            let [first, second] = [first, second].map(|bytes| units::bytes(bytes as u64));
            rows.push([name.to_string(), first, second]);
        }
        rows
    }

    /// Describes the tokens of a step.
    pub fn batch(&self) -> String {
        let batch = self.scenario.batch;
        let pass = match self.scenario.training {
            Some(_) => "forward and backward",
            None => "forward",
        };
        format!(
            "{} of {} tokens a step, {pass}",
            units::count(batch.sequences, "sequence"),
            batch.sequence
        )
    }

    /// Describes the model.
    pub fn model(&self) -> String {
        let shape = &self.scenario.shape;
        format!(
            "{}, {} with experts; {} parameters; {} a token",
            units::count(shape.layers(), "layer"),
            shape.moe_layers,
            count(self.scenario.parameters()),
            units::flops(self.scenario.flops_per_token())
        )
    }

    /// Returns the configurations to show.
    pub fn shown(&self) -> impl Iterator<Item = &ModelPrediction> {
        self.ranked.best.iter().take(self.top)
    }

    /// Returns the cells of a configuration.
    pub fn cells(&self, found: &ModelPrediction) -> [String; 8] {
        let world = self.scenario.world;
        let schedule = &found.schedule;
        let mesh = found.mesh;
        [
            units::seconds(found.seconds),
            words(mesh),
            format!("{}, {}", mesh.dp(world), mesh.expert_dp(world)),
            format!(
                "{} x {}, {}",
                schedule.micro_batch, found.micro_batches, schedule.virtual_stages
            ),
            schedule.recompute.to_string(),
            format!("{:.0}", found.tokens_per_second),
            flops(found),
            format!(
                "{} ({})",
                units::bytes(found.memory.counted() as u64),
                self.of_memory(found)
            ),
        ]
    }

    /// Returns the numbers of the configurations to show, each with a sign if it ties.
    pub fn numbers(&self) -> impl Iterator<Item = String> {
        let tied = self.ranked.ties.as_ref().map(|ties| ties.tied);
        (1..=self.top).map(move |number| match tied {
            Some(tied) if number <= tied => format!("{number} ="),
            Some(_) => format!("{number}  "),
            None => number.to_string(),
        })
    }

    /// Returns the part of a rank's memory that a configuration uses, without the reserve.
    fn of_memory(&self, found: &ModelPrediction) -> String {
        let gib = found.memory.counted() / f64::from(1u32 << 30);
        let part = gib / self.scenario.machine.compute.memory_gib;
        format!("{:.0} %", 100.0 * part)
    }

    /// Says which configurations tie, and why the first of them leads.
    pub fn ties(&self) -> String {
        let Some(ties) = &self.ranked.ties else {
            return String::new();
        };
        let rule = ties.rule;
        let [error, free] = [rule.error, rule.headroom].map(|part| 100.0 * part);
        let (best, fastest) = (self.best, &ties.fastest);
        let leads = match ties.roomy {
            0 => format!("none leaves {free:.0} % of the memory free, so the fastest leads"),
            1 => format!("the first leads, which alone leaves {free:.0} % of the memory free"),
            roomy => format!(
                "the first leads, the fastest of the {roomy} that leave {free:.0} % of the memory free"
            ),
        };
        let within = format!("within {error:.1} % of the fastest, the mean error of predictions");
        let mut text = match ties.tied {
            1 => format!("\nno other mesh is {within}, so none ties with the first\n"),
            tied => format!("\n{tied} meshes tie, their steps {within}: {leads}\n"),
        };
        if fastest.seconds < best.seconds {
            text += &format!(
                "with less free, the fastest is {} with micro-batches of {}, computed again: {}; its \
                 step is {:.1} % shorter, and it uses {} of the memory\n--reserve SIZE ranks by time \
                 alone\n",
                words(fastest.mesh),
                fastest.schedule.micro_batch,
                fastest.schedule.recompute,
                100.0 * (1.0 - fastest.seconds / best.seconds),
                self.of_memory(fastest)
            );
        }
        text
    }

    fn table(&self) -> Table {
        let mut table = Table::new(&[
            ">",
            ">STEP",
            "MESH",
            "DP",
            "BATCH",
            "AGAIN",
            ">TOKENS/S",
            ">TFLOP/S",
            ">MEMORY",
        ]);
        for (number, found) in self.numbers().zip(self.shown()) {
            table.row(std::iter::once(number).chain(self.cells(found)));
        }
        table
    }

    fn phases(&self) -> Table {
        let mut table = Table::new(&["WHAT", ">TIME", ">IN THE OPEN", ">OF THE STEP", "BEHIND"]);
        for phase in &self.best.phases {
            table.row([
                phase.name.to_string(),
                units::seconds(phase.seconds),
                units::seconds(phase.exposed),
                format!("{:.1} %", 100.0 * phase.exposed / self.best.seconds),
                phase.behind.unwrap_or("-").to_string(),
            ]);
        }
        table
    }

    fn memory(&self) -> Table {
        let mut table = Table::new(&["WHAT", ">BYTES"]);
        for (name, bytes) in parts(&self.best.memory) {
            table.row([name.to_string(), units::bytes(bytes as u64)]);
        }
        table
    }

    /// Says what would have to be faster for the second to win.
    pub fn sensitivity(&self) -> String {
        let Some(second) = self.ranked.best.get(1) else {
            return String::new();
        };
        let behind = 100.0 * (second.seconds / self.best.seconds - 1.0);
        if behind < 0.0 {
            return format!(
                "\nthe second, {}, takes {:.1} % less time, but {} of the memory\n",
                words(second.mesh),
                -behind,
                self.of_memory(second)
            );
        }
        let list: Vec<String> = self.faster.iter().filter_map(factor).collect();
        let wins = if list.is_empty() {
            "no part of the machine alone lets it win".to_string()
        } else {
            format!("it would win with {}", list.join(", or "))
        };
        format!(
            "\nthe second, {}, is {behind:.1} % behind; {wins}\n",
            words(second.mesh)
        )
    }

    /// Returns the report as JSON, for scripts.
    pub fn json(&self) -> Value {
        let scenario = self.scenario;
        let faster = self
            .faster
            .iter()
            .map(|part| json!({ "what": part.what, "by": part.by }));
        let doubled = self.doubled.iter();
        let doubled = doubled.map(|part| json!({ "what": part.what, "seconds": part.seconds }));
        json!({
            "simulated": true,
            "machine": scenario.machine,
            "world": scenario.world,
            "training": scenario.training.is_some(),
            "batch": {
                "sequence": scenario.batch.sequence,
                "sequences": scenario.batch.sequences,
            },
            "model": {
                "layers": scenario.shape.layers(),
                "moe_layers": scenario.shape.moe_layers,
                "parameters": scenario.parameters(),
                "flops_per_token": scenario.flops_per_token(),
            },
            "configurations": self.ranked.predicted,
            "too_large": self.ranked.too_large,
            "ranked": self.shown().map(found).collect::<Vec<_>>(),
            "ties": self.ranked.ties.as_ref().map(|ties| json!({
                "error": ties.rule.error,
                "headroom": ties.rule.headroom,
                "tied": ties.tied,
                "with_headroom": ties.roomy,
                "fastest": found(&ties.fastest),
            })),
            "faster": faster.collect::<Vec<_>>(),
            "doubled": doubled.collect::<Vec<_>>(),
            "compared": self.compared.as_ref().map(|compared| {
                json!({
                    "place": compared.place,
                    "place_by_time": compared.by_time,
                    "configuration": found(&compared.found),
                })
            }),
        })
    }
}

/// Describes a mesh by its degrees above 1, such as `pp 8 x ep 64`.
pub fn words(mesh: ModelMesh) -> String {
    let degrees = [
        ("pp", mesh.pp),
        ("tp", mesh.tp),
        ("ep", mesh.ep),
        ("expert_tp", mesh.expert_tp),
    ];
    let shared = degrees.iter().filter(|(_, degree)| *degree > 1);
    let shared: Vec<String> = shared
        .map(|(name, degree)| format!("{name} {degree}"))
        .collect();
    if shared.is_empty() {
        return "copies alone".to_string();
    }
    shared.join(" x ")
}

/// Returns a part of the machine with its factor; `None` where no factor is enough.
fn factor(part: &Faster) -> Option<String> {
    let by = part.by?;
    Some(format!("{} {by:.2} times as fast", part.what))
}

/// Returns a number of parameters in words.
pub fn count(parameters: f64) -> String {
    match parameters {
        1e9.. => format!("{:.1} billion", parameters / 1e9),
        _ => format!("{:.1} million", parameters / 1e6),
    }
}

/// Returns the FLOP/s of a rank, with the part of the peak.
pub fn flops(found: &ModelPrediction) -> String {
    let rate = format!("{:.0}", found.flops / 1e12);
    match found.mfu {
        Some(part) => format!("{rate} ({:.0} %)", 100.0 * part),
        None => rate,
    }
}

/// Returns the parts of a rank's memory by name.
pub fn parts(memory: &StageMemory) -> [(&'static str, f64); 7] {
    [
        ("weights", memory.weights),
        ("gradients", memory.gradients),
        ("optimizer state", memory.optimizer),
        ("activations", memory.activations),
        ("buffers of exchanges and kernels", memory.buffers),
        ("reserve", memory.reserve),
        ("all", memory.bytes()),
    ]
}

fn found(found: &ModelPrediction) -> Value {
    let phases = found.phases.iter().map(|phase| {
        json!({
            "name": phase.name,
            "seconds": phase.seconds,
            "exposed": phase.exposed,
            "behind": phase.behind,
        })
    });
    let memory = &found.memory;
    let (mesh, schedule) = (found.mesh, found.schedule);
    json!({
        "mesh": { "pp": mesh.pp, "tp": mesh.tp, "ep": mesh.ep, "expert_tp": mesh.expert_tp },
        "micro_batch": schedule.micro_batch,
        "micro_batches": found.micro_batches,
        "virtual_stages": schedule.virtual_stages,
        "recompute": schedule.recompute.to_string(),
        "overlap_batches": schedule.overlap_batches,
        "strategy": found.strategy.to_string(),
        "seconds": found.seconds,
        "tokens_per_second": found.tokens_per_second,
        "flops": found.flops,
        "mfu": found.mfu,
        "phases": phases.collect::<Vec<_>>(),
        "memory": {
            "stage": memory.stage,
            "bytes": memory.bytes(),
            "weights": memory.weights,
            "gradients": memory.gradients,
            "optimizer": memory.optimizer,
            "activations": memory.activations,
            "buffers": memory.buffers,
            "reserve": memory.reserve,
        },
    })
}
