//! Plain aligned tables.

use crate::palette::{Palette, wrapped};
use std::collections::BTreeSet;

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

    /// Renders the lines, each with a newline and indented by two spaces. On a narrow stream texts
    /// are wrapped, and columns that still have no room come in further blocks below, each beside
    /// the columns that name the rows. Where that has no room either, or takes many blocks, each
    /// row is a list of its titles and texts.
    pub fn render(&self, palette: &Palette) -> String {
        let columns = palette.columns().unwrap_or(usize::MAX);
        let mut widths = self.widths(columns);
        let blocks = self.blocks(&widths, columns);
        let fits = |block: &Vec<usize>| {
            let block: Vec<usize> = block.iter().map(|&i| widths[i]).collect();
            line_width(&block) <= columns
        };
        let apart = blocks.len() == 1 || columns > NARROW || self.rows_differ(&blocks);
        if blocks.len() > MOST_BLOCKS || !blocks.iter().all(fits) || !apart {
            return self.lists(columns, palette);
        }
        self.widen(&mut widths, &blocks, columns);
        let blocks: Vec<String> = blocks
            .iter()
            .map(|block| self.block(block, &widths, palette))
            .collect();
        blocks.join("\n")
    }

    /// Returns the widths of the columns; those of texts are less than the longest text where the
    /// stream is narrow.
    fn widths(&self, columns: usize) -> Vec<usize> {
        let mut widths: Vec<usize> = (0..self.columns.len()).map(|i| self.width(i)).collect();
        loop {
            let whole = line_width(&widths);
            let wraps = |i: &usize| {
                self.columns[*i].align == Align::Left && widths[*i] > self.least_width(*i, columns)
            };
            let widest = (0..widths.len()).filter(wraps).max_by_key(|&i| widths[i]);
            let Some(widest) = widest.filter(|_| whole > columns) else {
                return widths;
            };
            let less = widths[widest].saturating_sub(whole - columns);
            widths[widest] = less.max(self.least_width(widest, columns));
        }
    }

    /// Returns the width to which a column of texts may be wrapped in a stream `columns` wide.
    fn least_width(&self, column: usize, columns: usize) -> usize {
        let cells = self.rows.iter().filter_map(|row| row.get(column));
        // Behind commas, too: `wrapped` divides long words there.
        let words = cells.flat_map(|cell| cell.text.split(' '));
        let words = words.flat_map(|word| word.split_inclusive(','));
        let longest = words.map(|word| word.chars().count()).max().unwrap_or(0);
        let title = self.columns[column].title.chars().count();
        longest
            .max(title)
            .max(least_text(columns).min(self.width(column)))
    }

    /// Divides the columns into blocks that fit. Every block begins with the columns up to the first
    /// text, which name the rows.
    fn blocks(&self, widths: &[usize], columns: usize) -> Vec<Vec<usize>> {
        let text = |column: &Column| column.align == Align::Left;
        let names = self.columns.iter().position(text).unwrap_or(0) + 1;
        let names: Vec<usize> = (0..names.min(widths.len())).collect();
        let mut blocks = vec![names.clone()];
        for column in names.len()..widths.len() {
            let last = blocks.last().expect("there is one block");
            let with = last.iter().chain([&column]).map(|&i| widths[i]);
            let fits = line_width(&with.collect::<Vec<_>>()) <= columns;
            if fits || last.len() == names.len() {
                blocks.last_mut().expect("there is one block").push(column);
            } else {
                blocks.push(names.iter().copied().chain([column]).collect());
            }
        }
        blocks
    }

    /// Gives wrapped texts the room that is left in every block that shows them.
    fn widen(&self, widths: &mut [usize], blocks: &[Vec<usize>], columns: usize) {
        for column in 0..widths.len() {
            let with = blocks.iter().filter(|block| block.contains(&column));
            let left = with.map(|block| {
                let block: Vec<usize> = block.iter().map(|&i| widths[i]).collect();
                columns.saturating_sub(line_width(&block))
            });
            let left = left.min().unwrap_or(0);
            widths[column] = self.width(column).min(widths[column] + left);
        }
    }

    fn block(&self, block: &[usize], widths: &[usize], palette: &Palette) -> String {
        let titles = self.columns.iter().map(|c| Cell::styled(&c.title, "1"));
        let titles: Vec<Cell> = titles.collect();
        let rows = [&titles].into_iter().chain(&self.rows);
        rows.map(|row| self.line(row, block, widths, palette))
            .collect()
    }

    /// Returns true if the columns that all blocks begin with tell rows apart.
    fn rows_differ(&self, blocks: &[Vec<usize>]) -> bool {
        let shared = |i: &&usize| blocks.iter().all(|block| block.contains(i));
        let names: Vec<usize> = blocks[0].iter().filter(shared).copied().collect();
        let text = |row: &Vec<Cell>, i: usize| row.get(i).map_or(String::new(), |c| c.text.clone());
        let row = |row| names.iter().map(|&i| text(row, i)).collect::<Vec<_>>();
        let rows: BTreeSet<Vec<String>> = self.rows.iter().map(row).collect();
        rows.len() == self.rows.len()
    }

    /// Renders each row as a list, below the text of a column without a title.
    fn lists(&self, columns: usize, palette: &Palette) -> String {
        let titles = self.columns.iter().map(|c| c.title.chars().count());
        let label = titles.max().unwrap_or(0);
        let room = columns.saturating_sub(label + 6).max(1);
        let list = |row: &Vec<Cell>| {
            let mut text = String::new();
            let cells = self.columns.iter().zip(row);
            for (column, cell) in cells.filter(|(_, cell)| !["", "-"].contains(&&*cell.text)) {
                if column.title.is_empty() {
                    text += &format!("  {}\n", palette.paint(cell.style, &cell.text));
                    continue;
                }
                for (at, part) in wrapped(&cell.text, room, room).iter().enumerate() {
                    let title = if at == 0 { &*column.title } else { "" };
                    let pad = " ".repeat(label - title.chars().count());
                    let title = palette.bold(title);
                    text += &format!("    {title}{pad}  {}\n", palette.paint(cell.style, part));
                }
            }
            text
        };
        let lists: Vec<String> = self.rows.iter().map(list).collect();
        lists.join("\n")
    }

    fn width(&self, column: usize) -> usize {
        let cells = self.rows.iter().filter_map(|row| row.get(column));
        let widest = cells
            .map(|cell| cell.text.chars().count())
            .max()
            .unwrap_or(0);
        widest.max(self.columns[column].title.chars().count())
    }

    /// Renders a row, on several lines if a text is wrapped.
    fn line(&self, row: &[Cell], block: &[usize], widths: &[usize], palette: &Palette) -> String {
        let own = block.iter().filter(|&&i| i < row.len());
        let cells: Vec<(usize, Vec<String>)> = own
            .map(|&i| (i, wrapped(&row[i].text, widths[i], widths[i])))
            .collect();
        let height = cells.iter().map(|(_, lines)| lines.len()).max();
        let mut text = String::new();
        for at in 0..height.unwrap_or(1) {
            let mut line = String::from(" ");
            for (i, lines) in &cells {
                let part = lines.get(at).map_or("", String::as_str);
                let pad = " ".repeat(widths[*i].saturating_sub(part.chars().count()));
                let painted = match part {
                    "" => String::new(),
                    part => palette.paint(row[*i].style, part),
                };
                line += &match self.columns[*i].align {
                    Align::Left => format!(" {painted}{pad} "),
                    Align::Right => format!(" {pad}{painted} "),
                };
            }
            text += line.trim_end();
            text += "\n";
        }
        text
    }
}

