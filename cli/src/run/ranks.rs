//! A layer that ranks share: threads of this process, or the processes of a launcher.

use super::agreement::{self, AgreedPlan};
use super::hashed::Hashed;
use super::input::Tokens;
use super::job::RankJob;
use super::meeting::{self, RankMeeting};
use super::outcome::RunOutcome;
use crate::failure::{Failure, Result};
use crate::spec_source::needs_numbers;
use crate::{experts, mesh};
use clap::{Args, ValueEnum};
use moesaic::collectives::nccl::{self, Nccl};
use moesaic::collectives::{Call, CollectiveError, Collectives, Communicator, World, mpi, threads};
use moesaic::engine::{Shard, joined_placed};
use moesaic::kernel::Target;
use moesaic::mesh::{Placement, ProcessGroup, TokenScope};
use moesaic::spec::LossKind;
use moesaic::tensor::WeightSource;
use moesaic::trace::{Recorder, Trace};
use moesaic::{
    EngineError, EngineOptions, Layer, LayerOptions, LayerSpec, Mesh, Parallel, Strategy, Tensor,
    Tensors,
};
use serde_json::Value;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// The options that share a layer among ranks.
#[derive(Args, Debug)]
pub struct RankArgs {
    /// Share the layer among N ranks, which are threads of this process. Processes that mpirun or
    /// srun has started are ranks without this option
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    ranks: Option<u16>,
    /// Mesh of the ranks: ep groups share the experts, expert_tp ranks share each expert, and dp
    /// groups hold all experts; 1 where not named. Shared experts are whole on every rank, or with
    /// shared=sharded sharded over expert_tp ranks
    #[arg(long, value_name = mesh::FORM, value_parser = mesh::parse)]
    mesh: Option<Parallel>,
    /// Strategy of the ranks: some of r=N, overlap_degree=N, overlap_by=B, all_to_all=A, comm_dtype=D
    /// and shadows=N, with commas between them and no spaces; the default where not named.
    /// docs/ADAPTIVE.md explains each
    #[arg(long, value_name = "S", value_parser = str::parse::<Strategy>, default_value = "default")]
    strategy: Strategy,
    /// File that assigns experts to groups of ranks, such as `0-2 | 3-5,+2` (text or JSON); experts
    /// in order if not given
    #[arg(long, value_name = "FILE")]
    pub placement: Option<PathBuf>,
    /// Library by which processes exchange rows
    #[arg(long, value_name = "E", value_enum, default_value_t = Exchange::Auto)]
    exchange: Exchange,
}

/// The library by which processes exchange rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Exchange {
    /// NCCL or RCCL between GPUs, else MPI
    Auto,
    /// MPI; rows of a GPU go through the host
    Mpi,
    /// NCCL or RCCL, for cuda and rocm
    Nccl,
}

/// The identity of the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ranks {
    /// The number of threads of this process.
    Threads(usize),
    /// The processes of a launcher: their number, and the rank of this one.
    Processes(World),
}

impl Ranks {
    fn count(self) -> usize {
        match self {
            Ranks::Threads(count) => count,
            Ranks::Processes(world) => world.size,
        }
    }
}

/// The ranks of a run, and the way they share the layer.
#[derive(Clone, Debug)]
pub struct SharedLayer {
    ranks: Ranks,
    exchange: Exchange,
    pub mesh: Parallel,
    /// The placement of experts; `None` for experts in order.
    pub placement: Option<Placement>,
    strategy: Strategy,
}

impl RankArgs {
    /// Begins MPI if a launcher has started several processes that exchange by it. This comes
    /// before the process reads anything that may be missing on one of them. `target` is the
    /// requested name.
    pub fn meet(&self, target: &str) -> Result<Option<RankMeeting>> {
        let Some(Ranks::Processes(world)) = self.ranks()? else {
            return Ok(None);
        };
        let host = target.starts_with("cpu") || target.starts_with("sim");
        let variable = |name: &str| std::env::var(name).ok();
        let gpus_meet = nccl::Meeting::from_variables(&world, variable);
        let gpus_meet = gpus_meet == Ok(nccl::Meeting::Mpi);
        let by_mpi = match self.exchange {
            Exchange::Mpi => true,
            Exchange::Auto => host || gpus_meet,
            Exchange::Nccl => !host && gpus_meet,
        };
        by_mpi.then(RankMeeting::start).transpose()
    }

