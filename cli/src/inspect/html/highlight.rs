//! Colours of source text: a small reader of C, CUDA and HIP that marks comments, strings,
//! directives, keywords, types and numbers.

use super::escape;

/// Words with a meaning of their own.
const KEYWORDS: &[&str] = &[
    "if",
    "else",
    "for",
    "while",
    "do",
    "return",
    "break",
    "continue",
    "switch",
    "case",
    "default",
    "goto",
    "sizeof",
    "struct",
    "union",
    "enum",
    "typedef",
    "template",
    "typename",
    "using",
    "namespace",
    "asm",
    "__asm__",
    "volatile",
    "const",
    "static",
    "inline",
    "extern",
    "constexpr",
    "restrict",
    "__restrict__",
    "__global__",
    "__device__",
    "__shared__",
    "__forceinline__",
    "__launch_bounds__",
    "__syncthreads",
    "true",
    "false",
];

/// Types of the language and of the preludes.
const TYPES: &[&str] = &[
    "void", "char", "short", "int", "long", "float", "double", "bool", "signed", "unsigned",
    "auto", "half", "bf16", "f16", "f32", "f64", "i8", "i16", "i32", "i64", "u8", "u16", "u32",
    "u64", "int8_t", "int16_t", "int32_t", "int64_t", "uint8_t", "uint16_t", "uint32_t",
    "uint64_t", "size_t", "uint4", "float4", "dim3", "vec", "words",
];

/// Renders each line as an element of its own, so that copied text has no line numbers.
pub fn lines(text: &str) -> String {
    let mut in_comment = false;
    let line = |line: &str| format!("<span class=\"l\">{}</span>", one(line, &mut in_comment));
    text.lines().map(line).collect()
}

/// Renders a line. `in_comment` says whether a comment goes on from the line before.
fn one(line: &str, in_comment: &mut bool) -> String {
    let mut html = String::new();
    let mut rest = line;
    while !rest.is_empty() {
        let (class, length) = token(rest, *in_comment, rest.len() == line.len());
        let (own, after) = rest.split_at(length);
        if class == "c" {
            *in_comment = !own.starts_with("//") && !own.ends_with("*/");
        }
        html += &match class {
            "" => escape(own),
            class => format!("<i class=\"{class}\">{}</i>", escape(own)),
        };
        rest = after;
    }
    html
}

/// Returns the class and the length of the first token.
fn token(text: &str, in_comment: bool, first: bool) -> (&'static str, usize) {
    let until = |end: &str, from: usize| {
        text[from..]
            .find(end)
            .map_or(text.len(), |at| from + at + end.len())
    };
    if in_comment {
        return ("c", until("*/", 0));
    }
    if text.starts_with("//") {
        return ("c", text.len());
    }
    if text.starts_with("/*") {
        return ("c", until("*/", 2));
    }
    if first && text.trim_start().starts_with('#') {
        return ("d", text.find("/*").unwrap_or(text.len()));
    }
    let start = text.chars().next().expect("the text is not empty");
    let run = |is: fn(char) -> bool| text.find(|c: char| !is(c)).unwrap_or(text.len());
    let word = |c: char| c.is_alphanumeric() || c == '_';
    match start {
        '"' => ("s", string(text)),
        c if c.is_ascii_digit() => ("n", run(|c| c.is_ascii_alphanumeric() || c == '.')),
        c if word(c) => {
            let length = run(|c| c.is_alphanumeric() || c == '_');
            let class = match &text[..length] {
                own if KEYWORDS.contains(&own) => "k",
                own if TYPES.contains(&own) => "t",
                _ => "",
            };
            (class, length)
        }
        _ => ("", start.len_utf8()),
    }
}

/// Returns the length of a string with its quotes.
fn string(text: &str) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            '"' if !escaped => return at + 1,
            '\\' => escaped = !escaped,
            _ => escaped = false,
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_have_their_classes() {
        let html = lines("for (i64 i = 0; i < 16u; ++i) /* a\nb */ x[\"<\\\"\"] = y; // <z>");
        assert_eq!(
            html,
            "<span class=\"l\"><i class=\"k\">for</i> (<i class=\"t\">i64</i> i = \
             <i class=\"n\">0</i>; i &lt; <i class=\"n\">16u</i>; ++i) <i class=\"c\">/* a</i></span>\
             <span class=\"l\"><i class=\"c\">b */</i> x[<i class=\"s\">&quot;&lt;\\&quot;&quot;</i>] \
             = y; <i class=\"c\">// &lt;z&gt;</i></span>"
        );
        assert!(lines("#define µ 1").contains("<i class=\"d\">#define µ 1</i>"));
        assert_eq!(lines("é\n\n").matches("class=\"l\"").count(), 2);
    }
}
