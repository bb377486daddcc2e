//! Real compiles with the clang of the toolchain registry, and a fake clang for
//! the rare failures of a real one.

#[path = "../../api/tests/compilers/mod.rs"]
mod compilers;

use compilers::{entries, entry};
use moesaic_kernel::{Entry, KernelSource, Language, Param, Stem, Target};
use moesaic_rocm::{ClangTool, RocmCompiler, read_code_object};
use moesaic_target::{Artifact, CompileError, CompileOptions, Compiler, KernelReport};
use moesaic_toolchain::testing;
use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;

const PRELUDE: &str = "\
#define GLOBAL extern \"C\" __attribute__((global)) void
#define THREADS(n) __attribute__((amdgpu_flat_work_group_size(n, n)))
#define DEVICE __attribute__((device))
#define SHARED __attribute__((shared))
";

/// Two kernels; the second takes every kind of parameter in an awkward order
/// and has static shared memory.
const TEXT: &str = "
GLOBAL THREADS(64) fill(float* out, long count) {
  long i = __builtin_amdgcn_workgroup_id_x() * 64l + __builtin_amdgcn_workitem_id_x();
  if (i < count) out[i] = 1.0f;
}

GLOBAL THREADS(256) scale(float factor, const float* in, float* out, long count, float bias) {
  SHARED float tile[256];
  unsigned t = __builtin_amdgcn_workitem_id_x();
  long i = __builtin_amdgcn_workgroup_id_x() * 256l + t;
  tile[t] = i < count ? in[i] : 0.0f;
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, \"workgroup\");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, \"workgroup\");
  if (i < count) out[i] = tile[255 - t] * factor + bias;
}
";

/// An array that is indexed at run time lives in scratch.
const SPILLING: &str = "
GLOBAL THREADS(1024) spilly(float* y, const float* x, long n) {
  float v[512];
  for (int i = 0; i < 512; i++) v[i] = x[i * n];
  for (int i = 0; i < n; i++) v[(i * 7) & 511] += v[(i * n) & 511];
  for (int i = 0; i < 512; i++) y[i * n] = v[i];
}
";

fn compiler() -> &'static RocmCompiler {
    static COMPILER: OnceLock<RocmCompiler> = OnceLock::new();
    COMPILER.get_or_init(testing::rocm)
}

fn source(target: &str, text: &str, entries: Vec<Entry>) -> KernelSource {
    KernelSource {
        stem: Stem::Combine,
        config: String::new(),
        name: "probe".to_string(),
        target: target.parse().unwrap(),
        language: Language::Hip,
        text: format!("{PRELUDE}{text}"),
        entries,
    }
}

fn compile(source: &KernelSource) -> Result<Artifact, CompileError> {
    compiler().compile(source, &CompileOptions::default())
}

fn good(target: &str) -> Artifact {
    compile(&source(target, TEXT, entries())).unwrap_or_else(|error| panic!("{target}: {error}"))
}

fn refusal(target: &str, text: &str, entries: Vec<Entry>) -> String {
    compile(&source(target, text, entries))
        .unwrap_err()
        .to_string()
}

fn check_scale(target: &str, scale: &KernelReport) {
    assert_eq!(scale.symbol, "scale", "{target}");
    assert_eq!(scale.shared_bytes, Some(1024), "{target}");
    assert_eq!(scale.max_threads, Some(256), "{target}");
    assert_eq!(
        (scale.spill_bytes, scale.scalar_spills, scale.stack_bytes),
        (Some(0), Some(0), Some(0)),
        "{target}"
    );
    assert!(
        (3..=64).contains(&scale.registers.unwrap()),
        "{target}: {scale:?}"
    );
    assert!(
        (5..=104).contains(&scale.scalar_registers.unwrap()),
        "{target}: {scale:?}"
    );
    assert!(scale.code_bytes.unwrap() >= 64, "{target}: {scale:?}");
    let slots = scale.params.iter().map(|slot| (slot.offset, slot.size));
    let expected = [(0, 4), (8, 8), (16, 8), (24, 8), (32, 4)];
    assert_eq!(slots.collect::<Vec<_>>(), expected, "{target}");
}

#[test]
fn reports_agree_with_the_text_on_every_generation() {
    for target in [
        "rocm:gfx90a",
        "rocm:gfx942",
        "rocm:gfx950",
        "rocm:gfx1100",
        "rocm:gfx1201",
    ] {
        let artifact = good(target);
        assert_eq!(artifact.binary[..4], *b"\x7fELF", "{target}");
        let [scale, fill] = artifact.report.kernels.as_slice() else {
            panic!("{target}")
        };
        check_scale(target, scale);
        assert_eq!(
            (fill.shared_bytes, fill.max_threads),
            (Some(0), Some(64)),
            "{target}"
        );
        assert_eq!(artifact.report.compiler, compiler().name());
        assert_eq!(artifact.report.log, "", "nothing worth reading was said");
    }
}

