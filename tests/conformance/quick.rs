//! C compilers in a hurry: for tests that need kernels and not their speed, and compile
//! many. What users get is what [`shipped`](super::layers::shipped) compiles, what
//! [`engines`](super::layers::engines) do for the widest instruction set, and the oracles.

use moesaic::cpu::CpuCompiler;
use moesaic::kernel::{CpuIsa, KernelSource, SimArch, Target};
use moesaic::target::{Artifact, CompileError, CompileOptions, Compiler};
use moesaic::{Engine, EngineOptions, OpenError, resolve_target};
use moesaic_emulated::EmulatedCompiler;
use std::os::unix::fs::PermissionsExt;
use std::sync::{Arc, OnceLock};
use tempfile::TempDir;

/// Takes a third of the time: `-Og` behind the flags of everybody.
struct Quick<C> {
    compiler: C,
    _script: TempDir,
}

/// An engine for a CPU, of this machine or emulated, whose kernels are compiled in a hurry;
/// for a GPU the usual one.
///
/// # Errors
/// As [`Engine::open`].
pub fn open(target: &str, options: EngineOptions) -> Result<Engine, OpenError> {
    let compiler = match resolve_target(target)? {
        Target::Cpu(_) => Some(compiler()),
        Target::Sim(SimArch::Cpu(CpuIsa::Neon | CpuIsa::NeonBf16)) => aarch64(),
        _ => None,
    };
    match compiler {
        Some(compiler) => Engine::open_with(target, options, compiler),
        None => Engine::open(target, options),
    }
}

/// One for all tests, so that its version is asked once.
fn compiler() -> Arc<dyn Compiler> {
    static QUICK: OnceLock<Arc<dyn Compiler>> = OnceLock::new();
    let make = || quick(&CpuCompiler::find(None).expect("a C compiler"), |c| c);
    QUICK.get_or_init(make).clone()
}

/// The same for emulated NEON; `None` where its compiler is missing, of which the usual
/// engine says more.
fn aarch64() -> Option<Arc<dyn Compiler>> {
    static QUICK: OnceLock<Option<Arc<dyn Compiler>>> = OnceLock::new();
    let make = || {
        let usual = CpuCompiler::find_for("aarch64", None).ok()?;
        Some(quick(&usual, EmulatedCompiler::of))
    };
    QUICK.get_or_init(make).clone()
}

fn quick<C: Compiler + 'static>(
    usual: &CpuCompiler,
    of: impl FnOnce(CpuCompiler) -> C,
) -> Arc<dyn Compiler> {
    let folder = tempfile::tempdir().unwrap();
    // Its name says what it compiles for.
    let script = folder.path().join(usual.program().file_name().unwrap());
    let program = usual.program().display();
    std::fs::write(&script, format!("#!/bin/sh\nexec '{program}' \"$@\" -Og\n")).unwrap();
    std::fs::set_permissions(&script, PermissionsExt::from_mode(0o755)).unwrap();
    Arc::new(Quick {
        compiler: of(CpuCompiler::at(&script)),
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
        format!("{} -Og", self.compiler.fingerprint(target))
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
