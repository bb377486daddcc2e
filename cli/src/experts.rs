//! `moesaic experts`: changes to the number of experts in a checkpoint.

use crate::console::Console;
use crate::failure::{Failure, Result};
use crate::files::{self, Files, check_output};
use crate::keys::KeysArgs;
use crate::mesh::parse_shared;
use crate::shards::{self, Cut, Ordered};
use crate::spec_source::read_spec;
use clap::{Args, Subcommand};
use moesaic::mesh::{Placement, PlacementError, SharedExperts};
use moesaic::train::TrainError;
use moesaic::train::elastic::{self, Growth};
use moesaic::weights::{Checkpoint, LoadOptions};
use moesaic::weights::{
    LayerReader, Note, write_safetensors, write_safetensors_noted, write_whole,
};
use moesaic::{LayerSpec, Parallel, Tensors};
use std::fs;
use std::path::{Path, PathBuf};

/// Add experts to a trained layer, split and merge checkpoints
///
/// Weights are those of one layer by canonical names. Optimizer state in the same file, under names
/// that begin with `optimizer.`, goes with them.
#[derive(Args, Debug)]
pub struct ExpertsArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand, Debug)]
enum Action {
    /// Add copies of experts; the layer computes the same
    Add(AddArgs),
    /// Split a layer into layers of some of its experts each
    Split(SplitArgs),
    /// Merge layers into one with the experts of all
    Merge(MergeArgs),
    /// Cut a layer into what each rank of a mesh holds
    Shard(ShardArgs),
    /// Assemble the whole layer from the files of all ranks
    Unshard(UnshardArgs),
    /// Assemble the whole layer from the state dicts of another library's ranks
    Import(ImportArgs),
}

#[derive(Args, Debug)]
struct WholeArgs {
    /// The layer spec (TOML)
    #[arg(long, value_name = "FILE")]
    spec: PathBuf,
    /// Its tensors (safetensors)
    #[arg(long, value_name = "FILE")]
    weights: PathBuf,
}

#[derive(Args, Debug)]
struct AddArgs {
    #[command(flatten)]
    whole: WholeArgs,
    /// Experts to copy, one for each new expert, such as 0,3
    #[arg(long, value_name = "IDS", value_delimiter = ',', required = true)]
    copy: Vec<usize>,
    /// Let new experts add nothing until they have learned: their down projection is zero
    #[arg(long)]
    zero_down: bool,
    /// Let tokens reach the new experts: their logits lie this far below those of the experts they
    /// copy
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = parse_margin)]
    margin: Option<f32>,
    /// Tokens per call for which a capacity by a factor is kept; no single factor keeps it for
    /// every number of tokens
    #[arg(long, value_name = "N")]
    tokens: Option<usize>,
    /// The new tensors; the new spec is written next to them as .toml
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
}

#[derive(Args, Debug)]
struct SplitArgs {
    #[command(flatten)]
    whole: WholeArgs,
    /// Experts of each part, such as 4,4
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',', required = true)]
    counts: Vec<usize>,
    /// Where part-0.safetensors, part-0.toml and so on go
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
}

#[derive(Args, Debug)]
struct MergeArgs {
    /// Tensors of the parts, each with its spec next to it as .toml
    #[arg(required = true, value_name = "FILE")]
    parts: Vec<PathBuf>,
    /// The merged tensors; the spec is written next to them as .toml
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
}

#[derive(Args, Debug)]
struct ShardArgs {
    #[command(flatten)]
    whole: WholeArgs,
    /// Ranks that share the experts
    #[arg(long, value_name = "N")]
    ranks: usize,
    /// Ranks among them that share each expert, along its hidden width
    #[arg(long, value_name = "N", default_value_t = 1)]
    expert_tp: usize,
    /// Layout of shared experts: whole on every rank, or sharded over as many ranks as each expert
    #[arg(long, value_name = "whole|sharded", value_parser = parse_shared, default_value = "whole")]
    shared: SharedExperts,
    /// File that assigns experts to ranks, such as `0-2 | 3-5,+2` (text or JSON); experts in order
    /// if not given
    #[arg(long, value_name = "FILE")]
    placement: Option<PathBuf>,
    /// Where rank-0.safetensors and so on go; rank-00.safetensors with more than ten ranks
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
}

