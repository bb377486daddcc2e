//! NVRTC as the compiler of `sim:sm_*`.

use crate::artifact::Texts;
use crate::code::Kernel;
use crate::code::layout::SHARED_START;
use crate::text;
use moesaic_cuda::NvrtcCompiler;
use moesaic_kernel::{KernelSource, SimArch, Target};
use moesaic_target::{
    Artifact, ArtifactReport, BinaryReason, CompileError, CompileOptions, Compiler, KernelReport,
    ParamSlot, SharedError,
};
use std::time::Instant;

/// The compiler of `sim:sm_*`: NVRTC's PTX for the hardware target and its
/// source, in one artifact. The compiler decodes every instruction, so an
/// instruction that the machine lacks is an error of the compile.
#[derive(Debug)]
pub struct PtxCompiler {
    nvrtc: NvrtcCompiler,
    options: &'static [&'static str],
}

/// Directives that give the source line of each instruction.
const LINES: &str = "--generate-line-info";

/// Half the compile time, and slower code. (`max` inlines nothing, and the simulator has no calls.)
const FAST: &str = "--Ofast-compile=mid";

/// The first release that was seen to know [`FAST`].
const HAS_FAST: (u32, u32) = (13, 0);

impl PtxCompiler {
    /// Returns a compiler over this NVRTC.
    pub fn new(nvrtc: NvrtcCompiler) -> PtxCompiler {
        PtxCompiler {
            nvrtc,
            options: &[LINES],
        }
    }

    /// The same in a hurry: the code is hardly optimized, where NVRTC can be asked for that and no
    /// product of `wgmma` is in flight. For tests that compile many kernels and look at results
    /// alone.
    pub fn hurried(nvrtc: NvrtcCompiler) -> PtxCompiler {
        let options: &[&str] = if nvrtc.version() >= HAS_FAST {
            &[LINES, FAST]
        } else {
            &[LINES]
        };
        PtxCompiler { nvrtc, options }
    }

    /// Code that is hardly optimized copies the registers that `wgmma` still writes to.
    fn options_for(&self, source: &KernelSource) -> &'static [&'static str] {
        if source.text.contains("wgmma") {
            &[LINES]
        } else {
            self.options
        }
    }

    fn hardware(&self, source: &KernelSource) -> Result<KernelSource, CompileError> {
        let own = matches!(source.target, Target::Sim(SimArch::Cuda(_)));
        if own && self.targets().contains(&source.target) {
            Ok(KernelSource {
                target: source.target.hardware(),
                ..source.clone()
            })
        } else {
            Err(CompileError::UnsupportedTarget {
                compiler: self.name(),
                target: source.target.to_string(),
                advice: format!(
                    "it can compile CUDA C++ for: {}",
                    names(&self.targets()).join(", ")
                ),
            })
        }
    }

    fn reports(&self, source: &KernelSource, ptx: &str) -> Result<Vec<KernelReport>, CompileError> {
        let bad = |reason| CompileError::BadBinary {
            compiler: self.name(),
            kernel: source.name.clone(),
            reason,
        };
        let unreadable = |error| bad(BinaryReason::Unreadable(SharedError::new(error)));
        let module = text::parse(ptx).map_err(unreadable)?;
        let found = module.entries.iter().map(|entry| {
            let kernel = Kernel::decode(&module, entry, &[]);
            kernel.map(report).map_err(unreadable)
        });
        let found = found.collect::<Result<Vec<_>, _>>()?;
        KernelReport::of_entries(source, found).map_err(|error| bad(error.into()))
    }

    /// Refuses kernels that declare too much shared memory, as ptxas would: the
    /// simulator assembles nothing, so no assembler checks them.
    fn refuse_shared(
        &self,
        source: &KernelSource,
        kernels: &[KernelReport],
    ) -> Result<(), CompileError> {
        let declared = |kernel: &KernelReport| kernel.shared_bytes.unwrap_or(0);
        let Some(kernel) = kernels.iter().find(|k| declared(k) > DECLARED_SHARED) else {
            return Ok(());
        };
        Err(CompileError::Rejected {
            compiler: self.name(),
            kernel: source.name.clone(),
            target: source.target.to_string(),
            log: format!(
                "entry `{}` declares {} bytes of shared memory, {DECLARED_SHARED} are allowed",
                kernel.symbol,
                declared(kernel)
            ),
        })
    }
}

/// Shared memory that ptxas lets a kernel declare, in bytes (CUDA C++
/// Programming Guide, "Technical Specifications"). More must be dynamic.
const DECLARED_SHARED: u32 = 48 << 10;

fn names(targets: &[Target]) -> Vec<String> {
    targets.iter().map(Target::to_string).collect()
}

/// Returns the facts of a decoded kernel. An assembler decides registers,
/// spills and machine code, so they stay unknown.
fn report(kernel: Kernel) -> KernelReport {
    let params = kernel.params.iter().map(|param| ParamSlot {
        offset: param.offset,
        size: param.bytes,
    });
    KernelReport {
        symbol: kernel.name.clone(),
        stack_bytes: Some(kernel.local_bytes),
        shared_bytes: Some(kernel.static_shared - SHARED_START),
        max_threads: kernel.max_threads,
        params: params.collect(),
        ..KernelReport::default()
    }
}

#[doc(hidden)]
impl Compiler for PtxCompiler {
    fn backend(&self) -> &'static str {
        "sim"
    }

    fn name(&self) -> String {
        format!("{} (PTX)", self.nvrtc.name())
    }

    fn fingerprint(&self, target: Target) -> String {
        format!(
            "PTX, version 1; {} {}",
            self.nvrtc.fingerprint(target.hardware()),
            self.options.join(" ")
        )
    }

    fn targets(&self) -> Vec<Target> {
        let own = self.nvrtc.targets().into_iter();
        own.filter_map(Target::simulated).collect()
    }

    fn compile(
        &self,
        source: &KernelSource,
        _options: &CompileOptions,
    ) -> Result<Artifact, CompileError> {
        let hardware = self.hardware(source)?;
        let start = Instant::now();
        let ptx = self.nvrtc.ptx_with(&hardware, self.options_for(source))?;
        let compile_ms = start.elapsed().as_secs_f64() * 1e3;
        let kernels = self.reports(source, &ptx)?;
        self.refuse_shared(source, &kernels)?;
        let texts = Texts {
            ptx,
            source: source.text.clone(),
        };
        Ok(Artifact {
            binary: texts.pack(),
            report: ArtifactReport {
                compiler: self.name(),
                compile_ms,
                kernels,
                log: String::new(),
            },
        })
    }
}
