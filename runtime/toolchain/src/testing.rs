//! Tools that tests need. A test without its tool fails with one line that names the package to
//! install.

use crate::{Registry, ToolKind, install};
use moesaic_kernel::{SimArch, Target};
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A tool that is not part of the repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExternalTool {
    /// NVIDIA's run-time compiler.
    Nvrtc,
    /// A clang for AMD GPUs.
    Clang,
    /// The C compiler of this machine.
    C,
    /// The C++ compiler of this machine.
    Cxx,
    /// QEMU's emulator of aarch64, and a compiler for it.
    Aarch64,
    /// MPICH with the standard ABI, and its launcher.
    Mpi,
    /// The machine's Open MPI.
    OpenMpi,
}

impl ExternalTool {
    /// Returns the tool that kernels for a target need in a test.
    pub fn of(target: Target) -> ExternalTool {
        match target {
            Target::Cuda(_) | Target::Sim(SimArch::Cuda(_)) => ExternalTool::Nvrtc,
            Target::Rocm(_) => ExternalTool::Clang,
            Target::Sim(SimArch::Rocm(_)) => ExternalTool::Cxx,
            Target::Sim(SimArch::Cpu(isa)) if isa.name().contains("neon") => ExternalTool::Aarch64,
            Target::Cpu(_) | Target::Sim(SimArch::Cpu(_)) => ExternalTool::C,
        }
    }

    fn advice(self) -> &'static str {
        match self {
            ExternalTool::Nvrtc => "NVRTC: cargo run -p moesaic-cli -- toolchain install cuda",
            ExternalTool::Clang => {
                "clang for AMD GPUs: cargo run -p moesaic-cli -- toolchain install rocm"
            }
            ExternalTool::C => "a C compiler: apt-get install gcc",
            ExternalTool::Cxx => "a C++ compiler: apt-get install g++",
            ExternalTool::Aarch64 => {
                "an emulator of aarch64: apt-get install qemu-user-static gcc-aarch64-linux-gnu"
            }
            ExternalTool::Mpi => "MPICH: cargo run -p moesaic-cli -- toolchain install mpi",
            ExternalTool::OpenMpi => "Open MPI: apt-get install openmpi-bin",
        }
    }
}

/// Returns the tool, or ends the test.
///
/// # Panics
/// With one line: the package to install, and why an existing tool is not enough.
#[track_caller]
pub fn needed<T>(tool: ExternalTool, found: Result<T, impl Display>) -> T {
    found.unwrap_or_else(|error| panic!("{}", lacking(tool, &error.to_string())))
}

fn lacking(tool: ExternalTool, error: &str) -> String {
    let why = error.lines().next().unwrap_or_default();
    let advice = tool.advice();
    format!("this test needs {advice} (or `cargo xtask test`, which installs all); {why}")
}

/// Returns a registry in which a kind is installed, by pip if necessary.
///
/// # Panics
/// The same as [`needed`].
#[track_caller]
pub fn installed(kind: ToolKind) -> Registry {
    let tool = match kind {
        ToolKind::Cuda => ExternalTool::Nvrtc,
        ToolKind::Rocm => ExternalTool::Clang,
        ToolKind::C => ExternalTool::C,
        ToolKind::Mpi => ExternalTool::Mpi,
    };
    let mut registry = needed(tool, Registry::open());
    needed(tool, install(&mut registry, &[kind], &mut |_| {}));
    registry
}

/// Returns NVRTC.
///
/// # Panics
/// The same as [`needed`].
#[track_caller]
pub fn nvrtc() -> moesaic_cuda::NvrtcCompiler {
    needed(
        ExternalTool::Nvrtc,
        crate::nvrtc(&installed(ToolKind::Cuda)),
    )
}

/// Returns the compiler for AMD GPUs.
///
/// # Panics
/// The same as [`needed`].
#[track_caller]
pub fn rocm() -> moesaic_rocm::RocmCompiler {
    needed(ExternalTool::Clang, crate::rocm(&installed(ToolKind::Rocm)))
}

/// An MPI: the command that starts programs under it, and its library.
pub struct MpiLauncher {
    /// Its `mpiexec`.
    pub program: PathBuf,
    /// The options before the number of ranks.
    pub options: Vec<String>,
    /// The library that programs open, for `MOESAIC_MPI`.
    pub library: String,
}

/// Returns MPICH 5 as `moesaic toolchain install mpi` installs it, with the standard ABI.
///
/// # Panics
/// The same as [`needed`].
#[track_caller]
pub fn mpich() -> MpiLauncher {
    let found = crate::mpi(&installed(ToolKind::Mpi));
    let found = needed(ExternalTool::Mpi, found.ok_or("it is not registered"));
    MpiLauncher {
        program: found.launcher,
        options: Vec::new(),
        library: found.library.display().to_string(),
    }
}

/// Returns the machine's Open MPI, with its own ABI.
///
/// # Panics
/// The same as [`needed`].
#[track_caller]
pub fn open_mpi() -> MpiLauncher {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let programs = std::env::split_paths(&path).map(|folder| folder.join("mpirun.openmpi"));
    let program = programs.into_iter().find(|program| program.is_file());
    let words = [
        "--allow-run-as-root",
        "--oversubscribe",
        "--quiet",
        "--mca",
        "btl_base_warn_component_unused",
        "0",
    ];
    MpiLauncher {
        program: needed(
            ExternalTool::OpenMpi,
            program.ok_or("mpirun.openmpi is not on PATH"),
        ),
        options: words.map(str::to_string).to_vec(),
        library: "libmpi.so.40".to_string(),
    }
}

impl MpiLauncher {
    /// Returns a command that runs a program on `ranks` ranks, ended after three minutes.
    pub fn command(&self, ranks: usize, program: &Path) -> Command {
        self.command_within(180, ranks, program)
    }

    /// Returns a command as `command` does, ended after `seconds`.
    pub fn command_within(&self, seconds: u32, ranks: usize, program: &Path) -> Command {
        let mut command = Command::new("timeout");
        command
            .args(["--signal=KILL", &seconds.to_string()])
            .arg(&self.program)
            .args(&self.options)
            .args(["-n", &ranks.to_string()])
            .arg(program)
            .env("MOESAIC_MPI", &self.library);
        command
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_tool_is_one_line() {
        let line = lacking(
            ExternalTool::Aarch64,
            "no emulator was found\ntried: nothing",
        );
        assert_eq!(
            line,
            "this test needs an emulator of aarch64: apt-get install qemu-user-static \
             gcc-aarch64-linux-gnu (or `cargo xtask test`, which installs all); \
             no emulator was found"
        );
        for target in Target::all() {
            assert!(
                ExternalTool::of(target).advice().contains("install"),
                "{target}"
            );
        }
    }

    #[test]
    #[should_panic(expected = "this test needs NVRTC: cargo run")]
    fn a_missing_tool_is_no_success() {
        needed::<()>(ExternalTool::Nvrtc, Err("it is not here"));
    }
}
