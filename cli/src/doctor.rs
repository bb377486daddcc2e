//! `moesaic doctor`.

use crate::console::Console;
use crate::failure::Result;
use crate::form::FormArgs;
use crate::inspect::machine_json;
use crate::links::ExpectedRates;
use crate::machine::MachineLimits;
use crate::palette::Palette;
use crate::simulators::{SimulatorSetup, simulators};
use crate::store::{StoreArgs, place, tuning};
use crate::units;
use clap::Args;
use moesaic::cache::Tuned;
use moesaic::cpu::{CpuDevice, host_isa, host_nodes};
use moesaic::kernel::CpuCaches;
use moesaic::plan::CacheClass;
use moesaic::target::Device;
use moesaic::toolchain::{DoctorFinding, Registry, doctor};
use moesaic::{Store, Target};
use serde_json::{Value, json};
use std::path::Path;

/// Say what this machine can compile and run
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  moesaic doctor
  moesaic doctor -v
  moesaic doctor --ranks 4
  moesaic launch -n 4 -- moesaic doctor --ranks
  mpirun -n 64 moesaic doctor --ranks --json
  srun moesaic doctor --ranks --expect 5,40")]
pub struct DoctorArgs {
    #[command(flatten)]
    store: StoreArgs,
    /// Measure how fast ranks reach each other: those that a launcher has started this program
    /// as, or N threads of this process
    #[arg(long, value_name = "N", num_args = 0..=1, conflicts_with = "cache", default_missing_value = "0",
          value_parser = clap::value_parser!(u16).range(0..=256))]
    ranks: Option<u16>,
    /// With --ranks: GB/s that two ranks of a node should have, and two of different nodes; 0
    /// expects nothing. Less than half of it is a failure, as after a fall back to a slower network
    #[arg(
        long,
        value_name = "NODE,NETWORK",
        requires = "ranks",
        conflicts_with = "cache",
        value_delimiter = ',',
        num_args = 1
    )]
    expect: Option<Vec<f64>>,
    #[command(flatten)]
    form: FormArgs,
}

/// Environment variables that change the findings.
const VARIABLES: [&str; 19] = [
    "MOESAIC_CACHE",
    "MOESAIC_CC",
    "MOESAIC_CC_AARCH64",
    "MOESAIC_QEMU",
    "MOESAIC_CXX",
    "MOESAIC_NVRTC",
    "MOESAIC_CLANG",
    "MOESAIC_HIPRTC",
    "MOESAIC_MPI",
    "MOESAIC_NCCL",
    "MOESAIC_LOG",
    "XDG_CACHE_HOME",
    "CC",
    "CXX",
    "CUDA_HOME",
    "CUDA_PATH",
    "ROCM_PATH",
    "LD_LIBRARY_PATH",
    "CUDA_VISIBLE_DEVICES",
];

/// The findings of `moesaic doctor`.
struct Diagnosis {
    system: String,
    cpu: String,
    cores: usize,
    target: Target,
    caches: CpuCaches,
    nodes: usize,
    limits: std::result::Result<MachineLimits, String>,
    cache: Cache,
    findings: Vec<DoctorFinding>,
    simulators: [SimulatorSetup; 4],
    variables: Vec<(&'static str, String)>,
}

struct Cache {
    dir: String,
    kernels: usize,
    bytes: u64,
    tunings: Vec<Tuned>,
    trouble: Option<String>,
}

/// Examines the machine and prints the findings. A missing compiler or device is not a failure.
pub fn execute(args: &DoctorArgs, console: &Console) -> Result {
    if let Some(ranks) = args.ranks {
        let expected = ExpectedRates::new(args.expect.as_deref())?;
        return crate::links::execute(ranks, expected, args.form.json, console);
    }
    let diagnosis = Diagnosis::new(&args.store.open(console));
    if args.form.json {
        console.json(&diagnosis.json())
    } else {
        console.report(&if console.verbose() {
            diagnosis.details(&console.out)
        } else {
            diagnosis.screen(&console.out)
        })
    }
}

impl Diagnosis {
    fn new(store: &Store) -> Diagnosis {
        let device = CpuDevice::new();
        let registry = Registry::open().unwrap_or_else(|_| Registry::at(Path::new("")));
        let set = |name: &&'static str| {
            Some((
                *name,
                std::env::var_os(name)?.to_string_lossy().into_owned(),
            ))
        };
        Diagnosis {
            system: format!(
                "moesaic {}, {} {}",
                env!("CARGO_PKG_VERSION"),
                std::env::consts::OS,
                std::env::consts::ARCH
            ),
            cpu: device.info().name.clone(),
            cores: device.threads(),
            target: Target::Cpu(host_isa()),
            caches: device.caches(),
            nodes: host_nodes().count(),
            limits: MachineLimits::measure_cpu(&device, host_isa())
                .map_err(|failure| failure.message),
            cache: Cache::of(store),
            findings: doctor(&registry),
            simulators: simulators(),
            variables: VARIABLES.iter().filter_map(set).collect(),
        }
    }

