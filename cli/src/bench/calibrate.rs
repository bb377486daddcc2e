//! `moesaic bench --ranks`: measures ranks that run at once, and writes a file for `moesaic plan`.

use super::BenchArgs;
use super::all_to_all::{ByAllToAll, Steps};
use crate::console::Console;
use crate::failure::{Failure, Result};
use crate::files::{Files, check_output};
use crate::progress::Progress;
use crate::table::Table;
use crate::timing::TimedCall;
use crate::{plan, random, targets, units};
use moesaic::collectives::measure::{Exchanged, LevelOptions, over_levels};
use moesaic::collectives::{self, Collectives, Communicator, Topology, World, mpi, nccl, threads};
use moesaic::plan::{Step, Work};
use moesaic::planner::{Calibration, LevelFit, Machine, MeasuredProcessor, Timed};
use moesaic::toolchain::{self, Registry};
use moesaic::weights::write_whole;
use moesaic::{DType, Engine, Layer, LayerSpec, Target, Tensors, Training};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

/// The requested ranks: threads of this process, or a launcher's processes.
enum Ranks {
    Threads(usize),
    Processes(World),
}

/// The settings that every rank gets.
struct Job<'j> {
    engine: &'j Engine,
    spec: &'j LayerSpec,
    machine: &'j Machine,
    tokens: usize,
    /// The numbers of tokens for steps by each all-to-all algorithm.
    all_tokens: &'j [usize],
    budget: Duration,
    /// Whether steps over all ranks are timed.
    steps: bool,
}

/// The most measurements of a machine that is not quiet.
const ATTEMPTS: usize = 3;

/// The result, which the first rank has.
struct Found {
    calibration: Calibration,
    exchanges: Vec<Compared>,
    steps: Vec<ByAllToAll>,
}

/// One round of measurements, taken by every rank together.
struct Attempt {
    rates: Rates,
    exchanges: Vec<Exchanged>,
    steps: Option<Steps>,
}

impl Found {
    /// Returns the number of steps that no factor of their all-to-all algorithm explains.
    fn at_bound(&self) -> usize {
        let at_bound = |step: &&ByAllToAll| step.factor.is_at_bound();
        self.steps.iter().filter(at_bound).count()
    }

    /// Refuses to write measurements that would mislead `moesaic plan`.
    fn check_quiet(&self, path: &Path) -> Result {
        let Some(step) = self.steps.iter().find(|step| step.factor.is_at_bound()) else {
            return Ok(());
        };
        let (number, all) = (self.at_bound(), self.steps.len());
        let what = format!(
            "the machine was not quiet, or steps are too short: rows took {:.2} times as long as \
             links say, or beyond, in {number} of {all} steps, such as {} tokens, {}; measured \
             {ATTEMPTS} times, {} is not written",
            step.factor.by,
            step.tokens,
            step.strategy,
            path.display()
        );
        Err(Failure::work(what).hint(
            "stop what else runs on the machine, or ask for more --tokens; --without-steps \
             measures links and launches alone",
        ))
    }
}

/// An exchange, with the relative error of its level's figures: without factors, and predicted from
/// all other exchanges.
struct Compared {
    level: String,
    exchange: Exchanged,
    figures: f64,
    others: f64,
}

/// The work of one rank's processor and the seconds that it took.
#[derive(Clone, Copy, Default)]
struct Rates {
    flops: f64,
    products: f64,
    bytes: f64,
    others: f64,
    launch: f64,
}

