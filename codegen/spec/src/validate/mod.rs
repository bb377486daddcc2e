//! The rules of a valid spec.
//!
//! They are total: for any value of the types, the result is a list of problems and never a panic,
//! and a spec without problems can be planned, emitted and run. An option that would silently do
//! nothing is a problem too, because whoever set it wanted an effect.

mod capacity;
mod experts;
mod losses;
mod router;
mod router_sizes;
mod shape;
mod training;

use crate::write::word;
use crate::{LayerSpec, Problem, Router};
use serde::Serialize;

impl LayerSpec {
    /// Checks every rule.
    ///
    /// # Errors
    /// All problems, each with the key at fault. None has a span.
    pub fn validate(&self) -> Result<(), Vec<Problem>> {
        let mut problems = Vec::new();
        shape::check(self, &mut problems);
        router::check(self, &mut problems);
        training::check(self, &mut problems);
        capacity::check(self, &mut problems);
        experts::check(self, &mut problems);
        losses::check(self, &mut problems);
        if problems.is_empty() {
            Ok(())
        } else {
            Err(problems)
        }
    }

    /// Returns [`LayerSpec::routed_experts`] without overflow, for specs that may be invalid.
    fn scored_experts(&self) -> usize {
        let without_weights = self.experts.identity.saturating_add(self.experts.zero);
        self.shape.experts.saturating_add(without_weights)
    }
}

/// Adds the keys that determine the number of scored experts.
fn experts_behind(spec: &LayerSpec, problem: Problem) -> Problem {
    let problem = problem.with("shape.experts", format!("{} experts", spec.shape.experts));
    let problem = match spec.experts.identity {
        0 => problem,
        n => problem.with("experts.identity", format!("{n} identity experts")),
    };
    match spec.experts.zero {
        0 => problem,
        n => problem.with("experts.zero", format!("{n} zero experts")),
    }
}

/// A whole number and its bounds, both included.
struct Range<'a> {
    key: &'a str,
    value: usize,
    most: usize,
    least: usize,
    /// The reason for the upper bound.
    because: &'a str,
}

impl Range<'_> {
    /// Returns the range of a size: from 1 to [`crate::MAX_DIM`].
    fn dim(key: &str, value: usize) -> Range<'_> {
        Range {
            key,
            value,
            least: 1,
            most: crate::MAX_DIM,
            because: "the widest layer kernels are generated for",
        }
    }

    fn check(&self, problems: &mut Vec<Problem>) {
        let Range {
            key,
            value,
            least,
            most,
            because,
        } = self;
        let problem = Problem::new(*key, format!("`{key}` = {value} is out of range"));
        if value < least {
            let help = format!("use a number from {least} to {most}");
            problems.push(
                problem
                    .label(format!("must be at least {least}"))
                    .help(help)
                    .range(format!("from {least} to {most}")),
            );
        } else if value > most {
            let help = format!("{most} is {because}");
            problems.push(
                problem
                    .label(format!("must be at most {most}"))
                    .help(help)
                    .range(format!("at most {most}")),
            );
        }
    }
}

/// The accepted interval of a real number.
#[derive(Clone, Copy, PartialEq)]
enum Real {
    Any,
    /// Zero or more.
    NotNegative,
    /// More than zero.
    Positive,
    /// From zero to below one.
    Fraction,
}

impl Real {
    /// Checks the number in f32, because kernels compute in f32 and it must still mean something
    /// there.
    fn check(self, key: &str, value: f64, problems: &mut Vec<Problem>) {
        let single = value as f32;
        let vanishes = value != 0.0 && single.abs() < f32::MIN_POSITIVE;
        let complaint = if !single.is_finite() {
            "must be finite in f32"
        } else if vanishes {
            "too small for f32, whose smallest number is 1.2e-38"
        } else if self == Real::Positive && value <= 0.0 {
            "must be more than 0"
        } else if self != Real::Any && value < 0.0 {
            "must not be negative"
        } else if self == Real::Fraction && value >= 1.0 {
            "must be less than 1"
        } else {
            return;
        };
        let message = format!("`{key}` = {value:?} is out of range");
        let problem = Problem::new(key, message).label(complaint);
        problems.push(problem.help(self.possible()).range(self.range()));
    }

    fn possible(self) -> String {
        match self {
            Real::NotNegative => format!("use {}", self.range()),
            _ => format!("use a number {}", self.range()),
        }
    }

    fn range(self) -> &'static str {
        match self {
            Real::Any => "between -3.4e38 and 3.4e38",
            Real::NotNegative => "0, or a number between 1.2e-38 and 3.4e38",
            Real::Positive => "between 1.2e-38 and 3.4e38",
            Real::Fraction => "from 0 to below 1",
        }
    }
}

/// Two options that exclude each other.
struct Conflict<'a> {
    /// The option at fault, and its value as written in TOML.
    key: &'a str,
    value: String,
    /// The option it collides with.
    with: &'a str,
    with_value: String,
    /// The reason both cannot be set.
    because: &'a str,
    /// The change to make.
    change: String,
}

impl Conflict<'_> {
    fn problem(self) -> Problem {
        let message = format!(
            "`{}` = {} contradicts `{}` = {}",
            self.key, self.value, self.with, self.with_value
        );
        Problem::new(self.key, message)
            .label(self.because)
            .with(self.with, format!("{} here", self.with_value))
            .help(self.change)
    }
}

/// Adds the problem of two options that exclude each other; removing the first solves it.
fn clash(
    problems: &mut Vec<Problem>,
    key: &str,
    value: String,
    with: (&str, String),
    because: &str,
) {
    let name = key.rsplit('.').next().unwrap_or(key);
    let conflict = Conflict {
        key,
        value,
        with: with.0,
        with_value: with.1,
        because,
        change: format!("remove one of the two: `{name}` is not needed by default"),
    };
    problems.push(conflict.problem());
}

/// Returns the problem of an option that the router's kind cannot use.
fn against_kind(router: &Router, key: &str, value: &str, because: &str) -> Problem {
    let name = key.trim_start_matches("router.");
    let conflict = Conflict {
        key,
        value: value.to_string(),
        with: "router.kind",
        with_value: quoted(&router.kind),
        because,
        change: format!("remove `{name}` or change `kind`"),
    };
    conflict.problem()
}

/// Returns a plain enum's value as written in TOML.
fn quoted(value: &impl Serialize) -> String {
    format!("\"{}\"", word(value))
}
