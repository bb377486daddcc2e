//! Which sizes are better than the default, for each number of tokens by itself.
//!
//! One size after another, what weighs most first; each candidate runs in turns
//! with the layer as it is so far, and takes its place only when it is clearly
//! faster.

use super::measure::{Bench, Pairs};
use crate::failure::Result;
use crate::progress::Progress;
use moesaic::Layer;
use moesaic::engine::{Measured, Variants};
use moesaic::plan::{Choice, Tuning};

/// A size is better whose launches take less than this part of their time ...
const CLEAR: f64 = 0.98;

/// ... where so many of the pairs say so, and more when they are few: two
/// standard deviations beyond half of them ...
const AGREED: f64 = 0.75;

/// ... if the whole layer takes less than this part: launches of microseconds
/// differ by where their memory lies.
const WORTH: f64 = 0.997;

/// A size and the candidates for it.
pub struct Tried {
    pub choice: Choice,
    /// The launches that the size is of as they were, in seconds.
    pub before: f64,
    pub candidates: Vec<Candidate>,
    /// Index of the candidate that is better.
    pub winner: Option<usize>,
}

/// A size that was tried.
pub struct Candidate {
    pub size: usize,
    pub pairs: Pairs,
}

/// What was found for one number of tokens.
pub struct Found {
    pub tried: Vec<Tried>,
    /// The gain is that of whole layers; 1 where nothing was better.
    pub best: Measured,
    /// Sizes won that are not kept, because the whole layer was not faster.
    pub dropped: bool,
}

impl Candidate {
    /// The whole layer's time over the time before.
    pub fn ratio(&self) -> f64 {
        self.pairs.whole()
    }

    fn is_better(&self) -> bool {
        is_better(&self.pairs)
    }
}

fn is_better(pairs: &Pairs) -> bool {
    let agreed = AGREED.max(0.5 + (pairs.pairs as f64).sqrt().recip());
    pairs.ratio < CLEAR && pairs.agreed >= agreed && pairs.whole() < WORTH
}

/// The best of those that are better.
fn winner(candidates: &[Candidate]) -> Option<usize> {
    let better = (0..candidates.len()).filter(|&i| candidates[i].is_better());
    better.min_by(|&a, &b| candidates[a].ratio().total_cmp(&candidates[b].ratio()))
}

/// Tries everything.
///
/// # Errors
/// When a layer cannot be made or run.
pub fn search(variants: &Variants<'_>, bench: &Bench, progress: &Progress) -> Result<Found> {
    let tokens = bench.input.tokens;
    let mut tuning = Tuning::default();
    let mut tried = Vec::new();
    for choice in Tuning::choices(&variants.untuned().plan) {
        progress.next(format!("trying {} at T={tokens}", choice.knob.name()));
        let one = try_one(variants, bench, choice, &tuning)?;
        if let Some(winner) = one.winner {
            tuning = tuning.with(one.choice.knob, one.candidates[winner].size);
        }
        tried.push(one);
    }
    progress.next(format!("comparing with the default at T={tokens}"));
    // Parts may win and the whole not: caches are shared.
    let confirmed = confirm(variants, bench, &tuning)?;
    let dropped = confirmed.is_none() && !tuning.is_empty();
    let (tuning, gain) = match confirmed {
        Some(gain) => (tuning, gain),
        None => (Tuning::default(), 1.0),
    };
    let best = Measured {
        tokens,
        tuning,
        gain,
    };
    Ok(Found {
        tried,
        best,
        dropped,
    })
}

fn try_one(
    variants: &Variants<'_>,
    bench: &Bench,
    choice: Choice,
    so_far: &Tuning,
) -> Result<Tried> {
    let before = variants.layer(so_far)?;
    let with = |&size: &usize| variants.layer(&so_far.clone().with(choice.knob, size));
    let layers: Vec<Layer> = choice
        .others
        .iter()
        .map(with)
        .collect::<std::result::Result<_, _>>()?;
    let (time, pairs) = bench.compare(&before, &layers)?;
    let each = choice.others.iter().zip(pairs);
    let candidates: Vec<Candidate> = each
        .map(|(&size, pairs)| Candidate { size, pairs })
        .collect();
    Ok(Tried {
        before: time,
        winner: winner(&candidates),
        candidates,
        choice,
    })
}

/// The default's time over the tuned layer's, if that is better.
fn confirm(variants: &Variants<'_>, bench: &Bench, tuning: &Tuning) -> Result<Option<f64>> {
    if tuning.is_empty() {
        return Ok(None);
    }
    let default = variants.layer(&Tuning::default())?;
    let tuned = [variants.layer(tuning)?];
    bench.same_results(&default, &tuned[0])?;
    let (_, pairs) = bench.compare(&default, &tuned)?;
    let better = pairs.iter().find(|pairs| is_better(pairs));
    Ok(better.map(|pairs| 1.0 / pairs.whole()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The ratio of its launches, the part of the pairs that agree, and what part
    /// of the layer they are.
    fn candidate(size: usize, ratio: f64, agreed: f64, share: f64) -> Candidate {
        let pairs = Pairs {
            seconds: 1.0,
            ratio,
            agreed,
            share,
            pairs: 8,
        };
        Candidate { size, pairs }
    }

    #[test]
    fn only_what_is_clearly_faster_wins() {
        let sure = candidate(1, 0.95, 0.9, 0.9);
        let slight = candidate(2, 0.985, 1.0, 1.0);
        let noisy = candidate(3, 0.9, 0.8, 1.0);
        let tiny = candidate(4, 0.8, 1.0, 0.01);
        assert!(sure.is_better());
        for other in [slight, noisy, tiny] {
            assert!(!other.is_better(), "{}", other.size);
        }
    }

    #[test]
    fn the_fastest_wins() {
        let all = [
            candidate(1, 0.95, 1.0, 0.5),
            candidate(2, 0.91, 1.0, 0.5),
            candidate(3, 0.5, 0.2, 0.5),
        ];
        assert_eq!(winner(&all), Some(1));
        assert_eq!(winner(&all[2..]), None);
    }
}
