//! `moesaic plan`: of a layer, and in `model` of a whole model.

mod model;
mod model_page;
mod model_report;
mod report;

use crate::completed::Completed;
use crate::console::Console;
use crate::failure::{Failure, Result};
use crate::files::{Files, check_output};
use crate::form::FormArgs;
use crate::spec_source::{LayerArgs, read_text};
use crate::suggest::gpu;
use crate::training::TrainingArgs;
use crate::{experts, mesh};
use clap::Args;
use moesaic::plan::{CommDtype, ShadowModel, Strategy};
use moesaic::planner::model::at_speed;
use moesaic::planner::{
    self, Calibration, Machine, PlannerError, Ranked, ReadError, RoutedRows, Scenario, Simulator,
    Space,
};
use moesaic::weights::write_whole;
use moesaic::{LayerSpec, Parallel};
use std::fs;
use std::path::{Path, PathBuf};

/// Predict how long a layer or a model over many ranks takes, and rank meshes and strategies
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  moesaic plan --spec layer.toml --world 2048 --machine h100-ib
  moesaic plan --spec layer.toml --world 64 --machine h800 --training --skew zipf=1.2
  moesaic plan --spec layer.toml --world 16 --machine rack.toml --calibrate measured.toml --json
  moesaic plan --spec layer.toml --world 64 --machine h800 --mesh ep=64 --strategy overlap_degree=4 --trace out.json
  moesaic plan --hf deepseek-v3/config.json --world 2048 --machine h100-ib --training --html plan.html
  moesaic plan --hf deepseek-v3 --world 2048 --machine h100-ib --training --compare pp=16,tp=2,ep=64
  moesaic plan --hf deepseek-v3 --world 2048 --machine h100-ib --training --speed ib=0.5
  moesaic plan --spec layer.toml --layers 58 --params 671B --world 2048 --machine h800 --training

Nothing runs: the steps of ranks are simulated on a model of the machine. docs/SCALE.md \
compares the model with what others have measured.")]
pub struct PlanArgs {
    #[command(flatten)]
    layer: LayerArgs,
    /// Ranks of the job
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=8192))]
    world: u32,
    /// The machine: the name of a built-in one, or a file that ends in .toml
    #[arg(long, value_name = "NAME|FILE", value_parser = MACHINE, hide_possible_values = true)]
    machine: String,
    /// Take parts of the machine to be so many times as fast: arithmetic, memory, or a kind of link
    #[arg(long, value_name = "PART=FACTOR", value_delimiter = ',', value_parser = parse_speed)]
    speed: Vec<Speed>,
    /// Ranks per node, instead of the machine's number
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    per_node: Option<u16>,
    /// Tokens of each rank in a call of the layer (4096)
    #[arg(long, value_name = "N", conflicts_with = "counts")]
    tokens: Option<u32>,
    #[command(flatten)]
    training: TrainingArgs,
    /// Skew of the experts: the i-th most popular one is chosen in proportion to 1 / i^S
    #[arg(long, value_name = "zipf=S", value_parser = parse_skew, conflicts_with = "counts")]
    skew: Option<f64>,
    /// Counted rows of each rank for each expert: a JSON array with one array per rank
    #[arg(long, value_name = "FILE")]
    counts: Option<PathBuf>,
    /// Number of configurations to show
    #[arg(long, value_name = "N", default_value_t = 10, conflicts_with = "strategy", value_parser = clap::value_parser!(u16).range(1..))]
    top: u16,
    /// Types in which rows may travel between nodes: none (unchanged), bf16, f16, fp8
    #[arg(long, value_name = "D[,D]", value_delimiter = ',', default_value = "none", conflicts_with = "strategy", value_parser = str::parse::<CommDtype>)]
    comm_dtypes: Vec<CommDtype>,
    /// File of measurements that replace figures of the machine
    #[arg(long, value_name = "FILE")]
    calibrate: Option<PathBuf>,
    /// File that assigns experts to groups of ranks, such as `0-2 | 3-5,+2` (text or JSON); experts
    /// in order if not given
    #[arg(long, value_name = "FILE")]
    placement: Option<PathBuf>,
    /// Only this mesh
    #[arg(long, value_name = mesh::FORM, value_parser = mesh::parse)]
    mesh: Option<Parallel>,
    /// Only this strategy: `default`, or some of r=N, overlap_degree=N/N, overlap_by=B, all_to_all=A,
    /// comm_dtype=D/D and shadows=N, with commas between them and no spaces
    #[arg(long, value_name = "S", requires = "mesh")]
    strategy: Option<Strategy>,
    /// Also write the timeline of the best configuration, in Chrome's trace format
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    #[command(flatten)]
    form: FormArgs,
    #[command(flatten)]
    model: model::ModelPlanArgs,
}

