//! Which sizes are better than the default.
//!
//! One size after another, what weighs most first; each candidate runs in turns
//! with the layer as it is so far, and takes its place only when it is clearly
//! faster.

use super::measure::{Bench, Pairs};
use crate::failure::Result;
use crate::progress::Progress;
use crate::timing::mean_ratio;
use moesaic::plan::{Choice, Tuning};
use moesaic::{Layer, Variants};

/// A size is better whose launches take less than this part of their time ...
const CLEAR: f64 = 0.98;

/// ... at a token count where so many of the pairs say so, and more when they
/// are few: two standard deviations beyond half of them ...
const AGREED: f64 = 0.75;

/// ... if the whole layer, in the mean over token counts, takes less than this
/// part: launches of microseconds differ by where their memory lies ...
const WORTH: f64 = 0.997;

/// ... and at no token count more than this part.
const WORSE: f64 = 1.005;

/// A size and the candidates for it.
pub struct Tried {
    pub choice: Choice,
    /// At each token count, the launches that the size is of as they were, in
    /// seconds.
    pub before: Vec<f64>,
    pub candidates: Vec<Candidate>,
    /// Index of the candidate that is better.
    pub winner: Option<usize>,
}

/// A size that was tried.
pub struct Candidate {
    pub size: usize,
    /// At each token count.
    pub at: Vec<Pairs>,
}

/// What was found.
pub struct Found {
    pub tried: Vec<Tried>,
    pub tuning: Tuning,
    /// Sizes won that are not kept, because the whole layer was not faster.
    pub dropped: bool,
    /// At each token count the default's time over the tuned layer's, whole
    /// layers; 1 where nothing was better.
    pub gain: Vec<f64>,
}

impl Candidate {
    /// The whole layer's time over the time before: the mean over token counts.
    pub fn ratio(&self) -> f64 {
        mean_ratio(self.at.iter().map(Pairs::whole))
    }

    fn is_better(&self) -> bool {
        let agreed = |pairs: &Pairs| AGREED.max(0.5 + (pairs.pairs as f64).sqrt().recip());
        let clear = |pairs: &Pairs| pairs.ratio < CLEAR && pairs.agreed >= agreed(pairs);
        let worse = |pairs: &Pairs| pairs.whole() > WORSE;
        self.ratio() < WORTH && self.at.iter().any(clear) && !self.at.iter().any(worse)
    }
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
pub fn search(variants: &Variants<'_>, bench: &Bench<'_>, progress: &Progress) -> Result<Found> {
    let mut tuning = Tuning::default();
    let mut tried = Vec::new();
    for choice in Tuning::choices(&variants.untuned().plan) {
        progress.next(format!("trying {}", choice.knob.name()));
        let one = try_one(variants, bench, choice, &tuning)?;
        if let Some(winner) = one.winner {
            tuning = tuning.with(one.choice.knob, one.candidates[winner].size);
        }
        tried.push(one);
    }
    progress.next("comparing with the default");
    let gain = confirm(variants, bench, &tuning)?;
    // Parts may win and the whole not: caches are shared.
    let kept = !tuning.is_empty() && mean_ratio(gain.iter().copied()) * WORTH > 1.0;
    Ok(Found {
        tried,
        dropped: !kept && !tuning.is_empty(),
        gain: match kept {
            true => gain,
            false => vec![1.0; gain.len()],
        },
        tuning: if kept { tuning } else { Tuning::default() },
    })
}

fn try_one(
    variants: &Variants<'_>,
    bench: &Bench<'_>,
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
    let mut tried = Tried {
        before: Vec::new(),
        candidates: choice
            .others
            .iter()
            .map(|&size| Candidate { size, at: vec![] })
            .collect(),
        winner: None,
        choice,
    };
    for at in 0..bench.inputs.len() {
        let (time, pairs) = bench.compare(at, &before, &layers)?;
        tried.before.push(time);
        let each = tried.candidates.iter_mut().zip(pairs);
        each.for_each(|(candidate, pairs)| candidate.at.push(pairs));
    }
    tried.winner = winner(&tried.candidates);
    Ok(tried)
}

/// The default's time over the tuned layer's at each token count.
fn confirm(variants: &Variants<'_>, bench: &Bench<'_>, tuning: &Tuning) -> Result<Vec<f64>> {
    if tuning.is_empty() {
        return Ok(vec![1.0; bench.inputs.len()]);
    }
    let default = variants.layer(&Tuning::default())?;
    let tuned = [variants.layer(tuning)?];
    bench.same_results(&default, &tuned[0])?;
    let gain = |at| Ok(1.0 / bench.compare(at, &default, &tuned)?.1[0].whole());
    (0..bench.inputs.len()).map(gain).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// At each token count the ratio of its launches, how many pairs agree, and
    /// what part of the layer they are.
    fn candidate(size: usize, at: &[(f64, f64, f64)]) -> Candidate {
        let pairs = |&(ratio, agreed, share)| Pairs {
            seconds: 1.0,
            ratio,
            agreed,
            share,
            pairs: 8,
        };
        let at = at.iter().map(pairs).collect();
        Candidate { size, at }
    }

    #[test]
    fn only_what_is_clearly_faster_wins() {
        let sure = candidate(1, &[(0.95, 1.0, 0.9), (0.96, 0.9, 0.9)]);
        let slight = candidate(2, &[(0.99, 1.0, 1.0), (0.985, 1.0, 1.0)]);
        let noisy = candidate(3, &[(0.9, 0.6, 1.0), (0.9, 0.8, 1.0)]);
        let torn = candidate(4, &[(0.8, 1.0, 0.5), (1.05, 0.1, 0.5)]);
        let tiny = candidate(5, &[(0.8, 1.0, 0.01)]);
        assert!(sure.is_better());
        for other in [slight, noisy, torn, tiny] {
            assert!(!other.is_better(), "{}", other.size);
        }
    }

    #[test]
    fn the_fastest_wins() {
        let all = [
            candidate(1, &[(0.95, 1.0, 0.5)]),
            candidate(2, &[(0.91, 1.0, 0.5)]),
            candidate(3, &[(0.5, 0.2, 0.5)]),
        ];
        assert_eq!(winner(&all), Some(1));
        assert_eq!(winner(&all[2..]), None);
    }
}
