//! Every command but `run`, on the CPU.

use crate::common::*;
use std::io::Read;
use std::path::Path;
use std::process::Stdio;

#[test]
fn emit_writes_a_folder_per_target() {
    let small = Small::new();
    let out = small.dir.path().join("kernels");
    let mut call = command();
    call.args(["emit", "--target", "cpu:avx2,cuda:sm_90a,rocm:gfx942", "-o"])
        .arg(&out);
    let listed = finish(call.arg("--spec").arg(&small.spec)).ok();
    for file in [
        "cpu-avx2/gate_topk.c",
        "cuda-sm_90a/grouped_gemm_up.cu",
        "rocm-gfx942/combine.hip",
    ] {
        let path = out.join(file);
        assert!(
            listed.contains(&path.display().to_string()),
            "{file} is not in {listed}"
        );
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.len() > 200 && !text.contains("#include"), "{file}");
    }
    // All products gather their rows: no dispatch. GPUs have three kernels for few tokens.
    assert_eq!(listed.lines().count(), 5 + 8 + 8);
    let mut call = command();
    call.args(["emit", "--target", "cpu", "-o"])
        .arg(&small.weights)
        .arg("--spec");
    finish(call.arg(&small.spec)).fails(2, &["is a file, not a directory"]);
}

#[test]
fn emit_prints_with_headers_and_survives_a_closed_pipe() {
    let small = Small::new();
    let text = with_spec(&["emit", "--target", "cuda:sm_80"], &small.spec).ok();
    assert!(
        text.starts_with("// ===== cuda-sm_80/route.cu =====\n"),
        "{}",
        &text[..80]
    );
    assert_eq!(text.matches("// ===== ").count(), 8);
    let mut call = command();
    call.args(["emit", "--target", "cuda:sm_80", "--spec"])
        .arg(&small.spec);
    let mut child = call
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let mut stderr = String::new();
    child
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut stderr)
        .unwrap();
    assert!(child.wait().unwrap().success(), "{stderr}");
    assert_eq!(stderr, "");
}

#[test]
fn a_simulated_nvidia_gpu_gets_the_text_of_the_real_one() {
    let small = Small::new();
    let out = small.dir.path().join("kernels");
    let mut call = command();
    call.args(["emit", "--target", "sim:sm_80,cuda:sm_80", "-o"])
        .arg(&out);
    finish(call.arg("--spec").arg(&small.spec)).ok();
    let files = std::fs::read_dir(out.join("cuda-sm_80")).unwrap().flatten();
    let names: Vec<_> = files.map(|file| file.file_name()).collect();
    assert_eq!(names.len(), 8);
    for name in names {
        let read = |folder: &str| std::fs::read(out.join(folder).join(&name)).unwrap();
        assert!(
            read("sim-sm_80") == read("cuda-sm_80"),
            "{}",
            name.display()
        );
    }
}

#[test]
fn emit_writes_a_typed_layer() {
    let small = Small::new();
    let rust = small.dir.path().join("small.rs");
    let mut call = command();
    finish(
        call.args(["emit", "--rust"])
            .arg(&rust)
            .arg("--spec")
            .arg(&small.spec),
    )
    .ok();
    let text = std::fs::read_to_string(rust).unwrap();
    assert!(text.contains("pub struct Small"), "{}", &text[..400]);
}