/// Measures the ranks and writes the file.
pub fn execute(args: &BenchArgs, console: &Console) -> Result {
    let budget = args.budget()?;
    super::refuse_simulators(&args.target.name)?;
    let (Some(name), Some(path)) = (&args.machine, &args.calibration) else {
        let what = "--ranks measures a machine of `moesaic plan` for a file";
        return Err(Failure::input(what).hint("add --machine NAME|FILE and --calibration FILE"));
    };
    check_output("--calibration", path)?;
    Files::new()
        .layer(&args.layer)
        .read("--machine", plan::is_file(name))
        .written("--calibration", [path])
        .check()?;
    let machine = plan::machine(name)?;
    let spec = args.layer.load(console)?.spec;
    let ranks = args.who()?;
    let mut options = args.options(console);
    if let Ranks::Processes(world) = &ranks {
        options = options.for_rank(&args.target.name, world);
    }
    // The ranks run at once, so each gets one thread unless the user asks for more.
    options.threads = options.threads.or(Some(1));
    let (target, all_tokens) = (&args.target.name, &args.tokens.counts.0);
    let engine = targets::open(target, options, |asked| args.threads.check(asked))?;
    let tokens = all_tokens.iter().copied().max().unwrap_or_default();
    engine.check_tokens(&spec, tokens)?;
    let job = Job {
        engine: &engine,
        spec: &spec,
        machine: &machine,
        tokens,
        all_tokens,
        budget,
        steps: !args.without_steps,
    };
    let Some(found) = ranks.measure(&job)? else {
        return Ok(());
    };
    found.check_quiet(path)?;
    write_whole(path, found.calibration.to_toml().as_bytes())
        .map_err(|error| Failure::unwritable(path, &error))?;
    if args.form.json {
        console.json(&serde_json::to_value(&found.calibration).unwrap_or_default())
    } else {
        console.print(&text(&found, path, console))
    }
}

impl BenchArgs {
    fn who(&self) -> Result<Ranks> {
        let asked = self.ranks.map_or(0, usize::from);
        let world = World::from_environment().map_err(Failure::input)?;
        match world.filter(|world| world.size > 1) {
            Some(world) if world.size == asked => Ok(Ranks::Processes(world)),
            Some(world) => {
                let size = world.size;
                let what =
                    format!("--ranks {asked} contradicts the launcher, which has started {size}");
                Err(Failure::input(what).hint(format!("--ranks {size}")))
            }
            None => Ok(Ranks::Threads(asked)),
        }
    }
}

impl Ranks {
    /// Measures on every rank. The first rank gets the result.
    fn measure(&self, job: &Job<'_>) -> Result<Option<Found>> {
        let device = job.engine.device();
        let end = &collectives::Call::new("end of the bench");
        let Ranks::Processes(_) = self else {
            let Ranks::Threads(count) = *self else {
                return Ok(None);
            };
            let each = threads::run(
                count,
                |_| Ok(device.clone()),
                |mut world: Communicator| {
                    let found = job.rank(&mut world)?;
                    world.finish(end).map_err(Failure::work)?;
                    Ok(found)
                },
            );
            let mut first = None;
            for rank in each.map_err(Failure::work)? {
                let found: Result<Option<Found>> =
                    rank.map_err(|_| Failure::work("a rank has panicked"))?;
                first = first.or(found?);
            }
            return Ok(first);
        };
        let installed = toolchain::mpi(&Registry::open()?).map(|found| found.library);
        if let Target::Cuda(_) | Target::Rocm(_) = job.engine.target() {
            let mut world = job.engine.nccl(nccl::NcclOptions {
                installed_mpi: installed,
                ..nccl::NcclOptions::default()
            })?;
            let found = job.rank(&mut world)?;
            world.finish(end).map_err(Failure::work)?;
            return Ok(found);
        }
        let options = mpi::MpiOptions {
            installed,
            ..mpi::MpiOptions::default()
        };
        let mut world = mpi::start(&options, device.clone()).map_err(Failure::input)?;
        let found = job.rank(&mut world)?;
        world.finish(end).map_err(Failure::work)?;
        Ok(found)
    }
}

