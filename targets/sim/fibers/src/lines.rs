//! From machine code to lines of the text: the line programs of DWARF.

use gimli::{DebugLine, DebugLineOffset, EndianSlice, LittleEndian};

/// The line of each run of instructions, by address in the image, sorted.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lines(Vec<(u64, u32)>);

impl Lines {
    /// Reads a `.debug_line` section and skips units that it cannot read.
    pub(crate) fn parse(bytes: &[u8]) -> Lines {
        let section = DebugLine::new(bytes, LittleEndian);
        let mut rows = Vec::new();
        let mut offset = 0;
        while offset < bytes.len() {
            let Some(length) = unit(&section, offset, &mut rows) else {
                break;
            };
            offset += length;
        }
        rows.sort_by_key(|row| row.0);
        Lines(rows)
    }

    /// Returns the line of the instruction at `address`.
    pub(crate) fn at(&self, address: u64) -> Option<u32> {
        let after = self.0.partition_point(|row| row.0 <= address);
        let (_, line) = self.0.get(after.checked_sub(1)?)?;
        (*line > 0).then_some(*line)
    }
}

/// Runs the program of the unit at `offset` and returns the unit's length in
/// bytes. The row behind the end of a run of instructions gets line 0.
fn unit(
    section: &DebugLine<EndianSlice<LittleEndian>>,
    offset: usize,
    rows: &mut Vec<(u64, u32)>,
) -> Option<usize> {
    const ADDRESS: u8 = 8; // bytes; DWARF 5 says so itself
    let program = section.program(DebugLineOffset(offset), ADDRESS, None, None);
    let program = program.ok()?;
    let header = program.header();
    let length = usize::from(header.format().initial_length_size()) + header.unit_length();
    let mut run = program.rows();
    while let Ok(Some((_, row))) = run.next_row() {
        let line = row.line().filter(|_| !row.end_sequence());
        rows.push((row.address(), line.map_or(0, |line| line.get() as u32)));
    }
    Some(length)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a version 4 unit with this program.
    fn section(program: &[u8]) -> Vec<u8> {
        let mut header = vec![1, 1, 1, (-5i8) as u8, 14, 13];
        header.extend([0, 1, 1, 1, 1, 0, 0, 0, 1, 0, 0, 1]);
        header.extend([0, 0]); // no folders, no files
        let mut body = 4u16.to_le_bytes().to_vec();
        body.extend((header.len() as u32).to_le_bytes());
        body.extend(&header);
        body.extend(program);
        let mut bytes = (body.len() as u32).to_le_bytes().to_vec();
        bytes.extend(body);
        bytes
    }

    #[test]
    fn rows_follow_the_program() {
        let mut program = vec![0, 9, 2];
        program.extend(0x1000u64.to_le_bytes());
        program.extend([3, 0xe3, 0x00, 1]); // line += 99, row
        program.extend([2, 0x10, 3, 0x7b, 1]); // address += 16, line -= 5, row
        program.push(13 + 14 * 2 + 5 + 3); // address += 2, line += 3
        program.extend([8, 1, 2, 4, 0, 1, 1]); // address += 17, row; end
        let lines = Lines::parse(&section(&program));
        assert_eq!(lines.at(0xfff), None);
        assert_eq!(lines.at(0x1000), Some(100));
        assert_eq!(lines.at(0x100f), Some(100));
        assert_eq!(lines.at(0x1010), Some(95));
        assert_eq!(lines.at(0x1012), Some(98));
        assert_eq!(lines.at(0x1024), Some(98));
        assert_eq!(lines.at(0x1027), None, "behind the end");
    }

    #[test]
    fn garbage_gives_no_lines() {
        for bytes in [&[][..], &[1, 2, 3], &[255; 40], &section(&[0, 200])] {
            assert_eq!(Lines::parse(bytes).at(5), None);
        }
    }
}