#[test]
fn a_spec_may_come_from_stdin() {
    use std::io::Write;
    let mut call = command();
    call.args(["spec", "show", "--spec", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut child = call.spawn().unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(SMALL.as_bytes())
        .unwrap();
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("model_dim = 20"), "{text}");
    assert!(
        text.contains("#   experts.down.weight [5, 20, 12] f32: down projection"),
        "{text}"
    );
}

#[test]
fn inspect_tells_everything_in_json() {
    let small = Small::new();
    let args = ["inspect", "--target", "cpu", "--tokens", "1,100", "--json"];
    let json = with_spec(&args, &small.spec).json();
    let kernels = json["kernels"].as_array().unwrap();
    let names: Vec<&str> = kernels
        .iter()
        .map(|k| k["name"].as_str().unwrap())
        .collect();
    assert_eq!(names[..3], ["gate_topk", "expert_scan", "grouped_gemm_up"]);
    assert!(
        kernels
            .iter()
            .all(|k| k["report"]["compiler"].is_string() && k["bytes"].as_u64() > Some(0))
    );
    let launches = json["launches"].as_array().unwrap();
    let last = launches.last().unwrap();
    assert_eq!(last["writes"], serde_json::json!(["y"]));
    assert_eq!(last["at"][1]["tokens"], 100);
    assert!(last["at"][1]["roofline_seconds"].as_f64().unwrap() > 0.0);
    assert_eq!(json["machine"]["origin"], "measured");
}

#[test]
fn inspect_for_a_gpu_needs_none_and_no_compiler_either() {
    let small = Small::new();
    let mut call = command();
    call.args([
        "inspect",
        "--target",
        "cuda:sm_90a",
        "--kernel",
        "grouped_gemm",
        "--source",
        "--spec",
    ]);
    // A folder without NVRTC: the same with and without an installed one.
    call.arg(&small.spec).env("MOESAIC_NVRTC", small.dir.path());
    let finished = finish(&mut call);
    assert!(
        finished
            .stderr
            .starts_with("warning: no compiler for `cuda`"),
        "{}",
        finished.stderr
    );
    let text = finished.ok();
    for part in [
        "small on cuda:sm_90a",
        "grouped_gemm_down",
        "roofline on H100 (published:",
        "__global__",
    ] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
    assert!(!text.contains("gate_logits"), "{text}");
    call.arg("--asm");
    finish(&mut call).fails_after_warning(2, "no compiler for `cuda`");
}

#[test]
fn inspect_names_the_kernels_it_has() {
    let small = Small::new();
    with_spec(&["inspect", "--kernel", "grouped_gem"], &small.spec).fails(
        2,
        &[
            "no kernel `grouped_gem`",
            "grouped_gemm_up",
            "did you mean `grouped_gemm`?",
        ],
    );
    with_spec(&["inspect", "--machine", "abacus"], &small.spec)
        .fails(2, &["unknown machine `abacus`", "H100", "MI300X"]);
}

#[test]
fn the_page_is_whole_and_needs_nothing_else() {
    let small = Small::new();
    let page = small.dir.path().join("page.html");
    let mut call = command();
    call.args(["inspect", "--target", "cpu", "--html"])
        .arg(&page)
        .arg("--spec")
        .arg(&small.spec);
    finish(&mut call).ok();
    let html = std::fs::read_to_string(&page).unwrap();
    for part in [
        "<svg",
        "id=\"kernel-grouped_gemm_up\"",
        "id=\"plan\"",
        "prefers-color-scheme",
        "</html>",
        "type=\"range\" min=\"0\" max=\"2\"",
        "<i class=\"k\">for</i>",
        "id=\"workspace\"",
        "moesaic inspect --target cpu --html",
        "top_k = ",
    ] {
        assert!(html.contains(part), "{part}");
    }
    // Every token count has its launches and its circles, on a wide and on a narrow drawing.
    for count in 0..3 {
        let own = html.matches(&format!("data-t=\"{count}\"")).count();
        assert_eq!(own, 3, "T number {count}");
    }
    assert!(
        !html.contains("nothing is specialised"),
        "grids follow from T"
    );
    for outside in ["http:", "https:", "src=", "<link", "@import", "url("] {
        assert!(!html.contains(outside), "{outside}");
    }
    for tag in [
        "span", "div", "table", "details", "svg", "pre", "code", "tr", "td",
    ] {
        let open =
            html.matches(&format!("<{tag}>")).count() + html.matches(&format!("<{tag} ")).count();
        assert_eq!(open, html.matches(&format!("</{tag}>")).count(), "{tag}");
    }
}

#[test]
fn the_page_of_a_gpu_has_decode_and_prefill_apart() {
    let small = Small::new();
    let page = small.dir.path().join("gpu.html");
    let args = [
        "inspect",
        "--target",
        "h100",
        "--html",
        page.to_str().unwrap(),
    ];
    with_spec(&args, &small.spec).ok();
    let html = std::fs::read_to_string(&page).unwrap();
    let (decode, prefill) = html
        .split_once("<h3>Prefill: calls of more than 64 tokens</h3>")
        .expect("two lists");
    let (_, decode) = decode
        .split_once("<h3>Decode: calls of up to 64 tokens</h3>")
        .expect("a list of decode");
    let prefill = prefill.split("</ol>").next().unwrap();
    assert!(decode.contains("grouped_gemm_up_decode") && !prefill.contains("_decode"));
    for part in [
        "Occupancy",
        "the shortest time of a launch",
        "The rate of the 50 MiB cache is not published",
    ] {
        assert!(html.contains(part), "{part}");
    }
}

#[test]
fn a_cache_is_listed_checked_and_pruned() {
    let small = Small::new();
    let cache = small.dir.path().join("cache").display().to_string();
    let on = |args: &[&str]| moesaic([args, &["--cache", &cache]].concat());
    assert!(on(&["cache", "list"]).ok().contains("0 kernels"));
    on(&["cache", "export", "/tmp/none.tar.gz"])
        .fails(2, &["no kernels to export", "moesaic precompile"]);
    let one = [
        "cache",
        "export",
        "/tmp/none.tar.gz",
        "--target",
        "cuda:sm_80",
    ];
    with_spec(
        &["precompile", "--target", "cpu", "--cache", &cache],
        &small.spec,
    )
    .ok();
    let list = on(&["cache", "list", "--json"]).json();
    let kernels = list["kernels"].as_array().unwrap();
    assert_eq!(kernels.len(), 5);
    assert!(kernels.iter().all(|kernel| kernel["layer"] == "small"));
    let table = on(&["cache", "list"]).ok();
    assert!(
        table
            .lines()
            .nth(1)
            .is_some_and(|row| row.contains("  small  ")),
        "{table}"
    );
    on(&one).fails(
        2,
        &["no kernels for cuda:sm_80 to export", "it has some for cpu"],
    );
    assert!(
        on(&["cache", "verify"])
            .ok()
            .contains("5 kernels good, 0 damaged")
    );

    let path = kernels[0]["path"].as_str().unwrap();
    let mut bytes = std::fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(path, bytes).unwrap();
    let source = Path::new(kernels[1]["path"].as_str().unwrap()).with_extension("c");
    std::fs::write(source, "int main;").unwrap();
    let damaged = on(&["cache", "verify"]);
    let says = |part| damaged.stderr.contains(part) && damaged.code == 1;
    assert!(says("1 kernel and 1 source damaged"), "{}", damaged.stderr);
    assert!(
        on(&["cache", "verify", "--remove"])
            .ok()
            .contains("(removed)")
    );
    let pruned = on(&["cache", "prune", "--max-bytes", "0", "--json"]).json();
    assert_eq!(
        (&pruned["removed"], &pruned["kept"]),
        (&4.into(), &0.into())
    );
}

#[test]
fn bench_checks_and_times() {
    let small = Small::new();
    let args = [
        "bench",
        "--target",
        "cpu",
        "--tokens",
        "1,33",
        "--seconds",
        "0",
        "--json",
    ];
    let json = with_spec(&args, &small.spec).json();
    assert!(json["y_error"].as_f64().unwrap() < 1e-5, "{json}");
    let runs = json["runs"].as_array().unwrap();
    assert_eq!(runs[1]["tokens"], 33);
    assert_eq!(runs[1]["launches"].as_array().unwrap().len(), 8);
    assert!(json["steady"].is_boolean(), "{json}");
    for run in runs {
        let all = run["launches"].as_array().unwrap().iter().chain([run]);
        for timed in all.filter(|timed| timed["roofline_seconds"].as_f64() > Some(0.0)) {
            assert!(timed["spread"].as_f64().unwrap() >= 0.0, "{timed}");
            // No share is above 1: a time below the roofline has a reason instead.
            match timed["of_roofline"].as_f64() {
                Some(share) => assert!(share > 0.0 && share <= 1.0, "{timed}"),
                None => assert!(timed["no_share"].is_string(), "{timed}"),
            }
        }
    }
    let shared = format!(
        "{SMALL}[[shared]]\nhidden_dim = 8\ngate = \"sigmoid\"\n[capacity]\nmode = \"factor\"\n"
    );
    let spec = write(small.dir.path(), "shared.toml", &shared);
    let json = with_spec(&args, &spec).json();
    assert!(json["y_error"].as_f64().unwrap() < 1e-5, "{json}");
}

#[test]
fn caches_of_another_cpu_can_be_named() {
    let small = Small::new();
    let emit = |more: &[&str]| {
        let deep =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/specs/mixtral-8x7b.toml");
        let args = ["emit", "--target", "cpu:avx512"];
        with_spec(&[&args[..], more].concat(), &deep)
    };
    let assumed = emit(&[]).ok();
    assert_eq!(emit(&["--l1", "48KiB", "--l2", "2MiB"]).ok(), assumed);
    // Sizes between two classes are those of the smaller one.
    assert_eq!(emit(&["--l1", "64KiB", "--l2", "3MiB"]).ok(), assumed);
    let other = emit(&["--l2", "256KiB"]).ok();
    assert!(assumed.contains("TILE_WORDS = 512,") && !assumed.contains("TILE_WORDS = 128,"));
    assert!(other.contains("TILE_WORDS = 128,") && !other.contains("TILE_WORDS = 512,"));
    emit(&["--l2", "much"]).fails(2, &["--l2", "unknown unit"]);
    // What is precompiled for them is what inspect finds for them.
    let cache = scratch();
    let args = |command: &'static str| {
        let target = ["--target", "cpu", "--l1", "32KiB", "--l2", "256KiB"];
        let dir = ["--json", "--cache", cache.path().to_str().unwrap()];
        with_spec(&[&[command][..], &target, &dir].concat(), &small.spec).json()
    };
    args("precompile");
    let kernels = args("inspect")["kernels"].clone();
    let cached = |kernel: &serde_json::Value| kernel["cached"] == true;
    assert!(kernels.as_array().unwrap().iter().all(cached), "{kernels}");
}

