//! A party of the bench, seen from the process that gives orders.

use crate::Result;
use moesaic::toolchain::{Registry, mpi as installed_mpi};
use std::ffi::CString;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::str::FromStr;
use std::time::Duration;
use tempfile::TempDir;

/// Who computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// One process with a thread for each of the ranks it is compared with.
    Single,
    /// Ranks that are threads, one thread each.
    Threads,
    /// Ranks that are processes, one thread each.
    Mpi,
    /// Tutel on as many processes, one thread each.
    Tutel,
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Kind::Single => "single",
            Kind::Threads => "threads",
            Kind::Mpi => "mpi",
            Kind::Tutel => "tutel",
        })
    }
}

impl FromStr for Kind {
    type Err = String;

    fn from_str(name: &str) -> std::result::Result<Kind, String> {
        let all = [Kind::Single, Kind::Threads, Kind::Mpi, Kind::Tutel];
        let found = all.into_iter().find(|kind| kind.to_string() == name);
        found.ok_or(format!("{name}: kinds are threads, mpi and tutel"))
    }
}

/// Processes that obey. Each rank reads its orders from a pipe of its own, so that it
/// sleeps while others have their turn; the first answers for all.
pub struct Party {
    pub kind: Kind,
    pub title: String,
    ranks: usize,
    children: Vec<Child>,
    orders: Vec<File>,
    answers: BufReader<ChildStdout>,
    folder: TempDir,
}

impl Party {
    pub fn start(kind: Kind, ranks: usize, python: &str) -> Result<Party> {
        let folder = tempfile::tempdir()?;
        let readers = if kind == Kind::Single { 1 } else { ranks };
        let mut orders = Vec::new();
        for rank in 0..readers {
            orders.push(pipe(&folder.path().join(format!("orders.{rank}")))?);
        }
        let mut children = Vec::new();
        for mut command in commands(kind, ranks, python, folder.path())? {
            let name = format!("errors.{}", children.len());
            command.stderr(File::create(folder.path().join(name))?);
            children.push(
                command
                    .stdin(Stdio::null())
                    .stdout(Stdio::piped())
                    .spawn()?,
            );
        }
        let answers = children[0].stdout.take().ok_or("no answers")?;
        let mut party = Party {
            kind,
            title: String::new(),
            ranks: readers,
            children,
            orders,
            answers: BufReader::new(answers),
            folder,
        };
        party.title = party.answer("ready")?.join(" ");
        Ok(party)
    }

    /// Returns the number of ranks that write results.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Sends an order and returns the words after `ok`.
    ///
    /// # Errors
    /// The reason after `no`, or what was said at the end.
    pub fn ask(&mut self, order: &str) -> Result<Vec<String>> {
        for pipe in &mut self.orders {
            writeln!(pipe, "{order}")?;
        }
        self.answer("ok")
    }

    /// Returns the time of a call on the slowest rank, over `count` calls in a
    /// row.
    pub fn run(&mut self, count: usize) -> Result<Duration> {
        let words = self.ask(&format!("run {count}"))?;
        let nanos: Vec<u64> = words.iter().filter_map(|word| word.parse().ok()).collect();
        let slowest = nanos.into_iter().max().ok_or("no times")?;
        Ok(Duration::from_nanos(slowest) / count as u32)
    }

    /// Calls that fill a turn.
    pub fn calls(&mut self, turn: Duration) -> Result<usize> {
        let one = self.run(1)?.min(self.run(1)?);
        let calls = turn.as_nanos() / one.as_nanos().max(1);
        Ok(calls.clamp(1, 2000) as usize)
    }

    /// Returns true if all processes still run.
    pub fn alive(&mut self) -> bool {
        let mut children = self.children.iter_mut();
        children.all(|child| matches!(child.try_wait(), Ok(None)))
    }

    fn answer(&mut self, good: &str) -> Result<Vec<String>> {
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        let mut words = line.split_whitespace();
        match words.next() {
            Some(word) if word == good => Ok(words.map(str::to_string).collect()),
            Some("no") => Err(words.collect::<Vec<_>>().join(" ").into()),
            _ => Err(format!("{} ended: {}", self.kind, self.last_words()).into()),
        }
    }

