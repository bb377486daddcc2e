//! Readers of machine and measurement files: TOML with only known keys.

use serde::de::DeserializeOwned;

/// An error in a file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// The text is not TOML, or has unknown keys or wrong types.
    #[error("{what} cannot be read: {why}")]
    Text {
        /// The kind of file: `the machine`.
        what: &'static str,
        /// The position, the problem and, for a misspelled key, the likely one.
        why: String,
    },
    /// An impossible number.
    #[error("{what}: {key} = {value}; {possible}")]
    Value {
        /// The machine or calibration, by name.
        what: String,
        /// The key.
        key: String,
        /// The value in the file.
        value: String,
        /// The range of possible values.
        possible: &'static str,
    },
    /// No machine of this name ships.
    #[error("unknown machine `{name}`{meant}\nknown machines: {known}; a path ends in .toml")]
    Unknown {
        /// The requested name.
        name: String,
        /// `; did you mean ...?`, or empty.
        meant: String,
        /// All names.
        known: String,
    },
    /// The measurements belong to another machine.
    #[error("{0}")]
    Other(String),
}

/// Parses a file's text.
pub(crate) fn toml<T: DeserializeOwned>(what: &'static str, text: &str) -> Result<T, ReadError> {
    toml::from_str(text).map_err(|error: toml::de::Error| {
        let said = error.to_string();
        let said = said.trim_end();
        let why = match meant(said) {
            Some(meant) => format!("{said}\ndid you mean `{meant}`?"),
            None => said.to_string(),
        };
        ReadError::Text { what, why }
    })
}

/// Returns the likely key for the unknown one that an error names.
fn meant(said: &str) -> Option<&str> {
    let (_, rest) = said.split_once("unknown field `")?;
    let (word, rest) = rest.split_once('`')?;
    let known = rest.split('`').skip(1).step_by(2);
    closest(word, known)
}

/// Returns the known word that differs in at most a third of its letters.
pub(crate) fn closest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let scored = known
        .into_iter()
        .map(|other| (strsim::levenshtein(word, other), other));
    let (best, other) = scored.min_by_key(|(distance, _)| *distance)?;
    (best <= word.chars().count() / 3 + 1).then_some(other)
}
