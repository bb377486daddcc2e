//! No output destroys what is read, or another output.

use crate::common::*;
use moesaic::weights::Checkpoint;
use std::fs;
use std::path::{Path, PathBuf};

/// Calls in a folder with the small layer, which has to be as it was after each.
struct Spared {
    small: Small,
    before: Vec<(PathBuf, Vec<u8>)>,
}

fn contents(dir: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let entries = fs::read_dir(dir).expect("a folder").flatten();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    files.sort();
    let files = files.into_iter().filter(|file| file.is_file());
    files
        .map(|file| (file.clone(), fs::read(file).expect("a file")))
        .collect()
}

impl Spared {
    fn new() -> Spared {
        let small = Small::new();
        let dir = small.dir.path();
        fs::hard_link(&small.weights, dir.join("hard.safetensors")).expect("a link");
        #[cfg(unix)]
        std::os::unix::fs::symlink("x.safetensors", dir.join("soft.safetensors")).expect("a link");
        let before = contents(dir);
        Spared { small, before }
    }

    fn call(&self, words: &str) -> Finished {
        let mut call = command();
        call.current_dir(self.small.dir.path());
        finish(call.args(words.split(' ')))
    }

    fn refuses(&self, words: &str, parts: &[&str]) {
        self.call(words).fails(2, parts);
        self.unchanged(words);
    }

    fn unchanged(&self, words: &str) {
        let now = contents(self.small.dir.path());
        assert!(now == self.before, "{words} changed or made a file");
    }
}

#[test]
fn no_output_of_a_run_is_an_input_or_another_output() {
    let all = Spared::new();
    let run = "run --target cpu --spec small.toml --weights w.safetensors --input x.safetensors";
    for (more, parts) in [
        (
            "--output w.safetensors",
            ["--output would overwrite w.safetensors", "--weights reads"],
        ),
        (
            "--output ./x.safetensors",
            ["--output ./x.safetensors would", "--input reads"],
        ),
        (
            "--output small.toml",
            ["--output would overwrite small.toml", "--spec reads"],
        ),
        (
            "--output hard.safetensors",
            ["would overwrite w.safetensors", "they are one file"],
        ),
        (
            "--output soft.safetensors",
            ["would overwrite x.safetensors", "they are one file"],
        ),
        (
            "--output y --record w.safetensors",
            ["--record would overwrite w.safetensors", "--weights reads"],
        ),
        (
            "--output y --record x.safetensors",
            ["--record would overwrite x.safetensors", "--input reads"],
        ),
        (
            "--output y --replay r --record r",
            ["--record would overwrite r", "--replay reads"],
        ),
        (
            "--output y --record y",
            ["--output would overwrite y", "--record writes"],
        ),
        (
            "--output ./y --trace y",
            ["--output ./y would overwrite y", "--trace writes"],
        ),
        (
            "--output y --record z --trace z",
            ["--record would overwrite z", "--trace writes"],
        ),
    ] {
        all.refuses(&format!("{run} {more}"), &parts);
    }
    // What loses nothing by it may be written to twice.
    #[cfg(unix)]
    all.call(&format!("{run} --output /dev/null --record /dev/null"))
        .ok();
    all.unchanged("/dev/null");
}

#[test]
fn a_model_is_not_overwritten_by_what_is_made_of_it() {
    let dir = scratch();
    for name in ["config.json", "model.safetensors"] {
        let from = repository("tests/oracle/hf/mixtral").join(name);
        fs::copy(from, dir.path().join(name)).expect("a copy");
    }
    let before = contents(dir.path());
    let model = dir.path().display().to_string();
    for name in [
        "model.safetensors",
        "config.json",
        "model.safetensors.index.json",
    ] {
        let output = dir.path().join(name).display().to_string();
        let run = ["run", "--hf", &model, "--input", "none", "--output"];
        moesaic([&run[..], &[&output]].concat()).fails(2, &["--output", "--hf reads", name]);
        let pack = ["precompile", "--hf", &model, "--target", "cpu", "-o"];
        moesaic([&pack[..], &[&output]].concat()).fails(2, &["--output", "--hf reads", name]);
        assert!(contents(dir.path()) == before);
    }
}