#[derive(Args, Debug)]
struct UnshardArgs {
    /// The spec of the whole layer (TOML)
    #[arg(long, value_name = "FILE")]
    spec: PathBuf,
    /// Tensors of the ranks, with their rank in the metadata; in the order of ranks if they have
    /// none
    #[arg(required = true, value_name = "FILE")]
    ranks: Vec<PathBuf>,
    /// Ranks among them that share each expert, along its hidden width
    #[arg(long, value_name = "N", default_value_t = 1)]
    expert_tp: usize,
    /// Layout of shared experts: whole on every rank, or sharded over as many ranks as each expert
    #[arg(long, value_name = "whole|sharded", value_parser = parse_shared, default_value = "whole")]
    shared: SharedExperts,
    /// File that assigns experts to ranks, as for `shard`
    #[arg(long, value_name = "FILE")]
    placement: Option<PathBuf>,
    /// The whole layer's tensors
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
}

#[derive(Args, Debug)]
struct ImportArgs {
    /// The spec of the whole layer (TOML)
    #[arg(long, value_name = "FILE")]
    spec: PathBuf,
    #[command(flatten)]
    keys: KeysArgs,
    /// State dicts of the ranks as safetensors, in their order; one if it has all experts
    #[arg(required = true, value_name = "FILE")]
    ranks: Vec<PathBuf>,
    /// The whole layer's tensors, by canonical names
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Round weights that the layer's precision cannot hold exactly
    #[arg(long)]
    narrow: bool,
    /// Let values become infinite that --narrow cannot represent
    #[arg(long, requires = "narrow")]
    allow_infinite: bool,
    /// Ignore tensors of the layer that the spec does not use
    #[arg(long)]
    allow_extra: bool,
}

/// Runs the chosen action.
pub fn execute(args: &ExpertsArgs, console: &Console) -> Result {
    match &args.action {
        Action::Add(args) => add(args, console),
        Action::Split(args) => split(args, console),
        Action::Merge(args) => merge(args, console),
        Action::Shard(args) => shard(args, console),
        Action::Unshard(args) => unshard(args, console),
        Action::Import(args) => import(args, console),
    }
}

/// The spec that is written next to `--output`, as messages name it.
const BESIDE: &str = "the spec beside --output";

impl WholeArgs {
    fn files(&self) -> Files {
        Files::new()
            .read("--spec", [&self.spec])
            .checkpoint("--weights", Some(&self.weights))
    }

    fn load(&self, console: &Console) -> Result<(LayerSpec, Tensors<'static>)> {
        Ok((read_spec(&self.spec, console)?, tensors(&self.weights)?))
    }
}

fn add(args: &AddArgs, console: &Console) -> Result {
    args.whole
        .files()
        .written("--output", [&args.output])
        .written(BESIDE, [beside(&args.output)?])
        .check()?;
    let (spec, weights) = args.whole.load(console)?;
    let growth = Growth {
        sources: &args.copy,
        zero_down: args.zero_down,
        margin: args.margin,
        tokens: args.tokens,
    };
    let grown = elastic::add_experts(&spec, &weights, &growth)?;
    save_layers(&[(&args.output, &grown.spec, &grown.tensors)])?;
    let same = match (grown.exact, &grown.tokens) {
        (true, None) => "the layer computes the same".to_string(),
        (true, Some(tokens)) => format!(
            "the layer computes the same in calls of {} to {} tokens",
            tokens.start(),
            tokens.end()
        ),
        (false, _) => "the layer is not the same: new experts take their share".to_string(),
    };
    let experts = grown.spec.shape.experts;
    console.print(&format!(
        "{}: {experts} experts; {same}\n",
        args.output.display()
    ))
}

fn split(args: &SplitArgs, console: &Console) -> Result {
    let file = |index: usize| args.output.join(format!("part-{index}.safetensors"));
    let names: Vec<PathBuf> = (0..args.counts.len()).map(file).collect();
    args.whole
        .files()
        .written("--output", names.iter().chain(&besides(&names)?))
        .check()?;
    let (spec, weights) = args.whole.load(console)?;
    let parts = elastic::split_experts(&spec, &weights, &args.counts)?;
    files::make_output_dir("--output", &args.output)?;
    let layers = names.iter().zip(&parts);
    let layers = layers.map(|(file, (spec, tensors))| (file.as_path(), spec, tensors));
    save_layers(&layers.collect::<Vec<_>>())?;
    for (file, (spec, _)) in names.iter().zip(&parts) {
        let experts = spec.shape.experts;
        console.print(&format!("{}: {experts} experts\n", file.display()))?;
    }
    Ok(())
}

