//! `moesaic tune`, and who uses what it keeps.

use crate::common;
use crate::common::{EVERY_INPUT, Finished, Small, command, finish, scratch, write};
use std::fs;
use std::path::{Path, PathBuf};

/// A call on a cache of the test's own.
fn on(cache: &Path, args: &[&str], spec: &Path) -> Finished {
    let mut command = command();
    command.args(args).arg("--spec").arg(spec);
    finish(command.arg("--cache").arg(cache))
}

const TUNE: [&str; 7] = [
    "tune",
    "--tokens",
    "1,40",
    "--seconds",
    "0",
    "--threads",
    "2",
];

/// The one file of sizes in a cache.
fn kept(cache: &Path) -> PathBuf {
    let files: Vec<_> = fs::read_dir(cache.join("v1/tuned")).unwrap().collect();
    assert_eq!(files.len(), 1, "{files:?}");
    files.into_iter().next().unwrap().unwrap().path()
}

#[test]
fn tune_prints_what_it_tried_and_keeps_what_it_found() {
    let small = Small::new();
    let cache = scratch();
    let text = on(cache.path(), &TUNE, &small.spec).ok();
    for part in [
        "tile_rows",
        "grouped_gemm",
        "\n1 token\n",
        "\n40 tokens\n",
        "kept in ",
    ] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
    let last = text.lines().last().unwrap();
    assert!(last.starts_with("default heuristics within "), "{last}");
    assert!(last.contains("% of tuned ("), "{last}");
    kept(cache.path());
}

#[test]
fn training_has_sizes_of_its_own() {
    let small = Small::of(EVERY_INPUT);
    let cache = scratch();
    let args = [&TUNE[..], &["--training", "--json"]].concat();
    let json = on(cache.path(), &args, &small.spec).json();
    assert_eq!(json["file"], kept(cache.path()).display().to_string());
    assert!(json["default_within_percent"].as_f64().unwrap() >= 0.0);
    let buckets = json["buckets"].as_array().unwrap();
    assert_eq!(buckets.len(), 2);
    for (bucket, tokens) in buckets.iter().zip([1, 40]) {
        assert_eq!(bucket["tokens"], tokens);
        assert!(bucket["gain"].as_f64().unwrap() >= 1.0, "{bucket}");
        check_tried(bucket["tried"].as_array().unwrap());
    }
}

fn check_tried(tried: &[serde_json::Value]) {
    let stems: Vec<_> = tried.iter().map(|t| t["stem"].as_str().unwrap()).collect();
    for stem in ["grouped_gemm", "grouped_gemm_wgrad"] {
        assert!(stems.contains(&stem), "{stems:?}");
    }
    for one in tried {
        assert!(one["seconds"].as_f64().unwrap() > 0.0, "{one}");
        let candidates = one["candidates"].as_array().unwrap();
        assert!(!candidates.is_empty(), "{one}");
        for candidate in candidates {
            assert_ne!(candidate["value"], one["default"]);
            assert!(candidate["pairs"].as_u64().unwrap() >= 5, "{one}");
        }
    }
}

/// Puts sizes for 8 tokens into the cache that a measurement might have found, for
/// as many threads as this machine has; for 64 tokens none are better.
fn pretend(cache: &Path, spec: &Path) -> (PathBuf, String) {
    use moesaic::engine::{TunedTimes, Untuned};
    use moesaic::plan::Tuning;
    use moesaic::{Engine, LayerSpec, Store};
    let spec = LayerSpec::from_toml(&fs::read_to_string(spec).unwrap()).unwrap();
    let engine = Engine::cpu().unwrap();
    let plan = engine.tilings(&spec, None).unwrap().first().clone();
    let untuned = Untuned::new(plan);
    let choices = Tuning::choices(&untuned.plan);
    let first = &choices[0];
    let tuning = Tuning::default().with(first.knob, first.others[0]);
    let bucket = |tokens, tuning, gain| TunedTimes {
        tokens,
        tuning,
        gain,
    };
    let found = [bucket(8, tuning, 1.5), bucket(64, Tuning::default(), 1.0)];
    let tuned = untuned.tuned(&found, engine.machine()).unwrap();
    let path = Store::open(cache).keep_tuned(&tuned).unwrap();
    (path, format!("{} {}", first.knob.name(), first.others[0]))
}

