//! Plain aligned tables.

use crate::console::Palette;

/// A table with a heading line.
pub struct Table {
    columns: Vec<Column>,
    rows: Vec<Vec<Cell>>,
}

struct Column {
    title: String,
    align: Align,
}

/// The side of a column that its texts are aligned to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Align {
    Left,
    Right,
}

/// A text with an ANSI style, which is usually empty.
#[derive(Clone, Debug)]
pub struct Cell {
    text: String,
    style: &'static str,
}

impl Table {
    /// Returns a table with these columns. A title that begins with `>` marks a column of numbers,
    /// which is aligned to the right.
    pub fn new(titles: &[&str]) -> Table {
        let column = |title: &&str| match title.strip_prefix('>') {
            Some(title) => Column {
                title: title.to_string(),
                align: Align::Right,
            },
            None => Column {
                title: title.to_string(),
                align: Align::Left,
            },
        };
        Table {
            columns: titles.iter().map(column).collect(),
            rows: Vec::new(),
        }
    }

    /// Adds a row.
    pub fn row<C: Into<Cell>>(&mut self, cells: impl IntoIterator<Item = C>) {
        self.rows.push(cells.into_iter().map(Into::into).collect());
    }

    /// Returns the table without the columns that are blank in every row.
    pub fn without_blanks(mut self) -> Table {
        let blank = |row: &Vec<Cell>, i: usize| row.get(i).is_none_or(|cell| cell.text == "-");
        for i in (0..self.columns.len()).rev() {
            if self.rows.iter().all(|row| blank(row, i)) && !self.rows.is_empty() {
                self.columns.remove(i);
                self.rows.iter_mut().for_each(|row| drop(row.remove(i)));
            }
        }
        self
    }

    /// Renders the lines, each with a newline and indented by two spaces.
    pub fn render(&self, palette: &Palette) -> String {
        let widths: Vec<usize> = (0..self.columns.len()).map(|i| self.width(i)).collect();
        let titles: Vec<Cell> = self
            .columns
            .iter()
            .map(|c| Cell::styled(&c.title, "1"))
            .collect();
        let mut text = self.line(&titles, &widths, palette);
        for row in &self.rows {
            text += &self.line(row, &widths, palette);
        }
        text
    }

    fn width(&self, column: usize) -> usize {
        let cells = self.rows.iter().filter_map(|row| row.get(column));
        let widest = cells
            .map(|cell| cell.text.chars().count())
            .max()
            .unwrap_or(0);
        widest.max(self.columns[column].title.chars().count())
    }

    fn line(&self, cells: &[Cell], widths: &[usize], palette: &Palette) -> String {
        let mut line = String::from(" ");
        for ((cell, column), width) in cells.iter().zip(&self.columns).zip(widths) {
            let pad = " ".repeat(width - cell.text.chars().count());
            let text = palette.paint(cell.style, &cell.text);
            line += &match column.align {
                Align::Left => format!(" {text}{pad} "),
                Align::Right => format!(" {pad}{text} "),
            };
        }
        line.trim_end().to_string() + "\n"
    }
}

impl Cell {
    /// Returns a text in an ANSI style such as `31`.
    pub fn styled(text: &str, style: &'static str) -> Cell {
        Cell {
            text: text.to_string(),
            style,
        }
    }
}

impl From<String> for Cell {
    fn from(text: String) -> Cell {
        Cell { text, style: "" }
    }
}

impl From<&str> for Cell {
    fn from(text: &str) -> Cell {
        Cell::from(text.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Palette = Palette::PLAIN;

    #[test]
    fn columns_line_up_and_lines_do_not_trail() {
        let mut table = Table::new(&["NAME", ">N"]);
        table.row(["a", "1"]);
        table.row(["µs", "1234"]);
        assert_eq!(
            table.render(&PLAIN),
            "  NAME     N\n  a        1\n  µs    1234\n"
        );
    }

    #[test]
    fn columns_of_dashes_go() {
        let mut table = Table::new(&["A", "B", "C"]);
        table.row(["1", "-", "-"]);
        table.row(["2", "-", "3"]);
        assert_eq!(
            table.without_blanks().render(&PLAIN),
            "  A  C\n  1  -\n  2  3\n"
        );
    }
}
