//! `moesaic spec`.

use crate::console::Console;
use crate::failure::Result;
use crate::form::FormArgs;
use crate::spec_source::{LayerArgs, read_spec};
use clap::{Args, Subcommand};
use moesaic::spec::{GateLayout, canonical_tensors};
use serde_json::{Value, json};
use std::path::PathBuf;

/// Check a spec, or show the spec of a Hugging Face layer
#[derive(Args, Debug)]
pub struct SpecArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand, Debug)]
enum Action {
    /// Say whether TOML specs are valid
    Check {
        /// The specs
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
    },
    /// Print a layer's spec as TOML, with the tensors it needs
    Show(ShowArgs),
}

#[derive(Args, Debug)]
struct ShowArgs {
    #[command(flatten)]
    layer: LayerArgs,
    /// Print every key with its value, defaults included
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    form: FormArgs,
}

/// Checks specs or shows one.
pub fn execute(args: &SpecArgs, console: &Console) -> Result {
    match &args.action {
        Action::Check { files } => check(files, console),
        Action::Show(args) => show(args, console),
    }
}

fn check(files: &[PathBuf], console: &Console) -> Result {
    for file in files {
        let spec = read_spec(file, console)?;
        let text = format!("{}: {} is valid\n", file.display(), spec.name);
        console.print(&text)?;
    }
    Ok(())
}

fn show(args: &ShowArgs, console: &Console) -> Result {
    let spec = args.layer.load(console)?.spec;
    let tensors = canonical_tensors(&spec);
    let toml = if args.all {
        spec.to_toml_all()
    } else {
        spec.to_toml()
    };
    if args.form.json {
        let tensors: Vec<Value> = tensors
            .iter()
            .map(|t| json!({ "name": t.name, "dtype": t.dtype.name(), "shape": t.shape, "meaning": t.meaning }))
            .collect();
        return console.json(&json!({ "toml": toml, "tensors": tensors }));
    }
    let mut text = toml.trim_end().to_string() + "\n\n# Its tensors:\n";
    for t in tensors {
        text += &format!("#   {} {:?} {}: {}\n", t.name, t.shape, t.dtype, t.meaning);
    }
    console.print(&(text + fused(spec.experts.layout)))
}

/// Returns a comment on the fused tensor in which a weight file may hold gate and up.
fn fused(layout: GateLayout) -> &'static str {
    match layout {
        GateLayout::Split => "",
        GateLayout::Concat => {
            "#   gate and up may be one tensor, `gate_up`: all gate rows, then all up rows\n"
        }
        GateLayout::Interleaved => {
            "#   gate and up may be one tensor, `gate_up`: gate in even rows, up in odd rows\n"
        }
    }
}
