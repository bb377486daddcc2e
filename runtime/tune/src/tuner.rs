//! The choice for each key.

use crate::measured::{Measured, Times, median};
use crate::search::{Prediction, Space, neighbour, shortlist};
use crate::stored::Record;
use crate::{Calls, Key};
use moesaic_plan::Strategy;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;

/// How a choice is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Mode {
    /// By measurement: predictions say what is worth it, and without any Tutel's search does.
    #[default]
    Measure,
    /// By prediction alone: the same choice in every run.
    Predict,
}

/// Strategies that took longer by no more than this part may as well be faster,
pub const CLOSE: f64 = 0.1;
/// and so many of them are measured again.
const FINALISTS: usize = 3;
/// Of what is predicted so many are measured at most.
const CANDIDATES: usize = 6;

/// When a choice is made, and when it is made again.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// By what.
    pub mode: Mode,
    /// Measurements of a strategy, of which the median counts. One step more comes before
    /// them, since it may compile kernels.
    pub samples: usize,
    /// Measurements of the last three, where they are within [`CLOSE`] of the fastest; they
    /// are made in turns.
    pub finals: usize,
    /// A choice that was kept is given up for one that is faster by this share. The first
    /// choice for a key is the fastest.
    pub hysteresis: f64,
    /// Another choice is looked for when the median of the last steps differs by this share
    /// from what was measured,
    pub drift: f64,
    /// with so many last steps.
    pub window: usize,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            mode: Mode::Measure,
            samples: 3,
            finals: 9,
            hysteresis: 0.05,
            drift: 0.2,
            window: 8,
        }
    }
}

/// Something that was decided.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// Calls of [`Tuner::choose`] before it.
    pub step: u64,
    /// For what.
    pub key: Key,
    /// What.
    pub what: What,
}