#[test]
fn a_simulator_counts_what_is_asked_for() {
    let small = Small::new();
    let page = small.dir.path().join("counted.html");
    let args = [
        "inspect",
        "--target",
        "rocm:gfx1100",
        "--simulate",
        "9",
        "--kernel",
        "combine",
    ];
    let inspect = |more: &[&str]| with_spec(&[&args[..], more].concat(), &small.spec);
    let json = inspect(&["--json"]).json();
    let counted = &json["counted"];
    assert_eq!(counted["target"], "sim:gfx1100");
    assert_eq!(counted["tokens"], 9);
    assert_eq!(counted["kernels"].as_array().unwrap().len(), 1);
    let combine = &counted["kernels"][0];
    assert_eq!(combine["symbol"], "combine");
    // 9 tokens of 20 floats are written once.
    assert_eq!(combine["global_stores"]["bytes"], 9 * 20 * 4);
    assert!(combine["global_stores"]["sectors"].is_null(), "{combine}");
    inspect(&["--html", page.to_str().unwrap()]).ok();
    let html = std::fs::read_to_string(page).unwrap();
    for part in [
        "id=\"counted\"",
        "on sim:gfx1100 at 9 random tokens",
        "Matrix FLOP",
    ] {
        assert!(html.contains(part), "{part}");
    }
}

