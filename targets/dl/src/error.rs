//! What can go wrong when a library is opened.

use std::fmt;

/// A library or a symbol that could not be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DlError {
    /// No candidate could be loaded.
    #[error("cannot load {what}; tried {}", list(attempts))]
    NotFound {
        /// What was looked for, in words: `the CUDA driver`.
        what: String,
        /// Every candidate in the order it was tried.
        attempts: Vec<Attempt>,
    },
    /// The library is there and lacks a function.
    #[error("library `{library}` has no symbol `{symbol}`: {reason}")]
    MissingSymbol {
        /// The name or path the library was opened by.
        library: String,
        /// The symbol.
        symbol: String,
        /// What the loader said.
        reason: String,
    },
}

/// One candidate that did not load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// The name or path.
    pub name: String,
    /// What the loader said.
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
