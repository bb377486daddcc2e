//! Compiles a HIP file and prints the report: `compile_hip FILE ARCH`, such as
//! `compile_hip k.hip gfx942`. Scratch is reported, not refused.

use moesaic_kernel::{KernelSource, Language, Stem};
use moesaic_target::{CompileOptions, Compiler};
use moesaic_toolchain::{Registry, rocm};
use std::error::Error;
use std::path::Path;

fn main() -> Result<(), Box<dyn Error>> {
    moesaic_rocm::maybe_run_child();
    let args: Vec<String> = std::env::args().collect();
    let [_, file, arch] = args.as_slice() else {
        return Err("usage: compile_hip FILE ARCH".into());
    };
    let stem = Path::new(file).file_stem().unwrap_or_default();
    let source = KernelSource {
        stem: Stem::GroupedGemm,
        name: stem.to_string_lossy().into_owned(),
        target: format!("rocm:{arch}").parse()?,
        language: Language::Hip,
        text: std::fs::read_to_string(file)?,
        config: String::new(),
        entries: Vec::new(),
    };
    let options = CompileOptions {
        allow_spills: true,
        ..CompileOptions::default()
    };
    let artifact = rocm(&Registry::open()?)?.compile(&source, &options)?;
    println!("{} bytes\n{:#?}", artifact.binary.len(), artifact.report);
    Ok(())
}
