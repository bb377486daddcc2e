//! Compares the model with published measurements: `cargo xtask validate`.

use std::process::ExitCode;

fn main() -> ExitCode {
    match moesaic_planner::validate::run() {
        Ok(report) => {
            print!("{}", report.text());
            if report.holds() {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            }
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}
