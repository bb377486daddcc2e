//! Placements as text, for a file or an argument.

use super::{Placement, PlacementError, Split};
use std::fmt;
use std::str::FromStr;

/// `near: 0-2 | 3-5,+2`: groups after each other, a replica that is not the owner behind a
/// `+`. `even: ` is left out.
impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.split() == Split::Near {
            f.write_str("near: ")?;
        }
        for group in 0..self.groups() {
            if group > 0 {
                f.write_str(" | ")?;
            }
            let owned = |expert: usize| self.owner(expert) == group;
            let experts = self.of(group);
            let together =
                // A range has owned experts alone, because a `+` stands for one expert.
                |a: &usize, b: &usize| a.checked_add(1) == Some(*b) && owned(*a) && owned(*b);
            for (at, run) in experts.chunk_by(together).enumerate() {
                let (comma, plus) = (["", ","][at.min(1)], ["+", ""][usize::from(owned(run[0]))]);
                match run {
                    [one] => write!(f, "{comma}{plus}{one}")?,
                    _ => write!(f, "{comma}{}-{}", run[0], run[run.len() - 1])?,
                }
            }
        }
        Ok(())
    }
}

/// Reads that text. Groups are separated by `|` or lie on lines of their own; `#` starts a comment.
impl FromStr for Placement {
    type Err = PlacementError;

    fn from_str(text: &str) -> Result<Placement, PlacementError> {
        let lines = text.lines().map(|line| line.split('#').next());
        let text: Vec<&str> = lines.flatten().collect();
        let text = text.join("|");
        let (split, groups) = match text.split_once(':') {
            None => (Split::Even, &*text),
            Some((word, groups)) => (split(word.trim_matches([' ', '|']))?, groups),
        };
        let words = groups.split('|').map(str::trim);
        let words = words.filter(|words| !words.is_empty());
        let groups: Vec<Vec<Named>> = words.map(group).collect::<Result<_, _>>()?;
        let experts = groups.iter().flatten().map(|named| named.expert + 1).max();
        let Some(experts) = experts else {
            return wrong("no experts; groups are written as in `0-2 | 3-5,+2`".to_string());
        };
        let owners = owners(experts, &groups)?;
        let plain = |group: Vec<Named>| group.into_iter().map(|named| named.expert).collect();
        let groups = groups.into_iter().map(plain).collect();
        Placement::new(experts, groups, Some(owners), split)
    }
}

struct Named {
    expert: usize,
    owned: bool,
}

fn split(word: &str) -> Result<Split, PlacementError> {
    match word {
        "even" => Ok(Split::Even),
        "near" => Ok(Split::Near),
        other => wrong(format!("rows are split `even` or `near`, not `{other}`")),
    }
}

fn group(words: &str) -> Result<Vec<Named>, PlacementError> {
    let mut list = Vec::new();
    for word in words.split(',').map(str::trim) {
        let (owned, word) = match word.strip_prefix('+') {
            Some(rest) => (false, rest),
            None => (true, word),
        };
        let (first, last) = word.split_once('-').unwrap_or((word, word));
        let (first, last) = (number(first)?, number(last)?);
        if last < first || last - first >= MOST {
            return wrong(format!("`{word}` is no range of experts, as in 0-7"));
        }
        list.extend((first..=last).map(|expert| Named { expert, owned }));
    }
    Ok(list)
}

/// A limit above any real number of experts, so that a typo cannot allocate terabytes.
const MOST: usize = 1 << 20;

fn number(text: &str) -> Result<usize, PlacementError> {
    let number = text.trim().parse::<usize>().ok();
    match number.filter(|n| *n < MOST) {
        Some(number) => Ok(number),
        None => wrong(format!(
            "`{text}` is not the number of an expert, as in `0-2 | 3-5,+2`"
        )),
    }
}

/// Returns the group that names each expert without a `+`.
fn owners(experts: usize, groups: &[Vec<Named>]) -> Result<Vec<usize>, PlacementError> {
    let mut owners = vec![None; experts];
    for (group, list) in groups.iter().enumerate() {
        for named in list.iter().filter(|named| named.owned) {
            let other = owners[named.expert].replace(group);
            // An expert twice in one group is left to `Placement::new`, whose error names that
            // mistake.
            if let Some(other) = other.filter(|other| *other != group) {
                let expert = named.expert;
                return wrong(format!(
                    "groups {other} and {group} both own expert {expert}; put a `+` before it in one"
                ));
            }
        }
    }
    let named = owners.into_iter().enumerate();
    let owner = |(expert, owner): (usize, Option<usize>)| match owner {
        Some(owner) => Ok(owner),
        None => wrong(format!(
            "no group has expert {expert} without a `+`; one has to be its owner"
        )),
    };
    named.map(owner).collect()
}

fn wrong<T>(message: String) -> Result<T, PlacementError> {
    Err(PlacementError::Text(message))
}
