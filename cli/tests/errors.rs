//! Bad input gets one clear error, exit code 2, and leaves no file behind.

use crate::common::*;
use moesaic::{DType, Tensor};
use std::path::Path;

#[test]
fn specs_that_cannot_be() {
    let too_many = SMALL.replace("top_k = 2", "top_k = 9");
    Small::of(&too_many).refuses(&[], &["top_k", "small.toml:2:", "experts = 5", "^"]);
    let typo = SMALL.replace("hidden_dim", "hiden_dim");
    Small::of(&typo).refuses(&[], &["hiden_dim", "hidden_dim", "small.toml:2:"]);
    Small::of("").refuses(&[], &["shape"]);
    Small::of("{\"shape\": {}}").refuses(&[], &["hint: this looks like JSON; --hf DIR"]);
}

/// A file that `--gguf` names is not called damaged safetensors, and of several models one has to be
/// named.
#[test]
fn files_that_are_no_gguf() {
    let dir = scratch();
    let empty = write(dir.path(), "empty.gguf", "");
    let json = write(dir.path(), "config.json", "{\"a\": 1}");
    let models = dir.path().join("models");
    std::fs::create_dir(&models).unwrap();
    for name in ["a.gguf", "b.gguf"] {
        write(&models, name, "GGUF");
    }
    let shown = |path: &Path| finish(command().args(["spec", "show", "--gguf"]).arg(path));
    for (path, name) in [(&empty, "empty.gguf"), (&json, "config.json")] {
        shown(path).fails(2, &[name, "is no GGUF file", "hint: --hf"]);
    }
    let said = ["it has a.gguf and 1 more weight file: pass one of them"];
    shown(&models).fails(2, &said);
}

#[test]
fn specs_that_cannot_be_read() {
    let dir = scratch();
    let missing = dir.path().join("none.toml");
    let emit = |path: &Path| {
        finish(
            command()
                .args(["emit", "--target", "cpu", "--spec"])
                .arg(path),
        )
    };
    emit(&missing).fails(
        2,
        &[
            "cannot read the spec",
            "none.toml: no such file or directory",
        ],
    );
    emit(dir.path()).fails(2, &["is a directory, not a file"]);
    let binary = dir.path().join("binary.toml");
    std::fs::write(&binary, [0xff, 0xfe, 0]).unwrap();
    emit(&binary).fails(2, &["binary.toml is not a text file"]);
    let pack = dir.path().join("pack.tar.gz");
    std::fs::write(&pack, [0x1f, 0x8b, 8, 0]).unwrap();
    let said = ["pack.tar.gz is not a text file", "moesaic cache import"];
    emit(&pack).fails(2, &said);
}

#[cfg(unix)]
#[test]
fn paths_need_not_be_text() {
    use std::os::unix::ffi::OsStrExt;
    let dir = scratch();
    let path = dir.path().join(std::ffi::OsStr::from_bytes(b"\xff.toml"));
    let emit = || {
        finish(
            command()
                .args(["emit", "--target", "cpu", "--spec"])
                .arg(&path),
        )
    };
    emit().fails(2, &["no such file or directory"]);
    std::fs::write(&path, SMALL).unwrap();
    emit().ok();
}

#[test]
fn unknown_targets_get_a_suggestion_and_the_list() {
    let small = Small::new();
    let emit = |target: &str| {
        finish(
            command()
                .args(["emit", "--target", target, "--spec"])
                .arg(&small.spec),
        )
    };
    emit("cuda:sm90a").fails(
        2,
        &[
            "unknown target `cuda:sm90a`",
            "rocm:gfx942",
            "cuda:sm_80",
            "did you mean `cuda:sm_90a`?",
        ],
    );
    emit("cpu,gfx942").fails(2, &["did you mean `rocm:gfx942`?"]);
    emit("cuda").fails(2, &["names no architecture", "cuda:sm_90a"]);
    small
        .run(&["--target=cpu:quantum"])
        .fails(2, &["cannot be used multiple times"]);
}

