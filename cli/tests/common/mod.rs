//! Running the built binary, and making files for it.

// Each test file uses a part of this.
#![allow(dead_code)]

#[path = "../../../tests/oracle/archive.rs"]
mod archive;

use moesaic::weights::{Checkpoint, write_safetensors};
use moesaic::{DType, Tensor, Tensors};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A call of `moesaic` that finished.
pub struct Finished {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

/// The binary, with a kernel cache that all tests of this build share, a C compiler in a
/// hurry, and nothing of the user's environment that would change what it does.
pub fn command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_moesaic"));
    command.env(
        "MOESAIC_CACHE",
        Path::new(env!("CARGO_TARGET_TMPDIR")).join("cache"),
    );
    // Words of a compiler are split at spaces, folders of the path are not.
    let usual = std::env::var_os("PATH").unwrap_or_default();
    let quick = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let path = std::iter::once(quick).chain(std::env::split_paths(&usual));
    let path = std::env::join_paths(path).expect("a path without a colon");
    command.env("PATH", path).env("MOESAIC_CC", "quick-cc cc");
    for name in [
        "MOESAIC_NVRTC",
        "MOESAIC_CLANG",
        "MOESAIC_LOG",
        "MOESAIC_TUNING",
        "RUST_LOG",
        "NO_COLOR",
    ] {
        command.env_remove(name);
    }
    command
}

/// Runs the binary.
pub fn moesaic<A: AsRef<OsStr>>(args: impl IntoIterator<Item = A>) -> Finished {
    finish(command().args(args))
}

/// Runs a prepared call.
pub fn finish(command: &mut Command) -> Finished {
    let Output {
        status,
        stdout,
        stderr,
    } = command.output().expect("the binary starts");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("output is UTF-8");
    Finished {
        code: status.code().expect("it exits by itself"),
        stdout: text(stdout),
        stderr: text(stderr),
    }
}

impl Finished {
    /// Asserts success; the output.
    pub fn ok(self) -> String {
        assert_eq!(self.code, 0, "{}{}", self.stdout, self.stderr);
        self.stdout
    }

    /// Asserts success; the output as JSON.
    pub fn json(self) -> serde_json::Value {
        let text = self.ok();
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"))
    }

    /// Asserts a failure of this code; a warning comes first.
    pub fn fails_after_warning(self, code: i32, part: &str) {
        assert_eq!(self.code, code, "{}", self.stderr);
        let error = self
            .stderr
            .split_once("\nerror: ")
            .expect("an error after the warning")
            .1;
        assert!(error.contains(part), "{part:?} is not in:\n{error}");
    }

    /// Asserts a failure of this code with one error that has these parts.
    pub fn fails(self, code: i32, parts: &[&str]) {
        let all = format!("exit code {}\n{}", self.code, self.stderr);
        assert_eq!(self.code, code, "{all}");
        assert_eq!(self.stdout, "", "{all}");
        // Lines of a rank begin with who it is.
        let rank = self.stderr.starts_with("rank ");
        let who = self.stderr.split_once(": ").filter(|_| rank);
        let error = who.map_or(&*self.stderr, |(_, error)| error);
        assert!(error.starts_with("error: "), "{all}");
        for part in parts {
            assert!(self.stderr.contains(part), "{part:?} is not in:\n{all}");
        }
        for inner in ["panicked", "defect", "RUST_BACKTRACE", "Error {", "Some("] {
            assert!(!self.stderr.contains(inner), "{inner:?} is in:\n{all}");
        }
    }
}

/// A file of the repository.
pub fn repository(path: &str) -> PathBuf {
    if let Some(fixture) = path.strip_prefix("tests/oracle/") {
        let (folder, rest) = fixture.split_once('/').unwrap_or((fixture, ""));
        return archive::folder(folder).join(rest);
    }
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("cli has a parent")
        .join(path)
}

/// A directory of this test's own.
pub fn scratch() -> tempfile::TempDir {
    tempfile::Builder::new()
        .prefix("moesaic-cli-")
        .tempdir()
        .expect("a temporary directory")
}

/// A small layer with odd sizes.
pub const SMALL: &str = "\
name = \"small\"
shape = { model_dim = 20, hidden_dim = 12, experts = 5, top_k = 2 }
";

