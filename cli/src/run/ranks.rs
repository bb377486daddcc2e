//! A layer that ranks share: threads of this process, or processes under a launcher.

use super::agreement::{self, Plan};
use super::input::Tokens;
use super::outcome::Outcome;
use super::pass::PassArgs;
use crate::failure::{Failure, Result};
use crate::{experts, mesh};
use clap::{Args, ValueEnum};
use moesaic::collectives::nccl::{self, Nccl};
use moesaic::collectives::{Call, CollectiveError, Collectives, Communicator, World, mpi, threads};
use moesaic::kernel::Target;
use moesaic::mesh::{Among, Placement};
use moesaic::toolchain::{self, Registry};
use moesaic::tools::joined_placed;
use moesaic::trace::{Recorder, Trace};
use moesaic::weights::{Checkpoint, LayerReader};
use moesaic::{
    Engine, EngineError, EngineOptions, LayerSpec, Mesh, MeshLayer, Parallel, Strategy, Tensor,
    Tensors,
};
use serde_json::Value;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// `--ranks N` and `--mesh`.
#[derive(Args, Debug)]
pub struct RankArgs {
    /// Share the layer among N ranks, which are threads of this process; processes that mpirun or
    /// srun has started are ranks by themselves
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    ranks: Option<u16>,
    /// How ranks share it: ep groups share the experts, each expert has so many shards, and dp groups
    /// hold all of them; what is not named is 1. Shared experts are whole on every rank, or
    /// with shared=sliced in as many shards
    #[arg(long, value_name = mesh::FORM, value_parser = mesh::parse)]
    mesh: Option<Parallel>,
    /// How ranks carry out the call: ways=N,degree=N,cut=C,route=R,wire=W,shadows=N; what is not
    /// named is as without this option. docs/ADAPTIVE.md says what each is
    #[arg(long, value_name = "S", value_parser = str::parse::<Strategy>, default_value = "default")]
    strategy: Strategy,
    /// Which groups of ranks have which experts, such as `0-2 | 3-5,+2` (text or JSON); in order if
    /// not said
    #[arg(long, value_name = "FILE")]
    pub placement: Option<PathBuf>,
    /// What processes exchange rows by
    #[arg(long, value_name = "E", value_enum, default_value_t = Exchange::Auto)]
    exchange: Exchange,
}

/// What processes exchange by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Exchange {
    /// NCCL or RCCL between GPUs, else MPI
    Auto,
    /// MPI; rows of a GPU go by way of the host
    Mpi,
    /// NCCL or RCCL, for cuda and rocm
    Nccl,
}

/// Who the ranks are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ranks {
    /// So many threads of this process.
    Threads(usize),
    /// The processes of a launcher, so many, and which one this is.
    Processes(World),
}

/// What ranks do together.
pub struct Job<'j> {
    pub engine: &'j Engine,
    pub spec: &'j LayerSpec,
    pub weights: &'j LayerReader<'j>,
    /// The file they are in, and what else decides which are read.
    pub checkpoint: &'j Checkpoint,
    pub reading: String,
    pub pass: &'j PassArgs,
    pub tokens: &'j Tokens<'j>,
    /// Whether a trace is wanted.
    pub traced: bool,
    /// What `precompile` has to be told besides what the engine knows.
    pub ahead: &'static str,
}

/// Ranks of a run, and how they share the layer.
#[derive(Clone, Debug)]
pub struct Shared {
    ranks: Ranks,
    exchange: Exchange,
    pub mesh: Parallel,
    /// Where experts are, if not in order.
    pub placement: Option<Placement>,
    strategy: Strategy,
}

