//! Errors of opening a library.

use std::fmt;

/// The reason a library or a symbol is not available.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DlError {
    /// No candidate could be loaded.
    #[error("cannot load {what}; tried {}", list(attempts))]
    NotFound {
        /// The wanted library, such as `the CUDA driver`.
        what: String,
        /// Every candidate, in the order tried.
        attempts: Vec<Attempt>,
    },
    /// The library exists but lacks a function.
    #[error("library `{library}` has no symbol `{symbol}`: {reason}")]
    MissingSymbol {
        /// The name or path by which the library was opened.
        library: String,
        /// The symbol.
        symbol: String,
        /// The loader's message.
        reason: String,
    },
}

/// A candidate that did not load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// The name or path.
    pub name: String,
    /// The loader's message.
    pub reason: String,
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` ({})", self.name, self.reason)
    }
}

fn list(attempts: &[Attempt]) -> String {
    if attempts.is_empty() {
        return "nothing: no candidate was named".to_string();
    }
    attempts
        .iter()
        .map(Attempt::to_string)
        .collect::<Vec<_>>()
        .join(", ")
}
