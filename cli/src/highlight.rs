//! Colours for kernel source: C, CUDA and HIP.
//!
//! A tokenizer, not a parser: it knows comments, literals, preprocessor lines
//! and words. Every byte of the text is in exactly one token, in order.

use crate::console::Palette;

/// What a token is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Blanks, operators, names.
    Plain,
    /// `//` and `/* */`.
    Comment,
    /// A line that begins with `#`.
    Directive,
    /// Words of the language.
    Keyword,
    /// Types, ours and the language's.
    Type,
    /// Words of the dialect: `__global__`, `threadIdx`.
    Builtin,
    /// A name that is called or defined with parameters.
    Function,
    /// Names in capitals: the constants a kernel is specialised by.
    Constant,
    /// Numbers.
    Number,
    /// Strings and characters.
    Text,
}

/// A token and its text.
pub type Token<'a> = (Kind, &'a str);

const KEYWORDS: &[&str] = &[
    "alignas",
    "asm",
    "break",
    "case",
    "const",
    "constexpr",
    "continue",
    "default",
    "do",
    "else",
    "enum",
    "extern",
    "false",
    "for",
    "goto",
    "if",
    "inline",
    "namespace",
    "nullptr",
    "operator",
    "restrict",
    "return",
    "sizeof",
    "static",
    "static_assert",
    "struct",
    "switch",
    "template",
    "true",
    "typedef",
    "typename",
    "union",
    "using",
    "volatile",
    "while",
    "_Static_assert",
    "static_cast",
    "reinterpret_cast",
    "__restrict__",
    "__restrict",
    "__attribute__",
    "_Alignas",
];

const TYPES: &[&str] = &[
    "auto", "bf16", "bool", "char", "double", "f16", "f32", "float", "half", "i32", "i64", "int",
    "long", "short", "signed", "u16", "u32", "u64", "u8", "unsigned", "void", "_Bool", "_Float16",
    "__bf16", "__half",
];

const BUILTINS: &[&str] = &[
    "blockDim",
    "blockIdx",
    "gridDim",
    "threadIdx",
    "warpSize",
    "asm",
    "__asm__",
];

/// The tokens of a text.
pub fn tokens(text: &str) -> Vec<Token<'_>> {
    let mut tokens = Vec::new();
    let mut rest = text;
    let mut line_start = true;
    while let Some(first) = rest.chars().next() {
        let (kind, length) = match first {
            '#' if line_start => (Kind::Directive, directive(rest)),
            _ => token(first, rest),
        };
        let (piece, tail) = rest.split_at(length);
        line_start = match piece.chars().all(char::is_whitespace) {
            true => line_start || piece.contains('\n'),
            false => piece.ends_with('\n'),
        };
        tokens.push((kind, piece));
        rest = tail;
    }
    tokens
}

fn token(first: char, rest: &str) -> (Kind, usize) {
    match first {
        '/' if rest.starts_with("//") => (Kind::Comment, until(rest, "\n")),
        '/' if rest.starts_with("/*") => (Kind::Comment, block_comment(rest)),
        '"' | '\'' => (Kind::Text, quoted(rest, first)),
        c if c.is_ascii_digit() => (Kind::Number, number(rest)),
        '.' if rest[1..].starts_with(|c: char| c.is_ascii_digit()) => (Kind::Number, number(rest)),
        c if is_word(c) => {
            let length = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
            (word(&rest[..length], &rest[length..]), length)
        }
        c if c.is_whitespace() => (
            Kind::Plain,
            rest.find(|c: char| !c.is_whitespace())
                .unwrap_or(rest.len()),
        ),
        c => (Kind::Plain, c.len_utf8()),
    }
}

fn is_word(c: char) -> bool {
    c == '_' || c.is_alphanumeric()
}

fn word(word: &str, after: &str) -> Kind {
    let capitals = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
    match word {
        word if KEYWORDS.contains(&word) => Kind::Keyword,
        word if TYPES.contains(&word) || word.ends_with("_t") => Kind::Type,
        word if BUILTINS.contains(&word) || word.starts_with("__") => Kind::Builtin,
        word if word.len() > 1 && word.chars().all(capitals) => Kind::Constant,
        _ if after.starts_with('(') => Kind::Function,
        word if word.starts_with(|c: char| c.is_ascii_uppercase()) => Kind::Type,
        _ => Kind::Plain,
    }
}

