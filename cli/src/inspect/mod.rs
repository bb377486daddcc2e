//! `moesaic inspect`.

mod counted;
pub mod html;
mod json;
mod model;
mod ranks;
mod text;

use crate::caches::CacheSizeArgs;
use crate::console::Console;
use crate::counts::TokensArgs;
use crate::disassemble::disassemble;
use crate::failure::{Failure, Result};
use crate::files::{Files, check_output};
use crate::form::FormArgs;
use crate::machine::{self, MachineLimits};
use crate::progress::Progress;
use crate::rank::OneRankArgs;
use crate::spec_source::{LayerArgs, needs_numbers};
use crate::store::StoreArgs;
use crate::targets::{self, TargetArgs};
use crate::training::TrainingArgs;
use clap::Args;
use counted::Counted;
pub use json::machine as machine_json;
use model::Inspection;
pub use model::arithmetic;
use moesaic::weights::write_whole;
use moesaic::{LayerSpec, Parallel, PlanOptions, Target};
use std::path::PathBuf;
pub use text::roofs;

/// The help of `--tokens`.
const COUNTS: &str = "Token counts for launches and roofline, and ranges of them such as 1-8";

/// The options that are of a mesh. Whatever conflicts with `--mesh` conflicts with these, too, because
/// clap waives what an option requires where something is given that conflicts with it.
const OF_RANKS: [&str; 5] = ["mesh", "strategy", "rank", "placement", "per_node"];

/// Show a layer's plan, kernels, resources, launches and roofline
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  moesaic inspect --spec layer.toml
  moesaic inspect --spec layer.toml --target cuda:sm_90a --kernel grouped_gemm --source
  moesaic inspect --spec layer.toml --target rocm:gfx942 --machine MI300X --tokens 1,128,8192
  moesaic inspect --spec layer.toml --target cuda:sm_90a --simulate 64
  moesaic inspect --spec layer.toml --target cpu --html report.html
  moesaic inspect --spec layer.toml --mesh ep=8 --strategy comm_dtype=fp8 --kernel comm_cast_pack --source

Kernels are compiled through the cache; no GPU is needed. Limits are measured for this \
machine's CPU and taken from data sheets for GPUs.")]
#[command(mut_arg("tokens", |arg| arg.default_value("1,64,4096").help(COUNTS)))]
pub struct InspectArgs {
    #[command(flatten)]
    pub layer: LayerArgs,
    #[command(flatten)]
    target: TargetArgs,
    /// Only kernels of this stem or name, such as gate_topk or grouped_gemm_up
    #[arg(long, value_name = "STEM")]
    kernel: Option<String>,
    #[command(flatten)]
    tokens: TokensArgs,
    /// The GPU whose published limits are used
    #[arg(long, value_name = "NAME", conflicts_with_all = OF_RANKS, value_parser = machine::NAME, hide_possible_values = true)]
    machine: Option<String>,
    /// Also run N random tokens on the GPU's simulator, and show what it counted
    #[arg(long, value_name = "N", conflicts_with_all = OF_RANKS, value_parser = clap::value_parser!(u32).range(1..))]
    simulate: Option<u32>,
    #[command(flatten)]
    training: TrainingArgs,
    /// Show one rank of this mesh instead: its launches and exchanges, and the bytes that it sends
    /// to other ranks of its node and to other nodes
    #[arg(long, value_name = crate::mesh::FORM, value_parser = crate::mesh::parse)]
    mesh: Option<Parallel>,
    #[command(flatten)]
    rank: OneRankArgs,
    /// Ranks per node, numbered node by node; all ranks are on one node if not given
    #[arg(long, value_name = "N", requires = "mesh", value_parser = clap::value_parser!(u16).range(1..))]
    per_node: Option<u16>,
    #[command(flatten)]
    caches: CacheSizeArgs,
    /// Also print the kernels' source
    #[arg(long)]
    source: bool,
    /// Also print the kernels' machine code, where a disassembler is found
    #[arg(long)]
    asm: bool,
    /// Write a self-contained page instead
    #[arg(long, value_name = "FILE", conflicts_with = "json", conflicts_with_all = OF_RANKS)]
    html: Option<PathBuf>,
    #[command(flatten)]
    form: FormArgs,
    #[command(flatten)]
    store: StoreArgs,
}

