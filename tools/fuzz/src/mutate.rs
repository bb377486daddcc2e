//! Small damage to text and bytes, drawn by a counter: the same seed gives the
//! same damage.

use moesaic_spec::testing::SampleRng;

/// Numbers at the edges of types, and texts that are no numbers.
const NUMBERS: &[&str] = &[
    "0",
    "1",
    "-1",
    "-0",
    "-0.0",
    "2",
    "3",
    "7",
    "255",
    "256",
    "1023",
    "1024",
    "1025",
    "65535",
    "65536",
    "65537",
    "2147483647",
    "2147483648",
    "4294967295",
    "4294967296",
    "1152921504606846976",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "-9223372036854775809",
    "1e999",
    "-1e999",
    "1e-400",
    "1e38",
    "3.5e38",
    "1e-45",
    "0.5",
    "1.0",
    "1e2",
    "0x10",
    "nan",
    "inf",
    "-inf",
    "NaN",
    "Infinity",
    "null",
    "true",
    "false",
    "\"\"",
    "[]",
    "{}",
    "[[1]]",
    "1_0",
    "01",
    "1.",
    ".1",
    "\"8\"",
    "\"\\u0000\"",
    "1979-05-27",
];

/// Characters with a meaning to some parser, and some without.
const SPICE: &[&str] = &[
    "=", "[", "]", "{", "}", "\"", "'", "\"\"\"", ".", ",", "#", "\n", "\r\n", "\t", " ", "-", "+",
    "_", "\\", "\\u", "\0", "\u{7f}", "é", "\u{feff}", "\u{202e}", "😀", "\u{0301}", "(", ")", "*",
    "/", "^", "<", "<=", ":", ";", "e", "//", "/*", "*/", "\u{2028}", "x", "../",
];

/// Opening brackets and the like, for nesting.
const OPEN: &[(&str, &str)] = &[
    ("[", "]"),
    ("{\"a\":", "}"),
    ("{a=", "}"),
    ("(", ")"),
    ("abs(", ")"),
    ("-", ""),
    ("a.", ""),
    ("[[", "]]"),
    ("x+", ""),
    ("exp(x)*", ""),
    ("x^2/", ""),
];

/// Damages text by one to six changes; `words` belong to its language.
pub fn text(rng: &mut SampleRng, seeds: &[String], words: &[&str]) -> Vec<u8> {
    let mut bytes = if rng.one_in(40) {
        noise(rng, 64)
    } else {
        rng.pick(seeds).into_bytes()
    };
    for _ in 0..rng.between(1, 6) {
        match rng.between(0, 11) {
            0 => flip(rng, &mut bytes),
            1 => insert(rng, &mut bytes, SPICE),
            2 => insert(rng, &mut bytes, words),
            3..=5 => number(rng, &mut bytes),
            6 => cut(rng, &mut bytes),
            7 => repeat(rng, &mut bytes),
            8 => splice(rng, &mut bytes, rng.clone().pick(seeds).as_bytes()),
            9 => line(rng, &mut bytes),
            10 if rng.one_in(4) => nest(rng, &mut bytes),
            11 if rng.one_in(4) => bytes.truncate(place(rng, &bytes)),
            _ => insert(rng, &mut bytes, words),
        }
        // Growth is reserved for the one seed of a thousand that nests.
        bytes.truncate(1 << 16);
    }
    bytes
}

/// Damages bytes by one to four changes that ignore their meaning.
pub fn bytes(rng: &mut SampleRng, from: &[u8]) -> Vec<u8> {
    let mut bytes = from.to_vec();
    for _ in 0..rng.between(1, 4) {
        match rng.between(0, 7) {
            0..=2 => flip(rng, &mut bytes),
            3 => bytes.truncate(place(rng, &bytes)),
            4 => cut(rng, &mut bytes),
            5 => repeat(rng, &mut bytes),
            6 => word(rng, &mut bytes),
            _ => {
                let (at, more) = (place(rng, &bytes), noise(rng, 40));
                bytes.splice(at..at, more);
            }
        }
    }
    bytes
}

