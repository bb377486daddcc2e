//! `moesaic run` on ranks: threads of one process, and processes under MPI.

use crate::common::*;
use moesaic::toolchain::ToolKind;
use moesaic::toolchain::testing::{ExternalTool, installed, needed};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

/// A call on a layer of tests/oracle/hf, and where its results are.
fn call(command: &mut Command, output: &Path, more: &[&str]) -> Finished {
    call_of("mixtral", command, output, more)
}

/// The same of another of those layers.
fn call_of(model: &str, command: &mut Command, output: &Path, more: &[&str]) -> Finished {
    let dir = repository("tests/oracle/hf").join(model);
    let layer = ["--target", "cpu", "--layer", "1", "--hf"];
    command.args(layer).arg(&dir);
    command.arg("--input").arg(dir.join("block.safetensors"));
    finish(command.arg("--output").arg(output).args(more))
}

fn run(output: &Path, more: &[&str]) -> Finished {
    call(command().arg("run"), output, more)
}

#[test]
fn ranks_write_the_file_that_one_process_writes() {
    let scratch = scratch();
    let file = |name: &str| scratch.path().join(name);
    run(&file("one"), &[]).ok();
    let one = fs::read(file("one")).unwrap();
    for more in [
        &["--ranks", "1"][..],
        &["--ranks", "3"],
        &["--mesh", "ep=2,dp=2", "--reference"],
        &["--mesh", "ep=2,expert_tp=2", "--strategy", "r=1"],
        &["--mesh", "ep=2,expert_tp=2", "--strategy", "r=0"],
        &["--ranks", "2", "--strategy", "overlap_degree=3"],
        &["--ranks", "3", "--strategy", "overlap_degree=2,shadows=2"],
    ] {
        let text = run(&file("ranks"), more).ok();
        assert!(text.contains("rank"), "{text}");
        assert!(fs::read(file("ranks")).unwrap() == one, "{more:?}");
    }
}