impl Job<'_> {
    fn rank(&self, world: &mut dyn Collectives) -> Result<Option<Found>> {
        let call = collectives::Call::new("bench");
        let topology = Topology::gather(world, &call).map_err(Failure::work)?;
        let progress = (world.rank() == 0).then(|| Progress::start("making a layer"));
        let weights = random::weights(self.spec)?;
        let layer = self
            .engine
            .training_layer(self.spec, &weights, Training::default())?;
        for attempt in 1.. {
            let measured = self.attempt(world, &topology, (&layer, &weights), progress.as_ref())?;
            let found = match world.rank() {
                0 => Some(self.found(world.size(), &topology, measured)),
                _ => None,
            };
            let noisy = matches!(&found, Some(Ok(found)) if found.at_bound() > 0);
            if !first_says(world, noisy && attempt < ATTEMPTS)? {
                return found.transpose();
            }
            if let Some(progress) = &progress {
                let next = attempt + 1;
                progress.next(format!(
                    "the machine was not quiet: measuring again ({next} of {ATTEMPTS})"
                ));
            }
        }
        Ok(None)
    }

    /// Measures everything once, on every rank.
    fn attempt(
        &self,
        world: &mut dyn Collectives,
        topology: &Topology,
        (layer, weights): (&Layer, &Tensors<'_>),
        progress: Option<&Progress>,
    ) -> Result<Attempt> {
        let next = |what: &str| {
            if let Some(progress) = progress {
                progress.next(what);
            }
        };
        next("timing its launches on all ranks at once");
        let rates = self.rates(layer, world)?;
        next("timing exchanges");
        let options = LevelOptions::default();
        let timed = over_levels(world, self.engine.device(), topology, &options);
        let exchanges = timed.map_err(Failure::work)?;
        let steps = if self.steps {
            next("timing steps by each all_to_all and in chunks");
            let given = (weights, self.all_tokens);
            Steps::time(self.engine, self.spec, given, (world, topology))?
        } else {
            None
        };
        Ok(Attempt {
            rates,
            exchanges,
            steps,
        })
    }

    /// Turns the measurements of `ranks` ranks into the figures of the file.
    fn found(&self, ranks: usize, topology: &Topology, measured: Attempt) -> Result<Found> {
        let (levels, exchanges) = self.levels(topology, &measured.exchanges)?;
        let errors = exchanges.iter().map(|one| one.others.abs());
        let mut calibration = Calibration {
            machine: self.machine.name.clone(),
            date: today(),
            source: format!(
                "moesaic bench of {} tokens on {} ranks of {} by {}",
                self.tokens,
                ranks,
                topology.shape.map_or(1, |shape| shape.nodes),
                self.engine.device_info().name
            ),
            ranks,
            levels,
            compute: Some(measured.rates.measured(self.spec.precision.activations)),
            band: errors.reduce(f64::max),
            all_to_all_factors: Vec::new(),
        };
        let per_node = topology.shape.map_or(ranks, |shape| shape.per_node);
        let mut machine = calibration
            .apply(self.machine.clone().with_per_node(per_node))
            .map_err(Failure::input)?;
        machine.target = self.engine.target();
        let steps = measured
            .steps
            .map_or(Ok(Vec::new()), |steps| steps.on(&machine))?;
        calibration.all_to_all_factors = steps.iter().map(|step| step.factor).collect();
        Ok(Found {
            calibration,
            exchanges,
            steps,
        })
    }

    /// Measures the launches of a training step while all ranks run some. Times are means, because
    /// a processor that several ranks share is away from each of them part of the time.
    fn rates(&self, layer: &Layer, world: &mut dyn Collectives) -> Result<Rates> {
        let one = self.timed(layer, world, self.tokens.min(1))?;
        let launch = one.iter().map(|(_, seconds)| *seconds);
        let launch = launch.fold(f64::INFINITY, f64::min);
        let mut own = Rates {
            launch: if launch.is_finite() { launch } else { 0.0 },
            ..Rates::default()
        };
        for ((work, product), seconds) in self.timed(layer, world, self.tokens)? {
            let seconds = (seconds - own.launch).max(0.0);
            if product {
                (own.flops, own.products) = (own.flops + work.flops, own.products + seconds)
            } else {
                (own.bytes, own.others) = (own.bytes + work.bytes, own.others + seconds)
            }
        }
        let numbers = [own.flops, own.products, own.bytes, own.others, own.launch];
        let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        let all = world.gather_bytes(&bytes, &collectives::Call::new("rates"));
        let all = all.map_err(Failure::work)?;
        let mean = |at: usize| {
            let of = |rank: &Vec<u8>| rank.as_chunks::<8>().0.get(at).copied();
            let sum: f64 = all.iter().filter_map(of).map(f64::from_le_bytes).sum();
            sum / all.len() as f64
        };
        Ok(Rates {
            flops: mean(0),
            products: mean(1),
            bytes: mean(2),
            others: mean(3),
            launch: mean(4),
        })
    }

    /// Returns the work of each launch, whether it is a GEMM, and its mean seconds.
    fn timed(
        &self,
        layer: &Layer,
        world: &mut dyn Collectives,
        tokens: usize,
    ) -> Result<Vec<((Work, bool), f64)>> {
        let call = TimedCall::new(layer, random::input(self.spec, tokens));
        call.run(layer)?;
        let plan = layer.tilings().at(tokens);
        let of = |step: &Step| {
            let Step::Launch(launch) = step;
            let product = plan.kernels[launch.entry.kernel].op.gemm().is_some();
            (Work::of(plan, step, tokens as u64), product)
        };
        let mut sums: Vec<((Work, bool), f64)> = plan.all_steps().map(|s| (of(s), 0.0)).collect();
        let barrier = collectives::Call::new("launches");
        let handle = world.barrier(&barrier).map_err(Failure::work)?;
        handle.wait().map_err(Failure::work)?;
        let (begun, mut runs) = (Instant::now(), 0.0);
        while runs < 3.0 || begun.elapsed() < self.budget {
            let times = layer.time_steps(tokens)?;
            for ((_, sum), step) in sums.iter_mut().zip(&times) {
                *sum += step.time.as_secs_f64();
            }
            runs += 1.0;
        }
        sums.iter_mut().for_each(|(_, sum)| *sum /= runs);
        Ok(sums)
    }

    /// Fits the levels that were measured, and compares each with its exchanges.
    fn levels(
        &self,
        topology: &Topology,
        timed: &[Exchanged],
    ) -> Result<(Vec<LevelFit>, Vec<Compared>)> {
        let several = topology.shape.is_some_and(|shape| shape.nodes > 1);
        if several && self.machine.levels.len() < 2 {
            let name = &self.machine.name;
            let what = format!("ranks are on several nodes, and {name} has links inside one alone");
            return Err(Failure::input(what).hint("a machine with a second [[level]]"));
        }
        let (mut levels, mut compared) = (Vec::new(), Vec::new());
        for (same_node, level) in [
            (true, self.machine.levels.first()),
            (false, self.machine.levels.last()),
        ] {
            let of = timed.iter().filter(|one| one.same_node == same_node);
            let points: Vec<Timed> = of.clone().map(point).collect();
            let Some(level) = level.filter(|_| points.len() > 1) else {
                continue;
            };
            let (fit, _) = LevelFit::of(&level.name, level.shared, &points);
            compared.extend(of.enumerate().map(|(at, exchange)| Compared {
                level: level.name.clone(),
                exchange: *exchange,
                figures: 1.0 / fit.factors[at].by - 1.0,
                others: fit.without(at),
            }));
            levels.push(fit);
        }
        Ok((levels, compared))
    }
}