impl RankArgs {
    /// How the layer is shared, if it is: as these arguments and the launcher's variables say.
    pub fn get(&self, spec: &LayerSpec) -> Result<Option<Shared>> {
        let world = World::from_environment().map_err(Failure::input)?;
        let launched = world.filter(|world| world.size > 1);
        let asked = self.ranks.map(usize::from);
        let ranks = match (launched, asked, self.mesh) {
            (Some(world), Some(asked), _) if asked != world.size => {
                let message = format!(
                    "--ranks {asked} contradicts the launcher, which has started {} processes{}",
                    world.size,
                    said(&world)
                );
                let hint = "leave --ranks out; where no launcher has started this process, unset \
                            these variables";
                return Err(Failure::input(message).hint(hint));
            }
            (Some(world), ..) => Ranks::Processes(world),
            (None, Some(asked), _) => Ranks::Threads(asked),
            (None, None, Some(mesh)) => Ranks::Threads(mesh.ranks()),
            (None, None, None) => return self.check_one_process().map(|()| None),
        };
        let count = match ranks {
            Ranks::Threads(count) => count,
            Ranks::Processes(world) => world.size,
        };
        let mesh = self.mesh.unwrap_or_else(|| Parallel::of(count, spec));
        mesh.check(spec).map_err(Failure::input)?;
        self.strategy.check(&mesh).map_err(Failure::input)?;
        let placement = experts::placement(self.placement.as_deref())?;
        if let Some(placement) = &placement {
            let checked = placement.check(&mesh, spec.shape.experts);
            checked.map_err(Failure::input)?;
        }
        if mesh.ranks() != count {
            let (who, ranks, words) = (ranks, mesh.ranks(), mesh::words(mesh));
            let message = format!("--mesh is for {ranks} ranks ({words}), there are {count}");
            return Err(match who {
                Ranks::Threads(_) => Failure::input(message).hint("leave --ranks out"),
                Ranks::Processes(world) => Failure::input(message + &said(&world)).hint(format!(
                    "start {ranks} processes, or take a mesh of {count}; where no launcher has \
                     started this process, unset these variables"
                )),
            });
        }
        let exchange = self.exchange;
        if let (Ranks::Threads(_), Exchange::Mpi | Exchange::Nccl) = (ranks, exchange) {
            let message = "--exchange is for processes; ranks that are threads need none";
            let hint = "start them by mpirun, srun or `moesaic launch`, or leave it out";
            return Err(Failure::input(message).hint(hint));
        }
        Ok(Some(Shared {
            ranks,
            exchange,
            mesh,
            placement,
            strategy: self.strategy,
        }))
    }

    /// Refuses what is about ranks where there are none.
    fn check_one_process(&self) -> Result {
        let strategy = self.strategy != Strategy::default();
        let given = [
            strategy.then_some("--strategy"),
            self.placement.as_ref().map(|_| "--placement"),
        ];
        let Some(option) = given.into_iter().flatten().next() else {
            return Ok(());
        };
        let message = format!("{option} is for layers over ranks, and there is one process");
        Err(Failure::input(message).hint("add --ranks N or --mesh"))
    }
}

impl Shared {
    /// With the GPU of this process, if it has one of several.
    pub fn options(&self, target: &str, options: EngineOptions) -> EngineOptions {
        match self.ranks {
            Ranks::Threads(_) => options,
            Ranks::Processes(world) => options.for_rank(target, &world),
        }
    }

    /// Runs the pass; the first rank, or the only process, has the results.
    pub fn run(&self, job: &Job<'_>) -> Result<Option<Outcome>> {
        let device = job.engine.device();
        let Ranks::Processes(_) = self.ranks else {
            let device = |_| Ok(device.clone());
            let ranks = threads::run(self.mesh.ranks(), device, |world| {
                self.rank_of(world, job, Communicator::finish)
            });
            return first(ranks.map_err(Failure::work)?);
        };
        let gpus = matches!(job.engine.target(), Target::Cuda(_) | Target::Rocm(_));
        let registry = Registry::open()?;
        let installed = toolchain::mpi(&registry).map(|found| found.library);
        match (self.exchange, gpus) {
            (Exchange::Nccl, false) => {
                let target = job.engine.target();
                let message = format!("--exchange nccl is between GPUs; the target is {target}");
                Err(Failure::input(message).hint("take --exchange mpi, or leave it out"))
            }
            (Exchange::Mpi, _) | (Exchange::Auto, false) => {
                let options = mpi::Options {
                    installed,
                    ..mpi::Options::default()
                };
                let world = mpi::start(&options, device.clone()).map_err(Failure::input)?;
                self.rank_of(world, job, Communicator::finish)
            }
            (Exchange::Nccl | Exchange::Auto, true) => {
                let options = nccl::Options {
                    installed_mpi: installed,
                    ..nccl::Options::default()
                };
                let world = job.engine.nccl(options)?;
                self.rank_of(world, job, Nccl::finish)
            }
        }
    }

