//! Ranks that are processes: told different things, late for ever, or no ranks at all.

use crate::common::*;
use moesaic::Tensors;
use moesaic::toolchain::testing::{MpiLauncher, mpich, open_mpi};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Variables of launchers, should the tests themselves run under one.
const LAUNCHERS: [&str; 4] = ["RANK", "WORLD_SIZE", "PMI_RANK", "PMI_SIZE"];

fn clean() -> Command {
    let mut command = command();
    for name in LAUNCHERS {
        command.env_remove(name);
    }
    command
}

/// Words of a `moesaic run` of the small layer, the first rank's, with more and other files.
struct Told<'t> {
    small: &'t Small,
    input: PathBuf,
    weights: PathBuf,
    more: &'t str,
}

impl<'t> Told<'t> {
    fn new(small: &'t Small, more: &'t str) -> Told<'t> {
        Told {
            small,
            input: small.input.clone(),
            weights: small.weights.clone(),
            more,
        }
    }

    fn words(&self) -> Vec<String> {
        let file = |path: &Path| path.display().to_string();
        let mut words = vec![env!("CARGO_BIN_EXE_moesaic").to_string()];
        words.extend(["run", "--spec"].map(str::to_string));
        words.push(file(&self.small.spec));
        for (option, path) in [
            ("--input", &self.input),
            ("--weights", &self.weights),
            ("--output", &self.small.output),
        ] {
            words.extend([option.to_string(), file(path)]);
        }
        if !self.more.contains("--target") {
            words.extend(["--target", "cpu:portable"].map(str::to_string));
        }
        words.extend(self.more.split_whitespace().map(str::to_string));
        words
    }
}

