//! Sources of a layer spec: a TOML file, a Hugging Face directory or a GGUF file.

use crate::console::Console;
use crate::failure::{Failure, Result};
use crate::units;
use clap::{Args, ValueEnum};
use moesaic::spec::gguf::{self, GgufError, Metadata};
use moesaic::spec::hf::{self, HfError, Import, ModelShape, QUANTIZED_NOTE};
use moesaic::weights::{Checkpoint, LoadOptions, dequantized, set_expert_formats};
use moesaic::{DType, LayerSpec, Parallel};
use std::borrow::Cow;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

/// The file that ModelOpt writes next to a model's config.json.
pub const QUANT_CONFIG: &str = "hf_quant_config.json";

/// The arguments that name one layer.
#[derive(Args, Debug)]
pub struct LayerArgs {
    /// The layer spec, a TOML file; `-` reads it from stdin
    #[arg(value_name = "SPEC", conflicts_with_all = ["spec", "model"])]
    file: Option<PathBuf>,
    /// The layer spec, as an option
    #[arg(
        long,
        value_name = "FILE",
        required_unless_present_any = ["file", "model"],
        conflicts_with = "model"
    )]
    spec: Option<PathBuf>,
    #[command(flatten)]
    pub model: ModelArgs,
    /// Index of the layer in the model; the first layer with experts if not given
    #[arg(long, value_name = "N", requires = "model", conflicts_with_all = ["spec", "file"])]
    pub layer: Option<usize>,
    /// Element type of weights and activations, instead of the spec's
    #[arg(long, value_name = "DTYPE")]
    pub precision: Option<PrecisionArg>,
}

/// The arguments that name a model, and how its quantized experts are read.
#[derive(Args, Clone, Debug)]
pub struct ModelArgs {
    /// A Hugging Face model directory with a config.json
    #[arg(long, value_name = "DIR", group = "model")]
    pub hf: Option<PathBuf>,
    /// A GGUF file, or the first of its shards
    #[arg(long, value_name = "FILE", group = "model")]
    pub gguf: Option<PathBuf>,
    /// Read quantized experts as numbers of this type, and do not multiply their codes
    #[arg(long, value_name = "DTYPE", requires = "model")]
    pub dequantize: Option<PrecisionArg>,
}

impl ModelArgs {
    /// Reads the model, if one is named.
    pub fn read(&self) -> Result<Option<Model>> {
        match (&self.hf, &self.gguf) {
            (Some(path), _) => Model::folder(path).map(Some),
            (None, Some(path)) => Model::gguf(path).map(Some),
            (None, None) => Ok(None),
        }
    }
}

/// Conditions on the experts of an imported layer, besides the arguments.
#[derive(Clone, Copy, Default)]
pub struct ExpertsAs<'a> {
    /// The checkpoint to read; the model's own if not set.
    pub weights: Option<&'a Path>,
    /// The reason to read numbers in any case.
    pub numbers: Option<&'static str>,
}

/// Returns the reason that a layer must have numbers for experts, if it has to: a mesh cuts them.
pub fn needs_numbers(mesh: Option<Parallel>) -> Option<&'static str> {
    let cut = mesh.is_some_and(|mesh| mesh.expert_tp > 1);
    cut.then_some(STAY_WHOLE)
}

/// Returns the sentence that says which weights have no gradient, if experts are codes.
pub fn frozen_note(spec: &LayerSpec) -> Option<&'static str> {
    spec.precision.experts.map(|_| {
        "the experts' matrices are codes and have no gradients; --dequantize f32 trains the numbers \
         they stand for"
    })
}

/// The reason that ranks which cut experts have numbers.
const STAY_WHOLE: &str = "codes of an expert stay on one rank";

/// Element types of weights and activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PrecisionArg {
    F32,
    Bf16,
    F16,
}

impl From<PrecisionArg> for DType {
    fn from(precision: PrecisionArg) -> DType {
        match precision {
            PrecisionArg::F32 => DType::F32,
            PrecisionArg::Bf16 => DType::Bf16,
            PrecisionArg::F16 => DType::F16,
        }
    }
}

/// A valid spec and the place of its weights.
pub struct SpecSource {
    /// The layer.
    pub spec: LayerSpec,
    /// For a layer of a model: the recipe that assembles its tensors.
    pub import: Option<Import>,
    /// The directory of a Hugging Face model, or the GGUF file.
    pub model: Option<PathBuf>,
}

