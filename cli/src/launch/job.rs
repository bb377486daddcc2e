//! The launcher's side of a job: one loop over all messages from the ranks.

use super::job_dir::{JobDir, Pipe};
use super::lines::{Line, Queue};
use super::rank::NOT_FOUND;
use super::system::{self, FileWatch, Pid};
use crate::console::Console;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::process::Child;
use std::time::{Duration, Instant};

/// Interval at which the launcher checks a job that is ending.
const LOOK: Duration = Duration::from_millis(20);
/// Time beyond `--grace` after which the launcher kills every process of the job itself. Ranks
/// kill their own programs first, so this is for ranks that hang.
const MARGIN: Duration = Duration::from_secs(5);
/// The most bytes of `mpiexec`'s own output that are kept for the error message.
const KEPT: usize = 16 << 10;

/// The outcome of a job.
#[derive(Debug, PartialEq, Eq)]
pub struct JobOutcome {
    /// The exit code: that of the first rank that failed, or of the signal.
    pub code: u8,
    /// The output of `mpiexec`, if it failed and no rank did.
    pub starter: Option<String>,
}

pub struct LaunchJob {
    sources: Vec<Source>,
    ranks: Vec<Rank>,
    /// Processes that were started here, and have not ended.
    starters: Vec<Pid>,
    /// The output of `mpiexec` itself.
    said: Vec<u8>,
    signals: File,
    /// The write end of the liveness pipe; closing it tells all ranks to end.
    liveness: Option<File>,
    grace: Duration,
    /// The time at which the processes that are left get SIGKILL.
    limit: Option<Instant>,
    outcome: Option<u8>,
    /// Whether the cause is known: a rank that was named, or a signal to the launcher.
    known: bool,
    out: Queue,
    err: Queue,
}

