//! The choice for each key.

use crate::measured::{Measured, Times, median};
use crate::search::{PredictedTime, StrategySpace, adjacent_degree, shortlist};
use crate::stored::StoredChoice;
use crate::{CallKind, TunerKey};
use moesaic_plan::Strategy;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;

/// The method of choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum TunerMode {
    /// Measure the strategies that predictions recommend; without predictions, run Tutel's
    /// search.
    #[default]
    Measure,
    /// Use predictions alone: the same choice in every run.
    Predict,
}

/// The fraction by which a strategy may be slower and still be a finalist: measurements may be
/// off that far.
pub const CLOSE: f64 = 0.1;
/// The number of finalists, which are measured again.
const FINALISTS: usize = 3;
/// The most predicted strategies that are measured.
const CANDIDATES: usize = 6;

/// The rules for making a choice and for making it again.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TunerOptions {
    /// The method.
    pub mode: TunerMode,
    /// The number of measurements of a strategy, of which the median counts. One more step
    /// precedes them, because it may compile kernels.
    pub samples: usize,
    /// The number of measurements of each finalist within [`CLOSE`] of the fastest; finalists
    /// take turns.
    pub finals: usize,
    /// The fraction by which another strategy must be faster to replace a kept one. The first
    /// choice for a key is simply the fastest.
    pub hysteresis: f64,
    /// The fraction by which the median of the last steps must differ from the measured time to
    /// start a new search.
    pub drift: f64,
    /// The number of last steps.
    pub window: usize,
}

impl Default for TunerOptions {
    fn default() -> Self {
        TunerOptions {
            mode: TunerMode::Measure,
            samples: 3,
            finals: 9,
            hysteresis: 0.05,
            drift: 0.2,
            window: 8,
        }
    }
}

/// A decision.
#[derive(Clone, Debug, PartialEq)]
pub struct TunerDecision {
    /// The calls of [`Tuner::choose`] before it.
    pub step: u64,
    /// The key.
    pub key: TunerKey,
    /// The decision.
    pub what: What,
}

/// The content of a decision.
#[derive(Clone, Debug, PartialEq)]
pub enum What {
    /// The strategy is tried.
    Tried(Strategy),
    /// The strategy is kept from now on.
    Kept {
        /// The strategy.
        strategy: Strategy,
        /// The seconds of a step; `None` where they were predicted and not measured.
        seconds: Option<f64>,
    },
    /// The times of steps have changed, so strategies are tried again.
    Drifted {
        /// The former seconds of a step.
        was: f64,
        /// The current seconds of a step.
        is: f64,
    },
}

impl fmt::Display for TunerDecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TunerDecision { step, key, what } = self;
        let calls = match key.calls {
            CallKind::Training => "",
            CallKind::Evaluation => "evaluation, ",
        };
        write!(f, "step {step}, {calls}{:?}: ", key.rows)?;
        match what {
            What::Tried(strategy) => write!(f, "tries {strategy}"),
            What::Kept { strategy, seconds } => {
                write!(f, "keeps {strategy}")?;
                seconds.map_or(Ok(()), |s| write!(f, ", {:.3} ms a step", 1e3 * s))
            }
            What::Drifted { was, is } => {
                write!(f, "{:.3} ms a step were {:.3} ms", 1e3 * is, 1e3 * was)
            }
        }
    }
}

/// The source of candidates.
#[derive(Clone, Debug)]
enum Candidates {
    /// The shortlist of the predictions. Once these are measured, one strategy next to the best
    /// and one combination of two strategies' passes follow, up to [`CANDIDATES`].
    Listed {
        list: Vec<Strategy>,
        predictions: Vec<PredictedTime>,
        next: Option<Strategy>,
    },
    Searched,
}

#[derive(Clone, Debug)]
struct Entry {
    candidates: Candidates,
    measured: Measured,
    current: Strategy,
    kept: Option<Kept>,
    /// Whether a choice was kept before, so that `current` is more than a guess.
    chosen: bool,
    /// The last strategy that an event has reported.
    reported: Option<Strategy>,
    /// Whether times have drifted since strategies were predicted.
    drifted: bool,
}

