//! Project automation. `cargo xtask` lists the commands.

#[path = "../../tests/oracle/archive.rs"]
mod archive;
mod c;
mod gpu_smoke;
mod python;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode};
use std::time::Duration;

const USAGE: &str = "\
usage: cargo xtask <command>

  test    install what the tests need (NVRTC, clang, MPICH, numpy, pytest and cmake by pip; an
          emulator of aarch64, gcc for it, Open MPI and valgrind by apt-get, which needs root),
          run every test, those of interop beside the others
          --quick: five minutes on two cores, and no tool but a C compiler: unit tests,
          golden text, whole layers on the CPU, oracles of Hugging Face and Tutel
          --thorough: every combination where tests take turns (harness/src/thorough.rs)
          --interop: the tests of interop alone
  bless   rewrite the golden files after a wanted change
  fuzz    broken inputs into everything that reads
  sweep   compile random layers, forward and training, for every GPU
  reprodiff
          BEFORE AFTER, two builds of the command line: the text of kernels
          and the results of passes are the same bytes
          (options of these follow; `cargo xtask sweep --help` lists them)
  gpu-smoke
          a folder for a machine with a GPU, its driver and nothing else: program,
          kernels, data and run.sh (docs/PLATFORM.md)
  validate
          how far the model of machines is from published measurements (docs/SCALE.md)
  lint    formatting and clippy, warnings denied, lock files up to date
  package what would be published, packed and documented without a warning
  ci      lint, package, then test";

const CARGO: &str = env!("CARGO");

/// The workspace of C, candle and Python, which the main one does without.
const INTEROP: &str = "interop/Cargo.toml";

fn main() -> ExitCode {
    let command = std::env::args().nth(1).unwrap_or_default();
    let done = match command.as_str() {
        "test" => match std::env::args().nth(2).as_deref() {
            None => test(),
            Some("--quick") => quick(),
            Some("--interop") => interop(),
            Some("--thorough") => {
                // SAFETY: nothing else runs yet that could read the environment.
                unsafe { std::env::set_var("MOESAIC_THOROUGH", "1") };
                test()
            }
            Some(_) => Err(USAGE.to_string()),
        },
        "bless" => bless(),
        "fuzz" => program(&["--package", "moesaic-fuzz"]),
        "gpu-smoke" => gpu_smoke::folder(std::env::args().skip(2)),
        "reprodiff" => program(&["--package", "moesaic-reprodiff"]),
        "sweep" => program(&["--release", "--package", "moesaic-sweep"]),
        "validate" => program(&["--package", "moesaic-planner", "--example", "validate"]),
        "lint" => lint(),
        "package" => package(),
        "ci" => lint().and_then(|()| package()).and_then(|()| test()),
        _ => Err(USAGE.to_string()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::from(2)
        }
    }
}

/// Tools before tests, so that no test has to fetch anything. The program that installs them
/// is the one that is tested: alone it would be built with other features, and all below it
/// twice.
fn test() -> Result<(), String> {
    let root = root();
    std::thread::scope(|scope| {
        // Fetching leaves the processor to the compiler.
        scope.spawn(install_packages);
        cargo(&["test", "--workspace", "--no-run"])
    })?;
    let program = target(&root).join("debug/moesaic");
    run(Command::new(program).args(["toolchain", "install", "cuda", "rocm", "mpi"]))?;
    let (beside, done) = std::thread::scope(|scope| {
        let beside = scope.spawn(|| Beside::start(&target(&root).join("interop.log")));
        let done = cargo(&["test", "--workspace", "--no-fail-fast"]);
        (beside.join().expect("no panic"), done)
    });
    beside?.finish().and(done)
}

/// Seconds in which cargo sees that the workspace is built. It locks the folder for them, and all
/// the time that it builds: who comes second waits.
const AHEAD: u64 = 5;

/// [`interop`] in a process of its own, which yields to all others. Many a test waits for something
/// else than a processor; this has work for it then.
struct Beside {
    process: Child,
    /// The file that its output goes to.
    log: PathBuf,
}

impl Beside {
    /// Starts it [`AHEAD`] seconds from now.
    fn start(log: &Path) -> Result<Beside, String> {
        std::thread::sleep(Duration::from_secs(AHEAD));
        let failed = |error| format!("tests of interop cannot be started: {error}");
        let file = File::create(log).map_err(failed)?;
        let mut command = Command::new("nice");
        command.args(["-n", "19"]);
        command.arg(std::env::current_exe().map_err(failed)?);
        command.args(["test", "--interop"]);
        command.stdout(file.try_clone().map_err(failed)?);
        let process = command.stderr(file).spawn().map_err(failed)?;
        let log = log.to_path_buf();
        Ok(Beside { process, log })
    }

