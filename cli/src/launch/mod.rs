//! `moesaic launch`.

mod job;
mod job_dir;
mod lines;
mod mpi;
mod place;
mod rank;
mod system;

use crate::console::Console;
use crate::failure::{Code, Failure, Result};
use clap::Args;
use job::{LaunchJob, Style};
use job_dir::{JobConfig, JobDir};
use moesaic::target::Scratch;
use mpi::{MpiUse, Mpiexec};
use place::{Bind, NodeResources, RankPlace};
pub use rank::{LaunchRankArgs, execute as execute_rank};
use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{File, Metadata};
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::Duration;

/// Start ranks of a program on this machine
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  moesaic launch -n 4 -- ./train --steps 100
  moesaic launch -n 8 --bind cores -- python train.py

Ranks find each other by MPI, if there is one (`moesaic toolchain install mpi`), and have torchrun's \
variables. The first rank that fails ends the others, and gives the exit code. On clusters, start \
programs by mpirun or srun.")]
pub struct LaunchArgs {
    /// Number of ranks
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    ranks: u16,
    /// Start the ranks as an MPI world, with MPI's mpiexec
    #[arg(long, value_name = "WHEN", default_value = "auto")]
    mpi: MpiUse,
    /// As root, allow Open MPI to start the ranks, which it otherwise refuses; for containers
    #[arg(long)]
    allow_run_as_root: bool,
    /// Processors that a rank's threads are bound to
    #[arg(long, value_name = "TO", default_value = "numa")]
    bind: Bind,
    /// Print lines of output without their rank
    #[arg(long)]
    no_prefix: bool,
    /// Seconds between SIGTERM and SIGKILL when ranks must end
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0, value_parser = seconds)]
    grace: f64,
    /// MASTER_PORT of the ranks; a free one if not given
    #[arg(long, value_name = "PORT")]
    port: Option<u16>,
    /// Where the system describes the machine, for tests
    #[arg(long, value_name = "DIR", default_value = "/sys", hide = true)]
    sysfs: PathBuf,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    program: Vec<OsString>,
}

fn seconds(text: &str) -> std::result::Result<f64, String> {
    let number = text.parse::<f64>().ok();
    let number = number.filter(|number| (0.0..=86_400.0).contains(number));
    number.ok_or_else(|| "it must be a number of seconds from 0 to 86400".to_string())
}

/// Starts the ranks, and waits until all have ended.
pub fn execute(args: &LaunchArgs, console: &Console) -> Result<ExitCode> {
    refuse_contradictions()?;
    let mut program = args.program.clone();
    program[0] = find_program(&program[0])?.into_os_string();
    let mpiexec = choose_mpi(args, console)?;
    let ranks = usize::from(args.ranks);
    let config = JobConfig {
        port: args.port.map_or_else(free_port, Ok)?,
        grace: Duration::from_secs_f64(args.grace),
        processors: processors(args, ranks),
    };
    let folder = Scratch::new()?;
    let job_dir = JobDir::at(folder.path());
    job_dir.create(&config)?;
    let style = Style {
        prefix: !args.no_prefix,
        grace: config.grace,
    };
    let mut job = LaunchJob::prepare(&job_dir, ranks, &style, console)?;
    let started = match &mpiexec {
        Some(mpiexec) => start_by(mpiexec, ranks, folder.path(), &program, &mut job),
        None => start_here(ranks, folder.path(), &program, &mut job),
    };
    if started.is_err() {
        job.give_up();
    }
    let outcome = job.run()?;
    started?;
    match (outcome.starter, mpiexec) {
        (Some(said), Some(mpiexec)) => {
            let program = mpiexec.program.display();
            Err(Failure::work(format!("{program} failed:\n{said}")))
        }
        _ => Ok(ExitCode::from(outcome.code)),
    }
}

/// Refuses to start ranks inside a job, where they would find two descriptions of their rank.
fn refuse_contradictions() -> Result {
    const VARIABLES: [&str; 10] = [
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "PMI_RANK",
        "PMI_SIZE",
        "PMI_FD",
        "PMIX_RANK",
    ];
    if let Some(name) = VARIABLES.iter().find(|name| env::var_os(name).is_some()) {
        let who = "this process is a rank already, or was given a rank's variables";
        return Err(
            Failure::input(format!("{name} is set: {who}")).hint(format!(
                "start it outside of other launchers, or unset {name}"
            )),
        );
    }
    let Some(address) = env::var_os("MASTER_ADDR").filter(|value| !value.is_empty()) else {
        return Ok(());
    };
    let address = address.to_string_lossy();
    let own = moesaic::collectives::topology::host_name();
    if ["127.0.0.1", "localhost", "::1", &own].contains(&&*address) {
        return Ok(());
    }
    Err(Failure::input(format!(
        "MASTER_ADDR is {address}, and `launch` starts ranks on this machine only"
    ))
    .hint("unset it; for several machines, use mpirun or srun"))
}

