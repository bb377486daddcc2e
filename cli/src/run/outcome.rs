//! What a run gave.

use moesaic::Tensors;
use serde_json::Value;
use std::time::Duration;

/// Results, and what it took.
pub struct Outcome {
    pub outputs: Tensors<'static>,
    /// To make the layer.
    pub built: Duration,
    /// To run it.
    pub ran: Duration,
    /// Whether the layer has a capacity.
    pub limited: bool,
    /// Bytes of device memory of intermediates.
    pub workspace: u64,
    /// When launches ran and exchanges were in flight, of all ranks; empty if nobody asked.
    pub trace: Vec<Value>,
}
