//! Collectives around the experts: sums and gathers over ranks, and messages between stages.

use crate::Machine;

/// The ranks of a collective.
#[derive(Clone, Copy, Debug)]
pub(super) struct Peers {
    /// Their number.
    pub ranks: usize,
    /// The distance between neighbours.
    pub stride: usize,
}

/// Returns the seconds in which ranks gather `bytes` bytes that they have equal parts of, or
/// scatter a sum of as many: level by level, so that each level moves what inner ones left over.
pub(super) fn gather(machine: &Machine, peers: Peers, bytes: f64) -> f64 {
    let (mut seconds, mut inside, mut left) = (0.0, 1usize, bytes);
    for (level, unit) in machine.units().into_iter().enumerate() {
        // A group with gaps has fewer of its ranks in a node, or one, and then no inner links.
        let in_unit = (unit / peers.stride.max(1)).clamp(1, peers.ranks);
        let parts = in_unit / inside;
        if parts > 1 {
            let part = (parts - 1) as f64 / parts as f64;
            seconds += moved(machine, level, left * part);
            left /= parts as f64;
            inside = in_unit;
        }
    }
    seconds
}

/// Returns the seconds of a message to the rank that is `distance` ranks away.
pub(super) fn message(machine: &Machine, distance: usize, bytes: f64) -> f64 {
    let units = machine.units();
    let level = units.iter().position(|unit| *unit > distance);
    moved(machine, level.unwrap_or(units.len() - 1), bytes)
}

/// Returns the seconds of bytes over a level. Rings and neighbours keep a link busy, so the number
/// of peers does not matter as it does to an all-to-all.
fn moved(machine: &Machine, level: usize, bytes: f64) -> f64 {
    let level = &machine.levels[level];
    level.alpha_us * 1e-6 + bytes / level.alone()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::published;

    #[test]
    fn nodes_share_what_goes_between_them() {
        let machine = published("h100-ib").unwrap();
        let over = |ranks, stride| gather(&machine, Peers { ranks, stride }, 1e9);
        // Eight ranks of a node send an eighth each over their own NICs; ranks of different nodes
        // alone send everything.
        assert!(over(64, 1) < 0.5 * over(8, 8));
        assert_eq!(over(1, 1), 0.0);
        assert!(message(&machine, 1, 1e6) < message(&machine, 8, 1e6));
    }
}
