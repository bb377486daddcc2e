//! Files of machines and measurements: TOML in which every key is known.

use serde::de::DeserializeOwned;

/// A file that does not say what it should.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// Not TOML, or with keys and types that are not there.
    #[error("{what} cannot be read: {why}")]
    Text {
        /// What the file is: `the machine`.
        what: &'static str,
        /// Where, what and, for a misspelt key, what was meant.
        why: String,
    },
    /// A number that cannot be.
    #[error("{what}: {key} = {value}; {possible}")]
    Value {
        /// What the file is of, by name.
        what: String,
        /// Which number.
        key: String,
        /// As it is there.
        value: String,
        /// What can be.
        possible: &'static str,
    },
    /// No machine of this name ships.
    #[error("unknown machine `{name}`{meant}\nknown machines: {known}; a path ends in .toml")]
    Unknown {
        /// As asked for.
        name: String,
        /// `; did you mean ...?`, or nothing.
        meant: String,
        /// All names.
        known: String,
    },
    /// Measurements of another machine.
    #[error("{0}")]
    Other(String),
}

/// Reads a file's text.
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

/// The key that was meant by the one that an error names.
fn meant(said: &str) -> Option<&str> {
    let (_, rest) = said.split_once("unknown field `")?;
    let (word, rest) = rest.split_once('`')?;
    let known = rest.split('`').skip(1).step_by(2);
    closest(word, known)
}

/// The known word that is at most a third of its letters away.
pub(crate) fn closest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let scored = known
        .into_iter()
        .map(|other| (strsim::levenshtein(word, other), other));
    let (best, other) = scored.min_by_key(|(distance, _)| *distance)?;
    (best <= word.chars().count() / 3 + 1).then_some(other)
}
