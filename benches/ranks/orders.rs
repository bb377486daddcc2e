//! A party of the bench: what a process does that was started to obey.

use crate::Result;
use crate::counted::{Counted, Counts};
use crate::made::{Call, Made};
use crate::party::take_autogroup;
use crate::select::{Pass, dtype, shape};
use moesaic::collectives::{self, Collectives, Communicator, mpi, threads};
use moesaic::{Engine, EngineOptions, Mesh, Parallel};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Others may read weights for long.
const PATIENCE: Duration = Duration::from_secs(3600);

/// `KIND RANKS FOLDER`.
pub fn obey(args: &[String]) -> Result {
    let [kind, ranks, folder] = args else {
        return Err("party KIND RANKS FOLDER".into());
    };
    let (ranks, folder) = (ranks.parse::<usize>()?, PathBuf::from(folder));
    match kind.as_str() {
        "single" => {
            let engine = engine(ranks)?;
            say(&format!("ready one process of {ranks} threads"))?;
            Rank::new(engine, None, None, Counts::default().into()).obey(&folder)
        }
        "threads" => of_threads(ranks, &folder),
        _ => of_process(&folder),
    }
}

fn engine(threads: usize) -> Result<Engine> {
    let options = EngineOptions {
        threads: Some(threads),
        ..EngineOptions::default()
    };
    Ok(Engine::open("cpu", options)?)
}

fn say(line: &str) -> Result {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}

/// As `collectives::threads::run`, over engines that count.
fn of_threads(ranks: usize, folder: &Path) -> Result {
    std::thread::scope(|scope| {
        let start = |own: threads::Threads| {
            scope.spawn(move || -> Result {
                let engine = engine(1)?;
                let counts = Arc::new(Counts::default());
                let counted = Counted {
                    transport: own,
                    counts: Arc::clone(&counts),
                };
                let world = Communicator::new(Box::new(counted), engine.device().clone());
                start_rank(
                    engine,
                    world.with_deadline(PATIENCE),
                    counts,
                    "threads",
                    folder,
                )
            })
        };
        let ranks: Vec<_> = threads::world(ranks).into_iter().map(start).collect();
        for rank in ranks {
            rank.join().map_err(|_| "a rank has panicked")??;
        }
        Ok(())
    })
}

fn of_process(folder: &Path) -> Result {
    take_autogroup()?;
    let engine = engine(1)?;
    let options = mpi::MpiOptions {
        deadline: Some(PATIENCE),
        ..mpi::MpiOptions::default()
    };
    let world = mpi::start(&options, engine.device().clone())?;
    let name = world.transport();
    start_rank(engine, world, Arc::default(), &name, folder)
}

fn start_rank(
    engine: Engine,
    mut world: Communicator,
    counts: Arc<Counts>,
    name: &str,
    folder: &Path,
) -> Result {
    let (rank, size) = (world.rank(), world.size());
    let parallel = Parallel {
        ep: size,
        ..Parallel::default()
    };
    let mesh = Mesh::new(&mut world, parallel)?;
    if rank == 0 {
        say(&format!("ready {size} ranks of 1 thread by {name}"))?;
    }
    Rank::new(engine, Some(mesh), Some(world), counts).obey(folder)
}

/// One that obeys: a rank, or a process alone.
struct Rank {
    engine: Engine,
    mesh: Option<Mesh>,
    world: Option<Communicator>,
    counts: Arc<Counts>,
    made: Option<Made>,
    pass: Pass,
    call: Call,
}

impl Rank {
    fn new(
        engine: Engine,
        mesh: Option<Mesh>,
        world: Option<Communicator>,
        counts: Arc<Counts>,
    ) -> Rank {
        Rank {
            engine,
            mesh,
            world,
            counts,
            made: None,
            pass: Pass::Forward,
            call: Call::default(),
        }
    }

    fn place(&self) -> (usize, usize) {
        let world = self.world.as_ref();
        world.map_or((0, 1), |world| (world.rank(), world.size()))
    }

    fn obey(&mut self, folder: &Path) -> Result {
        let orders = File::open(folder.join(format!("orders.{}", self.place().0)))?;
        for order in BufReader::new(orders).lines() {
            let order = order?;
            let words: Vec<&str> = order.split_whitespace().collect();
            let told = match self.done(&words) {
                Ok(numbers) => numbers.iter().map(|n| format!(" {n}")).collect(),
                Err(problem) => format!("no {problem}"),
            };
            self.answer(&told)?;
        }
        match self.world.take() {
            Some(world) => Ok(world.finish(&collectives::Call::new("end"))?),
            None => Ok(()),
        }
    }

