//! No option is accepted and does nothing: every option of every command, and
//! where it has no use.

mod help;
mod plan;

use crate::common;
use crate::common::*;
use help::{commands, options};
use std::collections::BTreeSet;

/// One target of each kind.
const TARGETS: [&str; 7] = [
    "cpu",
    "cuda:sm_80",
    "rocm:gfx942",
    "sim:sm_80",
    "sim:gfx942",
    "sim:neon",
    "sim:amx",
];

/// Where an option has a use.
enum Use {
    /// Wherever the command runs. That includes options that permit something
    /// (`--strict`, `--narrow`), that name a value which a layer may not need
    /// (`--seed`), and those whose outcome is there anyway (`--stats` beside
    /// `--json`).
    Always,
    /// On these of [`TARGETS`]; refused on the others that the command takes.
    On(&'static [&'static str]),
    /// Not beside these arguments, which are refused with a message that has this
    /// part.
    NotWith(&'static [&'static str], &'static str),
}

use Use::{Always, NotWith, On};

const CPU: Use = On(&["cpu"]);
const CPU_TEXT: Use = On(&["cpu", "sim:neon", "sim:amx"]);
const WITH_SPEC: Use = NotWith(&["--layer", "1"], "cannot be used with '--layer");
const WITHOUT_MODEL: Use = NotWith(&["--dequantize", "f32"], "--hf <DIR>|--gguf <FILE>");
const NO_GRAD: &str = "--grad";