fn merge(args: &MergeArgs, console: &Console) -> Result {
    Files::new()
        .read("<FILE>", &args.parts)
        .read("<FILE>", besides(&args.parts)?)
        .written("--output", [&args.output])
        .written(BESIDE, [beside(&args.output)?])
        .check()?;
    let part = |file: &PathBuf| {
        let spec = read_spec(&file.with_extension("toml"), console)?;
        Ok((spec, tensors(file)?))
    };
    let parts = args.parts.iter().map(part).collect::<Result<Vec<_>>>()?;
    let (spec, whole) = elastic::merge_experts(&parts)?;
    save_layers(&[(&args.output, &spec, &whole)])?;
    let experts = spec.shape.experts;
    console.print(&format!("{}: {experts} experts\n", args.output.display()))
}

fn shard(args: &ShardArgs, console: &Console) -> Result {
    let (spec, weights) = args.whole.load(console)?;
    let mesh = mesh(args.ranks, args.expert_tp, args.shared)?;
    mesh.check(&spec).map_err(Failure::input)?;
    let file = |rank| args.output.join(shards::file_name(rank, mesh.ranks()));
    let names: Vec<PathBuf> = (0..mesh.ranks()).map(file).collect();
    args.whole
        .files()
        .read("--placement", &args.placement)
        .written("--output", &names)
        .check()?;
    let placement = placement(args.placement.as_deref())?;
    let parts = elastic::shard_placed(&spec, &weights, mesh, placement.as_ref())?;
    let placed = placement.unwrap_or_else(|| Placement::contiguous(mesh.ep, spec.shape.experts));
    let cut = Cut::new(mesh, placed.to_string());
    files::make_output_dir("--output", &args.output)?;
    for (rank, (file, tensors)) in names.iter().zip(&parts).enumerate() {
        let text = cut.text(rank);
        let note = Note {
            key: shards::KEY,
            text: &text,
        };
        write_safetensors_noted(file, tensors, note).map_err(files::unwritable)?;
        let experts = placed.count(rank / mesh.expert_tp);
        console.print(&format!("{}: {experts} experts\n", file.display()))?;
    }
    Ok(())
}

/// Reads a placement from a file.
pub fn placement(path: Option<&Path>) -> Result<Option<Placement>> {
    let Some(path) = path else {
        return Ok(None);
    };
    let text = fs::read_to_string(path)
        .map_err(|error| Failure::input(format!("{}: {error}", path.display())))?;
    let read = if text.trim_start().starts_with('{') {
        serde_json::from_str(&text).map_err(|error| error.to_string())
    } else {
        text.parse()
            .map_err(|error: PlacementError| error.to_string())
    };
    let named = |error: String| Failure::input(format!("{}: {error}", path.display()));
    read.map(Some).map_err(named)
}

fn parse_margin(text: &str) -> std::result::Result<f32, String> {
    let margin: Option<f32> = text.parse().ok();
    let margin = margin.filter(|margin| margin.is_finite() && *margin >= 0.0);
    margin.ok_or_else(|| "a margin is a number, 0 or more, that an f32 can be".to_string())
}

/// Returns a mesh of `ranks` ranks in which each expert is shared by `expert_tp` of them.
fn mesh(ranks: usize, expert_tp: usize, shared: SharedExperts) -> Result<Parallel> {
    if expert_tp == 0 || !ranks.is_multiple_of(expert_tp) {
        let message = format!("{ranks} ranks cannot share each expert by {expert_tp}");
        let possible = format!("--expert-tp is a divisor of the {ranks} ranks");
        return Err(Failure::input(message).hint(possible));
    }
    Ok(Parallel {
        ep: ranks / expert_tp,
        expert_tp,
        dp: 1,
        shared,
    })
}

fn unshard(args: &UnshardArgs, console: &Console) -> Result {
    check_output("--output", &args.output)?;
    Files::new()
        .read("--spec", [&args.spec])
        .read("<FILE>", &args.ranks)
        .read("--placement", &args.placement)
        .written("--output", [&args.output])
        .check()?;
    let spec = read_spec(&args.spec, console)?;
    let Ordered { files, said } = shards::in_order(&args.ranks, console)?;
    let mesh = mesh(files.len(), args.expert_tp, args.shared);
    let placement = placement(args.placement.as_deref())?;
    if let Some((file, said)) = &said {
        args.check_cut(&spec, placement.as_ref(), file, said)?;
    }
    let ranks = files.iter().map(|file| tensors(file));
    let ranks = ranks.collect::<Result<Vec<_>>>()?;
    let whole = elastic::unshard_placed(&spec, &ranks, mesh?, placement.as_ref())?;
    write_safetensors(&args.output, &whole).map_err(files::unwritable)?;
    let experts = spec.shape.experts;
    console.print(&format!("{}: {experts} experts\n", args.output.display()))
}

