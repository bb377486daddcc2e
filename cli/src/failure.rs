//! The one error type of the command line.

use crate::palette::Palette;
use moesaic::cache::{PackError, StoreError};
use moesaic::collectives::CollectiveError;
use moesaic::spec::SpecError;
use moesaic::target::{CompileError, DeviceError};
use moesaic::toolchain::ToolchainError;
use moesaic::weights::{Damage, WeightsError};
use moesaic::{EngineError, OpenError};
use std::fmt::Display;
use std::path::Path;

/// The exit codes of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// Success, because the reader of the output has gone.
    Quiet = 0,
    /// A failure during the work.
    Failed = 1,
    /// Input, usage or a machine that does not allow the request; nothing was done.
    BadInput = 2,
    /// The program to start exists but cannot be executed; shells use the same code.
    NotExecutable = 126,
    /// The program to start does not exist; shells use the same code.
    NoProgram = 127,
}

/// The reason why a command failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The exit code.
    pub code: Code,
    /// The error; further lines list causes.
    pub message: String,
    /// Advice on what to change.
    pub hint: Option<String>,
    /// Whether another rank is the cause, whose own failure says more.
    pub of_another_rank: bool,
    /// Whether the message is a finished rendering with its own `error:`.
    rendered: bool,
}

/// The result of a command.
pub type Result<T = ()> = std::result::Result<T, Failure>;

impl Failure {
    fn new(code: Code, message: impl Display) -> Failure {
        let message = message.to_string();
        Failure {
            code,
            message,
            hint: None,
            of_another_rank: false,
            rendered: false,
        }
    }

    /// Returns a failure for bad input or usage.
    pub fn input(message: impl Display) -> Failure {
        Failure::new(Code::BadInput, message)
    }

    /// Returns a failure for a program that cannot be started.
    pub fn program(code: Code, message: impl Display) -> Failure {
        Failure::new(code, message)
    }

    /// Returns a failure of the work itself.
    pub fn work(message: impl Display) -> Failure {
        Failure::new(Code::Failed, message)
    }

    /// Returns a failure of an operation between ranks, during the work.
    pub fn between_ranks(error: &CollectiveError) -> Failure {
        Failure {
            of_another_rank: is_of_another_rank(error),
            ..Failure::work(error)
        }
    }

    /// Returns the failure for a reader of the output that has gone; nothing is printed for it.
    pub fn quiet() -> Failure {
        Failure::new(Code::Quiet, "")
    }

    /// Returns a failure that shows a spec's problems together with its lines.
    pub fn spec(error: &SpecError, file: &str, color: bool) -> Failure {
        Failure {
            rendered: true,
            ..Failure::input(error.render(file, color))
        }
    }

    /// Returns a failure for a file that cannot be read.
    pub fn unreadable(what: &str, path: &Path, error: &std::io::Error) -> Failure {
        Failure::input(format!(
            "cannot read {what} {}: {}",
            path.display(),
            reason(error)
        ))
    }

    /// Returns a failure for a file that cannot be written.
    pub fn unwritable(path: &Path, error: &std::io::Error) -> Failure {
        Failure::work(format!(
            "cannot write {}: {}",
            path.display(),
            reason(error)
        ))
    }

    /// Adds advice to the failure.
    #[must_use]
    pub fn hint(self, hint: impl Display) -> Failure {
        Failure {
            hint: Some(hint.to_string()),
            ..self
        }
    }

    /// Renders the whole text for stderr, without a newline at the end.
    pub fn render(&self, palette: &Palette) -> String {
        let mut text = if self.rendered {
            self.message.clone()
        } else {
            let mut lines = self.message.trim_end().lines();
            let first = lines.next().unwrap_or_default();
            let rest = lines.map(|line| format!("\n  {line}"));
            format!(
                "{} {first}{}",
                palette.red("error:"),
                rest.collect::<String>()
            )
        };
        if let Some(hint) = &self.hint {
            text += &format!("\n{} {}", palette.cyan("hint:"), hint.replace('\n', "\n  "));
        }
        text
    }
}

