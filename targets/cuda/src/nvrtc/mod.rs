//! Compiles CUDA C++ text to a CUBIN.

mod find;
mod log;
mod table;

use crate::cubin::read_cubin;
use moesaic_dl::Attempt;
use moesaic_kernel::{CudaArch, KernelSource, Language, Target};
use moesaic_target::{
    Artifact, ArtifactReport, BinaryReason, CompileError, CompileOptions, Compiler, CompilerReason,
    KernelReport, SharedError,
};
use std::fmt;
use std::path::Path;
use std::time::Instant;
use table::{Compiled, Nvrtc, NvrtcError, NvrtcFailure};

/// Flags of every compile. Fast math is off; only the fusion of a product and a
/// sum into one rounding, NVRTC's default, stays on. The assembler is asked to
/// report spills, which appear nowhere else.
const FLAGS: [&str; 3] = [
    "--std=c++17",
    "--ptxas-options=-v",
    "--ptxas-options=-warn-spills",
];

/// The first release that keeps a cache of its own. The cache is turned off,
/// because this program's own cache makes it redundant and nothing may be
/// written outside its folder.
const HAS_CACHE: (u32, u32) = (12, 9);

const ADVICE: &str = "run `moesaic toolchain install cuda`, \
    or set MOESAIC_NVRTC to a folder that holds libnvrtc.so";

/// NVRTC as a [`Compiler`]: backend `cuda`, CUDA C++ to a CUBIN, never PTX.
///
/// Needs no driver and no toolkit. Compiles run in parallel when called from
/// several threads.
pub struct NvrtcCompiler {
    nvrtc: Nvrtc,
    version: (u32, u32),
    targets: Vec<Target>,
}

impl NvrtcCompiler {
    /// Finds NVRTC: in `MOESAIC_NVRTC` alone if that is set; else in
    /// `registered` (a folder, or the library itself), in `CUDA_HOME` and
    /// `CUDA_PATH`, and by the system's loader.
    ///
    /// # Errors
    /// [`CompileError::NoCompiler`] lists what was tried.
    pub fn find(registered: Option<&Path>) -> Result<NvrtcCompiler, CompileError> {
        let places = find::places(registered, |name| std::env::var_os(name));
        let nvrtc = find::open_first(&places).map_err(|attempts| no_compiler(&attempts))?;
        NvrtcCompiler::new(nvrtc)
    }

    /// Opens the NVRTC at `path`: a folder, or the library itself.
    ///
    /// # Errors
    /// [`CompileError::NoCompiler`] says why it cannot be used.
    pub fn open(path: &Path) -> Result<NvrtcCompiler, CompileError> {
        let place = find::NvrtcPlace::Path(path.to_path_buf());
        let nvrtc = find::open_first(&[place]).map_err(|attempts| no_compiler(&attempts))?;
        NvrtcCompiler::new(nvrtc)
    }

    /// Returns the name or path by which the library was loaded.
    pub fn library(&self) -> &str {
        self.nvrtc.library()
    }

    /// Returns the major and minor version.
    pub fn version(&self) -> (u32, u32) {
        self.version
    }

    /// Compiles to PTX, for reading and for the simulator.
    ///
    /// # Errors
    /// As [`Compiler::compile`]; spills are not known at this level.
    pub fn ptx(&self, source: &KernelSource) -> Result<String, CompileError> {
        self.ptx_with(source, &[])
    }

    /// Compiles as [`NvrtcCompiler::ptx`] does, with these options of NVRTC behind the usual ones.
    ///
    /// # Errors
    /// As [`NvrtcCompiler::ptx`].
    pub fn ptx_with(&self, source: &KernelSource, more: &[&str]) -> Result<String, CompileError> {
        let arch = self.arch(source)?.to_string();
        // A virtual architecture is not assembled, which gives the same PTX in
        // half the time.
        let mut flags = self.flags(arch.replace("sm_", "compute_"));
        flags.retain(|flag| !flag.starts_with("--ptxas"));
        flags.extend(more.iter().map(ToString::to_string));
        self.nvrtc
            .ptx(&source.file_name(), &source.text, &flags)
            .map_err(|failure| self.error(source, failure))
    }

    fn new(nvrtc: Nvrtc) -> Result<NvrtcCompiler, CompileError> {
        let refuse = |error: NvrtcError| {
            no_compiler(&[Attempt {
                name: nvrtc.library().to_string(),
                reason: error.to_string(),
            }])
        };
        let version = nvrtc.version().map_err(refuse)?;
        let archs = nvrtc.archs().map_err(refuse)?;
        let can = |target: &Target| matches!(target, Target::Cuda(arch) if accepts(*arch, &archs, version));
        let targets = Target::all().into_iter().filter(can).collect();
        Ok(NvrtcCompiler {
            nvrtc,
            version,
            targets,
        })
    }

    fn arch(&self, source: &KernelSource) -> Result<CudaArch, CompileError> {
        match source.target {
            Target::Cuda(arch)
                if source.language == Language::Cuda && self.targets.contains(&source.target) =>
            {
                Ok(arch)
            }
            _ => Err(self.unsupported(source.target)),
        }
    }

    fn unsupported(&self, target: Target) -> CompileError {
        let names = self
            .targets
            .iter()
            .map(Target::to_string)
            .collect::<Vec<_>>();
        CompileError::UnsupportedTarget {
            compiler: self.name(),
            target: target.to_string(),
            advice: format!("it can compile CUDA C++ for: {}", names.join(", ")),
        }
    }

