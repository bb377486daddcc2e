//! String literals of Rust text.

/// A string literal, and the line that it begins on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Literal {
    /// Counted from one.
    pub line: usize,
    /// What the literal stands for, escapes resolved.
    pub text: String,
}

/// Every string literal of `source`, in order.
pub fn literals(source: &str) -> Vec<Literal> {
    let mut found = Vec::new();
    let mut rest = source;
    while let Some(at) = rest.find(['"', '/', '\'', 'r']) {
        let line = 1 + source[..source.len() - rest.len() + at]
            .matches('\n')
            .count();
        rest = &rest[at..];
        let (length, text) = token(rest);
        found.extend(text.map(|text| Literal { line, text }));
        rest = &rest[length..];
    }
    found
}

/// The bytes of the token that `rest` begins with, and its text if it is a
/// string.
fn token(rest: &str) -> (usize, Option<String>) {
    if rest.starts_with("//") {
        return (rest.find('\n').unwrap_or(rest.len()), None);
    }
    if rest.starts_with("'\"'") {
        return (3, None);
    }
    let hashes = rest[1..].bytes().take_while(|b| *b == b'#').count();
    if rest.starts_with('r') && rest[1 + hashes..].starts_with('"') {
        let start = hashes + 2;
        let end = format!("\"{}", "#".repeat(hashes));
        let length = rest[start..].find(&end).unwrap_or(rest.len() - start);
        let next = (start + length + end.len()).min(rest.len());
        return (next, Some(rest[start..start + length].to_string()));
    }
    if rest.starts_with('"') {
        escaped(rest)
    } else {
        (1, None)
    }
}

/// A literal in plain quotes.
fn escaped(rest: &str) -> (usize, Option<String>) {
    let mut text = String::new();
    let mut chars = rest.char_indices().skip(1).peekable();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return (at + 1, Some(text)),
            '\\' => match chars.next() {
                Some((_, 'n')) => text.push('\n'),
                Some((_, '\n')) => while chars.next_if(|(_, c)| c.is_whitespace()).is_some() {},
                Some((_, other)) => text.push(other),
                None => {}
            },
            other => text.push(other),
        }
    }
    (rest.len(), None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_raw_and_continued_literals_are_found() {
        let source = "let a = \"x\\n\\\n      y\"; // \"no\"\nlet b = ('\"', r#\"k = \"v\"\"#);\n";
        let found = literals(source);
        let expected = [(1, "x\ny"), (3, "k = \"v\"")];
        let expected = expected.map(|(line, text)| Literal {
            line,
            text: text.to_string(),
        });
        assert_eq!(found, expected);
    }
}