#[test]
fn only_gpus_are_simulated() {
    let small = Small::new();
    let inspect = |target: &str, tokens: &str| {
        let mut call = command();
        call.args(["inspect", "--target", target, "--simulate", tokens]);
        finish(call.arg("--spec").arg(&small.spec))
    };
    inspect("cpu", "64").fails(2, &["has no simulator", "sim:sm_90a", "cuda:*, rocm:*"]);
    inspect("sim:neon", "64").fails(2, &["`sim:neon` has no simulator", "cuda:*, rocm:*"]);
    inspect("sim:gfx942", "4000000000").fails(2, &["4000000000"]);
    inspect("sim:sm_80", "0").fails(2, &["invalid value '0' for '--simulate <N>'"]);
    inspect("sim", "1").fails(2, &["`sim` names no architecture\n", "sim:gfx942"]);
    inspect("sim:sm_99", "1").fails(2, &["unknown target `sim:sm_99`", "did you mean `sim:sm_"]);
}

#[test]
fn weights_of_another_shape_or_type() {
    let mut small = Small::new();
    let mut weights = small_weights();
    weights.insert("experts.up.weight".to_string(), tensor(&[5, 20, 12], 3));
    small.weights = save(small.dir.path(), "shape.safetensors", &weights);
    small.refuses(
        &[],
        &[
            "`experts.up.weight`",
            "has shape [5, 20, 12], expected [5, 12, 20]",
        ],
    );
    let ints = Tensor::copied(&[5, 20], &[1; 100]);
    weights.insert("experts.up.weight".to_string(), tensor(&[5, 12, 20], 3));
    weights.insert("router.weight".to_string(), ints);
    small.weights = save(small.dir.path(), "type.safetensors", &weights);
    small.refuses(&[], &["`router.weight`", "i32"]);
    weights.remove("router.weight");
    small.weights = save(small.dir.path(), "gap.safetensors", &weights);
    small.refuses(&[], &["has no tensor for `router.weight`"]);
}

#[test]
fn files_that_are_cut_short_or_no_safetensors() {
    for which in ["weights", "input"] {
        let mut small = Small::new();
        let path = if which == "weights" {
            &small.weights
        } else {
            &small.input
        };
        let whole = std::fs::read(path).unwrap();
        let cut = small.dir.path().join("cut.safetensors");
        for length in [0, 5, 60, whole.len() - 1] {
            std::fs::write(&cut, &whole[..length]).unwrap();
            match which {
                "weights" => small.weights = cut.clone(),
                _ => small.input = cut.clone(),
            }
            small.refuses(
                &[],
                &[
                    "cut.safetensors is damaged",
                    "download or copy the file again",
                ],
            );
        }
    }
}

#[test]
fn inputs_that_do_not_fit() {
    let mut small = Small::new();
    let mut try_with = |name: &str, tensor: Tensor<'static>, parts: &[&str]| {
        small.input = save(
            small.dir.path(),
            "bad.safetensors",
            &[(name.to_string(), tensor)].into(),
        );
        small.refuses(&[], parts);
    };
    try_with("h", tensor(&[7, 20], 1), &["has no tensor `x`; it has h"]);
    try_with(
        "x",
        tensor(&[7, 21], 1),
        &["has shape [7, 21], expected [tokens, 20]"],
    );
    try_with("x", tensor(&[140], 1), &["has shape [140]"]);
    try_with(
        "x",
        tensor(&[2, 3, 20], 1),
        &["hint: flatten its outer dimensions into one"],
    );
    try_with(
        "x",
        Tensor::copied(&[1, 20], &[0; 20]),
        &["is i32, expected f32, f16 or bf16"],
    );
    let wide = Tensor {
        dtype: DType::I64,
        shape: vec![1, 20],
        data: vec![0; 160].into(),
    };
    try_with("x", wide, &["is i64, expected f32, f16 or bf16"]);
    small.input = small.dir.path().to_path_buf();
    small.refuses(&[], &["is a directory, not a file"]);
}

#[test]
fn outputs_that_cannot_be() {
    let mut small = Small::new();
    let dir = small.dir.path().to_path_buf();
    small.output = dir.join("no/such/y.safetensors");
    small.refuses(&[], &["there is no directory"]);
    small.output = dir;
    small.run(&[]).fails(2, &["is a directory, not a file"]);
}

