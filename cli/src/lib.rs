//! The `moesaic` command line, as a library of two functions: [`start`] is the program, and
//! [`understands`] reads a command and does nothing, for tests that read many.

mod args;
mod bench;
mod cache;
mod caches;
mod completed;
mod completions;
mod console;
mod counts;
mod disassemble;
mod doctor;
mod emit;
mod experts;
mod failure;
mod files;
mod form;
mod inspect;
mod keys;
#[cfg(target_os = "linux")]
mod launch;
mod links;
mod log;
mod machine;
mod mesh;
mod occupancy;
#[cfg(test)]
mod page;
mod palette;
mod plan;
mod precompile;
mod progress;
mod quantize;
mod random;
mod rank;
mod run;
mod shards;
#[cfg(unix)]
mod signals;
mod simulators;
mod spec;
mod spec_source;
mod store;
mod suggest;
mod table;
mod targets;
mod threads;
mod timing;
mod toolchain;
mod training;
mod tune;
mod units;

use args::{Cli, Command};
use clap::{CommandFactory, FromArgMatches, Parser};
use console::{Console, Verbosity};
use failure::{Failure, Result};
use palette::ColorChoice;
use std::any::Any;
use std::ffi::OsString;
use std::fmt;
use std::process::ExitCode;

/// Parses a command line, whose first word is the program's name, before the program looks at any
/// file or device. Returns everything that was parsed, as text.
///
/// # Errors
/// [`CommandLineError`] for a command line that the program refuses.
///
/// ```
/// let words = ["moesaic", "bench", "--spec", "a.toml", "--tokens", "1,64"].map(Into::into);
/// assert!(moesaic_cli::understands(words).is_ok_and(|read| read.contains("[1, 64]")));
/// let words = ["moesaic", "precompile", "--spec", "a.toml", "--target", "cuda:sm90"];
/// assert!(moesaic_cli::understands(words.map(Into::into)).is_err());
/// ```
pub fn understands(
    words: impl IntoIterator<Item = OsString>,
) -> std::result::Result<String, CommandLineError> {
    let refused = CommandLineError::Words;
    let matches = Cli::command()
        .try_get_matches_from(words)
        .map_err(refused)?;
    let cli = Cli::from_arg_matches(&matches).map_err(refused)?;
    let targets = targets::resolve(&named_targets(&matches));
    let targets = targets.map_err(|failure| CommandLineError::Target(failure.message))?;
    let targets: Vec<String> = targets.iter().map(|target| target.to_string()).collect();
    Ok(format!("{:?} for {targets:?}", cli.command))
}

/// A command line that the program refuses. Its text is the program's error message.
#[derive(Debug)]
#[non_exhaustive]
pub enum CommandLineError {
    /// Words that no command takes.
    Words(clap::Error),
    /// A target that does not exist.
    Target(String),
}

impl fmt::Display for CommandLineError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CommandLineError::Words(error) => error.fmt(f),
            CommandLineError::Target(message) => f.write_str(message),
        }
    }
}

impl std::error::Error for CommandLineError {}

/// Returns the `--target` values of a command, except names that stand for a device.
fn named_targets(matches: &clap::ArgMatches) -> Vec<String> {
    let own = matches.subcommand().map(|(_, own)| own);
    let raw = own.and_then(|own| own.try_get_raw("target").ok().flatten());
    let names = raw.into_iter().flatten();
    let names = names.map(|name| name.to_string_lossy().into_owned());
    names
        .filter(|name| !["cuda", "rocm"].contains(&name.as_str()))
        .collect()
}

/// Runs the program.
pub fn start() -> ExitCode {
    // HIPRTC can abort its process, so it gets one of its own: this program.
    moesaic::rocm::maybe_run_child();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return misused(&error),
    };
    let console = Console::new(cli.color, Verbosity::new(cli.quiet, cli.verbose));
    if cli.quiet {
        progress::hide();
    }
    log::start(console);
    report_defects(console);
    #[cfg(unix)]
    signals::report_too_large_files();
    #[cfg(unix)]
    if !cli.command.hears_signals() {
        signals::clean_up_at_the_end();
    }
    let result = std::panic::catch_unwind(|| execute(&cli.command, &console));
    #[cfg(unix)]
    signals::leave_to_the_end();
    match result {
        Ok(Ok(code)) => code,
        Ok(Err(failure)) => give_up(&failure, &console),
        // The panic hook has printed the message.
        Err(_) => ExitCode::from(failure::Code::Failed as u8),
    }
}

fn execute(command: &Command, console: &Console) -> Result<ExitCode> {
    let done = match command {
        #[cfg(target_os = "linux")]
        Command::Launch(args) => return launch::execute(args, console),
        #[cfg(target_os = "linux")]
        Command::LaunchRank(args) => return launch::execute_rank(args),
        Command::Run(args) => run::execute(args, console),
        Command::Emit(args) => emit::execute(args, console),
        Command::Inspect(args) => inspect::execute(args, console),
        Command::Precompile(args) => precompile::execute(args, console),
        Command::Bench(args) => bench::execute(args, console),
        Command::Tune(args) => tune::execute(args, console),
        Command::Plan(args) => plan::execute(args, console),
        Command::Cache(args) => cache::execute(args, console),
        Command::Toolchain(args) => toolchain::execute(args, console),
        Command::Spec(args) => spec::execute(args, console),
        Command::Experts(args) => experts::execute(args, console),
        Command::Quantize(args) => quantize::execute(args, console),
        Command::Doctor(args) => doctor::execute(args, console),
        Command::Completions(args) => completions::execute(args, Cli::command(), console),
    };
    done.map(|()| ExitCode::SUCCESS)
}

/// Prints the error of a misused command. A single process gets clap's own colours. For a rank
/// every line names the rank, as all of its lines do.
fn misused(error: &clap::Error) -> ExitCode {
    let console = Console::new(ColorChoice::Never, Verbosity::Normal);
    if error.use_stderr() && console::is_rank() {
        console.tell(&error.to_string());
        return ExitCode::from(failure::Code::BadInput as u8);
    }
    match error.print() {
        // Help that was asked for is a result like any other.
        Err(lost) if !error.use_stderr() => give_up(&lost.into(), &console),
        _ => {
            ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(failure::Code::BadInput as u8))
        }
    }
}

fn give_up(failure: &Failure, console: &Console) -> ExitCode {
    if failure.code != failure::Code::Quiet {
        console.tell(&failure.render(&console.err));
    }
    ExitCode::from(failure.code as u8)
}

/// Returns the message of a panic's payload.
fn message(payload: &dyn Any) -> &str {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("no message")
}

/// Reports a panic, which is a defect of moesaic, in one line that you can put into a bug report.
fn report_defects(console: Console) {
    std::panic::set_hook(Box::new(move |panic| {
        let place = panic
            .location()
            .map(|at| format!(" ({}:{})", at.file(), at.line()));
        let text = message(panic.payload());
        let failure = Failure::work(format!(
            "moesaic has a defect: {text}{}",
            place.unwrap_or_default()
        ));
        let failure = failure.hint("please report it with the output of `moesaic doctor -v`");
        console.tell(&failure.render(&console.err));
    }));
}