#[derive(Clone, Debug, Default)]
struct Kept {
    seconds: Option<f64>,
    recent: VecDeque<f64>,
}

/// The decision on the strategy of each step, from the times of earlier steps. Tuners that are
/// made alike and observe the same numbers decide alike, so ranks need no exchange to agree.
#[derive(Clone, Debug)]
pub struct Tuner {
    options: TunerOptions,
    space: StrategySpace,
    entries: BTreeMap<TunerKey, Entry>,
    events: Vec<TunerDecision>,
    steps: u64,
}

impl Tuner {
    /// Returns a tuner without knowledge. It searches `space` where nothing is predicted.
    pub fn new(options: TunerOptions, space: StrategySpace) -> Tuner {
        Tuner {
            options,
            space,
            entries: BTreeMap::new(),
            events: Vec::new(),
            steps: 0,
        }
    }

    /// Returns the decisions in order.
    pub fn events(&self) -> &[TunerDecision] {
        &self.events
    }

    /// Returns whether it needs predictions for the next step: the key is new, or its times have
    /// drifted.
    pub fn asks(&self, key: &TunerKey) -> bool {
        self.entries.get(key).is_none_or(|entry| entry.drifted)
    }

    /// Returns the strategy of the next step. It calls `predict` if [`Tuner::asks`] is true.
    pub fn choose(
        &mut self,
        key: &TunerKey,
        predict: impl FnOnce() -> Vec<PredictedTime>,
    ) -> Strategy {
        if self.asks(key) {
            let entry = self.begin(key, predict());
            self.entries.insert(key.clone(), entry);
        }
        let entry = self.entries.get_mut(key).expect("it is there since above");
        let (chosen, what) = entry.choose(&self.space, &self.options);
        self.events.extend(what.map(|what| TunerDecision {
            step: self.steps,
            key: key.clone(),
            what,
        }));
        self.steps += 1;
        chosen
    }

    /// Records the time of a step with a strategy; pass the same numbers on all ranks.
    pub fn observe(&mut self, key: &TunerKey, strategy: Strategy, times: Times) {
        let Some(entry) = self.entries.get_mut(key) else {
            return;
        };
        let what = entry.observe(strategy, times, &self.options);
        self.events.extend(what.map(|what| TunerDecision {
            step: self.steps,
            key: key.clone(),
            what,
        }));
    }

    /// Returns the kept choices.
    pub fn records(&self) -> Vec<StoredChoice> {
        let record = |(key, entry): (&TunerKey, &Entry)| {
            Some(StoredChoice {
                key: key.clone(),
                strategy: entry.current,
                seconds: entry.kept.as_ref()?.seconds,
            })
        };
        self.entries.iter().filter_map(record).collect()
    }

    /// Adopts earlier choices for keys that have none here. They are reconsidered when times
    /// drift.
    pub fn recall(&mut self, records: impl IntoIterator<Item = StoredChoice>) {
        for record in records {
            let entry = Entry {
                candidates: Candidates::Searched,
                measured: Measured::default(),
                current: record.strategy,
                kept: Some(Kept {
                    seconds: record.seconds,
                    recent: VecDeque::new(),
                }),
                chosen: true,
                reported: None,
                drifted: false,
            };
            self.entries.entry(record.key).or_insert(entry);
        }
    }

    /// Returns the strategy of the nearest key with fewer rows, or else with more.
    fn current(&self, key: &TunerKey) -> Strategy {
        let own = (&key.machine, &key.layer, key.calls);
        let alike = |other: &&TunerKey| (&other.machine, &other.layer, other.calls) == own;
        let before = self.entries.range(..key).rev();
        let after = self.entries.range(key..);
        let mut near = before.chain(after).filter(|(other, _)| alike(other));
        near.next()
            .map_or(Strategy::default(), |(_, entry)| entry.current)
    }

