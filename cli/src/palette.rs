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

    /// Divides the lines that are wider than the stream between words. What follows a break is
    /// indented by two columns more than its line.
    pub fn fold(&self, text: &str) -> String {
        let Some(columns) = self.columns else {
            return text.to_string();
        };
        let lines = text.split_inclusive('\n');
        lines.map(|line| folded(line, columns)).collect()
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

/// Divides a line at spaces into lines of at most `columns`, where its words allow that.
fn folded(line: &str, columns: usize) -> String {
    if width(line.trim_end()) <= columns {
        return line.to_string();
    }
    let own = line.len() - line.trim_start_matches(' ').len();
    let (indent, text) = line.split_at(own);
    let first = columns.saturating_sub(own);
    let lines = wrapped(text, first, first.saturating_sub(2));
    indent.to_string() + &lines.join(&format!("\n{indent}  "))
}

/// Divides a text into lines of at most `first` and then `rest` columns, between words. A word that
/// is longer than a line, such as a strategy, is divided behind commas.
pub fn wrapped(text: &str, first: usize, rest: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    let (mut at, mut columns) = (0, first);
    for word in text.split(' ') {
        let long = width(word.trim_end()) > rest;
        let parts = word.split_inclusive(|c| long && c == ',');
        // `split_inclusive` gives nothing for no word, which several blanks in a row have.
        let parts = parts.chain(word.is_empty().then_some(""));
        for (i, part) in parts.enumerate() {
            let space = if i == 0 { " " } else { "" };
            let wide = width(part.trim_end());
            match lines.last_mut() {
                Some(line) if at + space.len() + wide <= columns => {
                    *line += space;
                    *line += part;
                    at += space.len() + wide;
                }
                // Several blanks in a row end where a line does.
                Some(_) if part.is_empty() => {}
                last => {
                    if let Some(line) = last {
                        line.truncate(line.trim_end().len());
                        columns = rest;
                    }
                    lines.push(part.to_string());
                    at = wide;
                }
            }
        }
    }
    lines
}

/// Returns the columns of a text, whose escapes have none.
fn width(text: &str) -> usize {
    let mut parts = text.split("\x1b[");
    let first = parts.next().map_or(0, |part| part.chars().count());
    let behind = parts.map(|part| part.split_once('m').map_or(part, |(_, text)| text));
    first + behind.map(|part| part.chars().count()).sum::<usize>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_folded_between_words() {
        let narrow = Palette::PLAIN.within(Some(14));
        assert_eq!(
            narrow.fold("one two three four\n\n  a bb ccc dddd eeeee\nshort\n"),
            "one two three\n  four\n\n  a bb ccc\n    dddd eeeee\nshort\n"
        );
        assert_eq!(
            narrow.fold("one_word_that_is_long b"),
            "one_word_that_is_long\n  b"
        );
        assert_eq!(
            narrow.fold("dp     four_teen_long\n"),
            "dp\n  four_teen_long\n"
        );
        assert_eq!(
            narrow.fold("a r=4,degree=2,by=rows b\n"),
            "a r=4,\n  degree=2,\n  by=rows b\n"
        );
        let painted = "\x1b[1mone\x1b[0m two three\n";
        assert_eq!(narrow.fold(painted), painted);
        assert_eq!(Palette::PLAIN.fold("a b c"), "a b c");
    }
}
