//! How ranks carry out a pass of a layer: what may differ from call to call.

use super::{Cut, Parallel, Pieces, Ways};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// How ranks carry out a pass. It may differ from call to call: no weight moves to another
/// owner, and results are the same up to the rounding of sums and of [`Wire`].
///
/// As text, each part that is not the default:
/// `ways=2,degree=4/2,cut=ranks,route=inter-first,wire=bf16/exact,shadows=2`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Strategy {
    /// To how many slices of its expert a row goes: the `r` of Tutel. Before a pass ranks
    /// gather as many slices of the weights as make up a slice of that size. 0: rows stay,
    /// and each rank gathers the weights of all experts. `None`: to all slices that the
    /// mesh has, so that no weight travels.
    pub ways: Option<usize>,
    /// In how many pieces rows travel, so that one piece is multiplied while the next one
    /// is under way.
    pub degree: Both<usize>,
    /// What makes a piece.
    pub cut: Cut,
    /// How rows go from rank to rank.
    pub route: Route,
    /// What rows are while they are between nodes.
    pub wire: Both<Wire>,
    /// The most experts that every group of ranks has for one call: FasterMoE's shadows,
    /// which a model chooses by the rows of all ranks ([`shadows`](crate::shadows)).
    pub shadows: usize,
}

impl Default for Strategy {
    /// All slices, one piece, directly, as they are, no shadows.
    fn default() -> Self {
        Strategy {
            ways: None,
            degree: Both::same(1),
            cut: Cut::Rows,
            route: Route::Linear,
            wire: Both::same(Wire::Exact),
            shadows: 0,
        }
    }
}

/// One thing in forward, and one in backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Both<T> {
    /// In forward.
    pub forward: T,
    /// In backward.
    pub backward: T,
}

impl<T: Copy> Both<T> {
    /// The same in both.
    pub fn same(value: T) -> Both<T> {
        Both {
            forward: value,
            backward: value,
        }
    }
}

/// How rows go from rank to rank. What arrives is the same, but for sums of
/// [`Route::Once`].
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum Route {
    /// Everybody sends to everybody.
    #[default]
    Linear,
    /// In two dimensions (2DH): inside nodes first, then between ranks of equal place. Rows
    /// come back by the same ranks, so the other way round.
    IntraFirst,
    /// In two dimensions: between ranks of equal place first, then inside nodes, and back.
    InterFirst,
    /// One half of the bytes each of these ways, so that messages inside nodes and those
    /// between nodes travel side by side.
    Concurrent,
    /// A token crosses to a node once, whatever the number of its experts there, and comes
    /// back as one partial sum: gradients of rows, and rows whose weights experts have
    /// multiplied. Where `combine` does that, one row comes back for each expert.
    Once,
}

impl Route {
    /// How much there is to it: hops, of each way.
    fn hops(self) -> usize {
        match self {
            Route::Linear => 1,
            Route::IntraFirst | Route::InterFirst | Route::Once => 2,
            Route::Concurrent => 4,
        }
    }
}

/// What rows are while they are between nodes.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Wire {
    /// What they are in memory.
    #[default]
    Exact,
    /// IEEE half precision; what is too large is the largest there is, and counted.
    F16,
    /// bfloat16.
    Bf16,
    /// FP8 E4M3 with an f32 scale for each 128 numbers of a row.
    Fp8,
}

/// Words of text, and what they mean.
trait Words: Copy + PartialEq + 'static {
    const ALL: &'static [(&'static str, Self)];

    fn word(self) -> &'static str {
        let mut all = Self::ALL.iter();
        all.find(|(_, value)| *value == self)
            .map_or("", |(word, _)| word)
    }

    fn read(text: &str) -> Result<Self, String> {
        let found = Self::ALL.iter().find(|(word, _)| *word == text);
        let words = || Self::ALL.iter().map(|(word, _)| *word).collect::<Vec<_>>();
        found
            .map(|(_, value)| *value)
            .ok_or_else(|| format!("`{text}` is none of {}", words().join(", ")))
    }
}

impl Words for Cut {
    const ALL: &'static [(&'static str, Cut)] = &[("rows", Cut::Rows), ("ranks", Cut::Ranks)];
}

impl Words for Route {
    const ALL: &'static [(&'static str, Route)] = &[
        ("linear", Route::Linear),
        ("intra-first", Route::IntraFirst),
        ("inter-first", Route::InterFirst),
        ("concurrent", Route::Concurrent),
        ("once", Route::Once),
    ];
}

impl Words for Wire {
    const ALL: &'static [(&'static str, Wire)] = &[
        ("exact", Wire::Exact),
        ("f16", Wire::F16),
        ("bf16", Wire::Bf16),
        ("fp8", Wire::Fp8),
    ];
}

impl FromStr for Route {
    type Err = String;

    fn from_str(text: &str) -> Result<Route, String> {
        Route::read(text)
    }
}

impl FromStr for Wire {
    type Err = String;

    fn from_str(text: &str) -> Result<Wire, String> {
        Wire::read(text)
    }
}

impl fmt::Display for Cut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

impl fmt::Display for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

