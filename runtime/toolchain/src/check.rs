//! Tests whether an installed tool works on this machine.

use crate::ToolKind;
use moesaic_collectives::mpi;
use moesaic_cpu::CpuCompiler;
use moesaic_cuda::NvrtcCompiler;
use moesaic_kernel::{KernelSource, Language, Stem, Target};
use moesaic_rocm::{ClangFacts, ClangTool, RocmCompiler};
use moesaic_target::{CompileError, CompileOptions, Compiler};
use std::io::{Read, Seek};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

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
    /// The name it reports.
    pub name: String,
    /// The facts it reports, if it is a clang for AMD.
    pub clang: Option<ClangFacts>,
}

/// Compiles a trivial kernel with the compiler in `folder`, or starts two processes with the MPI
/// there. The error states why it cannot be used.
pub(crate) fn check(kind: ToolKind, folder: &Path) -> Result<Working, String> {
    let words = |error: CompileError| error.to_string();
    match kind {
        ToolKind::Cuda => compile(
            &NvrtcCompiler::open(folder).map_err(words)?,
            Language::Cuda,
            CUDA,
        ),
        ToolKind::Rocm => {
            let compiler = RocmCompiler::open(ClangTool::zig(folder)).map_err(words)?;
            let working = compile(&compiler, Language::Hip, HIP)?;
            Ok(Working {
                clang: compiler.facts().cloned(),
                ..working
            })
        }
        ToolKind::C => compile(&CpuCompiler::at(&folder.join("zig")), Language::C, C),
        ToolKind::Mpi => mpi(folder),
    }
}

/// Opens the library, and lets the launcher start programs that do nothing.
fn mpi(folder: &Path) -> Result<Working, String> {
    let options = mpi::MpiOptions {
        library: Some(folder.join("libmpi_abi.so.1")),
        ..mpi::MpiOptions::default()
    };
    let found = mpi::probe(&options).map_err(|error| error.to_string())?;
    let launcher = folder.join("mpiexec");
    let mut command = Command::new(&launcher);
    // Inside a cluster's job MPICH would start the two through the job's own launcher, perhaps on
    // other nodes. `fork` starts them here.
    command
        .args(["-n", "2", "true"])
        .env("HYDRA_LAUNCHER", "fork");
    finish(command, PATIENCE).map_err(|error| format!("{}: {error}", launcher.display()))?;
    Ok(Working {
        name: found.version,
        clang: None,
    })
}

/// The time limit of a launcher for programs that do nothing.
const PATIENCE: Duration = Duration::from_secs(60);

/// Runs a command that must succeed in time. Its output goes to a file, because a pipe that its
/// children hold open could never be read to the end.
fn finish(mut command: Command, patience: Duration) -> Result<(), String> {
    let words = |error: std::io::Error| error.to_string();
    let mut said = tempfile::tempfile().map_err(words)?;
    command
        .stdin(Stdio::null())
        .stdout(said.try_clone().map_err(words)?)
        .stderr(said.try_clone().map_err(words)?);
    let mut child = command.spawn().map_err(words)?;
    let start = Instant::now();
    let status = loop {
        match child.try_wait().map_err(words)? {
            Some(status) => break status,
            None if start.elapsed() < patience => std::thread::sleep(Duration::from_millis(5)),
            None => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("not finished after {} s", patience.as_secs()));
            }
        }
    };
    if status.success() {
        return Ok(());
    }
    let mut text = Vec::new();
    let read = said.rewind().and_then(|()| said.read_to_end(&mut text));
    read.map_err(words)?;
    let text = String::from_utf8_lossy(&text);
    Err(format!("{status}: {}", text.trim()))
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

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_launcher_that_hangs_is_ended() {
        let error = finish(shell("exec sleep 600"), Duration::ZERO).unwrap_err();
        assert_eq!(error, "not finished after 0 s");
        assert_eq!(finish(shell("true"), PATIENCE), Ok(()));
        let error = finish(shell("echo out; echo no >&2; exit 3"), PATIENCE).unwrap_err();
        assert_eq!(error, "exit status: 3: out\nno");
    }
}
