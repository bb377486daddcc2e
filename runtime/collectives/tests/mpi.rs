//! Ranks that are processes under the launchers of MPICH 5, Open MPI and, where given, any other.
//! Each test starts this program again under `mpiexec`.

mod mpi_ranks;
mod nccl_fake;
mod support;

use moesaic_toolchain::testing::{MpiLauncher, mpich, open_mpi};
use std::process::Output;
use std::time::{Duration, Instant};

/// Starts one case on several ranks.
trait Cases {
    fn start(&self, ranks: usize, case: &str) -> (Output, Duration);

    fn run(&self, ranks: usize, case: &str) -> String;

    fn fail(&self, ranks: usize, case: &str, survivors: &[usize]) -> String;
}

impl Cases for MpiLauncher {
    fn start(&self, ranks: usize, case: &str) -> (Output, Duration) {
        let start = Instant::now();
        let output = self
            .command(ranks, &std::env::current_exe().unwrap())
            .args([
                "--ignored",
                "--exact",
                "mpi_ranks::a_rank",
                "--nocapture",
                "--test-threads=1",
            ])
            .env("MOESAIC_RANK_CASE", case)
            .output()
            .unwrap();
        (output, start.elapsed())
    }

    /// Returns the output of a case in which every rank succeeds.
    #[track_caller]
    fn run(&self, ranks: usize, case: &str) -> String {
        let (output, _) = self.start(ranks, case);
        let text = said(&output);
        assert!(output.status.success(), "{case}: {}\n{text}", output.status);
        text
    }

    /// Returns the output of a case that fails: every survivor prints a line `survivor N: ...`
    /// within a time limit.
    #[track_caller]
    fn fail(&self, ranks: usize, case: &str, survivors: &[usize]) -> String {
        let (output, took) = self.start(ranks, case);
        let text = said(&output);
        assert!(
            took < Duration::from_secs(90),
            "{case} took {took:?}\n{text}"
        );
        for rank in survivors {
            assert!(
                text.contains(&format!("survivor {rank}: ")),
                "{case}: rank {rank}\n{text}"
            );
        }
        text
    }
}

fn said(output: &Output) -> String {
    let both = [&output.stdout[..], &output.stderr[..]].concat();
    String::from_utf8_lossy(&both).into_owned()
}

fn every_operation(launcher: &MpiLauncher, version: &str) {
    for ranks in [1, 2, 4] {
        let text = launcher.run(ranks, "operations");
        assert_eq!(text.matches("did every operation").count(), ranks, "{text}");
        assert!(text.contains(version), "{text}");
    }
}

fn failures(launcher: &MpiLauncher) {
    let late = launcher.fail(3, "late", &[0, 1]);
    for words in [
        "operation 1 `all_to_all` (dispatch), phase `exchange`",
        "waiting for rank 2 (last heard of in operation 0 `barrier`)",
    ] {
        assert!(late.contains(words), "`{words}` is not in: {late}");
    }
    let stopped = launcher.fail(2, "stopped", &[0]);
    assert!(
        stopped.contains("waiting for rank 1 (last heard of in operation 0 `barrier`)"),
        "{stopped}"
    );
    let panicked = launcher.fail(3, "panicked", &[0, 2]);
    assert!(
        panicked.contains("rank 1 gave up: rank 1, between operations: rank 1 has panicked"),
        "{panicked}"
    );
    let counts = launcher.fail(2, "counts", &[0, 1]);
    assert!(
        counts.contains(
            "the number of bytes from there to here differs: 400004 here, 400000 on rank 0"
        ),
        "{counts}"
    );
    let skipped = launcher.fail(2, "skipped", &[0, 1]);
    assert!(skipped.contains("the label differs: "), "{skipped}");
    let disagreement = launcher.fail(2, "disagreement", &[0, 1]);
    assert!(
        disagreement.contains("`plan` is `a` on rank 0 and `b` on rank 1"),
        "{disagreement}"
    );
}

#[test]
fn every_operation_under_mpich() {
    every_operation(&mpich(), "MPICH");
}

#[test]
fn every_operation_under_open_mpi() {
    every_operation(&open_mpi(), "Open MPI");
}

#[test]
fn failures_under_mpich_are_errors_on_every_survivor() {
    failures(&mpich());
}

#[test]
fn failures_under_open_mpi_are_errors_on_every_survivor() {
    failures(&open_mpi());
}

/// Launchers end a job when a process is killed; no rank may be left behind.
#[test]
fn a_killed_rank_ends_the_job() {
    for launcher in [mpich(), open_mpi()] {
        let (output, took) = launcher.start(3, "killed");
        let text = said(&output);
        assert!(!output.status.success(), "{text}");
        assert!(text.contains("rank 2 ends itself"), "{text}");
        assert!(!text.contains("survivor"), "they waited in vain: {text}");
        assert!(took < Duration::from_secs(90), "it took {took:?}");
    }
}

#[test]
fn another_launchers_library_is_refused() {
    let wrong = MpiLauncher {
        library: open_mpi().library,
        ..mpich()
    };
    let text = wrong.fail(2, "operations", &[]);
    assert!(text.contains("it is not the launcher's"), "{text}");
}

/// MPICH's library would end the process in that case, so it must be refused before it is
/// initialized.
#[test]
fn under_open_mpi_another_library_is_refused_before_it_begins() {
    let wrong = MpiLauncher {
        library: mpich().library,
        ..open_mpi()
    };
    let text = wrong.fail(2, "operations", &[]);
    for words in [
        "Open MPI's mpirun has started this process",
        "OMPI_COMM_WORLD_SIZE=2",
        "set MOESAIC_MPI to Open MPI's libmpi.so.40",
    ] {
        assert!(text.contains(words), "{words:?} is not in: {text}");
    }
}

/// The wheel's other library has the interface of MPICH 4.
#[test]
fn every_operation_by_the_interface_of_mpich_4() {
    let mut launcher = mpich();
    launcher.library = launcher.library.replace("libmpi_abi.so.1", "libmpi.so.12");
    let text = launcher.run(3, "operations");
    assert_eq!(
        text.matches("did every operation by MPICH's ABI").count(),
        3,
        "{text}"
    );
}

#[test]
fn more_than_two_gigabytes_in_one_message() {
    for launcher in [mpich(), open_mpi()] {
        let text = launcher.run(2, "large");
        assert!(text.contains("2200000000 bytes arrived"), "{text}");
    }
}

#[test]
fn ranks_with_gpus_learn_of_each_other_by_mpi() {
    let alone = mpich().run(1, "nccl");
    assert!(
        alone.contains("did every operation by NCCL over MPI"),
        "{alone}"
    );
    let both = mpich().run(2, "nccl");
    let words = "refused: ranks 0 and 1 have the same device, 0000:17:00 of host";
    assert_eq!(both.matches(words).count(), 2, "{both}");
}