/// The rank and number of each lane of a trace that has events.
fn lanes(trace: &Path) -> BTreeSet<(u64, u64)> {
    let trace: Value = serde_json::from_slice(&fs::read(trace).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let timed = events.iter().filter(|event| event["ts"].is_number());
    let lane = |event: &Value| Some((event["pid"].as_u64()?, event["tid"].as_u64()?));
    timed.map(|event| lane(event).unwrap()).collect()
}

#[test]
fn a_trace_has_the_launches_and_exchanges_of_every_rank() {
    let scratch = scratch();
    let file = |name: &str| scratch.path().join(name);
    let trace = file("trace").display().to_string();
    run(&file("y"), &["--trace", &trace]).ok();
    assert_eq!(lanes(&file("trace")), BTreeSet::from([(0, 0)]));
    let more = [
        "--ranks",
        "2",
        "--strategy",
        "overlap_degree=2",
        "--trace",
        &trace,
    ];
    run(&file("y"), &more).ok();
    let all = [(0, 0), (0, 1), (1, 0), (1, 1)];
    assert_eq!(lanes(&file("trace")), BTreeSet::from(all));
    let text = fs::read_to_string(file("trace")).unwrap();
    assert!(
        text.contains("grouped_gemm_up") && text.contains("2 of 2"),
        "{text}"
    );
}

#[test]
fn processes_under_mpi_write_it_too() {
    let registry = installed(ToolKind::Mpi);
    let found = moesaic::toolchain::mpi(&registry);
    let found = needed(ExternalTool::Mpi, found.ok_or("it is not registered"));
    let scratch = scratch();
    let file = |name: &str| scratch.path().join(name);
    run(&file("one"), &[]).ok();
    let trace = file("trace").display().to_string();
    let traced = ["--strategy", "overlap_degree=2", "--trace", &trace];
    for more in [&[][..], &["--strategy", "r=0"], &traced] {
        let plain = command();
        let mut launched = Command::new("timeout");
        launched.args(["--signal=KILL", "120"]).arg(&found.launcher);
        launched
            .args(["-n", "3"])
            .arg(plain.get_program())
            .arg("run");
        for (name, value) in plain.get_envs() {
            match value {
                Some(value) => launched.env(name, value),
                None => launched.env_remove(name),
            };
        }
        launched.env("MOESAIC_MPI", &found.library);
        let text = call(&mut launched, &file("ranks"), more).ok();
        assert_eq!(
            text.matches("37 tokens").count(),
            1,
            "one rank speaks: {text}"
        );
        assert!(fs::read(file("ranks")).unwrap() == fs::read(file("one")).unwrap());
    }
    assert_eq!(lanes(&file("trace")).len(), 3 * 2);
}

#[test]
fn kernels_of_ranks_are_compiled_ahead_and_their_steps_shown() {
    let scratch = scratch();
    let file = |name: &str| scratch.path().join(name);
    let cache = file("cache");
    let model = repository("tests/oracle/hf/mixtral");
    let mut precompile = command();
    let words = [
        "precompile",
        "--target",
        "cpu",
        "--layer",
        "1",
        "--mesh",
        "ep=3",
        "--hf",
    ];
    precompile
        .env("MOESAIC_CACHE", &cache)
        .args(words)
        .arg(&model);
    finish(&mut precompile).ok();
    let mut strict = command();
    strict.env("MOESAIC_CACHE", &cache).arg("run");
    call(&mut strict, &file("y"), &["--ranks", "3", "--strict"]).ok();
    let mut inspect = command();
    let words = [
        "inspect",
        "--layer",
        "1",
        "--mesh",
        "ep=4",
        "--rank",
        "2",
        "--per-node",
        "2",
    ];
    inspect
        .args(words)
        .args(["--tokens", "8", "--hf"])
        .arg(&model);
    let text = finish(&mut inspect).ok();
    for part in [
        "rank 2 of 4",
        "experts 4..6",
        "rows to rows of experts: 128 bytes a row",
    ] {
        assert!(text.contains(part), "{text}");
    }
    let mut packed = command();
    let strategy = ["--strategy", "comm_dtype=fp8", "--tokens", "8", "--hf"];
    packed.args(words).args(strategy).arg(&model);
    let text = finish(&mut packed).ok();
    for part in [
        "nodes    comm_cast_pack",
        "between nodes fp8, 48 bytes a row",
    ] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn kernels_for_any_ways_and_formats_are_compiled_ahead() {
    let scratch = scratch();
    let file = |name: &str| scratch.path().join(name);
    let cache = file("cache");
    let model = repository("tests/oracle/hf/mixtral");
    let mesh = ["--mesh", "ep=2,expert_tp=2"];
    let compile = |more: &[&str]| {
        let mut ahead = command();
        ahead.args(["precompile", "--target", "cpu", "--layer", "1"]);
        ahead.args(["--strategy", "comm_dtype=fp8/f16"]).args(more);
        ahead.args(mesh).arg("--hf").arg(&model);
        finish(ahead.env("MOESAIC_CACHE", &cache)).ok();
    };
    compile(&["--adaptive-r"]);
    let strict = |strategy: &str| {
        let mut strict = command();
        strict.env("MOESAIC_CACHE", &cache).arg("run").args(mesh);
        let more = ["--strategy", strategy, "--strict"];
        call(&mut strict, &file("y"), &more)
    };
    strict("overlap_degree=2,comm_dtype=fp8/f16").fails(1, &["grouped_gemm"]);
    compile(&[]);
    strict("overlap_degree=2,comm_dtype=fp8/f16").ok();
    strict("r=1,comm_dtype=fp8/f16").ok();
    let adds = "--mesh ep=2,expert_tp=2 --adaptive-r --strategy r=1,comm_dtype=bf16/fp8";
    strict("comm_dtype=bf16/fp8,r=1").fails(1, &["comm_cast_rows_bf16", adds]);
    for adaptive_r in ["r=1", "r=0"] {
        strict(adaptive_r).ok();
        let mut inspect = command();
        inspect.args([
            "inspect",
            "--layer",
            "1",
            "--rank",
            "1",
            "--strategy",
            adaptive_r,
        ]);
        let text = finish(inspect.args(mesh).arg("--hf").arg(&model)).ok();
        for part in ["gathered", "experts.down.weight of"] {
            assert!(text.contains(part), "{text}");
        }
    }
    let refused = ["--mesh", "ep=2,expert_tp=2", "--strategy", "r=3"];
    run(&file("y"), &refused).fails(2, &["a divisor of 2"]);
}

/// A file that says where experts are.
fn placed(scratch: &tempfile::TempDir, text: &str) -> String {
    let file = write(scratch.path(), "experts.txt", text);
    file.display().to_string()
}

/// The number of experts is in kernels: those for experts in order are not enough.
#[test]
fn kernels_of_placed_experts_are_compiled_ahead() {
    let scratch = scratch();
    let file = |name: &str| scratch.path().join(name);
    let cache = file("cache");
    let model = repository("tests/oracle/hf/mixtral");
    let at = placed(&scratch, "0-4 | 5-7,+0 # of eight");
    let mesh = ["--mesh", "ep=2"];
    let compile = |more: &[&str]| {
        let mut ahead = command();
        ahead.args(["precompile", "--target", "cpu", "--layer", "1"]);
        ahead.args(mesh).args(more).arg("--hf").arg(&model);
        finish(ahead.env("MOESAIC_CACHE", &cache))
    };
    let strict = |more: &[&str]| {
        let mut strict = command();
        strict
            .env("MOESAIC_CACHE", &cache)
            .args(["run", "--strict"]);
        strict.args(mesh).args(["--placement", &at]);
        call(&mut strict, &file("y"), more)
    };
    compile(&[]).ok();
    strict(&[]).fails(1, &["grouped_gemm", " --mesh ep=2 --placement <file>"]);
    // Another placement that gives ranks as many.
    let alike = write(scratch.path(), "alike.txt", "7,6,5,+4 | 0-4")
        .display()
        .to_string();
    compile(&["--placement", &alike]).ok();
    let report = strict(&["--json"]).json();
    assert_eq!(report["kernels"]["compiled"], 0, "{report}");
    assert_eq!(report["placement"]["groups"][1][3], 0, "{report}");
    run(&file("one"), &[]).ok();
    assert!(fs::read(file("y")).unwrap() == fs::read(file("one")).unwrap());
    compile(&["--placement", &at, "--training"]).ok();
    strict(&["--training"]).ok();
    strict(&["--training", "--strategy", "r=0"]).fails(1, &["grouped_gemm"]);
    let other = write(scratch.path(), "other.txt", "0-3 | 4-6")
        .display()
        .to_string();
    compile(&["--placement", &other]).fails(2, &["the placement is of 7 experts on 2 groups"]);
}

/// What experts learn comes from their owners, in the order of their numbers.
#[test]
fn gradients_of_placed_experts_are_those_of_one_process() {
    let scratch = scratch();
    let file = |name: &str| scratch.path().join(name);
    let at = placed(&scratch, "7,0,2,4 | 1,3,5,6,+7");
    run(&file("one"), &["--grad"]).ok();
    let more = ["--grad", "--ranks", "2", "--placement", &at];
    let text = run(&file("ranks"), &more).ok();
    assert!(text.contains("experts placed"), "{text}");
    for name in [
        "grad.experts.up.weight",
        "grad.experts.down.weight",
        "grad.router.weight",
        "dx",
    ] {
        let [found, wanted] = ["ranks", "one"].map(|run| load(&file(run), name));
        assert_eq!(found.1, wanted.1, "{name}");
        let pairs = found.2.iter().zip(&wanted.2);
        let worst = pairs.fold(0f64, |most, (f, w)| most.max((f - w).abs()));
        let scale = wanted.2.iter().fold(0f64, |most, w| most.max(w.abs()));
        assert!(worst <= 1e-5 * scale, "{name}: {worst} of {scale}");
    }
}

/// Ranks decide as they do in the whole pass: by the most tokens of all and by the
/// token's number among all.
#[test]
fn ranks_may_only_route() {
    let small = Small::of(
        "name = \"small\"
         shape = { model_dim = 20, hidden_dim = 12, experts = 5, top_k = 2 }
         router = { jitter = 0.3, noise = 2.0 }
         capacity = { mode = \"max-count\", align = 2 }",
    );
    let ranks = ["--ranks", "3"];
    for pass in [&[][..], &["--training", "--seed", "3"]] {
        small.run(&[pass, &ranks].concat()).ok();
        let names = [
            "topk_ids",
            "topk_weights",
            "counts",
            "capacity",
            "locations",
        ];
        let whole = names.map(|name| load(&small.output, name));
        small
            .run(&[pass, &ranks, &["--routing-only", "--stats"]].concat())
            .ok();
        assert_eq!(names.map(|name| load(&small.output, name)), whole);
        let kept = moesaic::weights::Checkpoint::open(&small.output).unwrap();
        assert!(!kept.names().any(|name| name == "y"));
    }
}

/// The kernels of all sides of a rank can be read, written and looked for.
#[test]
fn sources_of_ranks_can_be_read() {
    let scratch = scratch();
    let folder = scratch.path().join("kernels");
    let model = repository("tests/oracle/hf/qwen2_moe");
    let mesh = [
        "--mesh",
        "ep=2,expert_tp=2,shared=sharded",
        "--strategy",
        "comm_dtype=fp8",
    ];
    let of = |words: &[&str]| {
        let mut call = command();
        let layer = ["--target", "cpu:portable", "--layer", "1", "--rank", "3"];
        call.args(words).args(layer).args(mesh);
        finish(call.arg("--hf").arg(&model))
    };
    let listed = of(&["emit", "-o", &folder.display().to_string()]).ok();
    let files: BTreeSet<&str> = listed.lines().collect();
    let target = folder.join("cpu-portable");
    for name in [
        "dispatch/gate_topk.c",
        "experts/grouped_gemm_up.c",
        "shared/grouped_gemm_up_shared_0.c",
        "nodes/comm_cast_rows_fp8.c",
    ] {
        let path = target.join(name).display().to_string();
        assert!(files.contains(&*path), "{path} is not in {listed}");
    }
    let text = |name: &str| fs::read_to_string(target.join(name)).unwrap();
    let shown = of(&["inspect", "--kernel", "comm_cast_pack", "--source"]).ok();
    let wire = "nodes/comm_cast_rows_fp8.c";
    for part in [wire, text(wire).trim_end()] {
        assert!(shown.contains(part), "{shown}");
    }
    assert!(!shown.contains("experts/grouped_gemm_up.c"), "{shown}");
    of(&["inspect", "--kernel", "no_kernel", "--source"]).fails(2, &["no kernel `no_kernel`"]);
    let up = of(&["inspect", "--kernel", "grouped_gemm_up", "--json"]).json();
    let up = &up["kernels"][0];
    assert_eq!(up["source"], text("experts/grouped_gemm_up.c"));
    assert_eq!(up["part"], "experts");
    let stdout = of(&["emit"]).ok();
    assert!(
        stdout.contains("nodes/comm_cast_rows_fp8.c ====="),
        "{stdout}"
    );
    let mut shadows = command();
    let words = [
        "--target",
        "cuda:sm_90a",
        "--layer",
        "1",
        "--mesh",
        "ep=4",
        "--strategy",
    ];
    shadows.arg("emit").args(words).args(["shadows=1", "--hf"]);
    let stdout = finish(shadows.arg(&model)).ok();
    for name in ["shadows/grouped_gemm_up.cu", "sums/fold_ranks.cu"] {
        assert!(stdout.contains(name), "{name}");
    }
}

/// Its own kernels, its steps, and results that the reference finds right.
#[test]
fn shared_experts_may_be_sliced() {
    let scratch = scratch();
    let file = |name: &str| scratch.path().join(name);
    let cache = file("cache");
    let model = repository("tests/oracle/hf/qwen2_moe");
    let mesh = ["--mesh", "ep=2,expert_tp=2,shared=sharded"];
    let ours = |words: &[&str]| {
        let mut command = command();
        command.env("MOESAIC_CACHE", &cache).args(words);
        command
    };
    let layer = ["--target", "cpu", "--layer", "1", "--hf"];
    for training in [&[][..], &["--training"]] {
        let mut precompile = ours(&["precompile"]);
        precompile.args(training).args(mesh).args(layer).arg(&model);
        finish(&mut precompile).ok();
        let strict = [training, &["--strict"], &mesh].concat();
        call_of("qwen2_moe", &mut ours(&["run"]), &file("y"), &strict).ok();
    }
    let words = [&["--strict", "--reference"], &mesh[..]].concat();
    let text = call_of("qwen2_moe", &mut ours(&["run"]), &file("y"), &words).ok();
    let says = "(ep 2 x expert_tp 2 x dp 1, shared experts sharded)";
    assert!(text.contains(says), "{text}");
    let mut inspect = ours(&["inspect"]);
    inspect.args(mesh).args(["--rank", "1", "--tokens", "8"]);
    let text = finish(inspect.args(&layer[2..]).arg(&model)).ok();
    for part in [
        "; shards of shared experts, of width",
        "shared   grouped_gemm_down",
        "shared.0.out summed over 2 shards to shared.0.out",
    ] {
        assert!(text.contains(part), "{text}");
    }
}

/// A GPU's ranks add up by a kernel, which has to be there too.
#[test]
fn the_kernel_that_adds_up_ranks_is_compiled_ahead() {
    let _ = installed(ToolKind::Cuda);
    let scratch = scratch();
    let listed = |mesh: &[&str]| {
        let spec = repository("examples/specs/switch-base-8.toml");
        let words = ["precompile", "--target", "cuda:sm_90a", "--json", "--spec"];
        let mut precompile = command();
        // NVRTC is the user's, the kernels are not.
        precompile.env("MOESAIC_CACHE", moesaic::cache::home().unwrap());
        precompile.args(words).arg(spec).args(mesh);
        finish(precompile.arg("--cache").arg(scratch.path())).ok()
    };
    assert!(listed(&["--mesh", "ep=2"]).contains("fold_ranks"));
    assert!(!listed(&[]).contains("fold_ranks"));
}

/// Said before ranks wait for each other.
#[test]
fn nccl_is_for_gpus() {
    let scratch = scratch();
    let output = scratch.path().join("y");
    let mut run = command();
    for (name, value) in [("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")] {
        run.env(name, value);
    }
    let failed = call(run.arg("run"), &output, &["--exchange", "nccl"]);
    assert_eq!(failed.code, 2, "{}", failed.stderr);
    let words = "--exchange nccl is between GPUs; the target is cpu";
    assert!(failed.stderr.contains(words), "{}", failed.stderr);
}

#[test]
fn meshes_that_cannot_be_say_what_can() {
    let scratch = scratch();
    let output = scratch.path().join("y");
    let placement = placed(&scratch, "0-4 | 5-7,+0");
    for (more, part) in [
        (&["--ranks", "2", "--mesh", "ep=3"][..], "there are 2"),
        (&["--mesh", "ep=9"], "9 groups cannot share 8 experts"),
        (&["--mesh", "ep=2,expert_tp=3"], "take a divisor"),
        (&["--mesh", "pp=2"], "none of ep, expert_tp, dp, shared"),
        (&["--mesh", "ep=2,shared=2"], "whole or sharded, not `2`"),
        (
            &["--mesh", "ep=3", "--placement", &placement],
            "the placement is of 8 experts on 2 groups, the layer has 8 on 3",
        ),
        (
            &["--ranks", "2", "--exchange", "nccl"],
            "--exchange is for processes",
        ),
    ] {
        let failed = run(&output, more);
        assert_eq!(failed.code, 2, "{more:?}: {}", failed.stderr);
        assert!(failed.stderr.contains(part), "{more:?}: {}", failed.stderr);
        assert!(!output.exists());
    }
}