#[test]
fn no_output_of_any_command_is_an_input() {
    let all = Spared::new();
    let spec = ["would overwrite small.toml", "--spec reads"];
    for words in [
        "precompile --spec none.toml,small.toml --target cpu -o small.toml",
        "inspect --spec small.toml --html small.toml",
        "emit --spec small.toml --rust small.toml",
        "plan --spec small.toml --world 2 --machine h100-ib --trace small.toml",
        "bench --spec small.toml --ranks 2 --machine h100-ib --calibration small.toml",
    ] {
        all.refuses(words, &spec);
    }
    all.refuses(
        "bench --spec small.toml --ranks 2 --machine m.toml --calibration ./m.toml",
        &[
            "--calibration ./m.toml would overwrite m.toml",
            "--machine reads",
        ],
    );
    let layer = "--spec small.toml --weights w.safetensors";
    for (words, parts) in [
        (
            format!("add {layer} --copy 1 -o w.safetensors"),
            ["--output would overwrite w.safetensors", "--weights reads"],
        ),
        (
            format!("add {layer} --copy 1 -o small.safetensors"),
            ["the spec beside --output would", "--spec reads"],
        ),
        (
            "merge hard.safetensors x.safetensors -o w.safetensors".to_string(),
            ["would overwrite hard.safetensors", "<FILE> reads"],
        ),
        (
            "merge small.safetensors -o small.st".to_string(),
            ["the spec beside --output would", "<FILE> reads"],
        ),
        (
            "unshard --spec small.toml w.safetensors -o w.safetensors".to_string(),
            ["--output would overwrite w.safetensors", "<FILE> reads"],
        ),
        (
            "import --keys tutel --spec small.toml w.safetensors -o w.safetensors".to_string(),
            ["--output would overwrite w.safetensors", "<FILE> reads"],
        ),
    ] {
        all.refuses(&format!("experts {words}"), &parts);
    }
}

#[test]
fn parts_do_not_take_the_place_of_their_layer() {
    let all = Spared::new();
    let dir = all.small.dir.path();
    let layer = |name: &str| {
        fs::copy(&all.small.weights, dir.join(name)).expect("a copy");
        format!("--spec small.toml --weights {name} -o .")
    };
    let (part, rank) = (layer("part-1.safetensors"), layer("rank-0.safetensors"));
    let before = contents(dir);
    for words in [
        format!("experts split {part} --counts 3,2"),
        format!("experts shard {rank} --ranks 5"),
    ] {
        all.call(&words).fails(2, &["--output", "--weights reads"]);
        assert!(contents(dir) == before, "{words}");
    }
}

#[test]
fn a_spec_that_lies_beside_an_output_stays() {
    let all = Spared::new();
    let dir = all.small.dir.path();
    write(dir, "more.toml", "# mine\n");
    write(dir, "sub.toml", "# mine\n");
    fs::create_dir(dir.join("parts")).expect("a folder");
    write(&dir.join("parts"), "part-1.toml", "# mine\n");
    let before = contents(dir);
    let layer = "--spec small.toml --weights w.safetensors";
    let add = |output: &str, copy: &str| {
        all.call(&format!("experts add {layer} --copy {copy} -o {output}"))
    };
    add("more.safetensors", "1").fails(
        2,
        &[
            "the spec beside --output would overwrite more.toml, which is another spec",
            "name another --output",
        ],
    );
    all.call(&format!("experts split {layer} --counts 3,2 -o parts"))
        .fails(2, &["part-1.toml, which is another spec"]);
    assert!(contents(dir) == before);
    assert_eq!(contents(&dir.join("parts")).len(), 1);
    // Its own it may write again, and no other.
    for _ in 0..2 {
        add("new.safetensors", "1").ok();
    }
    add("new.safetensors", "1,2").fails(2, &["new.toml, which is another spec"]);
}

#[test]
fn outputs_are_looked_at_before_the_work() {
    let all = Spared::new();
    let layer = "--spec small.toml --weights w.safetensors";
    for (words, parts) in [
        (
            format!("experts split {layer} --counts 3,2 -o x.safetensors"),
            "--output x.safetensors is a file, not a directory",
        ),
        (
            format!("experts shard {layer} --ranks 5 -o x.safetensors"),
            "--output x.safetensors is a file, not a directory",
        ),
        (
            format!("experts add {layer} --copy 1 -o none/y"),
            "--output none/y: there is no directory none",
        ),
        (
            "bench --spec small.toml --ranks 2 --machine mpi-emulated --calibration none/x"
                .to_string(),
            "--calibration none/x: there is no directory none",
        ),
    ] {
        all.refuses(&words, &[parts]);
    }
}

/// A disk that is full fails the work: the input was good.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_no_bad_input() {
    let all = Spared::new();
    let shard = "experts shard --spec small.toml --weights w.safetensors --ranks 1 -o ranks";
    all.call(shard).ok();
    all.call("experts unshard --spec small.toml ranks/rank-0.safetensors -o /dev/full")
        .fails(1, &["cannot write /dev/full: no space left on device"]);
    let add = "experts add --spec small.toml --weights w.safetensors --copy 1 -o";
    all.call(&format!("{add} /dev/full"))
        .fails(1, &["cannot write /dev/full"]);
}

#[test]
fn a_typed_layer_goes_to_stdout() {
    let all = Spared::new();
    let text = all.call("emit --spec small.toml --rust -").ok();
    assert!(text.contains("pub struct"), "{text}");
    all.unchanged("emit --rust -");
    all.refuses(
        "emit --spec small.toml --target cpu --rust -",
        &["would both go to stdout", "-o DIR"],
    );
}