impl<T: fmt::Display + PartialEq> fmt::Display for Both<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.forward == self.backward {
            write!(f, "{}", self.forward)
        } else {
            write!(f, "{}/{}", self.forward, self.backward)
        }
    }
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let default = Strategy::default();
        let mut parts = Vec::new();
        if let Some(ways) = self.ways {
            parts.push(format!("ways={ways}"));
        }
        if self.degree != default.degree {
            parts.push(format!("degree={}", self.degree));
        }
        if self.cut != default.cut {
            parts.push(format!("cut={}", self.cut));
        }
        if self.route != default.route {
            parts.push(format!("route={}", self.route));
        }
        if self.wire != default.wire {
            parts.push(format!("wire={}", self.wire));
        }
        if self.shadows != default.shadows {
            parts.push(format!("shadows={}", self.shadows));
        }
        if parts.is_empty() {
            f.write_str("default")
        } else {
            f.write_str(&parts.join(","))
        }
    }
}

/// `a/b`, or one value for both.
fn both<T: Copy>(text: &str, read: impl Fn(&str) -> Result<T, String>) -> Result<Both<T>, String> {
    match text.split_once('/') {
        None => read(text).map(Both::same),
        Some((forward, backward)) => Ok(Both {
            forward: read(forward)?,
            backward: read(backward)?,
        }),
    }
}

fn number(text: &str) -> Result<usize, String> {
    text.parse()
        .map_err(|_| format!("`{text}` is not a whole number"))
}

impl FromStr for Strategy {
    type Err = String;

    fn from_str(text: &str) -> Result<Strategy, String> {
        let mut strategy = Strategy::default();
        let mut seen = Vec::new();
        if text == "default" {
            return Ok(strategy);
        }
        for part in text.split(',') {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            let (name, value) = (name.trim(), value.trim());
            if seen.contains(&name) {
                return Err(format!("`{name}` is there twice"));
            }
            seen.push(name);
            match name {
                "ways" => strategy.ways = Some(number(value)?),
                "degree" => strategy.degree = both(value, number)?,
                "cut" => strategy.cut = Cut::read(value)?,
                "route" => strategy.route = Route::read(value)?,
                "wire" => strategy.wire = both(value, Wire::read)?,
                "shadows" => strategy.shadows = number(value)?,
                other => {
                    let names = "ways, degree, cut, route, wire, shadows";
                    return Err(format!("`{other}` is none of {names}"));
                }
            }
        }
        Ok(strategy)
    }
}

/// A strategy that a mesh cannot have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StrategyError {
    /// A number of ways that slices do not divide into.
    #[error(
        "rows cannot go to {ways} of {shards} slices; 0, where rows stay and weights are \
         gathered, or a divisor of {shards}"
    )]
    Ways {
        /// As asked for.
        ways: usize,
        /// Of the mesh.
        shards: usize,
    },
    /// Weights as other ranks cannot gather them.
    #[error(
        "experts' weights are packed for a CPU, and other ranks cannot gather them so, as \
         `{strategy}` asks; make the layer on `Mesh::for_any_ways`"
    )]
    Packed {
        /// As asked for.
        strategy: Strategy,
    },
    /// Rows in no pieces, or in too many.
    #[error("rows cannot travel in {degree} pieces; from 1 to {MOST_PIECES}")]
    Degree {
        /// As asked for.
        degree: usize,
    },
    /// A route that the nodes of a group do not allow.
    #[error(
        "route={route} needs nodes with equally many ranks, one node's after the other's, but \
         {reason}; start ranks so, or take route=linear"
    )]
    Nodes {
        /// As asked for.
        route: Route,
        /// How ranks lie.
        reason: String,
    },
    /// Shadows of experts that are in slices, or where rows stay.
    #[error(
        "shadows={shadows} needs whole experts that rows go to, and a layer in {shards} slices \
         with rows to {ways} of them has none; make a mesh with shards=1 and leave out `ways`, or \
         take shadows=0"
    )]
    Shadows {
        /// As asked for.
        shadows: usize,
        /// Of the mesh.
        shards: usize,
        /// To how many of them rows go.
        ways: usize,
    },
    /// Pieces of forward and of backward that do not fit each other.
    #[error(
        "{forward} pieces in forward and {backward} in backward are {pieces} pieces that both are \
         made of, and there may be {MOST_PIECES}; choose two of which one divides the other"
    )]
    Degrees {
        /// As asked for.
        forward: usize,
        /// As asked for.
        backward: usize,
        /// How many these are ([`Pieces::common`]).
        pieces: usize,
    },
}

/// More pieces hardly help, as Tutel's authors report.
pub const MOST_PIECES: usize = 64;

/// Predictions that differ by no more than this are as good as equal.
const ALIKE: f64 = 0.02;

