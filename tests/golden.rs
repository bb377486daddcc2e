//! Emitted source as golden text, and real compilers over all of it.
//!
//! `cargo xtask bless` rewrites it after a wanted change.

use crate::golden_files::{self, Emitted};
use moesaic::emit::emit_layer;
use moesaic::kernel::{KernelSource, Stem};
use moesaic::plan::{
    Both, CommDtype, KernelPlan, LayerPlan, Parallel, PlanOptions, Training, plan, plan_rank,
};
use moesaic::spec::{ActivationFormat, Latent, LayerSpec, WeightFormat};
use moesaic::target::{CompileOptions, Compiler};
use moesaic::toolchain::testing::{ExternalTool, needed};
use moesaic::toolchain::{Registry, ToolKind};
use moesaic::{Compilers, Target};
use moesaic_harness::kept::{Kept, once};
use moesaic_harness::thorough::in_turns;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Layers that between them reach most of what templates can do.
const SPECS: [&str; 4] = [
    "mixtral-8x7b",
    "deepseek-v3",
    "gpt-oss-20b",
    "switch-base-8",
];

/// Layers whose kernels of training are kept: what backward runs, and what
/// forward then does otherwise.
const TRAINED: [&str; 1] = ["gpt-oss-20b"];

/// Targets whose text is kept.
const KEPT: [&str; 4] = ["cpu:avx2", "cpu:avx512bf16", "cuda:sm_90a", "rocm:gfx942"];

/// Targets whose text is in full: one CPU, and one GPU of each family.
const IN_FULL: [&str; 3] = ["cpu:avx2", "cuda:sm_90a", "rocm:gfx942"];

/// The layer whose kernels are kept for every instruction set of CPUs.
const KEPT_ON_CPUS: &str = "small-bf16";

/// The layer whose products of codes are kept for every instruction set of CPUs, and the one
/// whose text is in full.
const KEPT_OF_CODES: &str = "gpt-oss-20b";
const CODES_IN_FULL: &str = "cpu:avx512bf16";

/// Targets whose matrix products are kept; the rest is the text of another.
const KEPT_GEMMS: [&str; 2] = ["cuda:sm_80", "cpu:amx"];

/// Targets whose text must compile.
const COMPILED: [&str; 7] = [
    "cuda:sm_80",
    "cuda:sm_90a",
    "cuda:sm_100a",
    "rocm:gfx90a",
    "rocm:gfx942",
    "rocm:gfx950",
    "rocm:gfx1100",
];

/// Instruction sets of x86-64 whose text gcc and clang must take in silence.
const X86: [&str; 5] = [
    "cpu:portable",
    "cpu:avx2",
    "cpu:avx512",
    "cpu:avx512bf16",
    "cpu:amx",
];

/// Those of aarch64, whose text cross compilers must take in silence.
const AARCH64: [&str; 2] = ["cpu:neon", "cpu:neonbf16"];

fn root() -> PathBuf {
    PathBuf::from(crate::ROOT)
}

fn spec(name: &str) -> LayerSpec {
    let path = root()
        .join("examples/specs")
        .join(name)
        .with_extension("toml");
    let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    LayerSpec::from_toml(&text).unwrap_or_else(|e| panic!("{}", e.render(name, false)))
}

/// The kernels of a plan, each with the family of its product.
fn emitted(case: &str, plan: &LayerPlan) -> Vec<Emitted> {
    let sources = emit_layer(plan).expect("it can be emitted");
    let kernels = plan.kernels.iter().zip(sources);
    let one = |(kernel, source): (&KernelPlan, KernelSource)| Emitted {
        case: case.to_string(),
        family: kernel.family(),
        source,
    };
    kernels.map(one).collect()
}

fn sources(spec_name: &str, target: &str) -> Vec<Emitted> {
    let target: Target = target.parse().expect("a known target");
    let plan = plan(&spec(spec_name), target, &PlanOptions::default()).expect("it can be planned");
    emitted(spec_name, &plan)
}

/// Kernels of training whose text is of no forward pass.
fn training_sources(spec_name: &str, target: &str) -> Vec<Emitted> {
    let parsed: Target = target.parse().expect("a known target");
    let options = PlanOptions::training(Training::default());
    let plan = plan(&spec(spec_name), parsed, &options).expect("it can be planned");
    let mut list = emitted(&format!("{spec_name}.training"), &plan);
    let forward = sources(spec_name, target);
    let is_new = |kernel: &Emitted| forward.iter().all(|f| f.source.text != kernel.source.text);
    list.retain(is_new);
    list
}

