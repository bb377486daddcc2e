//! Lists of token counts.

use std::str::FromStr;

/// The form of a list, for help pages.
pub const FORM: &str = "N[,N-M]";

/// The most numbers of a list.
const MOST: usize = 4096;

/// Token counts in the given order, such as `1,64` or `1-8,64`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counts(pub Vec<usize>);

impl Counts {
    /// Returns the counts as sizes of formulas.
    pub fn wide(&self) -> Vec<u64> {
        self.0.iter().map(|&count| count as u64).collect()
    }
}

impl FromStr for Counts {
    type Err = String;

    fn from_str(text: &str) -> Result<Counts, String> {
        let mut counts = Vec::new();
        for part in text.split(',') {
            let (from, to) = match part.split_once('-') {
                Some((from, to)) => (count(from)?, count(to)?),
                None => (count(part)?, count(part)?),
            };
            if from > to {
                return Err(format!("the range {part} is empty; write {to}-{from}"));
            }
            if to - from >= MOST - counts.len().min(MOST) {
                return Err(format!("more than {MOST} numbers; list some of them"));
            }
            counts.extend(from..=to);
        }
        Ok(Counts(counts))
    }
}

fn count(text: &str) -> Result<usize, String> {
    text.trim()
        .parse()
        .map_err(|_| format!("`{text}` is no number; write it as 1,64 or 1-64"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_ranges_make_a_list() {
        let read = |text: &str| text.parse::<Counts>();
        assert_eq!(read("64"), Ok(Counts(vec![64])));
        assert_eq!(read("1-3, 64,5-5"), Ok(Counts(vec![1, 2, 3, 64, 5])));
        assert!(read("8-1").unwrap_err().ends_with("write 1-8"));
        assert!(read("1-1000000").unwrap_err().contains("more than 4096"));
        assert!(read("0-4095").is_ok() && read("1,0-4095").is_err());
        for odd in ["", "x", "-1", "1-", "1-2-3", "1,,2"] {
            assert!(read(odd).unwrap_err().contains("write it as"), "{odd}");
        }
    }
}