/// Returns the first rank's answer, on every rank.
fn first_says(world: &mut dyn Collectives, own: bool) -> Result<bool> {
    let all = world.gather_bytes(&[u8::from(own)], &collectives::Call::new("another attempt"));
    let all = all.map_err(Failure::work)?;
    Ok(all.first().is_some_and(|first| first == &[1]))
}

fn point(one: &Exchanged) -> Timed {
    Timed {
        messages: one.peers as f64,
        bytes: (one.peers * one.bytes) as f64,
        seconds: one.time.as_secs_f64(),
        again: one.again.map(|time| time.as_secs_f64()),
    }
}

impl Rates {
    fn measured(&self, dtype: DType) -> MeasuredProcessor {
        let rate = |work: f64, seconds: f64| (work > 0.0 && seconds > 0.0).then(|| work / seconds);
        let flops = rate(self.flops, self.products);
        let rates = flops.map(|flops| (dtype.name().to_string(), flops * 1e-12));
        MeasuredProcessor {
            memory_gbs: rate(self.bytes, self.others).map(|bytes| bytes * 1e-9),
            gemm_tflops: rates.into_iter().collect::<BTreeMap<_, _>>(),
            launch_us: Some(self.launch * 1e6),
        }
    }
}

fn text(found: &Found, path: &Path, console: &Console) -> String {
    let Found {
        calibration,
        exchanges,
        ..
    } = found;
    let mut levels = Table::new(&["LINKS", ">FIXED", ">BANDWIDTH", ">HALF SIZE", ">HIDDEN"]);
    for level in &calibration.levels {
        levels.row([
            level.name.clone(),
            units::seconds(level.alpha_us * 1e-6),
            units::byte_rate(level.bandwidth_gbs * 1e9),
            units::bytes((level.half_size_kib * 1024.0) as u64),
            format!("{:.0} %", 100.0 * level.hidden),
        ]);
    }
    let columns = [
        "LINKS",
        ">PEERS",
        ">EACH",
        ">MEASURED",
        ">AGAIN",
        ">FIGURES",
        ">OTHERS",
    ];
    let mut each = Table::new(&columns);
    for one in exchanges {
        let again = one.exchange.again;
        each.row([
            one.level.clone(),
            one.exchange.peers.to_string(),
            units::bytes(one.exchange.bytes as u64),
            units::seconds(one.exchange.time.as_secs_f64()),
            again.map_or(String::new(), |time| units::seconds(time.as_secs_f64())),
            format!("{:+.0} %", 100.0 * one.figures),
            format!("{:+.0} %", 100.0 * one.others),
        ]);
    }
    let mut text = levels.render(&console.out) + "\n" + &each.render(&console.out);
    if let Some(compute) = &calibration.compute {
        for (dtype, rate) in &compute.gemm_tflops {
            text += &format!("\nproducts of {dtype}: {:.2} GFLOP/s a rank", rate * 1e3);
        }
        let memory = compute.memory_gbs.map(|rate| units::byte_rate(rate * 1e9));
        text += &memory.map_or(String::new(), |rate| {
            format!("\nother kernels: {rate} a rank")
        });
    }
    for step in &found.steps {
        text += &format!(
            "\na step of {} tokens, {}: {}, rows {:.2} times as long as links say",
            step.tokens,
            step.strategy,
            units::seconds(step.seconds),
            step.factor.by
        );
    }
    if let Some(band) = calibration.band {
        text += &format!(
            "\nan exchange is off by at most {:.0} % where it is predicted from the others",
            100.0 * band
        );
    }
    text + &format!("\nwritten to {}\n", path.display())
}

