//! Project automation. `cargo xtask` lists the commands.

#[path = "../../tests/oracle/archive.rs"]
mod archive;
mod kit;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

const USAGE: &str = "\
usage: cargo xtask <command>

  test    install what the tests need (NVRTC, clang and MPICH by pip; an emulator of
          aarch64, gcc for it and Open MPI by apt-get, which needs root), run every test,
          also those of interop, which is no part of the workspace
  bless   rewrite the golden files after a wanted change
  fuzz    broken inputs into everything that reads
  sweep   compile random layers, forward and training, for every GPU
  same    BEFORE AFTER, two builds of the command line: the text of kernels
          and the results of passes are the same bytes
          (options of these follow; `cargo xtask sweep --help` lists them)
  gpu-kit a folder for a machine with a GPU, its driver and nothing else: program,
          kernels, data and run.sh (docs/PLATFORM.md)
  validate
          how far the model of machines is from published measurements (docs/SCALE.md)
  lint    formatting and clippy, warnings denied, lock files up to date
  package what would be published, packed and documented without a warning
  ci      lint, package, then test";

const CARGO: &str = env!("CARGO");

/// Outside the workspace: candle brings a hundred crates that nothing else needs.
const CANDLE: &str = "interop/candle/Cargo.toml";

fn main() -> ExitCode {
    let command = std::env::args().nth(1).unwrap_or_default();
    let done = match command.as_str() {
        "test" => test(),
        "bless" => bless(),
        "fuzz" => program(&["--package", "moesaic-fuzz"]),
        "gpu-kit" => kit::kit(std::env::args().skip(2)),
        "same" => program(&["--package", "moesaic-same"]),
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
    cargo(&["test", "--workspace", "--no-run"])?;
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let program = target(&root).join("debug/moesaic");
    run(Command::new(program).args(["toolchain", "install", "cuda", "rocm", "mpi"]))?;
    install_packages();
    cargo(&["test", "--workspace", "--no-fail-fast"])?;
    cargo(&["test", "--locked", "--manifest-path", CANDLE])
}

/// QEMU and gcc for aarch64, and Open MPI, if they are missing. Where that fails,
/// the tests that need them will say so.
fn install_packages() {
    let needed = [
        ("qemu-aarch64-static", "qemu-user-static"),
        ("aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu"),
        ("mpirun.openmpi", "openmpi-bin"),
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

fn is_there(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(program).is_file())
}

/// Every file that a test holds against what is made now.
fn bless() -> Result<(), String> {
    let made = [
        ["moesaic-tests", "--test=main", "golden::emitted"],
        ["moesaic-rustgen", "--test=golden", ""],
        ["moesaic-spec", "--test=main", "ui"],
        ["moesaic-spec", "--lib", "reference::"],
        ["moesaic-cli", "--lib", "reference::"],
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

/// `--locked` fails where a lock file does not say what would be built.
fn lint() -> Result<(), String> {
    cargo(&["fmt", "--all", "--check"])?;
    clippy(&["--workspace"])?;
    cargo(&["fmt", "--manifest-path", CANDLE, "--check"])?;
    clippy(&["--manifest-path", CANDLE])
}

/// Crates that stay here.
const UNPUBLISHED: [&str; 9] = [
    "moesaic-benches",
    "moesaic-fuzz",
    "moesaic-kit",
    "moesaic-probe",
    "moesaic-rig",
    "moesaic-same",
    "moesaic-sweep",
    "moesaic-tests",
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

/// What cargo misses: there is no address to name before the project is published.
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

fn clippy(what: &[&str]) -> Result<(), String> {
    let mut words = vec!["clippy", "--locked"];
    words.extend(what);
    words.extend(["--all-targets", "--", "--deny", "warnings"]);
    cargo(&words)
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
