//! The gain of each stage over dispatch by one-hot GEMMs: the layout of rows,
//! kernels, all-to-all schedules, chunks, and adaptive r, one after the other,
//! as passes of ranks with nodes.
//!
//! ```sh
//! cargo bench -p moesaic-benches --bench stages
//! benches/nodes/stages.sh 4 2 200   # 4 nodes of 2 ranks, links of 200 Mbit/s
//! ```
//!
//! The first stage is the layer of fairseq and DeepSpeed: masks with a column
//! for every slot of every expert, two dense GEMMs with them, equally many
//! slots for every expert, one message for each pair of ranks, and a GEMM for
//! each expert and source rank (`stages/baseline.rs`). Its experts are kernels
//! of this compiler, so no stage depends on the speed of large GEMMs. A stage
//! with choices takes the fastest of them and may always keep the choice of the
//! stage before it. An adaptive layer reaches the best static choice at most;
//! the loss of a tuner to it is not part of this bench (docs/ADAPTIVE.md).
//!
//! Ways between none and one need experts in slices. The last stage has a second layer of the
//! same weights, whose experts are shared by half as many groups of two ranks.
//!
//! All outputs, and with `--training` gradients of tokens, are compared with those of the first
//! stage before anything is timed.

#[path = "stages/baseline.rs"]
mod baseline;
#[path = "routing/one_hot.rs"]
#[allow(dead_code, reason = "the bench of routing uses the rest")]
mod one_hot;

use baseline::{Baseline, Layout, named};
use moesaic::collectives::{self, Call, Collectives, Communicator, World, mpi, threads};
use moesaic::cpu::CpuDevice;
use moesaic::mesh::{ProcessGroup, Ranks};
use moesaic::reference::{self, Random};
use moesaic::target::Device;
use moesaic::{
    Engine, EngineOptions, Input, Layer, LayerOptions, LayerSpec, Mesh, Parallel, RngKey, Strategy,
    Tensor, Training,
};
use std::error::Error;
use std::sync::Arc;
use std::time::Instant;

type Result<T = ()> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const HELP: &str = "\
cargo bench -p moesaic-benches --bench stages -- [OPTIONS]

Ranks are those that mpiexec has started, or threads.

  --ranks N       threads, when no launcher has started ranks (4), as two nodes of N/2
  --tokens T,…    tokens of each rank (256,1024)
  --width D       of tokens (512)
  --hidden H      of experts (512)
  --experts N     of each rank (2)
  --rounds N      of which the median counts (7)
  --training      steps, forward and backward, instead of forward passes
";

/// The options of a run.
#[derive(Clone)]
struct Options {
    ranks: usize,
    tokens: Vec<usize>,
    width: usize,
    hidden: usize,
    experts: usize,
    rounds: usize,
    training: bool,
}

impl Options {
    fn parse(args: impl Iterator<Item = String>) -> Result<Option<Options>> {
        let mut options = Options {
            ranks: 4,
            tokens: vec![256, 1024],
            width: 512,
            hidden: 512,
            experts: 2,
            rounds: 7,
            training: false,
        };
        let mut args = args.filter(|arg| arg != "--bench" && arg != "nodes");
        while let Some(name) = args.next() {
            if name == "--help" || name == "--list" {
                print!("{}", if name == "--help" { HELP } else { "" });
                return Ok(None);
            }
            if name == "--training" {
                options.training = true;
                continue;
            }
            let value = args.next().ok_or_else(|| format!("{name} wants a value"))?;
            match name.as_str() {
                "--ranks" => options.ranks = value.parse()?,
                "--tokens" => {
                    let tokens = value.split(',').map(str::parse);
                    options.tokens = tokens.collect::<std::result::Result<_, _>>()?;
                }
                "--width" => options.width = value.parse()?,
                "--hidden" => options.hidden = value.parse()?,
                "--experts" => options.experts = value.parse()?,
                "--rounds" => options.rounds = value.parse()?,
                _ => return Err(format!("{name} is no option\n{HELP}").into()),
            }
        }
        Ok(Some(options))
    }

