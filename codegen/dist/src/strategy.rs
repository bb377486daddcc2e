//! The strategy of a pass: the choices that may differ from call to call.

use crate::all_to_all::ALL_TO_ALLS;
use crate::comm_dtype::COMM_DTYPES;
use crate::{AllToAll, Both, CommDtype, Overlap, OverlapBy, Parallel};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The strategy of a pass. You may change it from call to call: no weight moves to another owner,
/// and results are the same up to the rounding of sums and of [`CommDtype`].
///
/// The text form lists each part that differs from the default:
/// `r=2,overlap_degree=4/2,overlap_by=peers,all_to_all=2dh-inter-first,comm_dtype=bf16/none,shadows=2`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Strategy {
    /// The adaptive parallelism degree, Tutel's `r`: the number of shards of its expert that a row
    /// goes to. Before a pass each rank gathers as many stored shards as make up one of these. 0:
    /// rows stay, and each rank gathers the weights of all experts. `None`: rows go to all stored
    /// shards, so no weight travels.
    pub adaptive_r: Option<usize>,
    /// The number of chunks in which rows are exchanged, so that experts multiply one chunk while
    /// the next is in flight.
    pub overlap_degree: Both<usize>,
    /// The rule by which rows are split into chunks.
    pub overlap_by: OverlapBy,
    /// The all-to-all algorithm of rows.
    pub all_to_all: AllToAll,
    /// The dtype of rows between nodes.
    pub comm_dtype: Both<CommDtype>,
    /// The most experts that every group of ranks holds for one call: FasterMoE's shadows, chosen
    /// by a model from the rows of all ranks ([`shadows`](crate::shadows)).
    pub shadows: usize,
}

impl Default for Strategy {
    /// Returns the default: all shards, one chunk, direct exchange, no cast, no shadows.
    fn default() -> Self {
        Strategy {
            adaptive_r: None,
            overlap_degree: Both::same(1),
            overlap_by: OverlapBy::Rows,
            all_to_all: AllToAll::Linear,
            comm_dtype: Both::same(CommDtype::Unchanged),
            shadows: 0,
        }
    }
}

/// The words of an option and their values.
trait Words: Copy + PartialEq {
    /// Returns each word with its value.
    fn all() -> impl Iterator<Item = (&'static str, Self)>;

    fn word(self) -> &'static str {
        let mut all = Self::all();
        all.find(|(_, value)| *value == self)
            .map_or("", |(word, _)| word)
    }

    fn read(text: &str) -> Result<Self, ParseStrategyError> {
        let found = Self::all().find(|(word, _)| *word == text);
        let words = || Self::all().map(|(word, _)| word).collect::<Vec<_>>();
        found
            .map(|(_, value)| value)
            .ok_or_else(|| ParseStrategyError::unknown(text, words().join(", ")))
    }
}

impl Words for OverlapBy {
    fn all() -> impl Iterator<Item = (&'static str, OverlapBy)> {
        [("rows", OverlapBy::Rows), ("peers", OverlapBy::Peers)].into_iter()
    }
}

impl Words for AllToAll {
    fn all() -> impl Iterator<Item = (&'static str, AllToAll)> {
        ALL_TO_ALLS.iter().map(|row| (row.name, row.all_to_all))
    }
}

impl Words for CommDtype {
    fn all() -> impl Iterator<Item = (&'static str, CommDtype)> {
        COMM_DTYPES.iter().map(|row| (row.name, row.comm_dtype))
    }
}

impl FromStr for AllToAll {
    type Err = ParseStrategyError;

    fn from_str(text: &str) -> Result<AllToAll, ParseStrategyError> {
        AllToAll::read(text)
    }
}

impl FromStr for CommDtype {
    type Err = ParseStrategyError;

    fn from_str(text: &str) -> Result<CommDtype, ParseStrategyError> {
        CommDtype::read(text)
    }
}

impl fmt::Display for OverlapBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

impl fmt::Display for AllToAll {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

impl fmt::Display for CommDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let default = Strategy::default();
        let mut parts = Vec::new();
        if let Some(adaptive_r) = self.adaptive_r {
            parts.push(format!("r={adaptive_r}"));
        }
        if self.overlap_degree != default.overlap_degree {
            parts.push(format!("overlap_degree={}", self.overlap_degree));
        }
        if self.overlap_by != default.overlap_by {
            parts.push(format!("overlap_by={}", self.overlap_by));
        }
        if self.all_to_all != default.all_to_all {
            parts.push(format!("all_to_all={}", self.all_to_all));
        }
        if self.comm_dtype != default.comm_dtype {
            parts.push(format!("comm_dtype={}", self.comm_dtype));
        }
        if self.shadows != default.shadows {
            parts.push(format!("shadows={}", self.shadows));
        }
        if parts.is_empty() {
            // An empty text would be no value of `--strategy`, and the text must be readable again.
            f.write_str("default")
        } else {
            f.write_str(&parts.join(","))
        }
    }
}

