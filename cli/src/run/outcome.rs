//! The outcome of a run.

use moesaic::Tensors;
use serde_json::Value;
use std::time::Duration;

/// The results of a run, with its times.
pub struct RunOutcome {
    pub outputs: Tensors<'static>,
    /// The time to make the layer.
    pub built: Duration,
    /// The time to run the layer.
    pub ran: Duration,
    /// Whether the layer has a capacity.
    pub limited: bool,
    /// The device memory of intermediates, in bytes.
    pub workspace: u64,
    /// The trace of launches and exchanges of all ranks; empty if it was not requested.
    pub trace: Vec<Value>,
}
