//! Layers of known models on one device, beside other people's, which are compared first.

mod beside;

use crate::commands::Place;
use crate::data::{self, Call, Folder};
use crate::limits::{self, Limits};
use crate::pass::Pass;
use crate::shapes::{SHAPES, Shape};
use crate::timing::{Clocked, Made, Placed, median};
use crate::watch::{self, Came, Pieces, Process, Word};
use crate::work::Work;
use crate::{CUT, Result};
use beside::Peers;
use clap::Args;
use moesaic::reference::rng::Draw;
use moesaic::reference::{self, Skew};
use moesaic::target::Graph;
use moesaic::{DType, Engine, LayerSpec, Tensors};
use std::error::Error;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The type of weights and tokens.
pub const DTYPE: DType = DType::Bf16;

/// Of the draw of experts.
const SEED: u64 = 5;

/// A turn is at least this long, if that takes more than one call.
const TURN_MS: f64 = 20.0;

/// Turns of a line: so many at least, and so many at most.
const ROUNDS: std::ops::RangeInclusive<usize> = 3..=25;

/// What is measured.
#[derive(Args)]
pub struct Options {
    #[command(flatten)]
    place: Place,
    /// mixtral, qwen3, deepseek-v3, gpt-oss, olmoe.
    #[arg(long, value_delimiter = ',')]
    shapes: Vec<String>,
    /// How many tokens a call has.
    #[arg(long, value_delimiter = ',')]
    tokens: Vec<usize>,
    /// Small widths and few tokens.
    #[arg(long)]
    tiny: bool,
    /// Seconds of turns per line; three turns at least.
    #[arg(long, default_value_t = 0.5)]
    turns: f64,
    /// Seconds after which no line is begun.
    #[arg(long, default_value_t = 3600, overrides_with = "seconds")]
    seconds: u64,
    /// A Python that may have torch and transformers.
    #[arg(long, default_value = "python3")]
    python: String,
    /// The folder of torch_layer.py; no peers without it.
    #[arg(long)]
    peers: Option<PathBuf>,
    /// Seconds that nothing may be said.
    #[arg(long, default_value_t = 120)]
    each: u64,
    /// In this process.
    #[arg(long)]
    here: bool,
    /// The first piece: 0 is limits and peers, tables follow.
    #[arg(long, default_value_t = 0, overrides_with = "first")]
    first: usize,
    /// Without limits and peers, which were tried before.
    #[arg(long)]
    bare: bool,
}

/// The layers, smallest first: those of the bench of CPUs at the size that a GPU takes; three
/// small ones when `tiny`.
pub fn shapes(tiny: bool) -> Vec<Shape> {
    let named = |name: &str| {
        let shape = SHAPES.iter().find(|shape| shape.name == name);
        shape.expect("one of the bench's").clone()
    };
    let (mut mixtral, mut deepseek, mut gpt_oss) =
        (named("mixtral"), named("deepseek-v3"), named("gpt-oss"));
    (mixtral.hidden_dim, mixtral.scaled) = (14_336, "");
    (deepseek.experts, deepseek.top_k) = (32, 8);
    deepseek.scaled = "32 of 256 experts, the share of one device of 8";
    (gpt_oss.experts, gpt_oss.scaled) = (32, "");
    if tiny {
        let mut few = vec![named("qwen3"), deepseek, gpt_oss];
        few.iter_mut().for_each(|shape| shape.shrink(32));
        return few;
    }
    vec![named("olmoe"), named("qwen3"), gpt_oss, mixtral, deepseek]
}

impl Options {
    fn tokens(&self) -> Vec<usize> {
        match (self.tokens.is_empty(), self.tiny) {
            (false, _) => self.tokens.clone(),
            (true, true) => vec![1, 8],
            (true, false) => vec![1, 8, 64, 512, 4096, 32_768],
        }
    }

    /// Forward of every layer before both passes of one, so that a run that is cut has most.
    fn tables(&self) -> Result<Vec<Table>> {
        let shapes = self.shapes()?;
        let tables = [Pass::Forward, Pass::Both].into_iter().flat_map(|pass| {
            let shapes = shapes.iter().cloned();
            shapes.map(move |shape| Table { shape, pass })
        });
        Ok(tables.collect())
    }

    fn shapes(&self) -> Result<Vec<Shape>> {
        let all = shapes(self.tiny);
        let known = |name: &String| all.iter().any(|shape| shape.name == name);
        if let Some(name) = self.shapes.iter().find(|name| !known(name)) {
            return Err(format!("no layer is called `{name}`").into());
        }
        let wanted = |shape: &Shape| {
            self.shapes.is_empty() || self.shapes.iter().any(|name| name == shape.name)
        };
        Ok(all.into_iter().filter(wanted).collect())
    }
}