/// A kernel for few tokens and one for many have the same symbol, and one of them has blocks.
#[test]
fn a_simulator_names_the_kernel_that_ran() {
    let small = Small::new();
    let named = |tokens: &str| -> Vec<String> {
        let args = ["inspect", "--json", "--target", "rocm:gfx942"];
        let args = [&args[..], &["--simulate", tokens]].concat();
        let json = with_spec(&args, &small.spec).json();
        let kernels = json["counted"]["kernels"].as_array().unwrap().clone();
        let up = kernels.iter().filter(|k| k["symbol"] == "grouped_gemm_up");
        up.map(|k| k["kernel"].as_str().unwrap().to_string())
            .collect()
    };
    assert_eq!(named("9"), ["grouped_gemm_up_decode"]);
    assert_eq!(named("65"), ["grouped_gemm_up"]);
}

#[test]
fn a_simulator_is_not_timed() {
    let small = Small::new();
    let bench = |target: &str| with_spec(&["bench", "--target", target], &small.spec);
    bench("sim:sm_80").fails(
        2,
        &[
            "`sim:sm_80` is a simulator",
            "times mean nothing",
            "inspect --target sim:sm_80 --simulate",
            "--target cuda:sm_80",
        ],
    );
    bench("sim").fails(2, &["names no architecture", "sim:sm_90a"]);
    bench("sim:sm_91").fails(2, &["unknown target `sim:sm_91`"]);
}

