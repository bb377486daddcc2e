//! Lists of token counts.

use clap::Args;
use std::fmt;
use std::str::FromStr;

/// The option `--tokens` of a command that looks at several token counts. A command changes its
/// text and default by `mut_arg`.
#[derive(Args, Clone, Debug)]
pub struct TokensArgs {
    /// Token counts, and ranges of them such as 1-64
    #[arg(id = "tokens", long = "tokens", value_name = "N[,N-M]", default_value = "1,64,1024", value_parser = str::parse::<Counts>)]
    pub counts: Counts,
}

/// The most numbers of a list.
const MOST: usize = 4096;

/// The most tokens of a call of any layer: those of top-1, whose assignments are below 2³¹.
const MOST_TOKENS: usize = (1 << 31) - 1;

/// Token counts in the given order, such as `1,64` or `1-8,64`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counts(pub Vec<usize>);

impl Counts {
    /// Returns the counts as sizes of formulas.
    pub fn wide(&self) -> Vec<u64> {
        self.0.iter().map(|&count| count as u64).collect()
    }
}

/// A text that is no list of token counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ParseCountsError {
    /// A range that ends before it begins.
    Empty { from: usize, to: usize },
    /// More numbers than a list may have.
    TooMany,
    /// More tokens than any layer takes in a call.
    TooLarge(usize),
    /// A part that is neither a number nor a range.
    NoNumber(String),
}

impl fmt::Display for ParseCountsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ParseCountsError::Empty { from, to } => {
                write!(f, "the range {from}-{to} is empty; write {to}-{from}")
            }
            ParseCountsError::TooMany => {
                write!(f, "more than {MOST} numbers; list some of them")
            }
            ParseCountsError::TooLarge(count) => {
                write!(f, "a call takes at most {MOST_TOKENS} tokens, not {count}")
            }
            ParseCountsError::NoNumber(word) => {
                write!(f, "`{word}` is no number or range; write 1,64 or 1-64")
            }
        }
    }
}

impl std::error::Error for ParseCountsError {}

impl FromStr for Counts {
    type Err = ParseCountsError;

    fn from_str(text: &str) -> Result<Counts, ParseCountsError> {
        let mut counts = Vec::new();
        for part in text.split(',') {
            let range = match part.split_once('-') {
                Some((from, to)) => count(from).zip(count(to)),
                None => count(part).map(|count| (count, count)),
            };
            let no_number = || ParseCountsError::NoNumber(part.to_string());
            let (from, to) = range.ok_or_else(no_number)?;
            if from > to {
                return Err(ParseCountsError::Empty { from, to });
            }
            if to > MOST_TOKENS {
                return Err(ParseCountsError::TooLarge(to));
            }
            if to - from >= MOST - counts.len().min(MOST) {
                return Err(ParseCountsError::TooMany);
            }
            counts.extend(from..=to);
        }
        Ok(Counts(counts))
    }
}

fn count(text: &str) -> Option<usize> {
    text.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_ranges_make_a_list() {
        let read = |text: &str| text.parse::<Counts>();
        assert_eq!(read("64"), Ok(Counts(vec![64])));
        assert_eq!(read("1-3, 64,5-5"), Ok(Counts(vec![1, 2, 3, 64, 5])));
        let refusal = |text: &str| read(text).unwrap_err().to_string();
        assert!(refusal("8-1").ends_with("write 1-8"));
        assert!(refusal("1-1000000").contains("more than 4096"));
        assert!(read("0-4095").is_ok() && read("1,0-4095").is_err());
        assert!(read("2147483647").is_ok());
        for large in [
            "2147483648",
            "18446744073709551615",
            "1-18446744073709551615",
        ] {
            assert!(
                refusal(large).contains("at most 2147483647 tokens"),
                "{large}"
            );
        }
        for odd in ["", "x", "-1", "1-", "1-2-3", "1,,2"] {
            assert!(refusal(odd).contains("is no number or range"), "{odd}");
        }
        assert!(refusal("1,2-").starts_with("`2-`"));
    }
}