    /// Renders one line for each thing that a user may miss.
    fn screen(&self, palette: &Palette) -> String {
        let mut text = format!("{}\n", palette.bold(&self.system));
        let cpu = format!(
            "{}, {}, {}",
            self.cpu,
            units::count(self.cores, "thread"),
            self.target
        );
        text += &checked(true, "CPU", &cpu, palette);
        let limits = self.limits_line();
        text += &checked(self.limits.is_ok(), "limits", &limits, palette);
        let trouble = self.cache.trouble.as_deref().map(first_line);
        let cache = trouble.map_or_else(|| self.cache.line(), str::to_string);
        text += &checked(trouble.is_none(), "cache", &cache, palette);
        for finding in &self.findings {
            let missing = || match first_line(&finding.advice) {
                "" => first_line(&finding.tried).to_string(),
                advice => advice.to_string(),
            };
            let line = finding.found.clone().unwrap_or_else(missing);
            text += &checked(finding.found.is_some(), finding.subject, &line, palette);
        }
        for simulator in &self.simulators {
            let line = simulator.found.as_deref().unwrap_or(simulator.needs);
            text += &checked(simulator.found.is_some(), simulator.subject, line, palette);
        }
        text + &palette.dim("-v shows paths, targets, what was tried, and a block for a bug report")
            + "\n"
    }

    fn details(&self, palette: &Palette) -> String {
        let mut text = format!("{}\n", palette.bold(&self.system));
        text += &entry(
            "CPU",
            &format!(
                "{}, {}, {}",
                self.cpu,
                units::count(self.cores, "thread"),
                self.target
            ),
            palette,
        );
        text += &more(&self.caches_line());
        text += &more(&self.nodes_line());
        text += &more(&self.limits_line());
        text += &entry("cache", &self.cache.line(), palette);
        for tuned in &self.cache.tunings {
            text += &more(&tuning(tuned));
        }
        if let Some(trouble) = &self.cache.trouble {
            text += &more(trouble);
        }
        for finding in &self.findings {
            text += &found(finding, palette);
        }
        for simulator in &self.simulators {
            text += &simulated(simulator, palette);
        }
        for (name, value) in &self.variables {
            text += &entry(name, value, palette);
        }
        text + &format!("\n{}\n{}", palette.bold("for a bug report"), self.block())
    }

    /// Describes the CPU's known cache sizes, and the sizes that kernels are compiled for.
    fn caches_line(&self) -> String {
        let class = CacheClass::of(self.caches);
        let known = |bytes: Option<u64>| bytes.map_or("not known".to_string(), units::bytes);
        format!(
            "caches of a core: level 1 {}, level 2 {}; kernels are for {} and {}",
            known(self.caches.l1_bytes),
            known(self.caches.l2_bytes),
            units::bytes(class.l1_bytes() as u64),
            units::bytes(class.l2_bytes() as u64),
        )
    }

    fn nodes_line(&self) -> String {
        units::count(self.nodes, "NUMA node")
    }

    fn limits_line(&self) -> String {
        match &self.limits {
            Ok(limits) => format!(
                "measured: {} f32{}, {} read",
                units::flop_rate(limits.f32_flops),
                limits.half().map_or(String::new(), |(rate, name)| format!(
                    ", {} {name}",
                    units::flop_rate(rate)
                )),
                units::byte_rate(limits.bytes_per_second())
            ),
            Err(reason) => format!("limits were not measured: {}", first_line(reason)),
        }
    }

    /// Returns the block for bug reports. The block holds no path and no value of a variable,
    /// because people publish it.
    fn block(&self) -> String {
        let mut lines = vec![
            self.system.clone(),
            format!("cpu: {}, {} threads, {}", self.cpu, self.cores, self.target),
            self.caches_line(),
            self.nodes_line(),
            self.limits_line(),
            format!(
                "cache: {}, {}, {}",
                units::count(self.cache.kernels, "kernel"),
                units::bytes(self.cache.bytes),
                units::count(self.cache.tunings.len(), "tuning")
            ),
        ];
        for finding in &self.findings {
            // `pip 23 from /home/…`: the rest is a path.
            let found = finding
                .found
                .as_deref()
                .and_then(|found| found.split(" from ").next());
            let found = found.unwrap_or("none");
            lines.push(format!("{}: {found}", finding.subject));
        }
        for simulator in &self.simulators {
            let found = simulator.found.as_deref().unwrap_or("none");
            lines.push(format!("{}: {found}", simulator.subject));
        }
        let names: Vec<&str> = self.variables.iter().map(|(name, _)| *name).collect();
        lines.push(format!(
            "set: {}",
            if names.is_empty() {
                "nothing".to_string()
            } else {
                names.join(" ")
            }
        ));
        format!("```text\n{}\n```\n", lines.join("\n"))
    }

