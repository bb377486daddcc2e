//! Compiling with the system's compiler, and with compilers that misbehave.

mod common;

use common::{SCALE, compile, compiler, entry, scale_entry, source};
use moesaic_cpu::{CpuCompiler, host_isa};
use moesaic_kernel::{CpuIsa, Target};
use moesaic_target::{CompileOptions, Compiler};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Makes a compiler that is this shell script.
fn script(dir: &Path, body: &str) -> PathBuf {
    let path = dir.join("fakecc");
    // A shell writes it under another name: a file that this process has open
    // for writing while another test forks cannot run.
    let line = format!(
        "printf '%s' \"$1\" > '{0}' && chmod 755 '{0}'",
        path.display()
    );
    let text =
        format!("#!/bin/sh\ncase \"$1\" in -v) echo fake version 1.2.3; exit 0;; esac\n{body}\n");
    let done = std::process::Command::new("sh")
        .args(["-c", &line, "sh", &text])
        .status()
        .unwrap();
    assert!(done.success());
    path
}

fn failure(body: &str) -> String {
    let dir = tempfile::tempdir().unwrap();
    let compiler = CpuCompiler::at(&script(dir.path(), body));
    error_of(&compiler)
}

fn error_of(compiler: &CpuCompiler) -> String {
    let source = source(host_isa(), SCALE, vec![scale_entry()]);
    compiler
        .compile(&source, &CompileOptions::default())
        .unwrap_err()
        .to_string()
}

fn contains(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in:\n{text}");
    }
}

#[test]
fn an_artifact_reports_its_entries_and_compiler() {
    let artifact = compile(SCALE, vec![scale_entry()]).unwrap();
    assert!(artifact.report.compile_ms > 0.0);
    assert_eq!(artifact.report.compiler, compiler().name());
    assert_eq!(artifact.report.log, "");
    let [kernel] = &artifact.report.kernels[..] else {
        panic!("{:?}", artifact.report)
    };
    assert_eq!(kernel.symbol, "scale");
    assert!(
        (40..4000).contains(&kernel.code_bytes.unwrap()),
        "{kernel:?}"
    );
    assert_eq!((kernel.registers, kernel.stack_bytes), (None, None));
}

#[test]
fn the_same_source_gives_the_same_bytes_without_paths() {
    let first = compile(SCALE, vec![scale_entry()]).unwrap().binary;
    let second = compile(SCALE, vec![scale_entry()]).unwrap().binary;
    assert!(first == second, "two compiles differ");
    let text = String::from_utf8_lossy(&first);
    for path in ["/tmp", "moesaic-", env!("CARGO_MANIFEST_DIR")] {
        assert!(!text.contains(path), "the binary holds {path}");
    }
}

#[test]
fn every_instruction_set_of_this_machine_compiles() {
    let compiler = compiler();
    let name = compiler.name();
    let number = name.rsplit(' ').next().unwrap();
    for target in compiler.targets() {
        let Target::Cpu(isa) = target else {
            panic!("{target}")
        };
        let source = source(isa, SCALE, vec![scale_entry()]);
        compiler
            .compile(&source, &CompileOptions::default())
            .unwrap();
        assert!(compiler.fingerprint(target).contains(number), "{number}");
    }
}

#[test]
fn fingerprints_tell_targets_apart_and_hold_no_path() {
    let of = |isa| compiler().fingerprint(Target::Cpu(isa));
    assert_ne!(of(CpuIsa::Avx512), of(CpuIsa::Avx512Bf16));
    assert_ne!(of(CpuIsa::Portable), of(CpuIsa::Neon));
    assert!(!of(CpuIsa::Avx2).contains('/'), "{}", of(CpuIsa::Avx2));
}

#[test]
fn a_foreign_target_is_named_with_what_is_possible() {
    let dir = tempfile::tempdir().unwrap();
    let compiler = CpuCompiler::at(&script(dir.path(), "exit 1"));
    let foreign = if cfg!(target_arch = "x86_64") {
        CpuIsa::Neon
    } else {
        CpuIsa::Avx2
    };
    let source = source(foreign, SCALE, vec![scale_entry()]);
    let error = compiler
        .compile(&source, &CompileOptions::default())
        .unwrap_err();
    let foreign = Target::Cpu(foreign).to_string();
    let parts = [
        "fake 1.2.3 cannot compile for",
        &foreign,
        "cpu:portable",
        "toolchain install c",
    ];
    contains(&error.to_string(), &parts);
}

#[test]
fn a_rejected_text_comes_with_the_compilers_words() {
    let error = compile("void scale(void) { no_such_thing(1) }", vec![])
        .unwrap_err()
        .to_string();
    contains(
        &error,
        &["rejected kernel `dispatch_test`", "kernel.c:1:", "expected"],
    );
}

#[test]
fn a_function_that_is_not_there_is_found_before_the_first_launch() {
    let text = SCALE.replacen('{', "{ far_away();", 1);
    let error = compile(&text, vec![scale_entry()]).unwrap_err();
    contains(&error.to_string(), &["rejected kernel", "far_away"]);
}

