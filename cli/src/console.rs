//! Output to the terminal, or to the file or pipe that replaces it.

use crate::failure::{Failure, Result};
use crate::palette::{ColorChoice, Palette};
use moesaic::collectives::World;
use moesaic::collectives::topology::host_name;
use std::io::{IsTerminal, Write, stderr, stdout};
#[cfg(unix)]
use std::os::fd::AsRawFd;
use std::sync::OnceLock;

/// Both output streams. Results go to stdout, everything else to stderr.
#[derive(Clone, Copy, Debug)]
pub struct Console {
    /// Colours and width of stdout.
    pub out: Palette,
    /// Colours of stderr.
    pub err: Palette,
    /// How much the command says.
    pub verbosity: Verbosity,
}

/// How much a command says besides its result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verbosity {
    /// Errors and warnings alone.
    Quiet,
    /// Notes and progress, too.
    #[default]
    Normal,
    /// Details, too.
    Verbose,
    /// Everything that the library logs, too.
    Debug,
}

impl Verbosity {
    /// Returns the level for `-q` and the number of `-v`.
    pub fn new(quiet: bool, verbose: u8) -> Verbosity {
        match (quiet, verbose) {
            (true, _) => Verbosity::Quiet,
            (false, 0) => Verbosity::Normal,
            (false, 1) => Verbosity::Verbose,
            (false, _) => Verbosity::Debug,
        }
    }
}

impl Console {
    /// Returns a console for the streams of this process.
    pub fn new(choice: ColorChoice, verbosity: Verbosity) -> Console {
        let screen = is_screen(&stdout());
        Console {
            out: Palette::new(choice, screen).within(width(screen)),
            err: Palette::new(choice, is_screen(&stderr())),
            verbosity,
        }
    }

    /// Returns whether the user asked for details.
    pub fn verbose(&self) -> bool {
        self.verbosity >= Verbosity::Verbose
    }

    /// Writes a result to stdout.
    pub fn print(&self, text: &str) -> Result {
        let mut out = stdout().lock();
        out.write_all(text.as_bytes())?;
        out.flush()?;
        Ok(())
    }

    /// Writes a report to stdout, within its columns.
    pub fn report(&self, text: &str) -> Result {
        self.print(&self.out.fold(text))
    }

    /// Writes one JSON document to stdout.
    pub fn json(&self, value: &serde_json::Value) -> Result {
        let text = serde_json::to_string_pretty(value)
            .map_err(|error| Failure::work(format!("cannot write JSON: {error}")))?;
        self.print(&(text + "\n"))
    }

    /// Writes a note to stderr, unless the user wants quiet.
    pub fn note(&self, text: &str) {
        if self.verbosity == Verbosity::Quiet {
            return;
        }
        self.tell(&format!("{} {text}", self.err.cyan("note:")));
    }

    /// Writes a warning to stderr.
    pub fn warn(&self, text: &str) {
        self.tell(&format!("{} {text}", self.err.yellow("warning:")));
    }

    /// Writes lines to stderr in one write, so that lines of several ranks do not mix. Under a
    /// launcher of several ranks each line names the rank and its host. Errors are ignored, because
    /// nothing is left to report them to.
    pub fn tell(&self, lines: &str) {
        let who = who();
        let lines: String = lines.lines().map(|line| format!("{who}{line}\n")).collect();
        let _ = stderr().lock().write_all(lines.as_bytes());
    }
}

/// Returns whether a stream goes to the terminal that runs this process.
///
/// Open MPI's `mpirun` gives ranks a pseudo-terminal as stdout, and copies that terminal's output
/// unchanged into a pipe or a file. Such a terminal does not control this process's session.
#[cfg(unix)]
pub fn is_screen(stream: &(impl IsTerminal + AsRawFd)) -> bool {
    // SAFETY: both take and return numbers; the descriptor is open while it is borrowed.
    stream.is_terminal() && unsafe { libc::tcgetsid(stream.as_raw_fd()) == libc::getsid(0) }
}

/// Returns whether a stream goes to a terminal.
#[cfg(not(unix))]
pub fn is_screen(stream: &impl IsTerminal) -> bool {
    stream.is_terminal()
}

/// Returns the columns of stdout: `COLUMNS`, or else those of the terminal.
fn width(screen: bool) -> Option<usize> {
    let set = std::env::var("COLUMNS").ok();
    let set = set.and_then(|text| text.trim().parse().ok());
    set.or_else(|| screen.then(terminal_columns).flatten())
        .filter(|&columns| columns > 0)
}

#[cfg(unix)]
fn terminal_columns() -> Option<usize> {
    // SAFETY: the structure is plain numbers, which the call fills; stdout is open.
    let size = unsafe {
        let mut size: libc::winsize = std::mem::zeroed();
        let failed = libc::ioctl(stdout().as_raw_fd(), libc::TIOCGWINSZ, &mut size) != 0;
        (!failed).then_some(size)
    };
    size.map(|size| usize::from(size.ws_col))
}

#[cfg(not(unix))]
fn terminal_columns() -> Option<usize> {
    None
}

/// Returns whether a launcher has started this process as one of several ranks.
pub fn is_rank() -> bool {
    !who().is_empty()
}

/// Returns the prefix of a rank's lines, which is empty for a single process.
fn who() -> &'static str {
    static WHO: OnceLock<String> = OnceLock::new();
    WHO.get_or_init(|| {
        let world = World::from_environment().ok().flatten();
        let world = world.filter(|world| world.size > 1);
        world.map_or(String::new(), |world| {
            format!("rank {} on {}: ", world.rank, host_name())
        })
    })
}