fn until(rest: &str, end: &str) -> usize {
    rest.find(end).unwrap_or(rest.len())
}

fn block_comment(rest: &str) -> usize {
    rest[2..].find("*/").map_or(rest.len(), |at| at + 4)
}

/// To the end of the line, and on where it ends with a backslash; a comment
/// is a token of its own.
fn directive(rest: &str) -> usize {
    let line_end = rest
        .match_indices('\n')
        .map(|(at, _)| at)
        .find(|at| !rest[..*at].ends_with('\\'))
        .unwrap_or(rest.len());
    let comment = rest[..line_end]
        .find("//")
        .or_else(|| rest[..line_end].find("/*"));
    comment.unwrap_or(line_end)
}

fn quoted(rest: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in rest.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '\n' => return at,
            c if c == quote => return at + 1,
            _ => {}
        }
    }
    rest.len()
}

/// Digits, suffixes and exponents with their sign, hexadecimal floats too.
fn number(rest: &str) -> usize {
    let hex = rest.starts_with("0x") || rest.starts_with("0X");
    let mut previous = ' ';
    for (at, c) in rest.char_indices() {
        let exponent = if hex { "pP" } else { "eE" };
        let sign = (c == '+' || c == '-') && exponent.contains(previous);
        // A quote between digits groups them.
        if !(is_word(c) || c == '.' || sign || c == '\'') {
            return at;
        }
        previous = c;
    }
    rest.len()
}

/// The text for a terminal; unchanged without colours.
pub fn terminal(text: &str, palette: &Palette) -> String {
    if !palette.on() {
        return text.to_string();
    }
    tokens(text)
        .iter()
        .map(|(kind, piece)| paint(*kind, piece, palette))
        .collect()
}

/// A style must not run over a line break, or pagers lose it.
fn paint(kind: Kind, piece: &str, palette: &Palette) -> String {
    let style = match kind {
        Kind::Plain => return piece.to_string(),
        Kind::Comment => "2;3",
        Kind::Directive => "35",
        Kind::Keyword => "1;35",
        Kind::Type => "33",
        Kind::Builtin => "36",
        Kind::Function => "34",
        Kind::Constant => "1",
        Kind::Number => "32",
        Kind::Text => "32",
    };
    let lines: Vec<String> = piece
        .split('\n')
        .map(|line| {
            if line.is_empty() {
                String::new()
            } else {
                palette.paint(style, line)
            }
        })
        .collect();
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds(text: &str) -> Vec<Token<'_>> {
        let blank = |(_, piece): &Token<'_>| !piece.trim().is_empty();
        let tokens = tokens(text);
        assert_eq!(tokens.iter().map(|t| t.1).collect::<String>(), text);
        tokens.into_iter().filter(blank).collect()
    }

    #[test]
    fn words_comments_and_literals() {
        let text = "const float TILE = 1.5e-3f; // up\nx(threadIdx);";
        let expected = [
            (Kind::Keyword, "const"),
            (Kind::Type, "float"),
            (Kind::Constant, "TILE"),
            (Kind::Plain, "="),
            (Kind::Number, "1.5e-3f"),
            (Kind::Plain, ";"),
            (Kind::Comment, "// up"),
            (Kind::Function, "x"),
            (Kind::Plain, "("),
            (Kind::Builtin, "threadIdx"),
            (Kind::Plain, ")"),
            (Kind::Plain, ";"),
        ];
        assert_eq!(kinds(text), expected);
    }

    #[test]
    fn directives_go_on_after_a_backslash() {
        let text = "#define A(x) \\\n  x // c\nint a # b;";
        let tokens = kinds(text);
        assert_eq!(tokens[0], (Kind::Directive, "#define A(x) \\\n  x "));
        assert_eq!(tokens[1], (Kind::Comment, "// c"));
        assert!(tokens.contains(&(Kind::Plain, "#")));
    }

    #[test]
    fn ends_that_never_come_are_no_end_at_all() {
        for text in [
            "/* open",
            "\"open",
            "'\\",
            "#",
            "0x1p-",
            "\"a\nb\"",
            "é/*ü*/…",
            "1.",
        ] {
            assert_eq!(tokens(text).iter().map(|t| t.1).collect::<String>(), text);
        }
    }

    #[test]
    fn strings_end_at_their_quote() {
        assert_eq!(
            kinds(r#""a\"b" c"#),
            [(Kind::Text, r#""a\"b""#), (Kind::Plain, "c")]
        );
    }
}
