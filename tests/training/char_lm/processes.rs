//! The language model on ranks that are processes under MPI: the losses of one process,
//! also when a rank is killed on the way and the job goes on with another mesh.

use super::spread::{STEPS, alone, batch, learner, near};
use super::{SHAPE, Text};
use crate::conformance::mesh::mesh;
use moesaic::collectives::{Call, mpi};
use moesaic::toolchain::testing::{MpiLauncher, mpich, open_mpi};
use moesaic::{Engine, EngineOptions, Mesh, Parallel};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// What a test tells its ranks: where they read and write, `ep,shards,dp`, and the step
/// after which one of them is killed.
const FOLDER: &str = "MOESAIC_TEST_FOLDER";
const MESH: &str = "MOESAIC_TEST_MESH";
const KILLED: &str = "MOESAIC_TEST_KILLED_AFTER";

#[test]
#[ignore = "started by the other tests, under mpiexec"]
fn a_rank() {
    let folder = std::env::var_os(FOLDER).expect("it is started under mpiexec");
    let numbers = |name: &str| -> Vec<usize> {
        let text = std::env::var(name).unwrap_or_default();
        let numbers = text.split(',').filter(|number| !number.is_empty());
        numbers.map(|number| number.parse().unwrap()).collect()
    };
    let [ep, shards, dp] = numbers(MESH)[..] else {
        panic!("a mesh has three sizes")
    };
    let killed = numbers(KILLED).first().copied();
    learn(Path::new(&folder), mesh(ep, shards, dp), killed);
}

/// Learns to the end, from the checkpoint if there is one, and saves each step. The first
/// rank writes down the losses, and last that of held-out text.
fn learn(folder: &Path, parallel: Parallel, killed: Option<usize>) {
    // Ranks share the machine.
    let one = EngineOptions {
        threads: Some(1),
        ..EngineOptions::default()
    };
    let engine = Engine::open("cpu", one).expect("a C compiler");
    let options = mpi::MpiOptions::default();
    let mut world = mpi::start(&options, engine.device().clone()).expect("a world");
    let mesh = Mesh::new(&mut world, parallel).expect("a mesh");
    let (text, saved) = (Text::book(), folder.join("model.safetensors"));
    let mut learner = learner(&engine, &mesh, &text);
    if saved.exists() {
        learner.resume(&saved).expect("it was saved");
    }
    let mut losses = (mesh.rank() == 0).then(|| {
        let mut file = File::options();
        let opened = file.create(true).append(true).open(folder.join("losses"));
        opened.expect("a file")
    });
    let mut write = |loss: f64| {
        if let Some(file) = &mut losses {
            writeln!(file, "{loss:e}").expect("there is room");
        }
    };
    while learner.steps() < STEPS {
        let batch = batch(&text, learner.steps() + 1);
        write(learner.step(&batch).expect("it runs"));
        learner.save(&saved).expect("there is room");
        if killed == Some(learner.steps()) && mesh.rank() == 1 {
            let own = std::process::id().to_string();
            Command::new("kill")
                .args(["-KILL", &own])
                .status()
                .expect("it runs");
        }
    }
    let held_out = text.held_out(3, SHAPE.context);
    write(learner.held_out(&held_out).expect("it runs"));
    world.finish(&Call::new("end")).expect("all came here");
}

/// Jobs of one launcher in one folder.
struct Jobs {
    launcher: MpiLauncher,
    folder: PathBuf,
}

impl Jobs {
    fn run(&self, parallel: Parallel, killed: Option<usize>) -> Output {
        let Parallel {
            ep,
            expert_tp: shards,
            dp,
            ..
        } = parallel;
        let mut command = self
            .launcher
            .command(parallel.ranks(), &std::env::current_exe().unwrap());
        let name = concat!(module_path!(), "::a_rank");
        let (_, name) = name.split_once("::").expect("a crate and modules");
        command
            .args(["--ignored", "--exact", name, "--nocapture"])
            .env(FOLDER, &self.folder)
            .env(MESH, format!("{ep},{shards},{dp}"));
        if let Some(step) = killed {
            command.env(KILLED, step.to_string());
        }
        command.output().expect("it starts")
    }

    /// All losses that were written down.
    fn losses(&self) -> Vec<f64> {
        let text = fs::read_to_string(self.folder.join("losses")).unwrap_or_default();
        text.lines().map(|loss| loss.parse().unwrap()).collect()
    }
}

fn said(output: &Output) -> String {
    let both = [&output.stdout[..], &output.stderr[..]].concat();
    String::from_utf8_lossy(&both).into_owned()
}

/// A run to its end on four ranks, and another of which a rank is killed after half of the
/// steps, to its end on `then`.
fn check(launcher: fn() -> MpiLauncher, then: Parallel) {
    let first = mesh(2, 1, 2);
    let engine = Engine::cpu().expect("a C compiler");
    let want = alone(&engine, &Text::book());
    let kept = tempfile::tempdir().expect("a folder");
    let jobs = |name: &str| {
        let folder = kept.path().join(name);
        fs::create_dir(&folder).expect("there is room");
        let launcher = launcher();
        Jobs { launcher, folder }
    };
    let straight = jobs("straight");
    let ended = straight.run(first, None);
    assert!(ended.status.success(), "{}", said(&ended));
    near(first, &straight.losses(), &want);

    let half = STEPS / 2;
    let killed = jobs("killed");
    let ended = killed.run(first, Some(half));
    assert!(
        !ended.status.success(),
        "a rank was killed: {}",
        said(&ended)
    );
    near(first, &killed.losses(), &want[..half]);
    let ended = killed.run(then, None);
    assert!(ended.status.success(), "{}", said(&ended));
    near(then, &killed.losses(), &want);
}

#[test]
fn mpich_learns_what_one_process_learns_and_goes_on_after_a_kill() {
    check(mpich, mesh(4, 1, 1));
}

#[test]
fn open_mpi_learns_what_one_process_learns_and_goes_on_after_a_kill() {
    check(open_mpi, mesh(1, 1, 2));
}