/// The tokens of each rank, if nothing else is asked for.
const TOKENS: u32 = 4096;

/// The most ranks with counts of their own in a search over every mesh.
const MOST_COUNTED: usize = 512;

/// Simulates the configurations, ranks them and prints the best.
pub fn execute(args: &PlanArgs, console: &Console) -> Result {
    args.check_files()?;
    if model::is_asked(args)? {
        return model::execute(args, console);
    }
    let numbers = Some("meshes that cut experts are compared, too");
    let spec = args.layer.load_for(numbers, console)?.spec;
    let question = args.question(spec, console)?;
    let simulator = Simulator::new(&question);
    let space = Space {
        mesh: args.mesh,
        strategy: args.strategy,
        comm_dtypes: args.comm_dtypes.clone(),
        ..Space::default()
    };
    let ranked = planner::search(&question, &space).map_err(|error| args.failure(error))?;
    let Some(best) = ranked.best.first() else {
        return Err(Failure::work("no configuration was found"));
    };
    let (best, timeline) = simulator
        .timeline(best.mesh, best.strategy)
        .map_err(|error| args.failure(error))?;
    if let Some(path) = &args.trace {
        let text = planner::chrome(&timeline).to_string();
        write_whole(path, text.as_bytes()).map_err(|error| Failure::unwritable(path, &error))?;
    }
    let shown = Ranked {
        best: ranked
            .best
            .iter()
            .take(usize::from(args.top))
            .cloned()
            .collect(),
        ..ranked
    };
    let report = report::PlanReport {
        question: &question,
        tokens: args.counts.is_none().then_some(args.tokens()),
        ranked: &shown,
        best: &best,
    };
    if args.form.json {
        console.json(&report.json())
    } else {
        console.report(&report.text(&console.out))
    }
}

impl PlanArgs {
    fn check_files(&self) -> Result {
        let written = [("--trace", &self.trace), ("--html", &self.model.html)];
        let mut files = Files::new()
            .layer(&self.layer)
            .read("--machine", is_file(&self.machine))
            .read("--counts", &self.counts)
            .read("--calibrate", &self.calibrate)
            .read("--placement", &self.placement);
        for (option, path) in written {
            if let Some(path) = path {
                check_output(option, path)?;
            }
            files = files.written(option, path);
        }
        files.check()
    }

    fn tokens(&self) -> u32 {
        self.tokens.unwrap_or(TOKENS)
    }

    fn question(&self, spec: LayerSpec, console: &Console) -> Result<Scenario> {
        let machine = self.machine(console)?;
        let world = self.world as usize;
        if self.counts.is_some() && self.mesh.is_none() && world > MOST_COUNTED {
            let why = format!("--counts of {world} ranks, which all differ: one mesh at a time");
            return Err(Failure::input(why).hint("--mesh ep=N,expert_tp=N,dp=N names it"));
        }
        Ok(Scenario {
            routing: self.routing(&spec, world)?,
            placement: experts::placement(self.placement.as_deref())?,
            machine,
            world,
            training: self.training.get(),
            shadow_model: ShadowModel::of(&spec),
            spec,
        })
    }

    fn machine(&self, console: &Console) -> Result<Machine> {
        let machine = self.measured(console)?;
        let faster = |machine: Machine, speed: &Speed| at_speed(&machine, &speed.part, speed.by);
        let machine = self.speed.iter().try_fold(machine, faster);
        let machine = machine.map_err(|error| Failure::input(format!("--speed: {error}")))?;
        Ok(match self.per_node {
            Some(ranks) => machine.with_per_node(usize::from(ranks)),
            None => machine,
        })
    }

    /// Returns the machine with the figures of a calibration.
    fn measured(&self, console: &Console) -> Result<Machine> {
        let machine = machine(&self.machine)?;
        let Some(path) = &self.calibrate else {
            return Ok(machine);
        };
        let calibration = Calibration::from_toml(&read_text("a calibration", path)?);
        let calibration = calibration.map_err(|error| in_file(&error, path))?;
        self.check_calibrated(&calibration.machine, &machine.name, path, console)?;
        let machine = calibration.apply(machine);
        machine.map_err(|error| in_file(&error, path))
    }

    /// Refuses measurements of another machine. The owner of a machine may call it anything, except
    /// by the name of another built-in one.
    fn check_calibrated(
        &self,
        measured: &str,
        machine: &str,
        file: &Path,
        console: &Console,
    ) -> Result {
        let stem = Path::new(&self.machine).file_stem();
        if measured == machine || stem.is_some_and(|stem| stem == measured) {
            return Ok(());
        }
        let what = format!(
            "--calibrate {} is of machine `{measured}`, --machine is `{machine}`",
            file.display()
        );
        if planner::published(measured).is_ok() {
            let hint = format!("--machine {measured}, or a calibration of {machine}");
            return Err(Failure::input(what).hint(hint));
        }
        console.note(&format!("{what}: taken to be the same machine"));
        Ok(())
    }

