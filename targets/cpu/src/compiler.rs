//! The system C compiler as a [`Compiler`].

use crate::driver::{self, Driver, Form};
use crate::find::{self, Process};
use crate::{Identity, flags, report};
use moesaic_kernel::{CpuIsa, KernelSource, Target};
use moesaic_target::{
    Artifact, ArtifactReport, CompileError, CompileOptions, Compiler, CompilerReason, Scratch,
    c_compiler, script,
};
use std::path::Path;
use std::sync::OnceLock;
use std::time::Instant;

/// The C compiler of this machine. Creating one starts no process; the version
/// is asked for on first use, unless [`CpuCompiler::recall`] knew it.
#[derive(Debug)]
pub struct CpuCompiler {
    driver: Driver,
    version: OnceLock<String>,
    scripts: OnceLock<Option<String>>,
}

impl CpuCompiler {
    /// Finds a compiler: `MOESAIC_CC`, `CC` (either may hold arguments, as in
    /// `ccache gcc`), then `cc`, `gcc` and `clang` on `PATH`, then `fallback`,
    /// the compiler that `moesaic toolchain install c` registered (a `zig`
    /// binary, or anything that takes gcc's options).
    ///
    /// # Errors
    /// [`CompileError::NoCompiler`] lists what was tried.
    pub fn find(fallback: Option<&Path>) -> Result<CpuCompiler, CompileError> {
        find::find(&Process, fallback).map(CpuCompiler::from)
    }

    /// Finds a compiler for another machine, as Rust names it (`aarch64`):
    /// `MOESAIC_CC_AARCH64`, the GNU cross compiler on `PATH`, then `fallback`
    /// (a `zig` binary).
    ///
    /// # Errors
    /// [`CompileError::NoCompiler`] lists what was tried.
    pub fn find_for(arch: &str, fallback: Option<&Path>) -> Result<CpuCompiler, CompileError> {
        find::find_for(arch, &Process, fallback).map(CpuCompiler::from)
    }

    /// Uses this program without checking that it exists.
    pub fn at(program: &Path) -> CpuCompiler {
        let program = std::path::absolute(program).unwrap_or_else(|_| program.to_path_buf());
        CpuCompiler::from(Driver::new(program, Vec::new()))
    }

    /// Returns the program that this compiler runs.
    pub fn program(&self) -> &Path {
        self.driver.program()
    }

    /// Takes the version from an earlier process and returns true, if the
    /// program has not changed since. From then on, [`Compiler::compile`] alone
    /// runs the compiler.
    pub fn recall(&self, identity: &Identity) -> bool {
        let same = !self.is_launcher() && identity.is_current(self.program());
        same && self.version.set(identity.version.clone()).is_ok()
    }

    /// Returns the identity to remember for the next process. Runs the compiler
    /// once if its version is not known yet. The result is `None` if the
    /// compiler does not tell its version, or if it is a launcher such as
    /// `ccache gcc`, `/usr/lib/ccache/gcc` or a script, whose file does not
    /// change along with the compiler behind it.
    pub fn identity(&self) -> Option<Identity> {
        if self.is_launcher() || self.version() == UNKNOWN {
            return None;
        }
        Identity::new(self.program(), self.version().to_string())
    }

    fn is_launcher(&self) -> bool {
        !self.driver.leading_args().is_empty()
            || self.scripts().is_some()
            || script::is_link_to_launcher(self.program())
    }

    fn scripts(&self) -> Option<&str> {
        self.scripts
            .get_or_init(|| self.driver.scripts())
            .as_deref()
    }

    fn version(&self) -> &str {
        self.version
            .get_or_init(|| self.driver.version().unwrap_or_else(|| UNKNOWN.to_string()))
    }

    /// Compiles any C text; `symbols` are the functions it must export.
    pub(crate) fn compile_text(
        &self,
        kernel: &str,
        isa: CpuIsa,
        text: &str,
        symbols: &[&str],
    ) -> Result<Artifact, CompileError> {
        self.compile_form(kernel, isa, [text, ""], symbols, Form::Library)
    }

    /// Links the kernel with `main`, another C text, to a static program
    /// without a C library: each must define what the other lacks.
    ///
    /// # Errors
    /// As [`Compiler::compile`].
    pub fn compile_program(
        &self,
        source: &KernelSource,
        main: &str,
    ) -> Result<Artifact, CompileError> {
        let isa = self.supported(source.target)?;
        let texts = [source.text.as_str(), main];
        self.compile_form(&source.name, isa, texts, &symbols(source), Form::Program)
    }