/// Finds the program on the search path, before anything is started.
fn find_program(name: &OsStr) -> Result<PathBuf> {
    let path = Path::new(name);
    let places: Vec<PathBuf> = if name.to_string_lossy().contains('/') {
        vec![path.to_path_buf()]
    } else {
        let list = env::var_os("PATH").unwrap_or_default();
        env::split_paths(&list)
            .map(|folder| folder.join(name))
            .collect()
    };
    let there = || {
        places
            .iter()
            .filter_map(|path| Some((path, path.metadata().ok()?)))
    };
    let runs = |meta: &Metadata| meta.is_file() && meta.permissions().mode() & 0o111 != 0;
    if let Some((path, _)) = there().find(|(_, meta)| runs(meta)) {
        return Ok(path.clone());
    }
    let Some((path, meta)) = there().next() else {
        let message = format!("there is no program {}", path.display());
        let hint = "the program comes after `--`: moesaic launch -n 2 -- ./program";
        return Err(Failure::program(Code::NoProgram, message).hint(hint));
    };
    let path = path.display();
    Err(if meta.is_dir() {
        let message = format!("{path} is a folder, and no program");
        Failure::program(Code::NotExecutable, message)
    } else {
        let message = format!("{path} is not executable");
        let hint = format!("chmod +x {path}, or name its interpreter: python {path}");
        Failure::program(Code::NotExecutable, message).hint(hint)
    })
}

fn choose_mpi(args: &LaunchArgs, console: &Console) -> Result<Option<Mpiexec>> {
    let found = match args.mpi {
        MpiUse::Off if args.allow_run_as_root => {
            let message = "--allow-run-as-root is for Open MPI, and --mpi off starts none";
            return Err(Failure::input(message).hint("leave one of them out"));
        }
        MpiUse::Off => return Ok(None),
        MpiUse::Auto | MpiUse::On => mpi::find()?,
    };
    // SAFETY: takes nothing, and always succeeds.
    let root = unsafe { libc::geteuid() } == 0;
    let refused = found.as_ref().is_some_and(|mpiexec| {
        root && !args.allow_run_as_root && mpiexec.is_open_mpi() && !mpi::root_is_allowed()
    });
    if let (true, Some(mpiexec)) = (refused, &found) {
        let message = format!(
            "{} is Open MPI's, which starts no ranks as root",
            mpiexec.program.display()
        );
        if args.mpi == MpiUse::On || mpiexec.is_asked_for {
            let hint = "--allow-run-as-root allows it, as in a container; --mpi off starts plain \
                        processes; `moesaic toolchain install mpi` brings an MPI that asks nothing";
            return Err(Failure::input(message).hint(hint));
        }
        console.note(&format!(
            "{message}: ranks are plain processes, with torchrun's variables; \
             --allow-run-as-root makes them an MPI world"
        ));
        return Ok(None);
    }
    let found = found.map(|mpiexec| Mpiexec {
        as_root: root && args.allow_run_as_root,
        ..mpiexec
    });
    match (&found, args.mpi) {
        (None, MpiUse::On) => Err(Failure::input("no mpiexec was found")
            .hint("`moesaic toolchain install mpi` brings one")),
        (None, _) => {
            console.note(
                "no MPI was found: ranks have torchrun's variables, and find each other by them \
                 alone; `moesaic toolchain install mpi` brings one",
            );
            Ok(found)
        }
        (Some(mpiexec), _) => {
            tracing::info!("ranks are started by {}", mpiexec.program.display());
            Ok(found)
        }
    }
}

/// Returns a port on which nothing listens now.
fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}

fn processors(args: &LaunchArgs, ranks: usize) -> Vec<Vec<usize>> {
    let own = moesaic::cpu::processors().unwrap_or_default();
    let machine = NodeResources::read(&args.sysfs, &own, |name| env::var(name).ok());
    if let Some(trouble) = &machine.trouble {
        tracing::info!("ranks go round the NUMA nodes: {trouble}");
    }
    let places: Vec<RankPlace> = machine.places(args.bind, ranks);
    for (rank, place) in places.iter().enumerate() {
        tracing::info!("rank {rank}: {place}");
    }
    places.into_iter().map(|place| place.processors).collect()
}

/// Returns the command line that runs this program as a rank.
fn rank_words(job_dir: &Path, program: &[OsString]) -> io::Result<Vec<OsString>> {
    let mut words = vec![
        env::current_exe()?.into_os_string(),
        OsString::from("launch-rank"),
        job_dir.as_os_str().to_os_string(),
        OsString::from("--"),
    ];
    words.extend_from_slice(program);
    Ok(words)
}

fn start_here(ranks: usize, job_dir: &Path, program: &[OsString], job: &mut LaunchJob) -> Result {
    let words = rank_words(job_dir, program)?;
    for rank in 0..ranks {
        let mut command = Command::new(&words[0]);
        command
            .args(&words[1..])
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", ranks.to_string());
        let child = spawn(&mut command)?;
        job.add(&child, []);
    }
    Ok(())
}

fn start_by(
    mpiexec: &Mpiexec,
    ranks: usize,
    job_dir: &Path,
    program: &[OsString],
    job: &mut LaunchJob,
) -> Result {
    let mut command = mpiexec.command(ranks);
    command.args(rank_words(job_dir, program)?);
    // The output of `mpiexec` matters only if no rank gets far enough to report the error itself.
    let (said, end) = io::pipe()?;
    command.stdout(end.try_clone()?).stderr(end);
    let child = spawn(&mut command)?;
    drop(command);
    let said = OwnedFd::from(said);
    system::make_nonblocking(said.as_fd())?;
    job.add(&child, [File::from(said)]);
    Ok(())
}

/// Starts a process in a group of its own, so that a terminal's signals reach the launcher alone,
/// which ends the ranks in order.
fn spawn(command: &mut Command) -> Result<Child> {
    command.stdin(Stdio::null()).process_group(0);
    // SAFETY: between fork and exec only system calls are made, and nothing is allocated.
    unsafe { command.pre_exec(|| system::before_exec(libc::SIGTERM, &[])) };
    let program = PathBuf::from(command.get_program());
    command.spawn().map_err(|error| {
        let reason = crate::failure::reason(&error);
        Failure::work(format!("cannot start {}: {reason}", program.display()))
    })
}