    /// Waits for it and prints what it printed.
    fn finish(mut self) -> Result<(), String> {
        let failed = |error| format!("tests of interop: {error}");
        let status = self.process.wait().map_err(failed)?;
        eprint!("{}", std::fs::read_to_string(&self.log).map_err(failed)?);
        if status.success() {
            Ok(())
        } else {
            Err(format!("tests of interop failed: {status}"))
        }
    }
}

/// The tests of C, candle and Python. Each call of cargo names the same packages and features: with
/// others it would build everything again.
fn interop() -> Result<(), String> {
    let root = root();
    set_compilers(&root)?;
    let extension = ["--features", "moesaic-python/extension-module"];
    outside(&["build", "--locked", "--workspace"], &extension)?;
    outside(&["test", "--locked", "--workspace"], &extension)?;
    python::test(&root)
}

/// From here on, cmake is found, and kernels are compiled in a hurry, as in the tests of the
/// command line.
fn set_compilers(root: &Path) -> Result<(), String> {
    let usual = std::env::var_os("PATH").unwrap_or_default();
    let mut paths = vec![root.join("cli/tests")];
    paths.extend(c::cmake(root)?);
    paths.extend(std::env::split_paths(&usual));
    let paths = std::env::join_paths(paths).map_err(|error| error.to_string())?;
    // SAFETY: this process has no other thread that could read the environment.
    unsafe {
        std::env::set_var("PATH", paths);
        std::env::set_var("MOESAIC_CC", "quick-cc cc");
    }
    Ok(())
}

/// Runs cargo on the workspace of interop. It builds in the main workspace's folder, where crates
/// of the registry that both need are there already.
fn outside(before: &[&str], after: &[&str]) -> Result<(), String> {
    let root = root();
    let folder = target(&root).display().to_string();
    let own = ["--manifest-path", INTEROP, "--target-dir", &folder];
    cargo(&[before, &own, after].concat())
}

/// Crates whose unit tests are worth a newcomer's minute: what reads, plans, writes and runs a
/// layer. Those of simulators, ranks and tuning wait for the whole run.
const UNITS: [&str; 11] = [
    "moesaic-cache",
    "moesaic-cpu",
    "moesaic-dist",
    "moesaic-engine",
    "moesaic-kernel",
    "moesaic-plan",
    "moesaic-reference",
    "moesaic-spec",
    "moesaic-tensor",
    "moesaic-typed",
    "moesaic-weights",
];

/// The project's own tests that need a C compiler and nothing else.
const QUICK: [&str; 16] = [
    "conformance::batch::",
    "conformance::layers::",
    "conformance::routing::",
    "conformance::training::",
    "golden::emitted_text",
    "golden::kernels_include",
    "golden_files::",
    "oracle::backward::tutel",
    "oracle::families::",
    "oracle::hugging_face",
    "oracle::layers_of_more",
    "oracle::tutel",
    "pages::",
    "prose::",
    "tidy::",
    "compared::",
];

/// Tests among [`QUICK`] that take minutes: random layers of every option, and simulators.
const SLOW: [&str; 2] = ["random_specs", "simulated"];

/// Units first, which say most in little time. `moesaic-tests` has none, and is named all the
/// same: cargo chooses features by the packages it is given, and with others it would build
/// everything twice.
fn quick() -> Result<(), String> {
    let mut units = vec!["test", "--lib", "--package", "moesaic-tests"];
    units.extend(UNITS.iter().flat_map(|name| ["--package", name]));
    cargo(&units)?;
    let mut own = vec!["test", "--package", "moesaic-tests", "--test", "main", "--"];
    own.extend(QUICK);
    own.extend(SLOW.iter().flat_map(|name| ["--skip", name]));
    cargo(&own)
}

/// QEMU and gcc for aarch64, Open MPI and valgrind, if they are missing. Where that fails,
/// the tests that need them will say so.
fn install_packages() {
    let needed = [
        ("qemu-aarch64-static", "qemu-user-static"),
        ("aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu"),
        ("mpirun.openmpi", "openmpi-bin"),
        ("valgrind", "valgrind"),
    ];
    let missing: Vec<&str> = needed
        .iter()
        .filter(|(program, _)| !is_there(program))
        .map(|(_, package)| *package)
        .collect();
    if missing.is_empty() {
        return;
    }
    let apt = |args: &[&str]| {
        let mut command = Command::new("apt-get");
        run(command.args(args).env("DEBIAN_FRONTEND", "noninteractive"))
    };
    let install = [
        &["install", "--yes", "--no-install-recommends"],
        &missing[..],
    ]
    .concat();
    let done = apt(&["update"]).and_then(|()| apt(&install));
    if let Err(message) = done {
        eprintln!("{message}: some tests need {}", missing.join(" "));
    }
}

