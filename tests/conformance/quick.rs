//! The C compiler in a hurry: for tests that need kernels and not their speed, and compile
//! many. What users get is compiled by [`engines`](super::layers::engines) and the oracles.

use moesaic::cpu::CpuCompiler;
use moesaic::kernel::{KernelSource, Target};
use moesaic::target::{Artifact, CompileError, CompileOptions, Compiler};
use std::os::unix::fs::PermissionsExt;
use std::sync::{Arc, OnceLock};

/// Takes a third of the time: `-Og` behind the flags of everybody.
struct Quick {
    compiler: CpuCompiler,
    _script: tempfile::TempDir,
}

/// One for all tests, so that its version is asked once.
pub fn compiler() -> Arc<dyn Compiler> {
    static QUICK: OnceLock<Arc<Quick>> = OnceLock::new();
    QUICK.get_or_init(|| Arc::new(make())).clone()
}

fn make() -> Quick {
    let usual = CpuCompiler::find(None).expect("a C compiler");
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("quick-cc");
    let program = usual.program().display();
    std::fs::write(&script, format!("#!/bin/sh\nexec '{program}' \"$@\" -Og\n")).unwrap();
    std::fs::set_permissions(&script, PermissionsExt::from_mode(0o755)).unwrap();
    Quick {
        compiler: CpuCompiler::at(&script),
        _script: folder,
    }
}

impl Compiler for Quick {
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