#[test]
fn completions_know_the_commands() {
    for shell in ["bash", "zsh", "fish"] {
        assert!(
            moesaic(["completions", shell]).ok().contains("precompile"),
            "{shell}"
        );
    }
}

#[test]
fn specs_are_checked_and_toolchains_listed() {
    let small = Small::new();
    let spec = small.spec.to_str().unwrap();
    assert!(
        moesaic(["spec", "check", spec])
            .ok()
            .ends_with("small is valid\n")
    );
    assert!(moesaic(["toolchain", "list", "--json"]).json()["tools"].is_array());
    for example in std::fs::read_dir(repository("examples/specs"))
        .unwrap()
        .flatten()
    {
        moesaic([
            "spec".as_ref(),
            "check".as_ref(),
            example.path().as_os_str(),
        ])
        .ok();
    }
}

#[test]
fn help_has_examples_and_exit_codes() {
    assert!(
        moesaic(["--help"])
            .ok()
            .contains("Exit codes: 0 done, 1 failed")
    );
    for command in [
        "run",
        "emit",
        "inspect",
        "precompile",
        "bench",
        "tune",
        "cache",
        "toolchain",
    ] {
        assert!(
            moesaic([command, "--help"]).ok().contains("Examples:"),
            "{command}"
        );
    }
}

/// A compiler that takes its time, started and then left alone.
#[cfg(unix)]
#[test]
fn a_signal_leaves_no_temporary_folder() {
    use std::os::unix::process::ExitStatusExt;
    let (small, temporary) = (Small::new(), scratch());
    let script =
        "#!/bin/sh\ncase \" $* \" in *' -c '*|*' -o '*) exec sleep 3;; esac\nexec cc \"$@\"\n";
    let compiler = write(small.dir.path(), "slow-cc", script);
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&compiler, mode).unwrap();
    let folders = || std::fs::read_dir(temporary.path()).unwrap().count();
    for (signal, number) in [("INT", 2), ("TERM", 15), ("HUP", 1)] {
        let mut command = command();
        command.args(["precompile", "--target", "cpu:portable", "--spec"]);
        command
            .arg(&small.spec)
            .arg("--cache")
            .arg(small.dir.path().join("cache"));
        command
            .env("MOESAIC_CC", &compiler)
            .env("TMPDIR", temporary.path());
        command.stderr(Stdio::null()).stdout(Stdio::null());
        // What runs the tests may ignore them.
        let heard = || {
            for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
                // SAFETY: numbers only.
                unsafe { libc::signal(signal, libc::SIG_DFL) };
            }
            Ok(())
        };
        // SAFETY: between fork and exec only system calls are made.
        unsafe { std::os::unix::process::CommandExt::pre_exec(&mut command, heard) };
        let mut child = command.spawn().unwrap();
        let start = std::time::Instant::now();
        while folders() == 0 {
            assert!(start.elapsed().as_secs() < 60, "no compile has begun");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        let pid = child.id().to_string();
        let sent = std::process::Command::new("kill")
            .args([&format!("-{signal}"), &pid])
            .status();
        assert!(sent.unwrap().success());
        let ended = child.wait().unwrap();
        assert_eq!(ended.signal(), Some(number), "{ended}");
        assert_eq!(folders(), 0, "after SIG{signal}");
    }
}

#[test]
fn what_json_has_anyway_is_there() {
    let small = Small::new();
    let both = small.run(&["--stats", "--json"]).json();
    assert!(both["routing"].is_object(), "{both}");
    let mut call = command();
    call.args(["inspect", "--source", "--json"]);
    let shown = finish(call.arg("--spec").arg(&small.spec)).json();
    assert!(shown["kernels"][0]["source"].as_str().unwrap().len() > 200);
}
