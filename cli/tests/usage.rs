//! How people call the program: the names they say, short forms, and how much it prints.

use crate::common;
use crate::common::*;

#[test]
fn doctor_ends_with_a_block_for_a_bug_report() {
    let screen = moesaic(["doctor"]).ok();
    let marks = |line: &str| line.starts_with("  ✓ ") || line.starts_with("  ✗ ");
    assert!(
        screen.lines().filter(|line| marks(line)).count() > 8,
        "{screen}"
    );
    assert!(screen.lines().count() <= 24, "one screen: {screen}");
    assert!(
        screen.contains("✓ C compiler") && !screen.contains("```"),
        "{screen}"
    );
    let text = moesaic(["doctor", "-v"]).ok();
    for part in [
        "C compiler",
        "CUDA compiler",
        "ROCm device",
        "CUDA simulator",
        "needs a C++ compiler, no GPU",
        "for a bug report\n```text\nmoesaic ",
    ] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
    assert!(text.ends_with("```\n"));
    let json = moesaic(["doctor", "--json"]).json();
    assert!(
        json["cpu"]["limits"]["f32_flops"].as_f64().unwrap() > 1e8,
        "{json}"
    );
    assert!(text.contains("caches of a core: level 1 "), "{text}");
    let nodes = json["cpu"]["numa_nodes"].as_u64().unwrap();
    assert!(text.contains(&format!("{nodes} NUMA node")), "{text}");
    let class = json["cpu"]["planned_for"]["l2_bytes"].as_u64().unwrap();
    assert!(class.is_power_of_two() && class >= 256 << 10, "{json}");
}

#[test]
fn doctor_says_what_a_simulator_lacks() {
    let nothing = scratch();
    let mut call = command();
    call.args(["doctor", "--json"]);
    call.env("MOESAIC_CXX", "/no/such/g++")
        .env("MOESAIC_NVRTC", nothing.path());
    let json = finish(&mut call).json();
    let lacking = |at: usize, tried: &str, advice: &str| {
        let simulator = &json["simulators"][at];
        assert!(simulator["found"].is_null(), "{simulator}");
        assert_eq!(simulator["targets"], serde_json::json!([]));
        for (key, part) in [("tried", tried), ("advice", advice)] {
            assert!(
                simulator[key].as_str().unwrap().contains(part),
                "{simulator}"
            );
        }
    };
    lacking(
        0,
        "no libnvrtc.so in this folder",
        "moesaic toolchain install cuda",
    );
    lacking(1, "MOESAIC_CXX=/no/such/g++", "moesaic toolchain install c");
}

