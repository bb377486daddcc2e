//! `moesaic quantize`: a full-precision model's experts as codes and scales.

use crate::console::Console;
use crate::failure::{Failure, Result};
use crate::files::Files;
use crate::form::FormArgs;
use crate::progress::Progress;
use crate::spec_source::Model;
use crate::store::StoreArgs;
use crate::table::Table;
use crate::{random, targets, units};
use clap::Args;
use moesaic::spec::format::{BLOCKS, EncodeError};
use moesaic::spec::hf::{Import, SCHEMES, Scheme};
use moesaic::weights::{Checkpoint, LayerReader, LoadOptions, set_expert_formats};
use moesaic::weights::{QuantizeError, QuantizeEvent, QuantizeReport, QuantizeTo, quantize};
use moesaic::{DType, EngineOptions, LayerSpec};
use serde_json::json;
use std::fs;
use std::path::PathBuf;

/// Quantize the experts of a full-precision model
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  moesaic quantize --hf ~/models/qwen3-30b-a3b --format mxfp4 -o qwen3-30b-mxfp4
  moesaic quantize --hf ~/models/mixtral --format int4 --group 64 -o mixtral-int4
  moesaic quantize --hf ~/models/qwen3-30b-a3b --format q4_k -o qwen3-30b-q4_k.gguf

Only the matrices of routed experts become codes, each rounded to nearest by the format's own rule \
(docs/FAMILIES.md); everything else is copied. An output that ends in .gguf is one file, any other \
a Hugging Face folder. If the command is interrupted, the same command goes on after the last \
finished file of the folder. The error of a matrix is the root mean square of what rounding changed, \
relative to that of its elements; the error of y is that of one layer's output for random tokens, \
with f32 activations.")]
pub struct QuantizeArgs {
    /// The model directory, with its config.json and safetensors
    #[arg(long, value_name = "DIR")]
    hf: PathBuf,
    /// The format: for a folder fp8, fp8-channel, mxfp8, mxfp6, mxfp4, nvfp4, int8, int4, gptq, awq;
    /// for a GGUF file q8_0, q6_k, q5_k, q5_1, q5_0, q4_k, q4_1, q4_0, iq4_nl, mxfp4
    #[arg(long, value_name = "NAME")]
    format: String,
    /// Columns that share a scale in int4, gptq and awq: 32, 64 or 128 (128 if not given)
    #[arg(long, value_name = "N")]
    group: Option<usize>,
    /// The new model: a folder, or a file that ends in .gguf
    #[arg(short, long, value_name = "PATH")]
    output: PathBuf,
    /// Layer whose y is compared; the first layer with experts if not given
    #[arg(long, value_name = "N")]
    layer: Option<usize>,
    /// Random tokens of that comparison; 0 leaves it out
    #[arg(long, value_name = "N", default_value_t = 16)]
    tokens: usize,
    #[command(flatten)]
    form: FormArgs,
    #[command(flatten)]
    store: StoreArgs,
}

/// The most bytes of f32 weights of a layer whose y is compared.
const MOST: u64 = 8 << 30;

/// The error of one layer's output.
struct Compared {
    layer: usize,
    tokens: usize,
    /// The root mean square of the differences, over that of y.
    relative_rms: f64,
    /// The largest difference, over the largest element of y.
    largest: f64,
}

/// Quantizes, then compares.
pub fn execute(args: &QuantizeArgs, console: &Console) -> Result {
    let target = args.target()?;
    args.check_files()?;
    args.check_layer()?;
    let progress = Progress::bytes("quantizing");
    let watch = |event: QuantizeEvent<'_>| match event {
        QuantizeEvent::Begins { bytes } => progress.of(bytes),
        QuantizeEvent::Done { bytes } => progress.advance(bytes),
        QuantizeEvent::Kept { file } => {
            progress.beside(|| console.note(&format!("{file} is finished and stays")));
        }
        _ => {}
    };
    let report = quantize(&args.hf, &args.output, target, &watch);
    let report = report.map_err(|error| args.failure(error))?;
    drop(progress);
    let progress = Progress::start("comparing y of a layer");
    let compared = args.compare(console)?;
    drop(progress);
    if args.form.json {
        return console.json(&args.json(&report, compared.as_ref()));
    }
    console.print(&args.text(&report, compared.as_ref(), console))
}