    /// The last line that any of them wrote of what went wrong.
    fn last_words(&self) -> String {
        let text = |at: usize| {
            let path = self.folder.path().join(format!("errors.{at}"));
            fs::read_to_string(path).unwrap_or_default()
        };
        let all: Vec<String> = (0..self.children.len()).map(text).collect();
        let lines = all.iter().flat_map(|text| text.lines().rev().take(1));
        lines.collect::<Vec<_>>().join("; ")
    }
}

impl Drop for Party {
    fn drop(&mut self) {
        // At the end of its orders everyone ends; who does not is killed.
        self.orders.clear();
        for child in &mut self.children {
            for _ in 0..100 {
                if !matches!(child.try_wait(), Ok(None)) {
                    break;
                }
                std::thread::sleep(Duration::from_millis(20));
            }
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A named pipe, open in both ways so that nobody waits for the other end to open.
fn pipe(path: &Path) -> Result<File> {
    let name = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: the name ends with a zero and lives through the call.
    if unsafe { libc::mkfifo(name.as_ptr(), 0o600) } != 0 {
        return Err(std::io::Error::last_os_error().into());
    }
    Ok(File::options().read(true).write(true).open(path)?)
}

/// The priority of the bench's autogroup, for ranks under `mpiexec`.
const AUTOGROUP: &str = "RANKS_AUTOGROUP";

/// The priority that Linux gives to all processes of this session together, against those
/// of other sessions.
fn autogroup() -> Option<String> {
    let text = fs::read_to_string("/proc/self/autogroup").ok()?;
    text.split_whitespace().last().map(str::to_string)
}

/// `mpiexec` makes a session of each rank. So that its rivals have no priority over it, the
/// rank takes that of the bench's.
///
/// # Errors
/// Where that is not allowed.
pub fn take_autogroup() -> Result {
    let Ok(wanted) = std::env::var(AUTOGROUP) else {
        return Ok(());
    };
    if autogroup().is_some_and(|own| own != wanted) {
        let done = fs::write("/proc/self/autogroup", &wanted);
        done.map_err(|error| format!("autogroup at {wanted}, as the bench: {error}"))?;
    }
    Ok(())
}

fn commands(kind: Kind, ranks: usize, python: &str, folder: &Path) -> Result<Vec<Command>> {
    let own = |mut command: Command| {
        let words = ["party", &kind.to_string(), &ranks.to_string()].map(str::to_string);
        command.args(words).arg(folder);
        command
    };
    match kind {
        Kind::Single | Kind::Threads => Ok(vec![own(Command::new(std::env::current_exe()?))]),
        Kind::Mpi => {
            let found = installed_mpi(&Registry::open()?);
            let found = found.ok_or("no MPI: moesaic toolchain install mpi")?;
            let mut command = Command::new(found.launcher);
            command.args(["-n", &ranks.to_string()]);
            command.arg(std::env::current_exe()?);
            command.env("MOESAIC_MPI", &found.library);
            if let Some(nice) = autogroup() {
                command.env(AUTOGROUP, nice);
            }
            Ok(vec![own(command)])
        }
        Kind::Tutel => tutel(ranks, python, folder),
    }
}

/// Processes that meet at a port of this machine, as under torchrun.
fn tutel(ranks: usize, python: &str, folder: &Path) -> Result<Vec<Command>> {
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/tutel_layer.py");
    let one = |rank: usize| {
        let mut command = Command::new(python);
        command.arg(&script).arg(folder);
        let numbers = [("RANK", rank), ("LOCAL_RANK", rank)];
        let sizes = [("WORLD_SIZE", ranks), ("LOCAL_WORLD_SIZE", ranks)];
        for (name, number) in numbers.into_iter().chain(sizes) {
            command.env(name, number.to_string());
        }
        command.env("MASTER_ADDR", "127.0.0.1");
        command.env("MASTER_PORT", port.to_string());
        command.env("OMP_NUM_THREADS", "1");
        // Large pages, as our own memory has them.
        command.env("THP_MEM_ALLOC_ENABLE", "1");
        command.env("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1");
        command
    };
    Ok((0..ranks).map(one).collect())
}
