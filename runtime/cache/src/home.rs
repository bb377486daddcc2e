//! The directory of moesaic's files.

use std::ffi::OsString;
use std::path::PathBuf;

/// The error of a machine without a place for a cache: neither a variable nor a home directory is
/// set.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "no cache directory: MOESAIC_CACHE, XDG_CACHE_HOME and HOME are all unset or not absolute\n\
     set MOESAIC_CACHE to a directory that only you can write"
)]
pub struct NoHome;

/// Returns the one directory where moesaic keeps its files: `MOESAIC_CACHE`, else
/// `XDG_CACHE_HOME/moesaic`, else `HOME/.cache/moesaic`. It may not exist yet.
///
/// A relative `MOESAIC_CACHE` is taken from the working directory. A relative `XDG_CACHE_HOME` is
/// ignored, as its specification asks.
///
/// # Errors
/// [`NoHome`] if none of the three is usable.
pub fn home() -> Result<PathBuf, NoHome> {
    home_from(|name| std::env::var_os(name))
}

fn home_from(var: impl Fn(&str) -> Option<OsString>) -> Result<PathBuf, NoHome> {
    let path = |name| {
        var(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    let absolute = |name| path(name).filter(|path| path.is_absolute());
    path("MOESAIC_CACHE")
        .and_then(|dir| std::path::absolute(dir).ok())
        .or_else(|| Some(absolute("XDG_CACHE_HOME")?.join("moesaic")))
        .or_else(|| Some(absolute("HOME")?.join(".cache").join("moesaic")))
        .ok_or(NoHome)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(vars: &[(&str, &str)], expected: Option<&str>) {
        let lookup = |name: &str| {
            vars.iter()
                .find(|(key, _)| *key == name)
                .map(|(_, value)| value.into())
        };
        assert_eq!(
            home_from(lookup).ok(),
            expected.map(PathBuf::from),
            "{vars:?}"
        );
    }

    #[test]
    fn variables_are_tried_in_order() {
        let all = [
            ("MOESAIC_CACHE", "/c"),
            ("XDG_CACHE_HOME", "/x"),
            ("HOME", "/h"),
        ];
        check(&all, Some("/c"));
        check(&all[1..], Some("/x/moesaic"));
        check(&all[2..], Some("/h/.cache/moesaic"));
        check(&[], None);
    }

    #[test]
    fn empty_and_relative_values_do_not_count() {
        check(
            &[
                ("MOESAIC_CACHE", ""),
                ("XDG_CACHE_HOME", "x"),
                ("HOME", "/h"),
            ],
            Some("/h/.cache/moesaic"),
        );
        check(&[("HOME", "")], None);
    }

    #[test]
    fn the_error_names_the_variables() {
        for name in ["MOESAIC_CACHE", "XDG_CACHE_HOME", "HOME"] {
            assert!(NoHome.to_string().contains(name));
        }
    }
}
