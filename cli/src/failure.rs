//! The one error type of the command line.

use crate::console::Palette;
use moesaic::cache::{PackError, StoreError};
use moesaic::spec::SpecError;
use moesaic::target::{CompileError, DeviceError};
use moesaic::toolchain::ToolchainError;
use moesaic::weights::WeightsError;
use moesaic::{EngineError, OpenError, TargetNameError};
use std::fmt::Display;
use std::path::Path;

/// What the process exits with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// Nobody reads the output any more: no failure.
    Quiet = 0,
    /// Something failed while working.
    Failed = 1,
    /// The input, the usage or the machine does not allow what was asked;
    /// nothing was done.
    BadInput = 2,
    /// The program to be started is there and cannot be run, as shells say it.
    NotExecutable = 126,
    /// There is no program to be started, as shells say it.
    NoProgram = 127,
}

/// Why a command did not do what was asked.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The exit code.
    pub code: Code,
    /// What is wrong; further lines are causes and lists.
    pub message: String,
    /// What to change.
    pub hint: Option<String>,
    /// The message is a finished rendering that brings its own `error:`.
    rendered: bool,
}

/// What every command returns.
pub type Result<T = ()> = std::result::Result<T, Failure>;

impl Failure {
    fn new(code: Code, message: impl Display) -> Failure {
        let message = message.to_string();
        Failure {
            code,
            message,
            hint: None,
            rendered: false,
        }
    }

    /// Bad input or usage.
    pub fn input(message: impl Display) -> Failure {
        Failure::new(Code::BadInput, message)
    }

    /// A program that cannot be started.
    pub fn program(code: Code, message: impl Display) -> Failure {
        Failure::new(code, message)
    }

    /// Something failed while working.
    pub fn work(message: impl Display) -> Failure {
        Failure::new(Code::Failed, message)
    }

    /// The reader of our output is gone.
    pub fn quiet() -> Failure {
        Failure::new(Code::Quiet, "")
    }

    /// A spec's problems, shown with its lines.
    pub fn spec(error: &SpecError, file: &str, color: bool) -> Failure {
        Failure {
            rendered: true,
            ..Failure::input(error.render(file, color))
        }
    }

    /// A file that cannot be read.
    pub fn unreadable(what: &str, path: &Path, error: &std::io::Error) -> Failure {
        Failure::input(format!(
            "cannot read {what} {}: {}",
            path.display(),
            reason(error)
        ))
    }

    /// The same failure with advice.
    #[must_use]
    pub fn hint(self, hint: impl Display) -> Failure {
        Failure {
            hint: Some(hint.to_string()),
            ..self
        }
    }

    /// The whole text for stderr, without a newline at the end.
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

/// What the system says, without its number.
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

impl From<TargetNameError> for Failure {
    fn from(error: TargetNameError) -> Failure {
        match error {
            TargetNameError::Unknown(error) => crate::targets::unknown(&error),
            other => Failure::input(other),
        }
    }
}

/// The option that lets weights be read as they are.
fn weights_hint(error: &WeightsError) -> Option<&'static str> {
    match error {
        WeightsError::Narrowing { .. } => Some("--narrow rounds the values"),
        WeightsError::Overflow { .. } => Some("--allow-infinite lets them become infinite"),
        WeightsError::Extra { .. } => Some("--allow-extra ignores such tensors"),
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
            other => Failure::work(other),
        }
    }
}

impl From<ToolchainError> for Failure {
    fn from(error: ToolchainError) -> Failure {
        Failure::work(error)
    }
}