    fn begin(&self, key: &TunerKey, predictions: Vec<PredictedTime>) -> Entry {
        let best = Strategy::simplest(predictions.iter().map(|p| (p.strategy, p.seconds)));
        let before = self.entries.get(key);
        let mut entry = Entry {
            candidates: Candidates::Searched,
            measured: Measured::default(),
            current: before.map_or_else(|| self.current(key), |entry| entry.current),
            kept: None,
            chosen: before.is_some(),
            reported: None,
            drifted: false,
        };
        match (self.options.mode, best) {
            (TunerMode::Predict, best) => {
                entry.current = best.unwrap_or_default();
                entry.kept = Some(Kept::default());
            }
            (TunerMode::Measure, Some(_)) => {
                entry.candidates = Candidates::Listed {
                    list: shortlist(&predictions, entry.current),
                    predictions,
                    next: None,
                };
            }
            (TunerMode::Measure, None) => {}
        }
        entry
    }
}

impl Entry {
    fn choose(
        &mut self,
        space: &StrategySpace,
        options: &TunerOptions,
    ) -> (Strategy, Option<What>) {
        if self.kept.is_none() {
            if let Some(next) = self.next(space, options) {
                let reported = self.reported.replace(next) == Some(next);
                return (next, (!reported).then_some(What::Tried(next)));
            }
            self.settle(options);
            self.reported = None; // also where what was tried last is kept
        }
        let reported = self.reported.replace(self.current) == Some(self.current);
        let kept = What::Kept {
            strategy: self.current,
            seconds: self.kept.as_ref().and_then(|kept| kept.seconds),
        };
        (self.current, (!reported).then_some(kept))
    }

    fn next(&mut self, space: &StrategySpace, options: &TunerOptions) -> Option<Strategy> {
        let wanted = options.samples;
        let together = || self.measured.together(wanted);
        let missing = |s: &Strategy| self.measured.seconds(*s, wanted).is_none();
        let next = match &mut self.candidates {
            Candidates::Listed {
                list,
                predictions,
                next,
            } => {
                let tried = |s: Strategy| self.measured.is_tried(s);
                let has_room = |s: &Strategy| tried(*s) || self.measured.len() < CANDIDATES;
                let mut adjacent = || {
                    let (fastest, _) = self.measured.best(wanted)?;
                    *next = next.or_else(|| adjacent_degree(predictions, fastest, tried));
                    next.filter(missing)
                };
                let listed = list.iter().copied().find(missing);
                let suggested = || {
                    adjacent()
                        .filter(has_room)
                        .or_else(|| together().filter(has_room))
                };
                listed.or_else(suggested)
            }
            Candidates::Searched => space.next(&self.measured, wanted).or_else(together),
        };
        next.or_else(|| self.measured.closest(options.finals, CLOSE, FINALISTS))
    }

    fn settle(&mut self, options: &TunerOptions) {
        let now = self.measured.seconds(self.current, options.samples);
        let best = self.measured.best(options.samples);
        let margin = if self.chosen { options.hysteresis } else { 0.0 };
        let better =
            best.filter(|(_, seconds)| now.is_none_or(|now| *seconds < now * (1.0 - margin)));
        self.chosen = true;
        if let Some((strategy, _)) = better {
            self.current = strategy;
        }
        self.kept = Some(Kept {
            seconds: better.map(|(_, seconds)| seconds).or(now),
            recent: VecDeque::new(),
        });
    }

    fn observe(
        &mut self,
        strategy: Strategy,
        times: Times,
        options: &TunerOptions,
    ) -> Option<What> {
        let Some(kept) = &mut self.kept else {
            self.measured.add(strategy, times);
            return None;
        };
        if strategy != self.current || options.mode == TunerMode::Predict {
            return None;
        }
        kept.recent.push_back(times.sum());
        if kept.recent.len() > options.window {
            kept.recent.pop_front();
        }
        let (was, is) = (
            kept.seconds?,
            median(kept.recent.iter().copied(), options.window)?,
        );
        if (is - was).abs() <= options.drift * was {
            return None;
        }
        // Nothing is kept until strategies are predicted again, however many more steps are
        // observed.
        self.kept = None;
        self.drifted = true;
        Some(What::Drifted { was, is })
    }
}

#[cfg(test)]
#[path = "tuner_tests.rs"]
mod tests;
