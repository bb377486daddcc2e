//! Compares layers imported from Hugging Face directories with results of transformers:
//! `check_oracle DIR…`, each with config.json, model.safetensors, case.json and block.safetensors.

#[path = "../tests/support/mod.rs"]
mod support;

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let mut failed = false;
    for dir in std::env::args().skip(1) {
        match support::check(Path::new(&dir)) {
            Ok(report) => {
                let good = report.error < 2e-5 && report.wrong_rows == 0;
                failed |= !good;
                let verdict = if good { "ok  " } else { "FAIL" };
                println!(
                    "{verdict} {dir}: error {:.1e}, {} wrong rows",
                    report.error, report.wrong_rows
                );
            }
            Err(error) => {
                failed = true;
                println!("FAIL {dir}: {error}");
            }
        }
    }
    if failed {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    }
}
