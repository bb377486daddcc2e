//! Engines whose kernels are compiled in a hurry ([`moesaic_harness::quick`]). What users get is
//! what [`shipped`](super::layers::shipped) compiles, random layers forward and backward on every
//! instruction set, and what Hugging Face's first layers, Tutel's and the quantized ones do.

use moesaic::cpu::CpuCompiler;
use moesaic::kernel::{CpuIsa, SimArch, Target};
use moesaic::target::Compiler;
use moesaic::{Engine, EngineOptions, OpenError, resolve_target};
use moesaic_emulated::EmulatedCompiler;
use moesaic_harness::quick;
use std::sync::{Arc, OnceLock};

/// An engine for a CPU, of this machine or emulated, whose kernels are compiled in a hurry;
/// for a GPU the usual one.
///
/// # Errors
/// As [`Engine::open`].
pub fn open(target: &str, options: EngineOptions) -> Result<Engine, OpenError> {
    let compiler = match resolve_target(target)? {
        Target::Cpu(_) => Some(quick::cpu()),
        Target::Sim(SimArch::Cpu(CpuIsa::Neon | CpuIsa::NeonBf16)) => aarch64(),
        _ => None,
    };
    match compiler {
        Some(compiler) => Engine::open_with(target, options, compiler),
        None => Engine::open(target, options),
    }
}

/// The same for emulated NEON; `None` where its compiler is missing, of which the usual
/// engine says more.
fn aarch64() -> Option<Arc<dyn Compiler>> {
    static QUICK: OnceLock<Option<Arc<dyn Compiler>>> = OnceLock::new();
    let make = || {
        let usual = CpuCompiler::find_for("aarch64", None).ok()?;
        Some(quick::of(&usual, EmulatedCompiler::of))
    };
    QUICK.get_or_init(make).clone()
}
