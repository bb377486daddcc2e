//! Which ranks share a node.

use std::collections::BTreeMap;

/// Nodes with equally many ranks each, one node's ranks after the other's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NodeShape {
    /// How many nodes.
    pub nodes: usize,
    /// Ranks of each.
    pub per_node: usize,
}

impl NodeShape {
    /// The shape of ranks on these hosts; `None` where nodes have unequally many ranks,
    /// or ranks of a node are not in a row.
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

    /// Ranks of all nodes.
    pub fn ranks(self) -> usize {
        self.nodes * self.per_node
    }

    /// The rank at a place of a node.
    pub fn rank(self, node: usize, place: usize) -> usize {
        node * self.per_node + place
    }

    /// The node of a rank, and its place there.
    pub fn split(self, rank: usize) -> (usize, usize) {
        (rank / self.per_node, rank % self.per_node)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
