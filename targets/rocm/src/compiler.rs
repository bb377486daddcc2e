//! Compiles HIP text to a code object.

use crate::clang::{ClangFacts, ClangTool, OUTPUT};
use crate::code_object::{CodeObjectKernel, read_code_object};
use crate::find::{self, Refused};
use crate::hiprtc::Hiprtc;
use crate::tool::Tool;
use moesaic_kernel::{KernelSource, Language, RocmArch, Target};
use moesaic_target::child::{self, COMPILE, Finished};
use moesaic_target::{
    Artifact, ArtifactReport, BinaryReason, CompileError, CompileOptions, Compiler, CompilerReason,
    KernelReport, Scratch, SharedError,
};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

const ADVICE: &str = "run `moesaic toolchain install rocm`, \
    or set MOESAIC_CLANG to a clang++ with the AMDGPU target and lld";

/// A compiler for AMD GPUs as a [`Compiler`]: backend `rocm`, HIP text to a
/// code object. It needs no ROCm and no GPU. It always runs in a child process,
/// so that a crash of the compiler is an ordinary error.
#[derive(Debug)]
pub struct RocmCompiler {
    tool: Tool,
    limit: Duration,
}

impl RocmCompiler {
    /// Finds a compiler: the clang `MOESAIC_CLANG` alone if that is set; else
    /// `registered`, one in `ROCM_PATH` or `/opt/rocm`, and the `clang++`
    /// programs on `PATH`. The last resort is HIPRTC, if `main` called
    /// [`maybe_run_child`](crate::maybe_run_child); `MOESAIC_HIPRTC` names its
    /// library.
    ///
    /// # Errors
    /// [`CompileError::NoCompiler`] lists what was tried.
    pub fn find(registered: Option<&ClangTool>) -> Result<RocmCompiler, CompileError> {
        let tools = find::tools(registered, |name| std::env::var_os(name));
        match find::first(tools) {
            Ok(clang) => Ok(RocmCompiler::of(Tool::Clang(clang))),
            Err(refused) => RocmCompiler::last_resort(refused),
        }
    }

    /// Uses this clang.
    ///
    /// # Errors
    /// [`CompileError::NoCompiler`] says why it cannot be used.
    pub fn open(tool: ClangTool) -> Result<RocmCompiler, CompileError> {
        let clang = find::first(vec![tool]).map_err(|refused| no_compiler(&refused))?;
        Ok(RocmCompiler::of(Tool::Clang(clang)))
    }

    /// Stops compiles that take longer than `limit`, 300 s by default.
    pub fn with_limit(self, limit: Duration) -> RocmCompiler {
        RocmCompiler { limit, ..self }
    }

    /// Returns the program; for HIPRTC this program itself.
    pub fn program(&self) -> &Path {
        self.tool.program()
    }

    /// Returns a clang's answers about itself, so that the next process need
    /// not ask.
    pub fn facts(&self) -> Option<&ClangFacts> {
        self.tool.facts()
    }

    fn of(tool: Tool) -> RocmCompiler {
        RocmCompiler {
            tool,
            limit: COMPILE,
        }
    }

    fn last_resort(mut refused: Vec<Refused>) -> Result<RocmCompiler, CompileError> {
        // A user who names a clang wants no other compiler.
        if std::env::var_os("MOESAIC_CLANG").is_some_and(|value| !value.is_empty()) {
            return Err(no_compiler(&refused));
        }
        Hiprtc::ask()
            .map(|hiprtc| RocmCompiler::of(Tool::Hiprtc(hiprtc)))
            .map_err(|error| {
                refused.push(Refused {
                    place: "HIPRTC".to_string(),
                    reason: error.to_string(),
                });
                no_compiler(&refused)
            })
    }

    fn arch(&self, source: &KernelSource) -> Result<RocmArch, CompileError> {
        match source.target {
            Target::Rocm(arch) if source.language == Language::Hip && self.tool.knows(arch) => {
                Ok(arch)
            }
            target => Err(self.unsupported(target)),
        }
    }

    fn unsupported(&self, target: Target) -> CompileError {
        let names = self
            .targets()
            .iter()
            .map(Target::to_string)
            .collect::<Vec<_>>();
        CompileError::UnsupportedTarget {
            compiler: self.name(),
            target: target.to_string(),
            advice: format!("it can compile HIP for: {}", names.join(", ")),
        }
    }

    fn failed(&self, source: &KernelSource, reason: CompilerReason) -> CompileError {
        CompileError::Failed {
            compiler: self.name(),
            kernel: source.name.clone(),
            reason,
        }
    }

    /// Returns the code object and the compiler's output.
    fn build(
        &self,
        source: &KernelSource,
        arch: RocmArch,
    ) -> Result<(Vec<u8>, String), CompileError> {
        let no_file = |attempted, error: std::io::Error| {
            let reason = CompilerReason::NoFile {
                attempted,
                folder: std::env::temp_dir(),
                source: error.into(),
            };
            self.failed(source, reason)
        };
        let folder =
            Scratch::new().map_err(|error| no_file("making a temporary directory", error))?;
        let file = source.file_name();
        std::fs::write(folder.path().join(&file), &source.text)
            .map_err(|error| no_file("writing the source", error))?;
        let log = self.run(source, self.tool.command(arch, &file), folder.path())?;
        let binary = std::fs::read(folder.path().join(OUTPUT))
            .map_err(|error| self.failed(source, CompilerReason::NoBinary(error.into())))?;
        Ok((binary, log))
    }