#[test]
fn matrix_instructions_report_accumulation_registers() {
    let text = "
typedef short bf4 __attribute__((ext_vector_type(4)));
typedef float f16v __attribute__((ext_vector_type(16)));
GLOBAL THREADS(64) product(const bf4* a, const bf4* b, float* c) {
  unsigned t = __builtin_amdgcn_workitem_id_x();
  f16v sum = {0};
  for (int k = 0; k < 8; k++)
    sum = __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(a[k * 64 + t], b[k * 64 + t], sum, 0, 0, 0);
  for (int i = 0; i < 16; i++) c[t * 16 + i] = sum[i];
}";
    let report = compile(&source("rocm:gfx90a", text, Vec::new()))
        .unwrap()
        .report;
    assert!(report.kernels[0].accumulator_registers.is_some());
    assert!(report.kernels[0].registers.unwrap() >= 16, "{report:?}");
    let error = refusal("rocm:gfx1100", text, Vec::new());
    assert!(error.contains("needs target feature"), "{error}");
}

#[test]
fn the_same_source_gives_the_same_bytes_from_every_thread() {
    let expected = good("rocm:gfx942").binary;
    std::thread::scope(|scope| {
        let threads = (0..4)
            .map(|_| scope.spawn(|| good("rocm:gfx942").binary))
            .collect::<Vec<_>>();
        for thread in threads {
            assert!(thread.join().unwrap() == expected);
        }
    });
}

#[test]
fn scratch_is_refused_unless_allowed() {
    for target in ["rocm:gfx90a", "rocm:gfx1100"] {
        let source = source(target, SPILLING, Vec::new());
        let error = compile(&source).unwrap_err();
        let CompileError::Spills { kernel, bytes, .. } = &error else {
            panic!("{error}")
        };
        assert_eq!(kernel, "spilly");
        assert!(*bytes >= 2048, "{bytes}");
        let words = [" registers: ", "take a smaller tile"];
        for word in words {
            assert!(error.to_string().contains(word), "{word}: {error}");
        }
        let options = CompileOptions {
            allow_spills: true,
            ..CompileOptions::default()
        };
        let report = compiler().compile(&source, &options).unwrap().report;
        assert_eq!(report.kernels[0].stack_bytes, Some(*bytes));
    }
}

#[test]
fn a_rejected_text_has_file_and_line_and_no_temporary_path() {
    let error = refusal(
        "rocm:gfx942",
        "GLOBAL k(float* y) {\n  y = nope;\n}\n",
        Vec::new(),
    );
    assert!(
        error.starts_with("clang 22.1.8 rejected kernel `probe` for `rocm:gfx942`:\n"),
        "{error}"
    );
    assert!(
        error.contains("probe.hip:6:7: error: use of undeclared identifier 'nope'"),
        "{error}"
    );
    assert!(!error.contains("/tmp"), "{error}");
}

#[test]
fn headers_are_not_found_even_when_the_machine_has_them() {
    let error = refusal("rocm:gfx942", "#include <stdint.h>\n", Vec::new());
    assert!(error.contains("'stdint.h' file not found"), "{error}");
}

#[test]
fn targets_it_cannot_do_are_refused_with_those_it_can() {
    let error = refusal("cuda:sm_80", TEXT, entries());
    assert!(
        error.contains("clang 22.1.8 cannot compile for `cuda:sm_80`"),
        "{error}"
    );
    assert!(error.contains("rocm:gfx950, rocm:gfx1030"), "{error}");
}

#[test]
fn every_target_it_names_compiles() {
    for target in compiler().targets() {
        good(&target.to_string());
    }
}

#[test]
fn a_signature_that_disagrees_is_a_bad_binary() {
    let mut short = entries();
    short[0].params.pop();
    let error = refusal("rocm:gfx942", TEXT, short);
    assert!(
        error.contains("`scale` declares 4 parameters, the binary takes 5"),
        "{error}"
    );

    let mut wide = entries();
    wide[0].params[4] = Param::i64("bias");
    let error = refusal("rocm:gfx1100", TEXT, wide);
    assert!(
        error.contains("parameter `bias` of `scale` is declared as 8 bytes, the binary takes 4"),
        "{error}"
    );

    let mut large = entries();
    large[1].launch.threads = 128;
    let error = refusal("rocm:gfx90a", TEXT, large);
    assert!(
        error.contains("`fill` launches 128 threads, the binary allows 64"),
        "{error}"
    );

    let error = refusal("rocm:gfx942", TEXT, vec![entry("gone", 1, Vec::new())]);
    assert!(
        error.contains("made a bad binary of kernel `probe`: it holds no kernel `gone`"),
        "{error}"
    );
}

