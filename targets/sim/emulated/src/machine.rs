//! The host of a program: an emulator of its CPU, or this CPU.

use moesaic_cpu::host_runs;
use moesaic_kernel::{CpuIsa, Target};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The emulators that are looked for on `PATH`.
const QEMU: [&str; 2] = ["qemu-aarch64-static", "qemu-aarch64"];

/// The reason there is no CPU for an instruction set.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum HostError {
    #[error("`{}` is not emulated", Target::Cpu(*.0))]
    NotEmulated(CpuIsa),
    #[error(
        "`sim:amx` runs all but the tiles of a program on this CPU itself, on Linux with AVX-512\n\
         {reason}"
    )]
    OwnCpu { reason: &'static str },
    #[error("MOESAIC_QEMU={} is no program", .0.display())]
    NoProgram(PathBuf),
    #[error(
        "no emulator of aarch64 was found\ntried: MOESAIC_QEMU (not set), {} (not on PATH)\n\
         install Debian's qemu-user-static, or set MOESAIC_QEMU to a qemu-aarch64",
        QEMU.join(", ")
    )]
    NoEmulator,
}

/// A CPU that runs programs of an instruction set.
#[derive(Debug)]
pub(crate) enum ProgramHost {
    /// QEMU, as this CPU of aarch64.
    Qemu(PathBuf, &'static str),
    /// This CPU; a program handles the instructions that it lacks.
    Own,
}

impl ProgramHost {
    /// Returns the machine for an instruction set.
    ///
    /// # Errors
    /// [`HostError`] has the missing part and the remedy.
    pub(crate) fn find(isa: CpuIsa) -> Result<ProgramHost, HostError> {
        match isa {
            CpuIsa::Neon | CpuIsa::NeonBf16 => Ok(ProgramHost::Qemu(find_qemu()?, cpu(isa))),
            CpuIsa::Amx => own().map(|()| ProgramHost::Own),
            _ => Err(HostError::NotEmulated(isa)),
        }
    }

    /// Returns the command that starts `program`.
    pub(crate) fn command(&self, program: &Path) -> Command {
        match self {
            ProgramHost::Qemu(qemu, cpu) => {
                let mut command = Command::new(qemu);
                command.args(["-cpu", cpu]).arg(program);
                command
            }
            ProgramHost::Own => Command::new(program),
        }
    }

    /// Returns a name for messages: `aarch64 under qemu-aarch64-static`.
    pub(crate) fn name(&self) -> String {
        match self {
            ProgramHost::Qemu(qemu, _) => {
                let program = qemu.file_name().unwrap_or(qemu.as_os_str());
                format!("aarch64 under {}", program.to_string_lossy())
            }
            ProgramHost::Own => "this CPU with emulated tiles".to_string(),
        }
    }
}

/// Checks that this machine runs all of a program but its tiles, and ends each
/// tile instruction with a signal. Where Linux has enabled tiles some of them
/// work, and their effects would escape the emulation.
fn own() -> Result<(), HostError> {
    let reason = if !cfg!(target_os = "linux") {
        "this is not Linux"
    } else if !host_runs(CpuIsa::Avx512Bf16) {
        "this CPU does not run `cpu:avx512bf16`"
    } else if has_tiles() {
        "this CPU has tiles: use `cpu:amx`"
    } else {
        return Ok(());
    };
    Err(HostError::OwnCpu { reason })
}

/// Returns true if the system keeps tiles for threads. Call it only on CPUs
/// with AVX-512, which have the instruction that tells.
#[cfg(target_arch = "x86_64")]
fn has_tiles() -> bool {
    const TILES: u64 = 0b11 << 17;
    #[target_feature(enable = "xsave")]
    fn kept() -> u64 {
        // SAFETY: register 0 is there where the instruction is.
        unsafe { std::arch::x86_64::_xgetbv(0) }
    }
    // SAFETY: as the caller has seen.
    unsafe { kept() & TILES == TILES }
}

#[cfg(not(target_arch = "x86_64"))]
fn has_tiles() -> bool {
    false
}

/// Finds the program that emulates: `MOESAIC_QEMU`, then Debian's names on
/// `PATH`.
///
/// # Errors
/// [`HostError`] lists the names tried and the package to install.
fn find_qemu() -> Result<PathBuf, HostError> {
    find_with(|name| std::env::var_os(name))
}

fn find_with(variable: impl Fn(&str) -> Option<OsString>) -> Result<PathBuf, HostError> {
    if let Some(asked) = variable("MOESAIC_QEMU").filter(|value| !value.is_empty()) {
        // You asked for this program by name, so a wrong name is an error and
        // the search does not go on.
        let program = PathBuf::from(asked);
        return if program.is_file() {
            Ok(program)
        } else {
            Err(HostError::NoProgram(program))
        };
    }
    let path = variable("PATH").unwrap_or_default();
    let places = std::env::split_paths(&path).flat_map(|dir| QEMU.map(|name| dir.join(name)));
    let found = places.into_iter().find(|place| place.is_file());
    found.ok_or(HostError::NoEmulator)
}

/// Returns the CPU to emulate: one that has the instruction set and little
/// more, so that an instruction too many fails.
fn cpu(isa: CpuIsa) -> &'static str {
    match isa {
        // An A72 is Armv8.0 without dot products and bf16; a kernel of
        // `neon` that uses either ends with an illegal instruction.
        CpuIsa::NeonBf16 => "max",
        _ => "cortex-a72",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named() {
        let error = find_with(|_| None).unwrap_err().to_string();
        for part in [
            "MOESAIC_QEMU (not set)",
            "qemu-aarch64-static",
            "qemu-user-static",
        ] {
            assert!(error.contains(part), "{error}");
        }
        let wrong = |name: &str| (name == "MOESAIC_QEMU").then(|| "/no/qemu".into());
        assert_eq!(
            find_with(wrong).unwrap_err().to_string(),
            "MOESAIC_QEMU=/no/qemu is no program"
        );
    }
}