#[test]
fn inspect_run_and_precompile_use_what_was_kept() {
    let small = Small::new();
    let cache = scratch();
    let inspect = || on(cache.path(), &["inspect"], &small.spec).ok();
    assert!(!inspect().contains("tuned for"));
    let (_, size) = pretend(cache.path(), &small.spec);
    let text = inspect();
    assert!(text.contains("tuned for") && text.contains(&size), "{text}");
    assert!(text.contains(", 1.50x the default"), "{text}");
    assert!(text.contains("T=64: the default sizes are best"), "{text}");
    assert!(text.contains("grouped_gemm_up, T=8"), "{text}");
    let mut off = command();
    off.args(["inspect", "--spec"]).arg(&small.spec);
    off.arg("--cache")
        .arg(cache.path())
        .env("MOESAIC_TUNING", "off");
    assert!(!finish(&mut off).ok().contains("tuned for"));
    let json = on(cache.path(), &["inspect", "--json"], &small.spec).json();
    assert_eq!(json["tuned"]["buckets"][0]["gain"], 1.5);
    let kernels = json["kernels"].as_array().unwrap().iter();
    let up = kernels.filter(|kernel| kernel["name"] == "grouped_gemm_up");
    let tokens: Vec<_> = up.map(|kernel| kernel["tokens"].clone()).collect();
    assert_eq!(tokens, [serde_json::json!([]), serde_json::json!([8])]);
    // Both the default's kernels and the tuned ones, and a pack has them all.
    let pack = cache.path().join("pack.tar.gz");
    let args = [
        "precompile",
        "--target",
        "cpu",
        "--json",
        "-o",
        pack.to_str().unwrap(),
    ];
    let json = on(cache.path(), &args, &small.spec).json();
    let names: Vec<_> = json["kernels"].as_array().unwrap().iter().collect();
    let up = names
        .iter()
        .filter(|row| row["kernel"] == "grouped_gemm_up");
    assert_eq!(up.count(), 2, "{json}");
    assert_eq!(json["tunings"][0]["buckets"][1]["tokens"], 64);
    for command in [&["doctor", "-v"][..], &["cache", "list"]] {
        let mut said = common::command();
        said.args(command).arg("--cache").arg(cache.path());
        let said = finish(&mut said).ok();
        assert!(said.contains(" is tuned for T=8,64, "), "{said}");
    }
    let other = scratch();
    let mut import = command();
    import.args(["cache", "import"]).arg(&pack);
    finish(import.arg("--cache").arg(other.path())).ok();
    kept(other.path());
    let run = |cache: &Path| {
        let mut run = small.command();
        run.arg("--strict").arg("--cache").arg(cache);
        finish(&mut run).ok();
        fs::read(&small.output).unwrap()
    };
    let tuned = run(other.path());
    fs::remove_file(kept(other.path())).unwrap();
    assert_eq!(run(other.path()), tuned);
}