/// Twelve ranks of a layer of 24 experts, in the order in which a shell lists them.
fn twelve(dir: &Path) -> Vec<String> {
    let spec = "name = \"small\"\n\
                shape = { model_dim = 20, hidden_dim = 12, experts = 24, top_k = 2 }\n";
    write(dir, "small.toml", spec);
    let mut all = small_weights();
    for (name, shape) in [
        ("gate", [24, 12, 20]),
        ("up", [24, 12, 20]),
        ("down", [24, 20, 12]),
    ] {
        all.insert(format!("experts.{name}.weight"), tensor(&shape, 8));
    }
    all.insert("router.weight", tensor(&[24, 20], 9));
    save(dir, "w.safetensors", &all);
    (0..12)
        .map(|rank| format!("ranks/rank-{rank:02}.safetensors"))
        .collect()
}

#[test]
fn shards_know_their_rank() {
    let small = Small::new();
    let dir = small.dir.path();
    let files = twelve(dir);
    let call = |words: &[&str]| {
        let mut call = command();
        finish(call.current_dir(dir).args(words))
    };
    let shard = "experts shard --spec small.toml --weights w.safetensors --ranks 12 -o ranks";
    let made = call(&shard.split(' ').collect::<Vec<_>>()).ok();
    let named: Vec<&str> = made
        .lines()
        .filter_map(|line| line.split(':').next())
        .collect();
    assert_eq!(named, files);
    let unshard = |files: &[&str], more: &[&str]| {
        let command = [
            "experts",
            "unshard",
            "--spec",
            "small.toml",
            "-o",
            "whole.safetensors",
        ];
        call(&[&command[..], more, files].concat())
    };
    let plain = |rank: usize| dir.join(format!("rank-{rank}.safetensors"));
    for (rank, file) in files.iter().enumerate() {
        fs::copy(dir.join(file), plain(rank)).expect("a copy");
    }
    // rank-0, rank-1, rank-10, rank-11, rank-2: as older names sort.
    let mut globbed: Vec<String> = (0..12)
        .map(|rank| format!("rank-{rank}.safetensors"))
        .collect();
    globbed.sort();
    let globbed: Vec<&str> = globbed.iter().map(String::as_str).collect();
    let done = unshard(&globbed, &[]);
    assert_eq!(done.stderr, "");
    done.ok();
    let same = || {
        let [whole, weights] = ["whole.safetensors", "w.safetensors"];
        assert!(fs::read(dir.join(whole)).unwrap() == fs::read(dir.join(weights)).unwrap());
        fs::remove_file(dir.join(whole)).expect("it was there");
    };
    same();
    let mut twice = globbed.clone();
    twice[5] = twice[6];
    unshard(&twice, &[]).fails(2, &["are both of rank"]);
    unshard(&globbed[1..], &[]).fails(
        2,
        &["the part of rank 0 is missing: there are 12 ranks, and 11 files"],
    );
    unshard(&globbed, &["--expert-tp", "2"])
        .fails(2, &["was cut with --expert-tp 1, not --expert-tp 2"]);
    let mut mixed = globbed.clone();
    mixed[3] = "w.safetensors";
    unshard(&mixed, &[]).fails(2, &["w.safetensors does not"]);
    // Those of other programs say nothing.
    let mut bare = Vec::new();
    for rank in 0..12 {
        let file = Checkpoint::open(plain(rank)).expect("a file");
        let tensors = file
            .names()
            .map(|name| (name.to_string(), file.read(name).unwrap()));
        save(dir, &format!("bare-{rank}.safetensors"), &tensors.collect());
        bare.push(format!("bare-{rank}.safetensors"));
    }
    let bare: Vec<&str> = bare.iter().map(String::as_str).collect();
    let done = unshard(&bare, &[]);
    assert!(done.stderr.starts_with("note: "), "{}", done.stderr);
    done.ok();
    same();
    // Too few of them.
    let few = unshard(&bare[1..], &[]);
    assert!(few.stderr.contains("in the part of rank") && !few.stderr.contains("Some("));
    assert_eq!(few.code, 2, "{}", few.stderr);
}

/// A file that would pass the limit of `ulimit -f` is an error, and no end by a signal that leaves
/// a part of it.
#[cfg(target_os = "linux")]
#[test]
fn a_file_larger_than_the_limit_is_an_error() {
    let all = Spared::new();
    let mut call = command();
    call.current_dir(all.small.dir.path());
    let shard = "experts shard --spec small.toml --weights w.safetensors --ranks 1 -o ranks";
    call.args(shard.split(' '));
    let limited = || {
        let limit = libc::rlimit {
            rlim_cur: 100,
            rlim_max: 100,
        };
        // SAFETY: the limit lives here. What runs the tests may ignore the signal.
        let refused = unsafe {
            libc::signal(libc::SIGXFSZ, libc::SIG_DFL);
            libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit)
        };
        if refused == 0 {
            Ok(())
        } else {
            Err(std::io::Error::last_os_error())
        }
    };
    // SAFETY: between fork and exec only system calls are made.
    unsafe { std::os::unix::process::CommandExt::pre_exec(&mut call, limited) };
    finish(&mut call).fails(1, &["cannot write", "ranks/rank-0.safetensors"]);
    let left = contents(&all.small.dir.path().join("ranks"));
    assert!(left.is_empty(), "{left:?}");
}
