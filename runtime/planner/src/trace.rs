//! Export of a simulated step to Chrome's trace format.

use crate::Simulated;
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// Returns a trace with a lane for each stream of each distinct rank. Times are in microseconds.
pub fn chrome(timeline: &[Simulated]) -> Value {
    let lane = |stream: &str| u8::from(stream == "exchange");
    let lanes: BTreeSet<(usize, &str)> = timeline.iter().map(|e| (e.rank, e.stream)).collect();
    let ranks: BTreeSet<usize> = lanes.iter().map(|(rank, _)| *rank).collect();
    let named = ranks.iter().map(|rank| {
        let name = format!("rank {rank}");
        json!({ "ph": "M", "name": "process_name", "pid": rank, "args": { "name": name } })
    });
    let streams = lanes.iter().map(|(rank, stream)| {
        let tid = lane(stream);
        json!({ "ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": { "name": stream } })
    });
    let events = timeline.iter().map(|event| {
        json!({
            "ph": "X",
            "name": event.name,
            "cat": event.stream,
            "pid": event.rank,
            "tid": lane(event.stream),
            "ts": event.start * 1e6,
            "dur": (event.end - event.start) * 1e6,
        })
    });
    json!({
        "displayTimeUnit": "ms",
        "otherData": { "what": "simulated by moesaic plan: nothing here was measured" },
        "traceEvents": named.chain(streams).chain(events).collect::<Vec<_>>(),
    })
}