#[test]
fn a_damaged_tuning_is_one_warning() {
    let small = Small::new();
    let cache = scratch();
    let (path, _) = pretend(cache.path(), &small.spec);
    let mut foreign = moesaic::Store::open(cache.path()).tunings().remove(0);
    fs::write(&path, "not a tuning").unwrap();
    let mut run = small.command();
    run.arg("--cache").arg(cache.path());
    let done = finish(&mut run);
    assert_eq!(done.code, 0, "{}", done.stderr);
    let warnings = done.stderr.matches("going on without a damaged tuning");
    assert_eq!(warnings.count(), 1, "{}", done.stderr);
    // So is another machine's under this one's name.
    let other = scratch();
    foreign.machine.threads += 9000;
    let kept = moesaic::Store::open(other.path()).keep_tuned(&foreign);
    fs::copy(kept.unwrap(), &path).unwrap();
    let mut run = small.command();
    run.arg("--cache").arg(cache.path());
    let done = finish(&mut run);
    assert_eq!(done.code, 0, "{}", done.stderr);
    let warnings = done.stderr.matches("going on without another's tuning");
    assert_eq!(warnings.count(), 1, "{}", done.stderr);
    assert!(!done.stderr.contains("damaged"), "{}", done.stderr);
    let said = format!("it is for {} threads", foreign.machine.threads);
    assert!(done.stderr.contains(&said), "{}", done.stderr);
    // So is one of an earlier version, in bench too.
    fs::write(&path, "{\"sizes\": {}, \"gain\": 1.5}").unwrap();
    let bench = ["bench", "--seconds", "0", "--tokens", "1,8"];
    let done = on(cache.path(), &bench, &small.spec);
    assert_eq!(done.code, 0, "{}", done.stderr);
    let warnings = done.stderr.matches("going on without an old tuning");
    assert_eq!(warnings.count(), 1, "{}", done.stderr);
    assert!(done.stderr.contains("`moesaic tune` measures again"));
    // Measuring again puts it right.
    let args: Vec<&str> = TUNE[..5].to_vec();
    on(cache.path(), &args, &small.spec).ok();
    assert!(fs::read_to_string(&path).unwrap().starts_with('{'));
}

#[test]
fn what_cannot_be_tuned_or_kept_is_said_before_measuring() {
    let small = Small::new();
    let cache = scratch();
    for target in ["cuda", "auto", "cuda:sm_90a", "sim:sm_80", "rocm:gfx942"] {
        let part = format!("`{target}` cannot be tuned: only CPUs can so far");
        on(cache.path(), &["tune", "--target", target], &small.spec).fails(2, &[&part]);
    }
    let unknown = on(
        cache.path(),
        &["tune", "--target", "cuda:sm_91"],
        &small.spec,
    );
    unknown.fails(2, &["unknown target `cuda:sm_91`"]);
    let none = on(cache.path(), &["tune", "--tokens", "0"], &small.spec);
    none.fails(2, &["no tokens take no time"]);
    // Where the folder should be is a file.
    let dir = scratch();
    fs::create_dir(dir.path().join("v1")).unwrap();
    write(&dir.path().join("v1"), "tuned", "");
    on(dir.path(), &TUNE, &small.spec).fails(1, &["cannot make", "v1/tuned"]);
}

#[test]
fn skewed_routing_stands_beside_uniform() {
    let dir = scratch();
    let spec = "shape = { model_dim = 64, hidden_dim = 16, experts = 16, top_k = 2 }\n";
    let bench = |text: &str, skew: &str| {
        let spec = write(dir.path(), "layer.toml", text);
        let args = [
            "bench",
            "--target",
            "cpu",
            "--tokens",
            "600",
            "--seconds",
            "0",
            "--json",
        ];
        let mut command = command();
        command.args(args).args(["--skew", skew]).arg("--spec");
        finish(command.arg(spec))
    };
    for text in [
        spec.to_string(),
        format!("{spec}router = {{ kind = \"external\" }}\n"),
    ] {
        let json = bench(&text, "zipf:1.5").json();
        assert_eq!(json["skew"], "zipf:1.5");
        let against = &json["runs"][0]["against_uniform"];
        assert!(against["of_uniform"].as_f64().unwrap() > 0.0, "{json}");
        let busiest = |name| against[name].as_f64().unwrap();
        assert!(busiest("busiest_of_mean") > 4.0, "{against}");
        assert!(busiest("uniform_busiest_of_mean") < 2.0, "{against}");
        let json = bench(&text, "uniform").json();
        assert!(json["runs"][0]["against_uniform"].is_null());
    }
    bench(spec, "zipf").fails(2, &["--skew", "exponent"]);
}