/// A table per pass and layer: 0 when every line is there and right, 1 when one is not, 4
/// when time was up before, or memory too small.
///
/// # Errors
/// When there is no device.
pub fn run(options: &Options) -> Result<ExitCode> {
    let tables = options.tables()?;
    if options.here {
        return here(options, &tables);
    }
    let begun = Instant::now();
    let pieces = Pieces {
        count: 1 + tables.len(),
        each: Duration::from_secs(options.each),
        end: begun + Duration::from_secs(options.seconds),
    };
    let start = |first: usize, came: &Came| {
        let mut command = watch::again()?;
        let seconds = options.seconds.saturating_sub(begun.elapsed().as_secs());
        command.args(["--first", &first.to_string()]);
        command.args(["--seconds", &seconds.to_string()]);
        // What was lost there would be lost there again.
        command.args(came.lost.contains(&0).then_some("--bare"));
        Process::start(&mut command)
    };
    let lost = |piece: usize, why: &str| match piece {
        0 => println!("FAIL limits and peers: {why}"),
        _ => println!("FAIL {}: {why}; the rest is left out", tables[piece - 1]),
    };
    let came = pieces.run(start, |line| println!("{line}"), lost)?;
    if let Some(code) = came.refused {
        return Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)));
    }
    let [failed, skipped, left, _] = came.counts;
    let (failed, left) = (
        failed + came.lost.len(),
        left + came.left * options.tokens().len(),
    );
    println!();
    print!("{failed} lines failed, {skipped} found too little memory, ");
    println!("{left} were not begun for want of time");
    Ok(ExitCode::from(match (failed, skipped + left) {
        (0, 0) => 0,
        (0, _) => CUT,
        _ => 1,
    }))
}

/// A layer and a pass.
struct Table {
    shape: Shape,
    pass: Pass,
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", title(&self.shape), self.pass)
    }
}

/// Runs pieces in this process, and tells its watcher of each.
fn here(options: &Options, tables: &[Table]) -> Result<ExitCode> {
    let engine = options.place.open()?;
    let mut bench = Bench {
        options,
        engine: &engine,
        limits: None,
        peers: Peers::none(),
        end: Instant::now() + Duration::from_secs(options.seconds),
        failed: 0,
        skipped: 0,
        left: 0,
    };
    if options.first == 0 {
        println!("# {}", options.place.describe()?);
        Word::Begun(0).say();
    }
    bench.prepare();
    if options.first == 0 {
        bench.counts().say();
    }
    for (number, table) in (1..).zip(tables).skip(options.first.saturating_sub(1)) {
        Word::Begun(number).say();
        bench.run(table);
        let failed = bench.failed > 0;
        bench.counts().say();
        if failed && engine.device().synchronize().is_err() {
            Word::Again.say();
            return Ok(ExitCode::FAILURE);
        }
    }
    Word::Done.say();
    Ok(ExitCode::SUCCESS)
}

struct Bench<'a> {
    options: &'a Options,
    engine: &'a Engine,
    /// None on a simulator.
    limits: Option<Limits>,
    peers: Peers,
    end: Instant,
    failed: usize,
    /// For want of memory.
    skipped: usize,
    /// For want of time.
    left: usize,
}