/// Two ranks of a launcher, each with a command line of its own.
fn two(launcher: &MpiLauncher, told: [&Told<'_>; 2]) -> Finished {
    started(launcher, told.map(Told::words))
}

/// The same of any words, the first of which is the program.
fn started(launcher: &MpiLauncher, [first, second]: [Vec<String>; 2]) -> Finished {
    let mut command = launcher.command(1, Path::new(&first[0]));
    for (name, value) in clean().get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command
        .args(&first[1..])
        .args([":", "-n", "1"])
        .args(second);
    finish(command.env("MOESAIC_DEADLINE", "30"))
}

fn with_factor() -> Small {
    Small::of(&format!(
        "{SMALL}router = {{ noise = 2.0 }}\ncapacity = {{ mode = \"factor\", factor = 1.5 }}\n"
    ))
}

/// The same tensors with the last one of a name changed.
fn changed(small: &Small, name: &str, all: &Tensors<'static>, tensor: &str) -> PathBuf {
    let mut other = all.clone();
    let mut values = other[tensor].to_f32();
    *values.last_mut().unwrap() += 0.5;
    let shape = other[tensor].shape.clone();
    other.insert(tensor.to_string(), moesaic::Tensor::owned(&shape, values));
    save(small.dir.path(), name, &other)
}

#[test]
fn ranks_that_were_told_different_things_say_what_differs() {
    let small = with_factor();
    let mut longer = small_input();
    longer.insert("x".to_string(), tensor(&[9, 20], 5));
    let longer = save(small.dir.path(), "longer", &longer);
    let other_x = changed(&small, "x2", &small_input(), "x");
    let other_w = changed(&small, "w2", &small_weights(), "router.weight");
    let (plain, train) = ("", "--training");
    let told = |more| Told::new(&small, more);
    let with_input = |input: &PathBuf| Told {
        input: input.clone(),
        ..told(plain)
    };
    let with_weights = Told {
        weights: other_w,
        ..told(plain)
    };
    let launcher = mpich();
    for (first, second, parts) in [
        (
            told(plain),
            with_input(&longer),
            &["`tokens` is `7` on rank 0 and `9` on rank 1"][..],
        ),
        (told(plain), with_input(&other_x), &["`input` is"]),
        (told(plain), with_weights, &["`weights` is"]),
        (
            told("--training --seed 1"),
            told("--training --seed 2"),
            &["`--seed` is `1` on rank 0 and `2` on rank 1"],
        ),
        (
            told("--training --step 1"),
            told("--training --step 2"),
            &["`--step` is `1` on rank 0 and `2` on rank 1"],
        ),
        (
            told("--capacity-factor 2"),
            told(plain),
            &["`--capacity-factor` is `2` on rank 0 and `the spec's` on rank 1"],
        ),
        (
            told(plain),
            told("--target cpu:avx2"),
            &["`--target` is `cpu:portable` on rank 0 and `cpu:avx2` on rank 1"],
        ),
        (
            told(plain),
            told(train),
            &["`the pass` is `evaluation` on rank 0 and `--training` on rank 1"],
        ),
    ] {
        let done = two(&launcher, [&first, &second]);
        let all = format!("exit code {}: {}{}", done.code, done.stdout, done.stderr);
        assert_eq!(done.code, 2, "{all}");
        let said = done
            .stderr
            .matches("error: the ranks do not agree:")
            .count();
        assert_eq!(said, 2, "{all}");
        for part in parts {
            assert!(done.stderr.contains(part), "{part:?} is not in:\n{all}");
        }
        assert!(!small.output.exists(), "{all}");
    }
    let (one, other) = (told(train), told(train));
    two(&launcher, [&one, &other]).ok();
}

/// Weights that differ where no sample of them is taken are found by the ranks that read the
/// same of them: replicas of an expert here.
#[test]
fn weights_of_replicas_that_differ_anywhere_are_named() {
    let small = Small::of(
        "name = \"small\"\nshape = { model_dim = 64, hidden_dim = 32, experts = 2, top_k = 1 }\n",
    );
    let mut weights = Tensors::from([("router.weight".to_string(), tensor(&[2, 64], 1))]);
    for (name, shape) in [
        ("gate", [2, 32, 64]),
        ("up", [2, 32, 64]),
        ("down", [2, 64, 32]),
    ] {
        weights.insert(format!("experts.{name}.weight"), tensor(&shape, 2));
    }
    save(small.dir.path(), "w.safetensors", &weights);
    let x = Tensors::from([("x".to_string(), tensor(&[7, 64], 5))]);
    save(small.dir.path(), "x.safetensors", &x);
    let other = Told {
        weights: changed(&small, "w2", &weights, "experts.up.weight"),
        ..Told::new(&small, "--mesh dp=2")
    };
    let done = two(&mpich(), [&Told::new(&small, "--mesh dp=2"), &other]);
    assert_eq!(done.code, 2, "{}", done.stderr);
    let says = "`experts.up.weight` of expert 1, shard 0 on rank 1 is not that of rank 0";
    assert_eq!(done.stderr.matches(says).count(), 2, "{}", done.stderr);
    assert!(!small.output.exists());
}

/// It tells the others, which would wait for it until the deadline.
#[test]
fn a_rank_that_lacks_a_file_ends_all_with_its_reason() {
    let small = Small::new();
    let missing = Told {
        input: small.dir.path().join("none.safetensors"),
        ..Told::new(&small, "")
    };
    let started = std::time::Instant::now();
    let done = two(&mpich(), [&Told::new(&small, ""), &missing]);
    assert!(
        started.elapsed().as_secs() < 25,
        "they waited for the deadline"
    );
    assert_eq!(done.code, 2, "{}", done.stderr);
    let host = moesaic::collectives::topology::host_name();
    for part in [
        format!("rank 0 on {host}: error: rank 1 on {host} cannot take part: "),
        format!("rank 0 on {host}: hint: nothing has run"),
        format!("rank 1 on {host}: error: "),
    ] {
        assert!(done.stderr.contains(&part), "{part:?}: {}", done.stderr);
    }
    assert_eq!(
        done.stderr.matches("none.safetensors").count(),
        2,
        "{}",
        done.stderr
    );
}

#[test]
fn so_they_do_under_open_mpi() {
    let small = with_factor();
    let told = |more| Told::new(&small, more);
    let (first, second) = (told("--training --seed 1"), told("--training --seed 2"));
    let done = two(&open_mpi(), [&first, &second]);
    assert_eq!(done.code, 2, "{}", done.stderr);
    let words = "`--seed` is `1` on rank 0 and `2` on rank 1";
    assert!(done.stderr.contains(words), "{}", done.stderr);
}

/// MPI_Init waits for ever for a rank that has ended or is stopped before it.
#[test]
fn a_rank_that_never_comes_ends_the_job_at_the_deadline() {
    let _ = mpich();
    let small = Small::new();
    for (what, said) in [
        ("exit 0", "; rank 1 had ended before it"),
        ("kill -STOP $$", ""),
    ] {
        let script = format!("[ $LOCAL_RANK = 1 ] && {what}; exec \"$@\"");
        let mut launch = clean();
        launch
            .env("MOESAIC_CACHE", moesaic::cache::home().unwrap())
            .env("MOESAIC_DEADLINE", "1")
            .args(["launch", "-n", "2", "--grace", "0.3", "--mpi", "on", "--"])
            .args(["sh", "-c", &script, "sh"])
            .args(Told::new(&small, "").words());
        let mut guarded = Command::new("timeout");
        guarded
            .args(["--signal=KILL", "120"])
            .arg(launch.get_program());
        guarded.args(launch.get_args());
        for (name, value) in launch.get_envs() {
            match value {
                Some(value) => guarded.env(name, value),
                None => guarded.env_remove(name),
            };
        }
        let done = finish(&mut guarded);
        assert_eq!(done.code, 2, "{what}: {}{}", done.stdout, done.stderr);
        for part in [
            "MPI_Init",
            "has not returned on rank 0 of 2",
            "MOESAIC_DEADLINE",
            &format!("error: rank 0 ended with exit code 2{said}; the others are ended"),
        ] {
            assert!(done.stderr.contains(part), "{part:?}: {}", done.stderr);
        }
    }
}

#[test]
fn a_batch_script_of_slurm_is_no_rank() {
    let small = Small::new();
    let run = |more: &str, step: Option<&str>| {
        let mut run = clean();
        run.env("SLURM_PROCID", "0").env("SLURM_NTASKS", "4");
        if let Some(step) = step {
            run.env("SLURM_STEP_ID", step);
        }
        run.args(&Told::new(&small, more).words()[1..]);
        finish(&mut run)
    };
    run("", None).ok();
    run("--ranks 2", None).ok();
    let parts = ["SLURM_PROCID=0", "SLURM_NTASKS=4", "hint: "];
    run("--mesh ep=2", Some("0")).fails(2, &parts);
    run("--ranks 2", Some("0")).fails(2, &parts);
}

/// The command that the error of a strict run names.
fn advised(done: &Finished) -> Vec<String> {
    let line = done.stderr.lines();
    let mut line = line.filter_map(|line| line.trim().strip_prefix("add it with: moesaic "));
    let line = line.next().unwrap_or_else(|| panic!("{}", done.stderr));
    line.split(' ').map(str::to_string).collect()
}

#[test]
fn what_a_strict_run_advises_is_all_that_it_needs() {
    let small = Small::of(&SMALL.replace("hidden_dim = 12", "hidden_dim = 16"));
    let mut weights = small_weights();
    for name in ["gate", "up"] {
        let name = format!("experts.{name}.weight");
        weights.insert(name, tensor(&[5, 16, 20], 2));
    }
    weights.insert("experts.down.weight".to_string(), tensor(&[5, 20, 16], 4));
    save(small.dir.path(), "w.safetensors", &weights);
    let mut input = small_input();
    input.insert("dy".to_string(), tensor(&[7, 20], 6));
    save(small.dir.path(), "x.safetensors", &input);
    let record = small.dir.path().join("record").display().to_string();
    let file = small.spec.display().to_string();
    small.run(&["--record", &record]).ok();
    let cases: [&[&str]; 5] = [
        &["--ranks", "2"],
        &["--mesh", "ep=2,expert_tp=2", "--strategy", "r=1"],
        &["--ranks", "2", "--grad", "--recompute", "hidden"],
        &["--replay", &record],
        &["--replay", &record, "--ranks", "2"],
    ];
    for (at, more) in cases.into_iter().enumerate() {
        let cache = small.dir.path().join(at.to_string()).display().to_string();
        let strict = [more, &["--strict", "--cache", &cache]].concat();
        let failed = small.run(&strict);
        assert_eq!(failed.code, 1, "{more:?}: {}", failed.stderr);
        let words = advised(&failed);
        let words = words.iter().map(|word| word.replace("<file>", &file));
        let mut ahead = command();
        finish(ahead.args(words).args(["--cache", &cache])).ok();
        let done = small.run(&strict);
        assert_eq!(done.code, 0, "{more:?}: {}", done.stderr);
    }
}

/// A node needs the shards of the layer alone, whatever other nodes have.
#[test]
fn ranks_may_lack_the_shards_of_other_layers() {
    let scratch = scratch();
    let model = repository("tests/oracle/hf/mixtral");
    let whole = moesaic::weights::Checkpoint::open(model.join("model.safetensors")).unwrap();
    let [all, own] = ["all", "own"].map(|name| scratch.path().join(name));
    for folder in [&all, &own] {
        std::fs::create_dir(folder).unwrap();
        std::fs::copy(model.join("config.json"), folder.join("config.json")).unwrap();
        let mut index = serde_json::Map::new();
        for (layer, file) in [("layers.0.", "first"), ("layers.1.", "second")] {
            let names = whole.names().filter(|name| name.contains(layer));
            let names: Vec<&str> = names.collect();
            index.extend(names.iter().map(|name| (name.to_string(), file.into())));
            let tensors = names
                .iter()
                .map(|name| (name.to_string(), whole.read(name).unwrap()));
            if layer == "layers.1." || folder == &all {
                save(folder, file, &tensors.collect());
            }
        }
        let index = serde_json::json!({ "weight_map": index }).to_string();
        write(folder, "model.safetensors.index.json", &index);
    }
    let words = |folder: &Path| -> Vec<String> {
        let file = |path: PathBuf| path.display().to_string();
        let words = [
            env!("CARGO_BIN_EXE_moesaic").to_string(),
            "run".to_string(),
            format!("--hf={}", folder.display()),
            "--layer=1".to_string(),
            "--target=cpu:portable".to_string(),
            format!("--input={}", file(model.join("block.safetensors"))),
            format!("--output={}", file(scratch.path().join("y"))),
        ];
        words.into()
    };
    started(&mpich(), [words(&all), words(&own)]).ok();
}