    fn compile_form(
        &self,
        kernel: &str,
        isa: CpuIsa,
        texts: [&str; 2],
        symbols: &[&str],
        form: Form,
    ) -> Result<Artifact, CompileError> {
        let started = Instant::now();
        let (binary, log) = self.build(kernel, isa, texts, form)?;
        let kernels = report::kernels(&binary, symbols).map_err(|reason| {
            let (compiler, kernel) = (self.name(), kernel.to_string());
            CompileError::BadBinary {
                compiler,
                kernel,
                reason,
            }
        })?;
        let compile_ms = started.elapsed().as_secs_f64() * 1e3;
        let report = ArtifactReport {
            compiler: self.name(),
            compile_ms,
            kernels,
            log: c_compiler::trim(&log),
        };
        Ok(Artifact { binary, report })
    }

    fn build(
        &self,
        kernel: &str,
        isa: CpuIsa,
        [text, main]: [&str; 2],
        form: Form,
    ) -> Result<(Vec<u8>, String), CompileError> {
        let failed = |reason| {
            let (compiler, kernel) = (self.name(), kernel.to_string());
            CompileError::Failed {
                compiler,
                kernel,
                reason,
            }
        };
        let room = |attempted, error: std::io::Error| {
            failed(CompilerReason::NoFile {
                attempted,
                folder: std::env::temp_dir(),
                source: error.into(),
            })
        };
        let dir = Scratch::new();
        let dir = dir.map_err(|error| room("making a temporary directory", error))?;
        std::fs::write(dir.path().join(driver::SOURCE), text)
            .and_then(|()| std::fs::write(dir.path().join(driver::MAIN), main))
            .map_err(|error| room("writing the source", error))?;
        let log = self
            .driver
            .build(dir.path(), isa, form)
            .map_err(|failure| failure.into_error(&self.name(), kernel, isa))?;
        let binary = std::fs::read(dir.path().join(driver::BINARY))
            .map_err(|error| failed(CompilerReason::NoBinary(error.into())))?;
        Ok((binary, log))
    }

    fn supported(&self, target: Target) -> Result<CpuIsa, CompileError> {
        match target {
            Target::Cpu(isa) if self.targets().contains(&target) => Ok(isa),
            _ => Err(CompileError::UnsupportedTarget {
                compiler: self.name(),
                target: target.to_string(),
                advice: format!(
                    "it compiles for {}; `moesaic toolchain install c` adds the other CPUs",
                    self.targets()
                        .iter()
                        .map(Target::to_string)
                        .collect::<Vec<_>>()
                        .join(", ")
                ),
            }),
        }
    }
}

/// The version of a compiler that does not tell it; compiling will report why.
const UNKNOWN: &str = "unknown version";

impl From<Driver> for CpuCompiler {
    fn from(driver: Driver) -> CpuCompiler {
        CpuCompiler {
            driver,
            version: OnceLock::new(),
            scripts: OnceLock::new(),
        }
    }
}

#[doc(hidden)]
impl Compiler for CpuCompiler {
    fn backend(&self) -> &'static str {
        "cpu"
    }

    /// Returns `gcc 12.2.0`, or the program's path when it does not tell its
    /// version.
    fn name(&self) -> String {
        c_compiler::short_name(self.version()).unwrap_or_else(|| self.driver.spelling())
    }

    fn fingerprint(&self, target: Target) -> String {
        let Target::Cpu(isa) = target else {
            return format!("{} {target}", self.version());
        };
        let leading = self
            .driver
            .leading_args()
            .iter()
            .filter(|arg| !arg.contains('/'));
        let mut words = vec![format!("{};", self.version())];
        words.extend(self.scripts().map(str::to_string));
        words.extend(leading.cloned());
        words.extend(flags::compile_flags(isa).iter().map(ToString::to_string));
        words.push(format!("{}-{}", flags::arch_of(isa), std::env::consts::OS));
        words.join(" ")
    }

    fn targets(&self) -> Vec<Target> {
        let of = |arch| flags::isas_of(arch).iter().copied();
        let mut isas: Vec<CpuIsa> = match self.driver.foreign_machine() {
            _ if self.driver.is_universal() => of("x86_64").chain(of("aarch64")).collect(),
            // The portable set is for the compiling machine.
            Some(arch) => of(arch).filter(|isa| *isa != CpuIsa::Portable).collect(),
            None => of(std::env::consts::ARCH).collect(),
        };
        isas.sort();
        isas.dedup();
        isas.into_iter().map(Target::Cpu).collect()
    }

    fn compile(&self, source: &KernelSource, _: &CompileOptions) -> Result<Artifact, CompileError> {
        let isa = self.supported(source.target)?;
        self.compile_text(&source.name, isa, &source.text, &symbols(source))
    }
}

fn symbols(source: &KernelSource) -> Vec<&str> {
    let entries = source.entries.iter();
    entries.map(|entry| entry.symbol.as_str()).collect()
}
