//! The all-to-all exchange in two dimensions: inside the node first, then between nodes
//! among ranks of equal place, so that few large messages cross the network.
//!
//! Rank `p` of `n` is place `l = p % m` of node `v = p / m`, with `m` ranks in each of `N`
//! nodes. A part for rank `(w, k)` goes to place `k` of the own node, which sends all
//! that its node has for `(w, k)` in one message.

use super::{Copy, Message, Place, Plan, Span, Step, offsets, others};
use crate::NodeShape;

const NUMBER: usize = 8;

/// What passes through a rank: bytes by rank of its node and by node that they go to, the
/// node varying fastest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transit(Vec<usize>);

impl Transit {
    /// What rank `place` of this node has for the rank of this place in `node`.
    pub fn bytes(&self, shape: NodeShape, place: usize, node: usize) -> usize {
        self.0[place * shape.nodes + node]
    }

    /// Parts of one size.
    pub fn equal(shape: NodeShape, bytes: usize) -> Transit {
        Transit(vec![bytes; shape.ranks()])
    }

    /// What [`counts_inside_node`] has left in the scratch memory.
    pub fn read(shape: NodeShape, scratch: &[u8]) -> Transit {
        let (numbers, _) = scratch.as_chunks::<NUMBER>();
        let numbers = numbers.iter().map(|n| u64::from_le_bytes(*n) as usize);
        Transit(numbers.take(shape.ranks()).collect())
    }
}

/// Ranks of a node tell each other how many bytes they have for which node: rank `(v, g)`
/// tells `(v, l)` what it has for `(w, l)`. The result is a [`Transit`] in scratch.
pub fn counts_inside_node(rank: usize, shape: NodeShape, sends: &[usize]) -> Plan {
    let (node, place) = shape.split(rank);
    let (row, all) = (shape.nodes * NUMBER, shape.ranks() * NUMBER);
    let theirs = |g: usize| Span::new(Place::Scratch, g * row..(g + 1) * row);
    let own = |l: usize| Span::new(Place::Scratch, all + l * row..all + (l + 1) * row);
    let message = |index: usize, span| Message {
        peer: shape.rank(node, index),
        span,
    };
    let locals = || others(place, shape.per_node);
    let by_place = (0..shape.per_node).flat_map(|l| (0..shape.nodes).map(move |v| (v, l)));
    let numbers = by_place.map(|(v, l)| sends[shape.rank(v, l)] as u64);
    let exchange = Step::Exchange {
        phase: 0,
        name: "intra-node counts",
        sends: locals().map(|l| message(l, own(l))).collect(),
        receives: locals().map(|g| message(g, theirs(g))).collect(),
        copies: vec![Copy {
            from: own(place),
            to: Place::Scratch,
            offset: place * row,
        }],
    };
    Plan {
        scratch: 2 * all,
        steps: vec![Step::Write(all, numbers.collect()), exchange],
    }
}

/// The exchange itself, with the result of the direct one: part `q` of input 0 has
/// `sends[q]` bytes, part `p` of output 0 `receives[p]`. With `counted` the ranks that
/// pass parts on say what they are, so that a wrong size is found before it does harm.
pub fn hierarchical(
    rank: usize,
    shape: NodeShape,
    sends: &[usize],
    receives: &[usize],
    transit: &Transit,
    counted: bool,
) -> Plan {
    Layout::new(rank, shape, sends, receives, transit).plan(counted)
}

/// Where everything lies in the scratch memory: the input by place and node, what came
/// from the node by rank and node, the same by node and rank, and numbers.
struct Layout<'a> {
    rank: usize,
    shape: NodeShape,
    input: Vec<usize>,
    output: Vec<usize>,
    receives: &'a [usize],
    by_place: Vec<usize>,
    arrived: Vec<usize>,
    by_node: Vec<usize>,
    /// What is passed on, as numbers by node and rank.
    passed: Vec<u64>,
}

