//! What this machine can compile for, and on what it can run.

use crate::{Registry, open};
use moesaic_kernel::Target;
use moesaic_target::{CompileError, Compiler};

/// One thing that was looked for.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// What was looked for: `CUDA compiler`.
    pub subject: &'static str,
    /// What was found, with its version; `None` when nothing was.
    pub found: Option<String>,
    /// Where: a path, or a name the system's loader resolved.
    pub place: Option<String>,
    /// What it can compile for, or the one target a device is.
    pub targets: Vec<Target>,
    /// Why nothing was found: what was tried. Empty otherwise.
    pub tried: String,
    /// What to do about it. Empty when there is nothing to do.
    pub advice: String,
}

/// Looks for every compiler.
pub fn doctor(registry: &Registry) -> Vec<Finding> {
    vec![
        compiler("C compiler", open::c(registry), |c| {
            c.program().display().to_string()
        }),
        compiler("CUDA compiler", open::nvrtc(registry), |nvrtc| {
            nvrtc.library().to_string()
        }),
        compiler("ROCm compiler", open::rocm(registry), |clang| {
            clang.program().display().to_string()
        }),
    ]
}

fn compiler<C: Compiler>(
    subject: &'static str,
    opened: Result<C, CompileError>,
    place: impl Fn(&C) -> String,
) -> Finding {
    match opened {
        Ok(compiler) => Finding {
            subject,
            found: Some(compiler.name()),
            place: Some(place(&compiler)),
            targets: compiler.targets(),
            tried: String::new(),
            advice: String::new(),
        },
        Err(error) => missing(subject, error),
    }
}

fn missing(subject: &'static str, error: CompileError) -> Finding {
    let (tried, advice) = match error {
        CompileError::NoCompiler { tried, advice, .. } => (tried, advice),
        error => (error.to_string(), String::new()),
    };
    Finding {
        subject,
        found: None,
        place: None,
        targets: Vec::new(),
        tried,
        advice,
    }
}
