//! The job script for SLURM, with stand-ins for `srun` and `scontrol` that start real MPI ranks.

use crate::common::*;
use moesaic::toolchain::ToolKind;
use moesaic::toolchain::testing::{installed, mpich, open_mpi};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The job's program: a rank's forward and backward pass, which may compile nothing.
const PROGRAM: &str = "run --strict --training --target cpu:portable";

/// A job of two nodes of two tasks.
struct Job {
    small: Small,
    /// Cold; `None` is the cache that all tests share, for fewer compiles.
    cache: Option<tempfile::TempDir>,
}

impl Job {
    fn new() -> Job {
        Job {
            small: Small::new(),
            cache: None,
        }
    }

    /// The script with these words, in the environment that sbatch gives it.
    fn script(&self, words: &[&str]) -> Command {
        let stand_ins = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/slurm");
        let program = Path::new(env!("CARGO_BIN_EXE_moesaic")).parent().unwrap();
        let mut command = Command::new("bash");
        command.arg(repository("examples/slurm/train.sh"));
        command.args(words);
        for (name, value) in self::command().get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        let usual = command.get_envs().find(|(name, _)| *name == "PATH");
        let usual = usual.unwrap().1.unwrap().to_owned();
        let path = [stand_ins, program.to_path_buf()].into_iter();
        let path = std::env::join_paths(path.chain(std::env::split_paths(&usual))).unwrap();
        command
            .env("PATH", path)
            .env("STAND_IN", self.small.dir.path())
            .env("STAND_IN_HYDRA", mpich().program)
            .env("LAYER", &self.small.spec)
            .env("TARGET", "cpu:portable");
        if let Some(cache) = &self.cache {
            command.env("MOESAIC_CACHE", cache.path());
        }
        for name in ["MPI_TYPE", "MOESAIC_MPI", "MESH", "TRAINING", "PRECOMPILE"] {
            command.env_remove(name);
        }
        for (name, value) in [
            ("SLURM_JOB_ID", "4711"),
            ("SLURM_JOB_NODELIST", "node0,node1"),
            ("SLURM_NTASKS", "4"),
            ("SLURM_NTASKS_PER_NODE", "2"),
            ("SLURM_CPUS_PER_TASK", "8"),
            // A batch script has these, and is no rank.
            ("SLURM_PROCID", "0"),
            ("SLURM_LOCALID", "0"),
        ] {
            command.env(name, value);
        }
        command
    }

    /// The words of `moesaic run` on all ranks.
    fn program(&self) -> Vec<String> {
        let file = |path: &PathBuf| path.display().to_string();
        let mut words = vec!["moesaic".to_string()];
        words.extend(PROGRAM.split(' ').map(str::to_string));
        for (option, path) in [
            ("--spec", &self.small.spec),
            ("--input", &self.small.input),
            ("--weights", &self.small.weights),
            ("--output", &self.small.output),
        ] {
            words.extend([option.to_string(), file(path)]);
        }
        words
    }

    /// The steps that `srun` was asked for.
    fn calls(&self) -> Vec<String> {
        let calls = self.small.dir.path().join("calls");
        let text = std::fs::read_to_string(calls).unwrap_or_default();
        text.lines().map(str::to_string).collect()
    }
}

/// Runs the script; the text of `doctor` says by which MPI the ranks have met.
fn ranks_by(job: Job, kind: &str, library: &str, words: &str) {
    let program = job.program();
    let program: Vec<&str> = program.iter().map(String::as_str).collect();
    let text = finish(job.script(&program).env("MOESAIC_MPI", library)).ok();
    // Under Open MPI the first rank's output is a pseudo-terminal, and nobody's screen.
    assert!(!text.contains('\u{1b}'), "{text}");
    assert!(text.contains(&format!("4 ranks by MPI ({words}")), "{text}");
    let (_, shape, _) = load(&job.small.output, "y");
    assert_eq!(shape, [7, 20]);
    let calls = job.calls();
    let [precompile, doctor, program] = &calls[..] else {
        panic!("{calls:?}");
    };
    for words in ["none 1 ", "--mesh ep=4", "--training none"] {
        assert!(precompile.contains(words), "{precompile}");
    }
    let step = format!("{kind} 4 cpus=8 moesaic");
    assert!(
        doctor.starts_with(&format!("{step} doctor --ranks")),
        "{doctor}"
    );
    assert!(
        program.starts_with(&format!("{step} run --strict")),
        "{program}"
    );
}

#[test]
fn the_job_script_runs_ranks_by_pmix() {
    // Found by the process manager that srun speaks, although MPICH is installed, too.
    let _ = open_mpi();
    let _ = installed(ToolKind::Mpi);
    ranks_by(Job::new(), "pmix", "", "Open MPI");
}

#[test]
fn the_job_script_runs_ranks_by_pmi2() {
    let job = Job {
        cache: Some(scratch()),
        ..Job::new()
    };
    ranks_by(job, "pmi2", &mpich().library, "MPICH");
}

#[test]
fn the_job_script_says_what_srun_does_not_speak() {
    let job = Job::new();
    let done = finish(job.script(&["true"]).env("MPI_TYPE", "pmix_v9"));
    assert_eq!(done.code, 2, "{}", done.stderr);
    let words = "srun does not speak pmix_v9";
    assert!(
        done.stderr.contains(words) && done.stderr.contains("pmi2"),
        "{}",
        done.stderr
    );
    assert!(job.calls().is_empty());
    let none = finish(&mut job.script(&[]));
    assert_eq!(none.code, 2);
    assert!(none.stderr.contains("usage: sbatch"), "{}", none.stderr);
}

/// A rank for each GPU of nodes of eight.
#[test]
fn the_job_script_is_for_nodes_of_8_gpus() {
    let script = std::fs::read_to_string(repository("examples/slurm/train.sh")).unwrap();
    for line in ["--ntasks-per-node=8", "--gpus-per-node=8"] {
        assert!(script.contains(&format!("\n#SBATCH {line}\n")), "{line}");
    }
}
