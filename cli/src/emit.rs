//! `moesaic emit`.

use crate::caches::CacheSizeArgs;
use crate::console::Console;
use crate::failure::{Failure, Result};
use crate::files::{Files, check_output};
use crate::mesh;
use crate::rank::{self, OfRank, OneRankArgs};
use crate::spec_source::{LayerArgs, needs_numbers};
use crate::targets::{self, TargetsArgs};
use crate::training::TrainingArgs;
use clap::Args;
use moesaic::emit::emit_layer;
use moesaic::kernel::KernelSource;
use moesaic::plan::plan;
use moesaic::weights::write_whole;
use moesaic::{EngineError, LayerSpec, Parallel, PlanOptions, Target};
use moesaic_rustgen::{GenerateOptions, generate_source};
use std::fs;
use std::path::{Path, PathBuf};

/// Write the source of a layer's kernels
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  moesaic emit --spec layer.toml --target cpu
  moesaic emit --spec layer.toml --target cuda:sm_80,cuda:sm_90a,rocm:gfx942 -o kernels
  moesaic emit --spec layer.toml --target cuda:sm_90a --mesh ep=8 --strategy comm_dtype=fp8 -o kernels

Without -o the sources go to stdout, each below a line that names it. The text for sim:sm_80 is \
that for cuda:sm_80 to the byte; sim:gfx942 has the text of rocm:gfx942 over another prelude.")]
#[command(mut_arg("target", |arg| arg.required_unless_present("rust")))]
pub struct EmitArgs {
    #[command(flatten)]
    layer: LayerArgs,
    #[command(flatten)]
    target: TargetsArgs,
    /// The directory to write to, one folder per target; `-` is stdout
    #[arg(short, long, value_name = "DIR")]
    output: Option<PathBuf>,
    /// Also write a typed Rust API of the layer to this file; `-` is stdout
    #[arg(long, value_name = "FILE")]
    rust: Option<PathBuf>,
    #[command(flatten)]
    training: TrainingArgs,
    /// Write the kernels of one rank of this mesh instead, in one folder for each part of its plan
    #[arg(long, value_name = mesh::FORM, value_parser = mesh::parse)]
    mesh: Option<Parallel>,
    #[command(flatten)]
    rank: OneRankArgs,
    #[command(flatten)]
    caches: CacheSizeArgs,
}

/// An output file.
struct File {
    /// The folders and name of the file, below the output directory.
    name: String,
    text: String,
}

/// Emits every kernel for every target.
pub fn execute(args: &EmitArgs, console: &Console) -> Result {
    let targets = targets::resolve(&args.target.names)?;
    if targets.is_empty() {
        args.only_rust()?
    } else {
        args.caches.check(&targets)?
    }
    let numbers = needs_numbers(args.mesh);
    let spec = args.layer.load_for(numbers, console)?.spec;
    let options = PlanOptions {
        training: args.training.get(),
        caches: args.caches.assumed(),
        ..PlanOptions::default()
    };
    let mut files = Vec::new();
    for target in targets {
        files.extend(args.files(&spec, target, &options)?);
    }
    let output = args.output.as_deref().filter(|dir| !is_stdout(dir));
    args.check_files(output, &files)?;
    match output {
        Some(dir) => write_all(dir, &files, console)?,
        None => console.print(&listing(&files, console))?,
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

impl EmitArgs {
    /// Emits the kernels of the layer, or of one rank, for a target.
    fn files(&self, spec: &LayerSpec, target: Target, options: &PlanOptions) -> Result<Vec<File>> {
        let Some(mesh) = self.mesh else {
            let sources = layer_sources(spec, target, options)?.into_iter();
            return Ok(sources.map(|s| File::of(&s.file_name(), &s)).collect());
        };
        let plan = self.rank.plan(spec, target, options, mesh)?;
        let kernels = rank::kernels(&plan)?.into_iter();
        let file = |kernel: OfRank| File::of(&kernel.file_name(), &kernel.source);
        Ok(kernels.map(file).collect())
    }

    /// Refuses outputs that are the same file, or that overwrite a file the layer is read from.
    fn check_files(&self, output: Option<&Path>, kernels: &[File]) -> Result {
        let rust = self.rust.iter().filter(|file| !is_stdout(file));
        if self.rust.as_deref().is_some_and(is_stdout) && output.is_none() && !kernels.is_empty() {
            let message = "--rust - and the kernels would both go to stdout";
            return Err(Failure::input(message).hint("-o DIR writes kernels to files"));
        }
        let places = output.into_iter();
        let places = places.flat_map(|dir| kernels.iter().map(|kernel| dir.join(&kernel.name)));
        for file in rust.clone() {
            check_output("--rust", file)?;
        }
        let files = Files::new()
            .layer(&self.layer)
            .read("--placement", self.rank.placement());
        files
            .written("--rust", rust)
            .written("--output", places)
            .check()
    }

    /// Refuses options about kernels when no kernels are written.
    fn only_rust(&self) -> Result {
        let given = [
            self.output.is_some().then_some("--output"),
            self.training.get().map(|_| "--training"),
            self.mesh.map(|_| "--mesh"),
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

impl File {
    fn of(name: &str, source: &KernelSource) -> File {
        File {
            name: format!("{}/{name}", source.target.file_name()),
            text: source.text.clone(),
        }
    }
}

/// Emits the kernels of a layer for a target.
fn layer_sources(
    spec: &LayerSpec,
    target: Target,
    options: &PlanOptions,
) -> Result<Vec<KernelSource>> {
    let plan = plan(spec, target, options).map_err(EngineError::from)?;
    Ok(emit_layer(&plan).map_err(EngineError::from)?)
}

fn listing(files: &[File], console: &Console) -> String {
    let one = |file: &File| {
        let title = format!("// ===== {} =====", file.name);
        format!("{}\n{}\n", console.out.bold(&title), file.text.trim_end())
    };
    files.iter().map(one).collect::<Vec<_>>().join("\n")
}

fn write_all(dir: &Path, files: &[File], console: &Console) -> Result {
    if dir.is_file() {
        return Err(Failure::input(format!(
            "{} is a file, not a directory",
            dir.display()
        )));
    }
    let mut text = String::new();
    for file in files {
        let path = dir.join(&file.name);
        let folder = path.parent().unwrap_or(dir);
        fs::create_dir_all(folder).map_err(|error| Failure::unwritable(folder, &error))?;
        write_whole(&path, file.text.as_bytes())
            .map_err(|error| Failure::unwritable(&path, &error))?;
        text += &format!("{}\n", path.display());
    }
    console.print(&text)
}

fn write_rust(spec: &LayerSpec, file: &Path, console: &Console) -> Result {
    let text = rust_source(spec)?;
    write_whole(file, text.as_bytes()).map_err(|error| Failure::unwritable(file, &error))?;
    console.print(&format!("{}\n", file.display()))
}

fn rust_source(spec: &LayerSpec) -> Result<String> {
    generate_source(spec, &GenerateOptions::default()).map_err(Failure::input)
}
