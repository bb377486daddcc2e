//! The rows of each rank for each expert.

use crate::reach::{GroupKind, GroupRule, Reach, group_rule};
use moesaic_spec::LayerSpec;

/// The rows of every rank for every expert. Ranks with equal rows form a class, so thousands of
/// equal ranks cost no more than one.
#[derive(Clone, Debug, PartialEq)]
pub struct RoutedRows {
    /// The tokens of each class's ranks.
    tokens: Vec<f64>,
    /// The rows by expert of each class's ranks.
    rows: Vec<Vec<f64>>,
    /// The class of each rank; empty where there is one.
    class: Vec<usize>,
    /// The experts of a token.
    top_k: usize,
    /// The expert groups that a token's choices follow from.
    limit: Option<Limit>,
}

/// The expert groups that a token's choices follow from.
#[derive(Clone, Debug, PartialEq)]
struct Limit {
    rule: GroupRule,
    /// The experts of a group.
    size: usize,
    /// The rows by group of each class's ranks, before a capacity drops rows or shadows keep
    /// some.
    rows: Vec<Vec<f64>>,
}

/// Impossible counts.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RoutingError {
    /// A rank has rows for another number of experts.
    #[error("rank {rank} has rows for {found} experts, the layer has {experts}")]
    Experts {
        /// The rank.
        rank: usize,
        /// The number of experts it has rows for.
        found: usize,
        /// The experts of the layer.
        experts: usize,
    },
    /// The counts are of another number of ranks.
    #[error("rows of {found} ranks, the job has {ranks}")]
    Ranks {
        /// The ranks with rows.
        found: usize,
        /// The ranks of the job.
        ranks: usize,
    },
    /// A rank has more rows than a call has.
    #[error("rank {rank} has {rows} rows, a call has {MOST_ROWS} at most")]
    Rows {
        /// The rank.
        rank: usize,
        /// The sum of its rows.
        rows: u128,
    },
    /// The exponent is not a skew.
    #[error("zipf={exponent}: an exponent is 0, where all experts are alike, or more")]
    Exponent {
        /// The requested exponent.
        exponent: String,
    },
}

/// The most rows of a rank: those of a call, whose assignments are below 2³¹.
const MOST_ROWS: u128 = (1 << 31) - 1;

impl RoutedRows {
    /// Returns equal rows for every expert.
    pub fn even(tokens: u64, experts: usize, top_k: usize) -> RoutedRows {
        let rows = tokens as f64 * top_k as f64 / experts as f64;
        RoutedRows::alike(tokens, vec![rows; experts], top_k)
    }

    /// Returns the expected rows where a token chooses the `i`th most popular expert with a
    /// probability proportional to `1 / i^exponent`, and no expert twice. Popular experts lie far
    /// apart, always in the same places.
    ///
    /// # Errors
    /// [`RoutingError::Exponent`].
    pub fn zipf(
        tokens: u64,
        experts: usize,
        top_k: usize,
        exponent: f64,
    ) -> Result<RoutedRows, RoutingError> {
        if !exponent.is_finite() || exponent < 0.0 {
            let exponent = exponent.to_string();
            return Err(RoutingError::Exponent { exponent });
        }
        let rows = zipf_shares(experts, top_k, exponent);
        let rows = rows.into_iter().map(|share| share * tokens as f64);
        Ok(RoutedRows::alike(tokens, rows.collect(), top_k))
    }