/// `a/b`, or one value for both.
fn both<T: Copy>(
    text: &str,
    read: impl Fn(&str) -> Result<T, ParseStrategyError>,
) -> Result<Both<T>, ParseStrategyError> {
    match text.split_once('/') {
        None => read(text).map(Both::same),
        Some((forward, backward)) => Ok(Both {
            forward: read(forward)?,
            backward: read(backward)?,
        }),
    }
}

fn number(text: &str) -> Result<usize, ParseStrategyError> {
    text.parse().map_err(|_| ParseStrategyError::NotWhole {
        word: text.to_string(),
    })
}

impl FromStr for Strategy {
    type Err = ParseStrategyError;

    fn from_str(text: &str) -> Result<Strategy, ParseStrategyError> {
        let mut strategy = Strategy::default();
        let mut seen = Vec::new();
        if text == "default" {
            return Ok(strategy);
        }
        for part in text.split(',') {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            let (name, value) = (name.trim(), value.trim());
            // Taking the last one would hide which of the two a run had.
            if seen.contains(&name) {
                return Err(ParseStrategyError::Twice {
                    name: name.to_string(),
                });
            }
            seen.push(name);
            match name {
                "r" => strategy.adaptive_r = Some(number(value)?),
                "overlap_degree" => strategy.overlap_degree = both(value, number)?,
                "overlap_by" => strategy.overlap_by = OverlapBy::read(value)?,
                "all_to_all" => strategy.all_to_all = AllToAll::read(value)?,
                "comm_dtype" => strategy.comm_dtype = both(value, CommDtype::read)?,
                "shadows" => strategy.shadows = number(value)?,
                other => {
                    let names = "r, overlap_degree, overlap_by, all_to_all, comm_dtype, shadows";
                    return Err(ParseStrategyError::unknown(other, names.to_string()));
                }
            }
        }
        Ok(strategy)
    }
}

/// A text that is no strategy, or none of its parts.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParseStrategyError {
    /// A name or a word that does not exist.
    #[error("`{word}` is none of {known}")]
    Unknown {
        /// The word in the text.
        word: String,
        /// The words that exist.
        known: String,
    },
    /// A value that is not a whole number.
    #[error("`{word}` is not a whole number")]
    NotWhole {
        /// The word in the text.
        word: String,
    },
    /// A part that is there twice.
    #[error("`{name}` is given twice")]
    Twice {
        /// The part's name.
        name: String,
    },
}

impl ParseStrategyError {
    fn unknown(word: &str, known: String) -> ParseStrategyError {
        ParseStrategyError::Unknown {
            word: word.to_string(),
            known,
        }
    }
}

/// The largest number of chunks. Tutel's authors report that more hardly help.
pub const MAX_CHUNKS: usize = 64;

/// The relative difference below which two predictions count as equal.
const ALIKE: f64 = 0.02;

/// The properties of a strategy that decide the kernels and steps of a rank. Strategies that agree
/// on them share a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PlanForm {
    /// The adaptive parallelism degree; 0 means that rows stay.
    pub adaptive_r: usize,
    /// The most experts with shadows.
    pub shadows: usize,
    /// Whether a rank returns one row for each token of another rank, the sum of what its experts
    /// computed. Experts then weight their outputs, which takes other kernels than leaving it to
    /// `combine`.
    pub sums: bool,
}

impl Strategy {
    /// Returns the simplest of the strategies within 2 % of the fastest: one hop before two, two
    /// before two at once; then fewer chunks. The costs that a prediction leaves out grow with
    /// complexity. `timed` yields strategies with their seconds.
    pub fn simplest(timed: impl Iterator<Item = (Strategy, f64)> + Clone) -> Option<Strategy> {
        let least = timed.clone().map(|(_, seconds)| seconds);
        let least = least.fold(f64::INFINITY, f64::min);
        let alike = timed.filter(|(_, seconds)| *seconds <= least * (1.0 + ALIKE));
        alike.map(|(strategy, _)| strategy).min_by_key(|strategy| {
            let chunks = strategy.overlap_degree.forward + strategy.overlap_degree.backward;
            // The strategy itself comes last, so that no two are equal: every rank must find the
            // same one.
            (strategy.all_to_all.row().hops(), chunks, *strategy)
        })
    }

    /// Returns the parts that both passes share; chunks and communication dtype are the default's.
    #[must_use]
    pub fn shared(self) -> Strategy {
        let Strategy {
            overlap_degree,
            comm_dtype,
            ..
        } = Strategy::default();
        Strategy {
            overlap_degree,
            comm_dtype,
            ..self
        }
    }

    /// Returns the strategy that is this one in forward and `other` in backward. The two must agree
    /// in the parts that both passes share.
    #[must_use]
    pub fn with_backward_of(self, other: Strategy) -> Strategy {
        Strategy {
            overlap_degree: Both {
                forward: self.overlap_degree.forward,
                backward: other.overlap_degree.backward,
            },
            comm_dtype: Both {
                forward: self.comm_dtype.forward,
                backward: other.comm_dtype.backward,
            },
            ..self
        }
    }