impl UnshardArgs {
    /// Refuses files whose metadata names another cut than these arguments.
    fn check_cut(
        &self,
        spec: &LayerSpec,
        placement: Option<&Placement>,
        file: &Path,
        said: &Cut,
    ) -> Result {
        let groups = said.ranks / self.expert_tp.max(1);
        let placed = match placement {
            Some(placement) => placement.to_string(),
            None => Placement::contiguous(groups.max(1), spec.shape.experts).to_string(),
        };
        let own = Cut {
            ranks: said.ranks,
            expert_tp: self.expert_tp,
            sharded: self.shared == SharedExperts::Sharded && self.expert_tp > 1,
            placement: placed,
        };
        own.check(file, said)
    }
}

fn import(args: &ImportArgs, console: &Console) -> Result {
    check_output("--output", &args.output)?;
    Files::new()
        .read("--spec", [&args.spec])
        .read("<FILE>", &args.ranks)
        .written("--output", [&args.output])
        .check()?;
    let keys = args.keys.required()?;
    let spec = read_spec(&args.spec, console)?;
    let (experts, ranks) = (spec.shape.experts, args.ranks.len());
    if experts % ranks != 0 {
        let message = format!("{experts} experts cannot lie evenly in {ranks} files");
        return Err(Failure::input(message));
    }
    let options = LoadOptions {
        narrow: args.narrow,
        allow_infinite: args.allow_infinite,
        allow_extra: args.allow_extra,
        dequantize: None,
    };
    let share = experts / ranks;
    let load = |file: &PathBuf| {
        let file = Checkpoint::open(file)?;
        let layer = LayerReader::of_keys(&spec, share, &keys, &file, options)?;
        let tensors = layer.load()?;
        let rounded = layer.rounded();
        rounded.iter().for_each(|r| console.note(&r.to_string()));
        Ok(tensors)
    };
    let parts = args.ranks.iter().map(load).collect::<Result<Vec<_>>>()?;
    let whole = elastic::unshard_experts(&spec, &parts, mesh(ranks, 1, SharedExperts::Whole)?)?;
    write_safetensors(&args.output, &whole).map_err(files::unwritable)?;
    console.print(&format!("{}: {experts} experts\n", args.output.display()))
}

/// Reads every tensor of a file.
fn tensors(file: &Path) -> Result<Tensors<'static>> {
    let checkpoint = Checkpoint::open(file)?;
    let names = checkpoint.names();
    let read = |name: &str| Ok((name.to_string(), checkpoint.read(name)?));
    names.map(read).collect()
}

/// Returns the path of the spec next to a layer's tensors.
fn beside(tensors: &Path) -> Result<PathBuf> {
    let beside = tensors.with_extension("toml");
    if beside == tensors {
        let message = format!("{} holds tensors: name it .safetensors", tensors.display());
        return Err(Failure::input(message));
    }
    Ok(beside)
}

fn besides(tensors: &[PathBuf]) -> Result<Vec<PathBuf>> {
    tensors.iter().map(|file| beside(file)).collect()
}

/// Writes tensors, each with its spec next to it. An existing spec with other contents is never
/// overwritten, because people write specs by hand and no option names this path. In that case
/// nothing is written. The same command may run again.
fn save_layers(layers: &[(&Path, &LayerSpec, &Tensors<'_>)]) -> Result {
    for (file, spec, _) in layers {
        let beside = beside(file)?;
        check_output("--output", file)?;
        check_output(BESIDE, &beside)?;
        let there = fs::read(&beside);
        if beside.exists() && there.ok().as_deref() != Some(spec.to_toml().as_bytes()) {
            let message = format!(
                "{BESIDE} would overwrite {}, which is another spec",
                beside.display()
            );
            return Err(Failure::input(message).hint("name another --output, or move that file"));
        }
    }
    for (file, spec, tensors) in layers {
        let beside = beside(file)?;
        write_safetensors(file, tensors).map_err(files::unwritable)?;
        write_whole(&beside, spec.to_toml().as_bytes())
            .map_err(|error| Failure::unwritable(&beside, &error))?;
    }
    Ok(())
}

impl From<TrainError> for Failure {
    fn from(error: TrainError) -> Failure {
        Failure::input(error)
    }
}
