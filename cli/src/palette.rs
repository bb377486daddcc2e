//! Colours of output, and its width.

use clap::ValueEnum;

/// The choice of when to colour output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ColorChoice {
    /// On a terminal, unless NO_COLOR is set.
    #[default]
    Auto,
    /// Also into a file or a pipe.
    Always,
    /// Not at all.
    Never,
}

/// The colours of a stream, which may be off, and its width.
#[derive(Clone, Copy, Debug, Default)]
pub struct Palette {
    on: bool,
    columns: Option<usize>,
}

impl Palette {
    /// A palette without colours.
    #[cfg(test)]
    pub const PLAIN: Palette = Palette {
        on: false,
        columns: None,
    };

    /// Returns the palette of a stream that is a terminal, or is none.
    pub fn new(choice: ColorChoice, terminal: bool) -> Palette {
        let set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        let on = match choice {
            ColorChoice::Auto => terminal && !set("NO_COLOR") && !dumb,
            ColorChoice::Always => true,
            ColorChoice::Never => false,
        };
        Palette { on, columns: None }
    }

    /// Returns the palette of a stream that is `columns` wide.
    pub fn within(self, columns: Option<usize>) -> Palette {
        Palette { columns, ..self }
    }

    /// Returns the width of the stream, if it has one.
    pub fn columns(&self) -> Option<usize> {
        self.columns
    }

    /// Returns whether colours are on.
    pub fn on(&self) -> bool {
        self.on
    }

    /// Wraps `text` in the escapes of a style, such as `1;31`.
    pub fn paint(&self, style: &str, text: &str) -> String {
        if self.on && !style.is_empty() {
            format!("\x1b[{style}m{text}\x1b[0m")
        } else {
            text.to_string()
        }
    }

    /// Paints a heading.
    pub fn bold(&self, text: &str) -> String {
        self.paint("1", text)
    }

    /// Paints secondary text.
    pub fn dim(&self, text: &str) -> String {
        self.paint("2", text)
    }

    /// Paints a failure.
    pub fn red(&self, text: &str) -> String {
        self.paint("1;31", text)
    }

    /// Paints a warning.
    pub fn yellow(&self, text: &str) -> String {
        self.paint("1;33", text)
    }

    /// Paints a note or a hint.
    pub fn cyan(&self, text: &str) -> String {
        self.paint("1;36", text)
    }
}
