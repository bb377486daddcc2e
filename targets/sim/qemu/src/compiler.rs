//! A compiler for aarch64 as a [`Compiler`] of programs for the emulator.

use crate::memory;
use moesaic_cpu::CpuCompiler;
use moesaic_kernel::{KernelSource, SimArch, Target};
use moesaic_target::{Artifact, CompileError, CompileOptions, Compiler};
use std::path::Path;

/// What each kernel is linked to.
const LAUNCHER: &str = include_str!("launcher.c");

/// C text to a program of aarch64 that runs blocks on request.
#[derive(Debug)]
pub struct QemuCompiler {
    cross: CpuCompiler,
}

impl QemuCompiler {
    /// Finds a compiler for aarch64: `MOESAIC_CC_AARCH64`,
    /// `aarch64-linux-gnu-gcc`, then `fallback`, the `zig` that
    /// `moesaic toolchain install` registered.
    ///
    /// # Errors
    /// [`CompileError::NoCompiler`] lists what was tried.
    pub fn find(fallback: Option<&Path>) -> Result<QemuCompiler, CompileError> {
        CpuCompiler::find_for("aarch64", fallback).map(QemuCompiler::of)
    }

    /// Uses this compiler.
    pub fn of(cross: CpuCompiler) -> QemuCompiler {
        QemuCompiler { cross }
    }
}

/// The launcher with its constants.
fn launcher() -> String {
    format!(
        "#define MEMORY_START {:#x}\n#define MEMORY_BYTES {:#x}\n{LAUNCHER}",
        memory::START,
        memory::BYTES
    )
}

/// A number that tells launchers apart: FNV-1a.
fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

impl Compiler for QemuCompiler {
    fn backend(&self) -> &'static str {
        "sim"
    }

    fn name(&self) -> String {
        self.cross.name()
    }

    fn fingerprint(&self, target: Target) -> String {
        let compiler = self.cross.fingerprint(target.hardware());
        format!("{compiler}; launcher {:016x}", hash(&launcher()))
    }

    fn targets(&self) -> Vec<Target> {
        let all = self.cross.targets().into_iter();
        all.filter_map(Target::simulated).collect()
    }

    fn compile(&self, source: &KernelSource, _: &CompileOptions) -> Result<Artifact, CompileError> {
        if !matches!(source.target, Target::Sim(SimArch::Cpu(_))) {
            return Err(CompileError::UnsupportedTarget {
                compiler: self.name(),
                target: source.target.to_string(),
                advice: "it compiles for the emulator of aarch64".to_string(),
            });
        }
        let source = KernelSource {
            target: source.target.hardware(),
            ..source.clone()
        };
        self.cross.compile_program(&source, &launcher())
    }
}