    /// Prints the answers of all ranks in one line, by the first.
    fn answer(&mut self, told: &str) -> Result {
        let call = collectives::Call::new("answers").within(PATIENCE);
        let all = match &mut self.world {
            Some(world) => world.gather_bytes(told.as_bytes(), &call)?,
            None => vec![told.as_bytes().to_vec()],
        };
        let all: Vec<String> = all
            .into_iter()
            .map(String::from_utf8)
            .collect::<std::result::Result<_, _>>()?;
        if self.place().0 > 0 {
            return Ok(());
        }
        match all.iter().find(|told| told.starts_with("no")) {
            Some(problem) => say(&problem.replace('\n', " ")),
            None => say(&format!("ok{}", all.concat())),
        }
    }

    fn done(&mut self, words: &[&str]) -> Result<Vec<u64>> {
        match words {
            ["load", folder, name, kind, pass] => {
                self.pass = pass.parse()?;
                self.made = None;
                let spec = shape(name)?.spec(dtype(kind)?);
                let mesh = self.mesh.as_ref();
                let made = Made::load(&self.engine, mesh, folder.as_ref(), &spec, self.pass)?;
                let steps = made.steps(self.pass).map(|count| count as u64);
                self.made = Some(made);
                Ok(steps.to_vec())
            }
            ["input", folder, tokens] => self.input(folder.as_ref(), tokens.parse()?),
            ["check", stem] => self.check(stem),
            ["run", count] => self.run(count.parse()?),
            ["counts"] => self.traffic(),
            _ => Err(format!("unknown order {words:?}").into()),
        }
    }

    fn input(&mut self, folder: &Path, tokens: usize) -> Result<Vec<u64>> {
        let (rank, size) = self.place();
        let own = rank * tokens / size..(rank + 1) * tokens / size;
        let read = |name: &str| -> Result<Vec<u8>> {
            let all = fs::read(folder.join(name))?;
            let width = all.len() / tokens.max(1);
            Ok(all[own.start * width..own.end * width].to_vec())
        };
        self.call = Call {
            tokens: own.len(),
            x: read("x")?,
            dy: read("dy")?,
        };
        Ok(Vec::new())
    }

    fn once(&self) -> Result<crate::made::Named> {
        let made = self.made.as_ref().ok_or("no layer")?;
        made.once(self.pass, &self.call)
    }

    fn check(&self, stem: &str) -> Result<Vec<u64>> {
        let mut results = self.once()?;
        if let (Pass::Both, Some(made)) = (self.pass, &self.made) {
            results.extend(made.gradients()?);
        }
        for (name, bytes) in results {
            fs::write(format!("{stem}.{}.{name}", self.place().0), bytes)?;
        }
        Ok(Vec::new())
    }

    /// Returns the nanoseconds of `count` calls, after one that does not count.
    fn run(&mut self, count: usize) -> Result<Vec<u64>> {
        self.once()?;
        self.meet()?;
        let start = Instant::now();
        for _ in 0..count {
            self.once()?;
        }
        Ok(vec![start.elapsed().as_nanos() as u64])
    }

    /// All begin at once: who comes late to the first is awake at the second.
    fn meet(&mut self) -> Result {
        if let Some(world) = &mut self.world {
            for _ in 0..2 {
                world.barrier(&collectives::Call::new("begin"))?.wait()?;
            }
        }
        Ok(())
    }

    /// Returns the traffic of a call: eager messages, their bytes, rendezvous
    /// messages, their bytes; and the bytes that, by the plan, go to others and
    /// stay.
    fn traffic(&mut self) -> Result<Vec<u64>> {
        if self.counts.read()[0] == 0 {
            return Err("nothing is counted".into());
        }
        let before = self.counts.read();
        self.once()?;
        let after = self.counts.read();
        let sent = after
            .iter()
            .zip(before)
            .map(|(after, before)| after - before);
        let made = self.made.as_ref().ok_or("no layer")?;
        let planned = made.planned(self.pass, self.call.tokens, self.place().1);
        Ok(sent.chain(planned).collect())
    }
}