    /// fairseq's top-2 layer: capacity `2 ceil(T / E)`, weights renormalised over what was
    /// not dropped.
    fn spec(&self, ranks: usize) -> Result<LayerSpec> {
        let (width, hidden, experts) = (self.width, self.hidden, self.experts * ranks);
        Ok(LayerSpec::from_toml(&format!(
            "shape = {{ model_dim = {width}, hidden_dim = {hidden}, experts = {experts}, \
             top_k = 2 }}\n\
             capacity = {{ mode = \"factor\", factor = 1.0, renormalize_after_drop = true }}\n\
             experts = {{ form = \"plain\", activation = \"relu\" }}\n"
        ))?)
    }
}

fn main() -> Result {
    let Some(options) = Options::parse(std::env::args().skip(1))? else {
        return Ok(());
    };
    if World::from_environment()?.is_some() {
        let engine = engine()?;
        let world = mpi::start(&mpi::MpiOptions::default(), engine.device().clone())?;
        let host = collectives::topology::host_name();
        return rank(&options, &engine, world, &host);
    }
    let ranks = options.ranks;
    let device = |_| Ok(Arc::new(CpuDevice::with_threads(1)?) as Arc<dyn Device>);
    let results = threads::run(ranks, device, |world| -> Result {
        let engine = engine()?;
        let host = format!("node{}", 2 * world.rank() / ranks);
        rank(&options, &engine, world, &host)
    })?;
    for result in results {
        result.map_err(|_| "a rank has panicked")??;
    }
    Ok(())
}

fn engine() -> Result<Engine> {
    let options = EngineOptions {
        threads: Some(1),
        ..EngineOptions::default()
    };
    Ok(Engine::open("cpu", options)?)
}

fn rank(options: &Options, engine: &Engine, mut world: Communicator, host: &str) -> Result {
    let (own, size) = (world.rank(), world.size());
    rayon::ThreadPoolBuilder::new()
        .num_threads(1)
        .build()?
        .install(|| -> Result {
            let parallel = Parallel {
                ep: size,
                ..Parallel::default()
            };
            let mesh = Mesh::on_host(&mut world, parallel, host)?.for_any_r();
            let spec = options.spec(size)?;
            let weights = reference::Weights::random(&spec, 7);
            let tensors = baseline::tensors(&weights, 0..spec.shape.experts);
            let training = options.training.then(Training::default);
            let layer = engine.layer_with(
                &spec,
                &tensors,
                LayerOptions::over(&mesh).training(training),
            )?;
            let mut sharded = None;
            if size.is_multiple_of(SHARDS) && options.hidden.is_multiple_of(SHARDS) {
                let parallel = Parallel {
                    ep: size / SHARDS,
                    expert_tp: SHARDS,
                    ..Parallel::default()
                };
                let mesh = Mesh::on_host(&mut world, parallel, host)?.for_any_r();
                sharded = Some(engine.layer_with(
                    &spec,
                    &tensors,
                    LayerOptions::over(&mesh).training(training),
                )?);
            }
            let mut party = Party {
                first: own == 0,
                ranks: engine.ranks(&mesh),
                layer,
                sharded,
                baseline: Baseline::new(engine, &spec, &weights, (own, size), options.training)?,
                rounds: options.rounds,
                training: options.training,
            };
            if party.first {
                println!(
                    "# {size} ranks by {}, {} experts each of {} x {}, top 2, f32, {}; ms, \
                     medians of {} rounds, the slowest rank's; a stage with choices has the \
                     fastest static one, in brackets: no tuner chooses here",
                    world.transport(),
                    options.experts,
                    options.width,
                    options.hidden,
                    if options.training {
                        "forward and backward"
                    } else {
                        "forward"
                    },
                    options.rounds
                );
            }
            for &tokens in &options.tokens {
                party.stages(&mut world, tokens)?;
            }
            drop(party);
            Ok(world.finish(&Call::new("stages"))?)
        })
}

/// The way to run a pass.
#[derive(Clone, Copy, PartialEq)]
enum Variant {
    OneHot(Layout),
    Ours(Strategy),
    /// The same with experts in slices.
    Sharded(Strategy),
}

impl Variant {
    fn name(self) -> String {
        match self {
            Variant::OneHot(Layout::BySource) => "one-hot, a product for each source".to_string(),
            Variant::OneHot(Layout::ByExpert) => "one-hot, a product for each expert".to_string(),
            Variant::Ours(strategy) if strategy == Strategy::default() => "linear".to_string(),
            Variant::Ours(strategy) => strategy.to_string(),
            Variant::Sharded(strategy) => format!("{SHARDS} slices, {strategy}"),
        }
    }
}

