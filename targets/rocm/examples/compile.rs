//! Compiles a HIP file and prints what came of it: `compile FILE ARCH`.
//! `MOESAIC_CLANG` names a clang++; a folder with `zig` and `bin/lld` as
//! `moesaic toolchain install rocm` writes it can be named by `ZIG`.

use moesaic_kernel::{KernelSource, Language, Stem};
use moesaic_rocm::{ClangTool, RocmCompiler};
use moesaic_target::{CompileOptions, Compiler};
use std::error::Error;
use std::path::PathBuf;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().collect();
    let [_, file, arch] = args.as_slice() else {
        return Err("usage: compile FILE ARCH".into());
    };
    let source = KernelSource {
        stem: Stem::GroupedGemm,
        name: PathBuf::from(file)
            .file_stem()
            .map_or("kernel".into(), |stem| stem.to_string_lossy().into_owned()),
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
    let zig = std::env::var_os("ZIG").map(|folder| ClangTool::zig(&PathBuf::from(folder)));
    let artifact = RocmCompiler::find(zig.as_ref())?
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