    /// A rank's pass in a world, whose end is then waited for.
    fn rank_of<W: Collectives>(
        &self,
        mut world: W,
        job: &Job<'_>,
        finish: fn(W, &Call) -> std::result::Result<(), CollectiveError>,
    ) -> Result<Option<Outcome>> {
        if let Err(error) = self.check(&mut world, job) {
            // Launchers end the others when the first ends: by then all have found it.
            if matches!(error, CollectiveError::Disagreement { .. }) {
                let _ = finish(world, &Call::new("nothing has run"));
            }
            return Err(agreement::failure(error));
        }
        let outcome = self.rank(&mut world, job)?;
        finish(world, &Call::new("end of the run")).map_err(Failure::work)?;
        Ok(outcome)
    }

    /// Threads have been told the same.
    fn check(
        &self,
        world: &mut dyn Collectives,
        job: &Job<'_>,
    ) -> std::result::Result<(), CollectiveError> {
        let Ranks::Processes(_) = self.ranks else {
            return Ok(());
        };
        let (mesh, strategy) = (self.mesh, self.strategy);
        agreement::check(world, job, &Plan { mesh, strategy })
    }

    /// Of a kernel that is not cached, with all that `precompile` has to be told.
    fn ahead(&self, error: EngineError, job: &Job<'_>) -> EngineError {
        if self.strategy == Strategy::default() {
            error.needing(job.ahead)
        } else {
            let strategy = format!(" --strategy {}", self.strategy);
            error.needing(&strategy).needing(job.ahead)
        }
    }

    fn rank(&self, world: &mut dyn Collectives, job: &Job<'_>) -> Result<Option<Outcome>> {
        let started = Instant::now();
        let mut mesh = Mesh::new(world, self.mesh)?;
        if self.strategy.gathers(&self.mesh) {
            mesh = mesh.for_any_ways();
        }
        if let Some(placement) = &self.placement {
            mesh = mesh.placed(placement)?;
        }
        let training = job.pass.training();
        let (engine, spec) = (job.engine, job.spec);
        let layer = engine.mesh_layer(&mesh, spec, job.weights, training);
        let mut layer = layer.map_err(|error| self.ahead(error, job))?;
        let chosen = layer.set_strategy(self.strategy);
        chosen.map_err(|error| self.ahead(error, job))?;
        let trace = job.traced.then(|| Arc::new(Trace::default()));
        layer.record(trace.clone().map(|trace| trace as Arc<dyn Recorder>));
        let built = started.elapsed();
        let started = Instant::now();
        let own = job.tokens.share(&share(job.tokens.count, &mesh))?;
        let results = job.pass.run_on_rank(&layer, &own)?;
        let ran = started.elapsed();
        let outputs = gather(&layer, job, results)?;
        let trace = gather_trace(&mesh, job, trace.as_deref())?;
        Ok(outputs.map(|outputs| Outcome {
            outputs,
            built,
            ran,
            limited: layer.replicated().plan().tensor("capacity").is_some(),
            workspace: layer.workspace_bytes(),
            trace,
        }))
    }
}

/// Which variables say so.
fn said(world: &World) -> String {
    let variables = world.said_by();
    variables.map_or(String::new(), |words| format!(" ({words})"))
}

/// A rank's tokens: as many as the others', the first ranks one more.
fn share(tokens: usize, mesh: &Mesh) -> Range<usize> {
    let (ranks, rank) = (mesh.parallel().ranks(), mesh.rank());
    rank * tokens / ranks..(rank + 1) * tokens / ranks
}

