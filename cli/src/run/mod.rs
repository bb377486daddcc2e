//! `moesaic run`.

mod agreement;
mod check;
mod file_tensors;
mod hashed;
mod input;
mod job;
mod meeting;
mod outcome;
mod pass;
mod ranks;
mod record;
mod replay;
mod report;

use crate::console::Console;
use crate::failure::{Failure, Result};
use crate::files::{Files, check_output, unwritable};
use crate::form::FormArgs;
use crate::keys::KeysArgs;
use crate::progress::Progress;
use crate::random;
use crate::spec_source::{ExpertsAs, LayerArgs, SpecSource, frozen_note};
use crate::store::StoreArgs;
use crate::targets::{self, TargetArgs};
use crate::threads::ThreadArgs;
pub use check::relative_error;
use clap::Args;
use input::Tokens;
use job::RankJob;
use meeting::RankMeeting;
use moesaic::spec::hf::Import;
use moesaic::trace::{Recorder, Trace, chrome_trace};
use moesaic::train::replay::TABLE;
use moesaic::weights::{Checkpoint, LayerReader, LoadOptions, dequantized};
use moesaic::weights::{write_safetensors, write_whole};
use moesaic::{Engine, EngineOptions, LayerSpec, Statistics, Tensors};
use outcome::RunOutcome;
use pass::PassArgs;
use ranks::{RankArgs, SharedLayer};
use record::CallRouting;
use replay::{ReplayArgs, ReplaySource};
use report::RunReport;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// The help of `--target`.
const WHERE: &str = "Where to run: auto, cpu, cuda, rocm, or with an architecture, as in cpu:avx2, \
                     cuda:sm_90a; a GPU's simulator, as in sim:sm_90a, needs no GPU";

/// The tokens of a run on random ones.
const TOKENS: usize = 16;

/// Options that say which weights to read, and how. `--random` reads none.
const OF_WEIGHTS: [&str; 8] = [
    "weights",
    "model",
    "keys",
    "prefix",
    "gate",
    "narrow",
    "allow_infinite",
    "allow_extra",
];

/// Run a layer on tokens from a file
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  moesaic run --hf ~/models/mixtral --layer 3 --input x.safetensors --output y.safetensors
  moesaic run --gguf qwen3-30b-q4_k_m.gguf --input x.safetensors --output y.safetensors
  moesaic run --spec layer.toml --weights w.safetensors --input x.safetensors --output y.safetensors
  moesaic run --spec layer.toml --random --output y.safetensors

The input holds `x [tokens, model_dim]` in f32, f16 or bf16, and what the router also needs: \
`token_ids [tokens]`, or `topk_ids` and `topk_weights [tokens, top_k]`. The output holds `y` in \
the layer's activation type, `router.logits`, `topk_ids`, `topk_weights`, `counts`, and with a \
capacity `locations`, `capacity` and `overflow`. By default nothing is drawn. With --training the \
layer draws the random numbers of --seed and --step, and the output holds `loss.<kind>` too. With \
--grad the input also holds `dy`, and the output `dx`, `grad.topk_weights`, `grad.router.logits`, \
and `grad.<name>` of every weight. The output appears whole or not at all.")]
#[command(mut_arg("target", |arg| arg.default_value("auto").help(WHERE)))]
pub struct RunArgs {
    #[command(flatten)]
    layer: LayerArgs,
    /// The weights, a safetensors file or a directory; with --hf and --gguf the model's own weights
    /// if not given
    #[arg(long, value_name = "PATH", required_unless_present_any = ["model", "random"])]
    weights: Option<PathBuf>,
    /// Draw weights from this seed, as torch.nn.Linear would, instead of reading any; and draw
    /// tokens too if there is no --input
    #[arg(long, value_name = "SEED", num_args = 0..=1, default_missing_value = "0", conflicts_with_all = OF_WEIGHTS)]
    random: Option<u64>,
    #[command(flatten)]
    keys: KeysArgs,
    /// The tokens, a safetensors file
    #[arg(long, value_name = "FILE", required_unless_present = "random")]
    input: Option<PathBuf>,
    /// Draw this many tokens with --random; 16 if not given
    #[arg(long, value_name = "N", requires = "random", conflicts_with_all = OF_WEIGHTS, conflicts_with_all = ["input", "replay", "replay_layer"])]
    tokens: Option<usize>,
    /// The results, a safetensors file
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    #[command(flatten)]
    target: TargetArgs,
    #[command(flatten)]
    threads: ThreadArgs,
    /// Compile nothing; a kernel that is not cached is an error
    #[arg(long)]
    strict: bool,
    /// Round weights that the layer's precision cannot hold exactly
    #[arg(long)]
    narrow: bool,
    /// Let values become infinite that --narrow cannot represent
    #[arg(long, requires = "narrow")]
    allow_infinite: bool,
    /// Ignore tensors of the layer that the spec does not use
    #[arg(long)]
    allow_extra: bool,
    /// Also compare with the slow f64 reference
    #[arg(long)]
    reference: bool,
    /// Also print where kernels came from, and what the router did: loads, drops, entropy
    #[arg(long)]
    stats: bool,
    /// Also write the routing record: ids, weights, locations, counts, drops. A name that ends in
    /// .npy writes the ids alone, as vLLM's routed_experts of one layer
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    #[command(flatten)]
    replay: ReplayArgs,
    /// Also write the times of each launch and exchange, for chrome://tracing and ui.perfetto.dev,
    /// with one lane for launches and one for exchanges per rank. On GPUs the run then waits for
    /// each launch
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    #[command(flatten)]
    pass: PassArgs,
    #[command(flatten)]
    ranks: RankArgs,
    #[command(flatten)]
    form: FormArgs,
    #[command(flatten)]
    store: StoreArgs,
}

