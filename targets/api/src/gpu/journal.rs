//! A journal of launches not yet waited for: the suspects when a kernel's fault shows later.

use super::LaunchShape;
use super::lock::lock;
use std::fmt;
use std::sync::{Arc, Mutex};

/// The number of suspects remembered. A layer has about ten launches.
const KEPT: usize = 64;

/// A launch as errors name it.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Launched {
    Kernel {
        symbol: Arc<str>,
        shape: LaunchShape,
    },
    Graph {
        name: Arc<str>,
    },
}

/// The launches of a stream, oldest first, each kind once.
#[derive(Debug, Default)]
pub(super) struct Journal {
    launches: Vec<Launched>,
    /// The expected position of the next launch, if calls repeat.
    next: usize,
    forgotten: usize,
}

impl Journal {
    pub fn note(&mut self, launched: &Launched) {
        let count = self.launches.len();
        // Start where the last call left off: in a loop over a layer, each launch is found at the
        // first place.
        let mut places = (0..count).map(|i| (self.next + i) % count);
        if let Some(at) = places.find(|at| self.launches[*at] == *launched) {
            self.next = at + 1;
            return;
        }
        // Forget the oldest, but count it, so that the error does not claim to be complete.
        if count == KEPT {
            self.launches.remove(0);
            self.forgotten += 1;
        }
        self.launches.push(launched.clone());
        self.next = 0;
    }

    /// Clears the journal, because everything on this stream has finished.
    pub fn settle(&mut self) {
        self.launches.clear();
        self.next = 0;
        self.forgotten = 0;
    }

    pub fn is_empty(&self) -> bool {
        self.launches.is_empty()
    }
}

/// The journal of one stream. A launch locks only its own stream's journal.
pub(super) type SharedJournal = Arc<Mutex<Journal>>;

/// The journals of a GPU's streams.
#[derive(Debug, Default)]
pub(super) struct Journals(Mutex<Vec<SharedJournal>>);

impl Journals {
    /// Opens a journal for a new stream.
    pub fn open(&self) -> SharedJournal {
        let mut all = lock(&self.0);
        // A stream that is gone was waited for, so it has no suspects.
        all.retain(|journal| Arc::strong_count(journal) > 1 || !lock(journal).is_empty());
        let journal = SharedJournal::default();
        all.push(journal.clone());
        journal
    }

    pub fn suspects(&self) -> Suspects {
        let mut suspects = Suspects::default();
        for journal in lock(&self.0).iter() {
            suspects.add(&lock(journal));
        }
        suspects
    }
}

/// Launches that may have caused a fault.
#[derive(Debug, Default)]
pub(super) struct Suspects {
    pub launches: Vec<Launched>,
    forgotten: usize,
}

impl Suspects {
    /// Adds the launches of one more stream.
    pub fn add(&mut self, journal: &Journal) {
        for launched in &journal.launches {
            if !self.launches.contains(launched) {
                self.launches.push(launched.clone());
            }
        }
        self.forgotten += journal.forgotten;
    }

    /// Describes the suspects.
    pub fn words(&self, blocking: &str) -> String {
        let names: Vec<String> = self.launches.iter().map(Launched::to_string).collect();
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
        let shape = LaunchShape {
            grid: [2, 1],
            threads: 64,
            shared_bytes: 0,
            cluster: 1,
            dependent: false,
        };
        let symbol = symbol.into();
        Launched::Kernel { symbol, shape }
    }

    fn suspects(journals: &[&Journal]) -> Suspects {
        let mut suspects = Suspects::default();
        journals.iter().for_each(|journal| suspects.add(journal));
        suspects
    }

    #[test]
    fn suspects_are_those_since_the_last_wait_on_their_stream() {
        let [mut one, mut two] = [Journal::default(), Journal::default()];
        let words = suspects(&[&one, &two]).words("X");
        assert!(words.starts_with("nothing was launched here"));
        for symbol in ["a", "b", "a"] {
            one.note(&kernel(symbol));
        }
        for symbol in ["a", "c"] {
            two.note(&kernel(symbol));
        }
        assert_eq!(
            suspects(&[&one, &two]).launches,
            [kernel("a"), kernel("b"), kernel("c")],
            "each once, oldest first"
        );
        one.settle();
        let left = suspects(&[&one, &two]);
        assert_eq!(left.launches, [kernel("a"), kernel("c")]);
        let shape = "(grid 2 x 1, 64 threads, 0 bytes of dynamic shared memory)";
        assert_eq!(
            left.words("X_BLOCKING"),
            format!("one of: `a` {shape}, `c` {shape}; set X_BLOCKING=1 to be told which")
        );
    }

    /// Streams record launches at the same time, and their journals outlive them.
    #[test]
    fn streams_lock_their_own_journals() {
        let journals = Journals::default();
        let [one, two] = [journals.open(), journals.open()];
        let busy = lock(&one);
        let mut own = two.try_lock().expect("nobody else has it");
        own.note(&kernel("a"));
        drop((busy, own));
        drop(two);
        let three = journals.open();
        assert_eq!(journals.suspects().launches, [kernel("a")]);
        drop((one, three));
        journals.open();
        let left = lock(&journals.0).len();
        assert_eq!(left, 2, "that with a suspect, and the new one");
    }

    #[test]
    fn a_call_that_repeats_is_found_where_it_is_expected() {
        let mut journal = Journal::default();
        for (symbol, next) in [("a", 0), ("b", 0), ("c", 0), ("a", 1), ("b", 2), ("b", 2)] {
            journal.note(&kernel(symbol));
            assert_eq!(journal.next, next, "after {symbol}");
        }
        assert_eq!(journal.launches, ["a", "b", "c"].map(kernel));
    }

    #[test]
    fn a_long_list_says_how_many_are_not_in_it() {
        let mut journal = Journal::default();
        for i in 0..KEPT + 3 {
            journal.note(&kernel(&format!("k{i}")));
        }
        let long = suspects(&[&journal]);
        assert_eq!(long.launches[0], kernel("k3"));
        assert!(long.words("X").contains(", and 3 earlier ones; set X=1"));
        journal.settle();
        journal.note(&kernel("last"));
        assert!(!suspects(&[&journal]).words("X").contains("earlier"));
    }
}