/// Returns the current date in UTC.
fn today() -> String {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let days = since.map_or(0, |since| since.as_secs() / 86_400) as i64;
    date(days)
}

/// Returns the date `days` days after 1970-01-01, in the Gregorian calendar.
fn date(mut days: i64) -> String {
    let leap = |year: i64| (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
    let mut year = 1970;
    while days >= 365 + i64::from(leap(year)) {
        days -= 365 + i64::from(leap(year));
        year += 1;
    }
    let february = 28 + i64::from(leap(year));
    let months = [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 0;
    while days >= months[month] {
        days -= months[month];
        month += 1;
    }
    format!("{year}-{:02}-{:02}", month + 1, days + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use moesaic::plan::{AllToAll, OverlapBy};
    use moesaic::planner::AllToAllFactor;

    #[test]
    fn factors_that_met_their_bound_are_not_written() {
        let of = |overlap_degree, by| ByAllToAll {
            tokens: 8,
            strategy: format!("overlap_degree={overlap_degree}").parse().unwrap(),
            seconds: 1.0,
            factor: AllToAllFactor {
                name: AllToAll::Linear,
                overlap_by: OverlapBy::Rows,
                overlap_degree,
                message_kib: 1.0,
                by,
            },
        };
        let found = |steps| Found {
            calibration: Calibration {
                machine: String::new(),
                date: String::new(),
                source: String::new(),
                ranks: 2,
                levels: Vec::new(),
                compute: None,
                band: None,
                all_to_all_factors: Vec::new(),
            },
            exchanges: Vec::new(),
            steps,
        };
        let path = Path::new("m.toml");
        let quiet = found(vec![of(1, 3.9), of(2, 0.3)]);
        assert!(quiet.at_bound() == 0 && quiet.check_quiet(path).is_ok());
        let noisy = found(vec![of(1, 1.0), of(2, 4.0), of(4, 0.25)]);
        assert_eq!(noisy.at_bound(), 2);
        let error = noisy.check_quiet(path).unwrap_err().message;
        for part in [
            "in 2 of 3 steps",
            "8 tokens, overlap_degree=2",
            "m.toml is not written",
        ] {
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn days_have_dates() {
        for (days, expected) in [
            (0, "1970-01-01"),
            (59, "1970-03-01"),
            (11_016, "2000-02-29"),
            (20_781, "2026-11-24"),
        ] {
            assert_eq!(date(days), expected);
        }
    }
}