/// Checks everything that can be checked, with the weights last because they may be large. Then
/// compiles, runs and writes.
pub fn execute(args: &RunArgs, console: &Console) -> Result {
    let meeting = args.ranks.meet(&args.target.name)?;
    let done = args.carry_out(meeting.as_ref(), console);
    if let (Err(failure), Some(meeting)) = (&done, &meeting) {
        meeting.give_up(failure);
    }
    done
}

impl RunArgs {
    /// Runs the work of [`execute`] after the processes of a launcher have met.
    fn carry_out(&self, meeting: Option<&RankMeeting>, console: &Console) -> Result {
        self.check_files()?;
        let mut source = self.layer.load_as(self.experts_as(), console)?;
        if source.import.is_some() && self.keys.get().is_some() {
            let message =
                "--keys does nothing with --hf and --gguf: the model's own names are read";
            return Err(Failure::input(message).hint("leave it out, or take --spec"));
        }
        let replay = self.replay.read(&source, self.layer.layer)?;
        let own = source.spec.clone();
        match &replay {
            // The record already masks the choices that a capacity dropped, so nothing is dropped
            // again.
            Some(ReplaySource::Routing(_)) => source.spec = source.spec.decided_elsewhere(),
            Some(ReplaySource::Experts(replayed)) => source.spec = replayed.spec.clone(),
            None => {}
        }
        self.pass.check_factor(&source.spec.capacity)?;
        let shared = self.ranks.get(&source.spec)?;
        let imported = source.import.is_some() && source.spec.precision.experts.is_some();
        let reason = shared.as_ref().and_then(SharedLayer::needs_numbers);
        if let Some(reason) = reason.filter(|_| imported) {
            source.spec = source.spec.dequantized();
            console.note(&dequantized(&source.spec, reason));
        }
        if let (true, Some(note)) = (self.pass.grad, frozen_note(&source.spec)) {
            console.note(note);
        }
        let mut options = self.options(console);
        if let Some(shared) = &shared {
            options = shared.options(&self.target.name, options);
        }
        let engine = targets::open(&self.target.name, options, |asked| {
            self.threads.check(asked)
        })?;
        let file = self.input.as_deref().map(input::open).transpose()?;
        let count = match &file {
            Some(file) => input::count(file, &source.spec)?,
            None => self.tokens.unwrap_or(TOKENS),
        };
        engine.check_tokens(&source.spec, count)?;
        let checkpoint = match self.random {
            Some(_) => None,
            None => Some(self.checkpoint(&source)?),
        };
        // A replayed layer lacks what its router chose by, which the file has.
        let read = LayerSpec {
            router: match &replay {
                Some(ReplaySource::Experts(_)) => own.router,
                _ => source.spec.router.clone(),
            },
            ..source.spec.clone()
        };
        let mut weights = match &checkpoint {
            Some(file) => self.weights(&read, &source, file)?,
            None => {
                let seed = self.random.unwrap_or_default();
                LayerReader::in_memory(random::drawn_weights(&read, seed)?)
            }
        };
        if let Some(ReplaySource::Experts(replayed)) = &replay {
            weights = weights.with(TABLE, replayed.table.clone());
        }
        let over_ranks = shared.is_some();
        let mut tokens = match &file {
            Some(file) => {
                self.read_tokens(file, &source.spec, replay.as_ref(), over_ranks, console)?
            }
            None => self.draw_tokens(&source.spec, count, over_ranks),
        };
        tokens.capacity_factor = self.pass.capacity_factor;
        let progress = Progress::start("getting kernels, loading weights");
        let outcome = match &shared {
            None => Some(self.alone(&engine, &source.spec, &weights, &tokens, &progress)?),
            Some(shared) => shared.run(
                &RankJob {
                    engine: &engine,
                    spec: &source.spec,
                    weights: &weights,
                    reading: self.reading(&source, replay.as_ref()),
                    pass: &self.pass,
                    tokens: &tokens,
                    traced: self.trace.is_some(),
                    recorded: self.record.is_some(),
                    ahead: &self.ahead(),
                },
                meeting,
            )?,
        };
        let Some(mut outcome) = outcome else {
            return Ok(()); // the first rank speaks
        };
        progress.next("finishing");
        let outputs = &outcome.outputs;
        let comparison = if self.reference {
            let (spec, draw, weights) = (&source.spec, self.pass.draw(), weights.load()?);
            Some(check::compare(spec, &weights, &tokens, draw, outputs))
        } else {
            None
        };
        for rounded in weights.rounded() {
            console.note(&rounded.to_string());
        }
        let limited = outcome.limited;
        let routing = CallRouting::of(&source.spec, outputs, limited).map(|r| r.statistics());
        if let (Some(path), Some(statistics)) = (&self.record, &routing) {
            self.write_record(path, &source.spec, outputs, statistics)?;
        }
        if let Some(path) = &self.trace {
            let trace = chrome_trace(std::mem::take(&mut outcome.trace)).to_string();
            write_whole(path, trace.as_bytes())
                .map_err(|error| Failure::unwritable(path, &error))?;
        }
        if !limited {
            outcome.outputs.remove("locations");
        }
        write_safetensors(&self.output, &outcome.outputs).map_err(unwritable)?;
        drop(progress);
        let report = RunReport {
            engine: &engine,
            spec: &source.spec,
            tokens: tokens.count,
            outcome: &outcome,
            shared: shared.as_ref(),
            comparison,
            routing,
            path: &self.output,
        };
        if self.form.json {
            console.json(&report.json())
        } else {
            console.report(&report.text(self.stats, &console.out))
        }
    }

