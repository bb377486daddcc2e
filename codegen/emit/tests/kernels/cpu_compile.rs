//! Emitted C is clean for every compiler on this machine, for every
//! instruction set, whether or not this machine could run it.

use super::narrower::own;
use moesaic_emit::emit_layer;
use moesaic_harness::thorough::in_turns;
use moesaic_kernel::{CpuIsa, Target};
use moesaic_plan::{PlanOptions, Training, plan};
use moesaic_spec::LayerSpec;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::{Command, Stdio};

const GCC: [&str; 2] = ["gcc", "cc"];
const GCC_AARCH64: [&str; 1] = ["aarch64-linux-gnu-gcc"];
const CLANG: [&str; 8] = [
    "clang", "clang-21", "clang-20", "clang-19", "clang-18", "clang-16", "clang-15", "clang-14",
];

/// The first of these programs that runs.
fn first(names: &[&str]) -> Option<String> {
    let runs = |name: &&&str| {
        let mut command = Command::new(name);
        command
            .arg("--version")
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };
    names.iter().find(runs).map(|name| name.to_string())
}

fn flags(isa: CpuIsa) -> &'static str {
    match isa {
        CpuIsa::Portable | CpuIsa::Neon => "",
        CpuIsa::NeonBf16 => "-march=armv8.2-a+bf16+i8mm",
        CpuIsa::Avx2 => "-mavx2 -mfma -mf16c -mbmi2",
        CpuIsa::Avx512 => "-mavx2 -mfma -mf16c -mbmi2 -mavx512f -mavx512bw -mavx512dq -mavx512vl",
        CpuIsa::Avx512Bf16 => {
            "-mavx2 -mfma -mf16c -mbmi2 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -mavx512vnni"
        }
        CpuIsa::Amx => {
            "-mavx2 -mfma -mf16c -mbmi2 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -mavx512vnni -mamx-tile -mamx-bf16"
        }
    }
}

/// Whether it is of x86-64 and this machine is not, for which nothing is installed.
fn is_foreign_x86(isa: CpuIsa) -> bool {
    cfg!(not(target_arch = "x86_64")) && isa.has_avx2()
}

/// The compilers of this machine that can be asked for the instruction set,
/// each with what chooses the machine.
fn compilers(isa: CpuIsa) -> Vec<(String, &'static str)> {
    let arm = matches!(isa, CpuIsa::Neon | CpuIsa::NeonBf16);
    let own = isa == CpuIsa::Portable || arm == cfg!(target_arch = "aarch64");
    let gcc = match (own, arm) {
        (true, _) => first(&GCC),
        (false, true) => first(&GCC_AARCH64),
        (false, false) => None,
    };
    let machine = match (own, arm) {
        (true, _) => "",
        (false, true) => "--target=aarch64-linux-gnu",
        (false, false) => "--target=x86_64-linux-gnu",
    };
    let clang = first(&CLANG).map(|clang| (clang, machine));
    gcc.map(|gcc| (gcc, "")).into_iter().chain(clang).collect()
}

const SPECS: [&str; 5] = [
    r#"{"shape":{"model_dim":37,"hidden_dim":19,"experts":6,"top_k":2},
        "router":{"score":"sigmoid","select_bias":true,"renormalize":"sum","scale":2.5,
                  "groups":{"count":3,"keep":2,"stat":"top2-sum"}},
        "shared":[{"hidden_dim":8,"gate":"sigmoid"}]}"#,
    r#"{"shape":{"model_dim":256,"hidden_dim":512,"experts":8,"top_k":2},
        "precision":{"weights":"bf16","activations":"bf16"},
        "router":{"score":"softmax-selected","bias":true,"weight_on":"activation"},
        "capacity":{"mode":"factor","order":"probability","renormalize_after_drop":true},
        "experts":{"bias":true,"clamp":7.0,"alpha":1.702,"up_offset":1.0}}"#,
    r#"{"shape":{"model_dim":64,"hidden_dim":64,"experts":4,"top_k":1},
        "precision":{"weights":"f16","activations":"f16"},
        "router":{"kind":"cosine","projection_dim":24,"weight_on":"input"},
        "capacity":{"mode":"bounded","factor":1.0,"order":"batch-prioritized"},
        "experts":{"form":"plain","activation":"gelu","bias":true}}"#,
    r#"{"shape":{"model_dim":100,"hidden_dim":70,"experts":4,"top_k":2},
        "precision":{"weights":"bf16","activations":"bf16","experts":"fp8",
                     "experts_down":"q4_k"},
        "experts":{"bias":true}}"#,
    r#"{"shape":{"model_dim":100,"hidden_dim":70,"experts":4,"top_k":2},
        "precision":{"experts":"mxfp4","experts_down":"q5_k"}}"#,
];

