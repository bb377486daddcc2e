//! The text of kernels, from a kernel plan.
//!
//! A template sees five records: `d`, the desc; `c`, the config; `g`, what follows from both for a
//! CPU GEMM, or from the desc for a gate; `target`, facts of the target; and `entry`, one record
//! for each entry with its parameter list already written in the language of the target, so that a
//! template cannot disagree with the signature of its launch. Values go into a block of named
//! constants; logic stays in the kernel language.
//!
//! As a crate of its own this is an internal part of `moesaic` and changes without notice.

mod codes;
mod expression;
mod gate;
mod gemm;
mod literal;
mod render;
mod signature;
mod unit;
#[cfg(test)]
mod wants;

use moesaic_kernel::{KernelSource, Language, SimArch, Target};
use moesaic_plan::{KernelPlan, LayerPlan};

#[doc(hidden)]
pub use render::part;

/// A kernel that the templates cannot write. Always a defect of moesaic.
#[derive(Debug, thiserror::Error)]
#[error("kernel `{kernel}` cannot be emitted for `{target}`: {reason}")]
pub struct EmitError {
    /// The kernel.
    pub kernel: String,
    /// The target.
    pub target: String,
    /// The message of the template engine.
    pub reason: String,
}

/// The definitions of the hardware primitives above a GPU kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prelude {
    /// The definitions of the target.
    Native,
    /// Host C++, where a thread of the GPU is a fiber: the unchanged text below the prelude then
    /// runs on a CPU.
    Sim,
}

/// Writes one kernel for a target. A simulator of an NVIDIA GPU gets the text of that GPU, to the
/// byte; a simulator of an AMD GPU gets the GPU's text over the prelude of the host.
///
/// # Errors
///
/// [`EmitError`] when a template is wrong.
pub fn emit(kernel: &KernelPlan, target: Target) -> Result<KernelSource, EmitError> {
    let prelude = match target {
        Target::Sim(SimArch::Rocm(_)) => Prelude::Sim,
        _ => Prelude::Native,
    };
    emit_with(kernel, target, prelude)
}

/// Writes one kernel for a target with the chosen prelude. CPU targets ignore `prelude`.
///
/// # Errors
///
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

/// Returns the language in which kernels of a target are written.
pub fn language(target: Target) -> Language {
    match target {
        Target::Cpu(_) | Target::Sim(SimArch::Cpu(_)) => Language::C,
        Target::Cuda(_) | Target::Sim(SimArch::Cuda(_)) => Language::Cuda,
        Target::Rocm(_) | Target::Sim(SimArch::Rocm(_)) => Language::Hip,
    }
}

/// Returns every template by name. A plan and these determine a text.
pub fn templates() -> impl Iterator<Item = (&'static str, &'static str)> {
    let all = moesaic_templates::CPU.iter().chain(moesaic_templates::GPU);
    all.copied()
}