impl Bench<'_> {
    /// What came since it was last asked.
    fn counts(&mut self) -> Word {
        let counts = [&mut self.failed, &mut self.skipped, &mut self.left];
        let [failed, skipped, left] = counts.map(std::mem::take);
        Word::Counts([failed, skipped, left, 0])
    }

    /// Limits and peers, and what they are.
    fn prepare(&mut self) {
        let options = self.options;
        if options.place.simulates() {
            println!(
                "# a simulator: launches, arithmetic and traffic are counted, times mean nothing"
            );
            return;
        }
        if options.bare {
            self.limits = Some(Limits::UNKNOWN);
            return;
        }
        let ours = limits::measure(self.engine, options.tiny).unwrap_or_else(|error| {
            self.bad(1, "the card's limits are not known", &*error);
            Limits::UNKNOWN
        });
        let width = limits::product(options.tiny).shape.model_dim;
        println!("# a copy moves {:.0} GB/s, read and written", ours.copy);
        println!(
            "# a product of {width} x {width} x {width} by our kernel: {:.0} TFLOP/s",
            ours.product
        );
        if let Some(folder) = &options.peers {
            self.peers = Peers::start(&options.python, folder);
        }
        let theirs = self.peers.product();
        if let Some(theirs) = theirs {
            println!("# one of 8192 x 8192 x 8192 by torch: {theirs:.0} TFLOP/s");
        }
        self.limits = Some(Limits {
            product: ours.product.max(theirs.unwrap_or(0.0)),
            ..ours
        });
        if options.first == 0 {
            println!("{LEGEND}");
        }
    }

    /// Says what went wrong with so many lines; a device that is too small is no failure.
    fn bad(&mut self, lines: usize, what: &str, error: &dyn Error) {
        let error = error.to_string();
        if error.contains("out of device memory") {
            self.skipped += lines;
            println!("SKIPPED {what}: {error}");
        } else {
            self.failed += lines;
            println!("FAIL {what}: {error}");
        }
    }

    fn run(&mut self, table: &Table) {
        let lines = self.options.tokens().len();
        if Instant::now() > self.end {
            self.left += lines;
            return;
        }
        println!();
        watch::say(&format!("## {table}"));
        let spec = table.shape.spec(DTYPE);
        let weights = data::weights(&spec, DTYPE);
        let made = Made::new(self.engine, &spec, &weights, table.pass);
        let checked = made.and_then(|made| right(&made, &spec, &weights).map(|()| made));
        match checked {
            Ok(made) => self.table(table, &made, &weights),
            Err(error) => self.bad(lines, "the layer", &*error),
        }
    }

    /// A folder with the layer for peers, where there are any and it has room.
    fn folder(&self, table: &Table, weights: &Tensors<'_>) -> Option<Folder> {
        if !self.peers.any() {
            return None;
        }
        let folder = Folder::new().and_then(|folder| {
            data::write_layer(folder.path(), &table.shape, DTYPE, weights)?;
            Ok(folder)
        });
        if let Err(error) = &folder {
            println!("# peers are left out: {error}");
        }
        folder.ok()
    }

    fn table(&mut self, table: &Table, made: &Made, weights: &Tensors<'_>) {
        let shape = &table.shape;
        let folder = self.folder(table, weights);
        match &folder {
            Some(folder) => self.peers.load(folder.path(), table.pass),
            None => self.peers.unload(),
        }
        println!("{}{}", self.titles(), self.peers.titles());
        let router = data::router_rows(weights);
        for (number, tokens) in self.options.tokens().into_iter().enumerate() {
            if Instant::now() > self.end {
                self.left += 1;
                continue;
            }
            let ids = Skew::Uniform.draw(shape.experts, shape.top_k, tokens, SEED);
            let call = Call::new(shape, DTYPE, tokens, &ids, &router);
            let work = Work::of(shape, DTYPE, tokens, &ids, table.pass);
            let line = match self.limits {
                None => counted(made, &call, &work),
                Some(limits) => {
                    let input = folder.as_ref().and_then(|it| input(it, &call, shape));
                    let beside = input.as_deref().map(|input| (input, number == 0));
                    self.line(made, &call, &work, limits, beside)
                }
            };
            match line {
                Ok(line) => watch::say(&line),
                Err(error) => self.bad(1, &format!("T = {tokens}"), &*error),
            }
        }
    }

    fn titles(&self) -> &'static str {
        match self.limits {
            None => "tokens launches     GFLOP        GB",
            Some(_) => {
                "tokens  device ms   graph ms    wall ms  TFLOP/s     GB/s  % of roof  graph's"
            }
        }
    }

    /// The call as a graph; a line without one counts as failed.
    fn graph(&mut self, placed: &Placed<'_>, tokens: usize) -> Option<Arc<dyn Graph>> {
        let graph = placed.capture();
        if let Err(error) = &graph {
            self.failed += 1;
            println!("# T = {tokens}: no graph: {error}");
        }
        graph.ok()
    }

    /// Compares, then times in turns: ours, theirs, ours, theirs. `beside` is the file of
    /// peers' input, and whether weights' gradients are compared too.
    fn line(
        &mut self,
        made: &Made,
        call: &Call,
        work: &Work,
        limits: Limits,
        beside: Option<(&Path, bool)>,
    ) -> Result<String> {
        let placed = made.place(call)?;
        placed.once()?;
        placed.wait()?;
        if let Some((input, gradients)) = beside {
            self.peers.compare(&placed, &made.layer, input, gradients);
        }
        let one = placed.time(1)?.device;
        let count = ((TURN_MS / one) as usize).clamp(1, 200);
        let graph = self.graph(&placed, call.tokens);
        let begun = Instant::now();
        let (mut ours, mut graphs) = (Vec::new(), Vec::new());
        for round in 1..=*ROUNDS.end() {
            ours.push(placed.time(count)?);
            if let Some(graph) = &graph {
                graphs.push(placed.time_graph(&**graph, count)?.device);
            }
            self.peers.turn(ours[round - 1].device);
            let spent = begun.elapsed().as_secs_f64() > self.options.turns;
            if round >= *ROUNDS.start() && spent {
                break;
            }
        }
        let middle = |of: fn(&Clocked) -> f64| median(ours.iter().map(of).collect());
        let device = middle(|clocked| clocked.device).unwrap_or(f64::NAN);
        let wall = middle(|clocked| clocked.wall).unwrap_or(f64::NAN);
        let graph = median(graphs).unwrap_or(f64::NAN);
        let roofline = (work.flops / limits.product / 1e9).max(work.bytes / limits.copy / 1e6);
        Ok(format!(
            "{:6} {device:10.4} {graph:10.4} {wall:10.4} {:8.1} {:8.1} {:10.1}  {:7.1}{}",
            call.tokens,
            work.flops / device / 1e9,
            work.bytes / device / 1e6,
            100.0 * roofline / device,
            100.0 * roofline / graph,
            self.peers.ratios(),
        ))
    }
}