impl LayerArgs {
    /// Returns the arguments that name one layer of a model.
    pub fn of_model(model: &ModelArgs, layer: Option<usize>) -> LayerArgs {
        LayerArgs {
            file: None,
            spec: None,
            model: model.clone(),
            layer,
            precision: None,
        }
    }

    /// Returns the TOML file, however it was named.
    pub fn file(&self) -> Option<&Path> {
        self.file.as_deref().or(self.spec.as_deref())
    }

    /// Reads and validates the layer. Experts are codes if the model's own weights are.
    pub fn load(&self, console: &Console) -> Result<SpecSource> {
        self.load_as(ExpertsAs::default(), console)
    }

    /// Reads and validates the layer. The reason to read numbers, if there is one, comes from
    /// [`needs_numbers`].
    pub fn load_for(&self, numbers: Option<&'static str>, console: &Console) -> Result<SpecSource> {
        let how = ExpertsAs {
            numbers,
            ..ExpertsAs::default()
        };
        self.load_as(how, console)
    }

    /// Reads and validates the layer, or of a model without one the first that has experts, for
    /// what is said of the whole model.
    pub fn load_first(
        &self,
        numbers: Option<&'static str>,
        console: &Console,
    ) -> Result<SpecSource> {
        let (Some(model), None) = (self.model.read()?, self.layer) else {
            return self.load_for(numbers, console);
        };
        let first = model.moe_layers()?.first().copied();
        let own = LayerArgs {
            precision: self.precision,
            ..LayerArgs::of_model(&self.model, Some(first.ok_or_else(no_layer)?))
        };
        own.load_for(numbers, console)
    }

    /// Reads and validates the layer.
    pub fn load_as(&self, how: ExpertsAs<'_>, console: &Console) -> Result<SpecSource> {
        let mut source = match (self.file(), self.model.read()?) {
            (Some(path), _) => {
                let spec = read_spec(path, console)?;
                SpecSource {
                    spec,
                    import: None,
                    model: None,
                }
            }
            (None, Some(model)) => return self.import(&model, how, console),
            (None, None) => {
                return Err(Failure::input("a layer is needed: a spec, --hf or --gguf"));
            }
        };
        if let Some(precision) = self.precision {
            source.spec.precision.set_weights(precision.into());
            source.spec.precision.activations = precision.into();
            check(&source.spec)?;
        }
        Ok(source)
    }

    /// Reads the parts around the experts of a Hugging Face model.
    pub fn model_shape(&self) -> Result<ModelShape> {
        match self.model.read()? {
            Some(Model::Hf(config)) => config.shape(),
            _ => Err(Failure::input("--hf names a model with a config.json")),
        }
    }

    fn import(&self, model: &Model, how: ExpertsAs<'_>, console: &Console) -> Result<SpecSource> {
        let layer = match self.layer {
            Some(layer) => layer,
            None => first_layer(model, console)?,
        };
        let mut import = model.import(layer)?;
        if let Some(precision) = self.precision {
            import.spec.precision.set_weights(precision.into());
            import.spec.precision.activations = precision.into();
        }
        let dequantized = model.set_formats(&mut import, self.model.dequantize, how)?;
        for note in import.notes.iter().chain(&dequantized) {
            console.note(note);
        }
        check(&import.spec)?;
        Ok(SpecSource {
            spec: import.spec.clone(),
            import: Some(import),
            model: Some(model.path().to_path_buf()),
        })
    }
}

fn no_layer() -> Failure {
    Failure::input("the model has no MoE layer")
}

fn first_layer(model: &Model, console: &Console) -> Result<usize> {
    let layers = model.moe_layers()?;
    let first = *layers.first().ok_or_else(no_layer)?;
    if layers.len() > 1 {
        console.note(&format!(
            "taking layer {first}, the first of {} with experts; --layer takes another",
            layers.len()
        ));
    }
    Ok(first)
}

/// Reads the layers with experts of a model. Layers that differ only in their index are one layer,
/// under the name of the first.
pub fn read_model(
    model: &Model,
    dequantize: Option<PrecisionArg>,
    numbers: Option<&'static str>,
    console: &Console,
) -> Result<Vec<LayerSpec>> {
    let how = ExpertsAs {
        numbers,
        ..ExpertsAs::default()
    };
    let layers = model.moe_layers()?;
    if layers.is_empty() {
        model.import(0)?;
    }
    let mut specs: Vec<LayerSpec> = Vec::new();
    let mut said: Vec<String> = Vec::new();
    for &layer in &layers {
        let import = model.import(layer);
        let mut import = import.map_err(|failure| failure.hint("--layer N compiles one layer"))?;
        said.extend(model.set_formats(&mut import, dequantize, how)?);
        let alike = |spec: &LayerSpec| LayerSpec {
            name: spec.name.clone(),
            ..import.spec.clone()
        };
        if specs.iter().all(|spec| *spec != alike(spec)) {
            check(&import.spec)?;
            specs.push(import.spec);
        }
        said.extend(import.notes);
    }
    said.sort();
    said.dedup();
    said.iter().for_each(|note| console.note(note));
    console.note(&format!(
        "{} with experts, {} of them different",
        units::count(layers.len(), "layer"),
        specs.len()
    ));
    Ok(specs)
}

