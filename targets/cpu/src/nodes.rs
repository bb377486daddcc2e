//! The NUMA nodes of the machine, as the system reports them.

use std::fs;
use std::ops::RangeInclusive;
use std::path::Path;
use std::sync::OnceLock;

/// The NUMA nodes of a machine: the processors near each memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Nodes {
    /// Processors by node, ascending; none for a machine of one node.
    processors: Vec<Vec<usize>>,
}

impl Nodes {
    /// Makes nodes with these processors, by the system's numbers. Nodes
    /// without processors do not count, and a processor is on the first node
    /// that names it. Fewer than two nodes become one that has all processors.
    pub fn new(processors: impl IntoIterator<Item = Vec<usize>>) -> Nodes {
        let mut nodes: Vec<Vec<usize>> = Vec::new();
        for mut own in processors {
            own.retain(|processor| !nodes.iter().any(|node| node.contains(processor)));
            own.sort_unstable();
            own.dedup();
            if !own.is_empty() {
                nodes.push(own);
            }
        }
        if nodes.len() < 2 {
            nodes.clear();
        }
        Nodes { processors: nodes }
    }

    /// Returns the number of nodes, at least 1.
    pub fn count(&self) -> usize {
        self.processors.len().max(1)
    }

    /// Returns the processors of each node, if there are several.
    pub(crate) fn processors(&self) -> &[Vec<usize>] {
        &self.processors
    }

    /// Returns the processors in the order in which threads are put on them:
    /// the first of each node, then the second of each, and so on, so that few
    /// threads are spread over all nodes. The first processor stays first.
    pub(crate) fn in_turns(&self, processors: &[usize]) -> Vec<usize> {
        let mut before = vec![0; self.count()];
        let turn = |&processor: &usize| {
            let before = &mut before[self.of(processor)];
            *before += 1;
            (*before, processor)
        };
        let mut turns: Vec<(usize, usize)> = processors.iter().map(turn).collect();
        turns.sort_by_key(|(turn, _)| *turn);
        turns.into_iter().map(|(_, processor)| processor).collect()
    }

    /// Returns the node of a processor; the first node, if no node names it.
    fn of(&self, processor: usize) -> usize {
        let mut nodes = self.processors.iter();
        nodes
            .position(|node| node.binary_search(&processor).is_ok())
            .unwrap_or(0)
    }
}

/// Returns the NUMA nodes of this machine that have processors which this
/// process may use, or one node where the system does not tell. The function
/// reads them once; the processors of the first caller's thread count for the
/// process.
pub fn host_nodes() -> &'static Nodes {
    static NODES: OnceLock<Nodes> = OnceLock::new();
    NODES.get_or_init(|| {
        let processors = crate::affinity::processors().unwrap_or_default();
        read_nodes(Path::new("/sys/devices/system/node"), &processors)
    })
}

/// Reads the nodes of some processors from a folder with the layout of Linux:
/// `node0/cpulist`. A node whose list cannot be read does not count, and its
/// processors belong to the first node.
pub fn read_nodes(dir: &Path, processors: &[usize]) -> Nodes {
    let nodes = numbered_nodes(dir, processors).into_iter();
    Nodes::new(nodes.map(|(_, processors)| processors))
}

/// Reads the nodes with the system's number of each, ascending, including nodes
/// that have none of the processors.
pub fn numbered_nodes(dir: &Path, processors: &[usize]) -> Vec<(u32, Vec<usize>)> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let named = entries.filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        let number: u32 = name.strip_prefix("node")?.parse().ok()?;
        Some((number, entry.path().join("cpulist")))
    });
    let lists = named.filter_map(|(number, file)| {
        let list = ranges(&fs::read_to_string(file).ok()?)?;
        Some((number, list))
    });
    let mut lists: Vec<_> = lists.collect();
    lists.sort_by_key(|(number, _)| *number);
    let on = |list: &[RangeInclusive<usize>], processor: &usize| {
        list.iter().any(|range| range.contains(processor))
    };
    let mut nodes: Vec<(u32, Vec<usize>)> = lists.iter().map(|(n, _)| (*n, Vec::new())).collect();
    for processor in processors {
        let node = lists.iter().position(|(_, list)| on(list, processor));
        if let Some((_, own)) = nodes.get_mut(node.unwrap_or(0)) {
            own.push(*processor);
        }
    }
    nodes
}