/// The products of a layer with MXFP4 experts and int8 rows.
fn code_sources(target: &str) -> Vec<Emitted> {
    let parsed: Target = target.parse().expect("a known target");
    let mut spec = spec(KEPT_OF_CODES);
    spec.precision.experts = WeightFormat::named("mxfp4");
    spec.precision.expert_activations = Some(ActivationFormat::Int8);
    let plan = plan(&spec, parsed, &PlanOptions::default()).expect("it can be planned");
    let mut list = emitted(&codes_case(), &plan);
    list.retain(|kernel| is_product(kernel.source.stem));
    list
}

fn codes_case() -> String {
    format!("{KEPT_OF_CODES}.mxfp4-int8")
}

/// Layers, and what their rows are between nodes.
const ON_THE_WIRE: [(&str, CommDtype); 4] = [
    ("deepseek-v3", CommDtype::Fp8),
    ("deepseek-v3", CommDtype::F16),
    ("gpt-oss-20b", CommDtype::Fp8),
    ("switch-base-8", CommDtype::Bf16),
];

/// Kernels between nodes.
fn comm_cast_sources(target: &str) -> Vec<Emitted> {
    let parsed: Target = target.parse().expect("a known target");
    let mesh = Parallel {
        ep: 2,
        ..Parallel::default()
    };
    let of_layer = |(name, comm_dtype): (&'static str, CommDtype)| {
        let plan = plan_rank(&spec(name), parsed, &PlanOptions::default(), mesh, 0);
        let plan = plan
            .expect("it can be planned")
            .in_comm_dtype(Both::same(comm_dtype));
        plan.comm_cast
            .map(|plan| emitted(name, &plan))
            .unwrap_or_default()
    };
    ON_THE_WIRE.into_iter().flat_map(of_layer).collect()
}

/// The norms of what routed experts read, of each output and of their sum, and their backward
/// passes.
fn norm_sources(target: &str) -> Vec<Emitted> {
    let parsed: Target = target.parse().expect("a known target");
    let mut spec = spec("deepseek-v3");
    spec.latent = Some(Latent {
        dim: 3584,
        bias: false,
        norm_eps: Some(1e-5),
        input_norm_eps: Some(1e-5),
    });
    spec.experts.output_norm_eps = Some(1e-8);
    spec.router.token_mask = true;
    let options = PlanOptions::training(Training::default());
    let plan = plan(&spec, parsed, &options).expect("it can be planned");
    let mut list = emitted("deepseek-v3.norm", &plan);
    list.retain(|kernel| [Stem::RmsNorm, Stem::RmsNormBwd].contains(&kernel.source.stem));
    list
}

/// Kernels that no layer of [`SPECS`] has: those between nodes, and norms.
fn other_sources(target: &str) -> impl Iterator<Item = Emitted> {
    comm_cast_sources(target)
        .into_iter()
        .chain(norm_sources(target))
}

/// All kernels whose text is kept; those that a reader wants first come first.
fn kept() -> Vec<Emitted> {
    let of_target = |target: &&str| {
        let forward = SPECS.iter().flat_map(|spec| sources(spec, target));
        let training = TRAINED
            .iter()
            .flat_map(|spec| training_sources(spec, target));
        let all = forward.chain(training).chain(other_sources(target));
        let wanted = |kernel: &Emitted| KEPT.contains(target) || is_product(kernel.source.stem);
        all.filter(wanted).collect::<Vec<_>>()
    };
    let of_layers = KEPT.iter().chain(&KEPT_GEMMS).flat_map(of_target);
    let of_cpu = |cpu: String| {
        sources(KEPT_ON_CPUS, &cpu)
            .into_iter()
            .chain(code_sources(&cpu))
    };
    of_layers
        .chain(cpus().into_iter().flat_map(of_cpu))
        .collect()
}

/// Every instruction set there is.
fn cpus() -> Vec<String> {
    let all = Target::all().into_iter();
    let cpus = all.filter(|target| target.backend() == "cpu");
    cpus.map(|target| target.to_string()).collect()
}

fn is_product(stem: Stem) -> bool {
    let products = [
        Stem::GroupedGemm,
        Stem::GroupedGemmDgrad,
        Stem::GroupedGemmWgrad,
    ];
    products.contains(&stem)
}

/// Whether a kernel's text is a file. Digests alone hold the text of all other targets.
fn in_full(kernel: &Emitted) -> bool {
    let target = kernel.source.target.to_string();
    if kernel.case == codes_case() {
        return target == CODES_IN_FULL;
    }
    kernel.case != KEPT_ON_CPUS && IN_FULL.contains(&target.as_str())
}