    /// Returns the expected rows of a layer, as [`zipf`](RoutedRows::zipf) has them. Where a token
    /// takes as many experts from each of several groups (`select = { per-group = n }`), the law
    /// is that of each group, so all groups have equally many rows.
    ///
    /// # Errors
    /// [`RoutingError::Exponent`].
    pub fn zipf_of(
        spec: &LayerSpec,
        tokens: u64,
        exponent: f64,
    ) -> Result<RoutedRows, RoutingError> {
        let (experts, top_k) = (spec.shape.experts, spec.shape.top_k);
        match group_rule(spec) {
            Some((GroupRule::OfEach(each), size)) if experts.is_multiple_of(size) => {
                let mut routing = RoutedRows::zipf(tokens, size, each, exponent)?;
                // One group's rows are those of all: tokens choose in each as if it were alone.
                routing.rows[0] = routing.rows[0].repeat(experts / size);
                routing.top_k = top_k;
                Ok(routing)
            }
            _ => RoutedRows::zipf(tokens, experts, top_k, exponent),
        }
    }

    /// Returns counted rows: those of each rank for each expert, and its tokens.
    ///
    /// # Errors
    /// [`RoutingError`] where ranks or experts do not match.
    pub fn counted(
        ranks: usize,
        experts: usize,
        top_k: usize,
        counts: &[Vec<u64>],
    ) -> Result<RoutedRows, RoutingError> {
        if counts.len() != ranks {
            let found = counts.len();
            return Err(RoutingError::Ranks { found, ranks });
        }
        let wrong = |(_, rows): &(usize, &Vec<u64>)| rows.len() != experts;
        if let Some((rank, rows)) = counts.iter().enumerate().find(wrong) {
            let found = rows.len();
            return Err(RoutingError::Experts {
                rank,
                found,
                experts,
            });
        }
        let all = |rows: &[u64]| rows.iter().map(|n| u128::from(*n)).sum::<u128>();
        let mut sums = counts.iter().map(|rows| all(rows)).enumerate();
        if let Some((rank, rows)) = sums.find(|(_, rows)| *rows > MOST_ROWS) {
            return Err(RoutingError::Rows { rank, rows });
        }
        let tokens = |rows: &Vec<u64>| rows.iter().sum::<u64>() as f64 / top_k.max(1) as f64;
        let alike = counts.windows(2).all(|pair| pair[0] == pair[1]);
        // One class for equal counts, which is what makes thousands of ranks cheap.
        let kept = if alike { &counts[..1] } else { counts };
        Ok(RoutedRows {
            tokens: kept.iter().map(tokens).collect(),
            rows: kept
                .iter()
                .map(|rows| rows.iter().map(|n| *n as f64).collect())
                .collect(),
            class: if alike {
                Vec::new()
            } else {
                (0..ranks).collect()
            },
            top_k,
            limit: None,
        })
    }

    /// Applies the expert groups of a layer's router.
    #[must_use]
    pub(crate) fn limited(mut self, spec: &LayerSpec) -> RoutedRows {
        self.limit = group_rule(spec).map(|(rule, size)| {
            let of = |rows: &Vec<f64>| rows.chunks(size).map(|of| of.iter().sum()).collect();
            Limit {
                rule,
                size,
                rows: self.rows.iter().map(of).collect(),
            }
        });
        self
    }

    /// Returns a node's view of the expert groups that a rank's tokens choose from. `rows` are
    /// the rank's rows for the node, by expert.
    pub(crate) fn reach(&self, rank: usize, rows: impl Iterator<Item = (usize, f64)>) -> Reach {
        let experts = self.rows(rank).len() as f64;
        // All choices of a token, before a capacity drops any.
        let all = self.tokens(rank) * self.top_k as f64;
        // Popularity in units of an average expert, as `GroupKind` counts.
        let mass = |rows: f64| experts * (rows / all.max(f64::MIN_POSITIVE)).min(1.0);
        let Some(Limit {
            rule,
            size,
            rows: groups,
        }) = &self.limit
        else {
            let here = mass(rows.map(|(_, rows)| rows).sum());
            return Reach::ungrouped(here, experts - here);
        };
        let groups = &groups[self.class_of(rank)];
        let mut here = vec![0.0; groups.len()];
        rows.for_each(|(expert, rows)| here[expert / size] += rows);
        let kind = |(rows, here): (&f64, f64)| GroupKind {
            groups: 1,
            here: mass(here),
            elsewhere: (mass(*rows) - mass(here)).max(0.0),
        };
        Reach::new(*rule, groups.iter().zip(here).map(kind))
    }

