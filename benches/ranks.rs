//! A layer on ranks, compared with the same layer in one process with as many
//! threads, and with Tutel on as many processes. The outputs are compared
//! first, then pairs are timed in turns.
//!
//! ```sh
//! cargo bench -p moesaic-benches --bench ranks
//! cargo bench -p moesaic-benches --bench ranks -- --shape tutel-8 --kinds mpi,tutel --ranks 2,4 --dtype f32 --python ~/peers/bin/python
//! ```
//!
//! `--help` lists the options. Every party is a process or several, which wait for orders
//! in a read of a pipe while others have their turn (`benches/peers/README.md`).

#[path = "ranks/compare.rs"]
mod compare;
#[path = "ranks/counted.rs"]
mod counted;
#[path = "layer/data.rs"]
#[allow(dead_code, reason = "the bench of layers uses the rest")]
mod data;
#[path = "ranks/made.rs"]
mod made;
#[path = "ranks/orders.rs"]
mod orders;
#[path = "ranks/party.rs"]
mod party;
#[path = "ranks/select.rs"]
mod select;
#[path = "layer/shapes.rs"]
#[allow(dead_code, reason = "the bench of layers uses the rest")]
mod shapes;

use moesaic::reference::Skew;
use moesaic::weights::write_safetensors;
use moesaic::{DType, Engine};
use party::{Kind, Party};
use select::{Pass, Selection};
use shapes::Shape;
use std::error::Error;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

type Result<T = ()> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Seed of the draw of experts.
const SEED: u64 = 5;

/// A turn is at least this long, if that takes more than one call.
const TURN: Duration = Duration::from_millis(20);

/// Threads of the last turn spin for some time; nobody runs meanwhile.
const PAUSE: Duration = Duration::from_millis(15);

/// Rounds of a line: at least, and at most.
const ROUNDS: (usize, usize) = (5, 25);

const LEGEND: &str = "\
# Each line: `one` is one process with a thread for each rank, `ranks` the party; ms of a call, medians over rounds, and `ratio`,
# the median over rounds of one / ranks: above 1 the ranks are faster. Tutel's lines: `one` is our ranks under MPI, `ranks` is Tutel, ratio is Tutel / ours.
# Both: forward, backward and the sum of gradients over ranks. Of one call, all ranks together: KB sent to others, of it in eager; what the
# plan says of rows and counts; rows that leave if a token goes to a rank once, whatever its experts there; KB copied from a rank to itself.
# mpiexec makes a session of each rank. Where Linux shares processors between sessions (sched_autogroup_enabled) and others run, too, ranks under
# MPI have a share each, and one process one share in all: their ratios then say little.
";

fn main() -> Result {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if args.first().map(String::as_str) == Some("party") {
        return orders::obey(&args[1..]);
    }
    let Some(selection) = Selection::parse(args)? else {
        return Ok(());
    };
    println!("# {}", machine());
    println!(
        "# cargo bench -p moesaic-benches --bench ranks -- {}",
        selection.command
    );
    print!("{LEGEND}");
    for shape in &selection.shapes {
        for &dtype in &selection.dtypes {
            for &pass in &selection.passes {
                layer(&selection, shape, dtype, pass)?;
            }
        }
    }
    Ok(())
}

fn machine() -> String {
    let cpu = Engine::cpu().map_or("no C compiler".to_string(), |engine| {
        format!("{}, {}", engine.device_info().name, engine.target())
    });
    let date = std::process::Command::new("date")
        .args(["-u", "+%F %H:%M"])
        .output();
    let date = date.map(|output| output.stdout).unwrap_or_default();
    let date = String::from_utf8(date).unwrap_or_default();
    format!("{}, {cpu}, load {}", date.trim(), load())
}

fn load() -> String {
    let all = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    all.split(' ').next().unwrap_or("unknown").to_string()
}

/// Measures one layer in one type: loads the weights once, then compares each
/// kind of ranks with its rival.
fn layer(selection: &Selection, shape: &Shape, dtype: DType, pass: Pass) -> Result {
    let folder = tempfile::tempdir()?;
    let spec = shape.spec(dtype);
    let weights = data::weights(&spec, dtype);
    write_safetensors(folder.path().join("weights.safetensors"), &weights)?;
    fs::write(
        folder.path().join("layer.json"),
        shape.json(dtype).to_string(),
    )?;
    let router = data::router_rows(&weights);
    drop(weights);
    println!(
        "\n{} {dtype}, {pass}: {} x {}, {} experts, top {}",
        shape.name, shape.model_dim, shape.hidden_dim, shape.experts, shape.top_k
    );
    for &ranks in &selection.ranks {
        for &kind in &selection.kinds {
            let rival = match kind {
                Kind::Tutel => Kind::Mpi,
                _ => Kind::Single,
            };
            let started = Pair::start(selection, folder.path(), (rival, kind), ranks, shape);
            let loaded = started.and_then(|pair| pair.load(shape, dtype, pass));
            match loaded {
                Ok(pair) => pair.lines(selection, &router)?,
                Err(problem) => println!("# {kind}, {ranks} ranks: {problem}"),
            }
        }
    }
    Ok(())
}

/// Two parties with the same layer.
struct Pair<'a> {
    one: Party,
    ranks: Party,
    folder: &'a Path,
    shape: &'a Shape,
    dtype: DType,
    pass: Pass,
}

