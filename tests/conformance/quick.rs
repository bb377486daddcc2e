//! Engines whose kernels are compiled in a hurry ([`moesaic_harness::quick`]). What users get is
//! what [`shipped`](super::layers::shipped) compiles, random layers forward and backward on every
//! instruction set, and what Hugging Face's first layers, Tutel's and the quantized ones do.

use moesaic::cpu::CpuCompiler;
use moesaic::kernel::{CpuIsa, SimArch, Target};
use moesaic::target::{CompileError, Compiler};
use moesaic::{Engine, EngineOptions, OpenError, resolve_target};
use moesaic_emulated::EmulatedCompiler;
use moesaic_harness::quick;
use std::sync::{Arc, OnceLock};

/// An engine whose kernels are compiled in a hurry, if it is for a CPU, of this machine or
/// emulated, or for a simulated GPU of NVIDIA; else the usual one.
///
/// # Errors
/// As [`Engine::open`].
pub fn open(target: &str, options: EngineOptions) -> Result<Engine, OpenError> {
    let compiler = match resolve_target(target)? {
        Target::Cpu(_) => Some(quick::cpu()),
        Target::Sim(SimArch::Cpu(isa)) => emulated(isa),
        Target::Sim(SimArch::Cuda(_)) => Some(quick::ptx()),
        _ => None,
    };
    match compiler {
        Some(compiler) => Engine::open_with(target, options, compiler),
        None => Engine::open(target, options),
    }
}

/// The same for an emulated CPU; `None` where its compiler is missing, of which the usual
/// engine says more.
fn emulated(isa: CpuIsa) -> Option<Arc<dyn Compiler>> {
    type Kept = OnceLock<Option<Arc<dyn Compiler>>>;
    static AARCH64: Kept = OnceLock::new();
    static AMX: Kept = OnceLock::new();
    let hurried = |usual: Result<CpuCompiler, CompileError>| {
        Some(quick::of(&usual.ok()?, EmulatedCompiler::of))
    };
    match isa {
        CpuIsa::Neon | CpuIsa::NeonBf16 => {
            AARCH64.get_or_init(|| hurried(CpuCompiler::find_for("aarch64", None)))
        }
        CpuIsa::Amx => AMX.get_or_init(|| hurried(CpuCompiler::find(None))),
        _ => return None,
    }
    .clone()
}