type Row = (&'static str, Use);

/// The command, its options, and for those with a value of their own that value.
const TABLE: &[(&str, &[Row])] = &[
    (
        "run",
        &[
            ("spec", Always),
            ("hf", Always),
            ("gguf", Always),
            ("layer", WITH_SPEC),
            ("precision", Always),
            ("dequantize", WITHOUT_MODEL),
            ("weights", Always),
            ("keys", Always),
            ("prefix", NotWith(&["--prefix", "a"], "--keys")),
            ("gate", NotWith(&["--gate", "0"], "--keys")),
            ("random", NotWith(&["--random"], "cannot be used with")),
            ("input", Always),
            ("tokens", NotWith(&["--tokens=1"], "cannot be used with")),
            ("output", Always),
            ("ranks", Always),
            ("mesh", Always),
            ("strategy", Always),
            (
                "strategy",
                NotWith(&["--strategy=r=0"], "there is one process"),
            ),
            ("placement", Always),
            (
                "placement",
                NotWith(&["--placement=x"], "there is one process"),
            ),
            (
                "exchange",
                NotWith(&["--exchange=mpi", "--ranks=2"], "is for processes"),
            ),
            ("target", Always),
            ("threads", On(&["cpu", "sim:sm_80", "sim:gfx942"])),
            ("pin", CPU),
            ("strict", Always),
            ("narrow", Always),
            ("allow-infinite", NotWith(&["--allow-infinite"], "--narrow")),
            ("allow-extra", Always),
            ("reference", Always),
            ("stats", Always),
            ("record", Always),
            ("replay", Always),
            (
                "replay-layer",
                NotWith(&["--replay-layer", "0"], "--replay"),
            ),
            ("training", Always),
            ("grad", Always),
            (
                "routing-only",
                NotWith(&["--routing-only", "--grad"], "cannot be used with '--"),
            ),
            ("capacity-factor", Always),
            ("recompute", NotWith(&["--recompute", "all"], NO_GRAD)),
            ("seed", NotWith(&["--seed", "1"], NO_GRAD)),
            ("step", NotWith(&["--step", "1"], NO_GRAD)),
            ("trace", Always),
            ("json", Always),
            ("cache", Always),
        ],
    ),
    (
        "emit",
        &[
            ("spec", Always),
            ("hf", Always),
            ("gguf", Always),
            ("layer", WITH_SPEC),
            ("precision", Always),
            ("dequantize", Always),
            ("target", Always),
            (
                "output",
                NotWith(&["--rust=x", "-o=d"], "--output does nothing"),
            ),
            ("rust", Always),
            (
                "training",
                NotWith(&["--rust=x", "--training"], "--training does nothing"),
            ),
            ("mesh", Always),
            (
                "mesh",
                NotWith(&["--rust=x", "--mesh=ep=1"], "--mesh does nothing"),
            ),
            ("rank", NotWith(&["--rank=1", "--target=cpu"], "--mesh")),
            (
                "strategy",
                NotWith(&["--strategy=r=0", "--target=cpu"], "--mesh"),
            ),
            (
                "placement",
                NotWith(&["--placement=x", "--target=cpu"], "--mesh"),
            ),
            ("l1", CPU_TEXT),
            ("l2", CPU_TEXT),
            (
                "l1",
                NotWith(&["--rust=x", "--l1=32KiB"], "--l1 does nothing"),
            ),
            (
                "l2",
                NotWith(&["--rust=x", "--l2=1MiB"], "--l2 does nothing"),
            ),
        ],
    ),
    (
        "inspect",
        &[
            ("spec", Always),
            ("hf", Always),
            ("gguf", Always),
            ("layer", WITH_SPEC),
            ("precision", Always),
            ("dequantize", WITHOUT_MODEL),
            ("target", Always),
            ("kernel", Always),
            ("tokens", Always),
            (
                "machine",
                NotWith(&["--machine=H100"], "limits of a CPU are measured"),
            ),
            (
                "machine",
                NotWith(
                    &["--machine=h100", "--target=rocm:gfx942"],
                    "--machine H100: it does not run kernels for `rocm:gfx942`\n  \
                     machines that do: MI300X",
                ),
            ),
            ("simulate", NotWith(&["--simulate=1"], "has no simulator")),
            (
                "mesh",
                NotWith(&["--mesh=ep=1", "--html=x"], "cannot be used with"),
            ),
            (
                "kernel",
                NotWith(&["--mesh=ep=1"], "--kernel none does nothing here"),
            ),
            ("strategy", NotWith(&["--strategy=r=0"], "--mesh")),
            ("rank", NotWith(&["--rank=1"], "--mesh")),
            ("placement", NotWith(&["--placement=x"], "--mesh")),
            ("per-node", NotWith(&["--per-node=1"], "--mesh")),
            ("training", Always),
            ("l1", CPU_TEXT),
            ("l2", CPU_TEXT),
            ("source", Always),
            ("asm", Always),
            ("html", Always),
            (
                "json",
                NotWith(&["--json", "--html=page"], "cannot be used with '--html"),
            ),
            ("cache", Always),
        ],
    ),
    (
        "precompile",
        &[
            ("spec", Always),
            ("hf", Always),
            ("gguf", Always),
            ("dequantize", Always),
            ("layer", NotWith(&["--layer=1", "--target=cpu"], "--hf")),
            ("target", Always),
            ("training", Always),
            ("mesh", Always),
            (
                "adaptive-r",
                NotWith(&["--adaptive-r", "--target=cpu"], "--mesh"),
            ),
            (
                "strategy",
                NotWith(&["--strategy=overlap_degree=2", "--target=cpu"], "--mesh"),
            ),
            (
                "placement",
                NotWith(&["--placement=x", "--target=cpu"], "--mesh"),
            ),
            (
                "multi-gate",
                NotWith(
                    &["--multi-gate", "--mesh=ep=1", "--target=cpu"],
                    "cannot be used with",
                ),
            ),
            ("replay", Always),
            ("l1", CPU_TEXT),
            ("l2", CPU_TEXT),
            ("output", Always),
            ("cache", Always),
            ("jobs", Always),
            ("json", Always),
        ],
    ),
    (
        "bench",
        &[
            ("spec", Always),
            ("hf", Always),
            ("gguf", Always),
            ("layer", WITH_SPEC),
            ("precision", Always),
            ("dequantize", WITHOUT_MODEL),
            (
                "target",
                NotWith(&["--target=sim:sm_80"], "its times mean nothing"),
            ),
            ("tokens", Always),
            ("threads", CPU),
            ("pin", CPU),
            ("seconds", Always),
            (
                "machine",
                NotWith(
                    &["--machine=H100", "--target=cpu"],
                    "limits of a CPU are measured",
                ),
            ),
            (
                "machine",
                NotWith(
                    &["--machine=H100", "--target=cuda:sm_80"],
                    "machines that do: A100",
                ),
            ),
            ("training", Always),
            ("skew", Always),
            (
                "ranks",
                NotWith(&["--ranks=2"], "the following required arguments"),
            ),
            (
                "calibration",
                NotWith(
                    &["--calibration=c.toml"],
                    "the following required arguments",
                ),
            ),
            (
                "without-steps",
                NotWith(&["--without-steps"], "the following required arguments"),
            ),
            ("json", Always),
            ("cache", Always),
        ],
    ),
    (
        "tune",
        &[
            ("spec", Always),
            ("hf", Always),
            ("gguf", Always),
            ("layer", WITH_SPEC),
            ("precision", Always),
            ("dequantize", WITHOUT_MODEL),
            (
                "target",
                NotWith(&["--target=cuda:sm_80"], "only CPUs can so far"),
            ),
            ("tokens", Always),
            ("threads", Always),
            ("pin", Always),
            ("seconds", Always),
            ("training", Always),
            ("json", Always),
            ("cache", Always),
        ],
    ),
    ("plan", plan::ROWS),
    // `--cache` is refused beside a pack, in tests/precompile.rs.
    ("cache list", &[("cache", Always), ("json", Always)]),
    (
        "cache verify",
        &[("remove", Always), ("cache", Always), ("json", Always)],
    ),
    (
        "cache prune",
        &[
            ("max-bytes", Always),
            ("older-than", Always),
            ("cache", Always),
            ("json", Always),
        ],
    ),
    ("cache import", &[("cache", Always), ("json", Always)]),
    (
        "cache export",
        &[("target", Always), ("cache", Always), ("json", Always)],
    ),
    ("toolchain install", &[]),
    ("toolchain list", &[("json", Always)]),
    ("spec check", &[]),
    (
        "spec show",
        &[
            ("spec", Always),
            ("hf", Always),
            ("gguf", Always),
            ("layer", WITH_SPEC),
            ("precision", Always),
            ("dequantize", WITHOUT_MODEL),
            ("all", Always),
            ("json", Always),
        ],
    ),
    (
        "experts add",
        &[
            ("spec", Always),
            ("weights", Always),
            ("copy", Always),
            ("zero-down", Always),
            ("margin", Always),
            ("tokens", Always),
            ("output", Always),
        ],
    ),
    (
        "experts split",
        &[
            ("spec", Always),
            ("weights", Always),
            ("counts", Always),
            ("output", Always),
        ],
    ),
    ("experts merge", &[("output", Always)]),
    (
        "experts shard",
        &[
            ("spec", Always),
            ("weights", Always),
            ("ranks", Always),
            ("expert-tp", Always),
            ("shared", Always),
            ("placement", Always),
            ("output", Always),
        ],
    ),
    (
        "experts unshard",
        &[
            ("spec", Always),
            ("expert-tp", Always),
            ("shared", Always),
            ("placement", Always),
            ("output", Always),
        ],
    ),
    (
        "experts import",
        &[
            ("spec", Always),
            ("keys", Always),
            ("prefix", Always),
            ("gate", Always),
            ("output", Always),
            ("narrow", Always),
            ("allow-infinite", NotWith(&["--allow-infinite"], "--narrow")),
            ("allow-extra", Always),
        ],
    ),
    (
        "quantize",
        &[
            ("hf", Always),
            // Checked against the output and the format, in tests/quantize.rs.
            ("format", Always),
            ("group", Always),
            ("output", Always),
            // Not beside `--tokens 0`, in tests/quantize.rs.
            ("layer", Always),
            ("tokens", Always),
            ("json", Always),
            ("cache", Always),
        ],
    ),
    (
        "launch",
        &[
            ("ranks", Always),
            ("mpi", Always),
            // Permits; not beside `--mpi off`, in tests/launch_refused.rs.
            ("allow-run-as-root", Always),
            ("bind", Always),
            ("no-prefix", Always),
            ("grace", Always),
            ("port", Always),
        ],
    ),
    (
        "doctor",
        &[
            // Not beside `--ranks`, in tests/launch.rs.
            ("cache", Always),
            ("ranks", Always),
            ("expect", Always),
            ("json", Always),
        ],
    ),
    ("completions", &[]),
];

#[test]
fn the_table_has_every_option_of_every_command() {
    let in_table: Vec<&str> = TABLE.iter().map(|(command, _)| *command).collect();
    assert_eq!(commands(""), in_table);
    for (command, rows) in TABLE {
        let rows: BTreeSet<String> = rows.iter().map(|(name, _)| name.to_string()).collect();
        assert_eq!(options(command), rows, "{command}");
    }
}

/// A call that is refused right after its options were checked, at the latest: nothing is compiled.
fn base(command: &str, small: &Small) -> std::process::Command {
    let mut call = common::command();
    call.current_dir(small.dir.path()).args(command.split(' '));
    call.arg("--spec").arg(&small.spec);
    match command {
        "run" => call.args(["--weights=none", "--input=none", "--output=y"]),
        "bench" => call.arg("--tokens=2147483647"),
        "plan" => call.args(["--world=1", "--machine=h800"]),
        "inspect" => call.arg("--kernel=none"),
        "precompile" => call.arg("--output=none/pack"),
        _ => &mut call,
    };
    call
}

fn value(option: &str) -> &str {
    match option {
        "threads" => "--threads=1",
        "pin" => "--pin",
        "l1" => "--l1=32KiB",
        "l2" => "--l2=1MiB",
        other => panic!("no value for --{other}"),
    }
}

#[test]
fn options_without_a_use_are_refused() {
    let small = Small::new();
    for (command, rows) in TABLE {
        for (option, wanted) in *rows {
            match wanted {
                Always => {}
                NotWith(args, part) => {
                    let finished = finish(base(command, &small).args(*args));
                    finished.fails(2, &[part]);
                }
                On(targets) => on_targets(command, option, targets, &small),
            }
        }
    }
}

fn on_targets(command: &str, option: &str, targets: &[&str], small: &Small) {
    for target in TARGETS {
        // A benchmark refuses simulators whatever the options.
        if command == "bench" && target.starts_with("sim") {
            continue;
        }
        let mut call = base(command, small);
        call.arg(format!("--target={target}")).arg(value(option));
        let finished = finish(&mut call);
        let refusal = format!("error: --{option} does nothing ");
        if targets.contains(&target) {
            assert!(!finished.stderr.contains(&refusal), "{}", finished.stderr)
        } else {
            finished.fails(2, &[&refusal, target, "hint: leave it out"])
        }
    }
}

#[test]
fn caches_are_for_the_cpus_of_a_list() {
    let small = Small::new();
    let mut call = common::command();
    call.args(["emit", "--target=cuda:sm_80,cpu:avx2", "--l2=256KiB"]);
    finish(call.arg("--spec").arg(&small.spec)).ok();
}

#[test]
fn nothing_accepts_spills() {
    let small = Small::new();
    for command in ["run", "emit", "inspect", "precompile", "bench", "tune"] {
        let finished = finish(base(command, &small).arg("--allow-spills"));
        finished.fails(2, &["unexpected argument '--allow-spills'"]);
    }
}
