//! The arrangement of ranks on nodes.

use std::collections::BTreeMap;
use std::fmt;

/// Nodes with equal numbers of ranks; the ranks of a node are consecutive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NodeShape {
    /// The number of nodes.
    pub nodes: usize,
    /// The ranks of each node.
    pub per_node: usize,
}

impl NodeShape {
    /// Returns the shape of ranks on these hosts; `None` where nodes have unequal numbers of
    /// ranks, or the ranks of a node are not consecutive.
    pub fn of_hosts(hosts: &[String]) -> Option<NodeShape> {
        let nodes = hosts.chunk_by(|a, b| a == b).collect::<Vec<_>>();
        let per_node = nodes.first()?.len();
        let distinct: BTreeMap<&String, ()> = hosts.iter().map(|host| (host, ())).collect();
        let even = nodes.iter().all(|node| node.len() == per_node);
        (even && distinct.len() == nodes.len()).then_some(NodeShape {
            nodes: nodes.len(),
            per_node,
        })
    }

    /// Returns the number of ranks.
    pub fn ranks(self) -> usize {
        self.nodes * self.per_node
    }

    /// Returns the rank with local rank `place` on a node.
    pub fn rank(self, node: usize, place: usize) -> usize {
        node * self.per_node + place
    }

    /// Returns whether two ranks share a node.
    pub fn share(self, a: usize, b: usize) -> bool {
        self.split(a).node == self.split(b).node
    }

    /// Returns the node of a rank and its local rank there.
    pub fn split(self, rank: usize) -> NodeRank {
        NodeRank {
            node: rank / self.per_node,
            place: rank % self.per_node,
        }
    }
}

/// A rank's node, and its local rank there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeRank {
    /// The node.
    pub node: usize,
    /// The local rank.
    pub place: usize,
}

/// The most levels of [`Levels`].
pub const MOST_LEVELS: usize = 4;

/// Ranks in equal groups of equal groups, such as pods of islands of nodes of ranks. A rank's
/// number has one digit for each level; the first digit varies slowest.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Levels {
    /// The number of values of each digit; 1 where there is no such level.
    radices: [u32; MOST_LEVELS],
    count: u8,
}

impl Levels {
    /// Returns levels of these many groups each, the slowest first: `[4, 2, 8]` is 4 pods of 2
    /// nodes of 8 ranks. Returns `None` for no levels or more than [`MOST_LEVELS`], for an empty
    /// level, or for more ranks than fit the number.
    pub fn new(radices: &[usize]) -> Option<Levels> {
        if radices.is_empty() || radices.len() > MOST_LEVELS {
            return None;
        }
        let mut ranks = 1u32;
        let mut own = [1; MOST_LEVELS];
        for (radix, &given) in own.iter_mut().zip(radices) {
            *radix = u32::try_from(given).ok().filter(|radix| *radix > 0)?;
            ranks = ranks.checked_mul(*radix)?;
        }
        let count = radices.len() as u8;
        Some(Levels {
            radices: own,
            count,
        })
    }

    /// Returns the number of levels.
    pub fn count(&self) -> usize {
        self.count.into()
    }

    /// Returns the number of values of a level's digit.
    pub fn radix(&self, level: usize) -> usize {
        self.radices[level] as usize
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.radices.iter().map(|radix| *radix as usize).product()
    }

    /// Returns the number of ranks in one group at a level: the weight of the level's digit.
    pub fn stride(&self, level: usize) -> usize {
        let below = &self.radices[level + 1..];
        below.iter().map(|radix| *radix as usize).product()
    }

    /// Returns a digit of a rank.
    pub fn digit(&self, rank: usize, level: usize) -> usize {
        rank / self.stride(level) % self.radix(level)
    }

    /// Returns the rank with the digit at a level replaced.
    pub fn with(&self, rank: usize, level: usize, digit: usize) -> usize {
        rank + digit * self.stride(level) - self.digit(rank, level) * self.stride(level)
    }
}

impl fmt::Debug for Levels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// `4x2x8`.
impl fmt::Display for Levels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let radices = self.radices[..self.count()].iter();
        let radices: Vec<String> = radices.map(u32::to_string).collect();
        f.write_str(&radices.join("x"))
    }
}

impl From<NodeShape> for Levels {
    /// Returns two levels: nodes of ranks.
    fn from(shape: NodeShape) -> Levels {
        let (nodes, per_node) = (shape.nodes as u32, shape.per_node as u32);
        Levels {
            radices: [nodes, per_node, 1, 1],
            count: 2,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_of_a_rank_make_the_rank() {
        let levels = Levels::new(&[4, 2, 8]).unwrap();
        assert_eq!((levels.ranks(), levels.to_string()), (64, "4x2x8".into()));
        for rank in 0..64 {
            let digits = [0, 1, 2].map(|level| levels.digit(rank, level));
            assert_eq!(digits, [rank / 16, rank / 8 % 2, rank % 8]);
            assert_eq!(levels.with(rank, 1, digits[1]), rank);
            assert_eq!(levels.with(rank, 0, 3), rank % 16 + 48);
        }
        for wrong in [&[][..], &[2, 0], &[1, 1, 1, 1, 1], &[1 << 20, 1 << 20]] {
            assert_eq!(Levels::new(wrong), None);
        }
    }

    fn shape(hosts: &str) -> Option<(usize, usize)> {
        let hosts: Vec<String> = hosts.chars().map(String::from).collect();
        NodeShape::of_hosts(&hosts).map(|shape| (shape.nodes, shape.per_node))
    }

    #[test]
    fn hosts_make_a_shape_only_if_they_are_even_and_in_a_row() {
        assert_eq!(shape("aabb"), Some((2, 2)));
        assert_eq!(shape("a"), Some((1, 1)));
        assert_eq!(shape("abc"), Some((3, 1)));
        assert_eq!(shape("aab"), None);
        assert_eq!(shape("abab"), None);
        assert_eq!(shape(""), None);
    }
}
