//! Emitted source as plain files, and real compilers over all of it.
//!
//! `cargo xtask bless` rewrites the files after a wanted change.

use crate::kept::{Kept, once};
use moesaic::emit::emit_layer;
use moesaic::kernel::{KernelSource, Stem};
use moesaic::plan::{Both, Parallel, PlanOptions, Training, Wire, plan, plan_rank};
use moesaic::spec::LayerSpec;
use moesaic::target::{CompileOptions, Compiler};
use moesaic::toolchain::testing::{Tool, needed};
use moesaic::toolchain::{Kind, Registry};
use moesaic::{Compilers, Target};
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
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

/// The layer whose kernels are kept for every instruction set of CPUs.
const KEPT_ON_CPUS: &str = "small-bf16";

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
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn spec(name: &str) -> LayerSpec {
    let path = root()
        .join("examples/specs")
        .join(name)
        .with_extension("toml");
    let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    LayerSpec::from_toml(&text).unwrap_or_else(|e| panic!("{}", e.render(name, false)))
}

fn sources(spec_name: &str, target: &str) -> Vec<KernelSource> {
    let target: Target = target.parse().expect("a known target");
    let plan = plan(&spec(spec_name), target, &PlanOptions::default()).expect("it can be planned");
    emit_layer(&plan).expect("it can be emitted")
}

/// Kernels of training whose text is of no forward pass.
fn training_sources(spec_name: &str, target: &str) -> Vec<KernelSource> {
    let parsed: Target = target.parse().expect("a known target");
    let plan = plan(
        &spec(spec_name),
        parsed,
        &PlanOptions::training(Training::default()),
    );
    let mut list = emit_layer(&plan.expect("it can be planned")).expect("it can be emitted");
    let forward = sources(spec_name, target);
    list.retain(|source| forward.iter().all(|f| f.text != source.text));
    list
}

/// Layers, and what their rows are between nodes.
const ON_THE_WIRE: [(&str, Wire); 4] = [
    ("deepseek-v3", Wire::Fp8),
    ("deepseek-v3", Wire::F16),
    ("gpt-oss-20b", Wire::Fp8),
    ("switch-base-8", Wire::Bf16),
];

/// Kernels between nodes, each with its layer.
fn wire_sources(target: &str) -> Vec<(&'static str, KernelSource)> {
    let parsed: Target = target.parse().expect("a known target");
    let mesh = Parallel {
        ep: 2,
        ..Parallel::default()
    };
    let of_layer = |(name, wire): (&'static str, Wire)| {
        let plan = plan_rank(&spec(name), parsed, &PlanOptions::default(), mesh, 0);
        let plan = plan.expect("it can be planned").in_wire(Both::same(wire));
        let list = plan
            .wire
            .map(|plan| emit_layer(&plan).expect("it can be emitted"));
        list.into_iter().flatten().map(move |source| (name, source))
    };
    ON_THE_WIRE.into_iter().flat_map(of_layer).collect()
}

/// `tests/golden/grouped_gemm/mixtral-8x7b.grouped_gemm_up.cuda-sm_90a.cu`.
fn golden_path(spec_name: &str, source: &KernelSource) -> PathBuf {
    let (name, target) = (&source.name, source.target.file_name());
    let file = format!(
        "{spec_name}.{name}.{target}.{}",
        source.language.extension()
    );
    root()
        .join("tests/golden")
        .join(source.stem.name())
        .join(file)
}

fn expected() -> BTreeMap<PathBuf, String> {
    let mut files = BTreeMap::new();
    for target in KEPT.iter().chain(&KEPT_GEMMS) {
        for spec in SPECS {
            keep(&mut files, spec, target, sources(spec, target));
        }
        for spec in TRAINED {
            let name = format!("{spec}.training");
            keep(&mut files, &name, target, training_sources(spec, target));
        }
        for (spec, source) in wire_sources(target) {
            keep(&mut files, spec, target, vec![source]);
        }
    }
    for target in cpus() {
        for source in sources(KEPT_ON_CPUS, &target) {
            files.insert(golden_path(KEPT_ON_CPUS, &source), source.text);
        }
    }
    files
}

