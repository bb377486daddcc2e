//! Commands and options, as the help pages of the program list them.

use crate::common::*;
use std::collections::BTreeSet;

/// Returns the lines of a command's `--help` from this heading to the next one.
fn listed(command: &str, heading: &str) -> Vec<String> {
    let help = moesaic(
        command
            .split(' ')
            .filter(|w| !w.is_empty())
            .chain(["--help"]),
    )
    .ok();
    let section = help.split_once(heading).map_or("", |(_, rest)| rest);
    let lines = section.lines().skip(1);
    let lines = lines.take_while(|line| line.is_empty() || line.starts_with(' '));
    lines.map(|line| line.trim().to_string()).collect()
}

/// The commands below this one that have no commands of their own.
pub fn commands(above: &str) -> Vec<String> {
    let names = listed(above, "Commands:");
    let names = names.iter().filter_map(|line| line.split(' ').next());
    let names: Vec<&str> = names.filter(|name| !["", "help"].contains(name)).collect();
    if names.is_empty() {
        vec![above.trim().to_string()]
    } else {
        let below = names
            .iter()
            .flat_map(|name| commands(&format!("{above} {name}")));
        below.collect()
    }
}

/// The long options of a command that others do not share.
pub fn options(command: &str) -> BTreeSet<String> {
    let lines = listed(command, "Options:");
    let names = lines.iter().filter_map(|line| {
        let long = line.strip_prefix("--").or_else(|| {
            let (short, long) = line.split_once(", --")?;
            (short.len() == 2).then_some(long)
        })?;
        long.split(|c: char| !c.is_alphanumeric() && c != '-')
            .next()
    });
    let shared = ["color", "help", "quiet", "verbose", "version"];
    names
        .filter(|name| !shared.contains(name))
        .map(str::to_string)
        .collect()
}
