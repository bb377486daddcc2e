//! PTX text to tokens.

/// A piece of text with its line, from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token<'a> {
    pub text: &'a str,
    pub line: u32,
}

/// Splits text into words (names, opcodes, directives, numbers), strings and
/// single characters. Comments are dropped; `::` belongs to a word.
pub fn tokens(text: &str) -> Vec<Token<'_>> {
    let bytes = text.as_bytes();
    let (mut list, mut at, mut line) = (Vec::new(), 0, 1);
    while at < bytes.len() {
        let end = match bytes[at] {
            b'\n' => {
                line += 1;
                at += 1;
                continue;
            }
            byte if byte.is_ascii_whitespace() => {
                at += 1;
                continue;
            }
            b'/' if bytes[at..].starts_with(b"//") => {
                at = line_end(bytes, at);
                continue;
            }
            b'/' if bytes[at..].starts_with(b"/*") => {
                let end = comment_end(text, at);
                line += newlines(&bytes[at..end]);
                at = end;
                continue;
            }
            b'"' => string_end(bytes, at),
            _ => word_end(bytes, at),
        };
        list.push(Token {
            text: &text[at..end],
            line,
        });
        at = end;
    }
    list
}

fn newlines(bytes: &[u8]) -> u32 {
    bytes.iter().filter(|byte| **byte == b'\n').count() as u32
}

fn line_end(bytes: &[u8], from: usize) -> usize {
    let rest = bytes[from..].iter().position(|byte| *byte == b'\n');
    rest.map_or(bytes.len(), |length| from + length)
}

fn comment_end(text: &str, from: usize) -> usize {
    let rest = text[from..].find("*/");
    rest.map_or(text.len(), |length| from + length + 2)
}

fn string_end(bytes: &[u8], from: usize) -> usize {
    let rest = bytes[from + 1..].iter().position(|byte| *byte == b'"');
    rest.map_or(bytes.len(), |length| from + length + 2)
}

/// Returns the end of the word at `from`, or of one character that is no word.
fn word_end(bytes: &[u8], from: usize) -> usize {
    let mut end = from;
    while end < bytes.len() {
        match bytes[end] {
            byte if is_word(byte) => end += 1,
            b':' if bytes[end..].starts_with(b"::") => end += 2,
            _ => break,
        }
    }
    let mut least = from + 1;
    while least < bytes.len() && bytes[least] & 0xc0 == 0x80 {
        least += 1;
    }
    end.max(least)
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'$' | b'%' | b'.')
}

#[cfg(test)]
mod tests {
    use super::tokens;

    #[test]
    fn words_keep_their_dots_and_colons() {
        let text = "W: @!%p1 mbarrier.init.shared::cta.b64 [%r1+8], -4; // no\n/* a\nb */ { x|y }";
        let found: Vec<_> = tokens(text).iter().map(|token| token.text).collect();
        let expected = "W : @ ! %p1 mbarrier.init.shared::cta.b64 [ %r1 + 8 ] , - 4 ; { x | y }";
        assert_eq!(found, expected.split(' ').collect::<Vec<_>>());
        assert_eq!(tokens(text).last().map(|token| token.line), Some(3));
    }
}