    /// Returns the flags for an architecture. Machine code needs a real one
    /// (`sm_`): a virtual one (`compute_`) succeeds with no bytes.
    fn flags(&self, arch: impl fmt::Display) -> Vec<String> {
        let cache = (self.version >= HAS_CACHE).then_some("--no-cache");
        std::iter::once(format!("--gpu-architecture={arch}"))
            .chain(FLAGS.into_iter().chain(cache).map(str::to_string))
            .collect()
    }

    fn error(&self, source: &KernelSource, failure: NvrtcFailure) -> CompileError {
        let (compiler, kernel) = (self.name(), source.name.clone());
        match failure {
            NvrtcFailure::Rejected(log) => CompileError::Rejected {
                compiler,
                kernel,
                target: source.target.to_string(),
                log,
            },
            NvrtcFailure::Broken(reason) => CompileError::Failed {
                compiler,
                kernel,
                reason: CompilerReason::Other(SharedError::new(reason)),
            },
        }
    }

    /// Returns the report on the entries of `source`, or on every kernel if it
    /// has none.
    fn kernels(
        &self,
        source: &KernelSource,
        compiled: &Compiled,
    ) -> Result<Vec<KernelReport>, CompileError> {
        let bad = |reason| CompileError::BadBinary {
            compiler: self.name(),
            kernel: source.name.clone(),
            reason,
        };
        let found = read_cubin(&compiled.cubin)
            .map_err(|error| bad(BinaryReason::Unreadable(SharedError::new(error))))?;
        let mut kernels =
            KernelReport::of_entries(source, found).map_err(|error| bad(error.into()))?;
        let spills = log::spills(&compiled.log);
        for kernel in &mut kernels {
            let own = spills.iter().find(|spill| spill.function == kernel.symbol);
            kernel.spill_bytes = own.map(|spill| spill.bytes);
        }
        Ok(kernels)
    }
}

impl fmt::Debug for NvrtcCompiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NvrtcCompiler({} in {})", self.name(), self.library())
    }
}

#[doc(hidden)]
impl Compiler for NvrtcCompiler {
    fn backend(&self) -> &'static str {
        "cuda"
    }

    fn name(&self) -> String {
        format!("NVRTC {}.{}", self.version.0, self.version.1)
    }

    fn fingerprint(&self, target: Target) -> String {
        match target {
            Target::Cuda(arch) => format!("{} {}", self.name(), self.flags(arch).join(" ")),
            _ => format!("{} (not for {target})", self.name()),
        }
    }

    fn targets(&self) -> Vec<Target> {
        self.targets.clone()
    }

    fn compile(
        &self,
        source: &KernelSource,
        options: &CompileOptions,
    ) -> Result<Artifact, CompileError> {
        let arch = self.arch(source)?;
        let start = Instant::now();
        let compiled = self
            .nvrtc
            .compile(&source.file_name(), &source.text, &self.flags(arch))
            .map_err(|failure| self.error(source, failure))?;
        let compile_ms = start.elapsed().as_secs_f64() * 1e3;
        let kernels = self.kernels(source, &compiled)?;
        refuse_spills(source, options, &compiled.log, &kernels)?;
        refuse_losses(source, options, &compiled.log)?;
        let log = log::worth_reading(&compiled.log);
        let report = ArtifactReport {
            compiler: self.name(),
            compile_ms,
            kernels,
            log,
        };
        Ok(Artifact {
            binary: compiled.cubin,
            report,
        })
    }
}

fn no_compiler(attempts: &[Attempt]) -> CompileError {
    CompileError::NoCompiler {
        backend: "cuda".to_string(),
        tried: attempts
            .iter()
            .map(Attempt::to_string)
            .collect::<Vec<_>>()
            .join(", "),
        advice: ADVICE.to_string(),
    }
}

/// Returns true if NVRTC takes `arch`. Its list has no suffixed names; suffix `f` came with release
/// 12.9.
fn accepts(arch: CudaArch, archs: &[u16], version: (u32, u32)) -> bool {
    let suffix = arch.suffix != Some('f') || version >= (12, 9);
    suffix && arch.is_known() && archs.contains(&arch.capability)
}

fn refuse_spills(
    source: &KernelSource,
    options: &CompileOptions,
    log: &str,
    kernels: &[KernelReport],
) -> Result<(), CompileError> {
    let spill = log::spills(log).into_iter().find(|spill| spill.bytes > 0);
    let registers = |function: &str| kernels.iter().find(|k| k.symbol == function)?.registers;
    match spill {
        Some(spill) if !options.allow_spills => Err(CompileError::Spills {
            registers: registers(&spill.function),
            kernel: spill.function,
            target: source.target.to_string(),
            bytes: spill.bytes,
        }),
        _ => Ok(()),
    }
}

fn refuse_losses(
    source: &KernelSource,
    options: &CompileOptions,
    log: &str,
) -> Result<(), CompileError> {
    match log::performance_loss(log) {
        Some(reason) if !options.allow_performance_loss => Err(CompileError::PerformanceLoss {
            kernel: source.name.clone(),
            target: source.target.to_string(),
            reason,
        }),
        _ => Ok(()),
    }
}