    fn routing(&self, spec: &LayerSpec, world: usize) -> Result<RoutedRows> {
        let (experts, top_k) = (spec.shape.experts, spec.shape.top_k);
        let tokens = u64::from(self.tokens());
        match (&self.counts, self.skew) {
            (None, None) => Ok(RoutedRows::even(tokens, experts, top_k)),
            (None, Some(skew)) => RoutedRows::zipf_of(spec, tokens, skew).map_err(Failure::input),
            (Some(path), _) => {
                let text = read("the counts", path)?;
                let wrong = |error: &dyn std::fmt::Display| {
                    Failure::input(format!("{}: {error}", path.display()))
                        .hint("[[3, 0, 1], [2, 2, 0]] are the rows of two ranks for three experts")
                };
                let counts: Vec<Vec<u64>> =
                    serde_json::from_str(&text).map_err(|error| wrong(&error))?;
                RoutedRows::counted(world, experts, top_k, &counts).map_err(|error| wrong(&error))
            }
        }
    }

    fn failure(&self, error: PlannerError) -> Failure {
        let failure = Failure::input(&error);
        match error {
            PlannerError::Nothing { .. } => {
                failure.hint("more ranks, or a machine with more memory, hold it")
            }
            PlannerError::World { .. } => failure.hint("ep x expert_tp x dp ranks make the job"),
            _ => failure,
        }
    }
}

/// Returns a built-in machine, or reads one from a file.
pub fn machine(name: &str) -> Result<Machine> {
    if let Some(path) = is_file(name) {
        let machine = Machine::from_toml(&read_text("a machine", path)?);
        machine.map_err(|error| in_file(&error, path))
    } else {
        built_in(name)
    }
}

/// Returns the built-in machine of a name, or the only one whose name has it as a part: `h100` is
/// `h100-ib`.
fn built_in(name: &str) -> Result<Machine> {
    let asked = name.to_lowercase();
    let part = |known: &&str| known.split('-').any(|part| part == asked);
    let mut fitting = planner::published_names().filter(part);
    let name = match (fitting.next(), fitting.next()) {
        (Some(only), None) => only,
        _ => name,
    };
    planner::published(name).map_err(|error| match error {
        // The planner suggests the nearest word, which for a number is another GPU.
        ReadError::Unknown { name, known, .. } => {
            let all: Vec<&str> = planner::published_names().collect();
            let message =
                format!("unknown machine `{name}`\nknown machines: {known}; a path ends in .toml");
            let failure = Failure::input(message);
            match gpu(&name, &all) {
                Some(near) => failure.hint(format!("did you mean `{near}`?")),
                None => failure.hint("docs/SCALE.md says how you describe a machine of your own"),
            }
        }
        other => Failure::input(other),
    })
}

/// The name of a machine, or a file that describes one.
const MACHINE: Completed = Completed(|| planner::published_names().map(str::to_string).collect());

/// Returns the path if the name of a machine is a file.
pub fn is_file(machine: &str) -> Option<&Path> {
    let path = Path::new(machine);
    path.extension().filter(|end| *end == "toml").map(|_| path)
}

fn in_file(error: &ReadError, path: &Path) -> Failure {
    Failure::input(format!("{}: {error}", path.display()))
}

fn read(what: &str, path: &Path) -> Result<String> {
    fs::read_to_string(path).map_err(|error| Failure::unreadable(what, path, &error))
}

/// A part of the machine that is faster or slower than its file says.
#[derive(Clone, Debug)]
struct Speed {
    part: String,
    by: f64,
}

/// Parses a factor such as `ib=0.5`.
fn parse_speed(text: &str) -> std::result::Result<Speed, String> {
    let (part, by) = text.split_once('=').ok_or("write it as ib=0.5")?;
    match by.parse::<f64>() {
        Ok(by) if (0.01..=100.0).contains(&by) => Ok(Speed {
            part: part.to_string(),
            by,
        }),
        _ => Err(format!("`{by}` is no factor from 0.01 to 100")),
    }
}

fn parse_skew(text: &str) -> std::result::Result<f64, String> {
    let number = text.strip_prefix("zipf=").ok_or("write it as zipf=1.2")?;
    let skew: f64 = number
        .parse()
        .map_err(|_| format!("`{number}` is no number; write it as zipf=1.2"))?;
    if skew.is_finite() && skew >= 0.0 {
        Ok(skew)
    } else {
        Err("an exponent is 0, where all experts are alike, or more".to_string())
    }
}