/// A model whose layers can be read.
pub enum Model {
    /// A Hugging Face directory.
    Hf(ModelConfig),
    /// A GGUF file.
    Gguf(Box<Checkpoint>),
}

impl Model {
    /// Reads a Hugging Face directory.
    pub fn folder(path: &Path) -> Result<Model> {
        ModelConfig::read(path).map(Model::Hf)
    }

    /// Reads a GGUF file.
    pub fn gguf(path: &Path) -> Result<Model> {
        // A file of another format would be refused as damaged safetensors, which nobody named.
        let other = path.is_file() && !begins_as_gguf(path);
        if !other {
            let checkpoint = Checkpoint::open(path)?;
            if checkpoint.gguf().is_some() {
                return Ok(Model::Gguf(Box::new(checkpoint)));
            }
        }
        let message = format!("{} is no GGUF file", path.display());
        Err(Failure::input(message).hint("--hf takes a Hugging Face directory"))
    }

    /// Returns the directory or the file.
    pub fn path(&self) -> &Path {
        match self {
            Model::Hf(config) => &config.directory,
            Model::Gguf(checkpoint) => checkpoint.path(),
        }
    }

    /// Returns the indices of its layers with experts.
    pub fn moe_layers(&self) -> Result<Vec<usize>> {
        match self {
            Model::Hf(config) => config.moe_layers(),
            Model::Gguf(file) => gguf::moe_layers(&metadata(file)).map_err(|e| self.failure(&e)),
        }
    }

    /// Returns the spec and the recipes of a layer.
    pub fn import(&self, layer: usize) -> Result<Import> {
        match self {
            Model::Hf(config) => config.import(layer),
            Model::Gguf(file) => gguf::import(&metadata(file), layer).map_err(|e| self.failure(&e)),
        }
    }

    /// Sets the formats of experts of which the weights are codes. Returns the sentence that says
    /// why they are numbers, if they are although nobody asked for that.
    fn set_formats(
        &self,
        import: &mut Import,
        dequantize: Option<PrecisionArg>,
        how: ExpertsAs<'_>,
    ) -> Result<Option<String>> {
        let options = LoadOptions {
            dequantize: dequantize.map(DType::from),
            ..LoadOptions::default()
        };
        let quantized = import.notes.iter().any(|note| note == QUANTIZED_NOTE);
        if let (Some(reason), None) = (how.numbers, options.dequantize) {
            return Ok(quantized.then(|| dequantized(&import.spec, reason)));
        }
        let opened = match (self, how.weights) {
            (_, Some(path)) => Some(Checkpoint::open(path)?),
            (Model::Gguf(_), None) => None,
            // A spec may be had of a configuration alone.
            (Model::Hf(config), None) => Checkpoint::open(&config.directory).ok(),
        };
        let read = match self {
            Model::Gguf(file) => Some(opened.as_ref().unwrap_or(file)),
            Model::Hf(_) => opened.as_ref(),
        };
        Ok(match read {
            Some(file) => set_expert_formats(import, file, options).dequantized,
            None => quantized.then(|| {
                let folder = self.path().display();
                let reason = format!("{folder} has no weights to take their format from");
                dequantized(&import.spec, &reason)
            }),
        })
    }

    fn failure(&self, error: &GgufError) -> Failure {
        Failure::input(format!("{}: {error}", self.path().display()))
    }
}

/// Returns false for a file that can be read and does not begin with GGUF's four letters.
fn begins_as_gguf(path: &Path) -> bool {
    let mut letters = Vec::new();
    let read = fs::File::open(path).and_then(|file| file.take(4).read_to_end(&mut letters));
    read.is_err() || letters == *b"GGUF"
}

/// Returns the metadata of a GGUF file, which is empty for other files.
fn metadata(file: &Checkpoint) -> Cow<'_, Metadata> {
    file.gguf().map_or_else(Cow::default, Cow::Borrowed)
}

