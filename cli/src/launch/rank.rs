//! One rank of `moesaic launch`. It starts the program, and ends the program and every process
//! that the program started when the launcher asks for it or is gone.
//!
//! A rank is two processes. `mpiexec` knows the first one, and may kill it at once when the
//! launcher is gone. The second one, the keeper, owns the program, and then still ends it with
//! SIGTERM first.

use super::job_dir::{JobConfig, JobDir, Pipe};
use super::system::{self, FileWatch, Pid, Side};
use crate::failure::{Failure, Result};
use clap::Args;
use moesaic::collectives::World;
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

/// A rank of `moesaic launch`, which starts it
#[derive(Args, Debug)]
pub struct LaunchRankArgs {
    /// The launcher's folder
    job_dir: PathBuf,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    program: Vec<OsString>,
}

/// Interval at which a rank checks the processes that it is ending.
const LOOK: Duration = Duration::from_millis(20);
/// The longest wait, in case a signal was missed.
const LONGEST: Duration = Duration::from_secs(5);
/// The signals that a rank handles.
const SIGNALS: [libc::c_int; 4] = [libc::SIGCHLD, libc::SIGTERM, libc::SIGINT, libc::SIGHUP];
/// A shell's exit code for a program that is not there, or whose interpreter is not.
pub const NOT_FOUND: u8 = 127;
/// A shell's exit code for a program that is there and cannot be started.
const NOT_STARTED: u8 = 126;

/// Runs a rank to its end, and returns the program's exit code.
pub fn execute(args: &LaunchRankArgs) -> Result<ExitCode> {
    let world = World::from_environment().map_err(Failure::input)?;
    let world = world.ok_or_else(|| Failure::input("this is started by `moesaic launch`"))?;
    match system::fork_keeper()? {
        Side::First(keeper) => Ok(ExitCode::from(stand_for(keeper)?)),
        Side::Keeper => keep(args, world),
    }
}

/// Passes signals on to the keeper until it has ended, and returns its exit code.
fn stand_for(keeper: Pid) -> io::Result<u8> {
    let signals = system::signals(&SIGNALS)?;
    let watch = [FileWatch {
        file: signals.as_raw_fd(),
        write: false,
    }];
    loop {
        while let Some(ended) = system::reap() {
            if ended.pid == keeper {
                return Ok(ended.code);
            }
        }
        while let Some(signal) = system::next_signal(&signals) {
            if signal != libc::SIGCHLD {
                system::kill(keeper, signal);
            }
        }
        system::wait(&watch, LONGEST)?;
    }
}

/// Runs the program to its end, and returns its exit code.
fn keep(args: &LaunchRankArgs, world: World) -> Result<ExitCode> {
    let job_dir = JobDir::at(&args.job_dir);
    let config = job_dir.read_config()?;
    if world.size != config.processors.len() {
        return Err(Failure::work(format!(
            "{} ranks were asked for and {} started",
            config.processors.len(),
            world.size
        )));
    }
    let mut status = open(&job_dir, world.rank, Pipe::Status)?;
    let code = match Rank::start(args, &job_dir, &config, world) {
        Ok(mut rank) => rank
            .run(&mut status)
            .inspect_err(|_| system::kill_descendants())?,
        Err(error) => {
            let name = args.program[0].to_string_lossy();
            let reason = crate::failure::reason(&error);
            let code = match error.kind() {
                io::ErrorKind::NotFound => NOT_FOUND,
                _ => NOT_STARTED,
            };
            let words = format!("failed {code} cannot start {name}: {reason}");
            say(&mut status, &words)?;
            code
        }
    };
    Ok(ExitCode::from(code))
}

fn open(job_dir: &JobDir, rank: usize, pipe: Pipe) -> io::Result<File> {
    OpenOptions::new()
        .write(true)
        .open(job_dir.path(rank, pipe))
}

/// Writes a line with a single write, because the launcher expects whole lines.
fn say(status: &mut File, line: &str) -> io::Result<()> {
    status.write_all(format!("{line}\n").as_bytes())
}

