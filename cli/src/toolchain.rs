//! `moesaic toolchain`.

use crate::console::{Console, Verbosity};
use crate::failure::Result;
use crate::form::FormArgs;
use crate::progress::Progress;
use crate::table::Table;
use crate::units;
use clap::{Args, Subcommand};
use moesaic::toolchain::{
    DoctorFinding, InstallStep, Registered, Registry, ToolKind, doctor, install,
};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Install or list compilers and MPI
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  moesaic toolchain install
  moesaic toolchain install cuda rocm
  moesaic toolchain list

Compilers come as vendor wheels through pip, into the cache directory; a machine's own are \
used when it has them.")]
pub struct ToolchainArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand, Debug)]
enum Action {
    /// Install what is named; the compilers that the machine lacks if nothing is
    Install {
        /// cuda (NVRTC), rocm (clang for AMD GPUs), c (clang for the CPU), mpi (MPICH, for ranks
        /// in several processes)
        #[arg(value_name = "KIND")]
        kinds: Vec<ToolKind>,
    },
    /// List what was installed
    List {
        #[command(flatten)]
        form: FormArgs,
    },
}

/// Installs or lists compilers.
pub fn execute(args: &ToolchainArgs, console: &Console) -> Result {
    let mut registry = Registry::open()?;
    match &args.action {
        Action::Install { kinds } => add(&mut registry, kinds, console),
        Action::List { form } => list(&registry, form.json, console),
    }
}

fn add(registry: &mut Registry, kinds: &[ToolKind], console: &Console) -> Result {
    let kinds = if kinds.is_empty() {
        lacking(registry)
    } else {
        kinds.to_vec()
    };
    if kinds.is_empty() {
        return console
            .print("this machine has a compiler for cpu, cuda and rocm; nothing to do\n");
    }
    let bar = Progress::start("");
    let mut began = Instant::now();
    let result = install(registry, &kinds, &mut |step| match step {
        InstallStep::AlreadyThere(_) | InstallStep::Installed(_) => {
            bar.beside(|| console.tell(&step.to_string()))
        }
        InstallStep::Received { what, bytes } => {
            bar.next(received(what, *bytes, began.elapsed()));
        }
        step => {
            began = Instant::now();
            if bar.is_hidden() && console.verbosity > Verbosity::Quiet {
                console.tell(&step.to_string());
            }
            bar.next(step.to_string());
        }
    });
    drop(bar);
    result?;
    console.print(&table(registry, console))
}

/// Describes the bytes of a download and their rate. Pip does not say how many there will be.
fn received(what: &str, bytes: u64, time: Duration) -> String {
    let rate = bytes as f64 / time.as_secs_f64().max(1e-3);
    format!(
        "downloading {what}: {}, {}",
        units::traffic(bytes as f64),
        units::byte_rate(rate)
    )
}

/// Returns the kinds of compiler for which this machine has none that works.
fn lacking(registry: &Registry) -> Vec<ToolKind> {
    let missing = |finding: &DoctorFinding| finding.found.is_none();
    let kind = |finding: &DoctorFinding| match finding.subject {
        "C compiler" => Some(ToolKind::C),
        "CUDA compiler" => Some(ToolKind::Cuda),
        "ROCm compiler" => Some(ToolKind::Rocm),
        _ => None,
    };
    doctor(registry)
        .iter()
        .filter(|finding| missing(finding))
        .filter_map(kind)
        .collect()
}

fn list(registry: &Registry, json: bool, console: &Console) -> Result {
    if json {
        let tools: Vec<Value> = registry
            .list()
            .into_iter()
            .map(|t| as_json(registry, t))
            .collect();
        let folder = registry.folder().display().to_string();
        return console.json(&json!({ "folder": folder, "tools": tools }));
    }
    if registry.list().is_empty() {
        console.note("`moesaic toolchain install` adds what the machine lacks");
        return console.print(&format!(
            "nothing is installed in {}\n",
            registry.folder().display()
        ));
    }
    console.print(&table(registry, console))
}

fn table(registry: &Registry, console: &Console) -> String {
    let mut table = Table::new(&["KIND", "COMPILER", "WHEEL", "FILE"]);
    for tool in registry.list() {
        table.row([
            tool.kind.to_string(),
            tool.name.clone(),
            format!("{} {}", tool.package, tool.version),
            registry.path(tool).display().to_string(),
        ]);
    }
    table.render(&console.out)
}

fn as_json(registry: &Registry, tool: &Registered) -> Value {
    json!({
        "kind": tool.kind.name(),
        "name": tool.name,
        "package": tool.package,
        "version": tool.version,
        "file": registry.path(tool).display().to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_download_shows_its_bytes() {
        let text = received("ziglang==0.17.0", 34_200_000, Duration::from_secs(3));
        assert_eq!(text, "downloading ziglang==0.17.0: 34.2 MB, 11.4 MB/s");
    }
}
