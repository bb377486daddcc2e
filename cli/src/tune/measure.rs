//! Timing of layers in turns.

use crate::failure::{Failure, Result};
use crate::timing::{self, TimedCall, median, middle};
use moesaic::plan::{LayerPlan, Step};
use moesaic::{Input, Layer};
use std::time::{Duration, Instant};

/// The call and the time budget of comparisons.
pub struct Bench {
    /// The input of the call.
    pub input: Input<'static>,
    /// The time for each comparison.
    pub budget: Duration,
}

/// The times of a candidate, compared in pairs with the layer so far.
#[derive(Clone, Copy, Debug)]
pub struct Pairs {
    /// The median time of the candidate's launches.
    pub seconds: f64,
    /// The median ratio of the candidate's time to the other layer's time in the same turn.
    pub ratio: f64,
    /// The fraction of the pairs in which the candidate was faster.
    pub agreed: f64,
    /// The fraction of the whole layer's time that these launches took before.
    pub share: f64,
    /// The number of pairs.
    pub pairs: usize,
}

impl Pairs {
    /// Returns the ratio of the whole layer's time to its time before. The time of all other
    /// launches is unchanged.
    pub fn whole(&self) -> f64 {
        1.0 - self.share * (1.0 - self.ratio)
    }
}

const LEAST: usize = 5;
const MOST: usize = 100;

/// The length of a turn, about, so that a short pass is more than a tick of noise.
const TURN: Duration = Duration::from_millis(3);

/// The most passes in a turn.
const PASSES: usize = 25;

impl Bench {
    /// Times the launches in which `others` differ from `before`, in turns. Returns the seconds of
    /// these launches in `before`, and the comparison with each candidate.
    ///
    /// # Errors
    /// Fails if a launch fails.
    pub fn compare(&self, before: &Layer, others: &[Layer]) -> Result<(f64, Vec<Pairs>)> {
        let tokens = self.input.tokens;
        let differ = differing(before.plan(), others);
        let call = TimedCall::new(before, self.input.clone());
        for layer in others.iter().chain([before]) {
            call.run(layer)?;
        }
        let passes = passes(pass(before, tokens, &differ)?[0]);
        let mut times = vec![Vec::new(); others.len()];
        let mut befores = Vec::new();
        let mut whole = Vec::new();
        let begun = Instant::now();
        for round in 0..MOST {
            if round >= LEAST && begun.elapsed() > self.budget {
                break;
            }
            // Rotate the order: a layer must neither always follow the same layer nor always be
            // first.
            for place in 0..=others.len() {
                let turn = (place + round) % (others.len() + 1);
                let layer = others.get(turn).unwrap_or(before);
                let [own, all] = middle_pass(layer, tokens, &differ, passes)?;
                times.get_mut(turn).unwrap_or(&mut befores).push(own);
                whole.extend((turn == others.len()).then_some(all));
            }
        }
        let time = median(befores.clone()).as_secs_f64();
        let share = (time / median(whole).as_secs_f64().max(1e-9)).min(1.0);
        let each = times.into_iter();
        let pairs = each.map(|own| beside(own, &befores, share)).collect();
        Ok((time, pairs))
    }

    /// Checks that both layers give the same bytes.
    ///
    /// # Errors
    /// Fails if the bytes differ, which is a defect.
    pub fn same_results(&self, default: &Layer, tuned: &Layer) -> Result {
        let y = |layer: &Layer| timing::y(layer, &self.input);
        if y(default)? == y(tuned)? {
            return Ok(());
        }
        Err(Failure::work(format!(
            "other tiles gave another result for {} tokens; nothing was kept",
            self.input.tokens
        ))
        .hint("please report it with the spec and the output of `moesaic doctor -v`"))
    }
}

fn beside(own: Vec<Duration>, befores: &[Duration], share: f64) -> Pairs {
    let ratios = own.iter().zip(befores);
    let ratios: Vec<f64> = ratios
        .map(|(own, before)| own.as_secs_f64() / before.as_secs_f64().max(1e-9))
        .collect();
    let faster = ratios.iter().filter(|ratio| **ratio < 1.0).count();
    Pairs {
        share,
        pairs: ratios.len(),
        agreed: faster as f64 / ratios.len().max(1) as f64,
        ratio: middle(ratios),
        seconds: median(own).as_secs_f64(),
    }
}

/// Returns, for each launch of a pass, whether one of `others` has another kernel there.
fn differing(before: &LayerPlan, others: &[Layer]) -> Vec<bool> {
    let same =
        |kernel: usize, other: &LayerPlan| before.kernels[kernel].op == other.kernels[kernel].op;
    let differ = |step: &Step| {
        let Step::Launch(launch) = step;
        let mut others = others.iter();
        others.any(|other| !same(launch.entry.kernel, other.plan()))
    };
    before.all_steps().map(differ).collect()
}

/// Times one pass: the launches that count, and all launches.
fn pass(layer: &Layer, tokens: usize, counts: &[bool]) -> Result<[Duration; 2]> {
    let mut sums = [Duration::ZERO; 2];
    for (step, counts) in layer.time_steps(tokens)?.iter().zip(counts) {
        sums[0] += if *counts { step.time } else { Duration::ZERO };
        sums[1] += step.time;
    }
    Ok(sums)
}

/// Returns the medians over `passes` passes.
fn middle_pass(
    layer: &Layer,
    tokens: usize,
    counts: &[bool],
    passes: usize,
) -> Result<[Duration; 2]> {
    let all: Result<Vec<_>> = (0..passes).map(|_| pass(layer, tokens, counts)).collect();
    let all = all?;
    Ok([0, 1].map(|which| median(all.iter().map(|sums| sums[which]).collect())))
}

fn passes(one: Duration) -> usize {
    (TURN.as_nanos() / one.as_nanos().max(1)).clamp(1, PASSES as u128) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_of_the_same_turn() {
        let times = |list: &[u64]| list.iter().map(|ms| Duration::from_millis(*ms)).collect();
        let (own, befores): (Vec<_>, Vec<_>) = (times(&[10, 20, 90]), times(&[20, 40, 100]));
        let pairs = beside(own, &befores, 0.5);
        assert_eq!(pairs.whole(), 0.75);
        assert_eq!((pairs.ratio, pairs.agreed, pairs.pairs), (0.5, 1.0, 3));
        assert_eq!(pairs.seconds, 0.02);
    }
}
