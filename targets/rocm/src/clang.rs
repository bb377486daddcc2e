//! A clang with the AMDGPU target and the LLVM linker.

use moesaic_kernel::RocmArch;
use moesaic_target::child::{self, ChildError, QUESTION};
use moesaic_target::script;
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Flags of every compile by either compiler, besides the architecture.
///
/// Every ROCm since 6.0 loads code object version 5. A product and a sum may be
/// fused, as in NVRTC; the rest of fast math is off.
pub const COMMON: [&str; 5] = [
    "-fdeclspec",
    "-O3",
    "-std=c++17",
    "-ffp-contract=fast",
    "-mcode-object-version=5",
];

/// Unrolls loops over a thread's sums however long their bodies are. Otherwise
/// LLVM stops at long activations, and sums that are indexed at run time lie in
/// memory. The flag is two words, never one with `=`, because HIPRTC passes
/// only such pairs to the optimizer.
pub const UNROLL: [&str; 2] = ["-mllvm", "-pragma-unroll-threshold=16777216"];

/// Further flags of clang. ROCm headers and device libraries are off, because
/// the text includes its own prelude, and no configuration file of the machine
/// may change the result.
const FLAGS: [&str; 10] = [
    "--no-default-config",
    "-x",
    "hip",
    "--cuda-device-only",
    "--no-gpu-bundle-output",
    "-nogpulib",
    "-nogpuinc",
    "-nostdinc",
    "-fno-color-diagnostics",
    "-fno-ident",
];

/// Name of the output file in the folder of a compile.
pub const OUTPUT: &str = "kernel.co";

/// Variables that would add to clang's input or behaviour.
const FOREIGN: [&str; 6] = [
    "CPATH",
    "CPLUS_INCLUDE_PATH",
    "CCC_OVERRIDE_OPTIONS",
    "COMPILER_PATH",
    "HIP_PATH",
    "ROCM_PATH",
];

/// The way to call a clang.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClangTool {
    /// The program.
    pub program: PathBuf,
    /// Arguments before all others: `clang` for a program with several tools.
    pub args: Vec<String>,
    /// A folder to search before `PATH`, which holds the program `lld`.
    pub path: Option<PathBuf>,
    /// Its answers from an earlier process. Without them it is asked again,
    /// which starts it twice.
    pub facts: Option<ClangFacts>,
}

/// The answers of a clang about itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClangFacts {
    /// The first line of its version, which names vendor, release and revision.
    pub version: String,
    /// The AMD processors it knows, by their LLVM names.
    pub processors: Vec<String>,
}

/// A program that is no clang for AMD GPUs.
#[derive(Debug, thiserror::Error)]
pub enum ClangError {
    /// It did not answer.
    #[error(transparent)]
    Child(#[from] ChildError),
    /// It refused the question; these are its words.
    #[error("{0}")]
    Refused(String),
    #[error("it does not say its version as clang does")]
    NoVersion,
    #[error("it has no AMDGPU target")]
    NoTarget,
    #[error("it finds no linker `lld`; install the lld package of the same version")]
    NoLinker,
}

/// A clang that has answered.
#[derive(Clone, Debug)]
pub struct Clang {
    tool: ClangTool,
    pub facts: ClangFacts,
}

impl ClangTool {
    /// Returns the tool of a stand-alone clang.
    pub fn program(program: impl Into<PathBuf>) -> ClangTool {
        ClangTool {
            program: program.into(),
            args: Vec::new(),
            path: None,
            facts: None,
        }
    }

    /// Returns the tool of the clang inside the program `zig` of `folder`, with
    /// the linker that `bin/lld` there calls.
    pub fn zig(folder: &Path) -> ClangTool {
        ClangTool {
            program: folder.join("zig"),
            args: vec!["clang".to_string()],
            path: Some(folder.join("bin")),
            facts: None,
        }
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.args).env("LC_ALL", "C");
        for name in FOREIGN {
            command.env_remove(name);
        }
        if let Some(path) = self.search_path() {
            command.env("PATH", path);
        }
        command
    }

    fn search_path(&self) -> Option<OsString> {
        let first = self.path.clone()?;
        let rest = std::env::var_os("PATH").unwrap_or_default();
        let folders = std::iter::once(first).chain(std::env::split_paths(&rest));
        std::env::join_paths(folders).ok()
    }

    fn ask(&self, args: &[&str]) -> Result<String, ClangError> {
        let done = child::run(self.command().args(args), QUESTION)?;
        let text = done.said();
        if done.status.success() {
            Ok(text)
        } else {
            let words = text.lines().next().unwrap_or("it said nothing");
            Err(ClangError::Refused(words.to_string()))
        }
    }
}

impl Clang {
    /// Asks `tool` for its version, its AMD processors and its linker, unless
    /// the answers are known.
    pub fn ask(tool: ClangTool) -> Result<Clang, ClangError> {
        let facts = match &tool.facts {
            Some(facts) => facts.clone(),
            None => facts(&tool)?,
        };
        Ok(Clang { tool, facts })
    }

    /// Returns true if it knows `arch`.
    pub fn knows(&self, arch: RocmArch) -> bool {
        self.facts.processors.iter().any(|name| name == arch.name)
    }

    /// Returns the version as people write it: `clang 22.1.8`, `AMD clang
    /// 18.0.0git`.
    pub fn name(&self) -> String {
        let short = self.facts.version.replacen("clang version ", "clang ", 1);
        short.split(" (").next().unwrap_or(&short).to_string()
    }

    /// Returns the program, for messages.
    pub fn program(&self) -> &Path {
        &self.tool.program
    }

    /// Returns everything that decides the output.
    pub fn fingerprint(&self, arch: RocmArch) -> String {
        let scripts = script::scripts(&self.tool.program, &[]);
        let version = std::iter::once(self.facts.version.clone());
        let words: Vec<String> = version.chain(scripts).chain(flags(arch)).collect();
        words.join(" ")
    }

    /// Returns the command that compiles `file` of its working folder to
    /// [`OUTPUT`].
    pub fn command(&self, arch: RocmArch, file: &str) -> Command {
        let mut command = self.tool.command();
        command.args(flags(arch)).args(["-o", OUTPUT, file]);
        command
    }
}

fn facts(tool: &ClangTool) -> Result<ClangFacts, ClangError> {
    let text = tool.ask(&["--target=amdgcn-amd-amdhsa", "--print-supported-cpus"])?;
    let version = text.lines().find(|line| line.contains("clang version"));
    let version = version.ok_or(ClangError::NoVersion)?;
    let processors = processors(&text);
    if processors.is_empty() {
        return Err(ClangError::NoTarget);
    }
    let linker = tool.ask(&["-print-prog-name=lld"])?;
    if !Path::new(linker.trim()).is_absolute() {
        return Err(ClangError::NoLinker);
    }
    Ok(ClangFacts {
        version: version.trim().to_string(),
        processors,
    })
}

fn flags(arch: RocmArch) -> Vec<String> {
    std::iter::once(format!("--offload-arch={}", arch.name))
        .chain(COMMON.map(str::to_string))
        .chain(FLAGS.map(str::to_string))
        .chain(UNROLL.map(str::to_string))
        .collect()
}

/// Reads the names, which clang indents by a tab.
fn processors(text: &str) -> Vec<String> {
    text.lines()
        .filter_map(|line| line.strip_prefix('\t'))
        .map(|name| name.trim().to_string())
        .filter(|name| name.starts_with("gfx"))
        .collect()
}
