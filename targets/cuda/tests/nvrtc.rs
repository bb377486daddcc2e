//! Real compiles with the NVRTC of the toolchain registry.

#[path = "../../api/tests/compilers/mod.rs"]
mod compilers;

use compilers::{entries, entry};
use moesaic_cuda::{CubinError, NvrtcCompiler, read_cubin};
use moesaic_kernel::{Entry, KernelSource, Language, Param, Stem, Target};
use moesaic_target::{Artifact, CompileError, CompileOptions, Compiler, KernelReport};
use moesaic_toolchain::testing;
use std::sync::OnceLock;

/// Two kernels; the second takes every kind of parameter in an awkward order
/// and has static shared memory.
const TEXT: &str = r#"
extern "C" __global__ void __launch_bounds__(64) fill(float* out, long long count) {
  long long i = blockIdx.x * 64ll + threadIdx.x;
  if (i < count) out[i] = 1.0f;
}

extern "C" __global__ void __launch_bounds__(256) scale(
    float factor, const float* in, float* out, long long count, float bias) {
  __shared__ float tile[256];
  long long i = blockIdx.x * 256ll + threadIdx.x;
  tile[threadIdx.x] = i < count ? in[i] : 0.0f;
  __syncthreads();
  if (i < count) out[i] = tile[255 - threadIdx.x] * factor + bias;
}
"#;

/// 96 live values in 32 registers.
const SPILLING: &str = r#"
extern "C" __global__ void __launch_bounds__(1024, 2) spilly(float* y, const float* x, long long n) {
  float v[96];
  #pragma unroll
  for (int i = 0; i < 96; i++) v[i] = x[i * n + threadIdx.x];
  for (long long r = 0; r < n; r++) {
    #pragma unroll
    for (int i = 0; i < 96; i++) v[i] = v[i] * v[(i * 7 + 1) % 96] + v[(i * 5 + 3) % 96];
  }
  #pragma unroll
  for (int i = 0; i < 96; i++) y[i * n + threadIdx.x] = v[i];
}
"#;

/// Gives registers away that the assembler has not counted.
const UNBOUND: &str = r#"
extern "C" __global__ void unbound(float* y) {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
  y[threadIdx.x] = 1;
}
"#;

/// Reads the accumulator while the product is in flight.
const HASTY: &str = r#"
extern "C" __global__ void __launch_bounds__(128) hasty(float* y, unsigned long long a, unsigned long long b) {
  float d[4] = {0, 0, 0, 0};
  asm volatile("wgmma.fence.sync.aligned;");
  for (int i = 0; i < 4; i++) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, %4, %5, p, 1, 1, 0, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a + i), "l"(b + i));
    d[i] += 1.0f;
  }
  asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;");
  for (int i = 0; i < 4; i++) y[threadIdx.x * 4 + i] = d[i];
}
"#;

fn compiler() -> &'static NvrtcCompiler {
    static COMPILER: OnceLock<NvrtcCompiler> = OnceLock::new();
    COMPILER.get_or_init(testing::nvrtc)
}

fn source(target: &str, text: &str, entries: Vec<Entry>) -> KernelSource {
    KernelSource {
        stem: Stem::Combine,
        name: "probe".to_string(),
        target: target.parse().unwrap(),
        language: Language::Cuda,
        text: text.to_string(),
        config: String::new(),
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
        (scale.spill_bytes, scale.stack_bytes),
        (Some(0), Some(0)),
        "{target}"
    );
    assert!(
        (8..=64).contains(&scale.registers.unwrap()),
        "{target}: {scale:?}"
    );
    assert!(scale.code_bytes.unwrap() >= 256, "{target}: {scale:?}");
    let slots = scale.params.iter().map(|slot| (slot.offset, slot.size));
    let expected = [(0, 4), (8, 8), (16, 8), (24, 8), (32, 4)];
    assert_eq!(slots.collect::<Vec<_>>(), expected, "{target}");
}