    fn json(&self) -> Value {
        let findings = self.findings.iter().map(|finding| {
            json!({
                "subject": finding.subject,
                "found": finding.found,
                "place": finding.place,
                "targets": names(&finding.targets),
                "tried": finding.tried,
                "advice": finding.advice,
            })
        });
        let variables: serde_json::Map<String, Value> = self
            .variables
            .iter()
            .map(|(name, value)| (name.to_string(), json!(value)))
            .collect();
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "system": self.system,
            "cpu": {
                "name": self.cpu,
                "threads": self.cores,
                "target": self.target.to_string(),
                "caches": self.caches,
                "numa_nodes": self.nodes,
                "planned_for": CacheClass::of(self.caches),
                "limits": self.limits.as_ref().ok().map(machine_json),
            },
            "cache": {
                "dir": self.cache.dir,
                "kernels": self.cache.kernels,
                "bytes": self.cache.bytes,
                "tunings": self.cache.tunings,
                "trouble": self.cache.trouble,
            },
            "findings": findings.collect::<Vec<_>>(),
            "simulators": self.simulators.iter().map(SimulatorSetup::json).collect::<Vec<_>>(),
            "variables": variables,
        })
    }
}

impl Cache {
    fn of(store: &Store) -> Cache {
        let kernels = store.list();
        Cache {
            dir: place(store),
            kernels: kernels.len(),
            bytes: kernels.iter().map(|kernel| kernel.bytes).sum(),
            tunings: store.tunings(),
            trouble: store.trouble().map(|trouble| trouble.to_string()),
        }
    }

    fn line(&self) -> String {
        format!(
            "{}, {}, {}",
            self.dir,
            units::count(self.kernels, "kernel"),
            units::bytes(self.bytes)
        )
    }
}

fn names(targets: &[Target]) -> Vec<String> {
    targets.iter().map(Target::to_string).collect()
}

const WIDTH: usize = 16;

/// Renders a line of the screen, cut where the stream ends.
fn checked(good: bool, name: &str, value: &str, palette: &Palette) -> String {
    let mark = if good {
        palette.paint("32", "✓")
    } else {
        palette.paint("33", "✗")
    };
    let room = palette.columns().map_or(100, |columns| columns.min(140));
    let room = room.saturating_sub(WIDTH + 6).max(8);
    let value = match value.chars().count() {
        long if long > room => value.chars().take(room - 1).chain(['…']).collect(),
        _ => value.to_string(),
    };
    let pad = " ".repeat((WIDTH + 1).saturating_sub(name.chars().count()));
    format!("  {mark} {}{pad}{value}\n", palette.bold(name))
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

fn entry(name: &str, value: &str, palette: &Palette) -> String {
    let pad = " ".repeat(WIDTH.saturating_sub(name.len()).max(1));
    format!("  {}{pad}{value}\n", palette.bold(name))
}

/// Indents the further lines of an entry.
fn more(text: &str) -> String {
    text.lines()
        .map(|line| format!("  {}{}\n", " ".repeat(WIDTH), line.trim()))
        .collect()
}

fn found(finding: &DoctorFinding, palette: &Palette) -> String {
    let Some(name) = &finding.found else {
        let mut text = entry(finding.subject, &palette.yellow("not found"), palette);
        text += &more(&finding.tried);
        return text + &more(&finding.advice);
    };
    let place = finding
        .place
        .as_ref()
        .map_or(String::new(), |place| format!(" ({place})"));
    let mut text = entry(finding.subject, &format!("{name}{place}"), palette);
    if !finding.targets.is_empty() {
        text += &more(&names(&finding.targets).join(" "));
    }
    text + &more(&finding.advice)
}

fn simulated(simulator: &SimulatorSetup, palette: &Palette) -> String {
    let name = match &simulator.found {
        Some(name) => name.clone(),
        None => palette.yellow("not found"),
    };
    let mut text = entry(simulator.subject, &name, palette);
    text += &more(simulator.needs);
    if let Some(trouble) = &simulator.trouble {
        return text + &more(&trouble[0]) + &more(&trouble[1]);
    }
    text + &more(&names(&simulator.targets).join(" "))
}