/// Installs packages of Python into a folder of their own.
fn pip_install(folder: &Path, packages: &[&str]) -> Result<(), String> {
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "install", "--quiet", "--upgrade", "--target"]);
    run(pip.arg(folder).args(packages))
}

fn is_there(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(program).is_file())
}

/// Every file that a test holds against what is made now.
fn bless() -> Result<(), String> {
    let made = [
        ["moesaic-tests", "--test=main", "golden::emitted"],
        ["moesaic-kernel", "--test=architectures", ""],
        ["moesaic-rustgen", "--test=golden", ""],
        ["moesaic-spec", "--test=main", "ui"],
        ["moesaic-spec", "--lib", "reference::"],
    ];
    made.iter().try_for_each(|[package, target, test]| {
        let words = ["test", "--package", package, target, test];
        let words = words.into_iter().filter(|word| !word.is_empty());
        run(Command::new(CARGO).args(words).env("BLESS", "1"))
    })
}

/// Runs a program of the workspace, which takes the options that follow.
fn program(which: &[&str]) -> Result<(), String> {
    let options: Vec<String> = std::env::args().skip(2).collect();
    let options = options.iter().map(String::as_str);
    let words = ["run", "--quiet"].into_iter().chain(which.iter().copied());
    cargo(&words.chain(["--"]).chain(options).collect::<Vec<_>>())
}

const CLIPPY: [&str; 4] = ["--all-targets", "--", "--deny", "warnings"];

/// `--locked` fails where a lock file does not say what would be built.
fn lint() -> Result<(), String> {
    cargo(&["fmt", "--all", "--check"])?;
    cargo(&[&["clippy", "--locked", "--workspace"][..], &CLIPPY].concat())?;
    cargo(&["fmt", "--all", "--manifest-path", INTEROP, "--check"])?;
    let simulated = ["--features", "moesaic-python/sim"];
    outside(
        &["clippy", "--locked", "--workspace"],
        &[&simulated[..], &CLIPPY].concat(),
    )
}

/// Crates that stay here.
const UNPUBLISHED: [&str; 10] = [
    "moesaic-benches",
    "moesaic-fuzz",
    "moesaic-gpu-smoke",
    "moesaic-probe",
    "moesaic-harness",
    "moesaic-reprodiff",
    "moesaic-sweep",
    "moesaic-tests",
    "moesaic-ui",
    "xtask",
];

/// Packs every crate that would be published, and writes its documentation.
fn package() -> Result<(), String> {
    let mut published = vec!["--workspace"];
    published.extend(UNPUBLISHED.iter().flat_map(|name| ["--exclude", name]));
    let packed = [&["package", "--no-verify", "--allow-dirty"], &published[..]];
    silent(&packed.concat())?;
    silent(
        &[
            &[
                "doc",
                "--no-deps",
                "--features",
                "moesaic/macros,moesaic/train,moesaic/tune",
            ],
            &published[..],
        ]
        .concat(),
    )
}

/// The one warning of cargo that stays: there is no address to name before the project is
/// published.
const NOWHERE: &str = "manifest has no documentation, homepage or repository";

/// Runs cargo; a warning of it is a failure, but for [`NOWHERE`].
fn silent(args: &[&str]) -> Result<(), String> {
    eprintln!("+ cargo {}", args.join(" "));
    let mut command = Command::new(CARGO);
    let output = command.args(args).env("RUSTDOCFLAGS", "--deny warnings");
    let output = output.output().map_err(|error| error.to_string())?;
    let said = String::from_utf8_lossy(&output.stderr);
    let mut lines = said.lines().filter(|line| line.contains("warning:"));
    if output.status.success() && lines.all(|line| line.contains(NOWHERE)) {
        Ok(())
    } else {
        Err(said.into_owned())
    }
}

/// The folder of the workspace.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The folder that cargo builds in.
fn target(root: &Path) -> PathBuf {
    let set = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    set.unwrap_or_else(|| root.join("target"))
}

fn cargo(args: &[&str]) -> Result<(), String> {
    run(Command::new(CARGO).args(args))
}

fn run(command: &mut Command) -> Result<(), String> {
    let words: Vec<_> = command
        .get_args()
        .map(|a| a.to_string_lossy().into_owned())
        .collect();
    let program = std::path::Path::new(command.get_program());
    let program = program.file_name().unwrap_or_default().to_string_lossy();
    let line = format!("{program} {}", words.join(" "));
    eprintln!("+ {line}");
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("`{line}` failed: {status}")),
        Err(error) => Err(format!("`{line}` cannot be run: {error}")),
    }
}
