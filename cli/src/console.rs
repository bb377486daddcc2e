//! Output to the terminal, or to the file or pipe that replaces it.

use crate::failure::{Failure, Result};
use clap::ValueEnum;
use moesaic::collectives::World;
use moesaic::collectives::topology::host_name;
use std::io::{IsTerminal, Write, stderr, stdout};
#[cfg(unix)]
use std::os::fd::AsRawFd;
use std::sync::OnceLock;

/// The choice of when to colour output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ColorChoice {
    /// On a terminal, unless NO_COLOR is set.
    #[default]
    Auto,
    /// Also into a file or a pipe.
    Always,
    /// Not at all.
    Never,
}

/// Both output streams. Results go to stdout, everything else to stderr.
#[derive(Clone, Copy, Debug)]
pub struct Console {
    /// Colours of stdout.
    pub out: Palette,
    /// Colours of stderr.
    pub err: Palette,
}

/// The colours of a stream, which may be off.
#[derive(Clone, Copy, Debug, Default)]
pub struct Palette {
    on: bool,
}

impl Console {
    /// Returns a console for the streams of this process.
    pub fn new(choice: ColorChoice) -> Console {
        Console {
            out: Palette::new(choice, is_screen(&stdout())),
            err: Palette::new(choice, is_screen(&stderr())),
        }
    }

    /// Writes a result to stdout.
    pub fn print(&self, text: &str) -> Result {
        let mut out = stdout().lock();
        out.write_all(text.as_bytes())?;
        out.flush()?;
        Ok(())
    }

    /// Writes one JSON document to stdout.
    pub fn json(&self, value: &serde_json::Value) -> Result {
        let text = serde_json::to_string_pretty(value)
            .map_err(|error| Failure::work(format!("cannot write JSON: {error}")))?;
        self.print(&(text + "\n"))
    }

    /// Writes a note to stderr.
    pub fn note(&self, text: &str) {
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

impl Palette {
    /// A palette without colours.
    #[cfg(test)]
    pub const PLAIN: Palette = Palette { on: false };

    fn new(choice: ColorChoice, terminal: bool) -> Palette {
        let set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        let on = match choice {
            ColorChoice::Auto => terminal && !set("NO_COLOR") && !dumb,
            ColorChoice::Always => true,
            ColorChoice::Never => false,
        };
        Palette { on }
    }

    /// Returns whether colours are on.
    pub fn on(&self) -> bool {
        self.on
    }

    /// Wraps `text` in the escapes of a style, such as `1;31`.
    pub fn paint(&self, style: &str, text: &str) -> String {
        if self.on && !style.is_empty() {
            format!("\x1b[{style}m{text}\x1b[0m")
        } else {
            text.to_string()
        }
    }

    /// Paints a heading.
    pub fn bold(&self, text: &str) -> String {
        self.paint("1", text)
    }

    /// Paints secondary text.
    pub fn dim(&self, text: &str) -> String {
        self.paint("2", text)
    }

    /// Paints a failure.
    pub fn red(&self, text: &str) -> String {
        self.paint("1;31", text)
    }

    /// Paints a warning.
    pub fn yellow(&self, text: &str) -> String {
        self.paint("1;33", text)
    }

    /// Paints a note or a hint.
    pub fn cyan(&self, text: &str) -> String {
        self.paint("1;36", text)
    }
}
