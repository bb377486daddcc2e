//! Compiles a CUDA file and prints what came of it: `compile FILE ARCH`.
//! `MOESAIC_NVRTC` names the folder of NVRTC.

use moesaic_cuda::NvrtcCompiler;
use moesaic_kernel::{KernelSource, Language, Stem};
use moesaic_target::{CompileOptions, Compiler};
use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().collect();
    let [_, file, arch] = args.as_slice() else {
        return Err("usage: compile FILE ARCH".into());
    };
    let source = KernelSource {
        stem: Stem::GroupedGemm,
        name: file.trim_end_matches(".cu").to_string(),
        target: format!("cuda:{arch}").parse()?,
        language: Language::Cuda,
        text: std::fs::read_to_string(file)?,
        config: String::new(),
        entries: Vec::new(),
    };
    let options = CompileOptions {
        allow_spills: true,
        allow_serialized_wgmma: true,
    };
    let artifact = NvrtcCompiler::find(None)?
        .compile(&source, &options)
        .map_err(|error| error.to_string())?;
    println!(
        "{} bytes, {:.0} ms",
        artifact.binary.len(),
        artifact.report.compile_ms
    );
    println!("{:#?}\n{}", artifact.report.kernels, artifact.report.log);
    Ok(())
}