/// Every instruction set there is.
fn cpus() -> Vec<String> {
    let all = Target::all().into_iter();
    let cpus = all.filter(|target| target.backend() == "cpu");
    cpus.map(|target| target.to_string()).collect()
}

fn keep(files: &mut BTreeMap<PathBuf, String>, case: &str, target: &str, list: Vec<KernelSource>) {
    let product = |stem: Stem| {
        [
            Stem::GroupedGemm,
            Stem::GroupedGemmDgrad,
            Stem::GroupedGemmWgrad,
        ]
        .contains(&stem)
    };
    for source in list {
        if KEPT.contains(&target) || product(source.stem) {
            files.insert(golden_path(case, &source), source.text);
        }
    }
}

fn on_disk() -> Vec<PathBuf> {
    let folders = fs::read_dir(root().join("tests/golden"))
        .into_iter()
        .flatten()
        .flatten();
    folders
        .flat_map(|folder| fs::read_dir(folder.path()).into_iter().flatten().flatten())
        .map(|file| file.path())
        .collect()
}

#[test]
fn emitted_text_is_the_golden_text() {
    let expected = expected();
    if std::env::var_os("BLESS").is_some() {
        return bless(&expected);
    }
    for (path, text) in &expected {
        let golden = fs::read_to_string(path).unwrap_or_default();
        let line = golden.lines().zip(text.lines()).position(|(a, b)| a != b);
        let line = line.unwrap_or_else(|| golden.lines().count().min(text.lines().count())) + 1;
        assert!(
            golden == *text,
            "{} differs from what is emitted, first at line {line}; \
             if that is wanted: cargo xtask bless",
            path.display()
        );
    }
    for path in on_disk() {
        assert!(
            expected.contains_key(&path),
            "{} is of no case any more",
            path.display()
        );
    }
}

fn bless(expected: &BTreeMap<PathBuf, String>) {
    for path in on_disk() {
        fs::remove_file(path).expect("golden files can be removed");
    }
    for (path, text) in expected {
        fs::create_dir_all(path.parent().expect("it has a folder")).expect("a writable tree");
        fs::write(path, text).expect("a writable tree");
    }
}

/// Every kernel for every GPU target, with no spills, no stack and no word of
/// warning from the compiler.
#[test]
fn gpu_text_compiles_without_spills() {
    let compilers = Compilers::new(None);
    let jobs: Vec<KernelSource> = COMPILED
        .iter()
        .flat_map(|target| {
            let forward = SPECS.iter().flat_map(move |spec| sources(spec, target));
            forward
                .chain(
                    TRAINED
                        .iter()
                        .flat_map(move |spec| training_sources(spec, target)),
                )
                .chain(wire_sources(target).into_iter().map(|(_, source)| source))
        })
        .collect();
    on_all_cores(&jobs, |source| {
        let compiler = needed(Tool::of(source.target), compilers.get(source.target));
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
        assert_eq!(
            kernel.spill_bytes.unwrap_or(0),
            0,
            "{what}: {}",
            kernel.symbol
        );
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

/// Every kernel for every instruction set of x86-64, or of aarch64 on such a
/// machine, through gcc and clang, warnings as errors.
#[test]
fn c_text_compiles_without_warnings() {
    let compilers = [vec!["gcc".to_string()], clang()];
    let isas: &[&str] = match cfg!(target_arch = "x86_64") {
        true => &X86,
        false => &AARCH64,
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
        .flat_map(|cc| isas.iter().map(move |isa| (cc, *isa)))
        .flat_map(|(cc, isa)| specs.iter().map(move |spec| (cc, isa, *spec)))
        .flat_map(|(cc, isa, spec)| sources(spec, isa).into_iter().map(move |s| (cc, s)))
        .chain(compilers.iter().flat_map(|cc| {
            let wire = isas.iter().flat_map(|isa| wire_sources(isa));
            wire.map(move |(_, source)| (cc, source))
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
        .get(Kind::Rocm)
        .or_else(|| registry.get(Kind::C))
        .map(|t| registry.path(t));
    let zig = needed(Tool::Clang, zig.ok_or("there is no clang"));
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
fn golden_files_include_no_header() {
    for path in on_disk() {
        let text = fs::read_to_string(&path).expect("it is text");
        assert!(!text.contains("#include"), "{}", path.display());
    }
}
