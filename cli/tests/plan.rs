//! `moesaic plan`: what it says, and what it refuses.

use crate::common::*;
use moesaic::plan::AllToAll;
use moesaic::planner::{Calibration, published};
use std::path::{Path, PathBuf};

const LAYER: &str = "shape = { model_dim = 256, hidden_dim = 512, experts = 16, top_k = 2 }
precision = { weights = \"bf16\", activations = \"bf16\" }
";

struct Plan {
    dir: tempfile::TempDir,
    spec: PathBuf,
}

impl Plan {
    fn new() -> Plan {
        let dir = scratch();
        let spec = write(dir.path(), "layer.toml", LAYER);
        Plan { dir, spec }
    }

    fn with(&self, more: &[&str]) -> Finished {
        let mut call = command();
        call.current_dir(self.dir.path())
            .args(["plan", "--spec"])
            .arg(&self.spec);
        finish(call.args(more))
    }

    fn file(&self, name: &str, text: &str) -> String {
        write(self.dir.path(), name, text);
        name.to_string()
    }
}

const JOB: [&str; 4] = ["--world", "16", "--machine", "h100-ib"];

#[test]
fn configurations_are_ranked_and_the_best_is_shown_in_phases() {
    let plan = Plan::new();
    let text = plan
        .with(&[&JOB[..], &["--tokens", "1024", "--training", "--top", "3"]].concat())
        .ok();
    for part in [
        "16 ranks of h100-ib",
        "1024 tokens a rank, forward and backward",
        "simulated, not measured: ",
        "\n  3  ",
        "forward, ",
        "grouped_gemm_dgrad_up",
        "other gradients",
        "the first of these may take",
        "20 % to both sides, up to 128 ranks",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(
        !text.contains("\n  4  ") && !text.contains("warning:"),
        "{text}"
    );
    let text = plan.with(&["--world", "2048", "--machine", "h100-ib"]).ok();
    assert!(
        text.contains("warning: 2048 ranks are more than that"),
        "{text}"
    );
}

#[test]
fn json_has_what_the_text_has_and_the_order_is_by_time() {
    let plan = Plan::new();
    let found = plan
        .with(&[&JOB[..], &["--json", "--skew", "zipf=1.2"]].concat())
        .json();
    let ranked = found["ranked"].as_array().unwrap();
    assert_eq!(ranked.len(), 10);
    let seconds: Vec<f64> = ranked
        .iter()
        .map(|one| one["seconds"].as_f64().unwrap())
        .collect();
    assert!(
        seconds.windows(2).all(|pair| pair[0] <= pair[1] + 1e-9),
        "{seconds:?}"
    );
    assert_eq!(found["simulated"], true);
    assert_eq!(
        found["best"]["configuration"]["seconds"],
        ranked[0]["seconds"]
    );
    let (low, high) = (&found["best"]["low"], &found["best"]["high"]);
    assert!(low.as_f64().unwrap() < seconds[0] && seconds[0] < high.as_f64().unwrap());
    assert!(
        found["best"]["passes"][0]["phases"]
            .as_array()
            .unwrap()
            .len()
            > 5
    );
}

#[test]
fn one_configuration_can_be_asked_for_and_traced() {
    let plan = Plan::new();
    let one = [
        "--mesh",
        "ep=16",
        "--strategy",
        "overlap_degree=4,all_to_all=2dh-inter-first",
        "--trace",
        "out.json",
    ];
    let tokens = ["--tokens", "65536", "--per-node", "4"];
    let text = plan.with(&[&JOB[..], &one, &tokens].concat()).ok();
    assert!(
        text.contains("1 configuration\n")
            && text.contains("overlap_degree=4,all_to_all=2dh-inter-first"),
        "{text}"
    );
    let trace = std::fs::read_to_string(plan.dir.path().join("out.json")).unwrap();
    let trace: serde_json::Value = serde_json::from_str(&trace).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let of = |lane: u64| -> Vec<(f64, f64)> {
        let mut spans: Vec<(f64, f64)> = events
            .iter()
            .filter(|e| e["ph"] == "X" && e["tid"] == lane)
            .map(|e| (e["ts"].as_f64().unwrap(), e["dur"].as_f64().unwrap()))
            .collect();
        spans.sort_by(|a, b| a.0.total_cmp(&b.0));
        spans
    };
    let (compute, exchange) = (of(0), of(1));
    for lane in [&compute, &exchange] {
        assert!(lane.windows(2).all(|w| w[0].0 + w[0].1 <= w[1].0 + 1e-6));
    }
    let beside = |a: &(f64, f64), b: &(f64, f64)| a.0 < b.0 + b.1 && b.0 < a.0 + a.1;
    assert!(
        compute
            .iter()
            .any(|c| exchange.iter().any(|e| beside(c, e)))
    );
}

#[test]
fn rows_can_be_those_that_were_counted() {
    let plan = Plan::new();
    let row = |hot: u64| format!("[{hot}{}]", ",8".repeat(15));
    let counts = |hot| format!("[{}]", vec![row(hot); 16].join(","));
    let even = plan.file("even.json", &counts(8));
    let hot = plan.file("hot.json", &counts(8000));
    let seconds = |file: &str| {
        let one = ["--mesh", "ep=16", "--json", "--counts", file];
        let found = plan.with(&[&JOB[..], &one].concat()).json();
        found["ranked"][0]["seconds"].as_f64().unwrap()
    };
    assert!(seconds(&hot) > seconds(&even));
    let short = plan.file("short.json", "[[1, 2]]");
    plan.with(&[&JOB[..], &["--counts", &short]].concat())
        .fails(
            2,
            &[
                "short.json: rows of 1 ranks, the job has 16",
                "hint: [[3, 0, 1]",
            ],
        );
}

#[test]
fn experts_can_be_where_a_placement_has_them() {
    let plan = Plan::new();
    let order = plan.file("order.txt", "0-7 | 8-15");
    let all = |experts: std::ops::Range<u32>| -> String {
        experts.map(|expert| format!(",+{expert}")).collect()
    };
    let near = format!("near: 0-7{} | 8-15{}", all(8..16), all(0..8));
    let near = plan.file("near.txt", &near);
    let hot = ["--skew", "zipf=1.5", "--tokens", "65536"];
    let seconds = |file: &str| {
        let more = ["--json", "--placement", file];
        let found = plan.with(&[&JOB[..], &hot, &more].concat()).json();
        assert_eq!(found["ranked"][0]["mesh"]["ep"], 2);
        found["ranked"][0]["seconds"].as_f64().unwrap()
    };
    assert!(seconds(&near) < seconds(&order));
    let odd = plan.file("odd.txt", "0-4 | 5-9 | 10-15");
    plan.with(&[&JOB[..], &["--placement", &odd]].concat())
        .fails(2, &["3 groups of ranks, which 16 ranks cannot make"]);
}

#[test]
fn machines_are_files_and_measurements_replace_their_figures() {
    let plan = Plan::new();
    let shipped = repository("runtime/planner/machines/h100-ib.toml");
    let text = std::fs::read_to_string(shipped).unwrap();
    plan.file("own.toml", &text.replace("\"h100-ib\"", "\"ours\""));
    let one = ["--json", "--mesh", "ep=16", "--strategy", "default"];
    let own = [&["--world", "16", "--machine", "own.toml"][..], &one].concat();
    let found = plan.with(&own).json();
    assert_eq!(found["machine"]["name"], "ours");
    let calibration =
        "machine = \"ours\"\ndate = \"2026-11-24\"\nsource = \"a bench\"\nranks = 16\nband = 0.05\n
        [[level]]\nname = \"ib\"\nalpha_us = 9000.0\nbandwidth_gbs = 40.0\n";
    plan.file("measured.toml", calibration);
    let slower = plan
        .with(&[&own[..], &["--calibrate", "measured.toml"]].concat())
        .json();
    let seconds = |found: &serde_json::Value| found["ranked"][0]["seconds"].as_f64().unwrap();
    assert!(seconds(&slower) > seconds(&found) + 0.015);
    assert_eq!(slower["machine"]["error"]["band"], 0.05);
    plan.file("wrong.toml", &calibration.replace("alpha_us", "alpa_us"));
    plan.with(&[&own[..], &["--calibrate", "wrong.toml"]].concat())
        .fails(2, &["wrong.toml: ", "did you mean `alpha_us`?"]);
    let measured = |name: &str, from: &str, to: &str| {
        plan.file(name, &calibration.replace(from, to));
        plan.with(&[&own[..], &["--calibrate", name]].concat())
    };
    let theirs = measured("theirs.toml", "\"ours\"", "\"our rack\"");
    let note = "note: --calibrate theirs.toml is of machine `our rack`, --machine is `ours`";
    assert!(theirs.stderr.contains(note), "{}", theirs.stderr);
    theirs.ok();
    measured("h800.toml", "\"ours\"", "\"h800\"").fails(
        2,
        &[
            "h800.toml is of machine `h800`, --machine is `ours`",
            "--machine h800",
        ],
    );
    measured("none.toml", "ranks = 16", "ranks = 0").fails(2, &["none.toml: ", "ranks = 0"]);
    let stopped = "[[all_to_all]]\nname = \"linear\"\noverlap_by = \"peers\"\noverlap_degree = 1\nmessage_kib = 1.0\nby = 4.0\n[[level]]";
    measured("stopped.toml", "[[level]]", stopped).fails(
        2,
        &[
            "stopped.toml: ",
            "all_to_all.linear.by = 4",
            "remove every `[[all_to_all]]`",
        ],
    );
    plan.file("bad.toml", &text.replace("radix = 8", "radx = 8"));
    plan.with(&["--world", "16", "--machine", "bad.toml"])
        .fails(2, &["bad.toml: ", "did you mean `radix`?"]);
}

#[test]
fn what_cannot_be_says_what_can() {
    let plan = Plan::new();
    let fails = |more: &[&str], parts: &[&str]| plan.with(more).fails(2, parts);
    fails(
        &["--world", "16", "--machine", "h100ib"],
        &["hint: did you mean `h100-ib`?", "known machines: "],
    );
    fails(
        &["--world", "16", "--machine", "none.toml"],
        &["cannot read a machine none.toml"],
    );
    fails(
        &[&JOB[..], &["--mesh", "ep=4"]].concat(),
        &[
            "the mesh has 4 ranks, the job 16",
            "hint: ep x expert_tp x dp",
        ],
    );
    fails(
        &[&JOB[..], &["--mesh", "ep=16", "--strategy", "r=3"]].concat(),
        &["a divisor of 1"],
    );
    fails(
        &[
            &JOB[..],
            &["--mesh", "ep=8,dp=2", "--strategy", "all_to_all=dedup"],
        ]
        .concat(),
        &["8 ranks with 8 a node do not", "take all_to_all=linear"],
    );
    fails(
        &[
            &JOB[..],
            &["--mesh", "ep=8,expert_tp=2", "--strategy", "shadows=2"],
        ]
        .concat(),
        &["shadows=2 needs whole experts", "take shadows=0"],
    );
    fails(
        &[&JOB[..], &["--skew", "zipf=-1"]].concat(),
        &["an exponent is 0"],
    );
    fails(
        &[&JOB[..], &["--comm-dtypes", "f64"]].concat(),
        &["`f64` is none of none"],
    );
    fails(
        &["--world", "0", "--machine", "h800"],
        &["invalid value '0'"],
    );
    fails(
        &[
            "--world",
            "2048",
            "--machine",
            "h800",
            "--counts",
            "none.json",
        ],
        &["one mesh at a time", "hint: --mesh"],
    );
    let large = plan.file(
        "large.toml",
        &LAYER.replace("256", "16384").replace("512", "65536"),
    );
    let mut call = command();
    call.current_dir(plan.dir.path())
        .args(["plan", "--spec", &large]);
    let finished = finish(call.args(["--world", "2", "--machine", "h800", "--training"]));
    finished.fails(
        2,
        &[
            "no mesh of 2 ranks fits this layer in 80 GiB",
            "hint: more ranks",
        ],
    );
}

#[test]
fn every_machine_that_ships_can_be_asked() {
    let plan = Plan::new();
    let folder = repository("runtime/planner/machines");
    let names = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let mut count = 0;
    for path in names {
        let name = Path::new(&path)
            .file_stem()
            .unwrap()
            .to_string_lossy()
            .into_owned();
        let one = [
            "--world",
            "16",
            "--machine",
            &name,
            "--mesh",
            "ep=16",
            "--training",
        ];
        plan.with(&one).ok();
        count += 1;
    }
    assert!(count >= 7);
}

/// What `bench` measures of ranks that are threads, `plan` reads.
#[test]
fn what_ranks_measure_is_what_a_plan_is_made_with() {
    let plan = Plan::new();
    let spec = "shape = { model_dim = 16, hidden_dim = 16, experts = 2, top_k = 1 }\n";
    let spec = plan.file("small.toml", spec);
    let bench = |more: &[&str]| {
        let mut call = command();
        call.current_dir(plan.dir.path());
        call.args(["bench", "--spec", &spec, "--target", "cpu", "--tokens", "8"]);
        finish(call.args(["--seconds", "0", "--ranks", "2"]).args(more))
    };
    let file = ["--calibration", "measured.toml"];
    let machine = ["--machine", "mpi-emulated"];
    let mut measured = bench(&[&machine[..], &file].concat());
    let quiet = measured.code == 0;
    if !quiet {
        // Other tests run beside: nothing is written, and what to do is said.
        let parts = ["the machine was not quiet", "measured.toml is not written"];
        measured.fails(1, &parts);
        assert!(!plan.dir.path().join("measured.toml").exists());
        measured = bench(&[&machine[..], &file, &["--without-steps"]].concat());
    }
    let text = measured.ok();
    for part in ["memory", "products of f32", "written to measured.toml"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let found = std::fs::read_to_string(plan.dir.path().join("measured.toml")).unwrap();
    let found = Calibration::from_toml(&found).unwrap();
    let names: Vec<&str> = found.levels.iter().map(|level| &*level.name).collect();
    assert_eq!((names, found.ranks), (vec!["memory"], 2));
    assert!(found.levels[0].bandwidth_gbs > 1e-3 && found.band.is_some());
    let compute = found.compute.as_ref().unwrap();
    assert!(compute.gemm_tflops["f32"] > 0.0 && compute.memory_gbs.unwrap() > 0.0);
    let job = ["--world", "16", "--calibrate", "measured.toml", "--json"];
    let planned = plan.with(&[&job[..], &machine].concat()).json();
    let level = &planned["machine"]["level"][0];
    assert_eq!(
        level["bandwidth_gbs"].as_f64(),
        Some(found.levels[0].bandwidth_gbs)
    );
    assert_eq!(planned["machine"]["error"]["ranks"].as_u64(), Some(2));
    // Ranks of one node have one route; what links do not say of its steps is a factor.
    assert_eq!(found.all_to_all_factors.is_empty(), !quiet);
    for factor in &found.all_to_all_factors {
        assert!(factor.name == AllToAll::Linear && factor.message_kib > 0.0);
        assert!(!factor.is_at_bound(), "{factor:?}");
    }
    // What was not measured is as it was.
    let link = planned["machine"]["level"][1]["bandwidth_gbs"].as_f64();
    assert_eq!(
        link,
        Some(published("mpi-emulated").unwrap().levels[1].bandwidth_gbs)
    );
    bench(&file).fails(2, &["add --machine NAME|FILE"]);
}

/// A product of degrees beyond what a number can be is the input's error.
#[test]
fn a_mesh_of_too_many_ranks_is_refused() {
    let plan = Plan::new();
    let fails = |mesh: &str, part: &str| {
        plan.with(&[&JOB[..], &["--mesh", mesh]].concat())
            .fails(2, &[part]);
    };
    fails(
        "ep=4294967296,expert_tp=4294967296",
        "4294967296 groups cannot share 16 experts",
    );
    fails("ep=16,expert_tp=512,dp=9223372036854775808", "the job 16");
    fails("dp=0", "has no ranks; each is at least 1");
}
