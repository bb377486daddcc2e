//! The whole probe on the simulated GPUs: kernels, machine and tables agree.

use moesaic_probe::open::{Kernels, open};
use moesaic_probe::report::Report;
use moesaic_toolchain::{ToolKind, testing};

fn clean(device: &str) -> Report {
    testing::installed(ToolKind::Cuda);
    let bench = open(device, &Kernels::Compiled).unwrap_or_else(|error| panic!("{error}"));
    let report = moesaic_probe::run(&bench, |_| ());
    assert!(report.is_clean(), "{report}");
    report
}

#[test]
fn ampere_agrees_with_the_tables() {
    let report = clean("sim:sm_80");
    assert!(report.rows.len() > 35, "{report}");
}

#[test]
fn hopper_agrees_with_the_tables() {
    let report = clean("sim:sm_90a");
    let skipped = report.summary().ends_with(" 0 not run");
    assert!(skipped && report.rows.len() > 150, "{report}");
}
