//! From machine code to lines of the text: the line program of DWARF 2 to 5,
//! as far as one file needs it.

/// Where each run of instructions comes from: addresses in the image, and
/// lines. Sorted by address.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lines(Vec<(u64, u32)>);

impl Lines {
    /// Reads a `.debug_line` section; what cannot be read is left out.
    pub(crate) fn parse(section: &[u8]) -> Lines {
        let mut rows = Vec::new();
        let mut rest = Bytes(section);
        while !rest.0.is_empty() {
            if unit(&mut rest, &mut rows).is_none() {
                break;
            }
        }
        rows.sort_by_key(|row| row.0);
        Lines(rows)
    }

    /// The line of the instruction at `address`.
    pub(crate) fn at(&self, address: u64) -> Option<u32> {
        let after = self.0.partition_point(|row| row.0 <= address);
        let (_, line) = self.0.get(after.checked_sub(1)?)?;
        (*line > 0).then_some(*line)
    }
}

/// Bytes that are read from the front.
#[derive(Clone, Copy)]
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(count)?;
        self.0 = tail;
        Some(head)
    }

    fn number(&mut self, bytes: usize) -> Option<u64> {
        let mut value = [0; 8];
        value[..bytes].copy_from_slice(self.take(bytes)?);
        Some(u64::from_le_bytes(value))
    }

    fn byte(&mut self) -> Option<u8> {
        Some(self.take(1)?[0])
    }

    fn unsigned(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some(value);
            }
        }
        None
    }

    fn signed(&mut self) -> Option<i64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            value |= i64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                let sign = byte & 0x40 != 0 && shift + 7 < 64;
                return Some(if sign {
                    value | -1 << (shift + 7)
                } else {
                    value
                });
            }
        }
        None
    }
}

/// What the header of a unit says about its program.
struct Header<'a> {
    least: u64,
    line_base: i64,
    line_range: u64,
    opcode_base: u8,
    /// Operands of the standard opcodes, from 1.
    operands: &'a [u8],
}

/// One unit: a header, and a program that writes rows.
fn unit(section: &mut Bytes, rows: &mut Vec<(u64, u32)>) -> Option<()> {
    let length = section.number(4)?;
    if length >= 0xffff_fff0 {
        return None; // 64-bit DWARF
    }
    let mut body = Bytes(section.take(length as usize)?);
    let version = body.number(2)?;
    if version >= 5 {
        body.take(2)?; // sizes of addresses and selectors
    }
    let header_length = body.number(4)? as usize;
    let mut program = body;
    program.take(header_length)?;
    let least = u64::from(body.byte()?);
    if version >= 4 {
        body.byte()?; // operations per instruction
    }
    body.byte()?; // whether rows begin statements
    let line_base = i64::from(body.byte()? as i8);
    let line_range = u64::from(body.byte()?);
    let opcode_base = body.byte()?;
    let operands = body.take(usize::from(opcode_base).checked_sub(1)?)?;
    let header = Header {
        least,
        line_base,
        line_range,
        opcode_base,
        operands,
    };
    (line_range > 0).then(|| run(&header, program, rows))?
}

/// Runs a line program.
fn run(header: &Header, mut program: Bytes, rows: &mut Vec<(u64, u32)>) -> Option<()> {
    let (mut address, mut line) = (0u64, 1i64);
    while let Some(opcode) = program.byte() {
        if opcode >= header.opcode_base {
            let adjusted = u64::from(opcode - header.opcode_base);
            address += adjusted / header.line_range * header.least;
            line += header.line_base + (adjusted % header.line_range) as i64;
            rows.push((address, line as u32));
            continue;
        }
        match opcode {
            0 => {
                let length = program.unsigned()? as usize;
                let mut extended = Bytes(program.take(length)?);
                match extended.byte()? {
                    1 => {
                        rows.push((address, 0));
                        (address, line) = (0, 1);
                    }
                    2 => address = extended.number(length.checked_sub(1)?.min(8))?,
                    _ => {}
                }
            }
            1 => rows.push((address, line as u32)),
            2 => address += program.unsigned()? * header.least,
            3 => line += program.signed()?,
            8 => {
                let most = u64::from(255 - header.opcode_base);
                address += most / header.line_range * header.least;
            }
            9 => address += program.number(2)?,
            other => {
                let operands = header.operands[usize::from(other) - 1];
                for _ in 0..operands {
                    program.unsigned()?;
                }
            }
        }
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A version 4 unit with this program.
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