/// What the first rank has, or why some rank failed.
fn first(ranks: Vec<std::thread::Result<Result<Option<Outcome>>>>) -> Result<Option<Outcome>> {
    let mut outcome = None;
    let mut failures = Vec::new();
    for rank in ranks {
        match rank {
            Ok(Ok(found)) => outcome = outcome.or(found),
            Ok(Err(failure)) => failures.push(failure),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
    // Ranks that only waited for another say so; the one that failed says why.
    let waited = |failure: &Failure| failure.message.contains("rank ");
    let cause = failures.iter().position(|failure| !waited(failure));
    if failures.is_empty() {
        Ok(outcome)
    } else {
        Err(failures.swap_remove(cause.unwrap_or(0)))
    }
}

/// The results of all ranks on the first: of tokens one after the other, of the rest as
/// one process has them.
fn gather(
    layer: &MeshLayer,
    job: &Job<'_>,
    own: Tensors<'static>,
) -> Result<Option<Tensors<'static>>> {
    let mesh = layer.mesh();
    let mut outputs = Tensors::new();
    for (name, tensor) in own {
        let parts = mesh.collect(&**job.engine.device(), &tensor.data)?;
        let Some(parts) = parts else { continue };
        let parts: Vec<Tensor<'static>> = parts
            .into_iter()
            .map(|data| of_rank(&tensor, data))
            .collect();
        let whole = whole(&name, job, mesh, &parts);
        outputs.insert(name, whole);
    }
    Ok((mesh.rank() == 0).then_some(outputs))
}

/// The events of all ranks on the first.
fn gather_trace(mesh: &Mesh, job: &Job<'_>, own: Option<&Trace>) -> Result<Vec<Value>> {
    let Some(own) = own else {
        return Ok(Vec::new());
    };
    let own = Value::Array(own.events(mesh.rank())).to_string();
    let all = mesh.collect(&**job.engine.device(), own.as_bytes())?;
    let read = |bytes: Vec<u8>| serde_json::from_slice::<Vec<Value>>(&bytes).unwrap_or_default();
    let all = all.unwrap_or_default().into_iter();
    Ok(all.flat_map(read).collect())
}

/// Another rank's tensor, which differs from this one's in rows at most.
fn of_rank(like: &Tensor<'_>, data: Vec<u8>) -> Tensor<'static> {
    let mut shape = like.shape.clone();
    let row = shape.iter().skip(1).product::<usize>() * like.dtype.size();
    if let Some(rows) = shape.first_mut().filter(|_| row > 0) {
        *rows = data.len() / row;
    }
    Tensor {
        dtype: like.dtype,
        shape,
        data: data.into(),
    }
}

fn whole(name: &str, job: &Job<'_>, mesh: &Mesh, parts: &[Tensor<'static>]) -> Tensor<'static> {
    let placed = (mesh.parallel(), mesh.placement());
    let first = || parts[0].clone();
    match name {
        "counts" | "overflow" => sums(parts),
        "capacity" => first(),
        _ if name.starts_with("loss.") => losses(name, job, parts),
        _ => match name.strip_prefix("grad.") {
            Some(weight) if mesh.among(weight) != Among::World => {
                joined_placed(weight, placed, |place| parts[placed.0.rank(place)].lend())
            }
            Some(of_tokens) if !["topk_weights", "router.logits"].contains(&of_tokens) => first(),
            _ => beside(parts),
        },
    }
}

fn sums(parts: &[Tensor<'static>]) -> Tensor<'static> {
    let mut all = vec![0i64; parts[0].elements()];
    for part in parts {
        let numbers = part.to_vec::<i64>().unwrap_or_default();
        all.iter_mut().zip(numbers).for_each(|(sum, n)| *sum += n);
    }
    Tensor::owned(&parts[0].shape, all)
}

/// Parts of a loss of all tokens add up; any other is each rank's own, and their mean by
/// tokens is shown.
fn losses(name: &str, job: &Job<'_>, parts: &[Tensor<'static>]) -> Tensor<'static> {
    let (tokens, ranks) = (job.tokens.count, parts.len());
    let of = |rank: usize| (rank + 1) * tokens / ranks - rank * tokens / ranks;
    let weight = |rank: usize| match name {
        "loss.global" => 1.0,
        _ => of(rank) as f32 / tokens.max(1) as f32,
    };
    let values = parts.iter().enumerate();
    let values = values.map(|(rank, part)| part.to_f32()[0] * weight(rank));
    Tensor::owned(&[1], vec![values.sum::<f32>()])
}

fn beside(parts: &[Tensor<'static>]) -> Tensor<'static> {
    let mut shape = parts[0].shape.clone();
    shape[0] = parts.iter().map(|part| part.shape[0]).sum();
    let bytes: Vec<u8> = parts
        .iter()
        .flat_map(|part| part.data.iter().copied())
        .collect();
    Tensor {
        dtype: parts[0].dtype,
        shape,
        data: bytes.into(),
    }
}
