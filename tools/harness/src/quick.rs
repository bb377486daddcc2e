//! Compilers in a hurry: for tests that need kernels and not their speed, and compile many.

use moesaic_cpu::CpuCompiler;
use moesaic_kernel::{KernelSource, Target};
use moesaic_ptx::PtxCompiler;
use moesaic_target::{Artifact, CompileError, CompileOptions, Compiler};
use moesaic_toolchain::testing;
use std::os::unix::fs::PermissionsExt;
use std::sync::{Arc, LazyLock};
use tempfile::TempDir;

/// Flags behind the usual ones, with which kernels compile in a third of the time. A kernel is made
/// of small functions that are inlined by force, some of them a dozen times; the second flag turns
/// that attribute into one without effect, so that each is compiled once.
const HURRIED: &str = "-Og -Dalways_inline=unused -fno-asynchronous-unwind-tables";

/// Further flags for libraries. What a kernel calls is in the process that loads it, so the linker
/// need not read the C library for each.
const LIBRARY: &str = "-nostdlib";

/// A compiler with further flags, which its script adds.
struct Quick<C> {
    compiler: C,
    flags: String,
    _script: TempDir,
}

/// This machine's C compiler: one for all, so that its version is asked once.
pub fn cpu() -> Arc<dyn Compiler> {
    static QUICK: LazyLock<Arc<dyn Compiler>> = LazyLock::new(|| {
        let usual = CpuCompiler::find(None).expect("a C compiler");
        with_flags(&usual, format!("{HURRIED} {LIBRARY}"), |c| c)
    });
    QUICK.clone()
}

/// NVRTC for simulated GPUs, one for all.
///
/// # Panics
/// As [`testing::nvrtc`].
pub fn ptx() -> Arc<dyn Compiler> {
    static QUICK: LazyLock<Arc<dyn Compiler>> =
        LazyLock::new(|| Arc::new(PtxCompiler::hurried(testing::nvrtc())));
    QUICK.clone()
}

/// A C compiler in a hurry, inside of what `around` makes of it.
pub fn of<C: Compiler + 'static>(
    usual: &CpuCompiler,
    around: impl FnOnce(CpuCompiler) -> C,
) -> Arc<dyn Compiler> {
    with_flags(usual, HURRIED.to_string(), around)
}

fn with_flags<C: Compiler + 'static>(
    usual: &CpuCompiler,
    flags: String,
    around: impl FnOnce(CpuCompiler) -> C,
) -> Arc<dyn Compiler> {
    let folder = tempfile::tempdir().unwrap();
    // Its name says what it compiles for.
    let script = folder.path().join(usual.program().file_name().unwrap());
    let program = usual.program().display();
    let text = format!("#!/bin/sh\nexec '{program}' \"$@\" {flags}\n");
    std::fs::write(&script, text).unwrap();
    std::fs::set_permissions(&script, PermissionsExt::from_mode(0o755)).unwrap();
    Arc::new(Quick {
        compiler: around(CpuCompiler::at(&script)),
        flags,
        _script: folder,
    })
}

impl<C: Compiler> Compiler for Quick<C> {
    fn backend(&self) -> &'static str {
        self.compiler.backend()
    }

    fn name(&self) -> String {
        self.compiler.name()
    }

    fn fingerprint(&self, target: Target) -> String {
        format!("{} {}", self.compiler.fingerprint(target), self.flags)
    }

    fn targets(&self) -> Vec<Target> {
        self.compiler.targets()
    }

    fn compile(
        &self,
        source: &KernelSource,
        options: &CompileOptions,
    ) -> Result<Artifact, CompileError> {
        self.compiler.compile(source, options)
    }
}