impl QuantizeArgs {
    fn is_gguf(&self) -> bool {
        self.output.extension().is_some_and(|end| end == "gguf")
    }

    /// Returns the format, which has to be one of the output's layout.
    fn target(&self) -> Result<QuantizeTo> {
        let name = self.format.to_lowercase();
        let scheme = Scheme::named(&name);
        let (found, known) = if self.is_gguf() {
            (QuantizeTo::gguf(&name), block_names())
        } else {
            (scheme.map(QuantizeTo::Folder), scheme_names())
        };
        let Some(found) = found else {
            let what = if self.is_gguf() {
                "a GGUF file"
            } else {
                "a Hugging Face folder"
            };
            let message = format!("--format {} is no format of {what}", self.format);
            let hint = format!("formats of {what} are {}", known.join(", "));
            return Err(Failure::input(message).hint(hint));
        };
        match (found, self.group) {
            (QuantizeTo::Folder(scheme), group) => {
                let grouped = scheme.with_group(group).map(QuantizeTo::Folder);
                grouped.ok_or_else(|| self.wrong_group(&scheme))
            }
            (QuantizeTo::Gguf(_), Some(_)) => Err(self.idle_group("blocks of GGUF")),
            (found, None) => Ok(found),
        }
    }

    fn wrong_group(&self, scheme: &Scheme) -> Failure {
        if scheme.groups.is_empty() {
            return self.idle_group(scheme.name);
        }
        let sizes = scheme.groups.iter().map(usize::to_string);
        let sizes = sizes.collect::<Vec<_>>().join(", ");
        let group = self.group.unwrap_or_default();
        Failure::input(format!(
            "--group {group}: {} has groups of {sizes}",
            scheme.name
        ))
    }

    fn idle_group(&self, of: &str) -> Failure {
        let group = self.group.unwrap_or_default();
        Failure::input(format!(
            "--group {group} does nothing: the groups of {of} have one size"
        ))
        .hint("int4, gptq and awq take --group")
    }

    fn check_files(&self) -> Result {
        let shown = self.output.display();
        if !self.is_gguf() {
            let [from, to] = [&self.hf, &self.output].map(|path| fs::canonicalize(path).ok());
            if from.is_some() && from == to {
                let message = format!("--output {shown} is the model that --hf reads");
                return Err(Failure::input(message).hint("name another folder"));
            }
            if self.output.is_file() {
                let message = format!("--output {shown} is a file, not a directory");
                return Err(Failure::input(message).hint("a GGUF file ends in .gguf"));
            }
            return Ok(());
        }
        crate::files::check_output("--output", &self.output)?;
        Files::new()
            .model(Some(&self.hf))
            .written("--output", [&self.output])
            .check()
    }

    /// Refuses a layer without experts now, not after hours.
    fn check_layer(&self) -> Result {
        let Some(layer) = self.layer else {
            return Ok(());
        };
        if self.tokens == 0 {
            let message = format!("--layer {layer} does nothing with --tokens 0");
            return Err(Failure::input(message).hint("leave it out"));
        }
        let layers = Model::folder(&self.hf)?.moe_layers()?;
        if layers.contains(&layer) {
            return Ok(());
        }
        Err(Failure::input(format!("--layer {layer} has no experts")))
    }