/// The columns up to which a table whose rows have equal names is no table: on wider streams it is
/// shorter so, and few blocks are matched by the order of rows.
const NARROW: usize = 60;

/// The blocks beyond which nobody finds the same row in each.
const MOST_BLOCKS: usize = 3;

/// Returns the least width of a column of wrapped texts in a stream `columns` wide, if its texts are
/// that long.
fn least_text(columns: usize) -> usize {
    match columns {
        // The text that names a row leaves room for one column beside it.
        ..44 => columns / 5,
        _ => 24,
    }
}

/// Returns the width of a line with columns of these widths.
fn line_width(widths: &[usize]) -> usize {
    widths.iter().map(|width| width + 2).sum()
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
    fn a_table_fits_the_stream() {
        let mut table = Table::new(&[">", "NAME", "WHAT IT DOES", ">BYTES", ">TIME"]);
        let long = "Adds what the experts made of each token, in the order of their slots";
        table.row(["1", "combine", long, "1234", "1.53 ms"]);
        let text = table.render(&PLAIN.within(Some(60)));
        assert!(
            text.lines().all(|line| line.chars().count() <= 60),
            "{text}"
        );
        assert_eq!(text.matches("NAME").count(), 1, "{text}");
        let text = table.render(&PLAIN.within(Some(44)));
        assert!(
            text.lines().all(|line| line.chars().count() <= 44),
            "{text}"
        );
        // Columns without room come below, beside the name of their row.
        assert_eq!(text.matches("combine").count(), 2, "{text}");
        assert!(text.contains("1.53 ms") && text.contains("slots"), "{text}");
        assert_eq!(table.render(&PLAIN).lines().count(), 2);
    }

    /// A telephone's width: the text that names rows is wrapped, so that a number stands beside it.
    #[test]
    fn a_narrow_stream_wraps_the_names_of_rows() {
        let mut table = Table::new(&[">", ">STEP", "MESH", "DP", ">MEMORY"]);
        table.row([
            "10 =",
            "7.75 s",
            "pp 2 x tp 2 x ep 16",
            "64, 8",
            "234 GiB (87 %)",
        ]);
        let text = table.render(&PLAIN.within(Some(40)));
        assert!(
            text.lines().all(|line| line.chars().count() <= 40),
            "{text}"
        );
        assert_eq!(text.matches("10 =").count(), 2, "{text}");
    }

    #[test]
    fn a_text_has_the_room_that_its_blocks_leave() {
        let mut table = Table::new(&["MESH", "STRATEGY", ">MEMORY"]);
        table.row(["ep 8 x expert_tp 8 x dp 1", "r=2,overlap_degree=4", "2 GiB"]);
        // Both texts fit into a line, though not with the number.
        let text = table.render(&PLAIN.within(Some(52)));
        let first = "  MESH                       STRATEGY\n  \
                     ep 8 x expert_tp 8 x dp 1  r=2,overlap_degree=4\n";
        assert!(text.starts_with(first), "{text}");
        assert_eq!(text.lines().count(), 5, "{text}");
    }

    /// Rows that fit no block, and such as would be spread over many, are lists.
    #[test]
    fn a_row_without_room_is_a_list() {
        let titles = [">", ">STEP", "MESH", "STRATEGY", "BOUND BY"];
        let mut table = Table::new(&titles);
        let (mesh, strategy) = ("ep 2 x expert_tp 8 x dp 4", "r=4,overlap_degree=4/8");
        table.row(["1", "52.8 ms", mesh, strategy, "-"]);
        table.row(["2", "53 ms", "ep 4", "default", "ib 57 %"]);
        assert_eq!(
            table.render(&PLAIN.within(Some(40))),
            "  1\n    STEP      52.8 ms\n    MESH      ep 2 x expert_tp 8 x dp 4\n    \
             STRATEGY  r=4,overlap_degree=4/8\n\n  2\n    STEP      53 ms\n    MESH      ep 4\n    \
             STRATEGY  default\n    BOUND BY  ib 57 %\n"
        );
        let mut numbers = Table::new(&["TARGET", ">B", ">C", ">D", ">E"]);
        numbers.row(["cpu:avx512bf16", "1", "2", "3", "4"]);
        let text = numbers.render(&PLAIN.within(Some(20)));
        assert!(
            text.starts_with("    TARGET  cpu:avx512bf16\n    B       1\n"),
            "{text}"
        );
        let mut alike = Table::new(&["WHOSE", "WHAT", ">TIME"]);
        alike.row(["ranks", "grad.experts.gate", "1 ms"]);
        alike.row(["ranks", "grad.experts.up", "2 ms"]);
        let text = alike.render(&PLAIN.within(Some(30)));
        assert!(
            text.contains("    TIME   1 ms\n\n    WHOSE  ranks\n"),
            "{text}"
        );
        // A strategy is divided where it has to be.
        let mut table = Table::new(&titles);
        let strategy = "r=2,overlap_degree=4/8,all_to_all=dedup";
        table.row(["1", "52.8 ms", mesh, strategy, "ib 57 %"]);
        let text = table.render(&PLAIN.within(Some(80)));
        let lines: Vec<&str> = text.lines().map(str::trim).collect();
        assert!(lines[1].contains("overlap_degree=4/8, "), "{text}");
        assert_eq!(lines[2..], ["all_to_all=dedup"], "{text}");
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