#[test]
fn the_fingerprint_tells_targets_apart_and_holds_no_path() {
    let print = |name: &str| compiler().fingerprint(name.parse::<Target>().unwrap());
    let ours = print("rocm:gfx942");
    assert!(
        ours.starts_with("clang version 22.1.8 --offload-arch=gfx942 "),
        "{ours}"
    );
    assert!(
        ours.contains("-mcode-object-version=5") && !ours.contains('/'),
        "{ours}"
    );
    assert_ne!(ours, print("rocm:gfx950"));
}

#[test]
fn damaged_code_objects_are_errors_not_panics() {
    assert!(read_code_object(b"").is_err());
    let binary = good("rocm:gfx942").binary;
    assert_eq!(read_code_object(&binary).unwrap().len(), 2);
    for length in (0..binary.len()).step_by(61) {
        let _ = read_code_object(&binary[..length]);
    }
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    for _ in 0..3000 {
        let mut damaged = binary.clone();
        for _ in 0..4 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            // The note lies near the start.
            let place = (state >> 24) as usize % 2048;
            damaged[place] = (state >> 56) as u8;
        }
        let _ = read_code_object(&damaged);
    }
}

/// Makes a script that answers questions like clang and compiles by `script`.
/// The shell reads it, because a program that was just written cannot always be
/// started.
fn fake_clang(folder: &Path, script: &str) -> RocmCompiler {
    let path = folder.join("clang.sh");
    let text = format!(
        "case \"$*\" in\n\
         *--print-supported-cpus*) echo 'Fake clang version 9.9 (/build 1)'; printf '\\tgfx90a\\n';;\n\
         *-print-prog-name=lld*) echo /usr/bin/lld;;\n\
         *) {script};;\nesac\n"
    );
    std::fs::write(&path, text).unwrap();
    let args = vec![path.display().to_string()];
    let tool = ClangTool {
        program: "sh".into(),
        args,
        path: None,
        facts: None,
    };
    RocmCompiler::open(tool).unwrap_or_else(|error| panic!("{error}"))
}

fn fake_failure(script: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let compiler = fake_clang(folder.path(), script).with_limit(Duration::from_millis(500));
    assert_eq!(compiler.name(), "Fake clang 9.9");
    let source = source("rocm:gfx90a", TEXT, entries());
    compiler
        .compile(&source, &CompileOptions::default())
        .unwrap_err()
        .to_string()
}

#[test]
fn a_crash_of_the_compiler_is_an_error_with_its_last_words() {
    let error = fake_failure("echo 'munmap_chunk(): invalid pointer' >&2; kill -ABRT $$");
    assert!(
        error.starts_with(
            "Fake clang 9.9 failed on kernel `probe`: the compiler crashed with signal 6\n"
        ),
        "{error}"
    );
    assert!(error.contains("munmap_chunk()"), "{error}");
}

#[test]
fn a_compiler_that_hangs_is_stopped() {
    let error = fake_failure("sleep 20");
    assert!(
        error.contains("did not finish within 0.5 s and was stopped"),
        "{error}"
    );
}

#[test]
fn success_without_a_good_output_is_an_error() {
    assert!(fake_failure("exit 0").contains("left no binary"));
    let error = fake_failure("echo text > kernel.co");
    assert!(
        error.contains(
            "made a bad binary of kernel `probe`: the code object is not a readable ELF file"
        ),
        "{error}"
    );
}

#[test]
fn a_clang_whose_facts_are_known_is_not_asked() {
    let facts = compiler().facts().unwrap().clone();
    assert!(
        facts.processors.contains(&"gfx942".to_string()),
        "{facts:?}"
    );
    let tool = ClangTool {
        facts: Some(facts),
        ..ClangTool::program("/no/such/clang++")
    };
    let known = RocmCompiler::open(tool).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(known.name(), compiler().name());
    assert_eq!(known.targets(), compiler().targets());
    let error = known
        .compile(
            &source("rocm:gfx942", TEXT, entries()),
            &CompileOptions::default(),
        )
        .unwrap_err();
    assert!(
        error
            .to_string()
            .contains("`/no/such/clang++` could not be started"),
        "{error}"
    );
}

#[test]
fn a_clang_without_amd_or_linker_is_not_used() {
    let error = RocmCompiler::open(ClangTool::program("/no/such/clang++"))
        .err()
        .unwrap()
        .to_string();
    assert!(
        error.contains("no compiler for `rocm` was found\n")
            && error.contains("\ntried: `/no/such/clang++` ("),
        "{error}"
    );
    assert!(error.contains("moesaic toolchain install rocm"), "{error}");
}