/// Draws a place in the bytes, their end included, mostly near either end,
/// where headers and checksums are.
fn place(rng: &mut SampleRng, bytes: &[u8]) -> usize {
    let near = bytes.len().min(80);
    match rng.between(0, 3) {
        0 => rng.between(0, near),
        1 => bytes.len() - rng.between(0, near),
        _ => rng.between(0, bytes.len()),
    }
}

fn range(rng: &mut SampleRng, bytes: &[u8]) -> std::ops::Range<usize> {
    let start = place(rng, bytes);
    let most = rng.pick(&[1, 4, 16, 100]);
    start..(start + rng.between(0, most)).min(bytes.len())
}

fn noise(rng: &mut SampleRng, most: usize) -> Vec<u8> {
    (0..rng.between(0, most))
        .map(|_| rng.bits() as u8)
        .collect()
}

fn flip(rng: &mut SampleRng, bytes: &mut [u8]) {
    let at = place(rng, bytes);
    if let Some(byte) = bytes.get_mut(at) {
        *byte ^= 1 << rng.between(0, 7);
    }
}

fn insert(rng: &mut SampleRng, bytes: &mut Vec<u8>, words: &[&str]) {
    let at = rng.between(0, bytes.len());
    bytes.splice(at..at, rng.pick(words).bytes());
}

fn cut(rng: &mut SampleRng, bytes: &mut Vec<u8>) {
    bytes.drain(range(rng, bytes));
}

fn repeat(rng: &mut SampleRng, bytes: &mut Vec<u8>) {
    let piece = bytes[range(rng, bytes)].to_vec();
    let (at, times) = (place(rng, bytes), rng.pick(&[1, 1, 1, 2, 50]));
    bytes.splice(at..at, piece.repeat(times));
}

/// Overwrites eight bytes with an extreme little-endian number.
fn word(rng: &mut SampleRng, bytes: &mut [u8]) {
    let numbers = [
        0,
        1,
        7,
        1 << 31,
        1 << 32,
        1 << 60,
        1 << 63,
        u64::MAX,
        u64::MAX - 7,
    ];
    let number = rng.pick(&numbers).to_le_bytes();
    let at = place(rng, bytes) / 8 * 8;
    for (byte, new) in bytes.iter_mut().skip(at).zip(number) {
        *byte = new;
    }
}

/// Joins the beginning of one and the end of the other.
fn splice(rng: &mut SampleRng, bytes: &mut Vec<u8>, other: &[u8]) {
    bytes.truncate(place(rng, bytes));
    bytes.extend(&other[rng.between(0, other.len())..]);
}

/// Replaces a number of the text, or inserts one where there is none.
fn number(rng: &mut SampleRng, bytes: &mut Vec<u8>) {
    let from = rng.between(0, bytes.len());
    let digit = |byte: &u8| byte.is_ascii_digit();
    let start = bytes[from..]
        .iter()
        .position(digit)
        .map_or(from, |n| from + n);
    let length = bytes[start..].iter().take_while(|b| digit(b)).count();
    bytes.splice(start..start + length, rng.pick(NUMBERS).bytes());
}

/// Doubles a line or swaps two, which makes keys and tables appear twice.
fn line(rng: &mut SampleRng, bytes: &mut Vec<u8>) {
    let separator = rng.pick(b"\n\n,;");
    let mut lines: Vec<Vec<u8>> = bytes
        .split(|b| *b == separator)
        .map(<[u8]>::to_vec)
        .collect();
    let (a, b) = (
        rng.between(0, lines.len() - 1),
        rng.between(0, lines.len() - 1),
    );
    if rng.one_in(2) {
        lines.swap(a, b)
    } else {
        lines.insert(a, lines[b].clone())
    }
    *bytes = lines.join(&separator);
}

fn nest(rng: &mut SampleRng, bytes: &mut Vec<u8>) {
    let (open, close) = rng.pick(OPEN);
    let (at, depth) = (
        rng.between(0, bytes.len()),
        rng.pick(&[3, 40, 130, 1000, 6000]),
    );
    let inner = bytes.split_off(at);
    bytes.extend(open.repeat(depth).bytes());
    bytes.extend(b"1");
    bytes.extend(close.repeat(depth).bytes());
    bytes.extend(inner);
}