    fn read_tokens<'f>(
        &self,
        file: &'f Checkpoint,
        spec: &LayerSpec,
        replay: Option<&ReplaySource<'_>>,
        over_ranks: bool,
        console: &Console,
    ) -> Result<Tokens<'f>> {
        let mut tokens = match replay {
            None => Tokens::read(file, spec, console)?,
            Some(ReplaySource::Routing(path)) => Tokens::replay(file, path, spec, console)?,
            Some(ReplaySource::Experts(replayed)) => Tokens::placed(file, replayed, console)?,
        };
        if self.pass.has_losses() {
            tokens.read_groups(file, spec, over_ranks)?;
        }
        if self.pass.grad {
            tokens.read_dy(file, spec)?;
        }
        Ok(tokens)
    }

    fn draw_tokens(&self, spec: &LayerSpec, count: usize, over_ranks: bool) -> Tokens<'static> {
        let mut tokens = Tokens::random(spec, count);
        if self.pass.has_losses() {
            tokens.draw_groups(spec, over_ranks);
        }
        if self.pass.grad {
            tokens.draw_dy(spec);
        }
        tokens
    }

    /// Writes what the router did, in the form that the file's name says.
    fn write_record(
        &self,
        path: &Path,
        spec: &LayerSpec,
        outputs: &Tensors<'_>,
        statistics: &Statistics,
    ) -> Result {
        let record = record::tensors(outputs, statistics);
        if !replay::is_array(path) {
            return write_safetensors(path, &record).map_err(unwritable);
        }
        let ids: Vec<i32> = record["topk_ids"].to_vec().unwrap_or_default();
        let top_k = spec.shape.top_k;
        let sizes = [ids.len() / top_k.max(1), spec.routed_experts(), top_k];
        replay::write_array(path, sizes, ids)
    }

    /// Checks that outputs can be written, and that none of them overwrites an input.
    fn check_files(&self) -> Result {
        let outputs = [
            ("--output", Some(&self.output)),
            ("--record", self.record.as_ref()),
            ("--trace", self.trace.as_ref()),
        ];
        let mut files = Files::new()
            .layer(&self.layer)
            .checkpoint("--weights", self.weights.as_deref())
            .read("--input", &self.input)
            .read("--replay", &self.replay.replay)
            .read("--placement", &self.ranks.placement);
        for (option, path) in outputs {
            path.map_or(Ok(()), |path| check_output(option, path))?;
            files = files.written(option, path);
        }
        files.check()
    }

    /// Makes the layer and runs it in this process alone.
    fn alone(
        &self,
        engine: &Engine,
        spec: &LayerSpec,
        weights: &LayerReader<'_>,
        tokens: &Tokens<'_>,
        progress: &Progress,
    ) -> Result<RunOutcome> {
        let started = Instant::now();
        let layer = match self.pass.training() {
            Some(training) => engine.training_layer(spec, weights, training),
            None => engine.layer(spec, weights),
        };
        let mut layer = layer.map_err(|error| error.needing(&self.ahead()))?;
        let built = started.elapsed();
        progress.next("running");
        let trace = self.trace.as_ref().map(|_| Arc::new(Trace::default()));
        layer.record(trace.clone().map(|trace| trace as Arc<dyn Recorder>));
        let started = Instant::now();
        let outputs = self.pass.run(&layer, tokens)?;
        Ok(RunOutcome {
            outputs,
            built,
            ran: started.elapsed(),
            trace: trace.map_or(Vec::new(), |trace| trace.events(0)),
            limited: layer.tensor("capacity").is_some(),
            workspace: layer.workspace_bytes(),
        })
    }

    /// Returns what is known of the experts before the layer is read.
    fn experts_as(&self) -> ExpertsAs<'_> {
        ExpertsAs {
            weights: self.weights.as_deref(),
            ..ExpertsAs::default()
        }
    }

    fn checkpoint(&self, source: &SpecSource) -> Result<Checkpoint> {
        let path = self.weights.as_deref().or(source.model.as_deref());
        let path = path.ok_or_else(|| Failure::input("weights are needed: --weights FILE"))?;
        Ok(Checkpoint::open(path)?)
    }

    /// Opens the layer's weights. Only names, types and shapes are read here.
    fn weights<'c>(
        &self,
        spec: &LayerSpec,
        source: &SpecSource,
        file: &'c Checkpoint,
    ) -> Result<LayerReader<'c>> {
        let options = LoadOptions {
            narrow: self.narrow,
            allow_infinite: self.allow_infinite,
            allow_extra: self.allow_extra,
            dequantize: None,
        };
        let all = spec.shape.experts;
        Ok(match (&source.import, self.keys.get()) {
            (Some(import), _) => {
                let spec = spec.clone();
                let import = Import {
                    spec,
                    ..import.clone()
                };
                LayerReader::of_import(&import, file, options)?
            }
            (None, Some(keys)) => LayerReader::of_keys(spec, all, &keys, file, options)?,
            (None, None) => LayerReader::canonical(spec, file, options)?,
        })
    }

    /// Describes the choices that decide the weights, besides their file and the spec.
    fn reading(&self, source: &SpecSource, replay: Option<&ReplaySource<'_>>) -> String {
        let (keys, narrow) = (self.keys.get(), self.narrow);
        let recipes = source.import.as_ref().map(|import| &import.sources);
        let table = match replay {
            Some(ReplaySource::Experts(replayed)) => {
                Some(blake3::hash(&replayed.table.data).to_hex())
            }
            _ => None,
        };
        format!(
            "{recipes:?}, {keys:?}, {narrow}, {table:?}, {:?}",
            self.random
        )
    }

    /// Returns the options that `precompile` needs and an engine does not know: a replay has the
    /// layer without its router, or with a table of an array's tokens.
    fn ahead(&self) -> String {
        match &self.replay.replay {
            None => String::new(),
            Some(path) if replay::is_array(path) => format!(" --replay={}", path.display()),
            Some(_) => " --replay".to_string(),
        }
    }

    fn options(&self, console: &Console) -> EngineOptions {
        self.threads.of(EngineOptions {
            store: Some(self.store.open(console)),
            strict: self.strict,
            ..EngineOptions::default()
        })
    }
}
