//! The library's log messages on stderr.
//!
//! `RUST_LOG` or `MOESAIC_LOG` sets the level: error, warn (the default), info, debug, trace, or
//! off.

use crate::console::{Console, Verbosity};
use std::collections::BTreeSet;
use std::fmt::{Debug, Write};
use std::sync::{Mutex, PoisonError};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Metadata, Subscriber, span};

/// A subscriber that prints events. Spans carry nothing that is shown.
struct Printer {
    console: Console,
    level: LevelFilter,
}

/// The warnings printed so far. A problem with one kernel usually repeats with every kernel, so
/// each warning is printed once unless the level asks for more.
static GIVEN: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// Records that the user has seen `message`, and returns whether it is new.
pub fn given(message: &str) -> bool {
    let mut given = GIVEN.lock().unwrap_or_else(PoisonError::into_inner);
    given.insert(message.to_string())
}

/// Starts printing events.
pub fn start(console: Console) {
    let level = ["MOESAIC_LOG", "RUST_LOG"]
        .iter()
        .find_map(|name| std::env::var(name).ok()?.trim().parse().ok());
    let level = level.unwrap_or(match console.verbosity {
        Verbosity::Quiet | Verbosity::Normal => LevelFilter::WARN,
        Verbosity::Verbose => LevelFilter::INFO,
        Verbosity::Debug => LevelFilter::DEBUG,
    });
    // This fails only if another subscriber is installed, and there is none.
    let _ = tracing::subscriber::set_global_default(Printer { console, level });
}

impl Subscriber for Printer {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= self.level
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(self.level)
    }

    fn event(&self, event: &Event<'_>) {
        let mut line = Line::default();
        event.record(&mut line);
        let warning = *event.metadata().level() == Level::WARN;
        if warning && self.level <= LevelFilter::WARN && !given(&line.message) {
            return;
        }
        let text = line.message + &line.fields;
        let palette = self.console.err;
        match *event.metadata().level() {
            Level::ERROR => self
                .console
                .tell(&format!("{} {text}", palette.red("error:"))),
            Level::WARN => self.console.warn(&text),
            Level::INFO => self.console.note(&text),
            level => self.console.tell(&palette.dim(&format!(
                "{}: {}: {text}",
                level.as_str().to_lowercase(),
                event.metadata().target()
            ))),
        }
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

/// The message of an event, with its other fields on lines of their own.
#[derive(Default)]
struct Line {
    message: String,
    fields: String,
}

impl Line {
    fn add(&mut self, field: &Field, value: &str) {
        let written = match field.name() {
            "message" => write!(self.message, "{value}"),
            "error" | "reason" => write!(self.fields, "\n  {}", value.replace('\n', "\n  ")),
            name => write!(self.fields, "\n  {name}: {}", value.replace('\n', "\n  ")),
        };
        debug_assert!(written.is_ok(), "strings take every text");
    }
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.add(field, &format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, value);
    }
}