/// The config.json of a model.
pub struct ModelConfig {
    directory: PathBuf,
    file: PathBuf,
    text: String,
}

impl ModelConfig {
    /// Reads the config.json of a directory, or the file itself if `path` names it.
    fn read(path: &Path) -> Result<ModelConfig> {
        let (directory, file) = if path.is_file() {
            (
                path.parent().unwrap_or(Path::new("")).to_path_buf(),
                path.to_path_buf(),
            )
        } else {
            (path.to_path_buf(), path.join("config.json"))
        };
        let text = read_text("the model configuration", &file).map_err(|failure| {
            failure.hint("--hf takes the directory of a model, with its config.json")
        })?;
        let text = with_quant_config(text, &directory)?;
        Ok(ModelConfig {
            directory,
            file,
            text,
        })
    }

    fn moe_layers(&self) -> Result<Vec<usize>> {
        hf::moe_layers(&self.text).map_err(|error| self.failure(&error))
    }

    fn import(&self, layer: usize) -> Result<Import> {
        hf::import(&self.text, layer).map_err(|error| self.failure(&error))
    }

    fn shape(&self) -> Result<ModelShape> {
        let shape = hf::model_shape(&self.text).map_err(|error| self.failure(&error));
        shape.map_err(|failure| failure.hint("--layers N --params N plan a model without it"))
    }

    fn failure(&self, error: &HfError) -> Failure {
        Failure::input(format!("{}: {error}", self.file.display()))
    }
}

/// Merges ModelOpt's file next to the configuration into it.
fn with_quant_config(config: String, directory: &Path) -> Result<String> {
    let file = directory.join(QUANT_CONFIG);
    if !file.is_file() {
        return Ok(config);
    }
    let beside = read_text("the quantization's configuration", &file)?;
    let both = hf::with_quant_config(&config, &beside);
    both.map_err(|error| Failure::input(format!("{}: {error}", directory.display())))
}

/// Reads and validates a TOML spec.
pub fn read_spec(path: &Path, console: &Console) -> Result<LayerSpec> {
    let stdin = path.as_os_str() == "-";
    let text = if stdin {
        read_stdin()?
    } else {
        read_text("the spec", path)?
    };
    let name = if stdin {
        "<stdin>".into()
    } else {
        path.to_string_lossy()
    };
    LayerSpec::from_toml(&text).map_err(|error| {
        let failure = Failure::spec(&error, &name, console.err.on());
        if text.trim_start().starts_with('{') {
            failure.hint("this looks like JSON; --hf DIR reads a Hugging Face config.json")
        } else {
            failure
        }
    })
}

fn read_stdin() -> Result<String> {
    let mut text = String::new();
    let read = std::io::stdin().lock().read_to_string(&mut text);
    read.map_err(|error| Failure::unreadable("the spec from", Path::new("stdin"), &error))?;
    Ok(text)
}

/// Reads a text file of bounded size, because a spec is never long.
pub fn read_text(what: &str, path: &Path) -> Result<String> {
    const MOST: u64 = 16 << 20;
    let unreadable = |error: std::io::Error| Failure::unreadable(what, path, &error);
    let mut file = fs::File::open(path).map_err(unreadable)?;
    if file.metadata().map_err(unreadable)?.is_dir() {
        return Err(Failure::input(format!(
            "{} is a directory, not a file",
            path.display()
        )));
    }
    let mut bytes = Vec::new();
    // A byte more than allowed, to tell a file of that size from a longer one.
    (&mut file)
        .take(MOST + 1)
        .read_to_end(&mut bytes)
        .map_err(unreadable)?;
    if bytes.len() as u64 > MOST {
        let most = units::bytes(MOST);
        let message = format!(
            "{} is larger than {most}, so it is not {what}",
            path.display()
        );
        return Err(Failure::input(message));
    }
    let gzip = bytes.starts_with(&[0x1f, 0x8b]);
    String::from_utf8(bytes).map_err(|_| {
        let failure = Failure::input(format!("{} is not a text file", path.display()));
        if !gzip {
            return failure;
        }
        failure.hint("if it is a pack, `moesaic cache import` takes it, and `tar -tzf` lists it")
    })
}

/// Validates the spec again, because an override can make a valid spec invalid.
fn check(spec: &LayerSpec) -> Result {
    spec.validate().map_err(|problems| {
        let lines: Vec<String> = problems.iter().map(|p| format!("{}: {p}", p.key)).collect();
        Failure::input(format!("the layer spec is not valid\n{}", lines.join("\n")))
    })
}
