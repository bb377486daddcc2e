//! JSON as Python writes it.

use serde_json::{Error, Value};
use std::borrow::Cow;

/// Reads JSON of other programs. It skips a byte-order mark. The words `NaN`, `Infinity` and
/// `-Infinity`, which Python's `json` writes and reads, become strings, so they do no harm under a
/// key that nobody reads, and an error quotes them under a key that needs a number.
///
/// # Errors
///
/// The position and kind of the first syntax error.
pub fn parse_json(text: &str) -> Result<Value, Error> {
    let text = text.trim_start_matches('\u{feff}');
    serde_json::from_str(&quoted(text))
}

/// Numbers that JSON lacks. The longest comes first, because it contains another.
const WORDS: [&str; 3] = ["-Infinity", "Infinity", "NaN"];

/// Quotes Python's words that stand outside of strings.
fn quoted(text: &str) -> Cow<'_, str> {
    if !WORDS.iter().any(|word| text.contains(word)) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    let (mut rest, mut in_string) = (text, false);
    while let Some(c) = rest.chars().next() {
        let word = WORDS
            .iter()
            .find(|word| !in_string && rest.starts_with(**word));
        let length = match (word, c) {
            (Some(word), _) => {
                out += &format!("\"{word}\"");
                rest = &rest[word.len()..];
                continue;
            }
            // A backslash escapes the next character, which may be a quotation mark.
            (None, '\\') if in_string => 1 + rest[1..].chars().next().map_or(0, char::len_utf8),
            (None, _) => c.len_utf8(),
        };
        in_string ^= c == '"';
        out += &rest[..length];
        rest = &rest[length..];
    }
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn words_of_python_are_read_outside_of_strings() {
        let text = r#"{"a": [0.0, Infinity], "b": -Infinity, "c": NaN, "d\"NaN": "x NaN \\"}"#;
        let read = parse_json(&format!("\u{feff}{text}")).unwrap();
        let expected = json!({
            "a": [0.0, "Infinity"], "b": "-Infinity", "c": "NaN", "d\"NaN": "x NaN \\",
        });
        assert_eq!(read, expected);
    }

    #[test]
    fn what_is_not_json_stays_an_error() {
        for text in [
            "",
            "{\"a\": Infinit}",
            "{\"a\": \"NaN}",
            "NaNaN",
            "\\",
            "\"\\",
            "{\"a\": nan}",
        ] {
            assert!(parse_json(text).is_err(), "{text}");
        }
    }
}
