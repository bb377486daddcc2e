//! What was launched and not yet waited for: the suspects when a kernel's
//! fault comes to light later.

use super::Shape;
use std::fmt;
use std::sync::Arc;

/// Suspects that are remembered. A layer has about ten.
const KEPT: usize = 64;

/// A launch, as errors name it.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Launched {
    Kernel { symbol: Arc<str>, shape: Shape },
    Graph { name: Arc<str> },
}

/// Launches by stream, oldest first, each kind once.
#[derive(Debug, Default)]
pub(super) struct Journal {
    launches: Vec<(u64, Launched)>,
    forgotten: usize,
}

impl Journal {
    pub fn note(&mut self, lane: u64, launched: &Launched) {
        let known = |(other, old): &(u64, Launched)| *other == lane && old == launched;
        if self.launches.iter().any(known) {
            return;
        }
        if self.launches.len() == KEPT {
            self.launches.remove(0);
            self.forgotten += 1;
        }
        self.launches.push((lane, launched.clone()));
    }

    /// Everything on this stream has finished.
    pub fn settle(&mut self, lane: u64) {
        self.launches.retain(|(other, _)| *other != lane);
        if self.launches.is_empty() {
            self.forgotten = 0;
        }
    }

    pub fn suspects(&self) -> Vec<Launched> {
        let mut suspects: Vec<Launched> = Vec::new();
        for (_, launched) in &self.launches {
            if !suspects.contains(launched) {
                suspects.push(launched.clone());
            }
        }
        suspects
    }

    /// The suspects in words.
    pub fn words(&self, blocking: &str) -> String {
        let names: Vec<String> = self.suspects().iter().map(Launched::to_string).collect();
        if names.is_empty() {
            return "nothing was launched here since the last synchronise: it is of another \
                    user of the GPU in this process"
                .to_string();
        }
        let more = match self.forgotten {
            0 => String::new(),
            forgotten => format!(", and {forgotten} earlier ones"),
        };
        let names = names.join(", ");
        format!("one of: {names}{more}; set {blocking}=1 to be told which")
    }
}

impl fmt::Display for Launched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Launched::Kernel { symbol, shape } => write!(f, "`{symbol}` ({shape})"),
            Launched::Graph { name } => write!(f, "graph {name}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(symbol: &str) -> Launched {
        let shape = Shape {
            grid: [2, 1],
            threads: 64,
            shared_bytes: 0,
            cluster: 1,
            dependent: false,
        };
        let symbol = symbol.into();
        Launched::Kernel { symbol, shape }
    }

    #[test]
    fn suspects_are_those_since_the_last_wait_on_their_stream() {
        let mut journal = Journal::default();
        assert!(journal.words("X").starts_with("nothing was launched here"));
        for (lane, symbol) in [(1, "a"), (1, "b"), (2, "a"), (1, "a"), (2, "c")] {
            journal.note(lane, &kernel(symbol));
        }
        assert_eq!(
            journal.suspects(),
            [kernel("a"), kernel("b"), kernel("c")],
            "each once, oldest first"
        );
        journal.settle(1);
        assert_eq!(journal.suspects(), [kernel("a"), kernel("c")]);
        let shape = "(grid 2 x 1, 64 threads, 0 bytes of dynamic shared memory)";
        assert_eq!(
            journal.words("X_BLOCKING"),
            format!("one of: `a` {shape}, `c` {shape}; set X_BLOCKING=1 to be told which")
        );
    }

    #[test]
    fn a_long_list_says_how_many_are_not_in_it() {
        let mut journal = Journal::default();
        for i in 0..KEPT + 3 {
            journal.note(1, &kernel(&format!("k{i}")));
        }
        assert_eq!(journal.suspects()[0], kernel("k3"));
        assert!(journal.words("X").contains(", and 3 earlier ones; set X=1"));
        journal.settle(1);
        journal.note(1, &kernel("last"));
        assert!(!journal.words("X").contains("earlier"));
    }
}
