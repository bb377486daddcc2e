//! The probe must notice a device on which nothing happens. Every kernel is
//! really compiled, so the test also shows that all of them assemble.

use moesaic_kernel::Target;
use moesaic_probe::bench::Bench;
use moesaic_probe::idle::Idle;
use moesaic_probe::kept::Kept;
use moesaic_probe::open::keeping;
use moesaic_probe::report::{Outcome, Report};
use moesaic_target::Compiler;
use moesaic_toolchain::testing;
use std::path::PathBuf;
use std::sync::Arc;

fn idle(target: &str, compiler: Box<dyn Compiler>) -> Report {
    let target: Target = target.parse().unwrap();
    let bench = Bench::new(target, compiler, Arc::new(Idle::new(target)));
    moesaic_probe::run(&bench, |_| ())
}

fn compiled(target: &str) -> Report {
    let compiler = testing::nvrtc();
    idle(target, Box::new(compiler))
}

fn failures(report: &Report) -> Vec<&str> {
    let words = report.rows.iter().map(|row| match &row.outcome {
        Outcome::Failed(words) => Some(words.as_str()),
        _ => None,
    });
    words.flatten().collect()
}

#[test]
fn a_device_that_does_nothing_is_noticed() {
    let report = compiled("cuda:sm_90a");
    for row in &report.rows {
        assert!(matches!(row.outcome, Outcome::Differs(_)), "{row}");
    }
    assert!(!report.is_clean() && report.rows.len() > 100, "{report}");
}

#[test]
fn what_an_older_gpu_lacks_is_said() {
    let report = compiled("cuda:sm_80");
    let skipped = report
        .rows
        .iter()
        .filter(|row| matches!(row.outcome, Outcome::NotRun(_)));
    let text: Vec<String> = skipped.map(ToString::to_string).collect();
    assert!(text.len() > 5, "{report}");
    assert!(
        text[0].contains("not run: needs sm_90, this is sm_80"),
        "{}",
        text[0]
    );
    assert_eq!(failures(&report), [""; 0]);
}

#[test]
fn kernels_travel_to_a_machine_without_a_compiler() {
    testing::nvrtc();
    let folder = tempfile::tempdir().unwrap();
    let from = |folder: PathBuf| idle("cuda:sm_80", Box::new(Kept { folder }));
    let missing = from(folder.path().join("empty"));
    assert!(failures(&missing).len() > 3, "{missing}");
    for words in failures(&missing) {
        assert!(
            words.contains("`--device cuda:sm_80 --compile-only FOLDER`"),
            "{words}"
        );
    }
    let bench = keeping("cuda:sm_80", folder.path()).unwrap_or_else(|error| panic!("{error}"));
    let there = moesaic_probe::run(&bench, |_| ());
    let here = from(folder.path().to_path_buf());
    assert_eq!(failures(&here), [""; 0]);
    assert_eq!(here.to_string(), there.to_string());
    for file in folder.path().read_dir().unwrap() {
        std::fs::write(file.unwrap().path(), "no binary").unwrap();
    }
    let broken = from(folder.path().to_path_buf());
    assert!(
        failures(&broken)[0].contains("made a bad binary"),
        "{broken}"
    );
}