#[test]
fn a_missing_compiler_says_what_to_install() {
    let small = Small::new();
    let mut call = small.command();
    let empty = scratch();
    finish(
        call.env("MOESAIC_CC", "/no/such/cc")
            .arg("--cache")
            .arg(empty.path()),
    )
    .fails(
        2,
        &[
            "no compiler for `cpu`",
            "MOESAIC_CC=/no/such/cc",
            "moesaic toolchain install c",
        ],
    );
}

#[test]
fn compilers_that_are_missing_are_named_together() {
    let small = Small::new();
    let mut call = command();
    call.args(["precompile", "--target", "cuda:sm_80,h100,mi300x", "--spec"]);
    call.arg(&small.spec)
        .arg("-o")
        .arg(small.dir.path().join("pack.tar.gz"));
    call.env("MOESAIC_NVRTC", small.dir.path())
        .env("MOESAIC_CLANG", "/no/such/clang++");
    let finished = finish(&mut call);
    let said = finished.stderr.clone();
    finished.fails(2, &["no compiler for `cuda`", "no compiler for `rocm`"]);
    assert_eq!(said.matches("no compiler for `cuda`").count(), 1, "{said}");
}

#[test]
fn a_device_that_cannot_run_the_target_is_a_clean_error() {
    let small = Small::new();
    let mut call = command();
    call.args(["run", "--target", "rocm", "--spec"])
        .arg(&small.spec);
    call.arg("--weights")
        .arg(&small.weights)
        .arg("--input")
        .arg(&small.input);
    finish(call.arg("--output").arg(&small.output)).fails(
        2,
        &[
            "no `rocm` device is available",
            "hint: `moesaic doctor` says",
        ],
    );
    assert!(!small.output.exists());
}

#[test]
fn a_compiler_that_fails_is_a_failure_of_the_work() {
    let (small, empty) = (Small::new(), scratch());
    let mut call = small.command();
    finish(
        call.env("MOESAIC_CC", "false")
            .arg("--cache")
            .arg(empty.path()),
    )
    .fails(
        1,
        &["false", "exit status: 1 and said nothing", "MOESAIC_CC"],
    );
    assert!(!small.output.exists());
}

#[test]
fn a_cache_that_is_a_file_is_none() {
    let small = Small::new();
    let cache = small.input.display().to_string();
    for action in [
        &["list"][..],
        &["verify"],
        &["prune", "--older-than", "1d"],
        &["export", "p.tar.gz"],
    ] {
        let words = [&["cache"], action, &["--cache", &cache]].concat();
        moesaic(words).fails(1, &["x.safetensors is not a directory"]);
    }
    let doctor = moesaic(["doctor", "--cache", &cache]);
    assert!(
        doctor.stderr.contains("is not a directory"),
        "{}",
        doctor.stderr
    );
}

#[test]
fn ids_are_named_as_they_are() {
    let small = Small::of(&format!("{}router = {{ kind = \"external\" }}\n", SMALL));
    let mut input = small_input();
    let mut ids = [0i64; 14];
    ids[3] = 4_294_967_296;
    input.insert("topk_ids".to_string(), Tensor::copied(&[7, 2], &ids));
    input.insert("topk_weights".to_string(), tensor(&[7, 2], 3));
    save(small.dir.path(), "x.safetensors", &input);
    small.refuses(&[], &["`topk_ids` in", "has 4294967296 at element 3"]);
}

#[test]
fn a_cache_that_cannot_be_costs_a_warning_and_nothing_else() {
    let small = Small::new();
    // Inside a file there is no directory, whoever asks.
    let cache = small.input.join("cache").display().to_string();
    let finished = small.run(&["--cache", &cache]);
    assert_eq!(
        finished.stderr.matches("warning:").count(),
        1,
        "{}",
        finished.stderr
    );
    assert!(
        finished
            .stderr
            .contains("going on without the kernel cache")
    );
    finished.ok();
    let mut call = command();
    call.args(["precompile", "--target", "cpu", "--cache", &cache, "--spec"]);
    let finished = finish(call.arg(&small.spec));
    assert_eq!(finished.code, 1);
    assert!(
        finished
            .stderr
            .contains("error: 5 kernels could not be kept in")
    );
}