/// The file with a call for peers, where there is room for it.
fn input(folder: &Folder, call: &Call, shape: &Shape) -> Option<PathBuf> {
    let input = folder.input(call, DTYPE, shape);
    if let Err(error) = &input {
        println!("# T = {}: peers are left out: {error}", call.tokens);
    }
    input.ok()
}

/// `olmoe`, or a name with what is smaller than in the model.
fn title(shape: &Shape) -> String {
    match shape.scaled {
        "" => shape.name.to_string(),
        scaled => format!("{} ({scaled})", shape.name),
    }
}

const LEGEND: &str = "\
# A line is a call of T tokens, uniform routing. Times are medians of turns: device and graph by
# events of the stream, graph with the call captured once, wall by the host's clock. TFLOP/s and
# GB/s are the arithmetic and traffic of the call over the device's time: products of experts and router, two
# a multiply-add; weights of experts that have tokens, tokens and outputs once a pass, and the f32
# gradients. % of roof is 100 times the roofline, by the measured product and copy, over our time. Every call has
# the same tokens, so that weights of few experts may lie in the L2 cache. Peers: their device time
# over ours, the median of turns; above 1 we are faster. A peer that differs is left out.";

/// What a simulator can say.
fn counted(made: &Made, call: &Call, work: &Work) -> Result<String> {
    let placed = made.place(call)?;
    placed.once()?;
    placed.wait()?;
    let y = placed.rows("y")?;
    if y.iter().all(|value| value.is_finite()) {
        Ok(format!(
            "{:6} {:8} {:9.4} {:9.6}",
            call.tokens,
            made.launches(call.tokens),
            work.flops / 1e9,
            work.bytes / 1e9,
        ))
    } else {
        Err("y is not finite".into())
    }
}

/// Tokens that are held against the f64 reference.
const FEW: usize = 2;

/// Holds `y` of a few tokens against the reference.
fn right(made: &Made, spec: &LayerSpec, weights: &Tensors<'_>) -> Result {
    let width = spec.shape.model_dim;
    let call = data::noise_call(width, DTYPE, FEW);
    let placed: Placed<'_> = made.place(&call)?;
    placed.once()?;
    let found = placed.rows("y")?;
    let x = data::floats(&call.x, DTYPE).into_iter().map(f64::from);
    let input = reference::Input {
        tokens: FEW,
        x: x.collect(),
        draw: made.layer.plan().training.map(|_| Draw::default()),
        ..reference::Input::default()
    };
    let expected = reference::y_of_few(spec, weights, &input);
    let scale = expected.iter().fold(0.0, |most: f64, v| most.max(v.abs()));
    let errors = found
        .iter()
        .zip(&expected)
        .map(|(f, e)| (f64::from(*f) - e).abs() / scale);
    // NaN is the worst.
    let worst = errors.fold(0.0, |worst: f64, e| if e <= worst { worst } else { e });
    let allowed = 8.0 * DTYPE.unit_roundoff();
    if worst <= allowed {
        Ok(())
    } else {
        Err(format!(
            "y of {FEW} tokens is off by {worst:.1e} of its largest element, {allowed:.0e} is allowed"
        )
        .into())
    }
}
