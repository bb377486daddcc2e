//! `moesaic emit`.

use crate::caches::CacheArgs;
use crate::console::Console;
use crate::failure::{Failure, Result, reason};
use crate::files::{Files, check_output};
use crate::spec_source::LayerArgs;
use crate::targets;
use crate::training::TrainingArgs;
use clap::Args;
use moesaic::emit::emit_layer;
use moesaic::kernel::KernelSource;
use moesaic::plan::plan;
use moesaic::weights::write_whole;
use moesaic::{EngineError, LayerSpec, PlanOptions, Target};
use moesaic_rustgen::{GenerateOptions, generate_source};
use std::fs;
use std::path::{Path, PathBuf};

/// Write the source of a layer's kernels
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  moesaic emit --spec layer.toml --target cpu
  moesaic emit --spec layer.toml --target cuda:sm_80,cuda:sm_90a,rocm:gfx942 -o kernels

Without -o the sources go to stdout, each below a line that names it. The text for sim:sm_80 is
that for cuda:sm_80 to the byte; sim:gfx942 has the text of rocm:gfx942 over another prelude.")]
pub struct EmitArgs {
    #[command(flatten)]
    layer: LayerArgs,
    /// Targets, such as cpu,cuda:sm_90a,rocm:gfx942
    #[arg(
        long,
        value_name = "T[,T]",
        value_delimiter = ',',
        required_unless_present = "rust"
    )]
    target: Vec<String>,
    /// The directory to write to, one folder per target; `-` is stdout
    #[arg(short, long, value_name = "DIR")]
    output: Option<PathBuf>,
    /// Also write a typed Rust API of the layer to this file; `-` is stdout
    #[arg(long, value_name = "FILE")]
    rust: Option<PathBuf>,
    #[command(flatten)]
    training: TrainingArgs,
    #[command(flatten)]
    caches: CacheArgs,
}

/// Emits every kernel for every target.
pub fn execute(args: &EmitArgs, console: &Console) -> Result {
    let targets = targets::resolve(&args.target)?;
    if targets.is_empty() {
        args.only_rust()?
    } else {
        args.caches.check(&targets)?
    }
    let spec = args.layer.load(console)?.spec;
    let options = PlanOptions {
        training: args.training.get(),
        caches: args.caches.assumed(),
        ..PlanOptions::default()
    };
    let mut sources = Vec::new();
    for target in targets {
        sources.extend(layer_sources(&spec, target, &options)?);
    }
    let output = args.output.as_deref().filter(|dir| !is_stdout(dir));
    args.check_files(output, &sources)?;
    match output {
        Some(dir) => write_all(dir, &sources, console)?,
        None => console.print(&listing(&sources, console))?,
    }
    match &args.rust {
        Some(file) if is_stdout(file) => console.print(&rust_source(&spec)?),
        Some(file) => write_rust(&spec, file, console),
        None => Ok(()),
    }
}

fn is_stdout(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// Where a kernel's text goes.
fn place(dir: &Path, source: &KernelSource) -> PathBuf {
    dir.join(source.target.file_name()).join(source.file_name())
}

impl EmitArgs {
    /// Refuses outputs that are each other, or what the layer is read from.
    fn check_files(&self, output: Option<&Path>, sources: &[KernelSource]) -> Result {
        let rust = self.rust.iter().filter(|file| !is_stdout(file));
        let kernels = output.into_iter();
        let kernels = kernels.flat_map(|dir| sources.iter().map(|source| place(dir, source)));
        if self.rust.as_deref().is_some_and(is_stdout) && output.is_none() && !sources.is_empty() {
            let message = "--rust - and the kernels would both go to stdout";
            return Err(Failure::input(message).hint("-o DIR writes kernels to files"));
        }
        for file in rust.clone() {
            check_output("--rust", file)?;
        }
        let files = Files::new().layer(&self.layer).written("--rust", rust);
        files.written("--output", kernels).check()
    }

    /// Refuses what is about kernels where none are written.
    fn only_rust(&self) -> Result {
        let given = [
            self.output.is_some().then_some("--output"),
            self.training.get().map(|_| "--training"),
            self.caches.option(),
        ];
        let Some(option) = given.into_iter().flatten().next() else {
            return Ok(());
        };
        let message = format!(
            "{option} does nothing without --target: it is about kernels, and a typed layer is one \
             text for every target, for inference and training"
        );
        Err(Failure::input(message).hint("leave it out, or say --target for kernels beside it"))
    }
}

/// The kernels of a layer for a target.
fn layer_sources(
    spec: &LayerSpec,
    target: Target,
    options: &PlanOptions,
) -> Result<Vec<KernelSource>> {
    let plan = plan(spec, target, options).map_err(EngineError::from)?;
    Ok(emit_layer(&plan).map_err(EngineError::from)?)
}

fn listing(sources: &[KernelSource], console: &Console) -> String {
    let one = |source: &KernelSource| {
        let title = format!(
            "// ===== {}/{} =====",
            source.target.file_name(),
            source.file_name()
        );
        let text = source.text.trim_end();
        format!("{}\n{text}\n", console.out.bold(&title))
    };
    sources.iter().map(one).collect::<Vec<_>>().join("\n")
}

fn write_all(dir: &Path, sources: &[KernelSource], console: &Console) -> Result {
    if dir.is_file() {
        return Err(Failure::input(format!(
            "{} is a file, not a directory",
            dir.display()
        )));
    }
    let mut text = String::new();
    for source in sources {
        let path = place(dir, source);
        let folder = path.parent().unwrap_or(dir);
        fs::create_dir_all(folder).map_err(|error| unwritable(folder, &error))?;
        write_whole(&path, source.text.as_bytes()).map_err(|error| unwritable(&path, &error))?;
        text += &format!("{}\n", path.display());
    }
    console.print(&text)
}

fn write_rust(spec: &LayerSpec, file: &Path, console: &Console) -> Result {
    let text = rust_source(spec)?;
    write_whole(file, text.as_bytes()).map_err(|error| unwritable(file, &error))?;
    console.print(&format!("{}\n", file.display()))
}

fn rust_source(spec: &LayerSpec) -> Result<String> {
    generate_source(spec, &GenerateOptions::default()).map_err(Failure::input)
}

/// The failure of a file that cannot be written.
pub fn unwritable(path: &Path, error: &std::io::Error) -> Failure {
    Failure::work(format!(
        "cannot write {}: {}",
        path.display(),
        reason(error)
    ))
}
