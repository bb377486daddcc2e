//! Progress lines on a terminal.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A switch that is on once the user wants no progress.
static HIDDEN: AtomicBool = AtomicBool::new(false);

/// Shows no progress from now on.
pub fn hide() {
    HIDDEN.store(true, Ordering::Relaxed);
}

fn shown(bar: ProgressBar) -> ProgressBar {
    if HIDDEN.load(Ordering::Relaxed) {
        bar.set_draw_target(ProgressDrawTarget::hidden());
    }
    bar
}

/// A line that describes the current work until it is dropped. It appears on a terminal only, and
/// only when the work takes a moment.
pub struct Progress(ProgressBar);

impl Progress {
    /// Shows a line with `text`.
    pub fn start(text: impl Into<String>) -> Progress {
        let bar = shown(ProgressBar::new_spinner());
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} {elapsed}") {
            bar.set_style(style);
        }
        bar.set_message(text.into());
        bar.enable_steady_tick(Duration::from_millis(150));
        Progress(bar)
    }

    /// Shows a bar of bytes, whose end [`Progress::of`] sets.
    pub fn bytes(text: impl Into<String>) -> Progress {
        let bar = shown(ProgressBar::new(0));
        let parts =
            "{spinner} {msg} [{bar:30}] {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left";
        if let Ok(style) = ProgressStyle::with_template(parts) {
            bar.set_style(style);
        }
        bar.set_message(text.into());
        bar.enable_steady_tick(Duration::from_millis(150));
        Progress(bar)
    }

    /// Sets the number at which the bar is full.
    pub fn of(&self, whole: u64) {
        self.0.set_length(whole);
    }

    /// Moves the bar on.
    pub fn advance(&self, by: u64) {
        self.0.inc(by);
    }

    /// Returns whether nobody sees the line.
    pub fn is_hidden(&self) -> bool {
        self.0.is_hidden()
    }

    /// Prints something while the line is out of the way.
    pub fn beside(&self, print: impl FnOnce()) {
        self.0.suspend(print);
    }

    /// Replaces the text of the line.
    pub fn next(&self, text: impl Into<String>) {
        self.0.set_message(text.into());
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
