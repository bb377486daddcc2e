//! `moesaic-probe --device cuda`: holds the tables of the simulators against
//! a device, and keeps what came out.

use clap::Parser;
use moesaic_probe::report::Report;
use moesaic_probe::{date, open};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Runs every hardware primitive and compares bits with the tables.
#[derive(Parser)]
struct Arguments {
    /// `cuda`, or a simulator such as `sim:sm_90a`.
    #[arg(long)]
    device: String,
    /// The folder that keeps the table.
    #[arg(long, default_value = "benches/results")]
    results: PathBuf,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let bench = match open::open(&arguments.device) {
        Ok(bench) => bench,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::from(2);
        }
    };
    let description = bench.description();
    println!("{description}");
    let report = moesaic_probe::run(&bench, |row| println!("{row}"));
    println!("{}", report.summary());
    let path = arguments.results.join(format!(
        "probe-{}-{}.txt",
        file_part(&arguments.device),
        date::today()
    ));
    if let Err(error) = keep(&path, &description, &report) {
        eprintln!("error: {}: {error}", path.display());
        return ExitCode::from(2);
    }
    println!("kept in {}", path.display());
    match report.is_clean() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

/// A device's name without what file names should not have.
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