/// The small layer with noise, and with losses and masks that take inputs of
/// their own.
pub const EVERY_INPUT: &str = "\
name = \"small\"
shape = { model_dim = 20, hidden_dim = 12, experts = 5, top_k = 2 }
router = { jitter = 0.3, noise = 2.0, token_mask = true, active_k = true }
capacity = { mode = \"factor\", factor = 1.2, eval_factor = 2.4 }
losses = [
    { kind = \"sequence\", coefficient = 0.01 },
    { kind = \"global\", coefficient = 0.01 },
]
";

/// Writes a text file.
pub fn write(dir: &Path, name: &str, text: &str) -> PathBuf {
    let path = dir.join(name);
    std::fs::write(&path, text).expect("a temporary file");
    path
}

/// Values that look random and are the same every time.
pub fn values(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// A random f32 tensor.
pub fn tensor(shape: &[usize], seed: u32) -> Tensor<'static> {
    Tensor::copied(shape, &values(shape.iter().product(), seed))
}

/// The weights of [`SMALL`].
pub fn small_weights() -> Tensors<'static> {
    Tensors::from([
        ("router.weight".to_string(), tensor(&[5, 20], 1)),
        ("experts.gate.weight".to_string(), tensor(&[5, 12, 20], 2)),
        ("experts.up.weight".to_string(), tensor(&[5, 12, 20], 3)),
        ("experts.down.weight".to_string(), tensor(&[5, 20, 12], 4)),
    ])
}

/// A file with an `x` of 7 tokens.
pub fn small_input() -> Tensors<'static> {
    Tensors::from([("x".to_string(), tensor(&[7, 20], 5))])
}

/// Writes tensors.
pub fn save(dir: &Path, name: &str, tensors: &Tensors<'_>) -> PathBuf {
    let path = dir.join(name);
    write_safetensors(&path, tensors).expect("a temporary file");
    path
}

/// A tensor of a file as f64, with its type and shape.
pub fn load(path: &Path, name: &str) -> (DType, Vec<usize>, Vec<f64>) {
    let file = Checkpoint::open(path).unwrap_or_else(|e| panic!("{e}"));
    let tensor = file
        .tensor(name)
        .unwrap_or_else(|| panic!("{name} is not there"));
    let held = tensor.tensor().expect("a known type");
    (held.dtype, held.shape.clone(), held.to_f64())
}

/// A directory with a spec, weights and input of the small layer.
pub struct Small {
    pub dir: tempfile::TempDir,
    pub spec: PathBuf,
    pub weights: PathBuf,
    pub input: PathBuf,
    pub output: PathBuf,
}

impl Small {
    /// The layer as it should be.
    pub fn new() -> Small {
        Small::of(SMALL)
    }

    /// The layer by another spec of the same tensors.
    pub fn of(spec: &str) -> Small {
        let dir = scratch();
        Small {
            spec: write(dir.path(), "small.toml", spec),
            weights: save(dir.path(), "w.safetensors", &small_weights()),
            input: save(dir.path(), "x.safetensors", &small_input()),
            output: dir.path().join("y.safetensors"),
            dir,
        }
    }

    /// `moesaic run` with these files, on the CPU.
    pub fn command(&self) -> Command {
        self.command_on("cpu")
    }

    /// `moesaic run` with these files, on a target.
    pub fn command_on(&self, target: &str) -> Command {
        let mut command = command();
        command
            .args(["run", "--target", target, "--spec"])
            .arg(&self.spec);
        command
            .arg("--weights")
            .arg(&self.weights)
            .arg("--input")
            .arg(&self.input);
        command.arg("--output").arg(&self.output);
        command
    }

    /// Runs it with more arguments.
    pub fn run(&self, more: &[&str]) -> Finished {
        finish(self.command().args(more))
    }

    /// Asserts that it fails as bad input and leaves nothing behind.
    pub fn refuses(&self, more: &[&str], parts: &[&str]) {
        self.run(more).fails(2, parts);
        assert!(!self.output.exists(), "an output was left behind");
        let left = std::fs::read_dir(self.dir.path())
            .expect("the directory")
            .flatten();
        let left: Vec<_> = left.map(|e| e.file_name()).collect();
        let temporary = left
            .iter()
            .any(|name| name.to_string_lossy().starts_with('.'));
        assert!(!temporary, "a temporary file was left behind: {left:?}");
    }
}

/// Runs the program with these arguments and a spec.
pub fn with_spec(args: &[&str], spec: &Path) -> Finished {
    finish(command().args(args).arg("--spec").arg(spec))
}