    /// Limits the rows of each rank for an expert.
    #[must_use]
    pub fn capped(mut self, most: f64) -> RoutedRows {
        let rows = self.rows.iter_mut().flatten();
        rows.for_each(|rows| *rows = rows.min(most));
        self
    }

    /// Removes the rows for some experts; the rest is exchanged.
    #[must_use]
    pub(crate) fn without(mut self, experts: &[usize]) -> RoutedRows {
        for rows in &mut self.rows {
            experts.iter().for_each(|expert| rows[*expert] = 0.0);
        }
        self
    }

    /// Returns whether all experts have equal rows, up to rounding.
    pub fn is_even(&self) -> bool {
        let even = |rows: &Vec<f64>| rows.iter().all(|n| (n - rows[0]).abs() <= 1.0);
        self.rows.iter().all(even)
    }

    /// Returns the tokens of the rank with the most.
    pub fn most_tokens(&self) -> f64 {
        self.tokens.iter().copied().fold(0.0, f64::max)
    }

    fn alike(tokens: u64, rows: Vec<f64>, top_k: usize) -> RoutedRows {
        RoutedRows {
            tokens: vec![tokens as f64],
            rows: vec![rows],
            class: Vec::new(),
            top_k,
            limit: None,
        }
    }

    /// Returns whether all ranks have equal rows.
    pub fn is_alike(&self) -> bool {
        self.class.is_empty()
    }

    /// Returns the rows of a rank by expert.
    pub fn rows(&self, rank: usize) -> &[f64] {
        &self.rows[self.class_of(rank)]
    }

    /// Returns the tokens of a rank.
    pub fn tokens(&self, rank: usize) -> f64 {
        self.tokens[self.class_of(rank)]
    }

    /// Returns the experts of a token.
    pub fn top_k(&self) -> usize {
        self.top_k
    }

    fn class_of(&self, rank: usize) -> usize {
        self.class.get(rank).copied().unwrap_or(0)
    }
}

/// Returns the expected rows of each expert for one token.
fn zipf_shares(experts: usize, top_k: usize, exponent: f64) -> Vec<f64> {
    let by_rank: Vec<f64> = (1..=experts).map(|i| (i as f64).powf(-exponent)).collect();
    // A token chooses no expert twice, so an expert gets at most one row of each.
    let shares = at_most_one(&by_rank, top_k.min(experts) as f64);
    let stride = apart(experts);
    let mut spread = vec![0.0; experts];
    for (i, share) in shares.into_iter().enumerate() {
        // Spread the popular experts, or a contiguous placement would put all of them on the
        // first ranks.
        spread[i * stride % experts] = share;
    }
    spread
}

/// Returns parts in proportion to `weights` that add up to `total`, none above one.
fn at_most_one(weights: &[f64], total: f64) -> Vec<f64> {
    let mut shares = vec![0.0; weights.len()];
    let mut full = 0;
    // Weights are in descending order, so full parts come first.
    loop {
        let rest: f64 = weights[full..].iter().sum();
        let left = total - full as f64;
        for (share, weight) in shares[full..].iter_mut().zip(&weights[full..]) {
            // Whatever full experts cannot take goes to the others in proportion.
            *share = left * weight / rest.max(f64::MIN_POSITIVE);
        }
        match shares.get(full) {
            Some(share) if *share > 1.0 => {
                shares[full] = 1.0;
                full += 1;
            }
            _ => return shares,
        }
    }
}

/// Returns the step that spreads experts of similar popularity over all positions: near the
/// golden section of their number, and coprime to it.
fn apart(experts: usize) -> usize {
    // Multiples of the golden section spread most evenly for any count.
    let near = (experts as f64 * 0.618_034).round() as usize;
    let fits = |step: &usize| gcd(*step, experts) == 1;
    (near.max(1)..).find(fits).unwrap_or(1)
}