    /// Returns the overlap of the exchanges.
    #[doc(hidden)]
    pub fn chunks(&self) -> Overlap {
        Overlap {
            degree: self.overlap_degree,
            by: self.overlap_by,
        }
    }

    /// Returns the adaptive parallelism degree on a mesh; 0 means that rows stay.
    pub fn adaptive_r(&self, mesh: &Parallel) -> usize {
        self.adaptive_r.unwrap_or(mesh.expert_tp)
    }

    /// Returns the plan that the strategy asks for.
    #[doc(hidden)]
    pub fn plan_form(&self, mesh: &Parallel) -> PlanForm {
        let adaptive_r = self.adaptive_r(mesh);
        PlanForm {
            adaptive_r,
            shadows: self.shadows,
            sums: self.all_to_all.row().deduplicates_ranks() && adaptive_r > 0,
        }
    }

    /// Returns whether weights of experts travel; if so, they must not be packed.
    pub fn gathers(&self, mesh: &Parallel) -> bool {
        self.adaptive_r(mesh) != mesh.expert_tp || self.shadows > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StrategyError;

    #[test]
    fn of_equally_good_ones_the_simplest_is_taken() {
        let of = |list: &[(&str, f64)]| {
            let each = list.iter().map(|(text, seconds)| {
                let strategy: Strategy = text.parse().unwrap();
                (strategy, *seconds)
            });
            let each: Vec<(Strategy, f64)> = each.collect();
            Strategy::simplest(each.into_iter()).map(|found| found.to_string())
        };
        let all = [
            ("all_to_all=2dh-concurrent", 1.0),
            ("overlap_degree=8", 1.01),
            ("overlap_degree=2", 1.02),
            ("default", 1.05),
        ];
        assert_eq!(of(&all).unwrap(), "overlap_degree=2");
        assert_eq!(of(&all[..1]).unwrap(), "all_to_all=2dh-concurrent");
        assert_eq!(of(&[]), None);
    }

    #[test]
    fn passes_of_two_strategies_make_one() {
        let [a, b] = [
            "r=2,overlap_degree=4,overlap_by=peers,comm_dtype=fp8",
            "r=2,overlap_degree=2,overlap_by=peers",
        ]
        .map(|text| text.parse::<Strategy>().unwrap());
        assert_eq!(a.shared(), b.shared());
        assert_eq!(a.shared().to_string(), "r=2,overlap_by=peers");
        let both = a.with_backward_of(b).to_string();
        assert_eq!(
            both,
            "r=2,overlap_degree=4/2,overlap_by=peers,comm_dtype=fp8/none"
        );
    }

    #[test]
    fn text_reads_back() {
        for text in [
            "default",
            "r=0",
            "r=2,overlap_degree=4/2,all_to_all=2dh-inter-first,comm_dtype=bf16/none",
            "overlap_degree=8",
            "overlap_degree=4/2,overlap_by=peers",
            "all_to_all=dedup,comm_dtype=fp8",
            "overlap_degree=2,shadows=3",
        ] {
            let strategy: Strategy = text.parse().unwrap();
            assert_eq!(strategy.to_string(), text);
        }
        for wrong in [
            "",
            "adaptive_r",
            "r=x",
            "all_to_all=rings",
            "overlap_by=tokens",
            "comm_dtype=f32",
            "overlap_degree=1/",
            "adaptive_r=2",
            "r=1,r=2",
        ] {
            assert!(wrong.parse::<Strategy>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_cannot_be_says_what_can() {
        let mesh = Parallel {
            expert_tp: 4,
            ..Parallel::default()
        };
        let check = |text: &str| text.parse::<Strategy>().unwrap().check(&mesh);
        assert_eq!(
            check("r=3"),
            Err(StrategyError::AdaptiveMesh {
                adaptive_r: 3,
                expert_tp: 4
            })
        );
        assert_eq!(
            check("overlap_degree=0"),
            Err(StrategyError::Degree { overlap_degree: 0 })
        );
        let error = check("overlap_degree=9/8").unwrap_err().to_string();
        assert!(
            error.contains("are 72 chunks that both are made of"),
            "{error}"
        );
        assert_eq!(check("overlap_degree=64/8"), Ok(()));
        assert_eq!(check("default"), Ok(()));
        let error = check("shadows=2").unwrap_err().to_string();
        assert!(error.contains("a layer in 4 shards"), "{error}");
        assert_eq!(check("r=4"), Ok(()));
        assert_eq!(check("comm_dtype=fp8/bf16"), Ok(()));
        let error = check("all_to_all=dedup-ranks,comm_dtype=none/bf16").unwrap_err();
        let error = error.to_string();
        assert!(error.contains("so comm_dtype=none/bf16 would"), "{error}");
        assert_eq!(check("all_to_all=dedup-ranks,overlap_degree=2"), Ok(()));
        assert_eq!(
            check("r=2,overlap_degree=4/2,all_to_all=dedup,comm_dtype=fp8/f16"),
            Ok(())
        );
    }
}