impl<'a> Pair<'a> {
    fn start(
        selection: &Selection,
        folder: &'a Path,
        (one, kind): (Kind, Kind),
        ranks: usize,
        shape: &'a Shape,
    ) -> Result<Pair<'a>> {
        Ok(Pair {
            one: Party::start(one, ranks, &selection.python)?,
            ranks: Party::start(kind, ranks, &selection.python)?,
            folder,
            shape,
            dtype: DType::F32,
            pass: Pass::Forward,
        })
    }

    fn load(mut self, shape: &Shape, dtype: DType, pass: Pass) -> Result<Self> {
        (self.dtype, self.pass) = (dtype, pass);
        let folder = self.folder.display();
        let order = format!("load {folder} {} {dtype} {pass}", shape.name);
        let one = self.one.ask(&order)?;
        let ranks = self.ranks.ask(&order)?;
        println!(
            "{} beside {}, load {}; launches {}, launches and exchanges of a rank {}",
            self.ranks.title,
            self.one.title,
            load(),
            words(&one, 1),
            words(&ranks, 2),
        );
        println!(
            "{:>7} {:>6} {:>10} {:>10} {:>6} {:>7} {:>11} {:>9} {:>11} {:>11} {:>9} {:>8} {:>8}",
            "tokens",
            "rounds",
            "one ms",
            "ranks ms",
            "ratio",
            "differs",
            "sent KB",
            "eager",
            "plan KB",
            "once KB",
            "here KB",
            "eager",
            "rendezvous"
        );
        Ok(self)
    }

    fn lines(mut self, selection: &Selection, router: &[Vec<f32>]) -> Result {
        for &tokens in &selection.tokens {
            let differs = self.compare(tokens, router);
            match differs {
                Ok((differs, once)) => self.line(selection, tokens, differs, once)?,
                Err(problem) => {
                    println!("{tokens:>7} {problem}");
                    if !self.ranks.alive() || !self.one.alive() {
                        return Ok(());
                    }
                }
            }
        }
        Ok(())
    }

    /// The largest difference, and the bytes of rows that leave if each leaves once.
    fn compare(&mut self, tokens: usize, router: &[Vec<f32>]) -> Result<(f64, u64)> {
        let shape = self.shape;
        let ids = Skew::Uniform.draw(shape.experts, shape.top_k, tokens, SEED);
        let call = data::Call::new(shape, self.dtype, tokens, &ids, router);
        fs::write(self.folder.join("x"), &call.x)?;
        fs::write(self.folder.join("dy"), &call.dy)?;
        let order = format!("input {} {tokens}", self.folder.display());
        self.one.ask(&order)?;
        self.ranks.ask(&order)?;
        let mut results = Vec::new();
        for (name, party) in [("one", &mut self.one), ("ranks", &mut self.ranks)] {
            let stem = self.folder.join(name);
            party.ask(&format!("check {}", stem.display()))?;
            results.push(compare::Results::read(&stem, party.ranks())?);
        }
        let exact = self.ranks.kind != Kind::Tutel;
        let differs = results[0].differs(&results[1], self.dtype, shape.model_dim, exact)?;
        let ranks = self.ranks.ranks();
        let once = compare::rows_once(&ids, shape, tokens, ranks);
        let row = (shape.model_dim * self.dtype.size()) as u64;
        let ways = if self.pass == Pass::Both { 4 } else { 2 };
        Ok((differs, once * row * ways))
    }

    fn line(&mut self, selection: &Selection, tokens: usize, differs: f64, once: u64) -> Result {
        let counts = [self.one.calls(TURN)?, self.ranks.calls(TURN)?];
        let (mut times, begun) = (Vec::new(), Instant::now());
        while times.len() < ROUNDS.0 || times.len() < ROUNDS.1 && begun.elapsed() < selection.budget
        {
            let turn = |party: &mut Party, count| {
                std::thread::sleep(PAUSE);
                party.run(count)
            };
            let one = turn(&mut self.one, counts[0])?;
            times.push((one, turn(&mut self.ranks, counts[1])?));
        }
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let ratio = |(one, ranks): &(Duration, Duration)| match self.ranks.kind {
            Kind::Tutel => ms(*ranks) / ms(*one),
            _ => ms(*one) / ms(*ranks),
        };
        print!(
            "{tokens:>7} {:>6} {:>10.3} {:>10.3} {:>6.2} {differs:>7.0e}",
            times.len(),
            median(times.iter().map(|pair| ms(pair.0)).collect()),
            median(times.iter().map(|pair| ms(pair.1)).collect()),
            median(times.iter().map(ratio).collect()),
        );
        match self.ranks.ask("counts") {
            Ok(list) => println!("{}", traffic(&list, once)),
            Err(_) => println!(),
        }
        Ok(())
    }
}

/// So many of the first words.
fn words(list: &[String], count: usize) -> String {
    list[..count.min(list.len())].join(" ")
}

/// Formats the traffic of all ranks in one call: six numbers of each.
fn traffic(list: &[String], once: u64) -> String {
    let numbers: Vec<u64> = list.iter().filter_map(|word| word.parse().ok()).collect();
    let sum = |at: usize| numbers.chunks(6).map(|rank| rank[at]).sum::<u64>();
    let kb = |bytes: u64| bytes as f64 / 1e3;
    format!(
        " {:>11.1} {:>9.1} {:>11.1} {:>11.1} {:>9.1} {:>8} {:>8}",
        kb(sum(1) + sum(3)),
        kb(sum(1)),
        kb(sum(4)),
        kb(once),
        kb(sum(5)),
        sum(0),
        sum(2),
    )
}

fn median(mut list: Vec<f64>) -> f64 {
    list.sort_by(f64::total_cmp);
    list[list.len() / 2]
}
