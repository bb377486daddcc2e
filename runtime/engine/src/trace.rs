//! Traces: when launches ran and exchanges were in flight.

use moesaic_plan::Chunk;
use serde_json::{Value, json};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// A lane of a trace: activities that run one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Lane {
    /// Launches.
    Compute,
    /// Exchanges between ranks.
    Exchange,
}

impl Lane {
    /// Returns the name of the lane in a trace.
    pub fn name(self) -> &'static str {
        match self {
            Lane::Compute => "compute",
            Lane::Exchange => "exchange",
        }
    }
}

/// An activity that begins and ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Activity {
    /// The lane.
    pub lane: Lane,
    /// The symbol of a kernel entry, or the name of an exchange.
    pub name: String,
    /// The chunk of rows, where rows come in chunks.
    pub chunk: Option<Chunk>,
    /// For a launch the bytes of the tensors that it names; for an exchange the bytes that this
    /// rank sends to others, with those that it passes on.
    pub bytes: u64,
}

/// A recorder of a layer's activities. The thread that makes the call reports each in the order in
/// which it begins, and waits for the recorder.
pub trait Recorder: Send + Sync {
    /// Reports that an activity begins now.
    fn begins(&self, activity: &Activity) {
        let _ = activity;
    }

    /// Reports the interval of an activity. For an exchange the report may come long after its end.
    fn ended(&self, activity: &Activity, begin: Instant, end: Instant);
}

/// An activity that has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// The activity.
    pub activity: Activity,
    /// The beginning.
    pub begin: Instant,
    /// The end.
    pub end: Instant,
}

/// A recorder that keeps all, for Chrome's trace viewer and Perfetto.
#[derive(Debug)]
pub struct Trace {
    /// One moment on two clocks: the system clock is not steady, and the monotonic clock of one
    /// process means nothing to others.
    origin: (Instant, SystemTime),
    recorded: Mutex<Vec<Recorded>>,
}

impl Default for Trace {
    fn default() -> Trace {
        Trace {
            origin: (Instant::now(), SystemTime::now()),
            recorded: Mutex::default(),
        }
    }
}

impl Recorder for Trace {
    fn ended(&self, activity: &Activity, begin: Instant, end: Instant) {
        let activity = activity.clone();
        self.lock().push(Recorded {
            activity,
            begin,
            end,
        });
    }
}

impl Trace {
    /// Returns the activities that have ended, in the order in which that was noticed.
    pub fn recorded(&self) -> Vec<Recorded> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Recorded>> {
        self.recorded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the events of a rank as entries of `traceEvents`: launches one after the other,
    /// exchanges as events that may overlap. Times are microseconds since 1970, so you can merge
    /// traces of several processes on one machine.
    pub fn events(&self, rank: usize) -> Vec<Value> {
        let named = |what: &str, lane: usize, name: &str| json!({ "ph": "M", "name": what, "pid": rank, "tid": lane, "args": { "name": name } });
        let mut events = vec![named("process_name", 0, &format!("rank {rank}"))];
        for lane in [Lane::Compute, Lane::Exchange] {
            events.push(named("thread_name", lane as usize, lane.name()));
        }
        for (id, recorded) in self.recorded().iter().enumerate() {
            events.extend(self.events_of(recorded, rank, id));
        }
        events
    }

    fn events_of(&self, recorded: &Recorded, rank: usize, id: usize) -> Vec<Value> {
        let Activity {
            lane,
            name,
            chunk,
            bytes,
        } = &recorded.activity;
        let [begin, end] = [recorded.begin, recorded.end].map(|time| self.micros(time));
        let chunk = chunk.map(|chunk| chunk.to_string());
        let event = |phase: &str, at: f64| {
            json!({
                "ph": phase, "name": name, "cat": lane.name(), "pid": rank, "tid": *lane as usize,
                "ts": at, "args": { "chunk": chunk, "bytes": bytes },
            })
        };
        match lane {
            Lane::Compute => {
                let mut whole = event("X", begin);
                whole["dur"] = json!(end - begin);
                vec![whole]
            }
            Lane::Exchange => {
                // A complete event (`X`) must nest with the others of its thread, and exchanges of
                // chunks overlap without nesting, so each is a pair of asynchronous events.
                let mut both = vec![event("b", begin), event("e", end)];
                for event in &mut both {
                    event["id"] = json!(format!("{rank}.{id}"));
                }
                both
            }
        }
    }

    fn micros(&self, time: Instant) -> f64 {
        let (instant, system) = self.origin;
        let origin = system.duration_since(UNIX_EPOCH).unwrap_or_default();
        // An `Instant` may lie on either side of the origin and cannot be negative. Microseconds
        // since 1970 leave a quarter of a microsecond of an f64.
        let after = time.saturating_duration_since(instant).as_secs_f64();
        let before = instant.saturating_duration_since(time).as_secs_f64();
        origin.as_secs_f64() * 1e6 + (after - before) * 1e6
    }
}

/// Returns the events of one or more ranks as a trace file.
pub fn chrome_trace(events: Vec<Value>) -> Value {
    let starts = events.iter().filter_map(|event| event["ts"].as_f64());
    // Viewers show the distance from zero, which would be 50 years.
    let first = starts.fold(f64::INFINITY, f64::min);
    let since = |mut event: Value| {
        if let Some(at) = event["ts"].as_f64() {
            event["ts"] = json!(at - first);
        }
        event
    };
    let events: Vec<Value> = events.into_iter().map(since).collect();
    json!({ "displayTimeUnit": "ms", "traceEvents": events })
}