#[test]
fn hugging_face_directories_without_a_layer() {
    let dir = scratch();
    let run = |config: &str, layer: &str| {
        let path = write(dir.path(), "config.json", config);
        let mut call = command();
        call.args(["spec", "show", "--layer", layer, "--hf"])
            .arg(path.parent().unwrap());
        finish(&mut call)
    };
    run("{}", "0").fails(2, &["has no `model_type`"]);
    run("nonsense", "0").fails(2, &["config.json: ", "not a JSON object"]);
    let deep = "{\"model_type\": \"mixtral\", \"num_hidden_layers\": 100000}";
    run(deep, "0").fails(2, &["`num_hidden_layers` is 100000", "below 100000"]);
    run("{\"model_type\": \"mixtrall\"}", "0").fails(2, &["did you mean `mixtral`?"]);
    let config =
        std::fs::read_to_string(repository("tests/oracle/hf/mixtral/config.json")).unwrap();
    run(&config, "99").fails(2, &["layer 99 does not exist", "2 layers"]);
    let nowhere = dir.path().join("nowhere");
    let mut call = command();
    finish(call.args(["spec", "show", "--hf"]).arg(nowhere)).fails(
        2,
        &[
            "cannot read the model configuration",
            "hint: --hf takes the directory",
        ],
    );
}

#[test]
fn usage_errors_are_bad_input_too() {
    moesaic(["run"]).fails(2, &["required arguments were not provided"]);
    moesaic(["inspekt"]).fails(2, &["unrecognized subcommand", "inspect"]);
    moesaic(["emit", "--target", "cpu"]).fails(2, &["--spec"]);
    moesaic(["cache", "prune"]).fails(2, &["--max-bytes", "--older-than"]);
    moesaic(["cache", "prune", "--older-than", "soon"]).fails(2, &["such as 30d"]);
    moesaic(["toolchain", "install", "metal"]).fails(2, &["choose from cuda, rocm, c"]);
}

#[test]
fn colours_only_where_they_are_wanted() {
    let plain = moesaic(["emit", "--target", "cpu", "--spec", "/none"]);
    assert!(!plain.stderr.contains('\x1b'));
    let painted = moesaic([
        "emit", "--target", "cpu", "--spec", "/none", "--color", "always",
    ]);
    assert!(
        painted
            .stderr
            .starts_with("\x1b[1;31merror:\x1b[0m cannot read"),
        "{}",
        painted.stderr
    );
}

#[test]
fn a_target_is_refused_before_weights_are_read() {
    let mut small = Small::new();
    small.weights = small.dir.path().join("none.safetensors");
    let run = |target: &str| {
        let mut call = command();
        call.args(["run", "--target", target, "--spec"])
            .arg(&small.spec);
        call.arg("--weights").arg(&small.weights);
        call.arg("--input").arg(&small.input);
        finish(call.arg("--output").arg(&small.output))
    };
    run("cuda:sm90a").fails(
        2,
        &["unknown target `cuda:sm90a`", "did you mean `cuda:sm_90a`?"],
    );
    run("rocm").fails(2, &["no `rocm` device is available"]);
    run("cpu").fails(2, &["none.safetensors"]);
}

#[test]
fn a_model_directory_has_names_of_its_own() {
    let mut call = command();
    call.args(["run", "--hf"])
        .arg(repository("tests/oracle/hf/mixtral"));
    call.args(["--input=none", "--output=y", "--keys=tutel"]);
    let finished = finish(&mut call);
    assert_eq!(finished.code, 2);
    assert!(
        finished
            .stderr
            .contains("error: --keys does nothing with --hf"),
        "{}",
        finished.stderr
    );
}

/// Several ranks write to one terminal or file.
#[test]
fn every_line_of_a_rank_names_it() {
    for words in [
        &["run", "--no-such-option"][..],
        &["emit", "--target=cpu", "--spec=none.toml"],
    ] {
        let mut rank = command();
        for (name, value) in [("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")] {
            rank.env(name, value);
        }
        let failed = finish(rank.args(words));
        assert_eq!(failed.code, 2, "{}", failed.stderr);
        let named = |line: &str| line.starts_with("rank 1 on ");
        assert!(failed.stderr.lines().all(named), "{}", failed.stderr);
    }
}