struct Rank {
    program: Pid,
    signals: File,
    /// The read end of the liveness pipe; `None` once the rank was told to end.
    liveness: Option<File>,
    grace: Duration,
    /// The time at which the processes that are left get SIGKILL.
    limit: Option<Instant>,
}

impl Rank {
    fn start(
        args: &LaunchRankArgs,
        job_dir: &JobDir,
        config: &JobConfig,
        world: World,
    ) -> io::Result<Rank> {
        let signals = system::signals(&SIGNALS)?;
        system::adopt_orphans()?;
        let liveness = job_dir.watch_liveness_pipe()?;
        let mut command = Command::new(&args.program[0]);
        command
            .args(&args.program[1..])
            .stdin(Stdio::null())
            .stdout(open(job_dir, world.rank, Pipe::Out)?)
            .stderr(open(job_dir, world.rank, Pipe::Err)?)
            .process_group(0)
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", config.port.to_string());
        for (name, value) in [
            ("RANK", world.rank),
            ("WORLD_SIZE", world.size),
            ("LOCAL_RANK", world.rank),
            ("LOCAL_WORLD_SIZE", world.size),
        ] {
            command.env(name, value.to_string());
        }
        let processors = config.processors[world.rank].clone();
        // SAFETY: between fork and exec only system calls are made, and nothing is allocated.
        unsafe { command.pre_exec(move || system::before_exec(libc::SIGKILL, &processors)) };
        Ok(Rank {
            program: command.spawn()?.id() as Pid,
            signals,
            liveness: Some(liveness),
            grace: config.grace,
            limit: None,
        })
    }

    /// Waits until the program and every process that it started have ended.
    fn run(&mut self, status: &mut File) -> io::Result<u8> {
        // If the launcher has gone, the write fails; `wait` notices that too.
        let _ = say(status, "started");
        let mut code = None;
        loop {
            self.wait()?;
            while let Some(ended) = system::reap() {
                if ended.pid == self.program {
                    let _ = say(status, &format!("ended {}", ended.code));
                    code = Some(ended.code);
                }
            }
            let asked = self.liveness.is_none();
            let left = if asked || code.is_some() {
                system::descendants()
            } else {
                continue;
            };
            if let (Some(code), true) = (code, left.is_empty()) {
                self.hold(code)?;
                return Ok(code);
            }
            self.end(&left);
        }
    }

    /// Waits for a signal or the launcher; while the rank is ending, for [`LOOK`] at most.
    fn wait(&mut self) -> io::Result<()> {
        let read = |file: &File| FileWatch {
            file: file.as_raw_fd(),
            write: false,
        };
        let mut watches = vec![read(&self.signals)];
        watches.extend(self.liveness.as_ref().map(read));
        let longest = self.limit.map_or(LONGEST, |_| LOOK);
        system::wait(&watches, longest)?;
        let mut asked = false;
        while let Some(signal) = system::next_signal(&self.signals) {
            asked |= signal != libc::SIGCHLD;
        }
        // The launcher never writes, so a read finds the end of the file or nothing.
        if let Some(liveness) = &mut self.liveness {
            asked |= matches!(liveness.read(&mut [0]), Ok(0));
        }
        if asked {
            self.liveness = None;
        }
        Ok(())
    }

    /// Sends SIGTERM to the processes that are left, and SIGKILL after the grace.
    fn end(&mut self, left: &[Pid]) {
        let signal = match self.limit {
            None => {
                self.limit = Some(Instant::now() + self.grace);
                libc::SIGTERM
            }
            Some(limit) if Instant::now() > limit => libc::SIGKILL,
            Some(_) => return,
        };
        left.iter().for_each(|pid| system::kill(*pid, signal));
    }

    /// Waits after a failure until the launcher has decided. If this rank ended first, an `mpiexec`
    /// in between would kill the other ranks without any grace.
    fn hold(&mut self, code: u8) -> io::Result<()> {
        while code != 0 && self.liveness.is_some() {
            self.wait()?;
        }
        Ok(())
    }
}
