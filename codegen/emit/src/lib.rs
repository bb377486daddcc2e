//! From a kernel plan to source text.
//!
//! A template sees five things: `d`, the desc; `c`, the config; `g`, of a product on a CPU what
//! follows from both, of a gate what follows from its desc; `target`, facts of the target; and
//! `entry`, one record per entry with its parameter list already written in the target's
//! language, so that a template cannot disagree with the signature it is launched by. Values go
//! into a block of named constants; logic stays in the kernel language.
//!
//! As a crate of its own this is an internal part of `moesaic` and changes without
//! notice.

mod expression;
mod gate;
mod gemm;
mod render;
mod signature;
#[cfg(test)]
mod wants;

use moesaic_kernel::{KernelSource, Language, SimArch, Target};
use moesaic_plan::{KernelPlan, LayerPlan};

#[doc(hidden)]
pub use render::part;

/// A kernel that could not be written. Always a defect of moesaic.
#[derive(Debug, thiserror::Error)]
#[error("kernel `{kernel}` cannot be emitted for `{target}`: {reason}")]
pub struct EmitError {
    /// The kernel.
    pub kernel: String,
    /// The target.
    pub target: String,
    /// What the template engine said.
    pub reason: String,
}

/// Which definitions of the hardware primitives stand above a GPU kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prelude {
    /// Those of the target.
    Native,
    /// Host C++, where a thread of the GPU is a fiber: the text below the
    /// prelude then runs on a CPU, as it stands.
    Sim,
}

/// Writes one kernel for a target. For a simulator of NVIDIA's GPUs that is
/// the text the GPU gets, to the byte; for one of AMD's it is the GPU's text
/// over the prelude of the host.
///
/// # Errors
/// [`EmitError`] when a template is wrong.
pub fn emit(kernel: &KernelPlan, target: Target) -> Result<KernelSource, EmitError> {
    let prelude = match target {
        Target::Sim(SimArch::Rocm(_)) => Prelude::Sim,
        _ => Prelude::Native,
    };
    emit_with(kernel, target, prelude)
}

/// Writes one kernel for a target with the chosen prelude, which means
/// nothing to a CPU target.
///
/// # Errors
/// [`EmitError`] when a template is wrong.
pub fn emit_with(
    kernel: &KernelPlan,
    target: Target,
    prelude: Prelude,
) -> Result<KernelSource, EmitError> {
    let text = render::render(kernel, target, prelude).map_err(|reason| EmitError {
        kernel: kernel.name.clone(),
        target: target.to_string(),
        reason,
    })?;
    Ok(KernelSource {
        stem: kernel.stem(),
        name: kernel.name.clone(),
        target,
        language: language(target),
        text,
        config: format!("{:?}", kernel.op),
        entries: kernel.entries.clone(),
    })
}

/// Writes every kernel of a layer, in the order of the plan.
///
/// # Errors
/// [`EmitError`] when a template is wrong.
pub fn emit_layer(plan: &LayerPlan) -> Result<Vec<KernelSource>, EmitError> {
    plan.kernels
        .iter()
        .map(|kernel| emit(kernel, plan.target))
        .collect()
}

/// The language kernels of a target are written in.
pub fn language(target: Target) -> Language {
    match target {
        Target::Cpu(_) | Target::Sim(SimArch::Cpu(_)) => Language::C,
        Target::Cuda(_) | Target::Sim(SimArch::Cuda(_)) => Language::Cuda,
        Target::Rocm(_) | Target::Sim(SimArch::Rocm(_)) => Language::Hip,
    }
}

/// Every template by name: with a plan, all that a text is made from.
pub fn templates() -> impl Iterator<Item = (&'static str, &'static str)> {
    let all = moesaic_templates::CPU.iter().chain(moesaic_templates::GPU);
    all.copied()
}
