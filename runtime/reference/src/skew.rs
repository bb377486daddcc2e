//! Skewed distributions of tokens over experts, for benchmarks.

use crate::Random;
use std::fmt;
use std::str::FromStr;

/// The distribution of assignments over experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Skew {
    /// All experts equally often.
    Uniform,
    /// The n-th expert in rank with weight `n^-s`; ranks are shuffled over the experts.
    Zipf(f64),
}

impl Skew {
    /// Draws `[tokens, top_k]` experts, without replacement by the experts' shares. Those of a
    /// token are distinct and ascending.
    ///
    /// # Panics
    /// If there are fewer experts than `top_k`.
    pub fn draw(self, experts: usize, top_k: usize, tokens: usize, seed: u64) -> Vec<i32> {
        assert!(top_k <= experts, "{top_k} of {experts} experts");
        let mut random = Random::new(seed);
        let mut ranks: Vec<usize> = (0..experts).collect();
        for i in (1..experts).rev() {
            ranks.swap(i, (unit(&mut random) * (i + 1) as f64) as usize);
        }
        let share = |rank: usize| match self {
            Skew::Uniform => 0.0,
            Skew::Zipf(s) => -s * ((rank + 1) as f64).ln(),
        };
        let mut ids = Vec::with_capacity(tokens * top_k);
        for _ in 0..tokens {
            // Gumbel-top-k: the K largest of log share plus Gumbel noise are a draw without
            // replacement.
            let key = |&rank: &usize| share(rank) - (-unit(&mut random).ln()).ln();
            let mut keys: Vec<(f64, i32)> = ranks.iter().map(key).zip(0..).collect();
            keys.sort_unstable_by(|a, b| b.0.total_cmp(&a.0));
            let mut chosen: Vec<i32> = keys[..top_k].iter().map(|(_, id)| *id).collect();
            chosen.sort_unstable();
            ids.extend(chosen);
        }
        ids
    }
}

/// Returns a uniform number in `(0, 1)`.
fn unit(random: &mut Random) -> f64 {
    ((random.signed() + 1.0) / 2.0).clamp(1e-12, 1.0 - 1e-12)
}

impl fmt::Display for Skew {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Skew::Uniform => f.write_str("uniform"),
            Skew::Zipf(s) => write!(f, "zipf:{s}"),
        }
    }
}

/// A text that is no [`Skew`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParseSkewError;

impl fmt::Display for ParseSkewError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("it is `uniform` or `zipf:S` with an exponent S of 0 to 20")
    }
}

impl std::error::Error for ParseSkewError {}

impl FromStr for Skew {
    type Err = ParseSkewError;

    fn from_str(text: &str) -> Result<Skew, ParseSkewError> {
        let exponent = text.strip_prefix("zipf:").and_then(|s| s.parse().ok());
        match (text, exponent) {
            ("uniform", _) => Ok(Skew::Uniform),
            (_, Some(s)) if (0.0..=20.0).contains(&s) => Ok(Skew::Zipf(s)),
            _ => Err(ParseSkewError),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts the draws of each expert, largest first.
    fn counts(skew: Skew) -> Vec<usize> {
        let mut counts = vec![0; 16];
        let ids = skew.draw(16, 2, 8000, 5);
        ids.iter().for_each(|id| counts[*id as usize] += 1);
        counts.sort_unstable_by(|a, b| b.cmp(a));
        counts
    }

    #[test]
    fn a_token_has_different_experts_in_order() {
        for skew in [Skew::Uniform, Skew::Zipf(1.2), Skew::Zipf(20.0)] {
            for chosen in skew.draw(5, 3, 200, 1).chunks(3) {
                assert!(chosen.is_sorted_by(|a, b| a < b), "{chosen:?}");
                assert!(chosen.iter().all(|id| (0..5).contains(id)), "{chosen:?}");
            }
        }
    }

    #[test]
    fn shares_are_those_of_the_law() {
        let uniform = counts(Skew::Uniform);
        assert!(uniform[0] < 1150 && uniform[15] > 850, "{uniform:?}");
        let zipf = counts(Skew::Zipf(1.0));
        // For single draws the ratio of the first to the eighth would be 8. It is smaller because a
        // token's two experts differ, which flattens the head.
        let ratio = zipf[0] as f64 / zipf[7] as f64;
        assert!((4.0..8.0).contains(&ratio), "{zipf:?}");
        assert_eq!(
            Skew::Zipf(0.0).draw(9, 2, 50, 3),
            Skew::Uniform.draw(9, 2, 50, 3)
        );
    }

    #[test]
    fn names_read_back() {
        for skew in [Skew::Uniform, Skew::Zipf(1.2)] {
            assert_eq!(skew.to_string().parse(), Ok(skew));
        }
        for bad in [
            "", "zipf", "zipf:", "zipf:x", "zipf:-1", "zipf:NaN", "zipf:inf",
        ] {
            assert!(bad.parse::<Skew>().is_err(), "{bad}");
        }
    }
}