    /// Runs a layer of both models on random tokens. A layer that is too large, or a machine that
    /// cannot run one, costs the comparison and not the result.
    fn compare(&self, console: &Console) -> Result<Option<Compared>> {
        let made = if self.is_gguf() {
            Model::gguf(&self.output)?
        } else {
            Model::folder(&self.output)?
        };
        let (source, made) = (Opened::open(Model::folder(&self.hf)?)?, Opened::open(made)?);
        let layers = made.model.moe_layers()?;
        for layer in &layers {
            // The layer must read, even if nothing runs.
            made.reader(&made.import(*layer)?)?;
        }
        let layer = self.layer.or(layers.first().copied()).unwrap_or_default();
        let bytes = spec_bytes(&source.import(layer)?.spec);
        if self.tokens == 0 || bytes > MOST {
            if self.tokens > 0 {
                let size = units::bytes(bytes);
                console.note(&format!("y is not compared: a layer is {size} in f32"));
            }
            return Ok(None);
        }
        let run = |model: &Opened, whose: &str| {
            let y = self.run(model, layer, console)?;
            if y.iter().all(|y| y.is_finite()) {
                return Ok(y);
            }
            let message = format!("layer {layer} of the {whose} gives NaN or infinity");
            Err(Failure::work(message))
        };
        let ys = run(&source, "model").and_then(|wanted| Ok((wanted, run(&made, "output")?)));
        match ys {
            Ok((wanted, found)) => Ok(Some(Compared {
                layer,
                tokens: self.tokens,
                relative_rms: relative_rms(&found, &wanted),
                largest: crate::run::relative_error(&found, &wanted),
            })),
            Err(failure) => {
                console.note(&format!("y is not compared: {}", failure.message));
                Ok(None)
            }
        }
    }

    /// Adds what to do next to an error.
    fn failure(&self, error: QuantizeError) -> Failure {
        let wide = "fp8, fp8-channel and int8 take matrices of any size";
        let hint = match &error {
            QuantizeError::Write { .. } if self.is_gguf() => "the same command begins anew",
            QuantizeError::Write { .. } => "the same command goes on after the last finished file",
            QuantizeError::Encode {
                source: EncodeError::Columns { .. } | EncodeError::Rows { .. },
                ..
            } if !self.is_gguf() => wide,
            _ => return Failure::from(error),
        };
        Failure::from(error).hint(hint)
    }

    /// Returns y of a layer for random tokens, with f32 activations. Codes are multiplied as
    /// `moesaic run` does it.
    fn run(&self, model: &Opened, layer: usize, console: &Console) -> Result<Vec<f64>> {
        let mut import = model.import(layer)?;
        set_expert_formats(&mut import, &model.checkpoint, LoadOptions::default());
        let options = EngineOptions {
            store: Some(self.store.open(console)),
            ..EngineOptions::default()
        };
        let engine = targets::open("cpu", options, |_| Ok(()))?;
        let reader = model.reader(&import)?;
        let layer = engine.layer(&import.spec, &reader)?;
        let outputs = layer.forward(&random::input(&import.spec, self.tokens))?;
        Ok(outputs.y().to_f64())
    }

    fn text(
        &self,
        report: &QuantizeReport,
        compared: Option<&Compared>,
        console: &Console,
    ) -> String {
        let mut text = String::new();
        if console.verbose() {
            let mut table = Table::new(&["MATRIX", "FORMAT", ">RELATIVE RMS ERROR"]);
            for matrix in &report.matrices {
                let error = format!("{:.5}", matrix.relative_rms);
                table.row([matrix.name.clone(), matrix.format.clone(), error]);
            }
            text += &table.render(&console.out);
        }
        let (before, after) = (report.bytes_before, report.bytes_after);
        text += &format!(
            "{}: {} instead of {}\n",
            self.output.display(),
            units::bytes(after),
            units::bytes(before)
        );
        if let Some(worst) = report.worst() {
            text += &format!(
                "{} to {}: relative RMS error {:.5} on average, {:.5} at most ({})\n",
                matrices(report.matrices.len()),
                self.format.to_lowercase(),
                report.mean(),
                worst.relative_rms,
                worst.name
            );
        }
        if let Some(found) = compared {
            text += &format!(
                "y of layer {} for {}: relative RMS error {:.5}, largest difference {:.5} of the \
                 largest element\n",
                found.layer,
                units::count(found.tokens, "random token"),
                found.relative_rms,
                found.largest
            );
        }
        text
    }

