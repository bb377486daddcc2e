//! HIPRTC in a child process: this program starts itself over. A fake HIPRTC,
//! built by the system C compiler, does what the real one does too rarely.

use moesaic_kernel::{KernelSource, Language, Stem};
use moesaic_rocm::{ClangTool, RocmCompiler, maybe_run_child};
use moesaic_target::{CompileError, CompileOptions, Compiler};
use moesaic_toolchain::{Kind, Registry, install};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

const TEXT: &str = "extern \"C\" __attribute__((global)) void probe(float* y) { *y = 1; }\n";

fn main() {
    let folder = tempfile::tempdir().unwrap();
    if std::env::var_os("MOESAIC_HIPRTC_CHILD").is_none() {
        without_the_hook();
    }
    maybe_run_child();
    prepare(folder.path());
    for (name, test) in TESTS {
        test();
        println!("test {name} ... ok");
    }
}

const TESTS: [(&str, fn()); 5] = [
    ("a_kernel_compiles", a_kernel_compiles),
    ("a_rejected_text_has_the_log", a_rejected_text_has_the_log),
    ("an_abort_is_an_error", an_abort_is_an_error),
    ("a_hang_is_stopped", a_hang_is_stopped),
    ("a_missing_library_is_named", a_missing_library_is_named),
];

/// No clang is found from here on, and HIPRTC is the fake.
fn prepare(folder: &Path) {
    let library = folder.join("libhiprtc.so");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake_hiprtc.c");
    let built = Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .arg(&library)
        .arg(source)
        .status();
    assert!(
        built
            .expect("the test needs a C compiler named `cc`")
            .success()
    );
    let code_object = folder.join("probe.co");
    std::fs::write(&code_object, compile_with_clang()).unwrap();
    set(&[
        ("PATH", folder),
        ("ROCM_PATH", folder),
        ("MOESAIC_HIPRTC", &library),
        ("CODE_OBJECT", &code_object),
    ]);
}

fn set(variables: &[(&str, &Path)]) {
    for (name, value) in variables {
        // SAFETY: this process has one thread.
        unsafe { std::env::set_var(name, value) };
    }
}

fn compile_with_clang() -> Vec<u8> {
    let mut registry = Registry::open().unwrap();
    install(&mut registry, &[Kind::Rocm], &mut |_| {}).unwrap_or_else(|error| panic!("{error}"));
    let zig = registry.path(registry.get(Kind::Rocm).unwrap());
    let clang = RocmCompiler::open(ClangTool::zig(zig.parent().unwrap())).unwrap();
    clang
        .compile(&source("rocm:gfx942", TEXT), &CompileOptions::default())
        .unwrap()
        .binary
}

fn source(target: &str, text: &str) -> KernelSource {
    KernelSource {
        stem: Stem::Combine,
        name: "probe".to_string(),
        target: target.parse().unwrap(),
        language: Language::Hip,
        text: text.to_string(),
        config: String::new(),
        entries: Vec::new(),
    }
}

fn compiler() -> RocmCompiler {
    RocmCompiler::find(None).unwrap_or_else(|error| panic!("{error}"))
}

fn refusal(target: &str, text: &str) -> CompileError {
    let compiler = compiler().with_limit(Duration::from_millis(700));
    compiler
        .compile(&source(target, text), &CompileOptions::default())
        .unwrap_err()
}

fn without_the_hook() {
    let path = std::env::var_os("PATH").unwrap_or_default();
    set(&[("PATH", Path::new("/nowhere"))]);
    if let Err(error) = RocmCompiler::find(None) {
        let error = error.to_string();
        assert!(
            error.contains("`HIPRTC` (this program does not call `maybe_run_child` first)"),
            "{error}"
        );
    }
    set(&[("PATH", Path::new(&path))]);
}

fn a_kernel_compiles() {
    let compiler = compiler();
    assert_eq!(compiler.name(), "HIPRTC 6.2");
    let names = compiler
        .targets()
        .iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>();
    assert!(
        names.contains(&"rocm:gfx942".to_string()) && !names.contains(&"rocm:gfx950".to_string()),
        "{names:?}"
    );
    let artifact = compiler
        .compile(&source("rocm:gfx942", TEXT), &CompileOptions::default())
        .unwrap();
    assert_eq!(artifact.report.kernels[0].symbol, "probe");
    assert_eq!(artifact.report.compiler, "HIPRTC 6.2");
    let print = compiler.fingerprint("rocm:gfx942".parse().unwrap());
    assert!(
        print.starts_with("HIPRTC 6.2 --offload-arch=gfx942 ") && !print.contains('/'),
        "{print}"
    );
}

fn a_rejected_text_has_the_log() {
    let error = refusal("rocm:gfx942", "\nnope");
    assert!(matches!(error, CompileError::Rejected { .. }), "{error}");
    assert!(
        error.to_string().contains("probe.hip:2: error: nope"),
        "{error}"
    );
}

fn an_abort_is_an_error() {
    let error = refusal("rocm:gfx1100", TEXT).to_string();
    assert!(
        error.contains("HIPRTC 6.2 failed on kernel `probe`: the compiler crashed with signal 6"),
        "{error}"
    );
}

fn a_hang_is_stopped() {
    let error = refusal("rocm:gfx942", "forever").to_string();
    assert!(
        error.contains("did not finish within 0.7 s and was stopped"),
        "{error}"
    );
}

fn a_missing_library_is_named() {
    set(&[("MOESAIC_HIPRTC", Path::new("/no/such/libhiprtc.so"))]);
    let error = RocmCompiler::find(None).err().unwrap().to_string();
    assert!(error.contains("`HIPRTC` (the child ended with exit code 3: cannot load HIPRTC; tried `/no/such/libhiprtc.so` ("), "{error}");
}