/// Parses `0-3,8-11`; returns an empty list for a node of memory alone.
fn ranges(text: &str) -> Option<Vec<RangeInclusive<usize>>> {
    let number = |text: &str| text.parse::<usize>().ok();
    let range = |text: &str| match text.split_once('-') {
        Some((first, last)) => Some(number(first)?..=number(last)?),
        None => number(text).map(|one| one..=one),
    };
    match text.trim() {
        "" => Some(Vec::new()),
        text => text.split(',').map(range).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes a tree of nodes and their lists.
    fn tree(lists: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (node, list) in lists {
            fs::create_dir(root.path().join(node)).unwrap();
            let file = root.path().join(node).join("cpulist");
            fs::write(file, format!("{list}\n")).unwrap();
        }
        root
    }

    fn nodes<const N: usize>(processors: [&[usize]; N]) -> Nodes {
        Nodes::new(processors.map(<[usize]>::to_vec))
    }

    #[test]
    fn processors_are_on_the_nodes_that_name_them() {
        let root = tree(&[
            ("node0", "0-3,8-11"),
            ("node1", "4-7,12"),
            ("node10", "14"),
            ("node2", "13"),
        ]);
        let all: Vec<usize> = (0..15).collect();
        let found = read_nodes(root.path(), &all);
        let expected = nodes([&[0, 1, 2, 3, 8, 9, 10, 11], &[4, 5, 6, 7, 12], &[13], &[14]]);
        assert_eq!(found, expected);
        assert_eq!(found.count(), 4);
        // Counts the processors alone that the process may use.
        let found = read_nodes(root.path(), &[1, 4, 5]);
        assert_eq!(found, nodes([&[1], &[4, 5]]));
        assert_eq!(read_nodes(root.path(), &[4, 5]).count(), 1);
        assert_eq!(read_nodes(root.path(), &[]).count(), 1);
    }

    #[test]
    fn nodes_of_memory_alone_do_not_count() {
        let root = tree(&[("node0", ""), ("node1", "0"), ("node2", "1"), ("node3", "")]);
        assert_eq!(read_nodes(root.path(), &[0, 1]), nodes([&[0], &[1]]));
    }

    #[test]
    fn what_cannot_be_read_is_one_node() {
        for odd in [
            "x",
            "0-",
            "-3",
            "2,,3",
            "2-3-4",
            "2;3",
            "99999999999999999999",
        ] {
            let root = tree(&[("node0", "0-1"), ("node1", odd)]);
            assert_eq!(read_nodes(root.path(), &[0, 1, 2, 3]).count(), 1, "{odd}");
            let root = tree(&[("node0", "0-1"), ("node1", odd), ("node2", "3")]);
            let found = read_nodes(root.path(), &[0, 1, 2, 3]);
            assert_eq!(found, nodes([&[0, 1, 2], &[3]]), "{odd}");
        }
        // A backward range is empty, and no number is too large.
        let root = tree(&[("node0", "1-0"), ("node1", "2-18446744073709551615")]);
        assert_eq!(read_nodes(root.path(), &[0, 2]), nodes([&[0], &[2]]));
        let root = tree(&[
            ("node", "0"),
            ("nodeA", "1"),
            ("node-1", "2"),
            ("cpu0", "3"),
        ]);
        fs::create_dir(root.path().join("node3")).unwrap();
        fs::create_dir_all(root.path().join("node4/cpulist")).unwrap();
        fs::write(root.path().join("node5"), "a file").unwrap();
        assert_eq!(read_nodes(root.path(), &[0, 1, 2, 3]).count(), 1);
        let missing = root.path().join("missing");
        assert_eq!(read_nodes(&missing, &[0, 1]), Nodes::default());
    }

    #[test]
    fn made_up_nodes_are_put_in_order() {
        assert_eq!(nodes([&[3, 1, 1], &[], &[1, 2]]), nodes([&[1, 3], &[2]]));
        assert_eq!(nodes([&[0, 1], &[1]]), Nodes::default());
        assert_eq!(nodes([]).count(), 1);
    }

    #[test]
    fn few_threads_are_spread_over_all_nodes() {
        let two = nodes([&[0, 1, 2, 3], &[4, 5, 6, 7]]);
        let all: Vec<usize> = (0..8).collect();
        assert_eq!(two.in_turns(&all), [0, 4, 1, 5, 2, 6, 3, 7]);
        assert_eq!(two.in_turns(&[1, 2, 3, 7]), [1, 7, 2, 3]);
        assert_eq!(nodes([]).in_turns(&[2, 5, 6]), [2, 5, 6]);
        // The first processor that the process may use stays the caller's.
        let crossed = nodes([&[1, 3], &[0, 2]]);
        assert_eq!(crossed.in_turns(&[0, 1, 2, 3]), [0, 1, 2, 3]);
        assert_eq!(crossed.in_turns(&[0, 2, 9]), [0, 9, 2]);
    }

    #[test]
    fn this_machine_is_read_once() {
        assert!(std::ptr::eq(host_nodes(), host_nodes()));
        assert!(host_nodes().count() >= 1);
    }
}
