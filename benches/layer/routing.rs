//! Which experts the tokens of a bench are meant for.

use crate::shapes::Shape;
use moesaic::reference::Random;
use std::fmt;

/// How often experts are wanted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Skew {
    /// All alike.
    Uniform,
    /// The n-th in rank by `n^-s`; ranks are shuffled over the experts.
    Zipf(f64),
}

impl fmt::Display for Skew {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Skew::Uniform => f.write_str("uniform"),
            Skew::Zipf(s) => write!(f, "zipf:{s}"),
        }
    }
}

impl std::str::FromStr for Skew {
    type Err = String;

    fn from_str(text: &str) -> Result<Skew, String> {
        let zipf = text.strip_prefix("zipf:").and_then(|s| s.parse().ok());
        match (text, zipf) {
            ("uniform", _) => Ok(Skew::Uniform),
            (_, Some(s)) => Ok(Skew::Zipf(s)),
            _ => Err(format!("{text:?} is neither uniform nor zipf:EXPONENT")),
        }
    }
}

/// `[T, K]` experts, those of a token different and ascending: drawn without
/// replacement by the experts' shares.
pub fn choose(shape: &Shape, tokens: usize, skew: Skew) -> Vec<i32> {
    let mut random = Random::new(5);
    let mut ranks: Vec<usize> = (0..shape.experts).collect();
    for i in (1..ranks.len()).rev() {
        ranks.swap(i, unit(&mut random, i + 1) as usize);
    }
    let share = |rank: usize| match skew {
        Skew::Uniform => 0.0,
        Skew::Zipf(s) => -s * ((rank + 1) as f64).ln(),
    };
    let mut ids = Vec::with_capacity(tokens * shape.top_k);
    for _ in 0..tokens {
        // The K largest of log share plus Gumbel noise are such a draw.
        let key = |&rank: &usize| share(rank) - (-unit(&mut random, 1).ln()).ln();
        let mut keys: Vec<(f64, i32)> = ranks.iter().map(key).zip(0..).collect();
        keys.sort_unstable_by(|a, b| b.0.total_cmp(&a.0));
        let mut chosen: Vec<i32> = keys[..shape.top_k].iter().map(|(_, id)| *id).collect();
        chosen.sort_unstable();
        ids.extend(chosen);
    }
    ids
}

/// Uniform in `(0, scale)`.
fn unit(random: &mut Random, scale: usize) -> f64 {
    (random.signed() + 1.0) / 2.0 * scale as f64
}