    fn run(
        &self,
        source: &KernelSource,
        mut command: Command,
        folder: &Path,
    ) -> Result<String, CompileError> {
        let Finished {
            status,
            stdout,
            stderr,
        } = child::run(command.current_dir(folder), self.limit)
            .map_err(|error| self.failed(source, CompilerReason::Other(SharedError::new(error))))?;
        let log = format!("{stderr}{stdout}").trim().to_string();
        match status.code() {
            Some(0) => Ok(log),
            Some(1) => Err(self.rejected(source, log)),
            _ => Err(self.failed(
                source,
                CompilerReason::Crashed {
                    how: format!("the compiler {}", child::ending(status)),
                    log,
                },
            )),
        }
    }

    fn rejected(&self, source: &KernelSource, log: String) -> CompileError {
        CompileError::Rejected {
            compiler: self.name(),
            kernel: source.name.clone(),
            target: source.target.to_string(),
            log,
        }
    }

    fn kernels(
        &self,
        source: &KernelSource,
        arch: RocmArch,
        binary: &[u8],
    ) -> Result<Vec<KernelReport>, CompileError> {
        let bad = |reason| CompileError::BadBinary {
            compiler: self.name(),
            kernel: source.name.clone(),
            reason,
        };
        let found = read_code_object(binary)
            .map_err(|error| bad(BinaryReason::Unreadable(SharedError::new(error))))?;
        check_waves(arch, &found).map_err(bad)?;
        let reports = found
            .into_iter()
            .map(|kernel| kernel.report)
            .collect::<Vec<_>>();
        KernelReport::of_entries(source, reports).map_err(|error| bad(error.into()))
    }
}

#[doc(hidden)]
impl Compiler for RocmCompiler {
    fn backend(&self) -> &'static str {
        "rocm"
    }

    fn name(&self) -> String {
        self.tool.name()
    }

    fn fingerprint(&self, target: Target) -> String {
        match target {
            Target::Rocm(arch) => self.tool.fingerprint(arch),
            _ => format!("{} (not for {target})", self.name()),
        }
    }

    fn targets(&self) -> Vec<Target> {
        let knows =
            |target: &Target| matches!(target, Target::Rocm(arch) if self.tool.knows(*arch));
        Target::all().into_iter().filter(knows).collect()
    }

    fn compile(
        &self,
        source: &KernelSource,
        options: &CompileOptions,
    ) -> Result<Artifact, CompileError> {
        let arch = self.arch(source)?;
        let start = Instant::now();
        let (binary, log) = self.build(source, arch)?;
        let compile_ms = start.elapsed().as_secs_f64() * 1e3;
        let kernels = self.kernels(source, arch, &binary)?;
        refuse_scratch(source, options, &kernels)?;
        let report = ArtifactReport {
            compiler: self.name(),
            compile_ms,
            kernels,
            log,
        };
        Ok(Artifact { binary, report })
    }
}

fn no_compiler(refused: &[Refused]) -> CompileError {
    let tried = refused
        .iter()
        .map(|refused| format!("`{}` ({})", refused.place, refused.reason));
    CompileError::NoCompiler {
        backend: "rocm".to_string(),
        tried: tried.collect::<Vec<_>>().join(", "),
        advice: ADVICE.to_string(),
    }
}

/// Checks the wave size of kernels: a binary for the other size would return
/// wrong results, not an error.
fn check_waves(arch: RocmArch, kernels: &[CodeObjectKernel]) -> Result<(), BinaryReason> {
    let wrong = kernels
        .iter()
        .find(|kernel| kernel.wave.is_some_and(|wave| wave != arch.caps().wave));
    match wrong {
        None => Ok(()),
        Some(kernel) => Err(BinaryReason::Wave {
            symbol: kernel.report.symbol.clone(),
            found: kernel.wave.unwrap_or_default(),
            expected: arch.caps().wave,
            arch: arch.name,
        }),
    }
}

/// Refuses any scratch as a spill: on AMD it is memory either way.
fn refuse_scratch(
    source: &KernelSource,
    options: &CompileOptions,
    kernels: &[KernelReport],
) -> Result<(), CompileError> {
    let spilled = kernels
        .iter()
        .find(|kernel| kernel.stack_bytes.is_some_and(|bytes| bytes > 0));
    match spilled {
        Some(kernel) if !options.allow_spills => Err(CompileError::Spills {
            kernel: kernel.symbol.clone(),
            target: source.target.to_string(),
            registers: kernel.registers,
            bytes: kernel.stack_bytes.unwrap_or_default(),
        }),
        _ => Ok(()),
    }
}
