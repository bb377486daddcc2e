//! Does what was installed work on this machine?

use crate::Kind;
use moesaic_collectives::mpi;
use moesaic_cpu::CpuCompiler;
use moesaic_cuda::NvrtcCompiler;
use moesaic_kernel::{KernelSource, Language, Stem, Target};
use moesaic_rocm::{ClangFacts, ClangTool, RocmCompiler};
use moesaic_target::{CompileError, CompileOptions, Compiler};
use std::path::Path;
use std::process::Command;

const CUDA: (&str, &str) = (
    "cuda:sm_80",
    "extern \"C\" __global__ void probe(float* y) { y[threadIdx.x] = 1; }\n",
);

const HIP: (&str, &str) = (
    "rocm:gfx90a",
    "extern \"C\" __attribute__((global)) void probe(float* y) \
     { y[__builtin_amdgcn_workitem_id_x()] = 1; }\n",
);

const C: (&str, &str) = ("cpu:portable", "float probe(float x) { return x + 1; }\n");

/// A compiler or an MPI that works.
pub struct Working {
    /// What it calls itself.
    pub name: String,
    /// What it answers when asked, if it is a clang for AMD.
    pub clang: Option<ClangFacts>,
}

/// Compiles a trivial kernel with the compiler in `folder`, or starts two processes with
/// the MPI there; or says why it cannot be used.
pub fn check(kind: Kind, folder: &Path) -> Result<Working, String> {
    let words = |error: CompileError| error.to_string();
    match kind {
        Kind::Cuda => compile(
            &NvrtcCompiler::open(folder).map_err(words)?,
            Language::Cuda,
            CUDA,
        ),
        Kind::Rocm => {
            let compiler = RocmCompiler::open(ClangTool::zig(folder)).map_err(words)?;
            let working = compile(&compiler, Language::Hip, HIP)?;
            Ok(Working {
                clang: compiler.facts().cloned(),
                ..working
            })
        }
        Kind::C => compile(&CpuCompiler::at(&folder.join("zig")), Language::C, C),
        Kind::Mpi => mpi(folder),
    }
}

/// The library is opened, and the launcher starts programs that do nothing.
fn mpi(folder: &Path) -> Result<Working, String> {
    let options = mpi::Options {
        library: Some(folder.join("libmpi_abi.so.1")),
        ..mpi::Options::default()
    };
    let found = mpi::probe(&options).map_err(|error| error.to_string())?;
    let launcher = folder.join("mpiexec");
    let output = Command::new(&launcher).args(["-n", "2", "true"]).output();
    let output = output.map_err(|error| format!("{}: {error}", launcher.display()))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{}: {}", output.status, said.trim()));
    }
    Ok(Working {
        name: found.version,
        clang: None,
    })
}

fn compile(
    compiler: &dyn Compiler,
    language: Language,
    (target, text): (&str, &str),
) -> Result<Working, String> {
    let target: Target = target.parse().map_err(|error| format!("{error}"))?;
    let source = KernelSource {
        stem: Stem::Combine,
        name: "probe".to_string(),
        target,
        language,
        text: text.to_string(),
        config: String::new(),
        entries: Vec::new(),
    };
    compiler
        .compile(&source, &CompileOptions::default())
        .map(|_| Working {
            name: compiler.name(),
            clang: None,
        })
        .map_err(|error| error.to_string())
}
