//! The hosts of ranks, and a check that all ranks run the same thing.

use crate::{Call, CollectiveError, Collectives, NodeShape, hash};

/// The hosts of a group's ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    /// The host of every rank.
    pub hosts: Vec<String>,
    /// The shape for hierarchical exchanges; `None` where nodes have unequal numbers of ranks, or
    /// the ranks of a node are not consecutive.
    pub shape: Option<NodeShape>,
}

impl Topology {
    /// Gathers the host name of every rank. Waits.
    ///
    /// # Errors
    /// As [`Collectives::gather_bytes`].
    pub fn gather(group: &mut dyn Collectives, call: &Call) -> Result<Topology, CollectiveError> {
        Topology::of(group, &host_name(), call)
    }

    /// Does the same with a host name that this rank chooses, which lets tests make several nodes
    /// out of one machine.
    ///
    /// # Errors
    /// As [`Topology::gather`].
    pub fn of(
        group: &mut dyn Collectives,
        host: &str,
        call: &Call,
    ) -> Result<Topology, CollectiveError> {
        let names = group.gather_bytes(host.as_bytes(), call)?;
        let text = |name: Vec<u8>| String::from_utf8_lossy(&name).into_owned();
        let hosts: Vec<String> = names.into_iter().map(text).collect();
        let shape = NodeShape::of_hosts(&hosts);
        Ok(Topology { hosts, shape })
    }
}

/// Returns this machine's name.
pub fn host_name() -> String {
    // Read from the kernel, not from an environment variable, which launchers may forward from
    // another host.
    let file = std::fs::read_to_string("/proc/sys/kernel/hostname");
    let name = file.ok().or_else(|| std::env::var("HOSTNAME").ok());
    name.map_or_else(|| "localhost".to_string(), |name| name.trim().to_string())
}

/// Checks that all ranks have the same values for these names: spec, plan, version. Waits. Ranks
/// that agree exchange only a hash.
///
/// # Errors
/// [`CollectiveError::Disagreement`] on every rank, naming the differing value and rank; else the
/// errors of [`Collectives::gather_bytes`].
pub fn agree(
    group: &mut dyn Collectives,
    values: &[(&str, &str)],
    call: &Call,
) -> Result<(), CollectiveError> {
    let parts: Vec<&[u8]> = values
        .iter()
        .flat_map(|(name, value)| [name.as_bytes(), value.as_bytes()])
        .collect();
    let hashes = group.gather_bytes(&hash::of(&parts).to_le_bytes(), call)?;
    if hashes.iter().all(|hash| *hash == hashes[0]) {
        return Ok(());
    }
    let all = group.gather_bytes(&encode(&parts), call)?;
    Err(CollectiveError::Disagreement {
        differences: differences(group.members(), &all),
    })
}

/// Encodes parts, each behind its length.
fn encode(parts: &[&[u8]]) -> Vec<u8> {
    let one = |part: &&[u8]| [&(part.len() as u64).to_le_bytes(), *part].concat();
    parts.iter().flat_map(one).collect()
}

fn decode(mut bytes: &[u8]) -> Vec<(String, String)> {
    let mut next = || {
        let (length, rest) = bytes.split_at_checked(8)?;
        let length = u64::from_le_bytes(length.try_into().ok()?) as usize;
        let (part, rest) = rest.split_at_checked(length)?;
        bytes = rest;
        Some(String::from_utf8_lossy(part).into_owned())
    };
    let mut list = Vec::new();
    while let (Some(name), Some(value)) = (next(), next()) {
        list.push((name, value));
    }
    list
}

/// The number of characters of a value that errors show.
const SHOWN: usize = 60;
/// The number of differences that an error lists.
const LISTED: usize = 8;

fn differences(members: &[usize], all: &[Vec<u8>]) -> Vec<String> {
    let first = decode(&all[0]);
    let mut list = Vec::new();
    for (rank, bytes) in members.iter().zip(all).skip(1) {
        let theirs = decode(bytes);
        let names = first.iter().chain(&theirs).map(|(name, _)| name);
        let mut seen = Vec::new();
        for name in names {
            let (a, b) = (value(&first, name), value(&theirs, name));
            if a != b && !seen.contains(&name) {
                seen.push(name);
                let (one, other) = apart(&a, &b);
                list.push(format!(
                    "`{name}` is {one} on rank {} and {other} on rank {rank}",
                    members[0]
                ));
            }
        }
    }
    let more = list.len().saturating_sub(LISTED);
    list.truncate(LISTED);
    if more > 0 {
        list.push(format!("and {more} more"));
    }
    list
}

fn value(list: &[(String, String)], name: &str) -> Option<String> {
    let found = list.iter().find(|(other, _)| other == name);
    found.map(|(_, value)| value.clone())
}

/// Returns excerpts of two values, beginning shortly before they differ.
fn apart(a: &Option<String>, b: &Option<String>) -> (String, String) {
    let (Some(a), Some(b)) = (a, b) else {
        let text = |v: &Option<String>| {
            v.as_ref()
                .map_or("not given".to_string(), |v| format!("`{}`", excerpt(v, 0)))
        };
        return (text(a), text(b));
    };
    let same = a.chars().zip(b.chars()).take_while(|(a, b)| a == b).count();
    let start = if same < SHOWN / 2 {
        0
    } else {
        same - SHOWN / 4
    };
    (
        format!("`{}`", excerpt(a, start)),
        format!("`{}`", excerpt(b, start)),
    )
}

fn excerpt(text: &str, start: usize) -> String {
    let before = if start > 0 { "..." } else { "" };
    let shown: String = text.chars().skip(start).take(SHOWN).collect();
    let after = if text.chars().count() > start + SHOWN {
        "..."
    } else {
        ""
    };
    format!("{before}{shown}{after}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_values_are_shown_where_they_differ() {
        let (a, b) = ("x".repeat(500) + "one tail", "x".repeat(500) + "another");
        let (a, b) = apart(&Some(a), &Some(b));
        assert!(a.contains("one tail") && b.contains("another"), "{a} {b}");
        assert!(a.len() < 80 && a.starts_with("`..."), "{a}");
        let missing = apart(&None, &Some("v".to_string()));
        assert_eq!(missing, ("not given".to_string(), "`v`".to_string()));
    }

    #[test]
    fn what_is_encoded_reads_back() {
        let parts: [&[u8]; 4] = [b"spec", b"", b"plan", b"a\0b"];
        let pair = |a: &str, b: &str| (a.to_string(), b.to_string());
        assert_eq!(
            decode(&encode(&parts)),
            [pair("spec", ""), pair("plan", "a\0b")]
        );
        assert_eq!(decode(&[1, 2, 3]), []);
    }
}