/// Number of slices of an expert in the second layer.
const SHARDS: usize = 2;

/// One stage: what it adds, and what it may choose from.
struct Stage {
    name: &'static str,
    variants: Vec<Variant>,
}

/// Stages in the order in which they are added. What a stage chooses from contains what the
/// stages of our kernels before it could choose.
fn stages(sharded: bool) -> Vec<Stage> {
    let ours = |texts: &[&str]| -> Vec<Variant> {
        let parsed = texts.iter().filter_map(|text| text.parse().ok());
        parsed.map(Variant::Ours).collect()
    };
    let linear = || vec![Variant::Ours(Strategy::default())];
    let algorithms = ours(&[
        "all_to_all=2dh",
        "all_to_all=2dh-inter-first",
        "all_to_all=2dh-concurrent",
    ]);
    let chunks = ours(&[
        "overlap_degree=2",
        "overlap_degree=4",
        "overlap_degree=8",
        "overlap_degree=2,overlap_by=peers",
        "overlap_degree=4,overlap_by=peers",
    ]);
    let mut variants = ours(&["r=0"]);
    if sharded {
        let inner = ["r=0", "r=1", "r=2"].map(str::parse);
        variants.extend(inner.into_iter().flatten().map(Variant::Sharded));
    }
    vec![
        Stage {
            name: "one-hot products, equal parts, linear",
            variants: vec![Variant::OneHot(Layout::BySource)],
        },
        Stage {
            name: "+ flexible layout: one product an expert",
            variants: vec![Variant::OneHot(Layout::ByExpert)],
        },
        Stage {
            name: "+ kernels",
            variants: linear(),
        },
        Stage {
            name: "+ two-dimensional exchange",
            variants: algorithms,
        },
        Stage {
            name: "+ adaptive chunks",
            variants: chunks,
        },
        Stage {
            name: "+ adaptive parallelism",
            variants,
        },
    ]
}

/// A rank with all it has.
struct Party {
    first: bool,
    ranks: Ranks,
    layer: Layer,
    /// Where ranks can have slices.
    sharded: Option<Layer>,
    baseline: Baseline,
    rounds: usize,
    training: bool,
}

/// The inputs of a rank.
struct Given {
    tokens: usize,
    /// Tokens `[tokens, width]`.
    x: Vec<f32>,
    /// Gradients, likewise.
    dy: Vec<f32>,
}

impl Given {
    fn new(rank: usize, tokens: usize, width: usize) -> Given {
        let noise = |seed: u64| -> Vec<f32> {
            let values = Random::new(seed + rank as u64).vec(tokens * width);
            values.into_iter().map(|v| v as f32).collect()
        };
        Given {
            tokens,
            x: noise(11),
            dy: noise(1 << 20),
        }
    }
}

impl Party {
    fn stages(&mut self, world: &mut Communicator, tokens: usize) -> Result {
        let width = self.layer.plan().spec.shape.model_dim;
        let given = Given::new(world.rank(), tokens, width);
        let stages = stages(self.sharded.is_some());
        let variants: Vec<Variant> = stages
            .iter()
            .flat_map(|stage| stage.variants.clone())
            .collect();
        let expected = self.prepared(world, variants[0], &given)?;
        for &variant in &variants[1..] {
            let y = self.prepared(world, variant, &given)?;
            self.compare(&expected, &y)?;
        }
        let mut times = vec![Vec::new(); variants.len()];
        for _ in 0..self.rounds {
            for (variant, times) in variants.iter().zip(&mut times) {
                self.prepare(*variant)?;
                world.barrier(&Call::new("round"))?.wait()?;
                let start = Instant::now();
                self.pass(world, *variant, &given)?;
                times.push(start.elapsed().as_secs_f64());
            }
        }
        let flat: Vec<f64> = times.concat();
        let slowest = self.ranks.max_f64(&flat, ProcessGroup::World, "times")?;
        let medians: Vec<f64> = slowest.chunks(self.rounds).map(median).collect();
        if self.first {
            report(tokens, &stages, &variants, &medians);
        }
        Ok(())
    }

