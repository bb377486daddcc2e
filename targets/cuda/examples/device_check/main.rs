//! Runs the first GPU through all functions of the CUDA device: `device_check
//! [ORDINAL]`. Prints one line per check; exits with 2 without a GPU.

#[allow(dead_code, reason = "the GPU smoke test compiles ahead of time")]
mod cuda;
#[path = "../../../api/tests/device_check/mod.rs"]
mod device_check;

use moesaic_kernel::KernelSource;
use moesaic_target::{Artifact, CompileOptions, Compiler};
use moesaic_toolchain::{Registry, nvrtc};
use std::error::Error;
use std::process::ExitCode;

fn main() -> ExitCode {
    let ordinal = std::env::args().nth(1).map(|text| text.parse());
    let Ok(ordinal) = ordinal.unwrap_or(Ok(0)) else {
        eprintln!("usage: device_check [ORDINAL]");
        return ExitCode::from(2);
    };
    device_check::main(cuda::backend(ordinal, Box::new(compile)))
}

fn compile(source: &KernelSource) -> Result<Artifact, Box<dyn Error>> {
    let compiler = nvrtc(&Registry::open()?)?;
    Ok(compiler.compile(source, &CompileOptions::default())?)
}