impl Strategy {
    /// The simplest of those that take hardly longer than the fastest (2 %): rows in one hop
    /// before two, and those before two ways at once; then fewer pieces. What a prediction
    /// leaves out makes what is complicated slower. `timed`: strategies and what they take.
    pub fn simplest(timed: impl Iterator<Item = (Strategy, f64)> + Clone) -> Option<Strategy> {
        let least = timed.clone().map(|(_, seconds)| seconds);
        let least = least.fold(f64::INFINITY, f64::min);
        let alike = timed.filter(|(_, seconds)| *seconds <= least * (1.0 + ALIKE));
        alike.map(|(strategy, _)| strategy).min_by_key(|strategy| {
            let pieces = strategy.degree.forward + strategy.degree.backward;
            (strategy.route.hops(), pieces, *strategy)
        })
    }

    /// What both passes have in common; pieces and wire are the default's.
    #[must_use]
    pub fn shared(self) -> Strategy {
        let Strategy { degree, wire, .. } = Strategy::default();
        Strategy {
            degree,
            wire,
            ..self
        }
    }

    /// Forward as this one, backward as another that has the same in common.
    #[must_use]
    pub fn with_backward_of(self, other: Strategy) -> Strategy {
        Strategy {
            degree: Both {
                forward: self.degree.forward,
                backward: other.degree.backward,
            },
            wire: Both {
                forward: self.wire.forward,
                backward: other.wire.backward,
            },
            ..self
        }
    }

    /// The pieces that rows travel in.
    pub fn pieces(&self) -> Pieces {
        let (degree, cut) = (self.degree, self.cut);
        Pieces { degree, cut }
    }

    /// To how many slices of its expert a row goes in this mesh; 0: rows stay.
    pub fn ways(&self, mesh: &Parallel) -> usize {
        self.ways.unwrap_or(mesh.shards)
    }

    /// Whether weights of experts travel: they must not be packed then.
    pub fn gathers(&self, mesh: &Parallel) -> bool {
        self.ways(mesh) != mesh.shards || self.shadows > 0
    }

    /// Whether ranks of a mesh can do so.
    ///
    /// # Errors
    /// [`StrategyError`] says what is possible.
    pub fn check(&self, mesh: &Parallel) -> Result<(), StrategyError> {
        Ways::new(*mesh, self.ways(mesh))?.shadowing(self.shadows)?;
        let degrees = [self.degree.forward, self.degree.backward];
        let wrong = degrees.iter().find(|n| !(1..=MOST_PIECES).contains(*n));
        if let Some(&degree) = wrong {
            return Err(StrategyError::Degree { degree });
        }
        let Both { forward, backward } = self.degree;
        let pieces = self.pieces().common();
        if pieces > MOST_PIECES {
            return Err(StrategyError::Degrees {
                forward,
                backward,
                pieces,
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            ("route=concurrent", 1.0),
            ("degree=8", 1.01),
            ("degree=2", 1.02),
            ("default", 1.05),
        ];
        assert_eq!(of(&all).unwrap(), "degree=2");
        assert_eq!(of(&all[..1]).unwrap(), "route=concurrent");
        assert_eq!(of(&[]), None);
    }

    #[test]
    fn passes_of_two_strategies_make_one() {
        let [a, b] = [
            "ways=2,degree=4,cut=ranks,wire=fp8",
            "ways=2,degree=2,cut=ranks",
        ]
        .map(|text| text.parse::<Strategy>().unwrap());
        assert_eq!(a.shared(), b.shared());
        assert_eq!(a.shared().to_string(), "ways=2,cut=ranks");
        let both = a.with_backward_of(b).to_string();
        assert_eq!(both, "ways=2,degree=4/2,cut=ranks,wire=fp8/exact");
    }

    #[test]
    fn text_reads_back() {
        for text in [
            "default",
            "ways=0",
            "ways=2,degree=4/2,route=inter-first,wire=bf16/exact",
            "degree=8",
            "degree=4/2,cut=ranks",
            "route=once,wire=fp8",
            "degree=2,shadows=3",
        ] {
            let strategy: Strategy = text.parse().unwrap();
            assert_eq!(strategy.to_string(), text);
        }
        for wrong in [
            "",
            "ways",
            "ways=x",
            "route=ring",
            "cut=tokens",
            "wire=f32",
            "degree=1/",
            "r=2",
            "ways=1,ways=2",
        ] {
            assert!(wrong.parse::<Strategy>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_cannot_be_says_what_can() {
        let mesh = Parallel {
            shards: 4,
            ..Parallel::default()
        };
        let check = |text: &str| text.parse::<Strategy>().unwrap().check(&mesh);
        assert_eq!(
            check("ways=3"),
            Err(StrategyError::Ways { ways: 3, shards: 4 })
        );
        assert_eq!(check("degree=0"), Err(StrategyError::Degree { degree: 0 }));
        let error = check("degree=9/8").unwrap_err().to_string();
        assert!(
            error.contains("are 72 pieces that both are made of"),
            "{error}"
        );
        assert_eq!(check("degree=64/8"), Ok(()));
        assert_eq!(check("default"), Ok(()));
        let error = check("shadows=2").unwrap_err().to_string();
        assert!(error.contains("a layer in 4 slices"), "{error}");
        assert_eq!(check("ways=4"), Ok(()));
        assert_eq!(check("wire=fp8/bf16"), Ok(()));
        assert_eq!(check("ways=2,degree=4/2,route=once,wire=fp8/f16"), Ok(()));
    }
}