#[test]
fn warnings_are_kept_in_the_log() {
    let text = format!("{SCALE}\nint twice(int x) {{ if (x = 2) return 1; return 0; }}\n");
    let log = compile(&text, vec![scale_entry()]).unwrap().report.log;
    assert!(
        log.contains("suggest parentheses") || log.contains("parentheses"),
        "{log}"
    );
}

#[test]
fn an_entry_that_is_not_exported_is_found() {
    let text = SCALE.replace("void scale", "static void scale");
    let error = compile(&text, vec![scale_entry()]).unwrap_err().to_string();
    contains(&error, &["dispatch_test", "does not export `scale`"]);
    let error = compile(SCALE, vec![entry("missing", vec![])])
        .unwrap_err()
        .to_string();
    contains(&error, &["does not export `missing`"]);
}

/// As gcc 12 has made kernels whose stores it took for dead.
#[test]
fn an_entry_that_only_returns_is_found() {
    let text = "void scale(void *const *args, long first, long last, long grid_x) {}";
    let error = compile(text, vec![scale_entry()]).unwrap_err().to_string();
    contains(&error, &["`scale`", "left out what it does", "MOESAIC_CC"]);
}

#[test]
fn a_crashing_compiler_is_said_to_have_crashed() {
    contains(
        &failure("kill -SEGV $$"),
        &["fake 1.2.3", "killed by signal 11"],
    );
    contains(
        &failure("echo 'x.c:1:2: internal compiler error: oops' >&2; exit 4"),
        &["it crashed", "oops"],
    );
}

#[test]
fn a_compiler_that_cannot_be_started_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let path = script(dir.path(), "exit 0");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
    contains(
        &error_of(&CpuCompiler::at(&path)),
        &["cannot be run", "ermission denied", "fakecc"],
    );
    contains(
        &error_of(&CpuCompiler::at(Path::new("/no/cc"))),
        &["/no/cc", "No such file"],
    );
}

#[test]
fn a_full_disk_is_told_from_a_bad_kernel() {
    let words =
        "echo 'kernel.c: fatal error: error writing to /x.s: No space left on device' >&2; exit 1";
    contains(
        &failure(words),
        &["no room for its files", "TMPDIR", "No space left"],
    );
}

#[test]
fn an_old_compiler_is_told_from_a_bad_kernel() {
    let words = "echo \"cc: error: unrecognized command-line option '-mavx512bf16'\" >&2; exit 1";
    contains(
        &failure(words),
        &[
            "fake 1.2.3 cannot compile for",
            "use a newer compiler",
            "-mavx512bf16",
        ],
    );
}

#[test]
fn success_without_a_binary_is_an_error() {
    contains(&failure("exit 0"), &["left no binary"]);
    contains(
        &failure("echo garbage > kernel.so"),
        &["dispatch_test", "not a shared object"],
    );
}

#[test]
fn a_recalled_identity_saves_the_question() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("fakecc");
    std::fs::copy(compiler().program(), &path).unwrap();
    let identity = CpuCompiler::at(&path).identity().unwrap();
    assert!(identity.version.contains(" version "), "{identity:?}");

    let warm = CpuCompiler::at(&path);
    let mut told = identity.clone();
    told.version = "gcc version 99.1 (told), here".to_string();
    assert!(warm.recall(&told));
    assert_eq!(warm.name(), "gcc 99.1");
    assert!(
        warm.fingerprint(Target::Cpu(CpuIsa::Portable))
            .starts_with("gcc version 99.1 (told)")
    );

    std::fs::write(&path, "\x7fELF, but another").unwrap();
    assert!(
        !CpuCompiler::at(&path).recall(&identity),
        "a replaced compiler was recalled"
    );
}

#[test]
fn a_launcher_is_not_remembered() {
    assert!(CpuCompiler::at(Path::new("/bin/true")).identity().is_none());
    let dir = tempfile::tempdir().unwrap();
    let behind_script = CpuCompiler::at(&script(dir.path(), "exit 1"));
    assert!(behind_script.identity().is_none());
    let ccache = dir.path().join("ccache");
    std::fs::copy(compiler().program(), &ccache).unwrap();
    let link = dir.path().join("gcc");
    std::os::unix::fs::symlink(&ccache, &link).unwrap();
    assert!(CpuCompiler::at(&link).identity().is_none());
}

#[test]
fn a_script_that_adds_flags_is_another_compiler() {
    let dir = tempfile::tempdir().unwrap();
    let print = |body: &str| {
        let compiler = CpuCompiler::at(&script(dir.path(), body));
        compiler.fingerprint(Target::Cpu(CpuIsa::Portable))
    };
    let (plain, fast) = ("exec gcc \"$@\"", "exec gcc -ffast-math \"$@\"");
    assert_eq!(print(plain), print(plain));
    assert_ne!(print(plain), print(fast));
    let binary = compiler().fingerprint(Target::Cpu(CpuIsa::Portable));
    assert!(!binary.contains("script"), "{binary}");
}