impl<'a> Layout<'a> {
    fn new(
        rank: usize,
        shape: NodeShape,
        sends: &[usize],
        receives: &'a [usize],
        transit: &Transit,
    ) -> Layout<'a> {
        let (m, nodes) = (shape.per_node, shape.nodes);
        let grid = |outer: usize, inner: usize| {
            (0..outer).flat_map(move |o| (0..inner).map(move |i| (o, i)))
        };
        let sizes = |list: Vec<usize>, start: usize| -> Vec<usize> {
            offsets(&list).iter().map(|offset| offset + start).collect()
        };
        let placed = grid(m, nodes).map(|(l, v)| sends[v * m + l]).collect();
        let turned: Vec<usize> = grid(nodes, m)
            .map(|(v, g)| transit.bytes(shape, g, v))
            .collect();
        let passed = turned.iter().map(|bytes| *bytes as u64).collect();
        let by_place = sizes(placed, 0);
        let arrived = sizes(transit.0.clone(), by_place[m * nodes]);
        let by_node = sizes(turned, arrived[m * nodes]);
        Layout {
            rank,
            shape,
            input: offsets(sends),
            output: offsets(receives),
            receives,
            by_place,
            arrived,
            by_node,
            passed,
        }
    }

    fn plan(&self, counted: bool) -> Plan {
        let mut steps = vec![Step::Repack(self.pack())];
        if counted {
            steps.push(Step::Write(self.own_numbers(), self.passed.clone()));
        }
        steps.push(self.inside_node(counted));
        if counted {
            steps.push(self.check());
        }
        steps.extend([Step::Repack(self.turn()), self.between_nodes()]);
        let numbers = if counted {
            2 * self.shape.ranks() * NUMBER
        } else {
            0
        };
        Plan {
            scratch: self.numbers() + numbers,
            steps,
        }
    }

    /// Where numbers of other nodes go in the scratch memory.
    fn numbers(&self) -> usize {
        self.by_node[self.shape.ranks()]
    }

    /// Where those for other nodes are.
    fn own_numbers(&self) -> usize {
        self.numbers() + self.shape.ranks() * NUMBER
    }

    fn scratch(&self, offsets: &[usize], parts: std::ops::Range<usize>) -> Span {
        Span::new(Place::Scratch, offsets[parts.start]..offsets[parts.end])
    }

    /// The input, ordered by place instead of node.
    fn pack(&self) -> Vec<Copy> {
        let shape = self.shape;
        let copy = |rank: usize| {
            let (node, place) = shape.split(rank);
            Copy {
                from: Span::new(Place::Input(0), self.input[rank]..self.input[rank + 1]),
                to: Place::Scratch,
                offset: self.by_place[place * shape.nodes + node],
            }
        };
        (0..shape.ranks()).map(copy).collect()
    }

    fn inside_node(&self, counted: bool) -> Step {
        let (shape, nodes) = (self.shape, self.shape.nodes);
        let (node, place) = shape.split(self.rank);
        let message = |offsets: &[usize], l: usize| Message {
            peer: shape.rank(node, l),
            span: self.scratch(offsets, l * nodes..(l + 1) * nodes),
        };
        let locals = || others(place, shape.per_node);
        let mut sends: Vec<Message> = locals().map(|l| message(&self.by_place, l)).collect();
        let mut receives: Vec<Message> = locals().map(|l| message(&self.arrived, l)).collect();
        if counted {
            sends.extend(self.rails().map(|v| self.counts(v, self.own_numbers())));
            receives.extend(self.rails().map(|v| self.counts(v, self.numbers())));
        }
        Step::Exchange {
            phase: 1,
            name: "intra-node exchange",
            sends,
            receives,
            copies: vec![Copy {
                from: message(&self.by_place, place).span,
                to: Place::Scratch,
                offset: self.arrived[place * nodes],
            }],
        }
    }

    /// Other nodes.
    fn rails(&self) -> impl Iterator<Item = usize> {
        others(self.shape.split(self.rank).0, self.shape.nodes)
    }

    /// Numbers for the rank of this place in a node, or from there.
    fn counts(&self, node: usize, start: usize) -> Message {
        let bytes = self.shape.per_node * NUMBER;
        let offset = start + node * bytes;
        Message {
            peer: self.shape.rank(node, self.shape.split(self.rank).1),
            span: Span::new(Place::Scratch, offset..offset + bytes),
        }
    }

    fn check(&self) -> Step {
        let ranks = |node| (0..self.shape.per_node).map(move |g| self.shape.rank(node, g));
        let number = |rank: usize| {
            let expected = self.receives[rank] as u64;
            (self.numbers() + rank * NUMBER, expected, rank)
        };
        Step::Check {
            what: "the number of bytes for this rank",
            numbers: self.rails().flat_map(ranks).map(number).collect(),
        }
    }

    /// What came from the node, ordered by node that it goes to.
    fn turn(&self) -> Vec<Copy> {
        let (m, nodes) = (self.shape.per_node, self.shape.nodes);
        let (own_node, _) = self.shape.split(self.rank);
        let copy = |index: usize| {
            let (g, node) = (index / nodes, index % nodes);
            let own = node == own_node;
            Copy {
                from: self.scratch(&self.arrived, index..index + 1),
                to: if own {
                    Place::Output(0)
                } else {
                    Place::Scratch
                },
                offset: match own {
                    true => self.output[self.shape.rank(node, g)],
                    false => self.by_node[node * m + g],
                },
            }
        };
        (0..m * nodes).map(copy).collect()
    }

    fn between_nodes(&self) -> Step {
        let (shape, m) = (self.shape, self.shape.per_node);
        let (_, place) = shape.split(self.rank);
        let message = |node, span| Message {
            peer: shape.rank(node, place),
            span,
        };
        let from = |node: usize| {
            let (first, end) = (self.output[node * m], self.output[(node + 1) * m]);
            message(node, Span::new(Place::Output(0), first..end))
        };
        let to = |v: usize| message(v, self.scratch(&self.by_node, v * m..(v + 1) * m));
        Step::Exchange {
            phase: 2,
            name: "inter-node exchange",
            sends: self.rails().map(to).collect(),
            receives: self.rails().map(from).collect(),
            copies: Vec::new(),
        }
    }
}
