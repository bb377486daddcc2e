//! HIPRTC in a child process: this program starts itself again. A fake HIPRTC,
//! built by the system C compiler, shows the rare failures of a real one.

use moesaic_kernel::{KernelSource, Language, Stem};
use moesaic_rocm::{RocmCompiler, maybe_run_child};
use moesaic_target::{CompileError, CompileOptions, Compiler};
use moesaic_toolchain::{ToolKind, testing};
use std::ffi::OsString;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

const TEXT: &str = "extern \"C\" __attribute__((global)) void probe(float* y) { *y = 1; }\n";

const NAME: &str = "HIPRTC of clang 22.1.8";

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

const TESTS: [(&str, fn()); 7] = [
    ("a_kernel_compiles", a_kernel_compiles),
    (
        "every_release_has_its_fingerprint",
        every_release_has_its_fingerprint,
    ),
    ("a_nameless_clang_is_not_used", a_nameless_clang_is_not_used),
    ("a_rejected_text_has_the_log", a_rejected_text_has_the_log),
    ("an_abort_is_an_error", an_abort_is_an_error),
    ("a_hang_is_stopped", a_hang_is_stopped),
    ("a_missing_library_is_named", a_missing_library_is_named),
];

/// Path of the C compiler, for code that runs after [`prepare`].
static SYSTEM_PATH: OnceLock<OsString> = OnceLock::new();

/// Hides every clang from here on and makes HIPRTC the fake.
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
    std::fs::write(&code_object, compile_with_clang(folder)).unwrap();
    SYSTEM_PATH.get_or_init(|| std::env::var_os("PATH").unwrap_or_default());
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

/// Compiles as HIPRTC does, with the name of the clang, which this project's
/// own flags leave out.
fn compile_with_clang(folder: &Path) -> Vec<u8> {
    let registry = testing::installed(ToolKind::Rocm);
    let zig = registry.path(registry.get(ToolKind::Rocm).unwrap());
    let path = std::env::var("PATH").unwrap_or_default();
    std::fs::write(folder.join("probe.hip"), TEXT).unwrap();
    let built = Command::new(&zig)
        .args([
            "clang",
            "--offload-arch=gfx942",
            "-O3",
            "-mcode-object-version=5",
        ])
        .args(["--no-default-config", "-x", "hip", "--cuda-device-only"])
        .args(["--no-gpu-bundle-output", "-nogpulib", "-nogpuinc"])
        .args(["-o", "built.co", "probe.hip"])
        .env(
            "PATH",
            format!("{}/bin:{path}", zig.parent().unwrap().display()),
        )
        .current_dir(folder)
        .status();
    assert!(built.unwrap().success());
    std::fs::read(folder.join("built.co")).unwrap()
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
    assert_eq!(compiler.name(), NAME);
    let names = compiler
        .targets()
        .iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>();
    assert!(names.contains(&"rocm:gfx950".to_string()), "{names:?}");
    let artifact = compiler
        .compile(&source("rocm:gfx942", TEXT), &CompileOptions::default())
        .unwrap();
    assert_eq!(artifact.report.kernels[0].symbol, "probe");
    assert_eq!(artifact.report.compiler, NAME);
    let print = fingerprint(&compiler);
    assert!(
        print.starts_with("HIPRTC of clang version 22.1.8 --offload-arch=gfx942 "),
        "{print}"
    );
}

fn fingerprint(compiler: &RocmCompiler) -> String {
    compiler.fingerprint("rocm:gfx942".parse().unwrap())
}

/// Checks that every release has a fingerprint: the library says the same of
/// all, its code objects do not.
fn every_release_has_its_fingerprint() {
    let compiler = with_maker("AMD clang version 17.0.0 (https://x/y roc-6.0.2 24012 af27)");
    assert_eq!(compiler.name(), "HIPRTC of AMD clang 17.0.0");
    let older = fingerprint(&compiler);
    assert!(
        older.starts_with("HIPRTC of AMD clang version 17.0.0 roc-6.0.2 24012 af27 --offload"),
        "{older}"
    );
    let knows = |name: &str| compiler.targets().contains(&name.parse().unwrap());
    assert!(knows("rocm:gfx942") && !knows("rocm:gfx950") && !knows("rocm:gfx1201"));
    let newer = with_maker("AMD clang version 17.0.0 (https://x/y roc-6.0.3 24013 bf27)");
    assert_ne!(fingerprint(&newer), older);
}

fn a_nameless_clang_is_not_used() {
    let error = found_with_maker("").err().unwrap().to_string();
    assert!(
        error.contains("its code objects do not name their clang"),
        "{error}"
    );
}

fn with_maker(maker: &str) -> RocmCompiler {
    found_with_maker(maker).unwrap_or_else(|error| panic!("{error}"))
}

/// Returns the compiler found when the code objects name this maker. The
/// system's C compiler makes such files.
fn found_with_maker(maker: &str) -> Result<RocmCompiler, CompileError> {
    let real = std::env::var_os("CODE_OBJECT").unwrap();
    let folder = Path::new(&real).parent().unwrap();
    let text = format!("__asm__(\".section .comment\\n.string \\\"{maker}\\\"\");");
    std::fs::write(folder.join("made.c"), text).unwrap();
    let built = Command::new("cc")
        .args(["-c", "-fno-ident", "-o", "made.co", "made.c"])
        .current_dir(folder)
        .env("PATH", SYSTEM_PATH.get().unwrap())
        .status();
    assert!(built.unwrap().success());
    set(&[("CODE_OBJECT", &folder.join("made.co"))]);
    let found = RocmCompiler::find(None);
    set(&[("CODE_OBJECT", Path::new(&real))]);
    found
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
        error.contains(
            "HIPRTC of clang 22.1.8 failed on kernel `probe`: the compiler crashed with signal 6"
        ),
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