/// A pipe from a rank, or from `mpiexec`.
struct Source {
    file: Option<File>,
    origin: Origin,
    line: Line,
    prefix: String,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Origin {
    Rank(usize, Pipe),
    Starter,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Rank {
    #[default]
    Awaited,
    Started,
    Ended,
}

/// The display of a job's output, and the time it has to end.
pub struct Style {
    pub prefix: bool,
    pub grace: Duration,
}

impl LaunchJob {
    /// Opens every pipe before a rank starts, so that no rank waits for a reader.
    pub fn prepare(
        job_dir: &JobDir,
        ranks: usize,
        style: &Style,
        console: &Console,
    ) -> io::Result<LaunchJob> {
        let list = [libc::SIGCHLD, libc::SIGTERM, libc::SIGINT, libc::SIGHUP];
        let signals = system::signals(&list)?;
        system::adopt_orphans()?;
        let mut sources = Vec::new();
        let width = (ranks - 1).to_string().len();
        for rank in 0..ranks {
            for pipe in Pipe::ALL {
                let palette = match pipe {
                    Pipe::Err => console.err,
                    _ => console.out,
                };
                let prefix = if style.prefix {
                    palette.dim(&format!("[{rank:>width$}]")) + " "
                } else {
                    String::new()
                };
                sources.push(Source {
                    file: Some(system::open_fifo(&job_dir.path(rank, pipe))?),
                    origin: Origin::Rank(rank, pipe),
                    line: Line::default(),
                    prefix,
                });
            }
        }
        Ok(LaunchJob {
            sources,
            ranks: vec![Rank::Awaited; ranks],
            starters: Vec::new(),
            said: Vec::new(),
            signals,
            liveness: Some(job_dir.hold_liveness_pipe()?),
            grace: style.grace,
            limit: None,
            outcome: None,
            known: false,
            out: Queue::default(),
            err: Queue::default(),
        })
    }

    /// Adds a process that is a rank or that starts ranks. `said` is the output of `mpiexec`.
    pub fn add(&mut self, child: &Child, said: impl IntoIterator<Item = File>) {
        self.starters.push(child.id() as Pid);
        self.sources.extend(said.into_iter().map(|file| Source {
            file: Some(file),
            origin: Origin::Starter,
            line: Line::default(),
            prefix: String::new(),
        }));
    }

    /// Ends the job because a rank could not be started.
    pub fn give_up(&mut self) {
        self.finish(1);
    }

    /// Runs the job until none of its processes is left.
    pub fn run(mut self) -> io::Result<JobOutcome> {
        loop {
            self.wait()?;
            while let Some(signal) = system::next_signal(&self.signals) {
                self.signalled(signal);
            }
            let mut failed = None;
            while let Some(ended) = system::reap() {
                if let Some(place) = self.starters.iter().position(|pid| *pid == ended.pid) {
                    self.starters.swap_remove(place);
                    failed = failed.or((ended.code != 0).then_some(ended.code));
                }
            }
            // The output of a process that has ended is complete in its pipes, so read them now.
            self.read();
            if let Some(code) = failed {
                self.finish(code);
            }
            self.write();
            if self.out.closed && self.outcome.is_none() {
                // The reader of the output has gone. As with every command this is no failure.
                self.finish(0);
            }
            if self.limit.is_some_and(|limit| Instant::now() > limit) {
                system::kill_descendants();
            }
            if self.is_over() {
                return Ok(self.result());
            }
        }
    }

    fn wait(&self) -> io::Result<()> {
        let full = self.out.is_full() || self.err.is_full();
        let mut watches = vec![FileWatch {
            file: self.signals.as_raw_fd(),
            write: false,
        }];
        let read = |source: &Source| {
            let output = matches!(source.origin, Origin::Rank(_, Pipe::Out | Pipe::Err));
            let file = source.file.as_ref().filter(|_| !(full && output))?;
            Some(FileWatch {
                file: file.as_raw_fd(),
                write: false,
            })
        };
        watches.extend(self.sources.iter().filter_map(read));
        let streams = [
            (&self.out, io::stdout().as_raw_fd()),
            (&self.err, io::stderr().as_raw_fd()),
        ];
        watches.extend(
            streams
                .into_iter()
                .filter(|(queue, _)| !queue.is_empty())
                .map(|(_, file)| FileWatch { file, write: true }),
        );
        let ending = self.limit.is_some() || self.starters.is_empty();
        let longest = if ending { LOOK } else { Duration::from_secs(5) };
        system::wait(&watches, longest).map(|_| ())
    }

    fn signalled(&mut self, signal: i32) {
        if signal == libc::SIGCHLD {
            return;
        }
        if self.limit.is_some() {
            // The second request to end kills at once.
            self.limit = Some(Instant::now());
        }
        // From now on `mpiexec` reports ranks that the launcher ends, which is no failure of its
        // own.
        self.known |= self.outcome.is_none();
        self.finish(128 + signal as u8);
    }

    /// Tells all ranks to end. The first call decides the job's outcome.
    fn finish(&mut self, code: u8) {
        self.outcome.get_or_insert(code);
        self.liveness = None;
        self.limit
            .get_or_insert_with(|| Instant::now() + self.grace + MARGIN);
    }

    /// Reads from every pipe that is ready, and closes those at their end.
    fn read(&mut self) {
        let full = self.out.is_full() || self.err.is_full();
        let gone = self.starters.is_empty();
        let mut sources = std::mem::take(&mut self.sources);
        for source in &mut sources {
            let output = matches!(source.origin, Origin::Rank(_, Pipe::Out | Pipe::Err));
            if !(full && output) {
                self.take(source, gone);
            }
        }
        sources.retain(|source| source.file.is_some());
        self.sources = sources;
    }

    fn take(&mut self, source: &mut Source, gone: bool) {
        let mut bytes = [0; 1 << 14];
        let Some(file) = &mut source.file else { return };
        let count = match file.read(&mut bytes) {
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return,
            Err(_) => 0,
        };
        let bytes = &bytes[..count];
        match source.origin {
            Origin::Rank(_, Pipe::Out) => source.line.add(bytes, &source.prefix, &mut self.out),
            Origin::Rank(_, Pipe::Err) => source.line.add(bytes, &source.prefix, &mut self.err),
            Origin::Rank(rank, Pipe::Status) => self.heard(rank, bytes),
            Origin::Starter => {
                self.said.extend_from_slice(bytes);
                let more = self.said.len().saturating_sub(KEPT);
                self.said.drain(..more);
            }
        }
        if count > 0 {
            return;
        }
        // A pipe also reads as ended before its rank has opened it, so these stay open.
        match source.origin {
            Origin::Rank(rank, _) if self.ranks[rank] == Rank::Awaited && !gone => return,
            Origin::Rank(_, Pipe::Out) => source.line.end(&source.prefix, &mut self.out),
            Origin::Rank(_, Pipe::Err) => source.line.end(&source.prefix, &mut self.err),
            Origin::Rank(rank, Pipe::Status) => self.left(rank),
            Origin::Starter => {}
        }
        source.file = None;
    }

    /// Handles status lines of a rank. Each arrives whole, because a rank writes it at once and it
    /// is shorter than the size up to which a pipe writes atomically.
    fn heard(&mut self, rank: usize, bytes: &[u8]) {
        for line in String::from_utf8_lossy(bytes).lines() {
            let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
            match (word, rest.parse::<u8>()) {
                ("started", _) => self.ranks[rank] = Rank::Started,
                ("ended", Ok(code)) => {
                    self.ranks[rank] = Rank::Ended;
                    if code != 0 {
                        self.failed(rank, code, &ended(code));
                    }
                }
                _ => {
                    self.ranks[rank] = Rank::Ended;
                    let (code, words) = rest.split_once(' ').unwrap_or(("", rest));
                    self.failed(rank, code.parse().unwrap_or(NOT_FOUND), words);
                }
            }
        }
    }

    /// Handles a rank that closed its status pipe: the rank ended, or was killed.
    fn left(&mut self, rank: usize) {
        if std::mem::replace(&mut self.ranks[rank], Rank::Ended) == Rank::Started {
            self.failed(rank, 128 + libc::SIGKILL as u8, "was ended from outside");
        }
    }

    fn failed(&mut self, rank: usize, code: u8, what: &str) {
        if self.outcome.is_none() {
            self.known = true;
            let others = match self.ranks.len() {
                1 => "",
                _ => "; the others are ended",
            };
            let before = self.ended_before(rank);
            self.err
                .say(&format!("error: rank {rank} {what}{before}{others}"));
        }
        self.finish(code);
    }

    /// Lists the ranks that ended with exit code 0 before `rank` failed, because it may have waited
    /// for one of them.
    fn ended_before(&self, rank: usize) -> String {
        let ranks = self.ranks.iter().enumerate();
        let ended = ranks.filter(|(other, state)| *other != rank && **state == Rank::Ended);
        let list: Vec<String> = ended.map(|(other, _)| other.to_string()).collect();
        match list.len() {
            0 => String::new(),
            1 => format!("; rank {} had ended before it", list[0]),
            _ => format!("; ranks {} had ended before it", list.join(", ")),
        }
    }

    fn write(&mut self) {
        // Both streams may be the same terminal, so finish a line on one before writing to the
        // other.
        let (out, err) = (self.out.inside_line(), self.err.inside_line());
        if !err && ready(&self.out, io::stdout().as_raw_fd()) {
            self.out.write(&mut io::stdout().lock());
        }
        if !out && ready(&self.err, io::stderr().as_raw_fd()) {
            self.err.write(&mut io::stderr().lock());
        }
    }

    fn is_over(&self) -> bool {
        let quiet = self.starters.is_empty() && self.sources.is_empty();
        let told = self.out.is_empty() && self.err.is_empty();
        quiet && told && system::descendants().is_empty()
    }

    fn result(self) -> JobOutcome {
        let nobody = self.ranks.iter().all(|rank| *rank != Rank::Started);
        let said = String::from_utf8_lossy(&self.said).trim().to_string();
        let code = self.outcome.unwrap_or(0);
        let unknown = code != 0 && nobody && !self.known && !said.is_empty();
        JobOutcome {
            code,
            starter: unknown.then_some(said),
        }
    }
}

fn ready(queue: &Queue, file: i32) -> bool {
    let watch = [FileWatch { file, write: true }];
    !queue.is_empty() && system::wait(&watch, Duration::ZERO).is_ok_and(|ready| ready[0])
}

fn ended(code: u8) -> String {
    match code {
        0..=128 => format!("ended with exit code {code}"),
        _ => format!("ended with exit code {code} (signal {})", code - 128),
    }
}