    fn json(&self, report: &QuantizeReport, compared: Option<&Compared>) -> serde_json::Value {
        let matrix = |matrix: &moesaic::weights::MatrixError| {
            json!({
                "name": matrix.name,
                "format": matrix.format,
                "relative_rms": matrix.relative_rms,
            })
        };
        let y = compared.map(|found| {
            json!({
                "layer": found.layer,
                "tokens": found.tokens,
                "relative_rms": found.relative_rms,
                "largest": found.largest,
            })
        });
        json!({
            "output": self.output.display().to_string(),
            "format": self.format.to_lowercase(),
            "bytes_before": report.bytes_before,
            "bytes_after": report.bytes_after,
            "mean_relative_rms": report.mean(),
            "matrices": report.matrices.iter().map(matrix).collect::<Vec<_>>(),
            "y": y,
        })
    }
}

/// A model that is compared: a folder or a GGUF file.
struct Opened {
    model: Model,
    checkpoint: Checkpoint,
}

impl Opened {
    fn open(model: Model) -> Result<Opened> {
        Ok(Opened {
            checkpoint: Checkpoint::open(model.path())?,
            model,
        })
    }

    /// Returns a layer with weights and activations in f32.
    fn import(&self, layer: usize) -> Result<Import> {
        let mut import = self.model.import(layer)?;
        import.spec.precision.weights = DType::F32;
        import.spec.precision.activations = DType::F32;
        Ok(import)
    }

    fn reader(&self, import: &Import) -> Result<LayerReader<'_>> {
        let options = LoadOptions::default();
        Ok(LayerReader::of_import(import, &self.checkpoint, options)?)
    }
}

/// Returns the bytes of a layer's weights in f32.
fn spec_bytes(spec: &LayerSpec) -> u64 {
    let tensors = moesaic::spec::canonical_tensors(spec);
    let elements = tensors
        .iter()
        .map(|tensor| tensor.shape.iter().product::<usize>() as u64);
    elements.sum::<u64>() * 4
}

fn relative_rms(found: &[f64], wanted: &[f64]) -> f64 {
    let squares = found.iter().zip(wanted).map(|(f, w)| (f - w) * (f - w));
    let (off, all) = (
        squares.sum::<f64>(),
        wanted.iter().map(|w| w * w).sum::<f64>(),
    );
    if off == 0.0 { 0.0 } else { (off / all).sqrt() }
}

fn matrices(n: usize) -> String {
    match n {
        1 => "1 matrix".to_string(),
        _ => format!("{n} matrices"),
    }
}

fn scheme_names() -> Vec<String> {
    SCHEMES
        .iter()
        .map(|scheme| scheme.name.to_string())
        .collect()
}

fn block_names() -> Vec<String> {
    let encoded = BLOCKS.iter().filter(|blocks| blocks.can_encode());
    encoded.map(|blocks| blocks.name.to_lowercase()).collect()
}

impl From<QuantizeError> for Failure {
    fn from(error: QuantizeError) -> Failure {
        match error {
            QuantizeError::Weights(error) => Failure::from(error),
            QuantizeError::Write { path, source } => Failure::unwritable(&path, &source),
            QuantizeError::Busy { .. } => Failure::work(error),
            other => Failure::input(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    /// The help of `--format` lists every format.
    #[test]
    fn the_help_lists_every_format() {
        let mut command = crate::args::Cli::command();
        let own = command
            .find_subcommand_mut("quantize")
            .expect("it is there");
        let help = own.render_long_help().to_string();
        let words: Vec<&str> = help
            .split(|c: char| c.is_whitespace() || ",;:".contains(c))
            .collect();
        for name in scheme_names().iter().chain(&block_names()) {
            assert!(words.contains(&name.as_str()), "{name} is not in {help}");
        }
    }
}