    fn prepare(&mut self, variant: Variant) -> Result {
        let (layer, strategy) = match variant {
            Variant::OneHot(_) => return Ok(()),
            Variant::Ours(strategy) => (Some(&mut self.layer), strategy),
            Variant::Sharded(strategy) => (self.sharded.as_mut(), strategy),
        };
        let other = layer.filter(|layer| layer.strategy() != strategy);
        other.map_or(Ok(()), |layer| Ok(layer.set_strategy(strategy)?))
    }

    fn layer_of(&self, variant: Variant) -> &Layer {
        match (variant, &self.sharded) {
            (Variant::Sharded(_), Some(sharded)) => sharded,
            _ => &self.layer,
        }
    }

    fn prepared(
        &mut self,
        world: &mut Communicator,
        variant: Variant,
        given: &Given,
    ) -> Result<Vec<f32>> {
        self.prepare(variant)?;
        self.pass(world, variant, given)
    }

    /// `y`, and of a step `dx` behind it.
    fn pass(
        &mut self,
        world: &mut Communicator,
        variant: Variant,
        given: &Given,
    ) -> Result<Vec<f32>> {
        let Given { tokens, x, dy } = given;
        match (variant, self.training) {
            (Variant::OneHot(layout), false) => self.baseline.forward(world, x, layout),
            (Variant::OneHot(layout), true) => self.baseline.step(world, [x, dy], layout),
            (_, false) => named(
                &self.layer_of(variant).forward(&Input::new(*tokens, x))?,
                "y",
            ),
            (_, true) => {
                let (layer, input) = (self.layer_of(variant), Input::new(*tokens, x));
                let (output, saved) =
                    layer.forward_train(input.reading(&["y"]), RngKey::default())?;
                let dy = Tensor::new(&[*tokens, dy.len() / tokens], dy);
                let back = layer.backward(&saved, &dy, false)?;
                Ok([named(&output, "y")?, named(&back, "dx")?].concat())
            }
        }
    }

    /// On all ranks, or none.
    fn compare(&self, expected: &[f32], y: &[f32]) -> Result {
        let largest = |values: &[f32]| values.iter().fold(0.0f32, |m, v| m.max(v.abs()));
        let apart = expected.iter().zip(y).map(|(a, b)| (a - b).abs());
        let apart = f64::from(apart.fold(0.0f32, f32::max));
        let own = [apart, f64::from(largest(expected))];
        let all = self
            .ranks
            .max_f64(&own, ProcessGroup::World, "differences")?;
        if expected.len() == y.len() && all[0] <= 1e-4 * all[1] && all[1] > 0.0 {
            return Ok(());
        }
        Err(format!("outputs differ by {:.3e} of {:.3e}", all[0], all[1]).into())
    }
}

fn median(times: &[f64]) -> f64 {
    let mut times = times.to_vec();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn report(tokens: usize, stages: &[Stage], variants: &[Variant], medians: &[f64]) {
    println!("tokens of a rank: {tokens}");
    let (mut at, mut before, mut first) = (0, f64::INFINITY, 0.0);
    for (index, stage) in stages.iter().enumerate() {
        let own = at..at + stage.variants.len();
        at = own.end;
        let fastest = own.min_by(|a, b| medians[*a].total_cmp(&medians[*b]));
        let Some(fastest) = fastest else { continue };
        let time = medians[fastest];
        // Up to our kernels a stage is what it is; what can be chosen can be left.
        let chooses = index > 2;
        let kept = if chooses { time.min(before) } else { time };
        let choice = if !chooses {
            String::new()
        } else if time >= before {
            " [as before]".to_string()
        } else {
            format!(" [{}]", variants[fastest].name())
        };
        if index == 0 {
            (before, first) = (time, time);
        }
        println!(
            "  {:42} {:9.2} ms, {:5.2} over the stage before, {:6.2} over the first{choice}",
            stage.name,
            kept * 1e3,
            before / kept,
            first / kept
        );
        before = kept;
    }
    println!("  all:");
    for (variant, time) in variants.iter().zip(medians) {
        let name = variant.name();
        println!("    {name:40} {:9.2} ms", time * 1e3);
    }
}
