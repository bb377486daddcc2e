//! The corpus as character ids, and batches of it.

use moesaic::reference::Random;
use std::ops::Range;

/// Real English text: see examples/data/README.md.
const BOOK: &str = include_str!("../data/moby_dick.txt");

/// A text as ids below `vocabulary`.
pub struct Text {
    /// The number of different characters.
    pub vocabulary: usize,
    /// The first nine tenths of the text.
    pub train: Vec<usize>,
    /// The last tenth of the text.
    pub held_out: Vec<usize>,
}

/// Windows of the text, with the character after each position.
pub struct Batch {
    /// `[sequences, context]`.
    pub tokens: Vec<usize>,
    /// The same windows, one character later.
    pub targets: Vec<usize>,
    /// The number of targets in the whole batch, of which this may be a part.
    pub all: usize,
}

impl Text {
    /// Returns the book that comes with the examples.
    pub fn book() -> Text {
        let mut letters: Vec<char> = BOOK.chars().collect();
        letters.sort_unstable();
        letters.dedup();
        let id = |c: char| letters.binary_search(&c).expect("taken from the text");
        let mut train: Vec<usize> = BOOK.chars().map(id).collect();
        let held_out = train.split_off(train.len() / 10 * 9);
        Text {
            vocabulary: letters.len(),
            train,
            held_out,
        }
    }

    /// Returns `count` windows at random places of the training text.
    pub fn batch(&self, count: usize, context: usize, random: &mut Random) -> Batch {
        let places = (self.train.len() - context) as u64;
        let starts = (0..count).map(|_| (random.bits() % places) as usize);
        Batch::at(&self.train, starts, context)
    }

    /// Returns `count` windows spread evenly over the held-out text, always the same ones.
    pub fn held_out(&self, count: usize, context: usize) -> Batch {
        let stride = (self.held_out.len() - context - 1) / count;
        Batch::at(&self.held_out, (0..count).map(|i| i * stride), context)
    }
}

impl Batch {
    fn at(text: &[usize], starts: impl Iterator<Item = usize>, context: usize) -> Batch {
        let (mut tokens, mut targets) = (Vec::new(), Vec::new());
        for start in starts {
            tokens.extend(&text[start..start + context]);
            targets.extend(&text[start + 1..start + context + 1]);
        }
        let all = targets.len();
        Batch {
            tokens,
            targets,
            all,
        }
    }

    /// Returns some of its sequences.
    pub fn part(&self, sequences: Range<usize>, context: usize) -> Batch {
        let range = sequences.start * context..sequences.end * context;
        Batch {
            tokens: self.tokens[range.clone()].to_vec(),
            targets: self.targets[range].to_vec(),
            all: self.all,
        }
    }
}
