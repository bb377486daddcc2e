//! The host's C++ compiler as a [`Compiler`].

use crate::image;
use crate::tool::{self, BINARY, Failure, SOURCE, Tool};
use moesaic_kernel::{KernelSource, SimArch, Target};
use moesaic_target::{
    Artifact, ArtifactReport, BinaryReason, CompileError, CompileOptions, Compiler, CompilerReason,
    Scratch, SharedError, c_compiler,
};
use std::path::Path;
use std::sync::OnceLock;
use std::time::Instant;

/// Flags of every compile. Every flag can change the machine code, so all of
/// them are in the fingerprint.
///
/// The instrumentation of the sanitizers stays, but their libraries do not: the
/// text defines the functions that they call at each access and at each defect.
/// Contraction is off, so `a * b + c` is fused where the text says so alone.
/// `-O1` compiles in two thirds of the time of `-O2` and runs a sixth slower; a
/// tested kernel runs for less time than it compiles.
const FLAGS: [&str; 20] = [
    "-std=c++17",
    "-O1",
    "-g1",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-strict-aliasing",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-fno-stack-protector",
    "-fsanitize=thread",
    "-fsanitize=bounds,integer-divide-by-zero,alignment",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-pragmas",
    "-Wno-unused-function",
    "-Wno-psabi",
    "-Wno-unused-const-variable",
];

/// Refuses frames of more than a quarter of a fiber's stack.
const GCC_FRAMES: [&str; 1] = ["-Werror=frame-larger-than=16384"];
const CLANG_FRAMES: [&str; 2] = ["-Wframe-larger-than=16384", "-Werror=frame-larger-than"];

/// Flags for CPUs with AVX2, so that `fused` is one instruction. No vector is
/// wider than the accesses that are announced.
const X86: [&str; 4] = ["-mavx2", "-mfma", "-mf16c", "-mprefer-vector-width=128"];

/// The compiler of HIP text to a shared object of this machine that announces
/// every access of memory. Creating one starts no process; the version is asked
/// for on first use.
#[derive(Debug)]
pub struct FiberCompiler {
    tool: Tool,
    version: OnceLock<String>,
}

impl FiberCompiler {
    /// Finds a compiler: `MOESAIC_CXX`, `CXX` (either may hold arguments),
    /// then `c++`, `g++`, `clang++`, `cc`, `gcc` and `clang` on `PATH`, then
    /// `fallback`, the `zig` that `moesaic toolchain install c` registered.
    ///
    /// # Errors
    /// [`CompileError::NoCompiler`] lists what was tried.
    pub fn find(fallback: Option<&Path>) -> Result<FiberCompiler, CompileError> {
        tool::find(|name| std::env::var_os(name), fallback).map(FiberCompiler::of)
    }

    /// Uses this program without checking that it exists.
    pub fn at(program: &Path) -> FiberCompiler {
        let program = std::path::absolute(program).unwrap_or_else(|_| program.to_path_buf());
        FiberCompiler::of(Tool::at(&program, &[]))
    }

    /// Returns the program that this compiler runs.
    pub fn program(&self) -> &Path {
        self.tool.program()
    }

    fn of(tool: Tool) -> FiberCompiler {
        FiberCompiler {
            tool,
            version: OnceLock::new(),
        }
    }

    fn version(&self) -> &str {
        self.version
            .get_or_init(|| self.tool.version().unwrap_or_else(|| UNKNOWN.to_string()))
    }

    fn failed(&self, source: &KernelSource, reason: CompilerReason) -> CompileError {
        CompileError::Failed {
            compiler: self.name(),
            kernel: source.name.clone(),
            reason,
        }
    }

    fn build(&self, source: &KernelSource) -> Result<(Vec<u8>, String), CompileError> {
        let room = |attempted, error: std::io::Error| {
            let reason = CompilerReason::NoFile {
                attempted,
                folder: std::env::temp_dir(),
                source: error.into(),
            };
            self.failed(source, reason)
        };
        let dir = Scratch::new();
        let dir = dir.map_err(|error| room("making a temporary directory", error))?;
        std::fs::write(dir.path().join(SOURCE), &source.text)
            .map_err(|error| room("writing the source", error))?;
        let log = self.tool.build(dir.path(), &flags(self.version()));
        let log = log.map_err(|failure| self.refusal(source, failure))?;
        let binary = std::fs::read(dir.path().join(BINARY))
            .map_err(|error| self.failed(source, CompilerReason::NoBinary(error.into())))?;
        Ok((binary, log))
    }