/// What was decided.
#[derive(Clone, Debug, PartialEq)]
pub enum What {
    /// A strategy is tried.
    Tried(Strategy),
    /// A strategy is kept from now on.
    Kept {
        /// Which.
        strategy: Strategy,
        /// What a step takes; `None` where it was predicted and not measured.
        seconds: Option<f64>,
    },
    /// Steps take another time than they did, so strategies are tried again.
    Drifted {
        /// What a step took.
        was: f64,
        /// What it takes.
        is: f64,
    },
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Event { step, key, what } = self;
        let calls = match key.calls {
            Calls::Training => "",
            Calls::Evaluation => "evaluation, ",
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

/// Where candidates come from.
#[derive(Clone, Debug)]
enum Candidates {
    /// Of predictions those that are worth it; and, when these are measured, one next to the
    /// best, and the passes of two of them together, as far as there is room ([`CANDIDATES`]).
    Listed {
        list: Vec<Strategy>,
        predictions: Vec<Prediction>,
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
    /// Whether something was kept before, so that `current` is more than a guess.
    chosen: bool,
    /// The last one of which an event tells.
    told: Option<Strategy>,
    /// Whether steps have come to take another time since strategies were predicted.
    drifted: bool,
}

#[derive(Clone, Debug, Default)]
struct Kept {
    seconds: Option<f64>,
    recent: VecDeque<f64>,
}

/// Decides what strategy each step has. It is told what steps took; ranks whose tuners are
/// made alike and are told the same decide the same.
#[derive(Clone, Debug)]
pub struct Tuner {
    options: Options,
    space: Space,
    entries: BTreeMap<Key, Entry>,
    events: Vec<Event>,
    steps: u64,
}

impl Tuner {
    /// One that knows nothing yet. `space` is searched where nothing is predicted.
    pub fn new(options: Options, space: Space) -> Tuner {
        Tuner {
            options,
            space,
            entries: BTreeMap::new(),
            events: Vec::new(),
            steps: 0,
        }
    }

    /// What was decided, in order.
    pub fn events(&self) -> &[Event] {
        &self.events
    }

    /// Whether predictions are wanted before the next step: its key is new, or its steps have
    /// come to take another time.
    pub fn asks(&self, key: &Key) -> bool {
        self.entries.get(key).is_none_or(|entry| entry.drifted)
    }

    /// The strategy of the next step. `predict` is asked where [`Tuner::asks`] says so.
    pub fn choose(&mut self, key: &Key, predict: impl FnOnce() -> Vec<Prediction>) -> Strategy {
        if self.asks(key) {
            let entry = self.begin(key, predict());
            self.entries.insert(key.clone(), entry);
        }
        let entry = self.entries.get_mut(key).expect("it is there since above");
        let (chosen, what) = entry.choose(&self.space, &self.options);
        self.events.extend(what.map(|what| Event {
            step: self.steps,
            key: key.clone(),
            what,
        }));
        self.steps += 1;
        chosen
    }

    /// What a step with a strategy took: the same numbers on all ranks.
    pub fn observe(&mut self, key: &Key, strategy: Strategy, times: Times) {
        let Some(entry) = self.entries.get_mut(key) else {
            return;
        };
        let what = entry.observe(strategy, times, &self.options);
        self.events.extend(what.map(|what| Event {
            step: self.steps,
            key: key.clone(),
            what,
        }));
    }

    /// What is kept.
    pub fn records(&self) -> Vec<Record> {
        let record = |(key, entry): (&Key, &Entry)| {
            Some(Record {
                key: key.clone(),
                strategy: entry.current,
                seconds: entry.kept.as_ref()?.seconds,
            })
        };
        self.entries.iter().filter_map(record).collect()
    }

    /// Keeps what was kept before, where nothing is known here. It is looked at again when
    /// steps take another time.
    pub fn recall(&mut self, records: impl IntoIterator<Item = Record>) {
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
                told: None,
                drifted: false,
            };
            self.entries.entry(record.key).or_insert(entry);
        }
    }

    /// What the nearest key with fewer rows, or else more, has.
    fn current(&self, key: &Key) -> Strategy {
        let own = (&key.machine, &key.layer, key.calls);
        let alike = |other: &&Key| (&other.machine, &other.layer, other.calls) == own;
        let before = self.entries.range(..key).rev();
        let after = self.entries.range(key..);
        let mut near = before.chain(after).filter(|(other, _)| alike(other));
        near.next()
            .map_or(Strategy::default(), |(_, entry)| entry.current)
    }

    fn begin(&self, key: &Key, predictions: Vec<Prediction>) -> Entry {
        let best = Strategy::simplest(predictions.iter().map(|p| (p.strategy, p.seconds)));
        let before = self.entries.get(key);
        let mut entry = Entry {
            candidates: Candidates::Searched,
            measured: Measured::default(),
            current: before.map_or_else(|| self.current(key), |entry| entry.current),
            kept: None,
            chosen: before.is_some(),
            told: None,
            drifted: false,
        };
        match (self.options.mode, best) {
            (Mode::Predict, best) => {
                entry.current = best.unwrap_or_default();
                entry.kept = Some(Kept::default());
            }
            (Mode::Measure, Some(_)) => {
                entry.candidates = Candidates::Listed {
                    list: shortlist(&predictions, entry.current),
                    predictions,
                    next: None,
                };
            }
            (Mode::Measure, None) => {}
        }
        entry
    }
}

impl Entry {
    fn choose(&mut self, space: &Space, options: &Options) -> (Strategy, Option<What>) {
        if self.kept.is_none() {
            if let Some(next) = self.next(space, options) {
                let told = self.told.replace(next) == Some(next);
                return (next, (!told).then_some(What::Tried(next)));
            }
            self.settle(options);
            self.told = None; // also where what was tried last is kept
        }
        let told = self.told.replace(self.current) == Some(self.current);
        let kept = What::Kept {
            strategy: self.current,
            seconds: self.kept.as_ref().and_then(|kept| kept.seconds),
        };
        (self.current, (!told).then_some(kept))
    }

    fn next(&mut self, space: &Space, options: &Options) -> Option<Strategy> {
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
                let room = |s: &Strategy| tried(*s) || self.measured.len() < CANDIDATES;
                let mut beside = || {
                    let (fastest, _) = self.measured.best(wanted)?;
                    *next = next.or_else(|| neighbour(predictions, fastest, tried));
                    next.filter(missing)
                };
                let listed = list.iter().copied().find(missing);
                let suggested = || beside().filter(room).or_else(|| together().filter(room));
                listed.or_else(suggested)
            }
            Candidates::Searched => space.next(&self.measured, wanted).or_else(together),
        };
        next.or_else(|| self.measured.closest(options.finals, CLOSE, FINALISTS))
    }

    fn settle(&mut self, options: &Options) {
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

    fn observe(&mut self, strategy: Strategy, times: Times, options: &Options) -> Option<What> {
        let Some(kept) = &mut self.kept else {
            self.measured.add(strategy, times);
            return None;
        };
        if strategy != self.current || options.mode == Mode::Predict {
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
        // Nothing is kept until strategies are predicted again, however many steps are told of.
        self.kept = None;
        self.drifted = true;
        Some(What::Drifted { was, is })
    }
}

#[cfg(test)]
#[path = "tuner_tests.rs"]
mod tests;
