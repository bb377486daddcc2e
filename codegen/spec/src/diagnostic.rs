//! Problems with a spec, and their presentation.
//!
//! A [`Problem`] names a key of the spec and needs no text. Reading TOML adds
//! the spans and wraps all problems of a file in one [`SpecError`].

use annotate_snippets::{AnnotationKind, Group, Level, Origin, Renderer, Snippet};
use std::fmt;
use std::ops::Range;

/// One thing wrong with a spec.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Problem {
    /// The key at fault, from the root: `router.groups.keep`,
    /// `shared[1].hidden_dim`. Empty when the text as a whole is at fault.
    pub key: String,
    /// The value that was given, and why it cannot work.
    pub message: String,
    /// A few words shown beside the value.
    pub label: String,
    /// The accepted values, and the change to make.
    pub help: Option<String>,
    /// The numbers that the key accepts, `from 1 to 64`, if the value is a number outside them.
    pub range: Option<String>,
    /// Other keys that contribute to the problem.
    pub related: Vec<Related>,
    /// Bytes of the TOML at fault; absent for specs that come from elsewhere.
    pub span: Option<Range<usize>>,
}

/// A key that contributes to a [`Problem`] without being at fault.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Related {
    /// The key, from the root.
    pub key: String,
    /// A few words shown beside the value.
    pub label: String,
    /// Bytes of the TOML, where the key is written there.
    pub span: Option<Range<usize>>,
}

impl Problem {
    /// Returns a problem with `key`; the methods below add the other parts.
    pub(crate) fn new(key: impl Into<String>, message: impl Into<String>) -> Problem {
        Problem {
            key: key.into(),
            message: message.into(),
            label: String::new(),
            help: None,
            range: None,
            related: Vec::new(),
            span: None,
        }
    }

    pub(crate) fn label(mut self, label: impl Into<String>) -> Problem {
        self.label = label.into();
        self
    }

    pub(crate) fn help(mut self, help: impl Into<String>) -> Problem {
        self.help = Some(help.into());
        self
    }

    /// Says that the value is a number outside of a range.
    pub(crate) fn range(mut self, range: impl Into<String>) -> Problem {
        self.range = Some(range.into());
        self
    }

    pub(crate) fn at(mut self, span: Range<usize>) -> Problem {
        self.span = Some(span);
        self
    }

    /// Names another key that the problem depends on.
    pub(crate) fn with(mut self, key: impl Into<String>, label: impl Into<String>) -> Problem {
        self.related.push(Related {
            key: key.into(),
            label: label.into(),
            span: None,
        });
        self
    }

    /// Returns true if the problem is about `key` or anything inside it.
    pub(crate) fn touches(&self, key: &str) -> bool {
        let inside = |own: &str| {
            own.strip_prefix(key)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
        };
        inside(&self.key) || self.related.iter().any(|other| inside(&other.key))
    }

    fn group<'a>(&'a self, source: &'a str, file: Option<&'a str>) -> Group<'a> {
        let mut group = Group::with_title(Level::ERROR.primary_title(&self.message));
        match &self.span {
            Some(span) => group = group.element(self.snippet(source, file, span)),
            None => {
                if let Some(file) = file {
                    group = group.element(Origin::path(file));
                }
            }
        }
        match &self.help {
            Some(help) => group.element(Level::HELP.message(help)),
            None => group,
        }
    }

    fn snippet<'a>(
        &'a self,
        source: &'a str,
        file: Option<&'a str>,
        span: &Range<usize>,
    ) -> Snippet<'a, annotate_snippets::Annotation<'a>> {
        let primary = AnnotationKind::Primary
            .span(within(source, span))
            .label((!self.label.is_empty()).then_some(self.label.as_str()));
        let others = self.related.iter().filter_map(|other| {
            let span = within(source, other.span.as_ref()?);
            Some(
                AnnotationKind::Context
                    .span(span)
                    .label(other.label.as_str()),
            )
        });
        Snippet::source(source)
            .path(file)
            .annotation(primary)
            .annotations(others)
    }
}

/// The message and the help in one line, for specs without a text.
impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        match &self.help {
            Some(help) => write!(f, " ({help})"),
            None => Ok(()),
        }
    }
}

/// Returns the span cut to the text, at character boundaries. The parser counts bytes, and does so
/// even in texts that it could not make sense of.
fn within(source: &str, span: &Range<usize>) -> Range<usize> {
    let inside = |at: &usize| source.is_char_boundary(*at);
    let start = (0..=span.start.min(source.len())).rev().find(inside);
    let start = start.unwrap_or(0);
    let end = (span.end.max(start)..source.len()).find(inside);
    start..end.unwrap_or(source.len())
}

/// A TOML text that is not a valid spec, with all of its problems in the order of the text.
///
/// `Display` shows the first 20 without colours and without a file name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.show(None, Renderer::plain()))]
pub struct SpecError {
    source_text: String,
    problems: Vec<Problem>,
}

/// Nobody reads more at a time, and a single slip can cause thousands.
const MOST_SHOWN: usize = 20;

impl SpecError {
    pub(crate) fn new(source: &str, mut problems: Vec<Problem>) -> SpecError {
        problems.sort_by_key(|p| p.span.as_ref().map_or(usize::MAX, |s| s.start));
        SpecError {
            source_text: source.to_string(),
            problems,
        }
    }

    /// Returns the problems, in the order of the text.
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }

    /// Returns each problem's byte range in the TOML and its message. A problem without a place of
    /// its own gets the whole text.
    pub fn spans(&self) -> impl Iterator<Item = (Range<usize>, &str)> {
        let whole = 0..self.source_text.len();
        self.problems
            .iter()
            .map(move |p| (p.span.clone().unwrap_or(whole.clone()), p.message.as_str()))
    }

    /// Renders the first 20 problems as a compiler shows them, with the lines of the TOML and the
    /// total number. `color` adds ANSI escapes. The text ends without a newline.
    pub fn render(&self, file_name: &str, color: bool) -> String {
        let renderer = if color {
            Renderer::styled()
        } else {
            Renderer::plain()
        };
        self.show(Some(file_name), renderer)
    }

    fn show(&self, file: Option<&str>, renderer: Renderer) -> String {
        let show = |p: &Problem| renderer.render(&[p.group(&self.source_text, file)]);
        let shown = self.problems.iter().take(MOST_SHOWN);
        let mut parts: Vec<String> = shown.map(show).collect();
        if let count @ 2.. = self.problems.len() {
            let place = file.map_or(String::new(), |file| format!(" in {file}"));
            let rest = if count > MOST_SHOWN {
                format!("; the first {MOST_SHOWN} are shown")
            } else {
                String::new()
            };
            let total = format!("{count} problems{place}{rest}");
            let group = Group::with_title(Level::ERROR.primary_title(total));
            parts.push(renderer.render(&[group]));
        }
        parts.join("\n\n")
    }
}
