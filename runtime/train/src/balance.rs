//! Load balancing without a loss: the selection bias, and the moving load average of entropy-guided
//! routing.
//!
//! These are functions over counts, for trainers. Call them once per global batch with counts
//! summed over every rank and micro-batch, and not again when activations are recomputed.

use crate::TrainError;
use moesaic_engine::{ProcessGroup, Ranks};
use std::cmp::Ordering;

/// Adds `rate · sign(mean(counts) - counts_e)` to each bias (DeepSeek-V3's loss-free balancing,
/// with a rate of 1e-3). `bias` is `router.select_bias [E]`; `counts [E]` are the assignments,
/// dropped ones included. The sign of zero is zero.
///
/// # Panics
/// If the lengths differ.
pub fn update_select_bias(bias: &mut [f32], counts: &[i64], rate: f32) {
    assert_eq!(bias.len(), counts.len(), "a bias and a count per expert");
    let total: i128 = counts.iter().map(|&n| i128::from(n)).sum();
    let experts = counts.len() as i128;
    for (bias, &count) in bias.iter_mut().zip(counts) {
        // Compare in integers, with both sides times E, because the mean need not be representable.
        match total.cmp(&(i128::from(count) * experts)) {
            Ordering::Greater => *bias += rate,
            Ordering::Less => *bias -= rate,
            Ordering::Equal => {}
        }
    }
}

/// Updates `load_e = decay · load_e + (1 - decay) · counts_e / Σ counts`, for `router.load [E]`. It
/// stays unchanged if nothing was assigned.
///
/// # Panics
/// If the lengths differ.
pub fn update_load(load: &mut [f32], counts: &[i64], decay: f32) {
    assert_eq!(load.len(), counts.len(), "a load and a count per expert");
    let total: i64 = counts.iter().sum();
    if total == 0 {
        return;
    }
    for (load, &count) in load.iter_mut().zip(counts) {
        let share = count as f64 / total as f64;
        *load = (f64::from(decay) * f64::from(*load) + (1.0 - f64::from(decay)) * share) as f32;
    }
}

/// Sums `counts` over all ranks, with the same result on every rank, for [`moesaic_plan::Balancer`]
/// and the functions above. All ranks call it.
///
/// # Errors
/// The errors of the exchange, or [`TrainError::Tensor`] if another rank has another number of
/// experts.
pub fn counts_of_all(ranks: &Ranks, counts: &[i64]) -> Result<Vec<i64>, TrainError> {
    let bytes: Vec<u8> = counts
        .iter()
        .flat_map(|count| count.to_le_bytes())
        .collect();
    let all = ranks.gather_bytes(&bytes, ProcessGroup::World, "counts of all ranks")?;
    if all.iter().any(|theirs| theirs.len() != bytes.len()) {
        let problem = format!(
            "are of {} experts here, and not so on all ranks",
            counts.len()
        );
        return Err(TrainError::tensor("counts", problem));
    }
    let mut sums = vec![0; counts.len()];
    for theirs in &all {
        let each = theirs.as_chunks().0.iter();
        for (sum, &count) in sums.iter_mut().zip(each) {
            *sum += i64::from_le_bytes(count);
        }
    }
    Ok(sums)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bias_moves_towards_the_mean() {
        let mut bias = [0.0, 0.5, -1.0, 0.25];
        update_select_bias(&mut bias, &[7, 1, 4, 4], 0.125);
        assert_eq!(bias, [-0.125, 0.625, -1.0, 0.25]);
        // Thirds have no finite binary fraction, yet the comparison is exact.
        let mut bias = [0.0; 3];
        update_select_bias(&mut bias, &[i64::MAX, i64::MAX, i64::MAX], 1.0);
        assert_eq!(bias, [0.0; 3]);
        update_select_bias(&mut [], &[], 1.0);
    }

    #[test]
    fn repeated_updates_balance_a_gate() {
        // Expert e scores 1 / (e + 1), and a token takes the best two of three.
        let scores = [1.0f32, 0.5, 0.25];
        let mut bias = [0.0f32; 3];
        let mut total = [0i64; 3];
        for step in 0..3000 {
            let mut order = [0, 1, 2];
            order.sort_by(|&a, &b| (scores[b] + bias[b]).total_cmp(&(scores[a] + bias[a])));
            let mut counts = [0; 3];
            order[..2].iter().for_each(|&e| counts[e] += 1);
            update_select_bias(&mut bias, &counts, 1e-3);
            if step >= 1500 {
                counts.iter().zip(&mut total).for_each(|(n, t)| *t += n);
            }
        }
        for n in total {
            assert!((n - 1000).abs() < 20, "{total:?}");
        }
    }

    #[test]
    fn the_load_is_a_moving_share() {
        let mut load = [0.5, 0.5];
        update_load(&mut load, &[3, 1], 0.5);
        assert_eq!(load, [0.625, 0.375]);
        update_load(&mut load, &[0, 0], 0.5);
        assert_eq!(load, [0.625, 0.375]);
    }
}