/// Every text of the specs of `turn`, forward and in training, once, by file name.
fn texts(isa: CpuIsa, turn: usize) -> BTreeMap<String, String> {
    let specs = in_turns(turn, SPECS.iter().enumerate());
    let sources = specs.flat_map(|(i, text)| {
        let spec: LayerSpec = serde_json::from_str(text).unwrap();
        spec.validate().unwrap();
        let target = Target::Cpu(isa);
        let forward = plan(&spec, target, &PlanOptions::default()).unwrap();
        let training = plan(&spec, target, &PlanOptions::training(Training::default())).unwrap();
        [("forward", forward), ("training", training)]
            .into_iter()
            .flat_map(move |(pass, plan)| {
                let sources = emit_layer(&plan).unwrap().into_iter();
                sources.map(move |s| (format!("{i}_{pass}_{}", s.file_name()), s.text))
            })
    });
    let mut seen = BTreeSet::new();
    let is_new = |(_, text): &(String, String)| seen.insert(text.clone());
    sources.filter(is_new).collect()
}

fn compile((compiler, machine): &(String, &str), isa: CpuIsa, dir: &Path, files: &[&String]) {
    // What gcc warns of follows from what it optimizes; clang warns before it does.
    let effort = if compiler.starts_with("clang") {
        "-O0"
    } else {
        "-O2"
    };
    let mut command = Command::new(compiler);
    command.args("-std=gnu11 -fno-math-errno -ffp-contract=fast -c".split(' '));
    command
        .arg(effort)
        .args(["-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror"])
        .args(machine.split_whitespace())
        .args(flags(isa).split_whitespace());
    let output = command.args(files).current_dir(dir).output().unwrap();
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{compiler}, {isa:?}:\n{log}");
}

fn check(isa: CpuIsa) {
    let dir = tempfile::tempdir().unwrap();
    let turn = match isa {
        // Layers in bf16 alone have texts of their own, and those are the odd ones.
        CpuIsa::Amx | CpuIsa::NeonBf16 => 1,
        isa => isa as usize,
    };
    let all = |isa| texts(isa, turn).into_iter().collect();
    let texts = own(isa, all, |(_, text): &(String, String)| text);
    assert!(!texts.is_empty(), "{isa:?} has nothing of its own");
    for (file, text) in &texts {
        assert!(!text.contains("#include"), "{file} includes a header");
        std::fs::write(dir.path().join(file), text).unwrap();
    }
    let files: Vec<&String> = texts.iter().map(|(file, _)| file).collect();
    let compilers = compilers(isa);
    assert!(
        !compilers.is_empty() || is_foreign_x86(isa),
        "no gcc or clang for {isa:?}; `cargo xtask test` installs gcc for aarch64"
    );
    for compiler in &compilers {
        compile(compiler, isa, dir.path(), &files);
    }
}

#[test]
fn portable_text_is_clean() {
    check(CpuIsa::Portable);
}

#[test]
fn avx2_text_is_clean() {
    check(CpuIsa::Avx2);
}

#[test]
fn avx512_text_is_clean() {
    check(CpuIsa::Avx512);
}

#[test]
fn avx512bf16_text_is_clean() {
    check(CpuIsa::Avx512Bf16);
}

#[test]
fn amx_text_is_clean() {
    check(CpuIsa::Amx);
}

#[test]
fn neon_text_is_clean() {
    check(CpuIsa::Neon);
}

#[test]
fn neonbf16_text_is_clean() {
    check(CpuIsa::NeonBf16);
}
