//! Problems of a spec as compile errors.

use crate::toml::Toml;
use moesaic_spec::{Problem, SpecError};
use syn::{Error, Ident, LitStr};

/// Reports each problem at the tokens at fault, or at the layer's name if it has no place of its
/// own.
pub fn inline(error: &SpecError, toml: &Toml, name: &Ident) -> Error {
    join(error.problems().iter().map(|problem| {
        let place = problem.span.as_ref().and_then(|span| toml.at(span));
        match place {
            Some(tokens) => Error::new_spanned(tokens, message(problem)),
            None => Error::new(name.span(), message(problem)),
        }
    }))
}

/// Reports each problem at the name of the file, with its line and column.
pub fn file(error: &SpecError, text: &str, path: &LitStr) -> Error {
    join(error.problems().iter().map(|problem| {
        let place = problem.span.as_ref().map(|span| place(text, span.start));
        let place = place.map_or(String::new(), |(line, column)| format!(":{line}:{column}"));
        Error::new(
            path.span(),
            format!("{}{place}: {}", path.value(), message(problem)),
        )
    }))
}

/// Returns the line and column of a byte. Both count from 1; columns count characters.
fn place(text: &str, byte: usize) -> (usize, usize) {
    let before = text.get(..byte).unwrap_or(text);
    let line = before.rfind('\n').map_or(0, |newline| newline + 1);
    (
        before.matches('\n').count() + 1,
        before[line..].chars().count() + 1,
    )
}

fn message(problem: &Problem) -> String {
    let mut text = problem.message.clone();
    if !problem.label.is_empty() {
        text += &format!(": {}", problem.label);
    }
    match &problem.help {
        Some(help) => format!("{text}\n{help}"),
        None => text,
    }
}

fn join(errors: impl Iterator<Item = Error>) -> Error {
    let joined = errors.reduce(|mut all, error| {
        all.combine(error);
        all
    });
    joined.unwrap_or_else(|| Error::new(proc_macro2::Span::call_site(), "the spec is not valid"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_count_from_one_in_characters() {
        assert_eq!(place("ab\nçd\n", 0), (1, 1));
        assert_eq!(place("ab\nçd\n", 5), (2, 2));
        assert_eq!(place("ab", 900), (1, 3));
    }
}
