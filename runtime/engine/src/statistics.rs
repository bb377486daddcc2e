//! Statistics of routing: expert load and dropped slots.

/// The choices and locations of a call, on the host. All fields but `experts` are rows of `top_k`
/// slots per token.
#[derive(Clone, Copy, Debug)]
pub struct Record<'a> {
    /// Experts that were scored, identity experts included.
    pub experts: usize,
    /// K.
    pub top_k: usize,
    /// `[T, K]`; a negative id is a masked slot.
    pub ids: &'a [i32],
    /// `[T, K]`.
    pub weights: &'a [f32],
    /// `[T, K]`, negative where dropped; `None` where nothing can be.
    pub locations: Option<&'a [i32]>,
    /// Experts from here on have no rows, hence no locations.
    pub with_rows: usize,
}

/// Statistics of a [`Record`]. Loads count choices before dropping.
#[derive(Clone, Debug, PartialEq)]
pub struct Statistics {
    /// The number of choices of each expert `[E]`.
    pub loads: Vec<u64>,
    /// Choices that were dropped, by slot `[K]`.
    pub dropped: Vec<u64>,
    /// Masked slots.
    pub masked: u64,
    /// Tokens that no expert sees, because all their slots were dropped or
    /// masked.
    pub lost_tokens: u64,
    /// Entropy of the loads' shares in nats; `ln E` when balanced.
    pub entropy: f64,
    /// Standard deviation of the loads over their mean (over all E).
    pub variation: f64,
    /// Largest load over the mean.
    pub peak: f64,
    /// Mean over tokens with a choice of their largest weight over their sum.
    pub confidence: f64,
}

impl Statistics {
    /// Computes the statistics of a record. An id that is no expert counts as masked.
    pub fn of(record: &Record<'_>) -> Statistics {
        let mut found = Statistics {
            loads: vec![0; record.experts],
            dropped: vec![0; record.top_k],
            masked: 0,
            lost_tokens: 0,
            entropy: 0.0,
            variation: 0.0,
            peak: 0.0,
            confidence: 0.0,
        };
        let rows = record.ids.chunks(record.top_k.max(1));
        for (t, ids) in rows.enumerate() {
            found.add(record, t, ids);
        }
        found.spread();
        found.confidence = confidence(record);
        found
    }

    fn add(&mut self, record: &Record<'_>, token: usize, ids: &[i32]) {
        let mut kept = false;
        for (k, &id) in ids.iter().enumerate() {
            let Some(expert) = usize::try_from(id).ok().filter(|&e| e < record.experts) else {
                self.masked += 1;
                continue;
            };
            self.loads[expert] += 1;
            let location = record.locations.map(|all| all[token * record.top_k + k]);
            let drops = expert < record.with_rows && location.is_some_and(|at| at < 0);
            self.dropped[k] += u64::from(drops);
            kept = kept || !drops;
        }
        self.lost_tokens += u64::from(!kept);
    }

    fn spread(&mut self) {
        let count = self.loads.len().max(1) as f64;
        let total = self.total() as f64;
        if total == 0.0 {
            return;
        }
        let mean = total / count;
        let shares = self.loads.iter().map(|&n| n as f64 / total);
        self.entropy = -shares.filter(|&p| p > 0.0).map(|p| p * p.ln()).sum::<f64>();
        let squares = self.loads.iter().map(|&n| (n as f64 - mean).powi(2));
        self.variation = (squares.sum::<f64>() / count).sqrt() / mean;
        self.peak = self.loads.iter().copied().max().unwrap_or(0) as f64 / mean;
    }

    /// Returns the number of choices.
    pub fn total(&self) -> u64 {
        self.loads.iter().sum()
    }

    /// Returns the number of dropped choices: the overflow of a bounded capacity.
    pub fn overflow(&self) -> u64 {
        self.dropped.iter().sum()
    }

    /// Returns the number of experts that no token chose.
    pub fn idle(&self) -> usize {
        self.loads.iter().filter(|&&n| n == 0).count()
    }

    /// Draws a line per expert with its load as a bar, at most `width` columns wide and `lines`
    /// lines high; `blocks` draws eighths of a column with Unicode's block elements, otherwise `#`.
    /// If there are more experts than lines, a line shows the mean of adjacent experts.
    pub fn chart(&self, width: usize, lines: usize, blocks: bool) -> String {
        let group = self.loads.len().div_ceil(lines.max(1)).max(1);
        let bars: Vec<(String, f64)> = self
            .loads
            .chunks(group)
            .enumerate()
            .map(|(i, loads)| {
                let first = i * group;
                let name = match loads.len() {
                    1 => first.to_string(),
                    n => format!("{first}-{}", first + n - 1),
                };
                (name, loads.iter().sum::<u64>() as f64 / loads.len() as f64)
            })
            .collect();
        let most = bars.iter().fold(0f64, |most, bar| most.max(bar.1));
        let number = |value: f64| match group {
            1 => format!("{value:.0}"),
            _ => format!("{value:.1}"),
        };
        let names = bars.iter().map(|bar| bar.0.len()).max().unwrap_or(0);
        let numbers = bars
            .iter()
            .map(|bar| number(bar.1).len())
            .max()
            .unwrap_or(0);
        let room = width.saturating_sub(names + numbers + 4).clamp(1, 60);
        let line = |(name, value): &(String, f64)| {
            let share = if most > 0.0 { value / most } else { 0.0 };
            let bar = bar(share * room as f64, blocks);
            let line = format!("  {name:>names$} {:>numbers$} {bar}", number(*value));
            line.trim_end().to_string() + "\n"
        };
        bars.iter().map(line).collect()
    }
}