#[test]
fn reports_agree_with_the_text_on_every_generation() {
    for target in [
        "cuda:sm_75",
        "cuda:sm_80",
        "cuda:sm_89",
        "cuda:sm_90a",
        "cuda:sm_100a",
        "cuda:sm_120a",
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
fn the_same_source_gives_the_same_bytes_from_every_thread() {
    let expected = good("cuda:sm_90a").binary;
    std::thread::scope(|scope| {
        let threads = (0..4)
            .map(|_| scope.spawn(|| good("cuda:sm_90a").binary))
            .collect::<Vec<_>>();
        for thread in threads {
            assert!(thread.join().unwrap() == expected);
        }
    });
}

#[test]
fn without_entries_everything_is_reported() {
    let artifact = compile(&source("cuda:sm_80", TEXT, Vec::new())).unwrap();
    let mut symbols = artifact
        .report
        .kernels
        .iter()
        .map(|k| k.symbol.as_str())
        .collect::<Vec<_>>();
    symbols.sort_unstable();
    assert_eq!(symbols, ["fill", "scale"]);
}

#[test]
fn spills_are_refused_unless_allowed() {
    let source = source("cuda:sm_80", SPILLING, Vec::new());
    let error = compile(&source).unwrap_err();
    let CompileError::Spills { kernel, bytes, .. } = &error else {
        panic!("{error}")
    };
    assert_eq!(kernel, "spilly");
    assert!(*bytes > 200, "{bytes}");
    let text = format!(
        "kernel `spilly` for `cuda:sm_80` does not fit its 32 registers: \
         {bytes} bytes per thread are spilled to memory\n\
         kernels of a spec are meant to fit: please report it with the spec; \
         in a kernel of your own take a smaller tile"
    );
    assert_eq!(error.to_string(), text);
    let options = CompileOptions {
        allow_spills: true,
        ..CompileOptions::default()
    };
    let report = compiler().compile(&source, &options).unwrap().report;
    assert_eq!(report.kernels[0].spill_bytes, Some(*bytes));
    assert!(report.kernels[0].stack_bytes.unwrap() > 0);
    assert!(
        report.log.contains("Registers are spilled to local memory"),
        "{}",
        report.log
    );
}

#[test]
fn serialised_wgmma_is_refused_unless_allowed() {
    is_refused_unless_allowed(HASTY, "wgmma.mma_async instructions are serialized");
}

#[test]
fn ignored_register_counts_are_refused_unless_allowed() {
    is_refused_unless_allowed(UNBOUND, "(C7508) Potential Performance Loss: 'setmaxnreg'");
    let bound = UNBOUND.replace("void unbound", "void __launch_bounds__(384, 1) unbound");
    compile(&source("cuda:sm_90a", &bound, Vec::new())).unwrap();
}

fn is_refused_unless_allowed(text: &str, reason: &str) {
    let source = source("cuda:sm_90a", text, Vec::new());
    let error = compile(&source).unwrap_err();
    assert!(
        matches!(error, CompileError::PerformanceLoss { .. }),
        "{error}"
    );
    assert!(error.to_string().contains(reason), "{error}");
    let options = CompileOptions {
        allow_performance_loss: true,
        ..CompileOptions::default()
    };
    let log = compiler().compile(&source, &options).unwrap().report.log;
    assert!(log.contains(reason), "{log}");
}

#[test]
fn a_rejected_text_has_file_and_line() {
    let error = refusal(
        "cuda:sm_90a",
        "extern \"C\" __global__ void k(float* y) {\n  y = nope;\n}\n",
        Vec::new(),
    );
    assert!(error.starts_with("NVRTC "), "{error}");
    assert!(
        error.contains("rejected kernel `probe` for `cuda:sm_90a`"),
        "{error}"
    );
    assert!(
        error.contains("probe.cu(2): error: identifier \"nope\" is undefined"),
        "{error}"
    );
}

#[test]
fn an_instruction_of_another_architecture_is_rejected() {
    let error = refusal("cuda:sm_90", HASTY, Vec::new());
    assert!(
        error.contains("rejected") && error.contains("wgmma"),
        "{error}"
    );
}

#[test]
fn targets_it_cannot_do_are_refused_with_those_it_can() {
    for target in ["cuda:sm_70", "rocm:gfx942"] {
        let error = refusal(target, TEXT, entries());
        assert!(
            error.contains(&format!("cannot compile for `{target}`")),
            "{error}"
        );
        assert!(
            error.contains("cuda:sm_90a") && error.contains("cuda:sm_100f"),
            "{error}"
        );
    }
    let targets = compiler().targets();
    assert!(
        !targets
            .iter()
            .any(|target| target.to_string() == "cuda:sm_70")
    );
}

#[test]
fn every_target_it_names_compiles() {
    let text = "extern \"C\" __global__ void k(float* y) { y[threadIdx.x] = 1; }";
    for target in compiler().targets() {
        let artifact = compile(&source(&target.to_string(), text, Vec::new()));
        let artifact = artifact.unwrap_or_else(|error| panic!("{target}: {error}"));
        assert_eq!(artifact.report.kernels[0].params[0].size, 8, "{target}");
    }
}

#[test]
fn a_signature_that_disagrees_is_a_bad_binary() {
    let mut short = entries();
    short[0].params.pop();
    let error = refusal("cuda:sm_80", TEXT, short);
    assert!(
        error.contains("`scale` declares 4 parameters, the binary takes 5"),
        "{error}"
    );

    let mut wide = entries();
    wide[0].params[4] = Param::i64("bias");
    let error = refusal("cuda:sm_90a", TEXT, wide);
    assert!(
        error.contains("parameter `bias` of `scale` is declared as 8 bytes, the binary takes 4"),
        "{error}"
    );

    let mut large = entries();
    large[1].launch.threads = 128;
    let error = refusal("cuda:sm_100a", TEXT, large);
    assert!(
        error.contains("`fill` launches 128 threads, the binary allows 64"),
        "{error}"
    );

    let error = refusal("cuda:sm_80", TEXT, vec![entry("gone", 1, Vec::new())]);
    assert!(
        error.contains("made a bad binary of kernel `probe`: it holds no kernel `gone`"),
        "{error}"
    );
}

#[test]
fn the_fingerprint_tells_targets_apart_and_holds_no_path() {
    let print = |name: &str| compiler().fingerprint(name.parse::<Target>().unwrap());
    let ours = print("cuda:sm_90a");
    assert!(
        ours.starts_with("NVRTC 13.0 --gpu-architecture=sm_90a --std=c++17"),
        "{ours}"
    );
    assert!(!ours.contains('/'), "{ours}");
    assert_ne!(ours, print("cuda:sm_90"));
}

#[test]
fn ptx_is_for_the_same_architecture() {
    let ptx = compiler()
        .ptx(&source("cuda:sm_90a", TEXT, entries()))
        .unwrap();
    assert!(
        ptx.contains(".target sm_90a") && ptx.contains(".entry scale("),
        "{ptx}"
    );
    assert!(
        ptx.ends_with('\n') || ptx.ends_with('}'),
        "no terminating NUL stays"
    );
}

#[test]
fn a_nul_in_the_text_is_an_error() {
    let error = refusal("cuda:sm_80", "extern \"C\"\0", Vec::new());
    assert!(error.contains("holds a NUL character"), "{error}");
}

#[test]
fn damaged_cubins_are_errors_not_panics() {
    assert_eq!(read_cubin(b""), Err(CubinError::Empty));
    let binary = good("cuda:sm_100a").binary;
    let whole = read_cubin(&binary).unwrap();
    assert_eq!(whole.len(), 2);
    for length in (0..binary.len()).step_by(61) {
        let _ = read_cubin(&binary[..length]);
    }
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    for _ in 0..3000 {
        let mut damaged = binary.clone();
        for _ in 0..4 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let place = (state >> 24) as usize % damaged.len();
            damaged[place] = (state >> 56) as u8;
        }
        let _ = read_cubin(&damaged);
    }
}