fn golden() -> PathBuf {
    root().join("tests/golden")
}

fn on_disk() -> BTreeMap<PathBuf, String> {
    let read = |path: PathBuf| {
        let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let name = path.strip_prefix(golden()).expect("it lies there");
        (name.to_path_buf(), text)
    };
    let files = crate::tidy::files(&golden(), &[".txt", ".c", ".cu", ".hip"]);
    files.into_iter().map(read).collect()
}

/// Whole texts of the last run that found them as they should be, and of the last that did
/// not: a digest says that a kernel is another one, these say how.
const TEXTS: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/golden");

#[test]
fn emitted_text_is_the_golden_text() {
    let kernels = kept();
    let expected = golden_files::files(&kernels, in_full);
    if std::env::var_os("BLESS").is_some() {
        write_texts("now", &kernels);
        return write(&golden(), &expected);
    }
    let problems = golden_files::differences(&on_disk(), &expected);
    if problems.is_empty() {
        return write_texts("was", &kernels);
    }
    write_texts("now", &kernels);
    panic!(
        "{}\nTo see the text that each digest is of:\n  \
         diff -r {TEXTS}/was {TEXTS}/now\nThis run wrote `now`; a run of this test at a commit \
         where it passes writes `was`:\n  cargo test -p moesaic-tests --test main \
         golden::emitted\nIf you want all of it: cargo xtask bless",
        problems.join("\n")
    );
}

fn write_texts(folder: &str, kernels: &[Emitted]) {
    let text = |kernel: &Emitted| (kernel.file(), kernel.source.text.clone());
    let texts = kernels.iter().map(text).collect();
    write(&Path::new(TEXTS).join(folder), &texts);
}

/// Puts these files into a folder instead of those that lie there.
fn write(folder: &Path, files: &BTreeMap<PathBuf, String>) {
    if folder.exists() {
        fs::remove_dir_all(folder).expect("a writable tree");
    }
    for (name, text) in files {
        let path = folder.join(name);
        fs::create_dir_all(path.parent().expect("it has a folder")).expect("a writable tree");
        fs::write(path, text).expect("a writable tree");
    }
}

/// Every kernel for the GPU targets whose text is kept, those of one layer for each of the
/// others: no spills, no stack and no word of warning from the compiler.
#[test]
fn gpu_text_compiles_without_spills() {
    let compilers = Compilers::new(None);
    let jobs: Vec<KernelSource> = COMPILED
        .iter()
        .enumerate()
        .flat_map(|(i, target)| {
            let some = if KEPT.contains(target) {
                SPECS.len()
            } else {
                1
            };
            let specs = SPECS.iter().cycle().skip(2 * i).take(some);
            let forward = specs.flat_map(move |spec| sources(spec, target));
            forward
                .chain(
                    TRAINED
                        .iter()
                        .flat_map(move |spec| training_sources(spec, target)),
                )
                .chain(other_sources(target))
                .map(|kernel| kernel.source)
        })
        .collect();
    on_all_cores(&jobs, |source| {
        let compiler = needed(
            ExternalTool::of(source.target),
            compilers.get(source.target),
        );
        check_artifact(&Kept(compiler), source);
    });
}

fn check_artifact(compiler: &dyn Compiler, source: &KernelSource) {
    let artifact = compiler
        .compile(source, &CompileOptions::default())
        .unwrap_or_else(|e| panic!("{}: {e}", source.name));
    let report = artifact.report;
    let what = format!("{} for {}", source.name, source.target);
    assert_eq!(report.log, "", "{what}");
    assert_eq!(report.kernels.len(), source.entries.len(), "{what}");
    for kernel in &report.kernels {
        assert!(!kernel.spills(), "{what}: {kernel:?}");
        assert_eq!(
            kernel.stack_bytes.unwrap_or(0),
            0,
            "{what}: {}",
            kernel.symbol
        );
        assert!(
            kernel.registers.is_some_and(|n| n > 0),
            "{what}: {}",
            kernel.symbol
        );
    }
}

/// Kernels for every instruction set of x86-64, or of aarch64 on such a machine, through gcc
/// and clang, warnings as errors: each layer by each compiler for every other set, in turn.
#[test]
fn c_text_compiles_without_warnings() {
    let compilers = [vec!["gcc".to_string()], clang()];
    let isas: &[&str] = if cfg!(target_arch = "x86_64") {
        &X86
    } else {
        &AARCH64
    };
    compile_c(&compilers, isas, &SPECS);
}

