//! `moesaic run` on ranks: threads of one process, and processes under MPI.

use crate::common::*;
use moesaic::toolchain::Kind;
use moesaic::toolchain::testing::{Tool, installed, needed};
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
        &["--mesh", "ep=2,shards=2", "--strategy", "ways=1"],
        &["--mesh", "ep=2,shards=2", "--strategy", "ways=0"],
        &["--ranks", "2", "--strategy", "degree=3"],
        &["--ranks", "3", "--strategy", "degree=2,shadows=2"],
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
    let more = ["--ranks", "2", "--strategy", "degree=2", "--trace", &trace];
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
    let registry = installed(Kind::Mpi);
    let found = moesaic::toolchain::mpi(&registry);
    let found = needed(Tool::Mpi, found.ok_or("it is not registered"));
    let scratch = scratch();
    let file = |name: &str| scratch.path().join(name);
    run(&file("one"), &[]).ok();
    let trace = file("trace").display().to_string();
    let traced = ["--strategy", "degree=2", "--trace", &trace];
    for more in [&[][..], &["--strategy", "ways=0"], &traced] {
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
    let strategy = ["--strategy", "wire=fp8", "--tokens", "8", "--hf"];
    packed.args(words).args(strategy).arg(&model);
    let text = finish(&mut packed).ok();
    for part in ["nodes    wire_pack", "between nodes fp8, 48 bytes a row"] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn kernels_for_any_ways_and_formats_are_compiled_ahead() {
    let scratch = scratch();
    let file = |name: &str| scratch.path().join(name);
    let cache = file("cache");
    let model = repository("tests/oracle/hf/mixtral");
    let mesh = ["--mesh", "ep=2,shards=2"];
    let compile = |more: &[&str]| {
        let mut ahead = command();
        ahead.args(["precompile", "--target", "cpu", "--layer", "1"]);
        ahead.args(["--strategy", "wire=fp8/f16"]).args(more);
        ahead.args(mesh).arg("--hf").arg(&model);
        finish(ahead.env("MOESAIC_CACHE", &cache)).ok();
    };
    compile(&["--any-ways"]);
    let strict = |strategy: &str| {
        let mut strict = command();
        strict.env("MOESAIC_CACHE", &cache).arg("run").args(mesh);
        let more = ["--strategy", strategy, "--strict"];
        call(&mut strict, &file("y"), &more)
    };
    strict("degree=2,wire=fp8/f16").fails(1, &["grouped_gemm"]);
    compile(&[]);
    strict("degree=2,wire=fp8/f16").ok();
    strict("ways=1,wire=fp8/f16").ok();
    strict("wire=bf16/fp8,ways=1").fails(1, &["wire_rows_bf16"]);
    for ways in ["ways=1", "ways=0"] {
        strict(ways).ok();
        let mut inspect = command();
        inspect.args(["inspect", "--layer", "1", "--rank", "1", "--strategy", ways]);
        let text = finish(inspect.args(mesh).arg("--hf").arg(&model)).ok();
        for part in ["gathered", "experts.down.weight of"] {
            assert!(text.contains(part), "{text}");
        }
    }
    let refused = ["--mesh", "ep=2,shards=2", "--strategy", "ways=3"];
    run(&file("y"), &refused).fails(2, &["a divisor of 2"]);
}

/// Its own kernels, its steps, and results that the reference finds right.
#[test]
fn shared_experts_may_be_sliced() {
    let scratch = scratch();
    let file = |name: &str| scratch.path().join(name);
    let cache = file("cache");
    let model = repository("tests/oracle/hf/qwen2_moe");
    let mesh = ["--mesh", "ep=2,shards=2,shared=sliced"];
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
    let says = "(ep 2 x shards 2 x dp 1, shared experts sliced)";
    assert!(text.contains(says), "{text}");
    let mut inspect = ours(&["inspect"]);
    inspect.args(mesh).args(["--rank", "1", "--tokens", "8"]);
    let text = finish(inspect.args(&layer[2..]).arg(&model)).ok();
    for part in [
        "; slices of shared experts, of width",
        "shared   grouped_gemm_down",
        "shared.0.out summed over 2 slices to shared.0.out",
    ] {
        assert!(text.contains(part), "{text}");
    }
}

/// A GPU's ranks add up by a kernel, which has to be there too.
#[test]
fn the_kernel_that_adds_up_ranks_is_compiled_ahead() {
    let _ = installed(Kind::Cuda);
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
    for (more, part) in [
        (&["--ranks", "2", "--mesh", "ep=3"][..], "there are 2"),
        (&["--mesh", "ep=9"], "9 groups cannot share 8 experts"),
        (&["--mesh", "ep=2,shards=3"], "take a divisor"),
        (&["--mesh", "pp=2"], "none of ep, shards, dp, shared"),
        (&["--mesh", "ep=2,shared=2"], "whole or sliced, not `2`"),
        (&["--ranks", "2", "--routing-only"], "needs no ranks"),
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
