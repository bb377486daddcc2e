//! What each stage brings over dispatch by one-hot products: the layout of rows, kernels,
//! routes, pieces, and ways, one after the other, as passes of ranks with nodes.
//!
//! ```sh
//! cargo bench -p moesaic-benches --bench stages
//! benches/nodes/stages.sh 4 2 200   # 4 nodes of 2 ranks, links of 200 Mbit/s
//! ```
//!
//! The first stage is what fairseq and DeepSpeed do: masks with a column for every slot of
//! every expert, two dense products with them, as many slots for every expert, one message
//! for each pair of ranks, and a product for each expert and source rank
//! (`stages/baseline.rs`). Its experts are this compiler's kernels, so that no stage is
//! about the speed of large products. A stage with choices has the fastest of them, and
//! never less than the stage before it had: what adapts has the best static choice at best,
//! and what a tuner loses to it is not in here (docs/ADAPTIVE.md).
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
use moesaic::mesh::{Among, Ranks};
use moesaic::reference::{self, Random};
use moesaic::target::Device;
use moesaic::{
    Engine, EngineOptions, Input, LayerSpec, Mesh, MeshLayer, Parallel, RngKey, Strategy, Tensor,
    Training,
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

/// What is asked for.
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
        let world = mpi::start(&mpi::Options::default(), engine.device().clone())?;
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
            let mesh = Mesh::on_host(&mut world, parallel, host)?.for_any_ways();
            let spec = options.spec(size)?;
            let weights = reference::Weights::random(&spec, 7);
            let tensors = baseline::tensors(&weights, 0..spec.shape.experts);
            let training = options.training.then(Training::default);
            let layer = engine.mesh_layer(&mesh, &spec, &tensors, training)?;
            let mut sliced = None;
            if size.is_multiple_of(SLICES) && options.hidden.is_multiple_of(SLICES) {
                let parallel = Parallel {
                    ep: size / SLICES,
                    shards: SLICES,
                    ..Parallel::default()
                };
                let mesh = Mesh::on_host(&mut world, parallel, host)?.for_any_ways();
                sliced = Some(engine.mesh_layer(&mesh, &spec, &tensors, training)?);
            }
            let mut party = Party {
                first: own == 0,
                ranks: engine.ranks(&mesh),
                layer,
                sliced,
                baseline: Baseline::new(engine, &spec, &weights, (own, size), options.training)?,
                rounds: options.rounds,
                training: options.training,
            };
            if party.first {
                println!(
                    "# {size} ranks by {}, {} experts each of {} x {}, top 2, f32, {}; ms, \
                     medians of {} rounds, the slowest rank's; a stage with choices has the \
                     fastest static one, in brackets: no tuner chooses here",
                    world.engine(),
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

/// How a pass is done.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    OneHot(Layout),
    Ours(Strategy),
    /// The same with experts in slices.
    Sliced(Strategy),
}

impl Way {
    fn name(self) -> String {
        match self {
            Way::OneHot(Layout::BySource) => "one-hot, a product for each source".to_string(),
            Way::OneHot(Layout::ByExpert) => "one-hot, a product for each expert".to_string(),
            Way::Ours(strategy) if strategy == Strategy::default() => "linear".to_string(),
            Way::Ours(strategy) => strategy.to_string(),
            Way::Sliced(strategy) => format!("{SLICES} slices, {strategy}"),
        }
    }
}

/// Of an expert, in the second layer.
const SLICES: usize = 2;

/// One stage: what it adds, and what it may choose from.
struct Stage {
    name: &'static str,
    ways: Vec<Way>,
}

/// Stages in the order in which they are added. What a stage chooses from contains what the
/// stages of our kernels before it could choose.
fn stages(sliced: bool) -> Vec<Stage> {
    let ours = |texts: &[&str]| -> Vec<Way> {
        let parsed = texts.iter().filter_map(|text| text.parse().ok());
        parsed.map(Way::Ours).collect()
    };
    let linear = || vec![Way::Ours(Strategy::default())];
    let routes = ours(&["route=intra-first", "route=inter-first", "route=concurrent"]);
    let pieces = ours(&[
        "degree=2",
        "degree=4",
        "degree=8",
        "degree=2,cut=ranks",
        "degree=4,cut=ranks",
    ]);
    let mut ways = ours(&["ways=0"]);
    if sliced {
        let inner = ["ways=0", "ways=1", "ways=2"].map(str::parse);
        ways.extend(inner.into_iter().flatten().map(Way::Sliced));
    }
    vec![
        Stage {
            name: "one-hot products, equal parts, linear",
            ways: vec![Way::OneHot(Layout::BySource)],
        },
        Stage {
            name: "+ flexible layout: one product an expert",
            ways: vec![Way::OneHot(Layout::ByExpert)],
        },
        Stage {
            name: "+ kernels",
            ways: linear(),
        },
        Stage {
            name: "+ two-dimensional exchange",
            ways: routes,
        },
        Stage {
            name: "+ adaptive pieces",
            ways: pieces,
        },
        Stage {
            name: "+ adaptive parallelism",
            ways,
        },
    ]
}

/// A rank with all it has.
struct Party {
    first: bool,
    ranks: Ranks,
    layer: MeshLayer,
    /// Where ranks can have slices.
    sliced: Option<MeshLayer>,
    baseline: Baseline,
    rounds: usize,
    training: bool,
}

/// What a rank is given.
struct Given {
    tokens: usize,
    /// `[tokens, width]`.
    x: Vec<f32>,
    /// The same, of gradients.
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
        let width = self.layer.plan().tokens.spec.shape.model_dim;
        let given = Given::new(world.rank(), tokens, width);
        let stages = stages(self.sliced.is_some());
        let ways: Vec<Way> = stages.iter().flat_map(|stage| stage.ways.clone()).collect();
        let expected = self.prepared(world, ways[0], &given)?;
        for &way in &ways[1..] {
            let y = self.prepared(world, way, &given)?;
            self.compare(&expected, &y)?;
        }
        let mut times = vec![Vec::new(); ways.len()];
        for _ in 0..self.rounds {
            for (way, times) in ways.iter().zip(&mut times) {
                self.prepare(*way)?;
                world.barrier(&Call::new("round"))?.wait()?;
                let start = Instant::now();
                self.pass(world, *way, &given)?;
                times.push(start.elapsed().as_secs_f64());
            }
        }
        let flat: Vec<f64> = times.concat();
        let slowest = self.ranks.max_f64(&flat, Among::World, "times")?;
        let medians: Vec<f64> = slowest.chunks(self.rounds).map(median).collect();
        if self.first {
            report(tokens, &stages, &ways, &medians);
        }
        Ok(())
    }

    fn prepare(&mut self, way: Way) -> Result {
        let (layer, strategy) = match way {
            Way::OneHot(_) => return Ok(()),
            Way::Ours(strategy) => (Some(&mut self.layer), strategy),
            Way::Sliced(strategy) => (self.sliced.as_mut(), strategy),
        };
        let other = layer.filter(|layer| layer.strategy() != strategy);
        other.map_or(Ok(()), |layer| Ok(layer.set_strategy(strategy)?))
    }

    fn layer_of(&self, way: Way) -> &MeshLayer {
        match (way, &self.sliced) {
            (Way::Sliced(_), Some(sliced)) => sliced,
            _ => &self.layer,
        }
    }

    fn prepared(&mut self, world: &mut Communicator, way: Way, given: &Given) -> Result<Vec<f32>> {
        self.prepare(way)?;
        self.pass(world, way, given)
    }

    /// `y`, and of a step `dx` behind it.
    fn pass(&mut self, world: &mut Communicator, way: Way, given: &Given) -> Result<Vec<f32>> {
        let Given { tokens, x, dy } = given;
        match (way, self.training) {
            (Way::OneHot(layout), false) => self.baseline.forward(world, x, layout),
            (Way::OneHot(layout), true) => self.baseline.step(world, [x, dy], layout),
            (_, false) => named(&self.layer_of(way).forward(&Input::new(*tokens, x))?, "y"),
            (_, true) => {
                let (layer, input) = (self.layer_of(way), Input::new(*tokens, x));
                let (output, saved) = layer.forward_train(&input, &["y"], RngKey::default())?;
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
        let all = self.ranks.max_f64(&own, Among::World, "differences")?;
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

fn report(tokens: usize, stages: &[Stage], ways: &[Way], medians: &[f64]) {
    println!("tokens of a rank: {tokens}");
    let (mut at, mut before, mut first) = (0, f64::INFINITY, 0.0);
    for (index, stage) in stages.iter().enumerate() {
        let own = at..at + stage.ways.len();
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
            format!(" [{}]", ways[fastest].name())
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
    for (way, time) in ways.iter().zip(medians) {
        let name = way.name();
        println!("    {name:40} {:9.2} ms", time * 1e3);
    }
}