    /// Returns the ranks that these arguments and the launcher's variables ask for, if any.
    /// Needs no layer, so that processes can meet before they read one.
    fn ranks(&self) -> Result<Option<Ranks>> {
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
        if let Ranks::Threads(count @ 1..) = ranks {
            // Now: weights of so many ranks take a while to make.
            threads::check_size(count).map_err(Failure::input)?;
        }
        let count = ranks.count();
        if let Some(mesh) = self.mesh.filter(|mesh| mesh.ranks() != count) {
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
        if let (Ranks::Threads(_), Exchange::Mpi | Exchange::Nccl) = (ranks, self.exchange) {
            let message = "--exchange is for processes; ranks that are threads need none";
            let hint = "start them by mpirun, srun or `moesaic launch`, or leave it out";
            return Err(Failure::input(message).hint(hint));
        }
        Ok(Some(ranks))
    }

    /// Returns the mesh, placement and strategy of the ranks, if there are ranks.
    pub fn get(&self, spec: &LayerSpec) -> Result<Option<SharedLayer>> {
        let Some(ranks) = self.ranks()? else {
            return Ok(None);
        };
        let mesh = self
            .mesh
            .unwrap_or_else(|| Parallel::of(ranks.count(), spec));
        mesh.check(spec).map_err(Failure::input)?;
        self.strategy.check(&mesh).map_err(Failure::input)?;
        let placement = experts::placement(self.placement.as_deref())?;
        if let Some(placement) = &placement {
            let checked = placement.check(&mesh, spec.shape.experts);
            checked.map_err(Failure::input)?;
        }
        Ok(Some(SharedLayer {
            ranks,
            exchange: self.exchange,
            mesh,
            placement,
            strategy: self.strategy,
        }))
    }

    /// Refuses options for ranks in a single process.
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

impl SharedLayer {
    /// Returns the reason that experts must be numbers on this mesh, if they must.
    pub fn needs_numbers(&self) -> Option<&'static str> {
        needs_numbers(Some(self.mesh))
    }

    /// Sets the GPU of this process, if the host has several.
    pub fn options(&self, target: &str, options: EngineOptions) -> EngineOptions {
        match self.ranks {
            Ranks::Threads(_) => options,
            Ranks::Processes(world) => options.for_rank(target, &world),
        }
    }

    /// Runs the pass. The first rank, or the only process, returns the results. `meeting` is where
    /// the processes met before they read files, if they did.
    pub fn run(
        &self,
        job: &RankJob<'_>,
        meeting: Option<&RankMeeting>,
    ) -> Result<Option<RunOutcome>> {
        let device = job.engine.device();
        let Ranks::Processes(_) = self.ranks else {
            let device = |_| Ok(device.clone());
            let ranks = threads::run(self.mesh.ranks(), device, |world| {
                self.rank_of(world, job, Communicator::finish)
            });
            return first(ranks.map_err(Failure::work)?);
        };
        let gpus = matches!(job.engine.target(), Target::Cuda(_) | Target::Rocm(_));
        let met = meeting.map(RankMeeting::all_ready).transpose()?;
        let options = meeting::options()?;
        match (self.exchange, gpus) {
            (Exchange::Nccl, false) => {
                let target = job.engine.target();
                let message = format!("--exchange nccl is between GPUs; the target is {target}");
                Err(Failure::input(message).hint("take --exchange mpi, or leave it out"))
            }
            (Exchange::Mpi, _) | (Exchange::Auto, false) => {
                let world = match met {
                    Some(world) => world.on_device(device.clone()),
                    None => mpi::start(&options, device.clone()).map_err(Failure::input)?,
                };
                self.rank_of(world, job, Communicator::finish)
            }
            (Exchange::Nccl | Exchange::Auto, true) => {
                let options = nccl::NcclOptions {
                    installed_mpi: options.installed,
                    ..nccl::NcclOptions::default()
                };
                let world = match met {
                    Some(control) => job.engine.nccl_over(control, options)?,
                    None => job.engine.nccl(options)?,
                };
                self.rank_of(world, job, Nccl::finish)
            }
        }
    }

    /// Runs a rank's pass in a world, and then waits for the end of the world.
    fn rank_of<W: Collectives>(
        &self,
        mut world: W,
        job: &RankJob<'_>,
        finish: fn(W, &Call) -> std::result::Result<(), CollectiveError>,
    ) -> Result<Option<RunOutcome>> {
        if let Err(error) = self.check(&mut world, job) {
            // Launchers end the others when the first ends: by then all have found it.
            if matches!(error, CollectiveError::Disagreement { .. }) {
                let _ = finish(world, &Call::new("nothing has run"));
            }
            return Err(agreement::failure(error));
        }
        let outcome = match self.rank(&mut world, job) {
            Ok(outcome) => outcome,
            Err(stop) => {
                if stop.by_all {
                    let _ = finish(world, &Call::new("nothing has run"));
                }
                return Err(stop.failure);
            }
        };
        let end = finish(world, &Call::new("end of the run"));
        end.map_err(|error| Failure::between_ranks(&error))?;
        Ok(outcome)
    }

    /// Checks that processes agree on options and input. Threads share both.
    fn check(
        &self,
        world: &mut dyn Collectives,
        job: &RankJob<'_>,
    ) -> std::result::Result<(), CollectiveError> {
        let Ranks::Processes(_) = self.ranks else {
            return Ok(());
        };
        let (mesh, strategy) = (self.mesh, self.strategy);
        agreement::check(world, job, &AgreedPlan { mesh, strategy })
    }

    /// Adds the options that `precompile` needs to the error of a kernel that is not cached.
    fn ahead(&self, error: EngineError, job: &RankJob<'_>) -> EngineError {
        if self.strategy == Strategy::default() {
            error.needing(job.ahead)
        } else {
            let strategy = format!(" --strategy {}", self.strategy);
            error.needing(&strategy).needing(job.ahead)
        }
    }

    fn rank(
        &self,
        world: &mut dyn Collectives,
        job: &RankJob<'_>,
    ) -> std::result::Result<Option<RunOutcome>, Stop> {
        let started = Instant::now();
        let mut mesh = Mesh::new(world, self.mesh)?.over(TokenScope::World);
        if self.strategy.gathers(&self.mesh) {
            mesh = mesh.for_any_r();
        }
        if let Some(placement) = &self.placement {
            mesh = mesh.placed(placement)?;
        }
        let training = job.pass.training();
        let (engine, spec) = (job.engine, job.spec);
        let own = Shard::new(spec, mesh.parallel(), mesh.place(), job.weights);
        let own = own.placed(mesh.placement());
        let read = Hashed::new(&own);
        let part: &dyn WeightSource = match self.ranks {
            Ranks::Threads(_) => &own, // they read one file
            Ranks::Processes(_) => &read,
        };
        let layer = engine.layer_with(
            spec,
            part,
            LayerOptions {
                part: true,
                ..LayerOptions::over(&mesh).training(training)
            },
        );
        let mut layer = layer.map_err(|error| self.ahead(error, job))?;
        if let Ranks::Processes(_) = self.ranks
            && let Some(failure) = read.differs(world, &layer)?
        {
            let by_all = true;
            return Err(Stop { failure, by_all });
        }
        let chosen = layer.set_strategy(self.strategy);
        chosen.map_err(|error| self.ahead(error, job))?;
        let trace = job.traced.then(|| Arc::new(Trace::default()));
        layer.record(trace.clone().map(|trace| trace as Arc<dyn Recorder>));
        let built = started.elapsed();
        let started = Instant::now();
        let edges = edges(job, mesh.parallel().ranks());
        let own = job
            .tokens
            .share(&(edges[mesh.rank()]..edges[mesh.rank() + 1]))?;
        let results = job.pass.run_on_rank(&layer, &own, job.recorded)?;
        let ran = started.elapsed();
        let outputs = gather(&layer, job, results)?;
        let trace = gather_trace(&mesh, job, trace.as_deref())?;
        Ok(outputs.map(|outputs| RunOutcome {
            outputs,
            built,
            ran,
            limited: layer.tensor("capacity").is_some(),
            workspace: layer.workspace_bytes(),
            trace,
        }))
    }
}

/// The reason why a rank stops.
struct Stop {
    failure: Failure,
    /// Whether every rank stops here, for the same reason.
    by_all: bool,
}

impl<E: Into<Failure>> From<E> for Stop {
    fn from(error: E) -> Stop {
        Stop {
            failure: error.into(),
            by_all: false,
        }
    }
}

/// Names the variables that describe the world, for messages.
fn said(world: &World) -> String {
    let variables = world.said_by();
    variables.map_or(String::new(), |words| format!(" ({words})"))
}

/// Returns the first token of each rank, and the end. Ranks have equal shares, except that one rank
/// has all of a sequence that a loss looks at as a whole.
fn edges(job: &RankJob<'_>, ranks: usize) -> Vec<usize> {
    let starts = if job.pass.has_losses() {
        sequences(job.spec, job.tokens)
    } else {
        None
    };
    let edge = |rank: usize| {
        let even = rank * job.tokens.count / ranks;
        match &starts {
            None => even,
            Some(starts) => starts[starts.partition_point(|start| *start < even)],
        }
    };
    (0..=ranks).map(edge).collect()
}

/// Returns the tokens at which a rank may begin, and the number of tokens, if a loss looks at
/// sequences.
fn sequences(spec: &LayerSpec, tokens: &Tokens<'_>) -> Option<Vec<usize>> {
    let losses = spec.losses.iter();
    let mut losses = losses.filter(|loss| loss.kind == LossKind::Sequence);
    let length = losses.next()?.sequence_length;
    let ids = tokens.get("sequence_ids").and_then(Tensor::to_vec::<i32>);
    let starts = |token: usize| match (length, &ids) {
        (Some(length), _) => token.is_multiple_of(length),
        (None, Some(ids)) => token == 0 || ids[token] != ids[token - 1],
        (None, None) => token == 0,
    };
    let starts = (0..tokens.count).filter(|token| starts(*token));
    Some(starts.chain([tokens.count]).collect())
}

/// Returns the outcome of the first rank, or the failure that caused the others.
fn first(
    ranks: Vec<std::thread::Result<Result<Option<RunOutcome>>>>,
) -> Result<Option<RunOutcome>> {
    let mut outcome = None;
    let mut failures = Vec::new();
    for rank in ranks {
        match rank {
            Ok(Ok(found)) => outcome = outcome.or(found),
            Ok(Err(failure)) => failures.push(failure),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
    // The rank that failed by itself gives the cause; the others only waited for it.
    let cause = failures.iter().position(|failure| !failure.of_another_rank);
    if failures.is_empty() {
        Ok(outcome)
    } else {
        Err(failures.swap_remove(cause.unwrap_or(0)))
    }
}

/// Gathers the results of all ranks on the first rank: results of tokens in rank order, and the
/// others as one process has them.
fn gather(
    layer: &Layer,
    job: &RankJob<'_>,
    own: Tensors<'static>,
) -> Result<Option<Tensors<'static>>> {
    let mesh = layer.mesh().expect("it was made over ranks");
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

/// Gathers the trace events of all ranks on the first rank.
fn gather_trace(mesh: &Mesh, job: &RankJob<'_>, own: Option<&Trace>) -> Result<Vec<Value>> {
    let Some(own) = own else {
        return Ok(Vec::new());
    };
    let own = Value::Array(own.events(mesh.rank())).to_string();
    let all = mesh.collect(&**job.engine.device(), own.as_bytes())?;
    let read = |bytes: Vec<u8>| serde_json::from_slice::<Vec<Value>>(&bytes).unwrap_or_default();
    let all = all.unwrap_or_default().into_iter();
    Ok(all.flat_map(read).collect())
}

/// Returns another rank's tensor from its bytes. It differs from `like` in the number of rows at
/// most.
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

fn whole(name: &str, job: &RankJob<'_>, mesh: &Mesh, parts: &[Tensor<'static>]) -> Tensor<'static> {
    let placed = (mesh.parallel(), mesh.placement());
    let first = || parts[0].clone();
    match name {
        "counts" | "overflow" => sums(parts),
        "capacity" => first(),
        _ if name.starts_with("loss.") => loss(job, parts),
        _ => match name.strip_prefix("grad.") {
            Some(weight) if mesh.process_group(weight) != ProcessGroup::World => {
                joined_placed(weight, placed, |place| parts[placed.0.rank(place)].lend())
            }
            // Every rank already has the sum over ranks of these gradients. The two others have
            // a row for each token.
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

/// Returns a loss over all tokens. Every rank with tokens has the same value, and a rank without
/// tokens has none.
fn loss(job: &RankJob<'_>, parts: &[Tensor<'static>]) -> Tensor<'static> {
    let edges = edges(job, parts.len());
    let with_tokens = edges.windows(2).position(|edge| edge[0] < edge[1]);
    parts[with_tokens.unwrap_or(0)].clone()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rank_that_failed_by_itself_gives_the_cause() {
        let full = Failure::work("no space on the disk of rank 1");
        let mut waited = Failure::work("rank 1 gave up");
        waited.of_another_rank = true;
        let ranks = vec![Ok(Err(waited.clone())), Ok(Err(full)), Ok(Ok(None))];
        let message = |ranks| first(ranks).err().unwrap().message;
        assert_eq!(message(ranks), "no space on the disk of rank 1");
        assert_eq!(message(vec![Ok(Err(waited))]), "rank 1 gave up");
    }
}
