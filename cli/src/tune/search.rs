//! A search for tile sizes that beat the default, separately for each number of tokens.
//!
//! The search goes through the sizes one by one, those with most influence first. Each candidate
//! runs in turns with the best layer so far, and replaces it only if it is clearly faster.

use super::measure::{Bench, Pairs};
use crate::failure::Result;
use crate::progress::Progress;
use moesaic::Layer;
use moesaic::engine::{TunedTimes, Variants};
use moesaic::plan::{KnobCandidates, Tuning};

/// A candidate wins if its launches take less than this fraction of their time before ...
const CLEAR: f64 = 0.98;

/// ... and at least this fraction of the pairs agrees. With few pairs more of them must agree: half
/// plus two standard deviations ...
const AGREED: f64 = 0.75;

/// ... and the whole layer takes less than this fraction, because launches of microseconds also
/// differ by the place of their memory.
const WORTH: f64 = 0.997;

/// A size and the candidates for it.
pub struct Tried {
    pub choice: KnobCandidates,
    /// The seconds that the launches with this size took before.
    pub before: f64,
    pub candidates: Vec<Candidate>,
    /// The index of the winning candidate.
    pub winner: Option<usize>,
}

/// A candidate value of a size, with its comparison.
pub struct Candidate {
    pub size: usize,
    pub pairs: Pairs,
}

/// The findings for one number of tokens.
pub struct Found {
    pub tried: Vec<Tried>,
    /// The best sizes; their gain is that of whole layers, and 1 if nothing was better.
    pub best: TunedTimes,
    /// Whether winning sizes were dropped because the whole layer was not faster.
    pub dropped: bool,
}

impl Candidate {
    /// Returns the ratio of the whole layer's time to its time before.
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

/// Returns the best of the candidates that are better.
fn winner(candidates: &[Candidate]) -> Option<usize> {
    let better = (0..candidates.len()).filter(|&i| candidates[i].is_better());
    better.min_by(|&a, &b| candidates[a].ratio().total_cmp(&candidates[b].ratio()))
}

/// Tries every candidate of every size.
///
/// # Errors
/// Fails if a layer cannot be made or run.
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
    // Compare the whole layer once more: launches that are each faster can be slower together,
    // because they share caches.
    let confirmed = confirm(variants, bench, &tuning)?;
    let dropped = confirmed.is_none() && !tuning.is_empty();
    let (tuning, gain) = match confirmed {
        Some(gain) => (tuning, gain),
        None => (Tuning::default(), 1.0),
    };
    let best = TunedTimes {
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
    choice: KnobCandidates,
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

/// Returns the ratio of the default's time to the tuned layer's time, if the tuned layer is faster.
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
