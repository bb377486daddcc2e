//! The operations of a core as handles.

use super::Shared;
use crate::handle::{Handle, InFlight, Polled};
use std::sync::Arc;
use std::time::Instant;

/// An operation over a transport.
struct OfCore {
    core: Arc<Shared>,
    id: u64,
    ended: Option<Instant>,
}

impl InFlight for OfCore {
    fn poll(&mut self) -> Polled {
        let mut core = self.core.lock();
        let moved = core.progress_for(self.id);
        let mut outcome = core.take(self.id);
        if outcome.is_none() && !moved {
            core.expire(self.id);
            outcome = core.take(self.id);
        }
        self.ended = outcome.as_ref().map(|ended| ended.at);
        Polled {
            moved,
            outcome: outcome.map(|ended| ended.outcome),
        }
    }

    fn ended(&self) -> Option<Instant> {
        self.ended
    }

    fn abandon(&mut self) {
        self.core.lock().abandon(self.id);
    }
}

/// Returns the handle of the operation `id` of a core.
pub(crate) fn handle(
    core: &Arc<Shared>,
    id: u64,
    operation: &'static str,
    sequence: u64,
) -> Handle {
    let core = Arc::clone(core);
    let work = OfCore {
        core,
        id,
        ended: None,
    };
    Handle::of(Box::new(work), operation, sequence)
}
