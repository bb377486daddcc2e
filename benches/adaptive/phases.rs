//! The time of each part of a step, with the planner's prediction for it.

use crate::drawn::Drawn;
use crate::measured::{self, Rank};
use crate::{Result, compared, quartile};
use moesaic::Strategy;
use moesaic::collectives::{Call, Collectives};
use moesaic::planner::Machine;
use moesaic::trace::{Lane, Trace};
use std::sync::Arc;

/// Steps that count, and one before them that compiles.
const ROUNDS: usize = 12;

/// Parts of a step in the order in which they were met first, and something of each.
type Parts<T> = Vec<(String, T)>;

/// The parts of steps of a drawn layer with one strategy: what each takes the ranks, as a mean and
/// the most of any, and what the planner says of the slowest rank.
pub fn run(number: u64, strategy: Strategy, machine: &Machine) -> Result {
    let mut rank = Rank::start()?;
    let drawn = Drawn::new(number);
    let own = steps(&mut rank, &drawn, strategy)?;
    let predicted = compared::phases(&drawn, strategy, machine)?;
    let bytes: Vec<u8> = own.iter().flat_map(|(_, ms)| ms.to_le_bytes()).collect();
    let all = rank
        .world
        .gather_bytes(&bytes, &Call::new("parts of a step"))?;
    rank.say(&format!(
        "# {drawn}, {strategy}; ms: mean of ranks, most of any, predicted"
    ));
    for (at, (name, _)) in own.iter().enumerate() {
        let each = all
            .iter()
            .map(|rank| f64::from_le_bytes(rank.as_chunks::<8>().0[at]));
        let mean = each.clone().sum::<f64>() / all.len() as f64;
        let most = each.fold(0.0, f64::max);
        let same = predicted.iter().filter(|(known, _)| known == name);
        let predicted: f64 = same.map(|(_, seconds)| 1e3 * seconds).sum();
        rank.say(&format!("{mean:>8.2} {most:>8.2} {predicted:>8.2}  {name}"));
    }
    rank.finish()
}

/// Milliseconds of each part on this rank: the lower quartile.
fn steps(rank: &mut Rank, drawn: &Drawn, strategy: Strategy) -> Result<Parts<f64>> {
    let mesh = rank.mesh(drawn.mesh)?;
    let mut layer = rank.layer(&mesh, drawn)?;
    let own = rank.world.rank();
    let (input, dy) = (drawn.input(own), drawn.output_gradient(own));
    layer.set_strategy(strategy)?;
    let mut parts: Parts<Vec<f64>> = Vec::new();
    for round in 0..=ROUNDS {
        let trace = Arc::new(Trace::default());
        layer.record(Some(trace.clone()));
        rank.meet()?;
        let passes = measured::step(&layer, &input, &dy)?;
        if round > 0 {
            for (name, ms) in sums(passes, &trace) {
                at(&mut parts, &name).push(ms);
            }
        }
    }
    let each = parts.into_iter();
    Ok(each.map(|(name, ms)| (name, quartile(ms))).collect())
}

/// Milliseconds of the parts of one step, those of all pieces together.
fn sums([forward, backward]: measured::Passes, trace: &Trace) -> Parts<f64> {
    let mut sums = vec![
        ("forward".to_string(), 1e3 * forward),
        ("backward".to_string(), 1e3 * backward),
    ];
    for it in trace.recorded() {
        let together = it.activity.lane == Lane::Exchange;
        let name = compared::part(together, &it.activity.name);
        *at(&mut sums, &name) += 1e3 * (it.end - it.begin).as_secs_f64();
    }
    sums
}

fn at<'p, T: Default>(parts: &'p mut Parts<T>, name: &str) -> &'p mut T {
    let known = parts.iter().position(|(known, _)| known == name);
    let place = known.unwrap_or_else(|| {
        parts.push((name.to_string(), T::default()));
        parts.len() - 1
    });
    &mut parts[place].1
}