/// Plans, emits and compiles the layer, and shows the result.
pub fn execute(args: &InspectArgs, console: &Console) -> Result {
    if let Some(page) = &args.html {
        check_output("--html", page)?;
        Files::new()
            .layer(&args.layer)
            .written("--html", [page])
            .check()?;
    }
    let numbers = needs_numbers(args.mesh);
    let spec = args.layer.load_for(numbers, console)?.spec;
    let target = targets::resolve_one(&args.target.name)?;
    args.caches.check(&[target])?;
    if let Some(mesh) = args.mesh {
        return args.of_rank(&spec, target, mesh, console);
    }
    let simulator = args.simulate.map(|_| counted::simulator(target));
    let simulator = simulator.transpose()?;
    let machine = args.machine(target, console)?;
    let machine = machine.map(|machine| machine.with_tf32(spec.precision.tf32));
    let progress = Progress::start("compiling kernels");
    let request = model::InspectRequest {
        spec: &spec,
        target,
        options: PlanOptions {
            training: args.training.get(),
            caches: args.caches.here(target),
            ..PlanOptions::default()
        },
        tokens: &args.tokens.counts.wide(),
        kernel: args.kernel.as_deref(),
        machine,
        store: args.store.open(console),
    };
    let mut inspection = Inspection::new(request)?;
    if let (Some(simulator), Some(tokens)) = (simulator, args.simulate) {
        progress.next("running on the simulator");
        let store = args.store.open(console);
        let counted = Counted::run(
            &spec,
            args.training.get(),
            simulator,
            tokens as usize,
            store,
        )?;
        inspection.counted = Some(counted.of(&inspection));
    }
    drop(progress);
    if let Some(trouble) = &inspection.trouble {
        console.warn(&trouble.replace('\n', "\n  "));
    }
    let asm = match (&args.html, args.asm) {
        (_, true) => Some(disassembly(&inspection)?),
        // The page has machine code where a disassembler is found, and does without elsewhere.
        (Some(_), false) => disassembly(&inspection).ok(),
        (None, false) => None,
    };
    if args.form.json {
        console.json(&json::render(&inspection, asm.as_deref()))?;
    } else if let Some(path) = &args.html {
        let page = html::render(&inspection, asm.as_deref());
        write_whole(path, page.as_bytes()).map_err(|error| Failure::unwritable(path, &error))?;
        console.print(&format!("{}\n", path.display()))?;
    } else {
        console.print(&args.text(&inspection, asm.as_deref(), console))?;
    }
    failures(&inspection)
}

impl InspectArgs {
    /// Shows the steps of one rank.
    fn of_rank(
        &self,
        spec: &LayerSpec,
        target: Target,
        mesh: Parallel,
        console: &Console,
    ) -> Result {
        let shows = self.source || self.asm || self.form.json;
        if let (Some(kernel), false) = (&self.kernel, shows) {
            let message =
                format!("--kernel {kernel} does nothing here: the steps of a rank are shown whole");
            let hint = "add --source or --asm, which show its kernels, or leave it out";
            return Err(Failure::input(message).hint(hint));
        }
        let options = PlanOptions {
            training: self.training.get(),
            caches: self.caches.here(target),
            ..PlanOptions::default()
        };
        let plan = self.rank.plan(spec, target, &options, mesh)?;
        let mut kernels = ranks::chosen(crate::rank::kernels(&plan)?, self.kernel.as_deref())?;
        if self.asm {
            let _progress = Progress::start("compiling kernels");
            ranks::disassemble(&mut kernels, target, &self.store.open(console))?;
        }
        let per_node = self.per_node.map_or(mesh.ranks(), usize::from);
        if self.form.json {
            return console.json(&ranks::json(
                &plan,
                &kernels,
                &self.tokens.counts.wide(),
                per_node,
            ));
        }
        let palette = &console.out;
        let text = ranks::text(&plan, &self.tokens.counts.wide(), per_node, palette);
        let mut text = palette.fold(&text);
        text += &ranks::listing(&kernels, self.source, &console.out);
        console.print(&text)
    }

    fn machine(&self, target: moesaic::Target, console: &Console) -> Result<Option<MachineLimits>> {
        if let Some(name) = &self.machine {
            return machine::required(name, target).map(Some);
        }
        let moesaic::Target::Cpu(isa) = target else {
            return Ok(MachineLimits::of_target(target));
        };
        let device = moesaic::cpu::CpuDevice::new();
        match MachineLimits::measure_cpu(&device, isa) {
            Ok(machine) => Ok(Some(machine)),
            Err(failure) => {
                console.note(&format!(
                    "limits were not measured: {}",
                    first_line(&failure.message)
                ));
                Ok(None)
            }
        }
    }

    fn text(&self, inspection: &Inspection, asm: Option<&[String]>, console: &Console) -> String {
        let palette = &console.out;
        let mut text = palette.fold(&text::render(inspection, palette));
        for (i, kernel) in inspection.kernels.iter().enumerate() {
            if self.source {
                let source = kernel.source.text.trim_end();
                let title = kernel.label(&kernel.source.file_name());
                text += &format!("\n{}\n{source}\n", palette.bold(&title));
            }
            if let Some(asm) = asm.and_then(|asm| asm.get(i)) {
                let title = format!("{} machine code", kernel.label(&kernel.source.name));
                text += &format!("\n{}\n{asm}", palette.bold(&title));
            }
        }
        if !self.source && asm.is_none() {
            let how = "--source shows the source, --asm the machine code, --html FILE makes a page";
            text += &palette.fold(&format!("\n{}\n", palette.dim(how)));
        }
        text
    }
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

fn disassembly(inspection: &Inspection) -> Result<Vec<String>> {
    if let Some(trouble) = &inspection.trouble {
        return Err(Failure::input(trouble).hint("--asm needs the compiled kernels"));
    }
    let one = |kernel: &model::InspectedKernel| match &kernel.artifact {
        Some(artifact) => disassemble(inspection.target, artifact),
        None => Ok(String::new()),
    };
    inspection.kernels.iter().map(one).collect()
}

/// Returns a failure that counts the kernels that did not compile, after they were shown.
fn failures(inspection: &Inspection) -> Result {
    let failed: Vec<&str> = inspection
        .kernels
        .iter()
        .filter_map(|kernel| kernel.problem.as_deref())
        .collect();
    match failed.first() {
        Some(first) => Err(Failure::work(first)),
        None => Ok(()),
    }
}
