//! Compiles a CUDA file and prints the report: `compile_cuda FILE ARCH`, such
//! as `compile_cuda k.cu sm_90a`. Spills are reported, not refused.

use moesaic_kernel::{KernelSource, Language, Stem};
use moesaic_target::{CompileOptions, Compiler};
use moesaic_toolchain::{Registry, nvrtc};
use std::error::Error;
use std::path::Path;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().collect();
    let [_, file, arch] = args.as_slice() else {
        return Err("usage: compile_cuda FILE ARCH".into());
    };
    let stem = Path::new(file).file_stem().unwrap_or_default();
    let source = KernelSource {
        stem: Stem::GroupedGemm,
        name: stem.to_string_lossy().into_owned(),
        target: format!("cuda:{arch}").parse()?,
        language: Language::Cuda,
        text: std::fs::read_to_string(file)?,
        config: String::new(),
        entries: Vec::new(),
    };
    let options = CompileOptions {
        allow_spills: true,
        allow_performance_loss: true,
    };
    let artifact = nvrtc(&Registry::open()?)?.compile(&source, &options)?;
    println!("{} bytes\n{:#?}", artifact.binary.len(), artifact.report);
    Ok(())
}