/// Returns the system's words for an error, without its number.
pub fn reason(error: &std::io::Error) -> String {
    let text = error.to_string();
    let end = text.find(" (os error").unwrap_or(text.len());
    text[..end].to_lowercase()
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Failure {
        match error.kind() {
            std::io::ErrorKind::BrokenPipe => Failure::quiet(),
            _ => Failure::work(format!("cannot write the output: {}", reason(&error))),
        }
    }
}

impl From<&EngineError> for Failure {
    fn from(error: &EngineError) -> Failure {
        match error {
            EngineError::Compile(error) => Failure::from(&**error),
            EngineError::Device(error) => Failure::from(error),
            EngineError::Collective(cause) => Failure {
                of_another_rank: is_of_another_rank(cause),
                ..Failure::input(error)
            },
            EngineError::Emit(_) | EngineError::NotCached { .. } => Failure::work(error),
            EngineError::Source { source, .. } => {
                let hint = source.downcast_ref().and_then(weights_hint);
                let failure = Failure::input(error);
                match hint {
                    Some(hint) => failure.hint(hint),
                    None => failure,
                }
            }
            _ => Failure::input(error),
        }
    }
}

impl From<EngineError> for Failure {
    fn from(error: EngineError) -> Failure {
        Failure::from(&error)
    }
}

impl From<&CompileError> for Failure {
    fn from(error: &CompileError) -> Failure {
        match error {
            CompileError::NoCompiler { .. } | CompileError::UnsupportedTarget { .. } => {
                Failure::input(error)
            }
            _ => Failure::work(error),
        }
    }
}

impl From<&DeviceError> for Failure {
    fn from(error: &DeviceError) -> Failure {
        match error {
            DeviceError::Unavailable { .. } => Failure::input(error),
            _ => Failure::work(error),
        }
    }
}

impl From<OpenError> for Failure {
    fn from(error: OpenError) -> Failure {
        match error {
            OpenError::Target(error) => Failure::from(error),
            OpenError::Device(error) => Failure::from(&error).hint(
                "`moesaic doctor` says what this machine can run; `--target cpu` always does",
            ),
            OpenError::Compile(error) => Failure::from(&error),
            other => Failure::work(other),
        }
    }
}

/// Returns whether an operation failed because of another rank: that one is late, calls something
/// else, or has failed itself.
fn is_of_another_rank(error: &CollectiveError) -> bool {
    match error {
        CollectiveError::Deadline { .. }
        | CollectiveError::Mismatch { .. }
        | CollectiveError::Peer { .. }
        | CollectiveError::Disagreement { .. } => true,
        CollectiveError::Failed { cause, .. } => is_of_another_rank(cause),
        _ => false,
    }
}

/// Returns the option that would make these weights readable.
fn weights_hint(error: &WeightsError) -> Option<&'static str> {
    match error {
        WeightsError::Narrowing { .. } => Some("--narrow rounds the values"),
        WeightsError::Overflow { .. } => Some("--allow-infinite lets them become infinite"),
        WeightsError::Extra { .. } => Some("--allow-extra ignores such tensors"),
        WeightsError::Corrupt {
            reason: Damage::CutShort(_) | Damage::Shrunk,
            ..
        } => Some("download or copy the file again"),
        _ => None,
    }
}

impl From<WeightsError> for Failure {
    fn from(error: WeightsError) -> Failure {
        let hint = weights_hint(&error);
        let failure = Failure::input(error);
        match hint {
            Some(hint) => failure.hint(hint),
            None => failure,
        }
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Failure {
        Failure::work(error)
    }
}

impl From<PackError> for Failure {
    fn from(error: PackError) -> Failure {
        match error {
            PackError::Damaged { .. } => Failure::input(error),
            // The library's text names a temporary file, too.
            PackError::Io {
                action,
                path,
                source,
            } => {
                let (path, reason) = (path.display(), reason(&source));
                Failure::work(format!("cannot {action} {path}: {reason}"))
            }
            other => Failure::work(other),
        }
    }
}

impl From<ToolchainError> for Failure {
    fn from(error: ToolchainError) -> Failure {
        Failure::work(error)
    }
}