    fn refusal(&self, source: &KernelSource, failure: Failure) -> CompileError {
        use std::os::unix::process::ExitStatusExt;
        let (status, log) = match failure {
            Failure::NotRun(error) => return self.failed(source, error.into()),
            Failure::Exited(status, log) => (status, c_compiler::trim(&log)),
        };
        let says = |words: &[&str]| words.iter().any(|word| log.contains(word));
        if let Some(signal) = status.signal() {
            let how = format!("it was killed by signal {signal}");
            return self.failed(source, CompilerReason::Crashed { how, log });
        }
        if says(&["No space left", "annot allocate memory"]) {
            return self.failed(source, CompilerReason::NoRoom { log });
        }
        if says(&["internal compiler error"]) {
            let how = "it crashed".to_string();
            return self.failed(source, CompilerReason::Crashed { how, log });
        }
        if says(&[
            "cannot execute",
            "error trying to exec",
            "unrecognized command",
            "unknown argument",
        ]) {
            let advice = format!("use g++ 9 or clang++ 14, or newer ones\n{log}");
            return CompileError::UnsupportedTarget {
                compiler: self.name(),
                target: source.target.to_string(),
                advice,
            };
        }
        CompileError::Rejected {
            compiler: self.name(),
            kernel: source.name.clone(),
            target: source.target.to_string(),
            log,
        }
    }
}

/// The version of a compiler that does not tell it; compiling will report why.
const UNKNOWN: &str = "unknown version";

fn flags(version: &str) -> Vec<&'static str> {
    let mut flags = FLAGS.to_vec();
    if version.contains("clang") || version.starts_with("zig") {
        flags.extend(CLANG_FRAMES)
    } else {
        flags.extend(GCC_FRAMES)
    }
    #[cfg(target_arch = "x86_64")]
    if std::is_x86_feature_detected!("avx2")
        && std::is_x86_feature_detected!("fma")
        && std::is_x86_feature_detected!("f16c")
    {
        flags.extend(X86);
    }
    flags
}

#[doc(hidden)]
impl Compiler for FiberCompiler {
    fn backend(&self) -> &'static str {
        "sim"
    }

    /// Returns `gcc 12.2.0`, or the program's path when it does not tell its
    /// version.
    fn name(&self) -> String {
        c_compiler::short_name(self.version())
            .unwrap_or_else(|| self.program().display().to_string())
    }

    fn fingerprint(&self, _: Target) -> String {
        let mut words = vec![format!("fibers {};", self.version())];
        words.extend(self.tool.scripts());
        words.extend(self.tool.leading().map(str::to_string));
        words.extend(flags(self.version()).iter().map(ToString::to_string));
        words.push(format!(
            "{}-{}",
            std::env::consts::ARCH,
            std::env::consts::OS
        ));
        words.join(" ")
    }

    /// Returns every `sim:gfx*`.
    fn targets(&self) -> Vec<Target> {
        let all = Target::all().into_iter();
        all.filter(|target| matches!(target, Target::Sim(SimArch::Rocm(_))))
            .collect()
    }

    fn compile(&self, source: &KernelSource, _: &CompileOptions) -> Result<Artifact, CompileError> {
        if !self.targets().contains(&source.target) {
            return Err(CompileError::UnsupportedTarget {
                compiler: self.name(),
                target: source.target.to_string(),
                advice: "it compiles the simulated AMD GPUs: sim:gfx942 and its like".to_string(),
            });
        }
        let started = Instant::now();
        let (binary, log) = self.build(source)?;
        let kernels = image::kernels(&binary, &source.entries);
        let kernels = kernels.map_err(|error| CompileError::BadBinary {
            compiler: self.name(),
            kernel: source.name.clone(),
            reason: BinaryReason::Unreadable(SharedError::new(error)),
        })?;
        let report = ArtifactReport {
            compiler: self.name(),
            compile_ms: started.elapsed().as_secs_f64() * 1e3,
            kernels,
            log: c_compiler::trim(&log),
        };
        Ok(Artifact { binary, report })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_flag_breaks_float_rules() {
        let flags = flags("zig 0.17.0").join(" ");
        for bad in ["native", "fast-math", "associative", "contract=fast"] {
            assert!(!flags.contains(bad), "{flags}");
        }
    }
}