/// Draws a bar of this many columns.
fn bar(length: f64, blocks: bool) -> String {
    let whole = length.floor() as usize;
    if !blocks {
        return "#".repeat(length.round() as usize);
    }
    let eighths = ((length - whole as f64) * 8.0).round() as usize;
    // Nine entries, because the remainder may round up to eight eighths.
    let rest = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉", "█"][eighths];
    "█".repeat(whole) + rest
}

/// Returns the mean over tokens of their largest weight divided by the sum of their weights.
fn confidence(record: &Record<'_>) -> f64 {
    let k = record.top_k.max(1);
    let rows = record.weights.chunks(k).zip(record.ids.chunks(k));
    let shares = rows.filter_map(|(weights, ids)| {
        let live = weights.iter().zip(ids).filter(|(_, id)| **id >= 0);
        let live: Vec<f64> = live.map(|(w, _)| f64::from(*w)).collect();
        let sum: f64 = live.iter().sum();
        let most = live.iter().copied().fold(0.0, f64::max);
        (sum > 0.0).then(|| most / sum)
    });
    let (sum, count) = shares.fold((0.0, 0u64), |(sum, n), share| (sum + share, n + 1));
    sum / count.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record<'a>(ids: &'a [i32], weights: &'a [f32], locations: Option<&'a [i32]>) -> Record<'a> {
        Record {
            experts: 4,
            top_k: 2,
            ids,
            weights,
            locations,
            with_rows: 3,
        }
    }

    #[test]
    fn counts_by_hand() {
        // The second token is dropped whole; expert 3 is an identity expert.
        let ids = [0, 1, 0, 2, 3, 0, -1, 1];
        let locations = [0, 0, -1, -1, -1, 1, -1, 1];
        let weights = [0.5, 0.5, 1.0, 0.0, 0.75, 0.25, 0.0, 0.2];
        let found = Statistics::of(&record(&ids, &weights, Some(&locations)));
        assert_eq!(found.loads, [3, 2, 1, 1]);
        assert_eq!(found.dropped, [1, 1]);
        assert_eq!((found.masked, found.lost_tokens), (1, 1));
        assert_eq!((found.total(), found.overflow(), found.idle()), (7, 2, 0));
        assert!((found.peak - 12.0 / 7.0).abs() < 1e-12);
        let variance = 2.75 / 4.0; // of 3, 2, 1, 1
        assert!((found.variation - f64::sqrt(variance) / 1.75).abs() < 1e-12);
        assert!((found.confidence - (0.5 + 1.0 + 0.75 + 1.0) / 4.0).abs() < 1e-7);
    }

    #[test]
    fn a_balanced_record_has_the_most_entropy() {
        let found = Statistics::of(&record(&[0, 1, 2, 3], &[0.5; 4], None));
        assert!((found.entropy - 4f64.ln()).abs() < 1e-12);
        assert_eq!((found.variation, found.peak), (0.0, 1.0));
        assert_eq!(found.overflow(), 0);
    }

    #[test]
    fn no_tokens() {
        let found = Statistics::of(&record(&[], &[], None));
        assert_eq!(found.loads, [0; 4]);
        assert_eq!(
            (found.entropy, found.variation, found.peak),
            (0.0, 0.0, 0.0)
        );
        assert_eq!(found.chart(30, 8, true), "  0 0\n  1 0\n  2 0\n  3 0\n");
    }

    #[test]
    fn charts_fit() {
        let mut found = Statistics::of(&record(&[0, 1, 0, 1, 0, 2, 0, 1], &[0.5; 8], None));
        let plain = "  0 4 ########\n  1 3 ######\n  2 1 ##\n  3 0\n";
        assert_eq!(found.chart(14, 8, false), plain);
        let blocks = "  0 4 ████████\n  1 3 ██████\n  2 1 ██\n  3 0\n";
        assert_eq!(found.chart(14, 8, true), blocks);
        let grouped = "  0-1 3.5 ████████\n  2-3 0.5 █▏\n";
        assert_eq!(found.chart(18, 2, true), grouped);
        found.loads = (0..1000).collect();
        let chart = found.chart(80, 20, true);
        assert_eq!(chart.lines().count(), 20);
        assert!(chart.lines().all(|line| line.chars().count() <= 80));
    }
}