fn gcd(a: usize, b: usize) -> usize {
    match b {
        0 => a,
        _ => gcd(b, a % b),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_lost_and_no_token_is_twice_at_an_expert() {
        for experts in [1, 2, 7, 8, 256] {
            for top_k in [1, 2, 8] {
                for exponent in [0.0, 0.5, 1.2, 3.0] {
                    let routing = RoutedRows::zipf(1000, experts, top_k, exponent).unwrap();
                    let rows = routing.rows(5);
                    let sum: f64 = rows.iter().sum();
                    let all = 1000.0 * top_k.min(experts) as f64;
                    assert!(
                        (sum / all - 1.0).abs() < 1e-9,
                        "{experts} {top_k} {exponent}"
                    );
                    assert!(rows.iter().all(|n| *n <= 1000.0 + 1e-6 && *n > 0.0));
                }
            }
        }
        let even = RoutedRows::zipf(100, 8, 2, 0.0).unwrap();
        assert_eq!(even, RoutedRows::even(100, 8, 2));
        assert!(RoutedRows::zipf(1, 8, 2, f64::NAN).is_err());
    }

    #[test]
    fn every_group_has_its_experts_of_a_token() {
        let spec = LayerSpec::from_toml(
            "shape = { model_dim = 8, hidden_dim = 8, experts = 12, top_k = 4 }
             router = { select = { per-group = 4 } }",
        );
        let spec = spec.unwrap();
        let routing = RoutedRows::zipf_of(&spec, 1000, 1.2).unwrap();
        let groups: Vec<f64> = routing.rows(0).chunks(3).map(|g| g.iter().sum()).collect();
        assert!(groups.iter().all(|rows| (rows - 1000.0).abs() < 1e-6));
        assert!(!routing.is_even() && routing.rows(0).iter().all(|n| *n <= 1000.0));
        assert_eq!((routing.top_k(), routing.tokens(0)), (4, 1000.0));
        // Without that rule some groups have more than others.
        let free = RoutedRows::zipf(1000, 12, 4, 1.2).unwrap();
        let first: f64 = free.rows(0)[..3].iter().sum();
        assert!((first - 1000.0).abs() > 100.0, "{first}");
    }

    #[test]
    fn no_expert_has_more_than_its_capacity() {
        let routing = RoutedRows::zipf(1000, 8, 2, 1.2).unwrap();
        let capped = routing.clone().capped(300.0);
        for (rows, capped) in routing.rows(0).iter().zip(capped.rows(0)) {
            assert_eq!(*capped, rows.min(300.0));
        }
        assert_eq!((capped.tokens(0), capped.most_tokens()), (1000.0, 1000.0));
    }

    #[test]
    fn counts_have_to_be_of_the_job() {
        let counted = |counts: &[Vec<u64>]| RoutedRows::counted(2, 3, 1, counts);
        let both = counted(&[vec![1, 2, 3], vec![0, 0, 0]]).unwrap();
        assert_eq!((both.tokens(0), both.tokens(1)), (6.0, 0.0));
        assert!(!both.is_alike() && counted(&[vec![1; 3], vec![1; 3]]).unwrap().is_alike());
        let huge = counted(&[vec![0; 3], vec![u64::MAX; 3]]).unwrap_err();
        assert!(
            huge.to_string()
                .starts_with("rank 1 has 55340232221128654845 rows")
        );
        let error = counted(&[vec![1; 3]]).unwrap_err().to_string();
        assert_eq!(error, "rows of 1 ranks, the job has 2");
        assert!(matches!(
            counted(&[vec![1; 3], vec![1; 4]]),
            Err(RoutingError::Experts { rank: 1, .. })
        ));
    }
}
