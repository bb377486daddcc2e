//! Runs the first GPU through all functions of the HIP device:
//! `hip_device_check [ORDINAL]`. Prints one line per check; exits with 2
//! without a GPU.

#[path = "../../api/tests/device_check/mod.rs"]
mod device_check;

use device_check::{Backend, Check};
use moesaic_kernel::{Entry, KernelSource, Language};
use moesaic_rocm::HipDevice;
use moesaic_target::{Artifact, CompileOptions, Compiler, Device};
use moesaic_toolchain::{Registry, rocm};
use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;

const TEXT: &str = "
#define GLOBAL extern \"C\" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(256, 256)))

GLOBAL void scale(float factor, const float* in, float* out, long count, float bias) {
  long i = __builtin_amdgcn_workgroup_id_x() * 256l + __builtin_amdgcn_workitem_id_x();
  if (i < count) out[i] = in[i] * factor + bias;
}
GLOBAL void crash(float* out) { out[__builtin_amdgcn_workitem_id_x()] = 1.0f; }
";

fn main() -> ExitCode {
    let ordinal = std::env::args().nth(1).map(|text| text.parse());
    let Ok(ordinal) = ordinal.unwrap_or(Ok(0)) else {
        eprintln!("usage: hip_device_check [ORDINAL]");
        return ExitCode::from(2);
    };
    device_check::main(Backend {
        device: HipDevice::open(ordinal).map(|device| Arc::new(device) as Arc<dyn Device>),
        language: Language::Hip,
        text: TEXT,
        compile: Box::new(compile),
        extra,
    })
}

fn compile(source: &KernelSource) -> Result<Artifact, Box<dyn Error>> {
    let compiler = rocm(&Registry::open()?)?;
    Ok(compiler.compile(source, &CompileOptions::default())?)
}

fn extra() -> (Vec<Entry>, Vec<Check>) {
    (Vec::new(), Vec::new())
}