/// GPUs have the names that people say, and a wrong number is never taken for another GPU.
#[test]
fn gpus_are_named_as_people_say() {
    let small = Small::new();
    let emit = |target: &str| with_spec(&["emit", "--target", target], &small.spec);
    assert_eq!(emit("h100").ok(), emit("cuda:sm_90a").ok());
    assert_eq!(
        emit("MI300X,a100").ok(),
        emit("rocm:gfx942,cuda:sm_80").ok()
    );
    emit("h900").fails(2, &["unknown target `h900`", "GPUs  v100", "h100 h200"]);
    let plan = |machine: &str| {
        let args = ["plan", "--world=8", "--tokens=64", "--machine", machine];
        with_spec(&args, &small.spec)
    };
    let text = plan("h100").ok();
    assert!(text.contains("8 ranks of h100-ib"), "{text}");
    for part in [
        "STEP: time of one call",
        "STRATEGY: r: adaptive",
        "BOUND BY: ",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let wrong = plan("h900");
    assert!(!wrong.stderr.contains("did you mean"), "{}", wrong.stderr);
    wrong.fails(2, &["unknown machine `h900`", "known machines: "]);
}

/// Whoever makes a pack for another machine learns what that machine needs, as the page says it.
#[test]
fn precompile_says_which_driver_a_pack_needs() {
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let help = words(&moesaic(["precompile", "--help"]).ok());
    for part in [
        "GPUs by name, too: h100, a100, mi300x",
        "driver 580 or newer if NVRTC 13 compiled them",
        "525 or newer if NVRTC 12 did",
        "ROCm 6.0 or newer",
    ] {
        assert!(help.contains(part), "{part}: {help}");
    }
    let page = std::fs::read_to_string(repository("docs/PLATFORM.md")).unwrap();
    for part in [
        "driver 580 or newer for CUBINs of NVRTC 13, 525 or newer for those of NVRTC 12",
        "| run on ROCm | ROCm 6.0 or newer |",
    ] {
        assert!(page.contains(part), "{part}");
    }
}

#[test]
fn a_spec_needs_no_option() {
    let small = Small::new();
    let spec = small.spec.to_str().unwrap();
    let emitted = moesaic(["emit", spec, "--target", "cuda:sm_80"]).ok();
    assert_eq!(
        emitted,
        with_spec(&["emit", "--target", "cuda:sm_80"], &small.spec).ok()
    );
    moesaic(["spec", "show", spec]).ok();
    moesaic(["spec", "show", spec, "--spec", spec]).fails(2, &["cannot be used with"]);
    moesaic(["spec", "show", spec, "--hf", "x"]).fails(2, &["cannot be used with"]);
    moesaic(["spec", "show"]).fails(2, &["required arguments"]);
    // An output that is the input is refused, however the input was named.
    let page = format!("--html={spec}");
    moesaic(["inspect", spec, &page]).fails(2, &["would overwrite"]);
}

#[test]
fn token_counts_have_ranges() {
    let small = Small::new();
    let args = ["inspect", "--target", "cuda:sm_80", "--json", "--tokens"];
    let inspect = |tokens| with_spec(&[&args[..], &[tokens]].concat(), &small.spec);
    let json = inspect("1-3,64").json();
    let at = json["launches"][0]["at"].as_array().unwrap();
    let tokens: Vec<u64> = at.iter().map(|at| at["tokens"].as_u64().unwrap()).collect();
    assert_eq!(tokens, [1, 2, 3, 64]);
    inspect("3-1").fails(2, &["the range 3-1 is empty; write 1-3"]);
}

#[test]
fn quiet_leaves_notes_out() {
    let empty = scratch();
    let show = |more: &[&str]| {
        let mut call = common::command();
        call.env("MOESAIC_CACHE", empty.path()).args(more);
        finish(call.args(["toolchain", "list"]))
    };
    let (loud, quiet) = (show(&[]), show(&["-q"]));
    assert!(loud.stderr.contains("note: "), "{}", loud.stderr);
    assert_eq!(quiet.stderr, "");
    assert_eq!(loud.ok(), quiet.ok());
    show(&["-q", "-v"]).fails(2, &["cannot be used with"]);
}

#[test]
fn tables_fit_the_columns() {
    let small = Small::new();
    let mut call = common::command();
    call.args(["inspect", "--target", "cuda:sm_80", "--spec"]);
    call.arg(&small.spec).env("COLUMNS", "72");
    let text = finish(&mut call).ok();
    let tables = text.lines().filter(|line| line.starts_with("    "));
    let wide: Vec<&str> = tables.filter(|line| line.chars().count() > 72).collect();
    assert!(wide.is_empty(), "{wide:#?}");
}

/// No line of a table is broken by the end of a narrow stream.
#[test]
fn a_narrow_plan_lists_what_a_table_has_no_room_for() {
    let small = Small::new();
    let mut call = common::command();
    call.args(["plan", "--world", "8", "--machine", "h800", "--spec"]);
    call.arg(&small.spec).env("COLUMNS", "40");
    let text = finish(&mut call).ok();
    let wide: Vec<&str> = text
        .lines()
        .filter(|line| line.chars().count() > 40)
        .collect();
    assert!(wide.is_empty(), "{wide:#?}");
    assert!(
        text.contains("\n    MESH ") && text.contains("\n    STRATEGY "),
        "{text}"
    );
}

#[cfg(target_os = "linux")]
#[test]
fn help_that_is_lost_is_a_failure() {
    let full = std::fs::File::create("/dev/full").unwrap();
    let output = common::command().arg("--help").stdout(full).output();
    let output = output.unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("cannot write the output: no space"), "{text}");
    assert_eq!(output.status.code(), Some(1));
}

/// Sizes that no machine has are refused before they are allocated.
#[test]
fn layers_and_ranks_without_end_are_refused_at_once() {
    let dir = scratch();
    let spec = dir.path().join("huge.toml");
    let text = "shape = { model_dim = 32768, hidden_dim = 32768, experts = 1024, top_k = 2 }";
    std::fs::write(&spec, text).unwrap();
    let spec = spec.to_str().unwrap();
    let to = dir.path().join("out.safetensors");
    let run = [
        "run",
        "--random",
        "--spec",
        spec,
        "-o",
        to.to_str().unwrap(),
    ];
    for words in [
        &run[..],
        &["bench", "--spec", spec],
        &["tune", "--spec", spec],
    ] {
        moesaic(words).fails(2, &["take 12.0 TiB of memory", "are free"]);
    }
    let ranks = [&run[..], &["--ranks", "65535"]].concat();
    moesaic(ranks).fails(2, &["65535 ranks as threads of one process", "or fewer"]);
}

#[test]
fn shells_complete_targets_and_machines() {
    for shell in ["bash", "zsh", "fish"] {
        let script = moesaic(["completions", shell]).ok();
        for name in ["h100", "mi300x", "rocm:gfx942", "h100-ib", "rtx-4090"] {
            let escaped = name.replace(':', "\\:");
            assert!(
                script.contains(name) || script.contains(&escaped),
                "{shell}: {name}"
            );
        }
    }
}