/// The layer that is kept, through compilers for aarch64.
#[cfg(target_arch = "x86_64")]
#[test]
fn c_text_compiles_for_aarch64() {
    let mut clang = clang();
    clang.push("--target=aarch64-linux-gnu".to_string());
    let compilers = [vec!["aarch64-linux-gnu-gcc".to_string()], clang];
    compile_c(&compilers, &AARCH64, &[KEPT_ON_CPUS]);
}

fn compile_c(compilers: &[Vec<String>], isas: &[&str], specs: &[&str]) {
    let compilers: Vec<(&[String], String)> =
        compilers.iter().map(|cc| (&cc[..], version(cc))).collect();
    let jobs: Vec<(&(&[String], String), KernelSource)> = compilers
        .iter()
        .enumerate()
        .flat_map(|(i, cc)| {
            isas.iter()
                .enumerate()
                .map(move |(j, isa)| (cc, i + j, *isa))
        })
        .flat_map(|(cc, turn, isa)| {
            in_turns(turn, specs.iter().copied()).map(move |spec| (cc, isa, spec))
        })
        .flat_map(|(cc, isa, spec)| sources(spec, isa).into_iter().map(move |k| (cc, k.source)))
        .chain(compilers.iter().flat_map(|cc| {
            let others = isas.iter().flat_map(|isa| other_sources(isa));
            others.map(move |kernel| (cc, kernel.source))
        }))
        .collect();
    on_all_cores(&jobs, |((cc, version), source)| {
        check_c(cc, version, source)
    });
}

/// The machine's clang, or the one that `toolchain install rocm` brings.
fn clang() -> Vec<String> {
    let works = |program: &str| {
        Command::new(program)
            .arg("--version")
            .stdout(Stdio::null())
            .status()
            .is_ok()
    };
    if works("clang") {
        return vec!["clang".to_string()];
    }
    let registry = Registry::open().expect("a cache directory");
    let zig = registry
        .get(ToolKind::Rocm)
        .or_else(|| registry.get(ToolKind::C))
        .map(|t| registry.path(t));
    let zig = needed(ExternalTool::Clang, zig.ok_or("there is no clang"));
    vec![zig.display().to_string(), "clang".to_string()]
}

/// What brings the compilers.
const NEEDED: &str = "the tests need: cargo xtask test";

fn check_c(cc: &[String], version: &str, source: &KernelSource) {
    let Target::Cpu(isa) = source.target else {
        panic!("C is for CPUs")
    };
    let mut command = Command::new(&cc[0]);
    command
        .args(&cc[1..])
        .args(["-x", "c", "-std=gnu11", "-O3", "-fPIC", "-c"]);
    command.args(["-Wall", "-Wextra", "-Werror", "-o", "/dev/null"]);
    // The runtime's flags, without those that would hide a warning.
    command
        .args(
            moesaic::cpu::compile_flags(isa)
                .into_iter()
                .filter(|flag| *flag != "-Wno-unused"),
        )
        .arg("-");
    command.stdin(Stdio::piped()).stderr(Stdio::piped());
    let asked = format!("{version} {command:?}");
    let what = format!("{cc:?} on {} for {}", source.name, source.target);
    once(&[&asked, &source.text], || read_c(command, source, &what));
}

/// What a compiler says that it is.
fn version(cc: &[String]) -> String {
    let mut command = Command::new(&cc[0]);
    let output = command.args(&cc[1..]).arg("--version").output();
    let output = output.unwrap_or_else(|e| panic!("{}: {e}\n{NEEDED}", cc[0]));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The compiler takes the text from its input, without a word of warning.
fn read_c(mut command: Command, source: &KernelSource, what: &str) {
    let mut child = command
        .spawn()
        .unwrap_or_else(|e| panic!("{what}: {e}\n{NEEDED}"));
    let mut stdin = child.stdin.take().expect("it is piped");
    std::io::Write::write_all(&mut stdin, source.text.as_bytes()).expect("the compiler reads");
    drop(stdin);
    let output = child.wait_with_output().expect("the compiler ends");
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{what}\n{log}");
}

/// Runs `job` for every item on all cores; the first panic is passed on.
fn on_all_cores<T: Sync>(items: &[T], job: impl Fn(&T) + Sync) {
    let next = std::sync::atomic::AtomicUsize::new(0);
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    std::thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(|| {
                while let Some(item) =
                    items.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed))
                {
                    job(item);
                }
            });
        }
    });
}

#[test]
fn kernels_include_no_header() {
    for kernel in kept() {
        let text = &kernel.source.text;
        assert!(!text.contains("#include"), "{}", kernel.file().display());
    }
}
