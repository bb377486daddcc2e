//! A C compiler as a [`Compiler`] of programs that run blocks on request.

use crate::memory;
use moesaic_cpu::CpuCompiler;
use moesaic_kernel::{CpuIsa, KernelSource, SimArch, Target};
use moesaic_target::{Artifact, CompileError, CompileOptions, Compiler, script};
use std::path::Path;

/// The text that each kernel is linked to.
const LAUNCHER: &str = include_str!("launcher.c");

/// The text after it: AMX for a CPU without tiles, or nothing.
const TILES: &str = include_str!("tiles.c");
const NOTHING: &str = "static void begin(void) {}\nstatic void end_of_launch(void) {}\n";

/// The compiler of C text to a program of aarch64 or x86-64 that runs blocks on
/// request.
#[derive(Debug)]
pub struct EmulatedCompiler {
    cross: CpuCompiler,
}

impl EmulatedCompiler {
    /// Finds a compiler for the machine that has `isa`. AMX takes the compiler
    /// of `cpu:amx`; NEON takes `MOESAIC_CC_AARCH64`, `aarch64-linux-gnu-gcc`,
    /// then `fallback`, the `zig` that `moesaic toolchain install` registered.
    ///
    /// # Errors
    /// [`CompileError::NoCompiler`] lists what was tried.
    pub fn find(isa: CpuIsa, fallback: Option<&Path>) -> Result<EmulatedCompiler, CompileError> {
        let found = match isa {
            CpuIsa::Amx => CpuCompiler::find(fallback),
            _ => CpuCompiler::find_for("aarch64", fallback),
        };
        found.map(EmulatedCompiler::of)
    }

    /// Uses this compiler.
    pub fn of(cross: CpuCompiler) -> EmulatedCompiler {
        EmulatedCompiler { cross }
    }
}

/// Returns the launcher with its constants, and the text that the instruction
/// set needs.
fn launcher(target: Target) -> String {
    let rest = match target.hardware() {
        Target::Cpu(CpuIsa::Amx) => TILES,
        _ => NOTHING,
    };
    // The launcher maps the memory at this address before any block runs, and
    // the device hands out addresses in it; both sides need the same numbers.
    format!(
        "#define MEMORY_START {:#x}\n#define MEMORY_BYTES {:#x}\n{LAUNCHER}\n{rest}",
        memory::START,
        memory::BYTES
    )
}

#[doc(hidden)]
impl Compiler for EmulatedCompiler {
    fn backend(&self) -> &'static str {
        "sim"
    }

    fn name(&self) -> String {
        self.cross.name()
    }

    fn fingerprint(&self, target: Target) -> String {
        let compiler = self.cross.fingerprint(target.hardware());
        let launcher = script::hash(launcher(target).as_bytes());
        format!("{compiler}; launcher {launcher:016x}")
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
                advice: "it compiles for sim:neon, sim:neonbf16 and sim:amx".to_string(),
            });
        }
        let launcher = launcher(source.target);
        let source = KernelSource {
            target: source.target.hardware(),
            ..source.clone()
        };
        self.cross.compile_program(&source, &launcher)
    }
}
