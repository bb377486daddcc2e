//! The command line: compares the tables of the simulators with a device, and
//! keeps the results.
//! came out.

use crate::open::{Kernels, OpenError};
use crate::report::{Outcome, Report, Row};
use crate::{date, open};
use clap::Parser;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Runs every hardware primitive and compares bits with the tables.
#[derive(Parser)]
pub struct Arguments {
    /// `cuda`, or a simulator such as `sim:sm_90a`; with --compile-only the
    /// target to compile for, such as `cuda:sm_90a`.
    #[arg(long)]
    device: String,
    /// Compile every kernel into a folder, and run nothing.
    #[arg(long, value_name = "FOLDER", conflicts_with_all = ["from", "results"])]
    compile_only: Option<PathBuf>,
    /// Take the kernels of `cuda` from a folder that --compile-only filled.
    #[arg(long, value_name = "FOLDER")]
    from: Option<PathBuf>,
    /// Run only the primitives with this text in their names.
    #[arg(long, value_name = "PART", default_value = "")]
    only: String,
    /// The folder that keeps the table: benches/results by default, or the
    /// current one where there is no such folder.
    #[arg(long)]
    results: Option<PathBuf>,
}

/// A reason that there is no table.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error("{path}: {error}")]
    File {
        path: PathBuf,
        error: std::io::Error,
    },
}

/// Runs the command. Returns 0 when everything agrees or was compiled, 1 when
/// not, 2 when nothing could run.
pub fn main(arguments: &Arguments) -> ExitCode {
    let clean = match &arguments.compile_only {
        Some(folder) => compile(&arguments.device, folder),
        None => run(arguments),
    };
    match clean {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

/// Compiles every kernel; returns true if all compiled.
fn compile(target: &str, folder: &Path) -> Result<bool, Failure> {
    let bench = open::keeping(target, folder)?;
    let report = crate::run(&bench, |row| {
        if matches!(row.outcome, Outcome::Failed(_)) {
            println!("{row}");
        }
    });
    let failed = |row: &&Row| matches!(row.outcome, Outcome::Failed(_));
    let failures = report.rows.iter().filter(failed).count();
    let folder = folder.display();
    println!("kernels for {target} are in {folder}; {failures} primitives did not compile");
    Ok(failures == 0)
}

/// Runs the probes; returns true if everything agreed.
fn run(arguments: &Arguments) -> Result<bool, Failure> {
    let kernels = arguments.from.clone();
    let kernels = kernels.map_or(Kernels::Compiled, Kernels::Kept);
    let bench = open::open(&arguments.device, &kernels)?;
    let description = bench.description();
    println!("{description}");
    let report = crate::run_some(&bench, &arguments.only, |row| println!("{row}"));
    println!("{}", report.summary());
    let device = file_part(&arguments.device);
    let path = results(arguments).join(format!("probe-{device}-{}.txt", date::today()));
    keep(&path, &description, &report).map_err(|error| Failure::File {
        path: path.clone(),
        error,
    })?;
    println!("kept in {}", path.display());
    Ok(report.is_clean())
}

fn results(arguments: &Arguments) -> PathBuf {
    let repository = Path::new("benches/results");
    match &arguments.results {
        Some(folder) => folder.clone(),
        None if repository.is_dir() => repository.to_path_buf(),
        None => PathBuf::from("."),
    }
}

/// Returns a device's name without characters that file names should not have.
fn file_part(device: &str) -> String {
    device.replace(':', "-")
}

fn keep(path: &Path, description: &str, report: &Report) -> std::io::Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let text = format!("{}  {description}\n\n{report}", date::today());
    std::fs::write(path, text)
}
